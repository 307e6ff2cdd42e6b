//! The shim's C ABI and the code that uses it, over the double of `tests/npu/double`; and the errors of a shim that
//! cannot be loaded. `tests/npu/real_xrt.py` tests the other side, the shim over the real XRT.

use std::ffi::{CString, c_char, c_void};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::Value;
use unicorn::npu::abi::{self, Functions};
use unicorn::npu::contract::{Job, RowRange};
use unicorn::npu::error::NpuCode;
use unicorn::npu::shim::Shim;
use unicorn::npu::tile::{self, Inputs};
use unicorn::npu::transport::{KernelFiles, NpuTransport, SHARED_ALIGN};

use crate::support::program::{example, output};

const DEADLINE: Duration = Duration::from_secs(60);

/// Jobs of the smallest bucket of each kind: head_dim, heads in a group, window, groups, first row, rows.
const JOBS: [(u32, u32, Option<u32>, u32, u32, u32); 5] = [
    (128, 2, None, 4, 0, 70),
    (128, 2, None, 1, 100, 17),
    (256, 4, None, 1, 0, 16),
    (256, 2, Some(512), 2, 1000, 33),
    (128, 2, Some(512), 3, 20, 5),
];

fn double() -> PathBuf {
    example("npu_double")
}

/// A file that replaces a container.
fn container() -> tempfile::NamedTempFile {
    tempfile::NamedTempFile::new().expect("a file")
}

fn planned(
    (head_dim, heads, window, groups, first, len): (u32, u32, Option<u32>, u32, u32, u32),
    xclbin: &Path,
) -> (Job, KernelFiles) {
    let (shape, job) =
        Job::plan(head_dim, heads, window, groups, RowRange { first, len }).expect("a job that there is");
    let (xclbin, instructions) = (xclbin.to_owned(), (0..64).collect());
    (job, KernelFiles { shape, bucket: job.bucket(), xclbin, instructions })
}

fn is_the_models(output: &[f32], job: &Job, inputs: &Inputs<half::bf16>) -> bool {
    let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    bits(output) == bits(&tile::attend(job, inputs))
}

#[test]
fn what_comes_back_is_the_models_to_the_bit() {
    let container = container();
    let mut shim = Shim::open(&double()).expect("the double opens");
    assert!(shim.facts().is_double && shim.facts().device.contains("double"), "{:?}", shim.facts());
    for (seed, job) in JOBS.into_iter().enumerate() {
        let (job, files) = planned(job, container.path());
        let kernel = shim.load(&files).expect("a kernel");
        assert_eq!(kernel, seed);
        // Before the second dispatch, the buffers hold the first dispatch's arrays.
        for again in 0..2 {
            let inputs = Inputs::random(&job, 2 * seed as u64 + again, 3.0).rounded();
            let mut output = vec![f32::NAN; inputs.queries.len()];
            shim.attend(
                kernel,
                &job,
                bytemuck::cast_slice(&inputs.queries),
                bytemuck::cast_slice(&inputs.keys),
                bytemuck::cast_slice(&inputs.values),
                bytemuck::cast_slice_mut(&mut output),
                DEADLINE,
            )
            .expect("it computes");
            assert!(is_the_models(&output, &job, &inputs), "{job:?}, seed {seed}");
        }
    }
}

#[test]
fn a_dispatch_that_is_not_the_kernels_is_refused() {
    let container = container();
    let mut shim = Shim::open(&double()).expect("the double opens");
    let (job, files) = planned(JOBS[1], container.path());
    let kernel = shim.load(&files).expect("a kernel");
    let sizes = job.layout().bytes().map(|bytes| bytes as usize);
    let [queries, keys, values, output, _] = sizes.map(|bytes| vec![0u8; bytes]);
    let mut refused = |kernel: usize, job: &Job, queries: &[u8], output: &[u8], part: &str| {
        let error = shim.attend(kernel, job, queries, &keys, &values, &mut output.to_vec(), DEADLINE);
        let error = error.expect_err(part);
        assert_eq!(error.code, NpuCode::BadArgument);
        assert!(error.message.contains(part), "{error}");
    };
    refused(kernel + 1, &job, &queries, &output, "kernel 1 is not loaded");
    refused(kernel, &job, &queries[2..], &output, "array 0 of a dispatch has 131070 bytes, not 131072");
    refused(kernel, &job, &queries, &output[4..], "array 3");
    refused(kernel, &planned(JOBS[0], container.path()).0, &queries, &output, "another bucket");
    refused(kernel, &planned(JOBS[2], container.path()).0, &queries, &output, "another kernel");
    let none = KernelFiles { instructions: Vec::new(), ..files.clone() };
    assert_eq!(shim.load(&none).expect_err("no instructions").code, NpuCode::KernelInvalid);
    let nowhere = KernelFiles { xclbin: "nowhere.xclbin".into(), ..files };
    assert_eq!(shim.load(&nowhere).expect_err("no container").code, NpuCode::Xrt);
}

// --- shared memory --------------------------------------------------------------------------------------

/// The value of bytes of shared memory that were not written.
const UNWRITTEN: u8 = 0xff;

/// A file that replaces another device's memory.
fn memory(name: &str, bytes: u64) -> File {
    let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC).expect("a file"));
    file.write_all_at(&vec![UNWRITTEN; bytes as usize], 0).expect("room");
    file
}

fn descriptor(file: &File) -> OwnedFd {
    file.try_clone().expect("a file").into()
}

/// Memory for queries, keys, values and outputs.
struct Memory {
    files: [File; 4],
    /// The bytes of each file before the memory.
    header: u64,
}

impl Memory {
    fn new(bytes: [u64; 4]) -> Memory {
        Memory { files: bytes.map(|bytes| memory("shared", bytes)), header: 0 }
    }

    fn shared(&self, bytes: [u64; 4]) -> [(OwnedFd, u64); 4] {
        std::array::from_fn(|n| (descriptor(&self.files[n]), bytes[n]))
    }

    /// Computes a job in the memory. Returns whether the result is the model's, and nothing else was written.
    fn computes(&self, shim: &mut Shim, kernel: usize, job: &Job, offsets: [u64; 4], seed: u64) -> bool {
        let inputs = Inputs::random(job, seed, 3.0).rounded();
        let arrays: [&[u8]; 3] = [
            bytemuck::cast_slice(&inputs.queries),
            bytemuck::cast_slice(&inputs.keys),
            bytemuck::cast_slice(&inputs.values),
        ];
        for (n, array) in arrays.into_iter().enumerate() {
            self.files[n].write_all_at(array, self.header + offsets[n]).expect("room");
        }
        let len = self.files[3].metadata().expect("a file").len() - self.header;
        let mut all = vec![UNWRITTEN; len as usize];
        self.files[3].write_all_at(&all, self.header).expect("room");
        shim.attend_shared(kernel, job, offsets, DEADLINE).expect("it computes");
        self.files[3].read_exact_at(&mut all, self.header).expect("it is there");
        let output = offsets[3] as usize..(offsets[3] + job.layout().bytes()[3]) as usize;
        let numbers: Vec<f32> = all[output.clone()]
            .chunks_exact(4)
            .map(|bytes| f32::from_ne_bytes(bytes.try_into().expect("four bytes")))
            .collect();
        all[output].fill(UNWRITTEN);
        is_the_models(&numbers, job, &inputs) && all.iter().all(|byte| *byte == UNWRITTEN)
    }
}

#[test]
fn shared_memory_is_read_and_written_in_place() {
    let container = container();
    let mut shim = Shim::open(&double()).expect("the double opens");
    let planned: Vec<_> = JOBS.iter().map(|job| planned(*job, container.path())).collect();
    let most = |n: usize| planned.iter().map(|(job, _)| job.layout().bytes()[n]).max().expect("a job");
    let bytes = std::array::from_fn(|n| 2 * most(n) + SHARED_ALIGN);
    let memory = Memory::new(bytes);
    shim.share(memory.shared(bytes)).expect("it is shared");
    for (seed, (job, files)) in planned.iter().enumerate() {
        let kernel = shim.load(files).expect("a kernel");
        let layout = job.layout().bytes();
        for (again, offsets) in
            [[0; 4], std::array::from_fn(|n| layout[n] + SHARED_ALIGN)].into_iter().enumerate()
        {
            let seed = (2 * seed + again) as u64;
            assert!(memory.computes(&mut shim, kernel, job, offsets, seed), "{job:?}, {offsets:?}");
        }
    }
    // Other memory replaces the first memory, and copies still work.
    let memory = Memory::new(bytes);
    shim.share(memory.shared(bytes)).expect("it is shared");
    let (job, _) = &planned[0];
    assert!(memory.computes(&mut shim, 0, job, [64, 0, 128, 64], 7));
    let inputs = Inputs::random(job, 8, 3.0).rounded();
    let mut output = vec![f32::NAN; inputs.queries.len()];
    let [queries, keys, values] =
        [&inputs.queries, &inputs.keys, &inputs.values].map(|x| bytemuck::cast_slice(x));
    shim.attend(0, job, queries, keys, values, bytemuck::cast_slice_mut(&mut output), DEADLINE)
        .expect("a copy");
    assert!(is_the_models(&output, job, &inputs));
    assert!(memory.computes(&mut shim, 0, job, [0; 4], 9));
}

/// The files that Mesa's software Vulkan shares begin with a header: their size, and the offset of the memory.
#[test]
fn memory_of_the_software_device_begins_behind_its_header() {
    let container = container();
    let mut shim = Shim::open(&double()).expect("the double opens");
    let (job, files) = planned(JOBS[1], container.path());
    let [queries, keys, values, output, _] = job.layout().bytes();
    let bytes = [queries, keys, values, output].map(|bytes| bytes + 64);
    let header = 4096 + 64;
    let files_of_mesa = bytes.map(|bytes| {
        let file = memory("llvmpipe memory fd", header + bytes);
        let words = [header + bytes, header].map(u64::to_ne_bytes);
        file.write_all_at(words.as_flattened(), 0).expect("room");
        file
    });
    let memory = Memory { files: files_of_mesa, header };
    shim.share(memory.shared(bytes)).expect("it is shared");
    let kernel = shim.load(&files).expect("a kernel");
    assert!(memory.computes(&mut shim, kernel, &job, [64; 4], 1));
    let error = shim.share(memory.shared(bytes.map(|bytes| bytes + 1))).expect_err("the header is no memory");
    assert_eq!(error.code, NpuCode::DmaBuf);
}

#[test]
fn what_is_not_shared_is_refused() {
    let container = container();
    let mut shim = Shim::open(&double()).expect("the double opens");
    let (job, files) = planned(JOBS[1], container.path());
    let kernel = shim.load(&files).expect("a kernel");
    let [queries, keys, values, output, _] = job.layout().bytes();
    let bytes = [queries, keys, values, output].map(|bytes| bytes + 64);
    let refused = |shim: &mut Shim, kernel: usize, job: &Job, offsets: [u64; 4], part: &str| {
        let error = shim.attend_shared(kernel, job, offsets, DEADLINE).expect_err(part);
        assert_eq!(error.code, NpuCode::BadArgument);
        assert!(error.message.contains(part), "{error}");
    };
    refused(&mut shim, kernel, &job, [0; 4], "no memory is shared");
    let memory = Memory::new(bytes);
    shim.share(memory.shared(bytes)).expect("it is shared");
    for n in 0..4 {
        for offset in [63, 128, u64::MAX - 63] {
            let mut offsets = [0; 4];
            offsets[n] = offset;
            refused(&mut shim, kernel, &job, offsets, &format!("array {n} of a dispatch"));
        }
    }
    refused(&mut shim, kernel + 1, &job, [0; 4], "kernel 1 is not loaded");
    refused(&mut shim, kernel, &planned(JOBS[0], container.path()).0, [0; 4], "another bucket");
    refused(&mut shim, kernel, &planned(JOBS[2], container.path()).0, [0; 4], "another kernel");
    assert!(memory.computes(&mut shim, kernel, &job, [64; 4], 1));

    // Memory that is smaller than its stated size, and a descriptor that is not memory.
    let error = shim.share(memory.shared(bytes.map(|bytes| bytes + 64))).expect_err("too small");
    assert_eq!(error.code, NpuCode::DmaBuf);
    assert!(
        error.message.contains("npu.sharing = \"copy\"") && error.to_string().ends_with("(npu-dma-buf)"),
        "{error}"
    );
    let (pipe, _) = std::io::pipe().expect("a pipe");
    let mut buffers = memory.shared(bytes);
    buffers[2].0 = pipe.into();
    assert_eq!(shim.share(buffers).expect_err("no memory").code, NpuCode::DmaBuf);
    refused(&mut shim, kernel, &job, [0; 4], "no memory is shared");
}

// --- the C ABI, called wrongly --------------------------------------------------------------------------

/// The double's functions, and a dispatch without the Rust transport.
struct Raw {
    functions: Functions,
    device: *mut abi::Device,
    kernel: *mut abi::Kernel,
    job: Job,
    inputs: Inputs<half::bf16>,
    _container: tempfile::NamedTempFile,
}

/// A dispatch with one mistake, or without any.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Mistake {
    Nothing,
    /// The instructions (0), or the buffer of argument 3 to 7, are not synced.
    NoSync(i32),
    WrongFlags(i32),
    WrongBank(i32),
    Opcode,
    Words,
}

/// How the host accesses a buffer.
enum Host {
    Mapped(*mut c_void),
    File(File),
}

/// The size of the shared memory before the part of a dispatch.
const BEFORE: u64 = 64;

impl Raw {
    fn open() -> Raw {
        // SAFETY: the double's initialisers are those of any Rust library.
        let library = unsafe { libloading::Library::new(double()) }.expect("it loads");
        // SAFETY: the double has the types of shim.h.
        let functions = unsafe { Functions::of(&library) }.expect("all functions");
        // The functions are called until the process ends.
        std::mem::forget(library);
        let container = container();
        let (job, _) = planned(JOBS[1], container.path());
        let (mut device, mut kernel, mut text) = (ptr::null_mut(), ptr::null_mut(), [0 as c_char; abi::TEXT]);
        let path = CString::new(container.path().as_os_str().as_bytes()).expect("a path");
        let (path, name) = (path.as_ptr(), abi::KERNEL_NAME.as_ptr());
        let (text, mut device_name) = (text.as_mut_ptr(), [0 as c_char; abi::TEXT]);
        // SAFETY: all pointers have the size that shim.h requires, and the device is open when the kernel is opened.
        unsafe {
            assert_eq!((functions.device_open)(0, &mut device, device_name.as_mut_ptr(), text), abi::OK);
            assert_eq!((functions.kernel_open)(device, path, name, &mut kernel, text), abi::OK);
        }
        let inputs = Inputs::random(&job, 3, 3.0).rounded();
        Raw { functions, device, kernel, job, inputs, _container: container }
    }

    /// A part of shared memory that has these bytes.
    fn part(&self, bytes: &[u8]) -> (*mut abi::Bo, File) {
        let file = memory("shared", BEFORE + bytes.len() as u64);
        file.write_all_at(bytes, BEFORE).expect("room");
        let (mut whole, mut part, mut room) = (ptr::null_mut(), ptr::null_mut(), [0 as c_char; abi::TEXT]);
        let (text, size) = (room.as_mut_ptr(), bytes.len() as u64);
        // SAFETY: the device and the descriptor are open, and all pointers have the required size. A part outlives the
        // whole.
        unsafe {
            let code =
                (self.functions.bo_import)(self.device, file.as_raw_fd(), BEFORE + size, &mut whole, text);
            assert_eq!(code, abi::OK);
            assert_eq!((self.functions.bo_part)(whole, BEFORE, size, &mut part, text), abi::OK);
            for (offset, bytes) in [(BEFORE, size + 1), (BEFORE + 1, size), (u64::MAX, 2), (0, 0)] {
                let mut none = ptr::null_mut();
                let code = (self.functions.bo_part)(whole, offset, bytes, &mut none, text);
                assert_eq!(code, abi::BAD_ARGUMENT, "{bytes} bytes from {offset} on");
            }
            (self.functions.bo_close)(whole);
        }
        (part, file)
    }

    /// The code of the run, and the host's copy of O after it. `shared` = all four arrays are in shared memory.
    fn dispatch(&self, mistake: Mistake, shared: bool) -> (i32, Vec<f32>) {
        let words: Vec<u32> = (0..64).collect();
        let parameters = self.job.to_words();
        let output = vec![0f32; self.inputs.queries.len()];
        let contents: [(i32, &[u8]); 6] = [
            (abi::INSTRUCTIONS_ARGUMENT, bytemuck::cast_slice(&words)),
            (3, bytemuck::cast_slice(&self.inputs.queries)),
            (4, bytemuck::cast_slice(&self.inputs.keys)),
            (5, bytemuck::cast_slice(&self.inputs.values)),
            (6, bytemuck::cast_slice(&output)),
            (7, bytemuck::cast_slice(&parameters)),
        ];
        let mut room = [0 as c_char; abi::TEXT];
        let text = room.as_mut_ptr();
        let mut bos: Vec<(*mut abi::Bo, Host)> = Vec::new();
        for (argument, bytes) in contents {
            if shared && (3..=6).contains(&argument) {
                let (bo, file) = self.part(bytes);
                if mistake != Mistake::NoSync(argument) {
                    // SAFETY: the part is open, and the text has the required size.
                    assert_eq!(unsafe { (self.functions.bo_sync)(bo, abi::TO_DEVICE, text) }, abi::OK);
                }
                bos.push((bo, Host::File(file)));
                continue;
            }
            let is_instructions = argument == abi::INSTRUCTIONS_ARGUMENT;
            let flags = match is_instructions != (mistake == Mistake::WrongFlags(argument)) {
                true => abi::CACHEABLE,
                false => abi::HOST_ONLY,
            };
            let (mut group, mut bo, mut mapped) = (0, ptr::null_mut(), ptr::null_mut());
            // SAFETY: the kernel and the device are open, and all pointers have the required size.
            unsafe {
                assert_eq!((self.functions.group_id)(self.kernel, argument, &mut group, text), abi::OK);
                group += u32::from(mistake == Mistake::WrongBank(argument));
                let size = bytes.len() as u64;
                let code =
                    (self.functions.bo_open)(self.device, size, flags, group, &mut bo, &mut mapped, text);
                assert_eq!(code, abi::OK);
                // O is not written by the host.
                if argument != 6 {
                    ptr::copy_nonoverlapping(bytes.as_ptr(), mapped.cast(), bytes.len());
                    if mistake != Mistake::NoSync(argument) {
                        assert_eq!((self.functions.bo_sync)(bo, abi::TO_DEVICE, text), abi::OK);
                    }
                }
            }
            bos.push((bo, Host::Mapped(mapped)));
        }
        let data: Vec<*mut abi::Bo> = bos[1..].iter().map(|(bo, _)| *bo).collect();
        let opcode = abi::OPCODE + u64::from(mistake == Mistake::Opcode);
        let count = words.len() as u32 - u32::from(mistake == Mistake::Words);
        let (mut state, mut found) = (0, output);
        // SAFETY: the kernel and the buffers are open, and the size of O is correct.
        let code = unsafe {
            let code = (self.functions.run)(
                self.kernel,
                opcode,
                bos[0].0,
                count,
                data.as_ptr(),
                data.len() as u32,
                60_000,
                &mut state,
                text,
            );
            if mistake != Mistake::NoSync(6) {
                assert_eq!((self.functions.bo_sync)(bos[4].0, abi::FROM_DEVICE, text), abi::OK);
            }
            let into: &mut [u8] = bytemuck::cast_slice_mut(&mut found);
            match &bos[4].1 {
                Host::Mapped(mapped) => {
                    ptr::copy_nonoverlapping(mapped.cast(), into.as_mut_ptr(), into.len())
                }
                Host::File(file) => file.read_exact_at(into, BEFORE).expect("it is there"),
            }
            bos.iter().for_each(|(bo, _)| (self.functions.bo_close)(*bo));
            code
        };
        assert_eq!(state == abi::STATE_COMPLETED, code == abi::OK, "{mistake:?}");
        (code, found)
    }
}

#[test]
fn what_is_not_synced_does_not_move() {
    let raw = Raw::open();
    let expected = tile::attend(&raw.job, &raw.inputs);
    let equal = |found: &[f32]| found.iter().zip(&expected).all(|(f, e)| f.to_bits() == e.to_bits());
    for shared in [false, true] {
        let (code, found) = raw.dispatch(Mistake::Nothing, shared);
        assert!(code == abi::OK && equal(&found), "shared {shared}: {code}");
        for argument in 3..=6 {
            let (code, found) = raw.dispatch(Mistake::NoSync(argument), shared);
            assert!(code == abi::OK && !equal(&found), "argument {argument}, shared {shared}: {code}");
        }
    }
    // The device finds no parameters or no instructions.
    for argument in [7, abi::INSTRUCTIONS_ARGUMENT] {
        assert_eq!(
            raw.dispatch(Mistake::NoSync(argument), false).0,
            abi::COMMAND_STATE,
            "argument {argument}"
        );
    }
}

#[test]
fn flags_banks_and_words_are_checked() {
    let raw = Raw::open();
    let arguments = [abi::INSTRUCTIONS_ARGUMENT, 3, 4, 5, 6, 7];
    let mistakes = arguments.into_iter().flat_map(|a| [Mistake::WrongFlags(a), Mistake::WrongBank(a)]);
    for mistake in mistakes.chain([Mistake::Opcode, Mistake::Words]) {
        assert_eq!(raw.dispatch(mistake, false).0, abi::BAD_ARGUMENT, "{mistake:?}");
    }
}

// --- faults ---------------------------------------------------------------------------------------------

/// The lines that `npu_host` prints over a shim, without its first line about the opened device.
fn host(shim: &Path, faults: &str, jobs: &[&str]) -> Vec<Value> {
    let container = container();
    let mut command = Command::new(example("npu_host"));
    command.arg(shim).arg(container.path()).args(jobs).env("NPU_DOUBLE", faults).env("DEADLINE_MS", "200");
    let (code, lines, stderr) = output(command);
    assert_eq!(code, 0, "{stderr}");
    // XRT and its double also print lines.
    let lines = lines.lines().filter(|line| line.starts_with('{'));
    let lines: Vec<Value> = lines.map(|line| serde_json::from_str(line).expect(line)).collect();
    let opened = usize::from(lines[0]["is_double"].is_boolean());
    lines[opened..].to_vec()
}

/// The result of each job: `ok`, `wrong`, or a code.
fn outcomes(faults: &str, jobs: &[&str]) -> Vec<String> {
    let outcome = |line: &Value| match (line["code"].as_str(), line["wrong"].as_u64()) {
        (Some(code), _) => code.to_owned(),
        (None, Some(0)) => "ok".to_owned(),
        (None, wrong) => format!("{} wrong", wrong.expect("a count")),
    };
    host(&double(), faults, jobs).iter().map(outcome).collect()
}

#[test]
fn faults_have_the_doctors_codes() {
    const JOB: &str = "128/2/0/1/0/9";
    const OTHER: &str = "256/4/0/1/0/9";
    let three = [JOB, OTHER, JOB];
    for (faults, expected) in [
        ("", ["ok", "ok", "ok"].as_slice()),
        ("open:1=no-device", &["npu-no-device"]),
        ("open:1=group", &["npu-group"]),
        ("open:1=memlock", &["memlock-low"]),
        ("load:1=enospc", &["npu-no-columns", "ok", "ok"]),
        ("load:2=xrt", &["ok", "npu-xrt", "ok"]),
        ("bo:1=memlock", &["memlock-low", "ok", "ok"]),
        ("run:2=state", &["ok", "npu-command-state", "ok"]),
        ("run:2+=state", &["ok", "npu-command-state", "npu-command-state"]),
        // After a command that did not end, every later command fails.
        ("run:2=timeout", &["ok", "npu-timeout", "npu-timeout"]),
        ("run:1=wrong; run:3=wrong", &["1 wrong", "ok", "1 wrong"]),
        ("run:1=poison", &["npu-no-output", "ok", "ok"]),
        // The buffer still has the first job's output, which would be correct.
        ("run:3=poison", &["ok", "ok", "npu-no-output"]),
    ] {
        assert_eq!(outcomes(faults, &three), expected, "{faults}");
    }
    // The arrays of the first and the third job are in shared memory. The arrays of the second job are copied.
    const SHARED: &str = "128/2/0/1/0/9@64";
    let three = [SHARED, OTHER, SHARED];
    for (faults, expected) in [
        ("", ["ok", "ok", "ok"].as_slice()),
        // Nothing is computed in other memory than requested.
        ("import:1=refused", &["npu-dma-buf"]),
        ("import:4=refused", &["npu-dma-buf"]),
        ("run:1=state", &["npu-command-state", "ok", "ok"]),
        ("run:1=timeout", &["npu-timeout", "npu-timeout", "npu-timeout"]),
        ("run:3=wrong", &["ok", "ok", "1 wrong"]),
        ("run:1=poison", &["65536 wrong", "ok", "ok"]),
        // Shared memory replaces buffers. Only these remain: the instructions and parameters of the first kernel, and
        // six buffers of the second one.
        ("bo:9+=memlock", &["ok", "ok", "ok"]),
    ] {
        assert_eq!(outcomes(faults, &three), expected, "{faults}, shared");
    }
    let low = &host(&double(), "open:1=memlock", &[])[0];
    let low = low["error"].as_str().expect("an error");
    assert!(low.contains("LimitMEMLOCK=infinity") && low.ends_with("(memlock-low)"), "{low}");
}

// --- shims that do not load -----------------------------------------------------------------------------

/// A shared object built from C source, linked with these arguments.
fn library(folder: &Path, name: &str, source: &str, arguments: &[&str]) -> PathBuf {
    let (file, built) = (folder.join(format!("{name}.c")), folder.join(format!("{name}.so")));
    std::fs::write(&file, source).expect("a file");
    let mut command = Command::new("c++");
    command.args(["-x", "c", "-shared", "-fPIC", "-nostdlib", "-o"]).arg(&built).arg(&file);
    command.args(["-x", "none"]).args(arguments).current_dir(folder);
    let (code, _, stderr) = output(command);
    assert_eq!(code, 0, "{stderr}");
    built
}

#[test]
fn a_shim_that_cannot_be_loaded_says_what_is_missing() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let error = |shim: &Path| host(shim, "", &[])[0].clone();
    let told = |shim: &Path, code: &str, parts: &[&str]| {
        let error = error(shim);
        assert_eq!(error["code"], code, "{error}");
        let text = error["error"].as_str().expect("an error");
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    };
    const XRT: &str = "-Wl,-soname,libxrt_coreutil.so.2";
    const ORIGIN: &str = "-Wl,-rpath,$ORIGIN";

    told(&folder.join("none.so"), "npu-shim-missing", &["none.so", "make npu-shim"]);

    let text = folder.join("text.so");
    std::fs::write(&text, "no library").expect("a file");
    told(&text, "npu-shim-mismatch", &["make npu-shim"]);

    let other = library(folder, "other", "int other;", &[]);
    told(&other, "npu-shim-mismatch", &["is no shim of this program"]);

    let version = format!("unsigned unicorn_npu_abi(void) {{ return {}; }}", abi::ABI);
    let partial = library(folder, "partial", &version, &[]);
    told(&partial, "npu-shim-mismatch", &["unicorn_npu_is_double"]);

    // First with XRT, and then without it.
    let xrt = library(folder, "xrt", "int xrt;", &[XRT]);
    let shim = "extern int xrt; int *uses(void) { return &xrt; }";
    let shim = library(folder, "shim", shim, &["xrt.so", ORIGIN]);
    std::fs::remove_file(&xrt).expect("it was built");
    told(&shim, "xrt-missing", &["XRT is not installed", "libxrt_coreutil.so.2"]);

    // XRT 2.13 has the same soname as 2.25, but no hw_context.
    library(folder, "libxrt_coreutil.so.2.13.466", "int xrt;", &[XRT]);
    std::fs::rename(folder.join("libxrt_coreutil.so.2.13.466.so"), folder.join("libxrt_coreutil.so.2"))
        .expect("it was built");
    let context = "_ZN3xrt10hw_contextC1ERKNS_6deviceERKNS_4uuidENS0_11access_modeE";
    let shim = format!("extern int {context}(void); int uses(void) {{ return {context}(); }}");
    let shim =
        library(folder, "old", &shim, &["libxrt_coreutil.so.2", ORIGIN, "-Wl,--allow-shlib-undefined"]);
    told(&shim, "xrt-old", &["is too old", "hw_context"]);

    // The C++ library lacks a version that the shim was built against.
    let versions = |folder: &Path, version: &str| {
        std::fs::write(folder.join("map"), format!("{version} {{ global: cxx; }};")).expect("a file");
        library(folder, "cxx", "int cxx(void) { return 0; }", &["-Wl,--version-script=map,-soname,cxx.so"]);
    };
    versions(folder, "GLIBCXX_9.9.9");
    let shim = "extern int cxx(void); int uses(void) { return cxx(); }";
    let shim = library(folder, "newer", shim, &["cxx.so", ORIGIN]);
    versions(folder, "GLIBCXX_1.0.0");
    told(&shim, "npu-shim-mismatch", &["GLIBCXX_9.9.9", "rebuild it on this one", "make npu-shim"]);
}

#[test]
fn a_shim_of_another_version_is_refused() {
    let error = host(&double(), "abi=7", &[])[0].clone();
    assert_eq!(error["code"], "npu-shim-mismatch", "{error}");
    assert!(
        error["error"].as_str().expect("an error").contains(&format!("its interface is 7, not {}", abi::ABI)),
        "{error}"
    );
}
