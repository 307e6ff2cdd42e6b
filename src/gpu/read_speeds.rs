//! The file with the speeds at which a device reads its heaps. `model::heaps` measures them.
//!
//! A speed belongs to a heap of a certain size: if the firmware or the kernel gives the GPU another share of the memory,
//! the heaps have other sizes, and the file counts as absent.

use serde::{Deserialize, Serialize};

use super::cache::Cache;
use super::info::{HeapInfo, ReadSpeed};

/// The cached file's name.
const CACHE_NAME: &str = "heap-speeds";

/// A heap of the file, which has all heaps in the driver's order.
#[derive(Serialize, Deserialize)]
struct Entry {
    size_bytes: u64,
    read: Option<ReadSpeed>,
}

/// The stored speed of each heap; no speeds if the file does not exist or is of other heaps.
pub(super) fn stored(cache: &Cache, heaps: &[HeapInfo]) -> Vec<Option<ReadSpeed>> {
    let entries = cache.read(CACHE_NAME).and_then(|data| serde_json::from_slice::<Vec<Entry>>(&data).ok());
    let is_of_heaps = |entries: &Vec<Entry>| {
        let sizes = heaps.iter().map(|heap| heap.size_bytes);
        entries.iter().map(|entry| entry.size_bytes).eq(sizes)
            && entries.iter().flat_map(|entry| entry.read).all(|read| read.bytes_per_s > 0)
    };
    match entries.filter(is_of_heaps) {
        Some(entries) => entries.into_iter().map(|entry| entry.read).collect(),
        None => vec![None; heaps.len()],
    }
}

/// Stores the speed of each heap in `reads`.
pub(super) fn store(cache: &Cache, heaps: &[HeapInfo], reads: &[Option<ReadSpeed>]) {
    let entry =
        |(heap, read): (&HeapInfo, &Option<ReadSpeed>)| Entry { size_bytes: heap.size_bytes, read: *read };
    let entries: Vec<Entry> = heaps.iter().zip(reads).map(entry).collect();
    cache.write(CACHE_NAME, &serde_json::to_vec(&entries).expect("plain data"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heap(size_bytes: u64) -> HeapInfo {
        HeapInfo {
            device_local: true,
            host_visible: true,
            usable: true,
            size_bytes,
            free_bytes: size_bytes,
            read: None,
        }
    }

    #[test]
    fn speeds_are_of_heaps_with_the_same_sizes_only() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::of_folder(Some(folder.path().to_owned()), "a-driver".into());
        let heaps = [heap(3 << 30), heap(6 << 30)];
        let speed = ReadSpeed { bytes_per_s: 71_000_000_000, measured_at: 1_700_000_000 };
        assert_eq!(stored(&cache, &heaps), [None, None], "there is no file");
        for reads in [[Some(speed), None], [None, Some(speed)], [None, None]] {
            store(&cache, &heaps, &reads);
            assert_eq!(stored(&cache, &heaps), reads);
        }
        store(&cache, &heaps, &[Some(speed), Some(speed)]);
        // The firmware gives the GPU another share of the memory.
        assert_eq!(stored(&cache, &[heap(3 << 30), heap(5 << 30)]), [None, None]);
        assert_eq!(stored(&cache, &[heap(3 << 30)]), [None]);
        let other_driver = Cache::of_folder(Some(folder.path().to_owned()), "another-driver".into());
        assert_eq!(stored(&other_driver, &heaps), [None, None]);
        assert_eq!(stored(&cache, &heaps), [Some(speed), Some(speed)]);

        for damaged in ["{}", "[]", "[{\"size_bytes\": 1}"] {
            cache.write(CACHE_NAME, damaged.as_bytes());
            assert_eq!(stored(&cache, &heaps), [None, None], "{damaged}");
        }
        store(&cache, &heaps, &[Some(ReadSpeed { bytes_per_s: 0, ..speed }), Some(speed)]);
        assert_eq!(stored(&cache, &heaps), [None, None], "no heap is read at 0 bytes per second");
    }
}
