//! The NPU over XRT, through `libunicorn_npu.so` (`shim.cpp`). This shared object is loaded on demand, so the program
//! starts on a machine without XRT, and the error there says what is missing.
//!
//! This module decides what a dispatch needs: the instructions are in a cacheable buffer of bank `group_id(1)`, the
//! data in host-only buffers of banks `group_id(3)` to `group_id(7)`, the opcode is 3, and every buffer is synced in
//! the direction that its data moves, before the run and after it.
//!
//! Q, K, V and O may also be in memory that the GPU shares. A dispatch then uses parts of it, created only for that
//! dispatch, and syncs the parts like its own buffers. A kernel that has only such dispatches has no bo0 to bo3.
//!
//! After a dispatch that did not end in time, the device may still read and write the buffers. The shim keeps them
//! until the process ends, and returns the same error from every later call. The caller must then end the process.

use std::ffi::{CStr, CString, c_char};
use std::fs;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::Duration;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use rustix::process::{Resource, getrlimit};

use super::abi::{self, Functions};
use super::contract::{Bucket, Job, Layout, Shape};
use super::error::{NpuCode, NpuError};
use super::marks;
use super::transport::{KernelFiles, NpuFacts, NpuTransport, SHARED_ALIGN};

/// The name of the file in the build folder, and the folder where it is installed.
pub const FILE: &str = "libunicorn_npu.so";

/// The file name of XRT's library, which 2.13 and all later versions share.
const XRT: &str = "libxrt_coreutil.so.2";

/// The data buffers of a dispatch: Q, K, V, O, and then the parameters.
const BUFFERS: usize = ARRAYS + 1;
const ARRAYS: usize = 4;
const OUTPUT: usize = 3;

/// An NPU that is used through the shim.
pub struct Shim {
    functions: Functions,
    facts: NpuFacts,
    // Its buffers and kernels must be closed before the device.
    kernels: Vec<Option<Loaded>>,
    shared: Option<[Shared; ARRAYS]>,
    device: Owned<abi::Device>,
}

// SAFETY: any thread may call the shim's functions, but only one at a time. The objects that they open can be used only
// through `&mut self`.
unsafe impl Send for Shim {}

struct Loaded {
    shape: Shape,
    bucket: Bucket,
    /// Q, K, V and O, after the first dispatch that copied its arrays. They must be closed before the kernel.
    arrays: Option<[Buffer; ARRAYS]>,
    program: Program,
}

/// The objects that every dispatch of a kernel uses.
struct Program {
    words: u32,
    // They must be closed before the kernel.
    instructions: Buffer,
    parameters: Buffer,
    kernel: Owned<abi::Kernel>,
}

/// An object that the shim opened. Dropping this closes it.
struct Owned<T> {
    raw: *mut T,
    close: unsafe extern "C" fn(*mut T),
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: the shim opened it, and no code uses it any longer. The library is never unloaded.
        unsafe { (self.close)(self.raw) }
    }
}

/// A buffer, and the address of its bytes in this process.
struct Buffer {
    bo: Owned<abi::Bo>,
    mapped: *mut u8,
    bytes: usize,
}

/// Memory of another device. Dispatches use parts of it.
struct Shared {
    bo: Owned<abi::Bo>,
    bytes: u64,
}

impl Buffer {
    fn write(&mut self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes);
        // SAFETY: the shim mapped this number of bytes, which no slice of this program overlaps; no command is in
        // progress.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.mapped, self.bytes) }
    }

    fn write_word(&mut self, offset: u64, word: u32) {
        let offset = usize::try_from(offset).expect("it is mapped");
        assert!(offset.checked_add(size_of_val(&word)).is_some_and(|end| end <= self.bytes));
        // SAFETY: as in `write`, and the word is within the bytes.
        unsafe { self.mapped.add(offset).cast::<u32>().write_unaligned(word) }
    }

    fn read(&self, bytes: &mut [u8]) {
        assert_eq!(bytes.len(), self.bytes);
        // SAFETY: as in `write`.
        unsafe { ptr::copy_nonoverlapping(self.mapped, bytes.as_mut_ptr(), self.bytes) }
    }
}

impl Shim {
    /// The shim in the program's folder, as after a build, or otherwise in the folder of `make install`.
    pub fn path(program: &Path) -> PathBuf {
        let folder = program.parent().unwrap_or(Path::new("."));
        let built = folder.join(FILE);
        if built.exists() { built } else { folder.join("../lib/unicorn").join(FILE) }
    }

    /// Loads a shim, and opens the machine's first NPU.
    pub fn open(path: &Path) -> Result<Shim, NpuError> {
        let library = load(path)?;
        let shown = path.display();
        // SAFETY: the function has this type in every version of the interface.
        let abi =
            unsafe { library.get::<unsafe extern "C" fn() -> u32>(b"unicorn_npu_abi\0").map(|abi| abi()) };
        let mismatch = |what: String| NpuError::new(NpuCode::ShimMismatch, what);
        let abi =
            abi.map_err(|_| mismatch(format!("{shown} is no shim of this program: `make npu-shim`")))?;
        if abi != abi::ABI {
            return Err(mismatch(format!(
                "{shown} is of another version of this program: its interface is {abi}, not {}: `make npu-shim`",
                abi::ABI
            )));
        }
        // XRT has threads. If it were unloaded, their code would be gone.
        let library = ManuallyDrop::new(libloading::Library::from(library));
        // SAFETY: the version promises the types of `shim.h`, and the library stays loaded.
        let functions = unsafe { Functions::of(&library) };
        let functions = functions.map_err(|error| mismatch(format!("{shown}: {error}: `make npu-shim`")))?;

        let mut version = Text::new();
        // SAFETY: the texts have the size that `shim.h` requires.
        called(|error| unsafe { (functions.xrt_version)(version.room(), error) })?;
        let (mut raw, mut name) = (ptr::null_mut(), Text::new());
        // SAFETY: as above, and `raw` is written before it is read.
        called(|error| unsafe { (functions.device_open)(0, &mut raw, name.room(), error) })?;
        let device = Owned { raw, close: functions.device_close };
        // SAFETY: the function has no arguments.
        let is_double = unsafe { (functions.is_double)() } != 0;
        let facts = NpuFacts { xrt: version.read(), device: name.read(), is_double };
        Ok(Shim { functions, facts, kernels: Vec::new(), shared: None, device })
    }
}

impl NpuTransport for Shim {
    fn facts(&self) -> &NpuFacts {
        &self.facts
    }

    fn load(&mut self, files: &KernelFiles) -> Result<usize, NpuError> {
        let bad =
            |what: &str| NpuError::new(NpuCode::KernelInvalid, format!("{}: {what}", files.xclbin.display()));
        let words = u32::try_from(files.instructions.len()).map_err(|_| bad("too many instructions"))?;
        if words == 0 {
            return Err(bad("its instructions are empty"));
        }
        let path = CString::new(files.xclbin.as_os_str().as_bytes()).map_err(|_| bad("a path with a 0"))?;
        let mut raw = ptr::null_mut();
        let name = abi::KERNEL_NAME.as_ptr();
        // SAFETY: the device is open, both texts end in a 0, and `raw` is written before it is read.
        called(|error| unsafe {
            (self.functions.kernel_open)(self.device.raw, path.as_ptr(), name, &mut raw, error)
        })?;
        let kernel = Owned { raw, close: self.functions.kernel_close };
        let Shim { functions, device, .. } = self;
        let open = |argument, flags, bytes| buffer(functions, device, &kernel, argument, flags, bytes);
        let mut instructions = open(abi::INSTRUCTIONS_ARGUMENT, abi::CACHEABLE, u64::from(words) * 4)?;
        instructions.write(bytemuck::cast_slice(&files.instructions));
        sync(functions, &instructions.bo, abi::TO_DEVICE)?;
        let (shape, bucket) = (files.shape, files.bucket);
        let argument = abi::FIRST_BUFFER_ARGUMENT + ARRAYS as i32;
        let parameters = open(argument, abi::HOST_ONLY, Layout::of(shape, bucket).bytes()[ARRAYS])?;
        let program = Program { words, instructions, parameters, kernel };
        self.kernels.push(Some(Loaded { shape, bucket, arrays: None, program }));
        Ok(self.kernels.len() - 1)
    }

    fn unload(&mut self, kernel: usize) -> Result<(), NpuError> {
        let loaded = self.kernels.get_mut(kernel).and_then(Option::take);
        loaded.map(drop).ok_or_else(|| not_loaded(kernel))
    }

    fn share(&mut self, buffers: [(OwnedFd, u64); ARRAYS]) -> Result<(), NpuError> {
        // After an error nothing is shared, instead of a mix of old and new memory.
        self.shared = None;
        // The buffers for the self-test's copies are locked memory, and so is imported memory.
        self.kernels.iter_mut().flatten().for_each(|loaded| loaded.arrays = None);
        let mut shared = Vec::with_capacity(ARRAYS);
        for (descriptor, bytes) in &buffers {
            let mut raw = ptr::null_mut();
            // SAFETY: the device and the descriptor are open, and `raw` is written before it is read.
            called(|error| unsafe {
                (self.functions.bo_import)(self.device.raw, descriptor.as_raw_fd(), *bytes, &mut raw, error)
            })?;
            let bo = Owned { raw, close: self.functions.bo_close };
            shared.push(Shared { bo, bytes: *bytes });
        }
        self.shared = Some(shared.try_into().unwrap_or_else(|_| unreachable!("each buffer was imported")));
        Ok(())
    }

    fn attend(
        &mut self,
        kernel: usize,
        job: &Job,
        queries: &[u8],
        keys: &[u8],
        values: &[u8],
        output: &mut [u8],
        deadline: Duration,
    ) -> Result<(), NpuError> {
        let Shim { functions, device, kernels, .. } = self;
        let Loaded { arrays, program, .. } = loaded(kernels, kernel, job)?;
        let inputs = [(0, queries), (1, keys), (2, values)];
        let layout = job.layout().bytes();
        for (n, len) in inputs.iter().map(|(n, input)| (*n, input.len())).chain([(OUTPUT, output.len())]) {
            let expected = layout[n];
            if len as u64 != expected {
                return Err(bad_argument(format!("array {n} of a dispatch has {len} bytes, not {expected}")));
            }
        }
        let arrays = match arrays {
            Some(arrays) => arrays,
            none => {
                let open = |n: usize| {
                    let argument = abi::FIRST_BUFFER_ARGUMENT + n as i32;
                    buffer(functions, device, &program.kernel, argument, abi::HOST_ONLY, layout[n])
                };
                none.insert([open(0)?, open(1)?, open(2)?, open(3)?])
            }
        };
        for (n, input) in inputs {
            arrays[n].write(input);
            sync(functions, &arrays[n].bo, abi::TO_DEVICE)?;
        }
        marks::put(job, |at, word| arrays[OUTPUT].write_word(at, word));
        sync(functions, &arrays[OUTPUT].bo, abi::TO_DEVICE)?;
        run(functions, program, job, arrays.each_ref().map(|array| &array.bo), deadline)?;
        sync(functions, &arrays[OUTPUT].bo, abi::FROM_DEVICE)?;
        arrays[OUTPUT].read(output);
        marks::check(job, |at| bytemuck::pod_read_unaligned(&output[at as usize..][..4]))
    }

    fn attend_shared(
        &mut self,
        kernel: usize,
        job: &Job,
        offsets: [u64; ARRAYS],
        deadline: Duration,
    ) -> Result<(), NpuError> {
        let Shim { functions, kernels, shared, .. } = self;
        let program = &mut loaded(kernels, kernel, job)?.program;
        let shared = shared.as_ref().ok_or_else(|| bad_argument("no memory is shared".into()))?;
        let layout = job.layout().bytes();
        for (n, (whole, offset)) in shared.iter().zip(offsets).enumerate() {
            let bytes = layout[n];
            if offset.checked_add(bytes).is_none_or(|end| end > whole.bytes) || offset % SHARED_ALIGN != 0 {
                return Err(bad_argument(format!(
                    "array {n} of a dispatch is {bytes} bytes from {offset} on, in {} shared bytes",
                    whole.bytes
                )));
            }
        }
        let open = |n: usize| part(functions, &shared[n], offsets[n], layout[n]);
        let parts = [open(0)?, open(1)?, open(2)?, open(3)?];
        // O too: otherwise the sync after the run could overwrite the result with bytes that a CPU wrote there and
        // still has in its cache.
        for part in &parts {
            sync(functions, part, abi::TO_DEVICE)?;
        }
        run(functions, program, job, parts.each_ref(), deadline)?;
        sync(functions, &parts[OUTPUT], abi::FROM_DEVICE)
    }
}

/// A buffer for an argument of the kernel, in the argument's memory bank.
fn buffer(
    functions: &Functions,
    device: &Owned<abi::Device>,
    kernel: &Owned<abi::Kernel>,
    argument: i32,
    flags: u32,
    bytes: u64,
) -> Result<Buffer, NpuError> {
    let mut group = 0;
    // SAFETY: the kernel is open, and `group` and the text are large enough.
    called(|error| unsafe { (functions.group_id)(kernel.raw, argument, &mut group, error) })?;
    let (mut raw, mut mapped) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the device is open, and the pointers are written before they are read.
    called(|error| unsafe {
        (functions.bo_open)(device.raw, bytes, flags, group, &mut raw, &mut mapped, error)
    })?;
    let bo = Owned { raw, close: functions.bo_close };
    let bytes = usize::try_from(bytes).expect("it is mapped");
    Ok(Buffer { bo, mapped: mapped.cast(), bytes })
}

/// A part of the memory that another device shares.
fn part(functions: &Functions, whole: &Shared, offset: u64, bytes: u64) -> Result<Owned<abi::Bo>, NpuError> {
    let mut raw = ptr::null_mut();
    // SAFETY: the buffer is open, and `raw` is written before it is read.
    called(|error| unsafe { (functions.bo_part)(whole.bo.raw, offset, bytes, &mut raw, error) })?;
    Ok(Owned { raw, close: functions.bo_close })
}

/// The kernel with this index. Checks that it computes this job.
fn loaded<'a>(
    kernels: &'a mut [Option<Loaded>],
    kernel: usize,
    job: &Job,
) -> Result<&'a mut Loaded, NpuError> {
    let loaded = kernels.get_mut(kernel).and_then(Option::as_mut);
    let loaded = loaded.ok_or_else(|| not_loaded(kernel))?;
    job.runs_on(loaded.shape).map_err(|error| bad_argument(error.to_string()))?;
    if job.bucket() != loaded.bucket {
        return Err(bad_argument(format!("kernel {kernel} is for another bucket than the job's")));
    }
    Ok(loaded)
}

/// Runs a kernel with the job's parameters and with these arrays, which are already synced.
fn run(
    functions: &Functions,
    program: &mut Program,
    job: &Job,
    arrays: [&Owned<abi::Bo>; ARRAYS],
    deadline: Duration,
) -> Result<(), NpuError> {
    program.parameters.write(bytemuck::cast_slice(&job.to_words()));
    sync(functions, &program.parameters.bo, abi::TO_DEVICE)?;
    let [queries, keys, values, output] = arrays.map(|bo| bo.raw);
    let raws: [*mut abi::Bo; BUFFERS] = [queries, keys, values, output, program.parameters.bo.raw];
    let deadline_ms = u32::try_from(deadline.as_millis()).unwrap_or(u32::MAX).max(1);
    let mut state = 0;
    // SAFETY: the kernel and all buffers are open; the shim keeps the buffers of a command that does not end.
    called(|error| unsafe {
        (functions.run)(
            program.kernel.raw,
            abi::OPCODE,
            program.instructions.bo.raw,
            program.words,
            raws.as_ptr(),
            BUFFERS as u32,
            deadline_ms,
            &mut state,
            error,
        )
    })?;
    if state != abi::STATE_COMPLETED {
        let what = format!("the NPU's command ended in state {state}, not {}", abi::STATE_COMPLETED);
        return Err(NpuError::new(NpuCode::CommandState, what));
    }
    Ok(())
}

fn sync(functions: &Functions, bo: &Owned<abi::Bo>, direction: u32) -> Result<(), NpuError> {
    // SAFETY: the buffer is open.
    called(|error| unsafe { (functions.bo_sync)(bo.raw, direction, error) })
}

fn bad_argument(what: String) -> NpuError {
    NpuError::new(NpuCode::BadArgument, what)
}

fn not_loaded(kernel: usize) -> NpuError {
    bad_argument(format!("kernel {kernel} is not loaded"))
}

/// A buffer for a text of the shim.
struct Text([c_char; abi::TEXT]);

impl Text {
    fn new() -> Text {
        Text([0; abi::TEXT])
    }

    fn room(&mut self) -> *mut c_char {
        self.0.as_mut_ptr()
    }

    /// The text as one line.
    fn read(&self) -> String {
        let bytes: &[u8] = bytemuck::cast_slice(&self.0);
        let text = CStr::from_bytes_until_nul(bytes).unwrap_or_default().to_string_lossy();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

/// Calls the shim, and converts its return code to an error.
fn called(call: impl FnOnce(*mut c_char) -> i32) -> Result<(), NpuError> {
    let mut text = Text::new();
    let code = call(text.room());
    if code == abi::OK { Ok(()) } else { Err(explained(code, &text.read())) }
}

/// The error for a code of the shim, with the text of XRT.
fn explained(code: i32, said: &str) -> NpuError {
    let (code, what) = match code {
        abi::MEMLOCK => {
            let limit = getrlimit(Resource::Memlock).current;
            let limit = limit.map_or("not limited".into(), |limit| format!("{limit} bytes"));
            (
                NpuCode::MemlockLow,
                format!(
                    "no more memory can be locked for the NPU (the limit is {limit}): `ulimit -l unlimited`, or \
                     `* - memlock unlimited` in /etc/security/limits.d and a new login; in a unit of systemd \
                     LimitMEMLOCK=infinity"
                ),
            )
        }
        abi::NO_COLUMNS => (
            NpuCode::NoColumns,
            "other programs hold the NPU's columns (it has room for 6 contexts): end one of them".into(),
        ),
        abi::GROUP => (
            NpuCode::NpuGroup,
            "this user may not open the NPU: `sudo usermod -aG render $USER`, and log in again".into(),
        ),
        abi::NO_DEVICE => (
            NpuCode::NoDevice,
            "XRT finds no NPU: `unicorn doctor` says whether the driver or XRT's plugin is missing".into(),
        ),
        abi::TIMEOUT => (
            NpuCode::Timeout,
            "the NPU did not answer in time, and this process cannot use it again; if it comes again: \
             `sudo modprobe -r amdxdna && sudo modprobe amdxdna`"
                .into(),
        ),
        abi::COMMAND_STATE => (NpuCode::CommandState, "the NPU's command failed".into()),
        abi::BAD_ARGUMENT => (NpuCode::BadArgument, "the NPU's shim refuses a call of this program".into()),
        abi::DMA_BUF => (
            NpuCode::DmaBuf,
            "the NPU cannot use the GPU's memory in place; npu.sharing = \"copy\" works without it".into(),
        ),
        _ => (NpuCode::Xrt, "XRT refused".into()),
    };
    let said = if said.is_empty() { "it gave no reason" } else { said };
    NpuError::new(code, format!("{what}: {said}"))
}

/// Loads a shared object with all its dependencies.
fn load(path: &Path) -> Result<Library, NpuError> {
    let shown = path.display();
    if !fs::exists(path).unwrap_or(true) {
        return Err(NpuError::new(
            NpuCode::ShimMissing,
            format!("there is no {shown}, through which this program reaches XRT: `make npu-shim` builds it"),
        ));
    }
    // The linker would search for a path without a folder among the system's libraries.
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    // SAFETY: the machine's administrator installed the file, like the program's own libraries. Symbols that XRT lacks
    // are found now, and not at the first call.
    let loaded = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) };
    loaded.map_err(|error| unloadable(&shown.to_string(), &error.to_string(), loaded_xrt))
}

/// Why a shared object does not load, from the dynamic linker's message.
fn unloadable(shim: &str, said: &str, xrt: impl FnOnce() -> Option<String>) -> NpuError {
    let (code, what) = if said.contains("cannot open shared object file") {
        let what = format!("XRT is not installed, or not all of it; the NPU is reached through its {XRT}");
        (NpuCode::XrtMissing, what)
    } else if said.contains("undefined symbol: _Z") && said.contains("3xrt") {
        let version = xrt().map_or("this machine's XRT".into(), |version| format!("XRT {version}"));
        let what = format!(
            "{version} is too old: it has not all that the NPU needs (hw_context); take 2.25 or later"
        );
        (NpuCode::XrtOld, what)
    } else {
        let what = format!(
            "{shim} was built for another machine's libraries; rebuild it on this one: `make npu-shim`"
        );
        (NpuCode::ShimMismatch, what)
    };
    NpuError::new(code, format!("{what}: {said}"))
}

/// The version in the name of the file that the linker loads as XRT's library.
fn loaded_xrt() -> Option<String> {
    // SAFETY: loading XRT runs its initialisers, as loading the shim would do.
    let _library = unsafe { Library::open(Some(XRT), RTLD_NOW | RTLD_LOCAL) }.ok()?;
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    file_version(&maps)
}

/// The part of the path after the library's name: `2.13.0` of `libxrt_coreutil.so.2.13.0`.
fn file_version(maps: &str) -> Option<String> {
    let (_, version) = maps.lines().find_map(|line| line.split_once("libxrt_coreutil.so."))?;
    Some(version.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The message of glibc's linker, and the message for the user.
    #[test]
    fn a_shim_that_does_not_load_says_what_is_missing() {
        let code = |said: &str| unloadable("shim.so", said, || Some("2.13.466".into())).code;
        let missing = "libxrt_coreutil.so.2: cannot open shared object file: No such file or directory";
        assert_eq!(code(missing), NpuCode::XrtMissing);
        let old =
            "shim.so: undefined symbol: _ZN3xrt10hw_contextC1ERKNS_6deviceERKNS_4uuidENS0_11access_modeE";
        assert_eq!(code(old), NpuCode::XrtOld);
        assert!(
            unloadable("shim.so", old, || Some("2.13.466".into()))
                .message
                .starts_with("XRT 2.13.466 is too old")
        );
        assert_eq!(code("shim.so: undefined symbol: _ZTIN3xrt3run13command_errorE"), NpuCode::XrtOld);
        let libraries = "libstdc++.so.6: version `GLIBCXX_3.4.33' not found (required by shim.so)";
        assert_eq!(code(libraries), NpuCode::ShimMismatch);
        assert_eq!(
            code("libc.so.6: version `GLIBC_2.43' not found (required by shim.so)"),
            NpuCode::ShimMismatch
        );
        assert_eq!(code("shim.so: file too short"), NpuCode::ShimMismatch);
    }

    #[test]
    fn the_version_is_that_of_the_file() {
        let maps = "7f00-7f01 r--p 0 08:01 7 /usr/lib/libc.so.6\n7f02-7f03 r--p 0 08:01 9 /usr/lib/libxrt_coreutil.so.2.13.0\n";
        assert_eq!(file_version(maps).as_deref(), Some("2.13.0"));
        assert_eq!(file_version("7f00-7f01 r--p 0 08:01 7 /usr/lib/libc.so.6\n"), None);
    }

    #[test]
    fn the_codes_are_those_of_the_header() {
        let header = include_str!("shim.h");
        let all = [
            ("OK", abi::OK),
            ("XRT", abi::XRT),
            ("COMMAND_STATE", abi::COMMAND_STATE),
            ("TIMEOUT", abi::TIMEOUT),
            ("MEMLOCK", abi::MEMLOCK),
            ("NO_COLUMNS", abi::NO_COLUMNS),
            ("GROUP", abi::GROUP),
            ("NO_DEVICE", abi::NO_DEVICE),
            ("BAD_ARGUMENT", abi::BAD_ARGUMENT),
            ("DMA_BUF", abi::DMA_BUF),
        ];
        for (name, value) in all {
            let line = format!("    UNICORN_NPU_{name} = {value},\n");
            assert!(header.contains(&line), "{line}");
        }
        for (name, value) in [("ABI", abi::ABI as usize), ("TEXT", abi::TEXT)] {
            assert!(header.contains(&format!("#define UNICORN_NPU_{name} {value}\n")), "{name}");
        }
        let enums = format!(
            "UNICORN_NPU_CACHEABLE = {}, UNICORN_NPU_HOST_ONLY = {} }}",
            abi::CACHEABLE,
            abi::HOST_ONLY
        );
        assert!(header.contains(&enums));
        let enums = format!(
            "UNICORN_NPU_TO_DEVICE = {}, UNICORN_NPU_FROM_DEVICE = {} }}",
            abi::TO_DEVICE,
            abi::FROM_DEVICE
        );
        assert!(header.contains(&enums));
    }

    #[test]
    fn a_shim_that_is_not_there_is_named() {
        let error = Shim::open(Path::new("nowhere/libunicorn_npu.so")).err().unwrap();
        assert_eq!(error.code, NpuCode::ShimMissing);
        assert!(
            error.to_string().contains("nowhere/libunicorn_npu.so")
                && error.to_string().contains("make npu-shim")
        );
    }
}
