//! `unicorn serve`: binds its address, answers already while it loads the model, and ends when the engine ends.

mod auth;
mod card;
mod courtesy;
mod report;
mod reload;
mod systemd;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Notify, oneshot};

use self::auth::{access_policy, check_keyless, is_public};
use self::courtesy::CourtesyWatch;
pub use self::reload::Reload;
use self::reload::Running;
use super::doctor::Machine;
use super::energy::Meter;
use super::error::Error;
use super::load::{self, EndEngine};
use super::log;
use crate::api::{self, Connections, FILES_PER_CONNECTION, ModelNames, ModelReport, Options, Server, Tls};
use crate::checkpoint::ModelFiles;
use crate::config::{self, Config};
use crate::device::{DeviceFactory, Observer};
use crate::engine::{EnergyCounter, Engine, EngineConfig, EngineHandle};
use crate::model::Runner;
use crate::model::arch;
use crate::session::Service;
use crate::text::panic_message;

/// How often a stream that waits for its first token sends a comment.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// How often such a stream sends an event, for clients that do not count comments. Codex ends a stream after five minutes
/// without an event.
const EVENT_INTERVAL: Duration = Duration::from_secs(60);
/// Longest pause within a request body. The number of bodies that are read at the same time is limited.
const BODY_STALL: Duration = Duration::from_secs(5);
/// Time in which a body may arrive at any speed, so that lost packets of a small body can be retransmitted.
const BODY_GRACE: Duration = Duration::from_secs(10);
/// Longest wait until a body can be read, and until a processor is free. Longer than the two minutes that a body may
/// take.
const TURN_TIMEOUT: Duration = Duration::from_secs(150);
/// Longest pause before a wrong key is refused: long for a program that guesses keys, short for a person who mistyped
/// one.
const WRONG_KEY_PAUSE: Duration = Duration::from_secs(2);
/// Longest step of the device. It is longer than the longest step of a prompt. A device that makes no progress is given
/// up after `hardware.hang_timeout_s`; this limit is for a device that makes progress, but far too slowly.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a client may read nothing of the data that was sent to it.
const WRITE_STALL: Duration = Duration::from_secs(60);
/// Open files that are not connections: those of the checkpoint, the device and the runtime.
const OTHER_FILES: u64 = 256;
/// Longest wait for the end of a load after a signal, because a load cannot always be cancelled.
const LOAD_END: Duration = Duration::from_secs(20);
/// How much later this process may get a signal that was sent to it and to the device process.
const SIGNAL_DELAY: Duration = Duration::from_millis(200);
/// Longest wait until an engine that ended because of an error releases the device.
const LOST_END: Duration = Duration::from_secs(2);

/// Serves until SIGINT or SIGTERM, until the load fails, or until the engine ends. The latter two return their error,
/// even if a signal follows. The energy counters of the machine are read below `root`.
pub fn serve(config: &Config, root: Option<&Path>, reload: Reload, log_filter: String) -> Result<(), Error> {
    let runtime = runtime()?;
    // The handler must be registered first: a SIGHUP before that would end the process.
    let hangup = {
        let _within = runtime.enter();
        signal(SignalKind::hangup()).map_err(Error::Runtime)?
    };
    let original = config.clone();
    let machine = Machine::new(root);
    let files = load::files(&config.model)?;
    let model_id = load::model_id(&files, config);
    let options = Options {
        max_body_bytes: config.server.max_body_bytes,
        stored_responses: config.server.stored_responses,
        stored_response_bytes: config.server.stored_response_bytes,
        share_prefixes: config.kv.share_prefixes,
        body_stall: BODY_STALL,
        body_grace: BODY_GRACE,
        permit_timeout: TURN_TIMEOUT,
        wrong_key_pause: WRONG_KEY_PAUSE,
        keep_alive: KEEP_ALIVE,
        event_interval: EVENT_INTERVAL,
        device_timeout: DEVICE_TIMEOUT,
        lost_log_lines: log::lost_lines,
    };
    let access = access_policy(&config.server)?;
    let keyless = access.keys.is_empty();
    let connections = connections(&config.server)?;
    let scheme = if connections.tls.is_some() { "https" } else { "http" };
    let names = ModelNames {
        id: model_id.clone(),
        aliases: config.server.model_aliases.clone(),
        any: config.server.any_model_name,
    };
    let server = Server::new(names, options, access);
    let grace = Duration::from_secs(config.server.shutdown_grace_s);

    let mut load = None;
    let engine: Arc<OnceLock<EngineHandle>> = Arc::default();
    // Ends the load, and every wait for the device.
    let cancelled = Arc::new(AtomicBool::new(false));
    let observer = Observer::new(log_filter);
    let courtesy = CourtesyWatch::new(config.engine.courtesy);
    let result = runtime.block_on(async {
        let socket = systemd::socket().map_err(Error::Serve)?;
        let is_handed_over = socket.is_some();
        let listener = match socket {
            Some(socket) => TcpListener::from_std(socket).map_err(Error::Serve)?,
            None => bind(&config.server.host, config.server.port).await?,
        };
        let address = listener.local_addr().map_err(Error::Serve)?;
        let base = format!("{scheme}://{address}/v1");
        check_keyless(address, keyless, &config.server)?;
        if is_public(address) && scheme == "http" {
            tracing::warn!(
                "prompts, answers and keys cross the network unencrypted: set server.tls_cert and server.tls_key"
            );
        }
        tracing::info!("listening on {base}, model {model_id:?}; loading");

        // The load has its own thread, because the runtime must react to a signal during the load.
        let (done, loaded) = oneshot::channel();
        let (load_config, started) = (config.clone(), Arc::clone(&engine));
        let (load_cancelled, load_observer) = (Arc::clone(&cancelled), observer.clone());
        let doing = {
            let observer = observer.clone();
            move || observer.loading()
        };
        server.set_load(doing.clone());
        let (load_courtesy, of_loader) = (courtesy.clone(), Arc::clone(&server));
        let loader = std::thread::Builder::new().name("load".into()).spawn(move || {
            let served = load_and_start(&of_loader, &files, &load_config, &machine, load_observer, load_courtesy, load_cancelled);
            // The engine is stored here too, because after a signal the receiver of the channel no longer
            // exists.
            let served = served.inspect(|(service, _)| drop(started.set(service.engine().clone())));
            drop(done.send(served));
        });
        load = Some(loader.map_err(Error::Runtime)?);

        let (server_there, tls) = (Arc::clone(&server), connections.tls.clone());
        let running = Running { config: original, server: server_there, tls, address, reload, observer, courtesy };
        tokio::spawn(running.reload_on(hangup));
        let (lose, lost) = oneshot::channel();
        let stop = stop(Arc::clone(&engine), Arc::clone(&cancelled), lost, grace)?.boxed().shared();
        let stopped = stop.clone();
        let is_ready = Notify::new();
        let serving = async {
            // With socket activation, the first client waits until the model is loaded. A 503 would not help it.
            if is_handed_over {
                tokio::select! {
                    () = is_ready.notified() => {}
                    _ = stop.clone() => return,
                }
            }
            api::serve(listener, Arc::clone(&server), connections, stop).await
        };
        let loading = async {
            let loaded = tokio::select! {
                loaded = loaded => loaded,
                () = systemd::loading(&model_id, doing) => unreachable!("this future never ends"),
            };
            match loaded {
                Ok(Ok((service, report))) => {
                    let context = service.engine().limits().max_context;
                    tracing::info!("ready: {base}, context {context} tokens");
                    server.set_report(report);
                    let service = server.set_ready(service);
                    is_ready.notify_one();
                    systemd::ready(&model_id, &base);
                    tokio::spawn(systemd::watchdog(Arc::clone(&server)));
                    if let Err(error) = watch_engine(service.engine().clone(), lose) {
                        return Error::Runtime(error);
                    }
                    // Runs in parallel with the first answers, so that the first request with a schema does not wait.
                    let prepare = std::thread::Builder::new().name("grammars".into());
                    // If the thread cannot be started, the first request with a schema does this work.
                    drop(prepare.spawn(move || service.prepare_grammars()));
                    std::future::pending().await
                }
                Ok(Err(error)) => {
                    // A load that a signal ended has not failed. A service manager signals all processes of a service,
                    // and the device process may get the signal first.
                    if tokio::time::timeout(SIGNAL_DELAY, stopped).await.is_ok() {
                        std::future::pending::<()>().await;
                    }
                    error
                }
                Err(_) => Error::LoadPanicked,
            }
        };
        tokio::select! {
            () = serving => Ok(()),
            error = loading => Err(error),
        }
    });
    if engine.get().is_none() {
        cancelled.store(true, Ordering::Release);
    }
    if !load.is_none_or(wait_for_load_end) {
        tracing::warn!("the model was still loading after {} s", LOAD_END.as_secs());
    }
    let ended = engine.get().and_then(EngineHandle::ended);
    match engine.get() {
        // A lost device may never be released.
        Some(engine) if ended.is_some() => drop(engine.join(LOST_END)),
        engine => drop(engine.cloned().map(EndEngine)),
    }
    tracing::info!("stopped");
    // The runtime does not wait for work for clients that are gone.
    runtime.shutdown_background();
    match ended {
        Some(error) => Err(error.into()),
        None => result,
    }
}

/// Checks the options for clients and connections. Returns the number of API keys.
pub fn check(options: &config::Server, addresses: &[SocketAddr]) -> Result<usize, Error> {
    let keys = access_policy(options)?.keys;
    addresses.iter().try_for_each(|&address| check_keyless(address, keys.is_empty(), options))?;
    connections(options)?;
    Ok(keys.len())
}

/// Loads `files` in a device process, and starts the engine; also returns the report about the model.
fn load_and_start(
    server: &Server,
    files: &ModelFiles,
    config: &Config,
    machine: &Machine,
    observer: Observer,
    courtesy: CourtesyWatch,
    cancelled: Arc<AtomicBool>,
) -> Result<(Service, ModelReport), Error> {
    let (model_config, generation) = arch::load(files)?;
    let parser = config.model.tool_call_parser.as_deref();
    let texts = load::texts(files, model_config, &generation, parser)?;
    server.set_card(card::card(files, &texts)?);
    let draft_files = load::draft_files(config)?;
    if let Some(draft) = &draft_files {
        let (draft_config, _) = arch::load(draft)?;
        load::check_draft_tokenizer(files, &texts.tokenizer, draft, &draft_config)?;
    }
    let vocab_size = texts.tokenizer.vocab_size();
    let mut factory = DeviceFactory::new(config, files, draft_files.as_ref(), vocab_size, observer.clone())?;
    let (runner, device) = factory.load(&cancelled)?;
    let meter = Meter::open(machine, &device.place);
    match &meter {
        Ok(meter) => {
            tracing::info!(
                "energy   from {}, for the whole machine; divided among the answers",
                meter.source()
            )
        }
        Err(why) => tracing::info!("energy   unknown: {why}"),
    }
    let meter = meter.ok();
    let queue = config.server.queue;
    let idle_unload = config.engine.idle_unload_s.map(|seconds| Duration::from_secs(seconds as u64));
    let engine_config = EngineConfig {
        idle_unload,
        energy: meter.clone().map(|meter| meter as Arc<dyn EnergyCounter>),
        ..load::engine_config(runner.limits(), device.sliding_block_bytes, config, queue)
    };
    let report = report::collect(device, &observer, &courtesy, meter);
    let engine = Engine::start_recoverable(Box::new(runner), Box::new(factory), cancelled, engine_config);
    courtesy.start(engine.clone());
    Ok((texts.service(engine, config), report))
}

/// The runtime of the server. All thread pools start here. tokio and rayon panic if the system refuses the first thread of
/// a pool; here that is an error, and in the middle of a request it would be a failed request.
fn runtime() -> Result<Runtime, Error> {
    let build = || {
        // If the system refuses another blocking thread, tokio waits for the one that exists.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .thread_keep_alive(Duration::MAX)
            .build()?;
        drop(runtime.spawn_blocking(|| ()));
        rayon::ThreadPoolBuilder::new().build_global().map_err(std::io::Error::other)?;
        Ok(runtime)
    };
    let built = std::panic::catch_unwind(build);
    let built = built.unwrap_or_else(|panic| Err(std::io::Error::other(panic_message(&*panic))));
    built.map_err(Error::Runtime)
}

/// The options for connections. Raises the limit of open files if it is too low.
fn connections(options: &config::Server) -> Result<Connections, Error> {
    let needed = options.connections as u64 * FILES_PER_CONNECTION + OTHER_FILES;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|files| files < needed) {
        // The usual soft limit is 1024, for programs that use `select`.
        if limit.maximum.is_some_and(|files| files < needed) {
            let most = limit.maximum.unwrap_or(u64::MAX);
            return Err(Error::OpenFiles { connections: options.connections, needed, most });
        }
        let raised = Rlimit { current: Some(needed), ..limit };
        setrlimit(Resource::Nofile, raised).map_err(|error| Error::Serve(error.into()))?;
    }
    let tls = match (&options.tls_cert, &options.tls_key) {
        (Some(cert), Some(key)) => Some(Tls::read(cert.as_ref(), key.as_ref())?),
        _ => None,
    };
    Ok(Connections {
        most: options.connections,
        head_timeout: Duration::from_secs(options.head_timeout_s),
        idle_timeout: Duration::from_secs(options.idle_timeout_s),
        write_timeout: WRITE_STALL,
        tls,
    })
}

/// Waits until the load has ended, so that the process does not exit while a thread is inside the driver. Returns false
/// after [`LOAD_END`].
fn wait_for_load_end(load: JoinHandle<()>) -> bool {
    let since = Instant::now();
    while !load.is_finished() {
        if since.elapsed() > LOAD_END {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

async fn bind(host: &str, port: u16) -> Result<TcpListener, Error> {
    TcpListener::bind((host, port)).await.map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => Error::PortTaken { host: host.to_owned(), port },
        _ => Error::Listen { host: host.to_owned(), port, error },
    })
}

/// Waits for the engine's end in a separate thread, and sends to `lose` if the engine ended because of an error.
fn watch_engine(engine: EngineHandle, lose: oneshot::Sender<()>) -> std::io::Result<()> {
    const CHECK_EVERY: Duration = Duration::from_millis(250);
    let thread = std::thread::Builder::new().name("engine's end".into());
    thread.spawn(move || {
        // `join` alone would also wait for the end of the runner, which a lost device may delay.
        while engine.ended().is_none() {
            if engine.join(CHECK_EVERY) {
                break;
            }
        }
        if engine.ended().is_some() {
            let _ = lose.send(());
        }
    })?;
    Ok(())
}

/// Resolves at the first SIGINT or SIGTERM, or when the engine is `lost`, to the grace period for requests in progress.
/// A load in progress is cancelled by `cancelled`. A second signal ends the process immediately.
fn stop(
    engine: Arc<OnceLock<EngineHandle>>,
    cancelled: Arc<AtomicBool>,
    lost: oneshot::Receiver<()>,
    grace: Duration,
) -> Result<impl Future<Output = Duration> + Send + 'static, Error> {
    /// The exit code that shells report for a program ended by SIGINT.
    const INTERRUPTED: u8 = 130;

    let mut interrupt = signal(SignalKind::interrupt()).map_err(Error::Runtime)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(Error::Runtime)?;
    async fn either(a: &mut Signal, b: &mut Signal) {
        tokio::select! {
            _ = a.recv() => {}
            _ = b.recv() => {}
        }
    }
    let is_lost = async move {
        if lost.await.is_err() {
            std::future::pending::<()>().await; // the end was requested
        }
    };
    Ok(async move {
        tokio::select! {
            () = is_lost => {
                tracing::error!("stopping: the engine has ended");
                return Duration::ZERO;
            }
            () = either(&mut interrupt, &mut terminate) => {}
        }
        systemd::stopping();
        match engine.get() {
            Some(_) => {
                tracing::info!(
                    "stopping: finishing the answers in progress; a second signal stops immediately"
                );
            }
            None => {
                tracing::info!("stopping: cancelling the load");
                cancelled.store(true, Ordering::Release);
            }
        }
        tokio::spawn(async move {
            either(&mut interrupt, &mut terminate).await;
            let ended = engine.get().and_then(EngineHandle::ended);
            std::process::exit(ended.map_or(INTERRUPTED, |error| Error::from(error).exit_code()).into());
        });
        grace
    })
}
