//! The device process of a server: starts it, restarts it after a loss, and queries the state of the GPU from it.

use std::fs::File;
use std::io;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::npu::NpuAccount;
use crate::checkpoint::{HeldNames, ModelFiles};
use crate::cli::device_process::{DeviceFacts, Load, Observed, Question, Task};
use crate::cli::error::Error;
use crate::cli::loading::{LoadLog, Loading};
use crate::cli::npu_start::NpuStart;
use crate::config::{Config, LogFormat};
use crate::model::child_process::{Channel, Connection, ConnectionError};
use crate::model::device_process::DeviceProcess;
use crate::model::offload::OffloadCounts;
use crate::model::{Runner, RunnerError, RunnerFactory};

/// How long a load may make no progress, unless `hardware.hang_timeout_s` is longer. The smallest steps of a load are a
/// kernel, which takes software Vulkan seconds to compile, and 2 MiB of weights, which may take a slow disk seconds.
const LOAD_STALL: Duration = Duration::from_secs(120);
/// Longest wait for an answer about the state of the GPU.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// Starts device processes for one model, whose files it keeps open.
pub struct DeviceFactory {
    options: String,
    log_format: Option<LogFormat>,
    model: ModelFiles,
    draft: Option<ModelFiles>,
    vocab_size: usize,
    /// How long a load may make no progress.
    patience: Duration,
    observer: Observer,
    /// The state of the NPU at the first load. Later loads use the NPU in the same way.
    npu: Option<NpuStart>,
}

impl DeviceFactory {
    pub fn new(
        config: &Config,
        model: &ModelFiles,
        draft: Option<&ModelFiles>,
        vocab_size: usize,
        observer: Observer,
    ) -> Result<Self, Error> {
        Ok(Self {
            options: config.to_toml(),
            log_format: config.log.format,
            model: model.hold()?,
            draft: draft.map(ModelFiles::hold).transpose()?,
            vocab_size,
            patience: config
                .hardware
                .hang_timeout_s
                .map_or(LOAD_STALL, |s| LOAD_STALL.max(Duration::from_secs(s as u64))),
            observer,
            npu: None,
        })
    }

    /// Starts a process that loads the model.
    pub fn load(&mut self, cancelled: &Arc<AtomicBool>) -> Result<(DeviceProcess, DeviceFacts), Error> {
        // Not the path of the program: a package upgrade may have replaced the file.
        let mut command = Command::new("/proc/self/exe");
        command.arg("device-process").env("RUST_LOG", self.observer.log_filter());
        if let Some(format) = self.log_format {
            command.env("UNICORN_LOG_FORMAT", format.name());
        }
        let mut connection = Connection::spawn(command, "GPU", cancelled).map_err(Error::Channel)?;
        let parts = |files: &ModelFiles| files.to_parts().expect("files that are open, or in this binary");
        let (model, files): (HeldNames, Vec<Arc<File>>) = parts(&self.model);
        let (draft, draft_files) = self.draft.as_ref().map(parts).unzip();
        let (options, vocab_size) = (self.options.clone(), self.vocab_size);
        connection.send(&Task { options, model, draft, vocab_size, npu: self.npu.clone() })?;
        connection.send_files(&files)?;
        if let Some(files) = draft_files {
            connection.send_files(&files)?;
        }
        let (observer, socket) = Channel::new().map_err(Error::Channel)?;
        connection.send_files(&[socket])?;
        let loaded = self.loaded(&mut connection)?;
        self.npu = self.npu.take().or_else(|| loaded.npu.clone());
        let runner = DeviceProcess::new(connection, loaded.hang_timeout)?;
        self.observer.watch(observer);
        Ok((runner, loaded))
    }

    /// Waits until the model is loaded, as long as the load makes progress.
    fn loaded(&self, connection: &mut Connection) -> Result<DeviceFacts, Error> {
        let mut log = LoadLog::begin();
        loop {
            self.observer.set_loading(Some(log.doing()));
            match connection.receive_meanwhile(self.patience, || log.log_if_due()) {
                Ok(Load::Doing(doing)) => log.take(doing),
                Ok(Load::Done(loaded)) => {
                    self.observer.set_loading(None);
                    return Ok(*loaded);
                }
                Ok(Load::Refused(refusal)) => return Err(Error::Device(refusal.message, refusal.exit_code)),
                Err(ConnectionError::Hung { seconds }) => {
                    return Err(Error::LoadHung { doing: log.doing().to_string(), seconds });
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl RunnerFactory for DeviceFactory {
    fn start(&mut self, cancelled: &Arc<AtomicBool>) -> Result<Box<dyn Runner>, RunnerError> {
        match self.load(cancelled) {
            Ok((runner, _)) => Ok(Box::new(runner)),
            Err(Error::Runner(error)) => Err(error),
            Err(error) => Err(RunnerError::Lost(format!("the model could not be reloaded: {error}"))),
        }
    }
}

/// Queries the state of the GPU from the present device process, and sets its log filter.
#[derive(Clone)]
pub struct Observer(Arc<Mutex<Observing>>);

struct Observing {
    channel: Option<Channel>,
    /// The state of a load in progress.
    loading: Option<Loading>,
    /// Whether an answer has not arrived in time and is still outstanding.
    answer_is_late: bool,
    npu: NpuAccount,
    log_filter: String,
}

impl Observer {
    pub fn new(log_filter: String) -> Self {
        let npu = NpuAccount::default();
        Self(Arc::new(Mutex::new(Observing {
            channel: None,
            loading: None,
            answer_is_late: false,
            npu,
            log_filter,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Observing> {
        self.0.lock().expect("nothing panics under this lock")
    }

    fn watch(&self, channel: Channel) {
        let filter = {
            let mut observing = self.lock();
            (observing.channel, observing.answer_is_late) = (Some(channel), false);
            observing.npu.process_started();
            observing.log_filter.clone()
        };
        // The filter may have changed since the start of the process.
        self.set_log_filter(filter);
    }

    fn set_loading(&self, loading: Option<Loading>) {
        self.lock().loading = loading;
    }

    /// A description of the load in progress; `None` if no load is in progress.
    pub fn loading(&self) -> Option<String> {
        self.lock().loading.map(|loading| loading.to_string())
    }

    fn log_filter(&self) -> String {
        self.lock().log_filter.clone()
    }

    /// Sets the log filter of the present device process and of later ones.
    pub fn set_log_filter(&self, filter: String) {
        let mut observing = self.lock();
        if let Some(channel) = &mut observing.channel {
            // If the process has ended, the next one starts with this filter.
            let _ = channel.send(&Question::Log(filter.clone()));
        }
        observing.log_filter = filter;
    }

    /// The state of the GPU; `None` if there is no process, or if it does not answer in time. `kernels`: also get the
    /// times of the kernels, which resets them.
    pub fn observe(&self, kernels: bool) -> Option<Observed> {
        let mut observing = self.lock();
        let Observing { channel, answer_is_late, npu, .. } = &mut *observing;
        match ask(channel.as_mut()?, answer_is_late, kernels) {
            Ok(observed) => {
                observed
                    .iter()
                    .filter_map(|observed| observed.npu.clone())
                    .for_each(|report| npu.take(report));
                observed
            }
            Err(_) => {
                *channel = None;
                None
            }
        }
    }

    /// The state of the NPU at the last load, and the counts of its work since the server started, as last reported by
    /// the device processes; `None` if `npu.mode` is off.
    pub fn npu(&self) -> Option<(NpuStart, OffloadCounts)> {
        self.lock().npu.total()
    }
}

/// Queries the state of the GPU from a device process; `None` if it does not answer in time. A late answer is read and
/// discarded before the next question, because otherwise it would be taken for the answer to that question.
fn ask(channel: &mut Channel, answer_is_late: &mut bool, kernels: bool) -> io::Result<Option<Observed>> {
    loop {
        let is_late = *answer_is_late;
        if !is_late {
            channel.send(&Question::Observe { kernels })?;
            *answer_is_late = true;
        }
        // A late answer was already waited for once, so this does not wait again.
        if !channel.poll(if is_late { Duration::ZERO } else { ANSWER_TIMEOUT })? {
            return Ok(None);
        }
        let observed = channel.receive()?.ok_or(io::ErrorKind::UnexpectedEof)?;
        *answer_is_late = false;
        if !is_late {
            return Ok(Some(observed));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// The answer of a process that has submitted this many dispatches.
    fn observed(dispatches: u64) -> Observed {
        Observed {
            heaps: Vec::new(),
            vram: None,
            gtt: None,
            resident: None,
            processor: Duration::ZERO,
            dispatches,
            copies: 0,
            barriers: 0,
            memory_shortages: 0,
            busy: None,
            rested: Duration::ZERO,
            declared: Vec::new(),
            npu: None,
            kernels: Vec::new(),
        }
    }

    #[test]
    fn a_process_that_answered_too_late_is_asked_again() {
        let (channel, socket) = Channel::new().expect("a channel");
        let (release, wait) = mpsc::channel::<()>();
        let process = thread::spawn(move || {
            let mut channel = Channel::from_socket(socket).expect("the other end");
            let mut asked = 0;
            while let Ok(Some(question)) = channel.receive::<Question>() {
                if !matches!(question, Question::Observe { .. }) {
                    continue;
                }
                asked += 1;
                if asked == 1 {
                    wait.recv().expect("the test releases it");
                }
                channel.send(&observed(asked)).expect("the observer waits");
            }
            asked
        });
        let observer = Observer::new(String::new());
        assert!(observer.observe(false).is_none(), "there is no process");
        observer.watch(channel);
        let ask = || observer.observe(false).map(|observed| observed.dispatches);
        assert_eq!([ask(), ask()], [None, None], "the process is busy, and is asked once");
        release.send(()).expect("the process waits");
        let answered = (0..1000).find_map(|_| {
            thread::sleep(Duration::from_millis(5));
            ask()
        });
        assert!(
            answered >= Some(2),
            "{answered:?}: the late answer to the first question must not be the answer to the next one"
        );
        drop(observer);
        assert!(process.join().expect("the process ends") >= 2);
    }
}
