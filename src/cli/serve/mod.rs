//! `unicorn serve`: binds its address, loads the model while it already answers, and ends when the engine does.

mod auth;
mod courtesy;
mod device;
mod facts;
mod npu;
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
use self::device::{DeviceFactory, Observer};
pub use self::reload::Reload;
use self::reload::Running;
use super::doctor::Machine;
use super::energy::Meter;
use super::error::Error;
use super::load::{self, EndEngine};
use super::log;
use crate::api::{self, Connections, FILES_PER_CONNECTION, Facts, ModelNames, Options, Server, Tls};
use crate::checkpoint::ModelFiles;
use crate::config::{self, Config};
use crate::engine::{EnergyCounter, Engine, EngineConfig, EngineHandle};
use crate::model::Runner;
use crate::session::Service;
use crate::text::panic_message;

/// How often a stream that waits for its first token carries a comment.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Longest pause within a request's body, which occupies one of few places meanwhile.
const BODY_STALL: Duration = Duration::from_secs(5);
/// Time in which a body may arrive at any speed, so that lost packets of a small body can be sent again.
const BODY_GRACE: Duration = Duration::from_secs(10);
/// Longest wait for a body's turn to be read, and for a turn on a processor. Longer than the two minutes that a body
/// may take.
const TURN_TIMEOUT: Duration = Duration::from_secs(150);
/// Longest pause before a wrong key is refused: long for a program that tries keys, short for a person who mistyped
/// one.
const WRONG_KEY_PAUSE: Duration = Duration::from_secs(2);
/// Longest step of the device. Longer than the longest step of a prompt. A device that finishes nothing is given up after
/// `hardware.hang_timeout_s`; this is for one that gets on, and takes far too long.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a client may leave sent data unread.
const WRITE_STALL: Duration = Duration::from_secs(60);
/// Open files other than connections: a checkpoint's, the device's, the runtime's.
const OTHER_FILES: u64 = 256;
/// Longest wait for a load that a signal interrupts, since a load cannot be cancelled.
const LOAD_END: Duration = Duration::from_secs(20);
/// How much later than another process this one may get a signal that was sent to both.
const SIGNALS_APART: Duration = Duration::from_millis(200);
/// Longest wait for an engine that ended by itself to give the device back.
const LOST_END: Duration = Duration::from_secs(2);

/// Serves until SIGINT or SIGTERM, until the model cannot be loaded, or until the engine ends. The latter two return
/// their reason, even if a signal follows. The machine's energy is read below `root`.
pub fn serve(config: &Config, root: Option<&Path>, reload: Reload, log_filter: String) -> Result<(), Error> {
    let runtime = runtime()?;
    // The handler comes first: a SIGHUP before it would end the process.
    let hangup = {
        let _within = runtime.enter();
        signal(SignalKind::hangup()).map_err(Error::Runtime)?
    };
    let asked = config.clone();
    let machine = Machine::new(root);
    let files = load::files(&config.model)?;
    let model_id = config.model.name.clone().unwrap_or_else(|| files.name().to_owned());
    let options = Options {
        max_body_bytes: config.server.max_body_bytes,
        stored_responses: config.server.stored_responses,
        stored_response_bytes: config.server.stored_response_bytes,
        share_prefixes: config.kv.share_prefixes,
        body_stall: BODY_STALL,
        body_grace: BODY_GRACE,
        turn_timeout: TURN_TIMEOUT,
        wrong_key_pause: WRONG_KEY_PAUSE,
        keep_alive: KEEP_ALIVE,
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
            tracing::warn!("prompts, answers and keys cross the network as they are: set server.tls_cert and server.tls_key");
        }
        tracing::info!("listening on {base}, model {model_id:?}; loading");

        // A separate thread, not the runtime's: a signal during loading must not wait for it.
        let (done, loaded) = oneshot::channel();
        let (load_config, started) = (config.clone(), Arc::clone(&engine));
        let (load_cancelled, load_observer) = (Arc::clone(&cancelled), observer.clone());
        let doing = {
            let observer = observer.clone();
            move || observer.loading()
        };
        server.set_load(doing.clone());
        let load_courtesy = courtesy.clone();
        let loader = std::thread::Builder::new().name("load".into()).spawn(move || {
            let served = served(&files, &load_config, &machine, load_observer, load_courtesy, load_cancelled);
            // The engine is stored here too, since the channel's receiver is gone after a signal.
            let served = served.inspect(|(service, _)| drop(started.set(service.engine().clone())));
            drop(done.send(served));
        });
        load = Some(loader.map_err(Error::Runtime)?);

        let (server_there, tls) = (Arc::clone(&server), connections.tls.clone());
        let running = Running { config: asked, server: server_there, tls, address, reload, observer, courtesy };
        tokio::spawn(running.reload_on(hangup));
        let (lose, lost) = oneshot::channel();
        let stop = stop(Arc::clone(&engine), Arc::clone(&cancelled), lost, grace)?.boxed().shared();
        let stopped = stop.clone();
        let is_ready = Notify::new();
        let serving = async {
            // A client whose connection started the server waits for its answer: to be told to come again later would be
            // no help to it.
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
                () = systemd::loading(&model_id, doing) => unreachable!("it has no end"),
            };
            match loaded {
                Ok(Ok((service, facts))) => {
                    say_ready(&service, &base);
                    server.set_facts(facts);
                    let service = server.set_ready(service);
                    is_ready.notify_one();
                    systemd::ready(&model_id, &base);
                    tokio::spawn(systemd::watchdog(Arc::clone(&server)));
                    if let Err(error) = watch(service.engine().clone(), lose) {
                        return Error::Runtime(error);
                    }
                    // In parallel with the first answers, so that the first request with a schema does not wait.
                    let prepare = std::thread::Builder::new().name("grammars".into());
                    // Without a thread the first request with a schema prepares them.
                    drop(prepare.spawn(move || service.prepare_grammars()));
                    std::future::pending().await
                }
                Ok(Err(error)) => {
                    // A load that a signal ended has not failed. Who signals all processes of a service signals the device
                    // process too, perhaps first.
                    if tokio::time::timeout(SIGNALS_APART, stopped).await.is_ok() {
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
    if !load.is_none_or(ends) {
        tracing::warn!("the model was still loading after {} s", LOAD_END.as_secs());
    }
    let ended = engine.get().and_then(EngineHandle::ended);
    match engine.get() {
        // A lost device may never be given back.
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

/// Checks the options for clients and connections. Returns how many API keys there are.
pub fn check(options: &config::Server, addresses: &[SocketAddr]) -> Result<usize, Error> {
    let keys = access_policy(options)?.keys;
    addresses.iter().try_for_each(|&address| check_keyless(address, keys.is_empty(), options))?;
    connections(options)?;
    Ok(keys.len())
}

/// Has a device process load `files`, and starts the engine; also returns the facts about the model.
fn served(
    files: &ModelFiles,
    config: &Config,
    machine: &Machine,
    observer: Observer,
    courtesy: CourtesyWatch,
    cancelled: Arc<AtomicBool>,
) -> Result<(Service, Facts), Error> {
    let texts = load::texts(files)?;
    let draft_files = load::draft_files(files, &texts.tokenizer, config)?;
    let vocab_size = texts.tokenizer.vocab_size();
    let mut factory = DeviceFactory::new(config, files, draft_files.as_ref(), vocab_size, observer.clone())?;
    let (runner, device) = factory.load(&cancelled)?;
    let meter = Meter::open(machine, &device.place);
    match &meter {
        Ok(meter) => {
            tracing::info!("energy   by {}: of the whole machine, and shared among answers", meter.source())
        }
        Err(why) => tracing::info!("energy   not known: {why}"),
    }
    let meter = meter.ok();
    let queue = config.server.queue;
    let idle_unload = config.engine.idle_unload_s.map(|seconds| Duration::from_secs(seconds as u64));
    let engine_config = EngineConfig {
        idle_unload,
        energy: meter.clone().map(|meter| meter as Arc<dyn EnergyCounter>),
        ..load::engine_config(runner.limits(), device.sliding_block_bytes, config, queue)
    };
    let facts = facts::collect(texts.config.num_hidden_layers, device, &observer, &courtesy, meter);
    let engine = Engine::start_recoverable(Box::new(runner), Box::new(factory), cancelled, engine_config);
    courtesy.start(engine.clone());
    Ok((texts.service(engine, config), facts))
}

/// The threads that serve. All pools get their threads here: tokio and rayon panic in the middle of a request if the
/// system then refuses a pool its first thread. tokio does so at the start, too.
fn runtime() -> Result<Runtime, Error> {
    let build = || {
        // A pool of blocking threads that has one waits for it where the system refuses another.
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

/// The options for connections. Makes sure that the process may open enough files.
fn connections(options: &config::Server) -> Result<Connections, Error> {
    let needed = options.connections as u64 * FILES_PER_CONNECTION + OTHER_FILES;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|files| files < needed) {
        // A shell's limit is 1024, for programs that use `select`.
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

/// Waits for the load to end, so that the process does not exit while it is inside the driver. Returns false after
/// [`LOAD_END`].
fn ends(load: JoinHandle<()>) -> bool {
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

/// Waits for the engine's end in a separate thread, and signals `lose` if the end was not requested.
fn watch(engine: EngineHandle, lose: oneshot::Sender<()>) -> std::io::Result<()> {
    const LOOK_AGAIN: Duration = Duration::from_millis(250);
    let watch = std::thread::Builder::new().name("engine's end".into());
    watch.spawn(move || {
        // This does not wait for the runner's end, which a lost device may delay.
        while engine.ended().is_none() {
            if engine.join(LOOK_AGAIN) {
                break;
            }
        }
        if engine.ended().is_some() {
            let _ = lose.send(());
        }
    })?;
    Ok(())
}

/// Resolves at the first SIGINT or SIGTERM, or when the engine is `lost`, to the grace period for requests under way. A
/// load that is under way is `cancelled`. A second signal ends the process at once.
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
                tracing::info!("stopping: answers under way are finished first; once more to stop at once");
            }
            None => {
                tracing::info!("stopping: the load is given up");
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

fn say_ready(service: &Service, base: &str) {
    let context = service.engine().limits().max_context;
    tracing::info!("ready: {base}, context {context} tokens");
}
