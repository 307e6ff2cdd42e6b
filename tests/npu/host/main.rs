//! A program that computes on an NPU, or on what stands in for one, and compares with the kernel's model:
//! `npu_host SHIM XCLBIN JOB...`.
//!
//! A job is `HEAD_DIM/HEADS/WINDOW/GROUPS/FIRST/ROWS`, with the window 0 for none: `128/2/0/4/100/17` is attention of 17
//! rows from position 100, of 2 query heads for each of 4 KV heads. `DEADLINE_MS` is the time for each dispatch, 60000 if
//! it is not set.
//!
//! Each line of the output is an object: first what was opened, then a line for each job, with the error where one came
//! up. The exit status is 0 if the program got to its end, whatever the lines say.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use unicorn::npu::contract::{Job, RowRange};
use unicorn::npu::error::NpuError;
use unicorn::npu::shim::Shim;
use unicorn::npu::tile::{self, Inputs};
use unicorn::npu::transport::{KernelFiles, NpuTransport};

/// The fake driver recognises the instructions by their first word.
const FIRST_INSTRUCTION: u32 = 0x0605_0403;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, shim, xclbin, jobs @ ..] = &arguments[..] else { panic!("usage: npu_host SHIM XCLBIN JOB...") };
    let deadline = std::env::var("DEADLINE_MS").map_or(60_000, |text| text.parse().expect("a number"));
    let mut shim = match Shim::open(Path::new(shim)) {
        Ok(shim) => shim,
        Err(error) => return say(&failed(&error)),
    };
    let facts = shim.facts();
    say(&json!({ "xrt": facts.xrt, "device": facts.device, "is_double": facts.is_double }));
    let mut loaded = HashMap::new();
    for (seed, text) in jobs.iter().enumerate() {
        let outcome =
            compute(&mut shim, &mut loaded, xclbin, text, seed as u64, Duration::from_millis(deadline));
        say(&outcome.unwrap_or_else(|error| failed(&error)));
    }
}

/// Computes a job, and says in how many numbers it is not what the kernel's model says, to the bit.
fn compute(
    shim: &mut Shim,
    loaded: &mut HashMap<String, usize>,
    xclbin: &str,
    text: &str,
    seed: u64,
    deadline: Duration,
) -> Result<Value, NpuError> {
    let numbers: Vec<u32> = text.split('/').map(|number| number.parse().expect("a job of numbers")).collect();
    let [head_dim, heads, window, groups, first, len] = numbers[..] else { panic!("a job has six numbers") };
    let window = (window != 0).then_some(window);
    let (shape, job) =
        Job::plan(head_dim, heads, window, groups, RowRange { first, len }).expect("a job that there is");
    let bucket = job.bucket();
    let kernel = match loaded.get(&format!("{shape:?} {bucket:?}")) {
        Some(kernel) => *kernel,
        None => {
            let instructions = (0..64).map(|n| FIRST_INSTRUCTION + n).collect();
            let kernel =
                shim.load(&KernelFiles { shape, bucket, xclbin: PathBuf::from(xclbin), instructions })?;
            loaded.insert(format!("{shape:?} {bucket:?}"), kernel);
            kernel
        }
    };
    let inputs = Inputs::random(&job, seed, 3.0).rounded();
    let mut output = vec![f32::NAN; inputs.queries.len()];
    shim.attend(
        kernel,
        &job,
        bytemuck::cast_slice(&inputs.queries),
        bytemuck::cast_slice(&inputs.keys),
        bytemuck::cast_slice(&inputs.values),
        bytemuck::cast_slice_mut(&mut output),
        deadline,
    )?;
    let expected = tile::attend(&job, &inputs);
    let wrong = output.iter().zip(&expected).filter(|(o, e)| o.to_bits() != e.to_bits()).count();
    Ok(json!({ "job": text, "bytes": job.layout().bytes(), "numbers": output.len(), "wrong": wrong }))
}

fn failed(error: &NpuError) -> Value {
    json!({ "code": error.code.name(), "error": error.to_string() })
}

fn say(line: &Value) {
    println!("{line}");
}
