//! `unicorn device-process`: the child of a server that has the GPU. It loads the model, and runs steps until the server
//! ends, or the GPU fails.
//!
//! Its standard input is the channel to the server. The server's options and open files come over it, so that a child that
//! takes over after a loss loads the very files that the first one did.

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
use crate::model::child_process::Channel;
use crate::model::device_process::serve;
use crate::model::draft::Draft;
use crate::model::offload::{OffloadCounts, OffloadWatch};

/// What the server sends first. The files of `model` and `draft` follow, then the socket of the second channel, over which
/// the server asks for [`Observed`].
#[derive(Serialize, Deserialize)]
pub struct Task {
    /// The server's options as TOML.
    pub options: String,
    pub model: HeldNames,
    pub draft: Option<HeldNames>,
    /// The number of the tokenizer's ids. The texts are the server's: this process reads no tokenizer.
    pub vocab_size: usize,
    /// What became of the NPU at the first load of this model, where this is another one.
    pub npu: Option<NpuStart>,
}

/// How often the child says how far a load is.
const TELL: Duration = Duration::from_millis(250);

/// What the child says of a load. The last message is one of the other two.
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

/// What stays as it is in a loaded model.
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
    /// How long the device may finish nothing, until it counts as hung.
    pub hang_timeout: Duration,
    /// What became of the NPU; none where none is wanted.
    pub npu: Option<NpuStart>,
}

/// What the self-test of a load has found right.
#[derive(Serialize, Deserialize)]
pub struct SelfTested {
    pub kernels: usize,
    /// Layers whose values are those that the checkpoint holds; none if it holds none for these weights.
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

/// What the server may send at any time.
#[derive(Serialize, Deserialize)]
pub enum Question {
    /// Asks how the GPU does. `kernels` takes the kernels' times.
    Observe { kernels: bool },
    /// Sets the log's filter. Nothing is answered.
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
    /// How long the device computed steps, by its own clock, and how long submits were held back for courtesy.
    pub busy: Option<Duration>,
    pub rested: Duration,
    /// Bytes that commands declared to read or write, by class.
    pub declared: Vec<(String, u64)>,
    /// What became of the NPU at the load, and what it did since; none where none is wanted.
    pub npu: Option<(NpuStart, OffloadCounts)>,
    /// Times of kernels since they were last asked for; empty if they were not asked for.
    pub kernels: Vec<(String, u64, Duration)>,
}

pub fn device_process(level: Level) -> Result<(), Error> {
    match run(level) {
        // The server has ended: there is nobody to report to.
        Err(Error::Channel(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        ended => ended,
    }
}

fn run(level: Level) -> Result<(), Error> {
    // A service's manager may signal all of its processes. The server decides when this one ends.
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
    let (vocab_size, before) = (task.vocab_size, task.npu.clone());
    let (config, files, observer) = take(&mut channel, task).map_err(Error::Channel)?;
    let mut told: Option<(Loading, Instant)> = None;
    let mut report = |doing: Loading, device: Option<&Arc<Device>>| {
        *locked(&of_load) = device.map(Arc::downgrade).unwrap_or_default();
        let is_news = |(before, at): (Loading, Instant)| !before.is_same_part(doing) || at.elapsed() >= TELL;
        if told.is_none_or(is_news) {
            told = Some((doing, Instant::now()));
            // A server that has ended ends this process, too.
            let _ = channel.send(&Load::Doing(doing));
        }
    };
    let (OnDevice { runner: model, draft, npu }, self_test) =
        match load(&config, files, vocab_size, before.as_ref(), &mut report) {
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
        draft_layers: draft.as_ref().map(|draft| draft.config().num_hidden_layers),
        schemes: model.schemes().to_string(),
        placements: model.placements().iter().map(placed).collect(),
        residency: model.residency().to_string(),
        sliding_block_bytes: load::sliding_block_bytes(&model, draft.as_ref()),
        hang_timeout: model.device().hang_timeout(),
        self_test,
        npu: npu.clone(),
    };
    channel.send(&Load::Done(Box::new(facts))).map_err(Error::Channel)?;
    // Weak references, so that the device is destroyed with the runner.
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

/// Receives what belongs to a task.
fn take(channel: &mut Channel, task: Task) -> std::io::Result<(Config, [Option<ModelFiles>; 2], Channel)> {
    let mut receive = |names: Option<HeldNames>| {
        let Some(names) = names else { return Ok(None) };
        let files = channel.receive_files()?;
        ModelFiles::from_parts(names, files, load::DEMO).map(Some).map_err(std::io::Error::other)
    };
    let files = [receive(Some(task.model))?, receive(task.draft)?];
    let observer = Channel::from_socket(channel.receive_file()?.into())?;
    let config = Config::from_toml(&task.options).map_err(std::io::Error::other)?;
    Ok((config, files, observer))
}

/// Loads the model and its draft. A device that does not pass the self-test behind that is refused.
fn load(
    config: &Config,
    [model, draft]: [Option<ModelFiles>; 2],
    vocab_size: usize,
    before: Option<&NpuStart>,
    report: &mut dyn FnMut(Loading, Option<&Arc<Device>>),
) -> Result<(OnDevice, SelfTested), Error> {
    let model = model.expect("a task has a model");
    let watch = if config.gpu.profile { Watch::Kernels } else { Watch::Nothing };
    let source = Source::open(&model)?;
    let draft = draft.as_ref().map(Source::open).transpose()?;
    let mut loaded =
        load::on_device(&source, draft.as_ref(), Some(vocab_size), config, watch, before, report)?;
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
        tracing::warn!("the self-test holds no results of {kernel}: the device was not tested for them");
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
