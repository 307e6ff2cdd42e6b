//! The child process: it receives its task, loads the model, reports the progress of the load, and executes steps until
//! the server ends or the device fails. A thread answers the server's questions meanwhile.
//!
//! The server sends its options and its open files. So a new child, after a loss of the device, loads the same files as
//! the first one.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use super::loading::Loading;
use super::message::{Load, Measure, Question, Refusal, Task};
use super::report::{DeviceReport, DeviceState, NpuReport};
use super::{Channel, serve};
use crate::checkpoint::{HeldNames, ModelFiles};
use crate::config::Config;
use crate::gpu::Device;
use crate::model::{Runner, arch};

/// How often the child reports the progress of a load.
const REPORT_EVERY: Duration = Duration::from_millis(250);

/// The model to load.
pub struct LoadTask {
    pub config: Config,
    pub model: ModelFiles,
    pub draft: Option<ModelFiles>,
    pub vocab_size: usize,
    /// The state of the NPU at the first load of this model; `None` at the first load.
    pub npu: Option<NpuReport>,
}

/// A loaded model.
pub struct LoadedModel {
    pub runner: Box<dyn Runner>,
    pub device: Arc<Device>,
    pub report: DeviceReport,
    /// Reads the present state of the NPU; `None` if `npu.mode` is off.
    pub npu: Option<Box<dyn Fn() -> NpuReport + Send>>,
}

/// A callback that gets the present step of a load, and the device after it was opened.
pub type OnProgress<'a> = &'a mut dyn FnMut(Loading, Option<&Arc<Device>>);

/// Runs the child over its standard input until the server ends. The error is a broken pipe if the server ends first.
/// `embedded` are the files of the embedded model, and `set_log` sets the log filter.
pub fn run(
    embedded: &'static [(&'static str, &'static [u8])],
    load: impl FnOnce(LoadTask, OnProgress<'_>) -> Result<LoadedModel, Refusal>,
    set_log: impl Fn(&str) + Send + 'static,
) -> io::Result<()> {
    let mut channel = Channel::from_stdin()?;
    let Some(task) = channel.receive::<Task>()? else { return Ok(()) };
    let of_load: Arc<Mutex<Weak<Device>>> = Arc::default();
    let device = Arc::clone(&of_load);
    channel.show_progress(move || {
        let device = locked(&device).upgrade();
        device.map_or(0, |device| device.progress())
    })?;
    let (task, observer) = receive_task(&mut channel, task, embedded)?;
    let mut reported: Option<(Loading, Instant)> = None;
    let mut report = |doing: Loading, device: Option<&Arc<Device>>| {
        *locked(&of_load) = device.map(Arc::downgrade).unwrap_or_default();
        let is_news =
            |(before, at): (Loading, Instant)| !before.is_same_step(doing) || at.elapsed() >= REPORT_EVERY;
        if reported.is_none_or(is_news) {
            let begins = reported.is_none_or(|(before, _)| !before.is_same_step(doing));
            reported = Some((doing, Instant::now()));
            // An error means that the server has ended. Then this process ends soon, too.
            let _ = channel.send(&Load::Doing(doing));
            if begins && doing == Loading::Tuning {
                let _ = channel.receive::<Measure>();
            }
        }
    };
    let LoadedModel { mut runner, device, report, npu } = match load(task, &mut report) {
        Ok(loaded) => loaded,
        Err(refusal) => return channel.send(&Load::Refused(refusal)),
    };
    channel.send(&Load::Done(Box::new(report)))?;
    // The runner alone holds the device, so that the device is destroyed together with the runner.
    let device = Arc::downgrade(&device);
    let watch = std::thread::Builder::new().name("observer".into());
    watch.spawn(move || observe(observer, &device, npu.as_deref(), set_log))?;
    serve(channel, &mut *runner)
}

fn locked(device: &Mutex<Weak<Device>>) -> MutexGuard<'_, Weak<Device>> {
    device.lock().expect("nothing panics under this lock")
}

/// Receives the files of a task and the second channel.
fn receive_task(
    channel: &mut Channel,
    task: Task,
    embedded: &'static [(&'static str, &'static [u8])],
) -> io::Result<(LoadTask, Channel)> {
    let Task { options, model, draft, vocab_size, npu } = task;
    let mut files = |names: HeldNames| {
        let files = channel.receive_files(names.num_files())?;
        io::Result::Ok(ModelFiles::from_parts(names, files, embedded, arch::gguf_archs()))
    };
    let (model, draft) = (files(model)?, draft.map(&mut files).transpose()?);
    let observer = Channel::from_socket(channel.receive_file()?.into())?;
    let config = Config::from_toml(&options).map_err(io::Error::other)?;
    Ok((LoadTask { config, model, draft, vocab_size, npu }, observer))
}

/// Answers the server's questions.
fn observe(
    mut channel: Channel,
    device: &Weak<Device>,
    npu: Option<&(dyn Fn() -> NpuReport + Send)>,
    set_log: impl Fn(&str),
) {
    while let Ok(Some(question)) = channel.receive::<Question>() {
        let Some(device) = device.upgrade() else { return };
        match question {
            Question::Log(filter) => set_log(&filter),
            Question::Observe => {
                let state = DeviceState::read(&device, npu.map(|npu| npu()));
                drop(device);
                if channel.send(&state).is_err() {
                    return;
                }
            }
        }
    }
}
