//! A program that computes on an NPU, or on a substitute for one, and compares with the kernel's model:
//! `npu_host SHIM XCLBIN JOB...`.
//!
//! A job is `HEAD_DIM/HEADS/WINDOW/GROUPS/FIRST/ROWS`, with the window 0 for none: `128/2/0/4/100/17` is attention of 17
//! rows from position 100, of 2 query heads for each of 4 KV heads. `DEADLINE_MS` is the time for each dispatch, 60000 if
//! it is not set.
//!
//! `@OFFSET` after a job puts its arrays into memory that is shared with the NPU: Q begins at that byte of its memory, K
//! 4096 bytes later in K's memory, V and O each 4096 bytes later than the array before. The memory is four files instead
//! of another device's memory. `LACKING` is the number of bytes that each file is too short; 0 if it is not set.
//!
//! Each line of the output is an object: the first describes the opened device, and each other one a job, with its error
//! if it failed. The exit status is 0 if the program reached its end, even if jobs failed.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::{Value, json};
use unicorn::npu::contract::{Job, RowRange, Shape};
use unicorn::npu::error::NpuError;
use unicorn::npu::shim::Shim;
use unicorn::npu::tile::{self, Inputs};
use unicorn::npu::transport::{KernelFiles, NpuTransport};

/// The fake driver recognises the instructions by their first word.
const FIRST_INSTRUCTION: u32 = 0x0605_0403;

/// How many bytes later than the array before each array begins in its own memory.
const APART: u64 = 4096;
/// A byte of shared memory that was not written.
const UNWRITTEN: u8 = 0xff;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, shim, xclbin, jobs @ ..] = &arguments[..] else { panic!("usage: npu_host SHIM XCLBIN JOB...") };
    let number =
        |name, otherwise| std::env::var(name).map_or(otherwise, |text| text.parse().expect("a number"));
    let deadline = Duration::from_millis(number("DEADLINE_MS", 60_000));
    let jobs: Vec<Request> = jobs.iter().map(|job| Request::read(job)).collect();
    let shim = match Shim::open(Path::new(shim)) {
        Ok(shim) => shim,
        Err(error) => return say(&failed(&error)),
    };
    let facts = shim.facts();
    say(&json!({ "xrt": facts.xrt, "device": facts.device, "is_double": facts.is_double }));
    let mut host =
        Host { shim, xclbin: PathBuf::from(xclbin), loaded: HashMap::new(), shared: None, deadline };
    if jobs.iter().any(|job| job.offset.is_some())
        && let Err(error) = host.share(&jobs, number("LACKING", 0))
    {
        return say(&failed(&error));
    }
    for (seed, job) in jobs.iter().enumerate() {
        say(&host.compute(job, seed as u64).unwrap_or_else(|error| failed(&error)));
    }
}

/// A job of the command line.
struct Request {
    text: String,
    shape: Shape,
    job: Job,
    /// Where its first array lies in shared memory.
    offset: Option<u64>,
}

impl Request {
    fn read(text: &str) -> Request {
        let (numbers, offset) = match text.split_once('@') {
            Some((numbers, offset)) => (numbers, Some(offset.parse().expect("an offset"))),
            None => (text, None),
        };
        let numbers: Vec<u32> =
            numbers.split('/').map(|number| number.parse().expect("a job of numbers")).collect();
        let [head_dim, heads, window, groups, first, len] = numbers[..] else {
            panic!("a job has six numbers")
        };
        let window = (window != 0).then_some(window);
        let (shape, job) =
            Job::plan(head_dim, heads, window, groups, RowRange { first, len }).expect("a job that there is");
        Request { text: text.to_owned(), shape, job, offset }
    }

    /// Where each array lies in shared memory, and its bytes.
    fn arrays(&self) -> Option<[(u64, u64); 4]> {
        let bytes = self.job.layout().bytes();
        self.offset.map(|offset| std::array::from_fn(|n| (offset + n as u64 * APART, bytes[n])))
    }
}

struct Host {
    shim: Shim,
    xclbin: PathBuf,
    loaded: HashMap<String, usize>,
    shared: Option<[File; 4]>,
    deadline: Duration,
}

impl Host {
    /// Shares memory that has room for all jobs, but for the bytes that are lacking.
    fn share(&mut self, jobs: &[Request], lacking: u64) -> Result<(), NpuError> {
        let ends = |n: usize| {
            jobs.iter().filter_map(move |job| job.arrays()).map(move |arrays| arrays[n].0 + arrays[n].1)
        };
        let bytes: [u64; 4] = std::array::from_fn(|n| ends(n).max().expect("a job").next_multiple_of(APART));
        let files = bytes.map(|bytes| {
            let file = File::from(memfd_create("shared", MemfdFlags::CLOEXEC).expect("a file"));
            file.set_len(bytes - lacking).expect("room");
            file
        });
        let descriptors = std::array::from_fn(|n| (files[n].try_clone().expect("a file").into(), bytes[n]));
        self.shim.share(descriptors)?;
        self.shared = Some(files);
        Ok(())
    }

    /// Computes a job, and says in how many numbers it is not what the kernel's model says, to the bit.
    fn compute(&mut self, request: &Request, seed: u64) -> Result<Value, NpuError> {
        let Request { text, shape, job, .. } = request;
        let (shape, bucket) = (*shape, job.bucket());
        let key = format!("{shape:?} {bucket:?}");
        let kernel = match self.loaded.get(&key) {
            Some(kernel) => *kernel,
            None => {
                let instructions = (0..64).map(|n| FIRST_INSTRUCTION + n).collect();
                let xclbin = self.xclbin.clone();
                let kernel = self.shim.load(&KernelFiles { shape, bucket, xclbin, instructions })?;
                self.loaded.insert(key, kernel);
                kernel
            }
        };
        let inputs = Inputs::random(job, seed, 3.0).rounded();
        let mut output = vec![f32::NAN; inputs.queries.len()];
        let (queries, keys, values) = (
            bytemuck::cast_slice(&inputs.queries),
            bytemuck::cast_slice(&inputs.keys),
            bytemuck::cast_slice(&inputs.values),
        );
        let into: &mut [u8] = bytemuck::cast_slice_mut(&mut output);
        let mut outside = None;
        match request.arrays() {
            None => self.shim.attend(kernel, job, queries, keys, values, into, self.deadline)?,
            Some(arrays) => {
                let files = self.shared.as_ref().expect("memory is shared before the first job");
                for (n, input) in [queries, keys, values].into_iter().enumerate() {
                    files[n].write_all_at(input, arrays[n].0).expect("the memory is written");
                }
                let (offset, _) = arrays[3];
                let mut all = vec![UNWRITTEN; files[3].metadata().expect("a file").len() as usize];
                files[3].write_all_at(&all, 0).expect("the memory is written");
                self.shim.attend_shared(kernel, job, arrays.map(|(offset, _)| offset), self.deadline)?;
                files[3].read_exact_at(&mut all, 0).expect("the memory is read");
                let (before, rest) = all.split_at(offset as usize);
                let (written, after) = rest.split_at(into.len());
                into.copy_from_slice(written);
                outside = Some(before.iter().chain(after).filter(|byte| **byte != UNWRITTEN).count());
            }
        }
        let expected = tile::attend(job, &inputs);
        let wrong = output.iter().zip(&expected).filter(|(o, e)| o.to_bits() != e.to_bits()).count();
        let bytes = job.layout().bytes();
        let mut line = json!({ "job": text, "bytes": bytes, "numbers": output.len(), "wrong": wrong });
        if let Some(outside) = outside {
            // The bytes of O's memory that the dispatch wrote outside of its output.
            line["outside"] = outside.into();
        }
        Ok(line)
    }
}

fn failed(error: &NpuError) -> Value {
    json!({ "code": error.code.name(), "error": error.to_string() })
}

fn say(line: &Value) {
    println!("{line}");
}
