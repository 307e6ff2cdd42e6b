//! The child process: opens the NPU, and runs the dispatches that the parent requests.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use super::message::{ARRAYS, Attend, Done, Kernel, Opened, Ready, Request, Start};
use crate::device::Channel;
use crate::gpu::timed;
use crate::npu::contract::Job;
use crate::npu::error::{NpuCode, NpuError};
use crate::npu::store::Store;
use crate::npu::transport::{KernelFiles, NpuTransport};

/// Maximum number of kernels that are loaded on the NPU at the same time. Each uses a context. A first-generation NPU
/// has six contexts for all programs together.
const MOST_CONTEXTS: usize = 4;

/// How long an idle NPU stays awake, and how long it may take to wake up. Linux suspends it after 5 s
/// (drivers/accel/amdxdna, autosuspend).
const AWAKE: Duration = Duration::from_secs(4);
const WAKE: Duration = Duration::from_secs(1);

/// Serves the parent until it ends. `open` opens the library that calls XRT.
pub fn serve(
    mut channel: Channel,
    open: impl FnOnce(&Start) -> Result<Box<dyn NpuTransport>, NpuError>,
) -> io::Result<()> {
    let Some(start) = channel.receive::<Start>()? else { return Ok(()) };
    let arrays = channel.receive_file()?;
    let opened = open(&start).and_then(|transport| Ok((transport, Store::open(&start.kernels)?)));
    let (transport, store) = match opened {
        Ok(opened) => opened,
        Err(error) => return channel.send(&Opened::Err(error)),
    };
    let facts = transport.facts().clone();
    let kernels = store.kernels().iter().map(|files| Kernel::new(files.shape, files.bucket)).collect();
    let ready = Ready {
        xrt: facts.xrt,
        device: facts.device,
        is_double: facts.is_double,
        kernels,
        refused: store.refused().to_vec(),
    };
    channel.send(&Opened::Ok(ready))?;
    let mut npu = Npu {
        contexts: Contexts { transport, loaded: VecDeque::new() },
        store,
        arrays,
        buffers: [const { Vec::new() }; 4],
    };
    loop {
        let (request, idle) = timed(|| channel.receive::<Request>());
        let Some(request) = request? else { break };
        let done: Done = match request {
            Request::Share(bytes) => {
                let files = channel.receive_files(4)?;
                npu.share(files, bytes)
            }
            Request::Attend(mut attend) => {
                if idle > AWAKE {
                    attend.deadline += WAKE;
                }
                npu.attend(&attend)
            }
        };
        channel.send(&done)?;
        if done.is_err_and(|error| error.code == NpuCode::Timeout) {
            // The driver still owns the buffers of that dispatch. They are released only when this process ends.
            break;
        }
    }
    Ok(())
}

struct Npu {
    contexts: Contexts,
    store: Store,
    arrays: File,
    /// Queries, keys, values and outputs of a dispatch.
    buffers: [Vec<u8>; 4],
}

impl Npu {
    fn share(&mut self, files: Vec<File>, bytes: [u64; 4]) -> Result<(), NpuError> {
        let buffers: Vec<_> = files.into_iter().map(OwnedFd::from).zip(bytes).collect();
        let buffers = <[_; 4]>::try_from(buffers).map_err(|buffers| {
            let problem = format!("{} buffers to share; expected {}", buffers.len(), bytes.len());
            NpuError::new(NpuCode::BadArgument, problem)
        })?;
        self.contexts.transport.share(buffers)
    }

    fn attend(&mut self, attend: &Attend) -> Result<(), NpuError> {
        let Attend { kernel, words, dispatches, deadline, shared } = attend;
        let bad = |problem: String| NpuError::new(NpuCode::BadArgument, problem);
        let job = Job::from_words(words).map_err(|error| bad(error.to_string()))?;
        let files = self.store.kernels().get(*kernel);
        let files = files.ok_or_else(|| bad(format!("there is no kernel {kernel}")))?;
        if files.bucket != job.bucket() {
            return Err(bad(format!(
                "the job is of {:?}, and the kernel of {:?}",
                job.bucket(),
                files.bucket
            )));
        }
        job.runs_on(files.shape).map_err(|error| bad(error.to_string()))?;
        let context = self.contexts.get(*kernel, files)?;
        let [queries, keys, values, output, _] = job.layout().bytes();
        let sizes = [queries, keys, values, output];
        let mut left = *deadline;
        if *shared {
            for dispatch in 0..u64::from(*dispatches) {
                let offsets = sizes.map(|bytes| dispatch * bytes);
                let transport = &mut self.contexts.transport;
                let (attended, took) = timed(|| transport.attend_shared(context, &job, offsets, left));
                attended?;
                left = left.saturating_sub(took);
            }
            return Ok(());
        }
        for (buffer, bytes) in self.buffers.iter_mut().zip(sizes) {
            buffer.resize(bytes as usize, 0);
        }
        let lost =
            |error: io::Error| NpuError::new(NpuCode::Process, format!("the file of the arrays: {error}"));
        for dispatch in 0..u64::from(*dispatches) {
            let at = |array: usize| ARRAYS[array] + dispatch * sizes[array];
            for (array, buffer) in self.buffers[..3].iter_mut().enumerate() {
                self.arrays.read_exact_at(buffer, at(array)).map_err(lost)?;
            }
            let [queries, keys, values, output] = &mut self.buffers;
            let transport = &mut self.contexts.transport;
            let (attended, took) =
                timed(|| transport.attend(context, &job, queries, keys, values, output, left));
            attended?;
            left = left.saturating_sub(took);
            self.arrays.write_all_at(output, at(3)).map_err(lost)?;
        }
        Ok(())
    }
}

/// The kernels that are loaded on the NPU, least recently used first.
struct Contexts {
    transport: Box<dyn NpuTransport>,
    /// The index of a kernel, and the index of its context.
    loaded: VecDeque<(usize, usize)>,
}

impl Contexts {
    /// The context of a kernel. If too many kernels are loaded, unloads the least recently used one.
    fn get(&mut self, kernel: usize, files: &KernelFiles) -> Result<usize, NpuError> {
        let found = self.loaded.iter().position(|(loaded, _)| *loaded == kernel);
        let context = match found.and_then(|at| self.loaded.remove(at)) {
            Some((_, context)) => context,
            None => {
                if self.loaded.len() == MOST_CONTEXTS
                    && let Some((_, oldest)) = self.loaded.pop_front()
                {
                    self.transport.unload(oldest)?;
                }
                self.transport.load(files)?
            }
        };
        self.loaded.push_back((kernel, context));
        Ok(context)
    }
}
