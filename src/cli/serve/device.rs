//! The device process of a server: starts it, again and again where that must be, and asks it how the GPU does.

use std::fs::File;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::checkpoint::{HeldNames, ModelFiles};
use crate::cli::device_process::{DeviceFacts, Loaded, Observed, Question, Task};
use crate::cli::error::Error;
use crate::cli::npu_start::NpuStart;
use crate::config::{Config, LogFormat};
use crate::model::child_process::{Channel, Connection};
use crate::model::device_process::DeviceProcess;
use crate::model::{Runner, RunnerError, RunnerFactory};

/// The longest time for an answer about how the GPU does.
const OBSERVE: Duration = Duration::from_millis(500);

/// Starts device processes for one model, whose files it holds open.
pub struct DeviceFactory {
    options: String,
    log_format: Option<LogFormat>,
    model: ModelFiles,
    draft: Option<ModelFiles>,
    vocab_size: usize,
    observer: Observer,
    /// What became of the NPU at the first load. Every later one keeps to it.
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
            observer,
            npu: None,
        })
    }

    /// Starts a process that loads the model.
    pub fn load(&mut self, cancelled: &Arc<AtomicBool>) -> Result<(DeviceProcess, DeviceFacts), Error> {
        // A package that was upgraded meanwhile has put another program at this one's path.
        let mut command = Command::new("/proc/self/exe");
        command.arg("device-process").env("RUST_LOG", self.observer.log_filter());
        if let Some(format) = self.log_format {
            command.env("UNICORN_LOG_FORMAT", format.name());
        }
        let mut connection = Connection::spawn(command, "GPU", cancelled).map_err(Error::Channel)?;
        let parts =
            |files: &ModelFiles| files.to_parts().expect("files that are held, of a disk or of this binary");
        let (model, mut files): (HeldNames, Vec<Arc<File>>) = parts(&self.model);
        let draft = self.draft.as_ref().map(parts);
        let (draft, more) = draft.unzip();
        files.extend(more.into_iter().flatten());
        let (options, vocab_size) = (self.options.clone(), self.vocab_size);
        connection.send(&Task { options, model, draft, vocab_size, npu: self.npu.clone() })?;
        connection.send_files(&files)?;
        let (observer, socket) = Channel::new().map_err(Error::Channel)?;
        connection.send_files(&[socket])?;
        let facts = connection.receive::<Loaded>(None)?;
        let facts = facts.map_err(|refusal| Error::Device(refusal.message, refusal.exit_code))?;
        self.npu = self.npu.take().or_else(|| facts.npu.clone());
        let runner = DeviceProcess::new(connection, facts.hang_timeout)?;
        self.observer.watch(observer);
        Ok((runner, facts))
    }
}

impl RunnerFactory for DeviceFactory {
    fn start(&mut self, cancelled: &Arc<AtomicBool>) -> Result<Box<dyn Runner>, RunnerError> {
        match self.load(cancelled) {
            Ok((runner, _)) => Ok(Box::new(runner)),
            Err(Error::Runner(error)) => Err(error),
            Err(error) => Err(RunnerError::Lost(format!("the model could not be loaded again: {error}"))),
        }
    }
}

/// Asks the device process that runs now how the GPU does, and has its log filter.
#[derive(Clone)]
pub struct Observer(Arc<Mutex<Observing>>);

struct Observing {
    channel: Option<Channel>,
    log_filter: String,
}

impl Observer {
    pub fn new(log_filter: String) -> Self {
        Self(Arc::new(Mutex::new(Observing { channel: None, log_filter })))
    }

    fn lock(&self) -> MutexGuard<'_, Observing> {
        self.0.lock().expect("nothing panics under this lock")
    }

    fn watch(&self, channel: Channel) {
        let filter = {
            let mut observing = self.lock();
            observing.channel = Some(channel);
            observing.log_filter.clone()
        };
        // It may be another one than when the process was started.
        self.set_log_filter(filter);
    }

    fn log_filter(&self) -> String {
        self.lock().log_filter.clone()
    }

    /// Sets the log's filter of the device process, and of those that follow.
    pub fn set_log_filter(&self, filter: String) {
        let mut observing = self.lock();
        if let Some(channel) = &mut observing.channel {
            // A process that has ended is followed by one with this filter.
            let _ = channel.send(&Question::Log(filter.clone()));
        }
        observing.log_filter = filter;
    }

    /// None while there is no process, or where it does not answer in time. `kernels` takes the kernels' times.
    pub fn observe(&self, kernels: bool) -> Option<Observed> {
        let mut observing = self.lock();
        let observed = observing.channel.as_mut().and_then(|channel| {
            channel.send(&Question::Observe { kernels }).ok()?;
            channel.poll(OBSERVE).ok().filter(|there| *there)?;
            channel.receive().ok()?
        });
        if observed.is_none() {
            // A late answer would be taken for that to the next question.
            observing.channel = None;
        }
        observed
    }
}
