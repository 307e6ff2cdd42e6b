//! The parent's side: an [`AttentionUnit`] whose jobs the NPU's process computes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};

use super::message::{ARRAYS, Attend, Done, Opened, Ready, Request, Start};
use crate::device::{Connection, ConnectionError};
use crate::gpu::Buffer;
use crate::model::offload::OffloadError;
use crate::npu::attention::{AttentionUnit, OffloadJob, OffloadRoom, not_shared};
use crate::npu::contract::{Bucket, Job, Layout, RowRange, Shape};
use crate::npu::error::{NpuCode, NpuError};
use crate::npu::marks;
use crate::npu::tile::{Inputs, Reference};
use crate::npu::transport::NpuFacts;

/// Time limit for opening the NPU and reading the kernels.
const OPEN: Duration = Duration::from_secs(60);
/// Time limit for loading a kernel onto the NPU before its first dispatch.
const LOAD: Duration = Duration::from_secs(3);
/// Longest wait during a step for the exit of a process that closed its channel.
const LAST_WAIT: Duration = Duration::from_millis(200);
/// The self-test compares one row in this many with exact attention, which is slow.
const ROWS_APART: u32 = 17;
/// The standard deviation of the self-test's scores. It is so large that a missing key changes some row visibly.
const SCORE_DEVIATION: f32 = 5.0;

/// The heads of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    pub head_dim: usize,
    /// Query heads for each KV head.
    pub heads_per_group: usize,
}

/// An NPU that a child process drives.
pub struct NpuProcess {
    connection: Connection,
    arrays: File,
    facts: NpuFacts,
    /// The kernels for the model's heads, with their indices in the child.
    kernels: Vec<(usize, Shape, Bucket)>,
    /// The time limit of a job.
    deadline: Duration,
    /// The device's buffer for the outputs if the child reads and writes the device's buffers; `None` if the arrays go
    /// through the file.
    shared: Option<Buffer>,
    /// The job in progress.
    under_way: Option<Plan>,
}

/// How a job runs: the kernel's index, the parameters of each dispatch, and the number of dispatches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Plan {
    kernel: usize,
    job: Job,
    dispatches: u32,
}

impl Plan {
    /// Marks the outputs of the dispatches in memory that the child writes.
    fn mark(&self, outputs: &Buffer) {
        for first in self.outputs() {
            marks::put(&self.job, |at, word| outputs.write(first + at, &[word]));
        }
    }

    /// Whether the dispatches wrote their outputs.
    fn check_marks(&self, outputs: &Buffer) -> Result<(), NpuError> {
        let word = |at: u64| {
            let mut word = [0];
            outputs.read(at, &mut word);
            word[0]
        };
        self.outputs().try_for_each(|first| marks::check(&self.job, |at| word(first + at)))
    }

    /// The first byte of each dispatch's output.
    fn outputs(&self) -> impl Iterator<Item = u64> + use<> {
        let bytes = self.job.layout().bytes()[3];
        (0..u64::from(self.dispatches)).map(move |dispatch| dispatch * bytes)
    }
}

impl NpuProcess {
    /// The numbers of KV heads up to `most` for which kernels exist, in ascending order.
    pub fn kv_head_counts(&self, most: usize) -> Vec<usize> {
        let is_computed = |kv_heads: &usize| {
            self.kernels.iter().any(|(.., bucket)| kv_heads.is_multiple_of(bucket.groups() as usize))
        };
        (1..=most).filter(is_computed).collect()
    }

    /// Starts `command`, which opens the NPU. Its standard input is its end of the channel. `most_keys` is the maximum
    /// number of keys of a job, and `deadline` the time limit of a job.
    pub fn start(
        command: Command,
        start: &Start,
        heads: HeadShape,
        most_keys: usize,
        deadline: Duration,
        cancelled: &Arc<AtomicBool>,
    ) -> Result<NpuProcess, NpuError> {
        let broken = |error: std::io::Error| {
            NpuError::new(NpuCode::Process, format!("the NPU's process cannot be started: {error}"))
        };
        let connection = Connection::spawn(command, "NPU", cancelled).map_err(broken)?;
        let mut connection = connection.with_last_wait(LAST_WAIT);
        let arrays = memfd_create("unicorn-npu", MemfdFlags::CLOEXEC).map(File::from);
        let arrays = arrays.map_err(|error| broken(error.into()))?;
        connection.send(start)?;
        connection.send_files(std::slice::from_ref(&arrays))?;
        let Ready { xrt, device, is_double, kernels, refused } = connection.receive::<Opened>(OPEN)??;
        let facts = NpuFacts { xrt, device, is_double };
        for (name, error) in &refused {
            tracing::warn!("npu      the kernel {name} is not used: {error}");
        }
        let mut fitting = Vec::new();
        for (index, kernel) in kernels.iter().enumerate() {
            let parts = kernel.parts();
            let (shape, bucket) =
                parts.map_err(|error| NpuError::new(NpuCode::KernelInvalid, error.to_string()))?;
            let is_of_heads = shape.head_dim() as usize == heads.head_dim
                && shape.heads_per_group() as usize == heads.heads_per_group;
            if is_of_heads && bucket.keys() as usize <= most_keys {
                fitting.push((index, shape, bucket));
            }
        }
        if let ([], Some((name, error))) = (&fitting[..], refused.first()) {
            let folder = start.kernels.display();
            return Err(NpuError::new(
                NpuCode::KernelInvalid,
                format!("{folder}: {name}: {}", error.message),
            ));
        }
        if fitting.is_empty() {
            let HeadShape { head_dim, heads_per_group } = heads;
            return Err(NpuError::new(
                NpuCode::KernelMissing,
                format!(
                    "{}: none of its {} kernels is for head_dim {head_dim}, {heads_per_group} query heads for each KV head, \
                     and at most {most_keys} keys (npu.keys): build them with `unicorn npu build-kernels`",
                    start.kernels.display(),
                    kernels.len()
                ),
            ));
        }
        Ok(NpuProcess {
            connection,
            arrays,
            facts,
            kernels: fitting,
            deadline,
            shared: None,
            under_way: None,
        })
    }

    /// The facts about the NPU.
    pub fn facts(&self) -> &NpuFacts {
        &self.facts
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.connection.id()
    }

    /// Tests that each kernel computes attention of random numbers within the error bound of its arithmetic. Returns
    /// the number of kernels.
    pub fn self_test(&mut self) -> Result<usize, NpuError> {
        for index in 0..self.kernels.len() {
            self.test(index, None)?;
        }
        Ok(self.kernels.len())
    }

    /// Tests one kernel. If `buffers` is given, uses these buffers of the device, which must already be shared.
    fn test(&mut self, index: usize, buffers: Option<[&Buffer; 4]>) -> Result<(), NpuError> {
        let (_, shape, bucket) = self.kernels[index];
        test_jobs(shape, bucket).into_iter().try_for_each(|job| self.test_on(index, job, buffers))
    }

    fn test_on(&mut self, index: usize, job: Job, buffers: Option<[&Buffer; 4]>) -> Result<(), NpuError> {
        let (kernel, shape, bucket) = self.kernels[index];
        let inputs = Inputs::random(&job, index as u64, SCORE_DEVIATION);
        let rounded = inputs.rounded();
        let arrays: [&[u8]; 3] =
            [&rounded.queries, &rounded.keys, &rounded.values].map(|numbers| bytemuck::cast_slice(numbers));
        let numbers = (job.layout().bytes()[3] / 4) as usize;
        let mut output = vec![f32::NAN; numbers];
        let plan = Plan { kernel, job, dispatches: 1 };
        match buffers {
            Some(buffers) => {
                let poison = bytemuck::cast_slice(&output);
                arrays.into_iter().chain([poison]).zip(buffers).for_each(|(bytes, to)| to.write(0, bytes));
                self.hand_over(plan, None)?;
                self.take_back(None)?;
                buffers[3].read(0, &mut output);
            }
            None => {
                self.hand_over(plan, Some(arrays))?;
                self.take_back(Some(bytemuck::cast_slice_mut(&mut output)))?;
            }
        }
        let is_finite = finite_rows(&job, &output);
        let worst = Reference::of_rows(&job, &inputs, ROWS_APART).worst(&output);
        if is_finite && worst <= 1.0 {
            return Ok(());
        }
        self.connection.give_up();
        let place = if buffers.is_some() { " in memory that it shares with the GPU" } else { "" };
        let worst = if is_finite { worst } else { f64::INFINITY };
        Err(NpuError::new(
            NpuCode::SelfTest,
            format!(
                "the NPU computes wrong{place}: attention of random numbers is {worst:.1} times as far from exact attention \
                 as its arithmetic allows, with the kernel of {shape:?} and {bucket:?}"
            ),
        ))
    }

    /// Plans a job with the kernel that needs the least work. A dispatch computes as many KV heads as the kernels
    /// allow.
    fn plan(&self, job: &OffloadJob) -> Option<Plan> {
        let kv_heads = u32::try_from(job.kv_heads).ok()?;
        let plans = self.kernels.iter().filter_map(|&(kernel, shape, bucket)| {
            if !kv_heads.is_multiple_of(bucket.groups()) {
                return None;
            }
            let dispatches = kv_heads / bucket.groups();
            let planned = job_on(shape, bucket, job)?;
            let tiles = (0..shape.passes(bucket)).map(|pass| u64::from(shape.walk(bucket, pass).tiles));
            let work = u64::from(dispatches) * tiles.sum::<u64>() * u64::from(shape.pass_rows());
            Some((work, Plan { kernel, job: planned, dispatches }))
        });
        plans.min_by_key(|(work, plan)| (*work, plan.kernel)).map(|(_, plan)| plan)
    }

    fn write(&self, array: usize, bytes: &[u8]) -> Result<(), NpuError> {
        let written = self.arrays.write_all_at(bytes, ARRAYS[array]);
        written.map_err(|error| NpuError::new(NpuCode::Process, format!("the file of the arrays: {error}")))
    }

    /// Sends a job. `inputs` is `None` if they are in shared memory.
    fn send(&mut self, plan: &Plan, inputs: Option<[&[u8]; 3]>) -> Result<(), NpuError> {
        for (array, bytes) in inputs.into_iter().flatten().enumerate() {
            self.write(array, bytes)?;
        }
        let Plan { kernel, job, dispatches } = *plan;
        let (deadline, shared) = (self.deadline, inputs.is_none());
        let attend = Attend { kernel, words: job.to_words(), dispatches, deadline, shared };
        Ok(self.connection.send(&Request::Attend(attend))?)
    }

    /// Sends a job. If its output is in shared memory, marks the output first. Otherwise the child's transport marks
    /// it.
    fn hand_over(&mut self, plan: Plan, inputs: Option<[&[u8]; 3]>) -> Result<(), NpuError> {
        let shared = self.shared.as_ref().filter(|_| inputs.is_none());
        shared.into_iter().for_each(|outputs| plan.mark(outputs));
        self.under_way = Some(plan);
        let sent = self.send(&plan, inputs);
        self.checked(sent)
    }

    /// Waits for the job, and reads or checks its output.
    fn take_back(&mut self, output: Option<&mut [u8]>) -> Result<(), NpuError> {
        let plan = self.under_way.take().expect("a job was handed over");
        let is_shared = output.is_none();
        let written = self.receive(output).and_then(|()| match &self.shared {
            Some(outputs) if is_shared => {
                plan.check_marks(outputs).inspect_err(|_| self.connection.give_up())
            }
            _ => Ok(()),
        });
        self.checked(written)
    }

    /// Releases the device's memory after an error, because the process may take a long time to end.
    fn checked(&mut self, result: Result<(), NpuError>) -> Result<(), NpuError> {
        result.inspect_err(|_| self.shared = None)
    }

    /// Waits for the end of the request. `output` is for a job whose output is in the file.
    fn receive(&mut self, output: Option<&mut [u8]>) -> Result<(), NpuError> {
        // This longer limit is for a child that exceeds the deadline.
        let done = self.connection.receive::<Done>(LOAD + self.deadline)?;
        done.inspect_err(|_| self.connection.give_up())?;
        let read = output.map_or(Ok(()), |output| self.arrays.read_exact_at(output, ARRAYS[3]));
        read.map_err(|error| NpuError::new(NpuCode::Process, format!("the file of the arrays: {error}")))
    }
}

/// Whether every row of a job has an output. In shared memory, an unwritten row is still NaN.
fn finite_rows(job: &Job, output: &[f32]) -> bool {
    job.heads().all(|(group, head)| {
        let at = |row: u32| (job.layout().output(group, head, row) / 4) as usize;
        output[at(0)..at(job.rows())].iter().all(|number| number.is_finite())
    })
}

/// The job on a kernel, if the kernel walks over all keys that the job sees.
fn job_on(shape: Shape, bucket: Bucket, job: &OffloadJob) -> Option<Job> {
    let first = u32::try_from(job.first).ok()?;
    let len = u32::try_from(job.rows).ok()?;
    let window = job.window.map(u32::try_from).transpose().ok()?;
    let key0 = match shape.window() {
        None => 0,
        Some(window) => {
            let before = first.checked_sub(window - 1)?;
            before - before % shape.tile()
        }
    };
    let keys = RowRange { first: key0, len: first.checked_add(len)? - key0 };
    Job::new(shape, bucket, RowRange { first, len }, keys, window).ok()
}

/// Jobs that use almost the full bucket of a kernel. A kernel that walks over all keys has two: it also computes the
/// first tokens of windowed layers, with the window in its mask.
fn test_jobs(shape: Shape, bucket: Bucket) -> Vec<Job> {
    let rows = bucket.rows() - 3;
    let (offset, windows) = match shape.window() {
        None => (bucket.keys() - bucket.rows(), vec![None, Some(4 * shape.tile())]),
        Some(window) => (window + 1, vec![Some(window)]),
    };
    let job = |window: Option<u32>| {
        let job = OffloadJob {
            window: window.map(|window| window as usize),
            first: offset as usize,
            rows: rows as usize,
            kv_heads: bucket.groups() as usize,
        };
        job_on(shape, bucket, &job).expect("a kernel computes the jobs that it was made for")
    };
    windows.into_iter().map(job).collect()
}

impl AttentionUnit for NpuProcess {
    fn room(&self, job: &OffloadJob) -> Option<OffloadRoom> {
        let Plan { job, .. } = self.plan(job)?;
        Some(OffloadRoom {
            first_key: job.key0() as usize,
            keys: job.keys() as usize,
            key_stride: job.bucket().keys() as usize,
            row_stride: job.bucket().rows() as usize,
        })
    }

    fn share(&mut self, buffers: [&Buffer; 4]) -> Result<(), OffloadError> {
        let mut descriptors = Vec::with_capacity(buffers.len());
        for buffer in buffers {
            descriptors.push(buffer.export().map_err(not_shared)?);
        }
        let request = Request::Share(buffers.map(Buffer::size));
        self.connection.send(&request).map_err(NpuError::from)?;
        self.connection.send_files(&descriptors).map_err(NpuError::from)?;
        self.receive(None)?;
        self.shared = Some(buffers[3].clone());
        // The kernels are tested again with shared memory, because the caches of two devices are now involved.
        for index in 0..self.kernels.len() {
            let (_, shape, bucket) = self.kernels[index];
            let bytes = Layout::of(shape, bucket).bytes();
            // A kernel for more KV heads than the buffers hold is never used with them.
            if bytes.iter().zip(buffers).all(|(bytes, buffer)| *bytes <= buffer.size()) {
                self.test(index, Some(buffers))?;
            }
        }
        Ok(())
    }

    fn begin(&mut self, job: &OffloadJob, inputs: Option<[&[u8]; 3]>) -> Result<(), OffloadError> {
        assert_eq!(inputs.is_none(), self.shared.is_some(), "inputs in shared memory");
        let plan = self.plan(job).expect("a job that has room");
        Ok(self.hand_over(plan, inputs)?)
    }

    fn finish(&mut self, output: Option<&mut [u8]>) -> Result<(), OffloadError> {
        Ok(self.take_back(output)?)
    }
}

impl From<NpuError> for OffloadError {
    fn from(error: NpuError) -> Self {
        OffloadError { code: error.code.name().to_owned(), message: error.message }
    }
}

impl From<ConnectionError> for NpuError {
    fn from(error: ConnectionError) -> Self {
        match error {
            ConnectionError::Hung { seconds } => NpuError::new(
                NpuCode::Timeout,
                format!("the NPU hangs: its process has said nothing for {seconds} s, and is ended"),
            ),
            gone => NpuError::new(NpuCode::Process, format!("the NPU was lost: {gone}")),
        }
    }
}
