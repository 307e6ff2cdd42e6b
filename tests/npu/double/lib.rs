//! A double of the NPU's shim: the C ABI of `src/npu/shim.h` over attention on the CPU, by the kernel's own model
//! (`npu::tile::attend`). It says of itself that it is a double.
//!
//! `cargo build --example npu_double` puts `libnpu_double.so` into the folder `examples` of the build, and `Shim::open`
//! opens it as it opens the shim over XRT.
//!
//! It is stricter than an NPU. The device has its own copy of every buffer, which moves by a sync alone: without one, the
//! device computes with what was there before, and a new buffer's bytes are all 0xff: no parameters, and no numbers.
//! Flags, banks and sizes of buffers, the opcode and the instructions are checked at each run.
//!
//! Memory that another device shares is any file that can be mapped; no dma-buf is needed. The device has a copy of it
//! too, into which a part's sync moves that part alone. What Mesa's software Vulkan shares (`OPAQUE_FD`) is a file with a
//! header, and the memory begins after it.
//!
//! `NPU_DOUBLE` makes calls fail. It is read when the device is opened, and the calls on that device count from there:
//!
//! ```text
//! NPU_DOUBLE="run:2=timeout;load:1=enospc"
//!
//! CALL:WHICH=FAULT, with semicolons between several
//!   CALL    open, load (a kernel), bo (a buffer), import (of shared memory), run
//!   WHICH   2: the second call, once; 2+: that one and all after it. The first is 1
//!   FAULT   of open:  no-device, group, memlock
//!           of load:  enospc, memlock, xrt (a reason that no code has)
//!           of bo:    memlock
//!           of import: refused
//!           of run:   timeout (the deadline passes; every later call fails, as with XRT), state (the command ends and
//!                     failed), wrong (one number of the output is wrong), poison (the output is not written), hang (the
//!                     call never returns), exit (the process ends)
//! abi=7     the version of the interface that it tells
//! ```
//!
//! Each fault says a line on stderr when it strikes. Words that cannot be read end the process.
//!
//! `npu_double_attend` computes one dispatch from the addresses of its buffers. The fake kernel driver below the real XRT
//! (tests/npu/fake_amdxdna) calls it, so that there is one model of the kernel.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ffi::{CStr, c_char, c_void};
use std::fs::File;
use std::io::Write;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::Duration;

use half::bf16;
use memmap2::MmapRaw;
use unicorn::npu::abi;
use unicorn::npu::contract::{Job, PARAM_WORDS};
use unicorn::npu::tile::{self, Inputs};

// --- what fails -----------------------------------------------------------------------------------------

#[derive(Clone, Copy, PartialEq)]
enum Call {
    Open,
    Load,
    Bo,
    Import,
    Run,
}

const CALLS: [(&str, Call); 5] = [
    ("open", Call::Open),
    ("load", Call::Load),
    ("bo", Call::Bo),
    ("import", Call::Import),
    ("run", Call::Run),
];

#[derive(Clone, Copy, PartialEq)]
enum Effect {
    Fails(i32),
    Wrong,
    Poison,
    Hang,
    Exit,
}

const EFFECTS: [(&str, Effect, &[Call]); 12] = [
    ("no-device", Effect::Fails(abi::NO_DEVICE), &[Call::Open]),
    ("group", Effect::Fails(abi::GROUP), &[Call::Open]),
    ("memlock", Effect::Fails(abi::MEMLOCK), &[Call::Open, Call::Load, Call::Bo]),
    ("enospc", Effect::Fails(abi::NO_COLUMNS), &[Call::Load]),
    ("xrt", Effect::Fails(abi::XRT), &[Call::Load]),
    ("refused", Effect::Fails(abi::DMA_BUF), &[Call::Import]),
    ("timeout", Effect::Fails(abi::TIMEOUT), &[Call::Run]),
    ("state", Effect::Fails(abi::COMMAND_STATE), &[Call::Run]),
    ("wrong", Effect::Wrong, &[Call::Run]),
    ("poison", Effect::Poison, &[Call::Run]),
    ("hang", Effect::Hang, &[Call::Run]),
    ("exit", Effect::Exit, &[Call::Run]),
];

struct Fault {
    call: Call,
    /// Counted from 1, both included.
    first: u64,
    last: u64,
    effect: Effect,
    /// As it was given.
    text: String,
}

impl Fault {
    /// `run:2+=timeout`
    fn parse(text: &str) -> Option<Fault> {
        let (call, rest) = text.split_once(':')?;
        let (which, effect) = rest.split_once('=')?;
        let (first, last) = match which.strip_suffix('+') {
            Some(first) => (first.parse().ok()?, u64::MAX),
            None => (which.parse().ok()?, which.parse().ok()?),
        };
        let (_, call) = *CALLS.iter().find(|(name, _)| *name == call)?;
        let (_, effect, _) =
            *EFFECTS.iter().find(|(name, _, calls)| *name == effect && calls.contains(&call))?;
        (first >= 1).then(|| Fault { call, first, last, effect, text: text.to_owned() })
    }
}

/// The faults of a device, and how many of each call there were.
struct Faults {
    faults: Vec<Fault>,
    counts: [u64; CALLS.len()],
}

impl Faults {
    fn read() -> Faults {
        let text = words();
        let words =
            text.split(';').map(str::trim).filter(|word| !word.is_empty() && !word.starts_with("abi="));
        let faults = words.map(|word| {
            Fault::parse(word).unwrap_or_else(|| {
                say(&format!("{word:?} is no fault: expected CALL:WHICH=FAULT, see tests/npu/double/lib.rs"));
                std::process::abort()
            })
        });
        Faults { faults: faults.collect(), counts: [0; CALLS.len()] }
    }

    /// Counts one call.
    fn strike(&mut self, call: Call) -> Option<Effect> {
        let count = &mut self.counts[call as usize];
        *count += 1;
        let fault = self.faults.iter().find(|f| f.call == call && (f.first..=f.last).contains(count))?;
        say(&fault.text);
        Some(fault.effect)
    }
}

fn words() -> String {
    std::env::var("NPU_DOUBLE").unwrap_or_default()
}

/// Writes a line to standard error. It is no error if standard error cannot be written.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "npu_double: {line}");
}

/// What a call returns that did not succeed: a code, and a line.
struct Refusal(i32, String);

fn refuse<T>(code: i32, why: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal(code, why.into()))
}

impl Effect {
    /// What the call returns where a fault strikes that is a refusal.
    fn check(effect: Option<Effect>) -> Result<(), Refusal> {
        match effect {
            Some(Effect::Fails(code)) => refuse(code, "NPU_DOUBLE says so"),
            _ => Ok(()),
        }
    }
}

// --- the objects ----------------------------------------------------------------------------------------

struct Device {
    faults: Faults,
    /// A command did not end in time.
    lost: bool,
}

struct Kernel {
    device: *mut Device,
    name: String,
}

/// A buffer, or a part of one.
struct Bo {
    device: *mut Device,
    /// The flags and the bank of what was opened. Imported memory has none.
    place: Option<(u32, u32)>,
    memory: Rc<Memory>,
    /// Where it begins in the memory, and its bytes.
    offset: usize,
    bytes: usize,
}

/// What the host sees, and what the device has.
struct Memory {
    host: *mut u8,
    on_device: UnsafeCell<Vec<u8>>,
    /// The room that `host` points into, or the map of a file.
    _owner: Box<dyn Any>,
}

/// A byte of memory that was not written.
const UNWRITTEN: u8 = u8::MAX;

impl Memory {
    fn opened(bytes: usize) -> Memory {
        let mut words = vec![u64::from_ne_bytes([UNWRITTEN; 8]); bytes.div_ceil(8)];
        let host = words.as_mut_ptr().cast();
        Memory::new(host, bytes, Box::new(words))
    }

    /// Memory that another device shares as a file.
    fn imported(descriptor: i32, least: u64) -> Result<Memory, Refusal> {
        let lost = |error: std::io::Error| Refusal(abi::DMA_BUF, format!("descriptor {descriptor}: {error}"));
        // SAFETY: the caller holds the descriptor, and it is cloned before this function returns.
        let file = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let file = File::from(file.try_clone_to_owned().map_err(lost)?);
        let skipped = header_of(&file, descriptor).map_err(lost)?;
        let bytes = file.metadata().map_err(lost)?.len().saturating_sub(skipped);
        if bytes < least.max(1) {
            return refuse(abi::DMA_BUF, format!("the shared memory has {bytes} bytes, not {least}"));
        }
        let map = MmapRaw::map_raw(&file).map_err(lost)?;
        // SAFETY: the file is longer than what is skipped.
        let host = unsafe { map.as_mut_ptr().add(skipped as usize) };
        Ok(Memory::new(host, bytes as usize, Box::new(map)))
    }

    fn new(host: *mut u8, bytes: usize, owner: Box<dyn Any>) -> Memory {
        Memory { host, on_device: UnsafeCell::new(vec![UNWRITTEN; bytes]), _owner: owner }
    }

    fn bytes(&self) -> usize {
        // SAFETY: the double is called by one thread at a time, and nothing borrowed of it is left.
        unsafe { (*self.on_device.get()).len() }
    }
}

/// The bytes before the memory in a file that Mesa's software Vulkan shares: two words, the file's size and then this, and
/// more (`src/util/os_memory_fd.c` in Mesa). Other files have none.
fn header_of(file: &File, descriptor: i32) -> std::io::Result<u64> {
    let name = std::fs::read_link(format!("/proc/self/fd/{descriptor}"))?;
    if !name.to_string_lossy().contains("llvmpipe memory fd") {
        return Ok(0);
    }
    let mut words = [0; 16];
    file.read_exact_at(&mut words, 0)?;
    Ok(u64::from_ne_bytes(words[8..].try_into().expect("eight bytes")))
}

impl Bo {
    /// The device's copy.
    fn on_device<T: bytemuck::Pod>(&self) -> Vec<T> {
        // SAFETY: the double is called by one thread at a time, and nothing borrowed of it is left.
        let all = unsafe { &*self.memory.on_device.get() };
        let mut numbers = vec![T::zeroed(); self.bytes / size_of::<T>()];
        let into: &mut [u8] = bytemuck::cast_slice_mut(&mut numbers);
        into.copy_from_slice(&all[self.offset..][..into.len()]);
        numbers
    }

    fn write_on_device(&self, bytes: &[u8]) {
        // SAFETY: as in `on_device`.
        let all = unsafe { &mut *self.memory.on_device.get() };
        all[self.offset..][..bytes.len()].copy_from_slice(bytes);
    }

    fn sync_to_device(&self) {
        // SAFETY: the host's copy has the bytes of the device's, in which every part lies, and no other thread of this
        // process writes there during the call.
        let host = unsafe { std::slice::from_raw_parts(self.memory.host.add(self.offset), self.bytes) };
        self.write_on_device(host);
    }

    fn sync_from_device(&self) {
        let bytes: Vec<u8> = self.on_device();
        // SAFETY: as in `sync_to_device`.
        unsafe { self.memory.host.add(self.offset).copy_from_nonoverlapping(bytes.as_ptr(), self.bytes) };
    }
}

/// The bank of an argument. XRT's have no order that a program could guess, and neither do these.
fn group_of(argument: i32) -> u32 {
    0x10000 + (argument as u32 * 7) % 11
}

/// A dispatch of the double.
struct Command<'a> {
    opcode: u64,
    instructions: &'a Bo,
    words: u32,
    buffers: Vec<*const Bo>,
    deadline: Duration,
}

impl Command<'_> {
    fn run(&self, effect: Option<Effect>) -> Result<u32, Refusal> {
        let refuse = |why: String| refuse(abi::BAD_ARGUMENT, why);
        if self.opcode != abi::OPCODE {
            return refuse(format!("the opcode is {}, not {}", self.opcode, abi::OPCODE));
        }
        if self.buffers.len() != 5 {
            return refuse(format!("there are {} data buffers, not 5", self.buffers.len()));
        }
        // SAFETY: the caller opened them.
        let data: Vec<&Bo> = self.buffers.iter().map(|bo| unsafe { &**bo }).collect();
        let arguments = (abi::FIRST_BUFFER_ARGUMENT..).zip(&data);
        let all = std::iter::once((abi::INSTRUCTIONS_ARGUMENT, abi::CACHEABLE, self.instructions))
            .chain(arguments.map(|(argument, bo)| (argument, abi::HOST_ONLY, *bo)));
        for (argument, flags, bo) in all {
            let expected = (flags, group_of(argument));
            let may_be_imported = flags == abi::HOST_ONLY;
            if bo.place.map_or(!may_be_imported, |found| found != expected) {
                let found = bo.place;
                return refuse(format!(
                    "argument {argument} has the flags and bank {found:?}, not {expected:?}"
                ));
            }
        }
        if self.words == 0 || self.instructions.bytes != self.words as usize * 4 {
            return refuse(format!(
                "{} words of instructions in {} bytes",
                self.words, self.instructions.bytes
            ));
        }
        match effect {
            Some(Effect::Hang) => loop {
                std::thread::park();
            },
            Some(Effect::Exit) => std::process::exit(86),
            Some(Effect::Fails(abi::TIMEOUT)) => {
                std::thread::sleep(self.deadline);
                return Ok(abi::STATE_TIMEOUT);
            }
            Some(Effect::Fails(_)) => return Ok(abi::STATE_ERROR),
            _ => {}
        }
        if self.instructions.on_device::<u32>().contains(&u32::MAX) {
            say("the device reads instructions that were not written: they were not synced");
            return Ok(abi::STATE_ERROR);
        }
        let job = match Job::from_words(&data[4].on_device::<u32>()) {
            Ok(job) => job,
            Err(error) => {
                say(&format!("the device refuses its parameters: {error}"));
                return Ok(abi::STATE_ERROR);
            }
        };
        for (n, (bo, expected)) in data.iter().zip(job.layout().bytes()).enumerate() {
            if bo.bytes as u64 != expected {
                return refuse(format!("bo{n} has {} bytes, and the job's has {expected}", bo.bytes));
            }
        }
        let [queries, keys, values] = [0, 1, 2].map(|n| data[n].on_device::<bf16>());
        let mut output = tile::attend(&job, &Inputs { queries, keys, values });
        match effect {
            Some(Effect::Wrong) => output[0] += 1.0,
            Some(Effect::Poison) => return Ok(abi::STATE_COMPLETED),
            _ => {}
        }
        data[3].write_on_device(bytemuck::cast_slice(&output));
        Ok(abi::STATE_COMPLETED)
    }
}

/// Computes one dispatch from the addresses of its five buffers, as the kernel does. Returns 0; -1 if the parameters are
/// none, and -2 if the buffers have other sizes than those say.
///
/// # Safety
///
/// Each of the five buffers has its number of bytes.
#[unsafe(no_mangle)] // SAFETY: no other function of a process has the name.
unsafe extern "C" fn npu_double_attend(buffers: *const *mut u8, bytes: *const u64) -> i32 {
    // SAFETY: the caller has five of each.
    let (buffers, bytes) =
        unsafe { (std::slice::from_raw_parts(buffers, 5), std::slice::from_raw_parts(bytes, 5)) };
    let mut words = [0u32; PARAM_WORDS];
    if bytes[4] < size_of_val(&words) as u64 {
        return -2;
    }
    // SAFETY: the buffer has so many bytes.
    unsafe { buffers[4].copy_to_nonoverlapping(words.as_mut_ptr().cast(), size_of_val(&words)) };
    let Ok(job) = Job::from_words(&words) else { return -1 };
    let layout = job.layout().bytes();
    if layout.iter().zip(bytes).any(|(least, bytes)| bytes < least) {
        return -2;
    }
    let [queries, keys, values] = [0, 1, 2].map(|n| {
        let mut numbers = vec![bf16::ZERO; (layout[n] / 2) as usize];
        // SAFETY: the buffer has at least the bytes of the layout.
        unsafe { buffers[n].copy_to_nonoverlapping(numbers.as_mut_ptr().cast(), layout[n] as usize) };
        numbers
    });
    let output = tile::attend(&job, &Inputs { queries, keys, values });
    // SAFETY: as above, and the output has the layout's size.
    unsafe { buffers[3].copy_from_nonoverlapping(output.as_ptr().cast(), layout[3] as usize) };
    0
}

// --- the C ABI ------------------------------------------------------------------------------------------

/// Writes a line that ends in a 0.
fn write(text: *mut c_char, line: &str) {
    let bytes = &line.as_bytes()[..line.len().min(abi::TEXT - 1)];
    // SAFETY: the caller has room for a text of shim.h.
    unsafe {
        text.copy_from_nonoverlapping(bytes.as_ptr().cast(), bytes.len());
        text.add(bytes.len()).write(0);
    }
}

fn answer(error: *mut c_char, result: Result<(), Refusal>) -> i32 {
    match result {
        Ok(()) => abi::OK,
        Err(Refusal(code, why)) => {
            write(error, &why);
            code
        }
    }
}

/// A device that the caller opened, unless a command on it is lost.
fn live(device: *mut Device) -> Result<&'static mut Device, Refusal> {
    // SAFETY: the caller opened it, and calls with one thread at a time.
    let device = unsafe { &mut *device };
    if device.lost { refuse(abi::TIMEOUT, "an earlier command did not end in time") } else { Ok(device) }
}

#[unsafe(no_mangle)] // SAFETY: no other function of a process has the name.
extern "C" fn unicorn_npu_abi() -> u32 {
    let words = words();
    let told = words.split(';').find_map(|word| word.trim().strip_prefix("abi=")?.parse().ok());
    told.unwrap_or(abi::ABI)
}

#[unsafe(no_mangle)] // SAFETY: no other function of a process has the name.
extern "C" fn unicorn_npu_is_double() -> i32 {
    1
}

#[unsafe(no_mangle)] // SAFETY: no other function of a process has the name.
unsafe extern "C" fn unicorn_npu_xrt_version(version: *mut c_char, _error: *mut c_char) -> i32 {
    write(version, "none");
    abi::OK
}

#[unsafe(no_mangle)] // SAFETY: no other function of a process has the name.
unsafe extern "C" fn unicorn_npu_device_open(
    index: u32,
    device: *mut *mut Device,
    name: *mut c_char,
    error: *mut c_char,
) -> i32 {
    let mut faults = Faults::read();
    let result = Effect::check(faults.strike(Call::Open)).and_then(|()| match index {
        0 => Ok(()),
        _ => refuse(abi::NO_DEVICE, "there is one device"),
    });
    if result.is_ok() {
        write(name, "a double, which computes on the CPU");
        // As XRT does: such lines must not get among a program's results.
        let _ = writeln!(std::io::stdout(), "npu_double: a line on the standard output");
        // SAFETY: the caller has room for it.
        unsafe { *device = Box::into_raw(Box::new(Device { faults, lost: false })) };
    }
    answer(error, result)
}

#[unsafe(no_mangle)] // SAFETY: no other function of a process has the name.
unsafe extern "C" fn unicorn_npu_kernel_open(
    device: *mut Device,
    xclbin: *const c_char,
    name: *const c_char,
    kernel: *mut *mut Kernel,
    error: *mut c_char,
) -> i32 {
    // SAFETY: both are texts of the caller's.
    let (xclbin, name) = unsafe { (CStr::from_ptr(xclbin), CStr::from_ptr(name)) };
    let (xclbin, name) = (xclbin.to_string_lossy(), name.to_string_lossy().into_owned());
    let result = live(device).and_then(|live| {
        Effect::check(live.faults.strike(Call::Load))?;
        if !std::path::Path::new(&*xclbin).is_file() {
            return refuse(abi::XRT, format!("there is no {xclbin}"));
        }
        if name.as_bytes() != abi::KERNEL_NAME.to_bytes() {
            return refuse(abi::XRT, format!("the xclbin has no kernel {name}"));
        }
        // SAFETY: the caller has room for it.
        unsafe { *kernel = Box::into_raw(Box::new(Kernel { device, name })) };
        Ok(())
    });
    answer(error, result)
}

#[unsafe(no_mangle)] // SAFETY: no other function of a process has the name.
unsafe extern "C" fn unicorn_npu_group_id(
    kernel: *mut Kernel,
    argument: i32,
    group: *mut u32,
    error: *mut c_char,
) -> i32 {
    // SAFETY: the caller opened the kernel.
    let kernel = unsafe { &*kernel };
    let result = live(kernel.device).and_then(|_| match argument {
        abi::INSTRUCTIONS_ARGUMENT | 3..=7 => {
            // SAFETY: the caller has room for it.
            unsafe { *group = group_of(argument) };
            Ok(())
        }
        _ => refuse(abi::XRT, format!("argument {argument} of {} is no buffer", kernel.name)),
    });
    answer(error, result)
}

#[unsafe(no_mangle)] // SAFETY: no other function of a process has the name.
unsafe extern "C" fn unicorn_npu_bo_open(
    device: *mut Device,
    bytes: u64,
    flags: u32,
    group: u32,
    bo: *mut *mut Bo,
    mapped: *mut *mut c_void,
    error: *mut c_char,
) -> i32 {
    let result = live(device).and_then(|live| {
        Effect::check(live.faults.strike(Call::Bo))?;
        if !(1..=1 << 32).contains(&bytes) || !matches!(flags, abi::CACHEABLE | abi::HOST_ONLY) {
            return refuse(abi::BAD_ARGUMENT, format!("a buffer of {bytes} bytes with the flags {flags}"));
        }
        let (bytes, place) = (bytes as usize, Some((flags, group)));
        let memory = Rc::new(Memory::opened(bytes));
        // SAFETY: the caller has room for both.
        unsafe {
            *mapped = memory.host.cast();
            *bo = Box::into_raw(Box::new(Bo { device, place, memory, offset: 0, bytes }));
        }
        Ok(())
    });
    answer(error, result)
}

#[unsafe(no_mangle)] // SAFETY: no other function of a process has the name.
unsafe extern "C" fn unicorn_npu_bo_import(
    device: *mut Device,
    descriptor: i32,
    bytes: u64,
    bo: *mut *mut Bo,
    error: *mut c_char,
) -> i32 {
    let result = live(device).and_then(|live| {
        Effect::check(live.faults.strike(Call::Import))?;
        let memory = Rc::new(Memory::imported(descriptor, bytes)?);
        let bytes = memory.bytes();
        // SAFETY: the caller has room for it.
        unsafe { *bo = Box::into_raw(Box::new(Bo { device, place: None, memory, offset: 0, bytes })) };
        Ok(())
    });
    answer(error, result)
}

#[unsafe(no_mangle)] // SAFETY: no other function of a process has the name.
unsafe extern "C" fn unicorn_npu_bo_part(
    whole: *mut Bo,
    offset: u64,
    bytes: u64,
    bo: *mut *mut Bo,
    error: *mut c_char,
) -> i32 {
    // SAFETY: the caller opened it.
    let whole = unsafe { &*whole };
    let result = live(whole.device).and_then(|_| {
        let end = offset.checked_add(bytes).filter(|end| bytes > 0 && *end <= whole.bytes as u64);
        if end.is_none() {
            let what = format!("{bytes} bytes from {offset} on, of a buffer of {}", whole.bytes);
            return refuse(abi::BAD_ARGUMENT, what);
        }
        let (offset, bytes) = (whole.offset + offset as usize, bytes as usize);
        let part =
            Bo { device: whole.device, place: whole.place, memory: whole.memory.clone(), offset, bytes };
        // SAFETY: the caller has room for it.
        unsafe { *bo = Box::into_raw(Box::new(part)) };
        Ok(())
    });
    answer(error, result)
}

#[unsafe(no_mangle)] // SAFETY: no other function of a process has the name.
unsafe extern "C" fn unicorn_npu_bo_sync(bo: *mut Bo, direction: u32, error: *mut c_char) -> i32 {
    // SAFETY: the caller opened it.
    let bo = unsafe { &*bo };
    let result = live(bo.device).and_then(|_| match direction {
        abi::TO_DEVICE => {
            bo.sync_to_device();
            Ok(())
        }
        abi::FROM_DEVICE => {
            bo.sync_from_device();
            Ok(())
        }
        _ => refuse(abi::BAD_ARGUMENT, format!("{direction} is no direction")),
    });
    answer(error, result)
}

#[unsafe(no_mangle)] // SAFETY: no other function of a process has the name.
unsafe extern "C" fn unicorn_npu_run(
    kernel: *mut Kernel,
    opcode: u64,
    instructions: *mut Bo,
    words: u32,
    buffers: *const *const Bo,
    count: u32,
    deadline_ms: u32,
    state: *mut u32,
    error: *mut c_char,
) -> i32 {
    // SAFETY: the caller opened the kernel and all buffers, and has room for the state.
    let (kernel, instructions, buffers) = unsafe {
        *state = 0;
        (&*kernel, &*instructions, std::slice::from_raw_parts(buffers, count as usize).to_vec())
    };
    let result = live(kernel.device).and_then(|live| {
        let deadline = Duration::from_millis(deadline_ms.into());
        let command = Command { opcode, instructions, words, buffers, deadline };
        let ended = command.run(live.faults.strike(Call::Run))?;
        // SAFETY: as above.
        unsafe { *state = ended };
        match ended {
            abi::STATE_COMPLETED => Ok(()),
            abi::STATE_TIMEOUT => {
                live.lost = true;
                refuse(abi::TIMEOUT, format!("the command did not end within {deadline_ms} ms"))
            }
            _ => refuse(abi::COMMAND_STATE, format!("the command's state is {ended}")),
        }
    });
    answer(error, result)
}

#[unsafe(no_mangle)] // SAFETY: no other function of a process has the name.
unsafe extern "C" fn unicorn_npu_bo_close(bo: *mut Bo) {
    close(bo);
}

#[unsafe(no_mangle)] // SAFETY: no other function of a process has the name.
unsafe extern "C" fn unicorn_npu_kernel_close(kernel: *mut Kernel) {
    close(kernel);
}

#[unsafe(no_mangle)] // SAFETY: no other function of a process has the name.
unsafe extern "C" fn unicorn_npu_device_close(device: *mut Device) {
    close(device);
}

fn close<T>(object: *mut T) {
    if !object.is_null() {
        // SAFETY: the caller opened it, and uses it no more.
        drop(unsafe { Box::from_raw(object) });
    }
}
