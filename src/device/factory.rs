//! Starts the device process of a server, starts it again after a loss, and queries the state of the device from it.

use std::any::Any;
use std::fs::File;
use std::io;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::loading::{LoadLog, Loading};
use super::message::{Load, Measure, Question, Refusal, Task};
use super::report::{DeviceReport, DeviceState, NpuReport};
use super::{Channel, Connection, ConnectionError, DeviceProcess};
use crate::checkpoint::{CheckpointError, HeldNames, ModelFiles};
use crate::config::{Config, LogFormat};
use crate::model::{Runner, RunnerError, RunnerFactory};
use crate::tensor::VisionMode;

/// How long a load may make no progress, unless `hardware.hang_timeout_s` is longer. The smallest steps of a load are a
/// kernel, which takes software Vulkan seconds to compile, and 2 MiB of weights, which may take a slow disk seconds.
const LOAD_STALL: Duration = Duration::from_secs(120);
/// Longest wait for an answer about the state of the device.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// Why a device process did not load its model.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("the channel to the device process failed: {0}")]
    Channel(io::Error),
    #[error("{}", .0.message)]
    Refused(Refusal),
    #[error(
        "the load was aborted: no progress for {seconds} s ({doing}). `dmesg` may say why the disk or the driver \
         does not answer; if they are only slow, raise hardware.hang_timeout_s"
    )]
    Hung { doing: Loading, seconds: u64 },
    #[error(transparent)]
    Runner(#[from] RunnerError),
}

impl From<ConnectionError> for StartError {
    fn from(error: ConnectionError) -> Self {
        Self::Runner(error.into())
    }
}

/// Waits until no other model computes, and keeps it so until the value is dropped. `None` = the flag was set, which cancels
/// the load.
pub type Exclusive = Box<dyn Fn(&AtomicBool) -> Option<Box<dyn Any>> + Send>;

/// Starts device processes for one model, whose files it keeps open.
pub struct DeviceFactory {
    /// The server's options. After the first load, they say whether the model has its vision tower: a later load has the same
    /// memory, and must not decide otherwise.
    config: Config,
    log_format: Option<LogFormat>,
    model: ModelFiles,
    draft: Option<ModelFiles>,
    vocab_size: usize,
    /// How long a load may make no progress.
    patience: Duration,
    observer: Observer,
    /// `None` = there are no other models.
    exclusive: Option<Exclusive>,
    /// The state of the NPU at the first load. Later loads use the NPU in the same way.
    npu: Option<NpuReport>,
}

impl DeviceFactory {
    pub fn new(
        config: &Config,
        model: &ModelFiles,
        draft: Option<&ModelFiles>,
        vocab_size: usize,
        observer: Observer,
    ) -> Result<Self, CheckpointError> {
        Ok(Self {
            config: config.clone(),
            log_format: config.log.format,
            model: model.hold()?,
            draft: draft.map(ModelFiles::hold).transpose()?,
            vocab_size,
            patience: config
                .hardware
                .hang_timeout_s
                .map_or(LOAD_STALL, |s| LOAD_STALL.max(Duration::from_secs(s as u64))),
            observer,
            exclusive: None,
            npu: None,
        })
    }

    /// Each load measures the device only while no other model computes.
    #[must_use]
    pub fn with_exclusive(self, exclusive: Exclusive) -> Self {
        Self { exclusive: Some(exclusive), ..self }
    }

    /// Starts a process that loads the model.
    pub fn load(&mut self, cancelled: &Arc<AtomicBool>) -> Result<(DeviceProcess, DeviceReport), StartError> {
        // Not the path of the program: a package upgrade may have replaced the file.
        let mut command = Command::new("/proc/self/exe");
        command.arg("device-process").env("RUST_LOG", self.observer.log_filter());
        if let Some(format) = self.log_format {
            command.env("UNICORN_LOG_FORMAT", format.name());
        }
        let mut connection = Connection::spawn(command, "GPU", cancelled).map_err(StartError::Channel)?;
        let parts = |files: &ModelFiles| files.to_parts().expect("files that are open, or in this binary");
        let (model, files): (HeldNames, Vec<Arc<File>>) = parts(&self.model);
        let (draft, draft_files) = self.draft.as_ref().map(parts).unzip();
        let (options, vocab_size) = (self.config.to_toml(), self.vocab_size);
        connection.send(&Task { options, model, draft, vocab_size, npu: self.npu.clone() })?;
        connection.send_files(&files)?;
        if let Some(files) = draft_files {
            connection.send_files(&files)?;
        }
        let (observer, socket) = Channel::new().map_err(StartError::Channel)?;
        connection.send_files(&[socket])?;
        let loaded = self.loaded(&mut connection, cancelled);
        self.observer.set_loading(None);
        let loaded = loaded?;
        self.npu = self.npu.take().or_else(|| loaded.npu.clone());
        let runner = DeviceProcess::new(connection, loaded.hang_timeout)?;
        self.config.model.vision =
            if runner.limits().images.is_some() { VisionMode::On } else { VisionMode::Off };
        self.observer.watch(observer);
        Ok((runner, loaded))
    }

    /// Waits until the model is loaded, as long as the load makes progress.
    fn loaded(
        &self,
        connection: &mut Connection,
        cancelled: &AtomicBool,
    ) -> Result<DeviceReport, StartError> {
        let mut log = LoadLog::begin();
        // Held while the child measures.
        let mut alone = None;
        loop {
            self.observer.set_loading(Some(log.doing()));
            match connection.receive_meanwhile(self.patience, || log.log_if_due()) {
                Ok(Load::Doing(doing)) => {
                    let begins = !doing.is_same_step(log.doing());
                    log.take(doing);
                    self.observer.set_loading(Some(doing));
                    if begins && doing == Loading::Tuning {
                        alone = self.wait_until_alone(cancelled)?;
                        connection.send(&Measure)?;
                    } else if begins {
                        drop(alone.take());
                    }
                }
                Ok(Load::Done(loaded)) => return Ok(*loaded),
                Ok(Load::Refused(refusal)) => return Err(StartError::Refused(refusal)),
                Err(ConnectionError::Hung { seconds }) => {
                    return Err(StartError::Hung { doing: log.doing(), seconds });
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until no other model computes, if there are others.
    fn wait_until_alone(&self, cancelled: &AtomicBool) -> Result<Option<Alone>, StartError> {
        let Some(exclusive) = &self.exclusive else { return Ok(None) };
        tracing::debug!("waiting until no other model computes");
        match exclusive(cancelled) {
            Some(guard) => Ok(Some(Alone { since: Instant::now(), _guard: guard })),
            None => Err(ConnectionError::Cancelled.into()),
        }
    }
}

/// The time of one model alone on the device, until it is dropped.
struct Alone {
    since: Instant,
    _guard: Box<dyn Any>,
}

impl Drop for Alone {
    fn drop(&mut self) {
        tracing::debug!(
            "had the device alone for {:.3} s, to measure it",
            self.since.elapsed().as_secs_f64()
        );
    }
}

impl RunnerFactory for DeviceFactory {
    fn start(&mut self, cancelled: &Arc<AtomicBool>) -> Result<Box<dyn Runner>, RunnerError> {
        match self.load(cancelled) {
            Ok((runner, _)) => Ok(Box::new(runner)),
            Err(StartError::Runner(error)) => Err(error),
            Err(error) => Err(RunnerError::Lost(format!("the model could not be reloaded: {error}"))),
        }
    }
}

/// Queries the state of the device from the present process, and sets its log filter.
#[derive(Clone)]
pub struct Observer(Arc<Mutex<Observing>>);

struct Observing {
    channel: Option<Channel>,
    /// The state of a load in progress.
    loading: Option<Loading>,
    /// Whether an answer has not arrived in time and is still outstanding.
    answer_is_late: bool,
    log_filter: String,
}

impl Observer {
    pub fn new(log_filter: String) -> Self {
        Self(Arc::new(Mutex::new(Observing {
            channel: None,
            loading: None,
            answer_is_late: false,
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

    /// The state of the device; `None` if there is no process, or if it does not answer in time. This resets the
    /// kernels' times.
    pub fn observe(&self) -> Option<DeviceState> {
        let mut observing = self.lock();
        let Observing { channel, answer_is_late, .. } = &mut *observing;
        ask(channel.as_mut()?, answer_is_late).unwrap_or_else(|_| {
            *channel = None;
            None
        })
    }
}

/// Asks a device process for its state; `None` if it does not answer in time. A late answer is read and discarded
/// before the next question, because otherwise it would be taken for the answer to that question.
fn ask(channel: &mut Channel, answer_is_late: &mut bool) -> io::Result<Option<DeviceState>> {
    loop {
        let is_late = *answer_is_late;
        if !is_late {
            channel.send(&Question::Observe)?;
            *answer_is_late = true;
        }
        // A late answer was already waited for once, so this does not wait again.
        if !channel.poll(if is_late { Duration::ZERO } else { ANSWER_TIMEOUT })? {
            return Ok(None);
        }
        let state = channel.receive()?.ok_or(io::ErrorKind::UnexpectedEof)?;
        *answer_is_late = false;
        if !is_late {
            return Ok(Some(state));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn a_process_that_answered_too_late_is_asked_again() {
        let (channel, socket) = Channel::new().expect("a channel");
        let (release, wait) = mpsc::channel::<()>();
        let process = thread::spawn(move || {
            let mut channel = Channel::from_socket(socket).expect("the other end");
            let mut asked = 0;
            while let Ok(Some(question)) = channel.receive::<Question>() {
                if !matches!(question, Question::Observe) {
                    continue;
                }
                asked += 1;
                if asked == 1 {
                    wait.recv().expect("the test releases it");
                }
                channel
                    .send(&DeviceState { dispatches: asked, ..DeviceState::default() })
                    .expect("the observer waits");
            }
            asked
        });
        let observer = Observer::new(String::new());
        assert!(observer.observe().is_none(), "there is no process");
        observer.watch(channel);
        let ask = || observer.observe().map(|state| state.dispatches);
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
