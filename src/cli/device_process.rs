//! `unicorn device-process`: the child process of a server that uses the GPU. It loads the model, and runs steps until
//! the server ends or the GPU fails.
//!
//! Its standard input is the channel to the server. The server sends its options and its open files over the channel.
//! So a new child, after a loss of the device, loads the same files as the first one.

use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;

use super::error::Error;
use super::load::{self, OnDevice, Place, Profiler, Source, Watch};
use super::loading::Loading;
use super::log::Level;
use super::npu_start::NpuStart;
use super::process::{outlive_signals, processor_time, resident_bytes};
use crate::checkpoint::{HeldNames, ModelFiles};
use crate::config::Config;
use crate::gpu::placement::{Class, Placement};
use crate::gpu::{Counts, Device};
use crate::model::arch;
use crate::model::child_process::Channel;
use crate::model::device_process::serve;
use crate::model::draft::Draft;
use crate::model::offload::{OffloadCounts, OffloadWatch};

/// The first message of the server. Then it sends the files of `model` and `draft`, and the socket of a second channel,
/// on which it sends [`Question`]s.
#[derive(Serialize, Deserialize)]
pub struct Task {
    /// The server's options as TOML.
    pub options: String,
    pub model: HeldNames,
    pub draft: Option<HeldNames>,
    /// The number of token ids of the tokenizer. Only the server reads the tokenizer.
    pub vocab_size: usize,
    /// The state of the NPU at the first load of this model; `None` at the first load.
    pub npu: Option<NpuStart>,
}

/// How often the child reports the progress of a load.
const REPORT_EVERY: Duration = Duration::from_millis(250);

/// The child's messages during a load. The last message is `Done` or `Refused`.
#[derive(Serialize, Deserialize)]
pub enum Load {
    Doing(Loading),
    Done(Box<DeviceFacts>),
    /// Why the model was not loaded.
    Refused(Refusal),
}

#[derive(Serialize, Deserialize)]
pub struct Refusal {
    pub message: String,
    pub exit_code: u8,
}

/// The facts about a loaded model that do not change.
#[derive(Serialize, Deserialize)]
pub struct DeviceFacts {
    pub device: String,
    pub driver: String,
    pub place: Place,
    pub draft_layers: Option<usize>,
    /// The schemes of the model's weights.
    pub schemes: String,
    pub placements: Vec<Placed>,
    pub residency: String,
    /// Bytes of the model and the draft together.
    pub sliding_block_bytes: u64,
    pub self_test: SelfTested,
    /// How long the device may finish nothing before it counts as hung.
    pub hang_timeout: Duration,
    /// The state of the NPU after the load; `None` if `npu.mode` is off.
    pub npu: Option<NpuStart>,
}

/// What the self-test of a load has verified.
#[derive(Serialize, Deserialize)]
pub struct SelfTested {
    pub kernels: usize,
    /// The number of layers whose output equals the values in the checkpoint; `None` if it has no values for these
    /// weights.
    pub layers: Option<usize>,
    pub seconds: f64,
}

#[derive(Serialize, Deserialize)]
pub struct Placed {
    pub class: String,
    pub heap: String,
    pub buffers: usize,
    pub bytes: u64,
}

/// The messages that the server may send at any time.
#[derive(Serialize, Deserialize)]
pub enum Question {
    /// Asks for the state of the GPU. `kernels`: also for the times of the kernels, which resets them.
    Observe { kernels: bool },
    /// Sets the log filter. This has no answer.
    Log(String),
}

/// The answer to [`Question::Observe`].
#[derive(Serialize, Deserialize)]
pub struct Observed {
    /// Name, size and free bytes of each heap.
    pub heaps: Vec<(String, u64, u64)>,
    pub vram: Option<u64>,
    pub gtt: Option<u64>,
    pub resident: Option<u64>,
    pub processor: Duration,
    pub dispatches: u64,
    pub copies: u64,
    pub barriers: u64,
    pub memory_shortages: u64,
    /// How long the device computed steps, by its own clock, and how long submits were delayed for `engine.courtesy`.
    pub busy: Option<Duration>,
    pub rested: Duration,
    /// Bytes that the commands declared as read or written, by class.
    pub declared: Vec<(String, u64)>,
    /// The state of the NPU at the load, and the counts of its work since; `None` if `npu.mode` is off.
    pub npu: Option<(NpuStart, OffloadCounts)>,
    /// Name, dispatches and time of each kernel since the last question for them; empty if not requested.
    pub kernels: Vec<(String, u64, Duration)>,
}

pub fn device_process(level: Level) -> Result<(), Error> {
    match run(level) {
        // The server has ended, so there is no receiver for a report.
        Err(Error::Channel(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        ended => ended,
    }
}

fn run(level: Level) -> Result<(), Error> {
    // A service manager may signal all processes of the service. The server decides when this process ends.
    let _runtime = outlive_signals()?;
    let mut channel = Channel::from_stdin().map_err(Error::Channel)?;
    let Some(task) = channel.receive::<Task>().map_err(Error::Channel)? else { return Ok(()) };
    let timeline: Arc<Mutex<Weak<Device>>> = Arc::default();
    let of_load = Arc::clone(&timeline);
    let progress = move || {
        let device = locked(&timeline).upgrade();
        device.map_or(0, |device| device.progress())
    };
    channel.show_progress(progress).map_err(Error::Channel)?;
    let (vocab_size, first_npu) = (task.vocab_size, task.npu.clone());
    let (config, files, observer) = receive_task(&mut channel, task).map_err(Error::Channel)?;
    let mut reported: Option<(Loading, Instant)> = None;
    let mut report = |doing: Loading, device: Option<&Arc<Device>>| {
        *locked(&of_load) = device.map(Arc::downgrade).unwrap_or_default();
        let is_news =
            |(before, at): (Loading, Instant)| !before.is_same_step(doing) || at.elapsed() >= REPORT_EVERY;
        if reported.is_none_or(is_news) {
            reported = Some((doing, Instant::now()));
            // An error means that the server has ended. Then this process ends soon, too.
            let _ = channel.send(&Load::Doing(doing));
        }
    };
    let (OnDevice { runner: model, draft, npu }, self_test) =
        match load(&config, files, vocab_size, first_npu.as_ref(), &mut report) {
            Ok(loaded) => loaded,
            Err(error) => {
                let refusal = Refusal { message: error.to_string(), exit_code: error.exit_code() };
                channel.send(&Load::Refused(refusal)).map_err(Error::Channel)?;
                return Ok(());
            }
        };
    let placed = |p: &Placement| Placed {
        class: p.class.name().to_owned(),
        heap: p.heap.clone(),
        buffers: p.buffers,
        bytes: p.bytes,
    };
    let info = model.device().info();
    let facts = DeviceFacts {
        device: info.name.clone(),
        driver: info.driver.clone(),
        place: load::place(info),
        draft_layers: draft.as_ref().map(|draft| draft.config().layers.len()),
        schemes: model.schemes().to_string(),
        placements: model.placements().iter().map(placed).collect(),
        residency: model.residency().to_string(),
        sliding_block_bytes: load::sliding_block_bytes(&model, draft.as_ref()),
        hang_timeout: model.device().hang_timeout(),
        self_test,
        npu: npu.clone(),
    };
    channel.send(&Load::Done(Box::new(facts))).map_err(Error::Channel)?;
    // A weak reference, so that the device is destroyed together with the runner.
    let device = Arc::downgrade(model.device());
    let npu = npu.map(|start| (start, model.offload_watch()));
    let watch = std::thread::Builder::new().name("observer".into());
    watch.spawn(move || observe(observer, &device, npu.as_ref(), &level)).map_err(Error::Channel)?;
    let mut runner = load::runner_of(model, draft);
    serve(channel, &mut *runner).map_err(Error::Channel)
}

fn locked(timeline: &Mutex<Weak<Device>>) -> MutexGuard<'_, Weak<Device>> {
    timeline.lock().expect("nothing panics under this lock")
}

/// Receives the files and the second channel of a task.
fn receive_task(
    channel: &mut Channel,
    task: Task,
) -> std::io::Result<(Config, [Option<ModelFiles>; 2], Channel)> {
    let mut receive = |names: Option<HeldNames>| {
        let Some(names) = names else { return Ok(None) };
        let files = channel.receive_files()?;
        ModelFiles::from_parts(names, files, load::DEMO, arch::gguf_archs())
            .map(Some)
            .map_err(std::io::Error::other)
    };
    let files = [receive(Some(task.model))?, receive(task.draft)?];
    let observer = Channel::from_socket(channel.receive_file()?.into())?;
    let config = Config::from_toml(&task.options).map_err(std::io::Error::other)?;
    Ok((config, files, observer))
}

/// Loads the model and its draft, and then runs the self-test, whose failure is an error.
fn load(
    config: &Config,
    [model, draft]: [Option<ModelFiles>; 2],
    vocab_size: usize,
    first_npu: Option<&NpuStart>,
    report: &mut dyn FnMut(Loading, Option<&Arc<Device>>),
) -> Result<(OnDevice, SelfTested), Error> {
    let model = model.expect("a task has a model");
    let watch = if config.gpu.profile { Watch::Kernels } else { Watch::Nothing };
    let source = Source::open(&model)?;
    let draft = draft.as_ref().map(Source::open).transpose()?;
    let mut loaded =
        load::on_device(&source, draft.as_ref(), Some(vocab_size), config, watch, first_npu, report)?;
    drop((source, draft));
    let since = Instant::now();
    report(Loading::SelfTest, Some(loaded.runner.device()));
    let own = loaded.runner.self_test()?;
    let of_draft = loaded.draft.as_mut().map(Draft::self_test).transpose()?;
    let of_both = || std::iter::once(&own).chain(&of_draft);
    let layers: Vec<usize> = of_both().filter_map(|tested| tested.layers.ok()).collect();
    let tested = SelfTested {
        kernels: of_both().map(|tested| tested.kernels).sum(),
        layers: (!layers.is_empty()).then(|| layers.iter().sum()),
        seconds: since.elapsed().as_secs_f64(),
    };
    let compared = match (own.layers, tested.layers) {
        (Ok(_), Some(layers)) => format!(" and {layers} layers in {:.2} s", tested.seconds),
        (Err(why), _) => format!(" in {:.2} s; {why}", tested.seconds),
        (Ok(_), None) => unreachable!("the model's own layers were counted"),
    };
    tracing::info!("self-test {} kernels{compared}", tested.kernels);
    for kernel in own.untested.iter().chain(of_draft.iter().flat_map(|draft| &draft.untested)) {
        tracing::warn!(
            "the self-test has no expected results for {kernel}: this kernel was not tested on the device"
        );
    }
    Ok((loaded, tested))
}

/// Answers the server's questions.
fn observe(
    mut channel: Channel,
    device: &Weak<Device>,
    npu: Option<&(NpuStart, Option<OffloadWatch>)>,
    level: &Level,
) {
    while let Ok(Some(question)) = channel.receive::<Question>() {
        let Some(device) = device.upgrade() else { return };
        let kernels = match question {
            Question::Observe { kernels } => kernels,
            Question::Log(filter) => {
                level.set(EnvFilter::new(filter));
                continue;
            }
        };
        let used = device.memory_use();
        let Counts { dispatches, copies, barriers, declared } = device.counts();
        let observed = Observed {
            heaps: device.machine().heaps.into_iter().map(|heap| (heap.name, heap.size, heap.free)).collect(),
            vram: used.map(|used| used.vram),
            gtt: used.map(|used| used.gtt),
            resident: resident_bytes().0,
            processor: processor_time(),
            dispatches,
            copies,
            barriers,
            memory_shortages: device.memory_shortages(),
            busy: device.busy(),
            rested: device.rested(),
            declared: Class::ALL.map(|class| (class.name().to_owned(), declared[class as usize])).into(),
            npu: npu.map(|(start, watch)| {
                (start.clone(), watch.as_ref().map(OffloadWatch::counts).unwrap_or_default())
            }),
            kernels: if kernels { Profiler(Arc::clone(&device)).take() } else { Vec::new() },
        };
        drop(device);
        if channel.send(&observed).is_err() {
            return;
        }
    }
}
