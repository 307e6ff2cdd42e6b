//! `/status`: what the server does, for people and programs that monitor it. The report contains no prompts, answers,
//! clients, keys or file paths.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;

use crate::api::http::health::{Health, HealthName};
use crate::api::openai::models::ModelStage;
use crate::api::openapi::AuthErrors;
use crate::api::server::Server;
use crate::api::wire::reply::replies;
use crate::device::{HeapReport, KernelTime, NpuReport, Placed, SelfTested};
use crate::engine::{Drafts, PoolUse};
use crate::library::CourtesyReport;

replies! {
    /// The state of the server and its counts. Fields that need the loaded model are absent before it is loaded.
    pub(in crate::api) struct Status {
        status: HealthName,
        message?: String,
        version: &'static str,
        uptime_s: u64,
        /// The first model. The fields `guesses`, `kv`, `engine`, `device`, `npu`, `memory` and `kernels` are about it too.
        model: StatusModel,
        /// All models, if there are several.
        models?: Vec<StatusListed>,
        connections: usize,
        requests: StatusRequests,
        tokens: StatusTokens,
        /// Answers that ended, by reason.
        #[schema(value_type = HashMap<String, u64>)]
        finished: BTreeMap<&'static str, u64>,
        /// The last error that was the server's fault.
        last_error: Option<LastError>,
        guesses?: StatusGuesses,
        kv?: StatusKv,
        /// Absent if kv.disk.path is not set.
        kv_disk?: StatusKvDisk,
        engine?: StatusEngine,
        device?: StatusDevice,
        /// Absent if `engine.courtesy` is 1.
        courtesy?: CourtesyReport,
        /// Absent if `npu.mode` is off.
        npu?: NpuReport,
        memory?: StatusMemory,
        /// Times of the kernels, the longest first; empty if they are not measured.
        kernels?: Vec<StatusKernel>,
    }

    /// One of several models.
    struct StatusListed {
        id: String,
        #[schema(inline)]
        state: ModelStage,
        /// Device memory that the model holds now.
        bytes: u64,
        context?: usize,
        /// Requests that wait for a load of the model, or in its engine's queue.
        waiting: usize,
        running: usize,
        /// What a load in progress does.
        loading?: String,
    }

    struct StatusModel {
        id: String,
        context?: usize,
        vocab_size?: usize,
        layers?: usize,
        /// Layers of the draft model; null if there is none.
        draft_layers | null: usize,
        /// How the weights are stored.
        weights?: String,
        /// The type of keys and values in the cache.
        kv_dtype?: String,
        /// Why `kv.dtype = "auto"` took that type; null if the type was configured.
        kv_dtype_why | null: String,
    }

    /// Counts since the start.
    struct StatusTokens {
        prompt: u64,
        /// Tokens of prompts that the prefix cache had.
        cached: u64,
        generated: u64,
    }

    struct LastError {
        /// Unix time, in seconds.
        at: u64,
        message: String,
    }

    /// Counts of draft tokens, by their source.
    struct StatusGuesses {
        lookup: Guesses,
        draft_model: Guesses,
    }

    struct Guesses {
        proposed: usize,
        accepted: usize,
    }

    struct StatusRequests {
        /// Requests from their head to the end of their answer.
        open: usize,
        /// Open requests whose bodies and prompts are read, or that wait for that.
        arriving: usize,
        /// Requests in the engine's queue.
        waiting?: usize,
        running?: usize,
    }

    /// Blocks of `block_size` tokens: blocks of layers that see all tokens, and of layers that see a window.
    struct StatusKv {
        block_size: usize,
        full: Pool,
        sliding: Pool,
    }

    struct Pool {
        held: usize,
        cached: usize,
        free: usize,
    }

    /// Conversations on disk, of all models. Counts are totals since the start.
    struct StatusKvDisk {
        entries: u64,
        bytes: u64,
        max_bytes: u64,
        /// Bytes that wait to be written.
        queued_bytes: u64,
        written_bytes: u64,
        read_bytes: u64,
        /// Answers that began with tokens from the disk, and these tokens.
        hits: u64,
        hit_tokens: u64,
        /// Entries that were not kept: the disk was too slow or full, or others needed their blocks.
        lost_entries: u64,
        evicted_entries: u64,
        /// Entries that were removed because their files were damaged.
        damaged_entries: u64,
        write_errors: u64,
        read_errors: u64,
        /// The last error, until a read or write succeeds.
        error: Option<String>,
    }

    struct StatusEngine {
        max_sequences: usize,
        steps: u64,
        /// Tokens of all steps together.
        step_tokens: u64,
        preemptions: u64,
        host_s: f64,
        /// How often the device was lost, and the seconds until it computed again, all together.
        device_losses: u64,
        recovery_s: f64,
    }

    struct StatusDevice {
        name: String,
        driver: String,
        self_test: SelfTested,
    }

    /// Memory of the device and of the process. A number is null if the system does not report it.
    struct StatusMemory {
        heaps: Vec<HeapReport>,
        placed: Vec<Placed>,
        /// What the kernel reports of the placements.
        residency: String,
        vram_bytes: Option<u64>,
        gtt_bytes: Option<u64>,
        /// Host memory of the process.
        resident_bytes: Option<u64>,
    }

    struct StatusKernel {
        kernel: String,
        dispatches: u64,
        seconds: f64,
    }
}

impl From<Drafts> for Guesses {
    fn from(drafts: Drafts) -> Self {
        Self { proposed: drafts.proposed, accepted: drafts.accepted }
    }
}

impl From<PoolUse> for Pool {
    fn from(PoolUse { free, cached, held }: PoolUse) -> Self {
        Self { held, cached, free }
    }
}

/// The state of the server, for people and programs that watch it.
#[utoipa::path(
    get,
    path = "/status",
    operation_id = "getStatus",
    tag = "server",
    responses(
        (status = 200, description = "The answer.", body = Status),
        AuthErrors,
    ),
)]
pub(in crate::api) async fn status(State(server): State<Arc<Server>>) -> Json<Status> {
    let m = &server.metrics;
    let [prompt, cached, generated] = m.tokens();
    let (name, message) = Health::of(&server).report();
    let (_, model) = server.library().first();
    let handle = model.engine();
    let engine = handle.as_ref().map(|engine| (engine.stats(), engine.limits()));
    let (stats, limits) =
        (engine.as_ref().map(|(stats, _)| stats), engine.as_ref().map(|(_, limits)| limits));
    let report = model.report();
    let device = report.as_ref().map(|report| &report.device);
    let live = report.as_ref().map(|report| (report.live)());
    let courtesy = live.as_ref().and_then(|live| live.courtesy);
    let npu = live.as_ref().and_then(|live| live.npu.clone());
    let kernel = |KernelTime { kernel, dispatches, time }| StatusKernel {
        kernel,
        dispatches,
        seconds: time.as_secs_f64(),
    };
    Json(Status {
        status: name,
        message,
        version: env!("CARGO_PKG_VERSION"),
        uptime_s: server.started.elapsed().as_secs(),
        model: StatusModel {
            id: model.id().to_owned(),
            context: limits.map(|limits| limits.max_context),
            vocab_size: limits.map(|limits| limits.vocab_size),
            layers: device.map(|device| device.layers),
            draft_layers: device.map(|device| device.draft_layers),
            weights: device.map(|device| device.weights.clone()),
            kv_dtype: device.map(|device| device.kv_dtype.clone()),
            kv_dtype_why: device.map(|device| device.kv_dtype_why.clone()),
        },
        models: listed(&server),
        connections: server.connections.count(),
        requests: StatusRequests {
            open: server.places.taken(),
            arriving: server.arriving.count(),
            waiting: stats.map(|stats| stats.waiting),
            running: stats.map(|stats| stats.running),
        },
        tokens: StatusTokens { prompt, cached, generated },
        finished: m.finished(),
        last_error: m.last_error().map(|(at, message)| LastError { at, message }),
        guesses: stats.map(|stats| StatusGuesses {
            lookup: stats.drafts.lookup.into(),
            draft_model: stats.drafts.model.into(),
        }),
        kv: engine.as_ref().map(|(stats, limits)| StatusKv {
            block_size: limits.kv.block_size,
            full: stats.full.into(),
            sliding: stats.sliding.into(),
        }),
        kv_disk: kv_disk(&server),
        engine: engine.as_ref().map(|(stats, limits)| StatusEngine {
            max_sequences: limits.max_sequences,
            steps: stats.steps,
            step_tokens: stats.step_tokens,
            preemptions: stats.preemptions,
            host_s: stats.host_ns as f64 / 1e9,
            device_losses: stats.losses,
            recovery_s: stats.recovery_ns as f64 / 1e9,
        }),
        device: device.map(|device| StatusDevice {
            name: device.device.clone(),
            driver: device.driver.clone(),
            self_test: device.self_test,
        }),
        courtesy,
        npu,
        memory: device.zip(live.as_ref()).map(|(device, live)| {
            let state = live.device.as_ref();
            StatusMemory {
                heaps: state.map_or(Vec::new(), |state| state.heaps.clone()),
                placed: device.placements.clone(),
                residency: device.residency.clone(),
                vram_bytes: state.and_then(|state| state.vram),
                gtt_bytes: state.and_then(|state| state.gtt),
                resident_bytes: live.resident,
            }
        }),
        kernels: live.map(|live| {
            let times = live.device.map_or(Vec::new(), |state| state.kernels);
            m.kernels(times).into_iter().map(kernel).collect()
        }),
    })
}

/// Conversations on disk.
fn kv_disk(server: &Server) -> Option<StatusKvDisk> {
    let store = server.library().kv_store()?.stats();
    let engines = server.library().engines();
    let disk = engines.iter().map(|engine| engine.stats().disk);
    let (hits, hit_tokens, lost) = disk.fold((0, 0, 0), |(hits, tokens, lost), disk| {
        (hits + disk.hits, tokens + disk.hit_tokens, lost + disk.lost_entries)
    });
    Some(StatusKvDisk {
        entries: store.entries,
        bytes: store.bytes,
        max_bytes: store.max_bytes,
        queued_bytes: store.queued_bytes,
        written_bytes: store.written_bytes,
        read_bytes: store.read_bytes,
        hits,
        hit_tokens,
        // The engine counts those that the store refused.
        lost_entries: lost,
        evicted_entries: store.evicted_entries,
        damaged_entries: store.damaged_entries,
        write_errors: store.write_errors,
        read_errors: store.read_errors,
        error: store.error,
    })
}

/// All models of a server with several.
fn listed(server: &Server) -> Option<Vec<StatusListed>> {
    let library = server.library();
    // In this order, because models may join the list.
    let models = library.models();
    let held = library.held()?;
    let listed = models.into_iter().map(|(index, model)| {
        let engine = model.engine();
        let stats = engine.as_ref().map(|engine| engine.stats());
        StatusListed {
            id: model.id().to_owned(),
            state: library.stage(index).into(),
            bytes: held[index],
            context: engine.as_ref().map(|engine| engine.limits().max_context),
            waiting: library.waiting(index) + stats.map_or(0, |stats| stats.waiting),
            running: stats.map_or(0, |stats| stats.running),
            loading: model.loading(),
        }
    });
    Some(listed.collect())
}
