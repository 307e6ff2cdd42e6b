//! An allocator that counts the bytes that each thread holds, so that tests can limit the memory of parsers.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, with a count of the bytes that each thread holds.
struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

impl Counting {
    fn add(bytes: isize) {
        // A thread that is ending has no counter, and nothing is measured there.
        let _ = HELD.try_with(|held| {
            held.set(held.get() + bytes);
            let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
        });
    }
}

// SAFETY: each call is passed to the system's allocator unchanged, and counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: the caller upholds the contract of `GlobalAlloc`, which is that of `System`.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::add(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: the caller upholds the contract of `GlobalAlloc`, which is that of `System`.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::add(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    // SAFETY: the caller upholds the contract of `GlobalAlloc`, which is that of `System`.
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        Self::add(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    // SAFETY: the caller upholds the contract of `GlobalAlloc`, which is that of `System`.
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::add(size as isize - layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `run`. Returns its result, and the peak number of bytes that this thread held in addition to those before.
pub fn peak_allocation<T>(run: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.get();
    PEAK.set(before);
    let result = run();
    (result, (PEAK.get() - before).max(0) as usize)
}

/// The number of bytes that a parser may hold in addition to 12 times the size of its input.
pub const PARSER_BYTES: usize = 64 << 10;

/// Runs `run` on damaged input of `len` bytes. Returns its result and its peak number of bytes. Panics if the peak is
/// larger than 12 times `len` plus `fixed`. `what` names the input.
pub fn bounded_allocation<T>(
    len: usize,
    fixed: usize,
    what: impl std::fmt::Display,
    run: impl FnOnce() -> T,
) -> (T, usize) {
    let (result, peak) = peak_allocation(run);
    assert!(peak <= 12 * len + fixed, "{what}: {peak} bytes for {len}");
    (result, peak)
}

mod tests {
    #[test]
    fn allocations_of_a_thread_are_counted() {
        let (kept, peak) = super::peak_allocation(|| {
            drop(vec![1u8; 1 << 20]);
            vec![0u8; 1 << 10]
        });
        assert_eq!(kept.len(), 1 << 10);
        assert!((1 << 20..2 << 20).contains(&peak), "{peak}");
        assert!(super::peak_allocation(|| drop(kept)).1 < 1 << 10);
    }
}
