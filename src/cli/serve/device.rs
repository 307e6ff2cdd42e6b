//! The device process of a server: starts it, again and again where that must be, and asks it how the GPU does.

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

/// How long a load may not get on, unless the device may take longer (`hardware.hang_timeout_s`). Software Vulkan takes
/// seconds for a kernel, and a slow disk for 2 MiB, which are the smallest pieces of a load.
const LOAD_STALL: Duration = Duration::from_secs(120);
/// The longest time for an answer about how the GPU does.
const OBSERVE: Duration = Duration::from_millis(500);

/// Starts device processes for one model, whose files it holds open.
pub struct DeviceFactory {
    options: String,
    log_format: Option<LogFormat>,
    model: ModelFiles,
    draft: Option<ModelFiles>,
    vocab_size: usize,
    /// How long a load may not get on.
    patience: Duration,
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
        // A package that was upgraded meanwhile has put another program at this one's path.
        let mut command = Command::new("/proc/self/exe");
        command.arg("device-process").env("RUST_LOG", self.observer.log_filter());
        if let Some(format) = self.log_format {
            command.env("UNICORN_LOG_FORMAT", format.name());
        }
        let mut connection = Connection::spawn(command, "GPU", cancelled).map_err(Error::Channel)?;
        let parts =
            |files: &ModelFiles| files.to_parts().expect("files that are held, of a disk or of this binary");
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

    /// Waits until the model is loaded, as long as the load gets on.
    fn loaded(&self, connection: &mut Connection) -> Result<DeviceFacts, Error> {
        let mut log = LoadLog::begin();
        loop {
            self.observer.set_loading(Some(log.doing()));
            match connection.receive_meanwhile(self.patience, || log.look()) {
                Ok(Load::Doing(doing)) => log.take(doing),
                Ok(Load::Done(loaded)) => {
                    self.observer.set_loading(None);
                    return Ok(*loaded);
                }
                Ok(Load::Refused(refusal)) => return Err(Error::Device(refusal.message, refusal.exit_code)),
                Err(ConnectionError::Hung { seconds }) => {
                    return Err(Error::LoadHung { doing: log.doing().to_string(), seconds });
                }
                Err(gone) => return Err(gone.into()),
            }
        }
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
    /// What a load is doing that is under way.
    loading: Option<Loading>,
    /// Whether an answer is on its way that was not waited for.
    owes: bool,
    npu: NpuAccount,
    log_filter: String,
}

impl Observer {
    pub fn new(log_filter: String) -> Self {
        let npu = NpuAccount::default();
        Self(Arc::new(Mutex::new(Observing { channel: None, loading: None, owes: false, npu, log_filter })))
    }

    fn lock(&self) -> MutexGuard<'_, Observing> {
        self.0.lock().expect("nothing panics under this lock")
    }

    fn watch(&self, channel: Channel) {
        let filter = {
            let mut observing = self.lock();
            (observing.channel, observing.owes) = (Some(channel), false);
            observing.npu.process_started();
            observing.log_filter.clone()
        };
        // It may be another one than when the process was started.
        self.set_log_filter(filter);
    }

    fn set_loading(&self, loading: Option<Loading>) {
        self.lock().loading = loading;
    }

    /// What the load that is under way does, in words.
    pub fn loading(&self) -> Option<String> {
        self.lock().loading.map(|loading| loading.to_string())
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
        let Observing { channel, owes, npu, .. } = &mut *observing;
        match ask(channel.as_mut()?, owes, kernels) {
            Ok(observed) => {
                observed.iter().filter_map(|observed| observed.npu.clone()).for_each(|said| npu.take(said));
                observed
            }
            Err(_) => {
                *channel = None;
                None
            }
        }
    }

    /// What became of the NPU at the last load, and what NPUs did since the server started, as far as device processes
    /// answered; none where no NPU is wanted.
    pub fn npu(&self) -> Option<(NpuStart, OffloadCounts)> {
        self.lock().npu.total()
    }
}

/// Asks a device process how the GPU does; none if it does not answer in time. An answer that it `owes` since is read
/// before it is asked again, since it would be taken for that to the next question.
fn ask(channel: &mut Channel, owes: &mut bool, kernels: bool) -> io::Result<Option<Observed>> {
    loop {
        let is_late = *owes;
        if !is_late {
            channel.send(&Question::Observe { kernels })?;
            *owes = true;
        }
        // Whoever asks while an answer is late does not wait for it again.
        if !channel.poll(if is_late { Duration::ZERO } else { OBSERVE })? {
            return Ok(None);
        }
        let observed = channel.receive()?.ok_or(io::ErrorKind::UnexpectedEof)?;
        *owes = false;
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

    /// What a process says that has submitted this much.
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
        let (let_go, go) = mpsc::channel::<()>();
        let process = thread::spawn(move || {
            let mut channel = Channel::from_socket(socket).expect("the other end");
            let mut asked = 0;
            while let Ok(Some(question)) = channel.receive::<Question>() {
                if !matches!(question, Question::Observe { .. }) {
                    continue;
                }
                asked += 1;
                if asked == 1 {
                    go.recv().expect("the test lets it go on");
                }
                channel.send(&observed(asked)).expect("it is asked");
            }
            asked
        });
        let observer = Observer::new(String::new());
        assert!(observer.observe(false).is_none(), "there is no process");
        observer.watch(channel);
        let ask = || observer.observe(false).map(|observed| observed.dispatches);
        assert_eq!([ask(), ask()], [None, None], "it is busy, and asked once");
        let_go.send(()).expect("it waits");
        let answered = (0..1000).find_map(|_| {
            thread::sleep(Duration::from_millis(5));
            ask()
        });
        assert!(
            answered >= Some(2),
            "{answered:?}: the answer to the first question is not that to the next"
        );
        drop(observer);
        assert!(process.join().expect("it ends") >= 2);
    }
}
