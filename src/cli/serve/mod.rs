//! `unicorn serve`: binds its address, answers already while it loads the model, and ends when the engine ends.

mod auth;
mod card;
mod courtesy;
mod models;
mod report;
mod reload;
mod systemd;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
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
pub use self::models::check as check_models;
use self::models::{Catalogue, Loads, ModelLoader, Shared};
pub use self::reload::Reload;
use self::reload::Running;
use super::error::Error;
use super::load::EndEngine;
use super::log;
use crate::api::{self, Connections, FILES_PER_CONNECTION, Options, Server, Tls};
use crate::config::{self, Config};
use crate::engine::{ClientId, EngineHandle};
use crate::kv_disk::KvStore;
use crate::library::{LibraryError, Loaded};
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
/// How long the last turns may take to be written after the engines have ended.
const LAST_WRITES: Duration = Duration::from_secs(10);
/// Open files that are not connections: those of the checkpoint, the device and the runtime.
const OTHER_FILES: u64 = 256;
/// Longest wait for the end of a load after a signal, because a load cannot always be cancelled.
const LOAD_END: Duration = Duration::from_secs(20);
/// How much later this process may get a signal that was sent to it and to the device process.
const SIGNAL_DELAY: Duration = Duration::from_millis(200);
/// Longest wait until an engine that ended because of an error releases the device.
const LOST_END: Duration = Duration::from_secs(2);

/// Serves until SIGINT or SIGTERM, until a load at the start fails, or until the engine of the only model ends. The latter
/// two return their error, even if a signal follows. The energy counters of the machine are read below `root`.
pub fn serve(config: &Config, root: Option<&Path>, reload: Reload, log_filter: String) -> Result<(), Error> {
    let runtime = runtime()?;
    // The handler must be registered first: a SIGHUP before that would end the process.
    let hangup = {
        let _within = runtime.enter();
        signal(SignalKind::hangup()).map_err(Error::Runtime)?
    };
    check_ports(&config.server)?;
    let courtesy = CourtesyWatch::new(config.engine.courtesy);
    let loads = Loads::default();
    let lease = models::is_of_several(config).then(Arc::default);
    let kv_store = kv_store(&config.kv_disk)?;
    let shared = Shared {
        kv_store: kv_store.clone(),
        root: root.map(Path::to_path_buf),
        courtesy: courtesy.clone(),
        log_filter: Mutex::new(log_filter),
        loads: loads.clone(),
        lease,
    };
    let (library, catalogue) = models::library(config, shared)?;
    let names: Vec<String> = library.models().iter().map(|(_, model)| model.id().to_owned()).collect();
    let names = names.join(", ");
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
    let server = Server::new(library, options, access);
    let grace = Duration::from_secs(config.server.shutdown_grace_s);

    // The thread that loads the only model.
    let mut load = None;
    let result = runtime.block_on(async {
        let socket = systemd::socket().map_err(Error::Serve)?;
        let is_handed_over = socket.is_some();
        let listener = match socket {
            Some(socket) => TcpListener::from_std(socket).map_err(Error::Serve)?,
            None => {
                let port = config.server.port;
                let other = port.checked_add(1).unwrap_or(8010);
                bind(&config.server.host, port, &format!("--port {other}")).await?
            }
        };
        let address = listener.local_addr().map_err(Error::Serve)?;
        let mut listeners = vec![listener];
        if let Some(port) = config.server.ollama_port {
            let second = bind(&config.server.host, port, "server.ollama_port").await?;
            check_keyless(second.local_addr().map_err(Error::Serve)?, keyless, &config.server)?;
            listeners.push(second);
        }
        let base = format!("{scheme}://{address}/v1");
        check_keyless(address, keyless, &config.server)?;
        if is_public(address) && scheme == "http" {
            tracing::warn!(
                "prompts, answers and keys cross the network unencrypted: set server.tls_cert and server.tls_key"
            );
        }
        let (what, state) =
            if server.library().is_shared() { ("models", "each is loaded for its first request") } else { ("model", "loading") };
        tracing::info!("listening on {base}, {what} {names:?}; {state}");
        if let Some(port) = config.server.ollama_port {
            tracing::info!("listening on port {port} too, for clients of Ollama");
        }

        // Receives the only model, once it is loaded.
        let loaded = match server.library().is_shared() {
            true => None,
            false => {
                let (thread, loaded) = load_in_thread(&catalogue.loaders()[0])?;
                load = Some(thread);
                Some(loaded)
            }
        };
        let running = Running {
            config: config.clone(),
            server: Arc::clone(&server),
            tls: connections.tls.clone(),
            address,
            reload,
            catalogue: Arc::clone(&catalogue),
            courtesy,
        };
        tokio::spawn(running.reload_on(hangup));
        let (lose, lost) = oneshot::channel();
        let stop = stop(Arc::clone(&server), loads.clone(), lost, grace)?.boxed().shared();
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
            api::serve(listeners, Arc::clone(&server), connections, stop).await
        };
        let doing = || catalogue.loaders().iter().find_map(|loader| loader.model.loading());
        let loading = async {
            let at_start = async {
                match loaded {
                    Some(loaded) => take_only(loaded, &server, lose).await,
                    None => preload(&catalogue, &server).await,
                }
            };
            let started = tokio::select! {
                started = at_start => started,
                () = systemd::loading(&names, doing) => unreachable!("this future never ends"),
            };
            match started {
                Ok(()) => {
                    let engine = server.library().first().1.engine();
                    let context = engine.filter(|_| !server.library().is_shared());
                    let context = context.map(|engine| format!(", context {} tokens", engine.limits().max_context));
                    tracing::info!("ready: {base}{}", context.unwrap_or_default());
                    is_ready.notify_one();
                    systemd::ready(&names, &base);
                    tokio::spawn(systemd::watchdog(Arc::clone(&server)));
                    std::future::pending().await
                }
                // A load that a signal ended has not failed. A service manager signals all processes of a service, and
                // the device process may get the signal first.
                Err(error) if !matches!(error, Error::LoadPanicked) => {
                    if tokio::time::timeout(SIGNAL_DELAY, stopped).await.is_ok() {
                        std::future::pending::<()>().await;
                    }
                    error
                }
                Err(error) => error,
            }
        };
        tokio::select! {
            () = serving => Ok(()),
            error = loading => Err(error),
        }
    });
    server.library().close();
    loads.cancel();
    // This also cancels the load of a model that was unloaded.
    server.library().engines().iter().for_each(EngineHandle::abort);
    if !wait_for_load_end(load, &server) {
        tracing::warn!("a model was still loading after {} s", LOAD_END.as_secs());
    }
    let engines = server.library().engines();
    let ended = engines.first().filter(|_| !server.library().is_shared()).and_then(EngineHandle::ended);
    engines.iter().for_each(EngineHandle::abort);
    for engine in engines {
        match engine.ended() {
            // A lost device may never be released.
            Some(_) => drop(engine.join(LOST_END)),
            None => drop(EndEngine(engine)),
        }
    }
    if let Some(store) = kv_store.filter(|store| !store.flush(LAST_WRITES)) {
        let left = store.stats().queued_bytes >> 20;
        tracing::warn!("{left} MiB of the last turns were not written within {} s", LAST_WRITES.as_secs());
    }
    tracing::info!("stopped");
    // The runtime does not wait for work for clients that are gone.
    runtime.shutdown_background();
    match ended {
        Some(error) => Err(error.into()),
        None => result,
    }
}

/// Opens the folder that keeps conversations. `None` = kv.disk.path is not set.
fn kv_store(options: &config::KvDisk) -> Result<Option<KvStore>, Error> {
    let Some(path) = &options.path else { return Ok(None) };
    let store = KvStore::open(path.as_ref(), options.max_bytes)?;
    let stats = store.stats();
    tracing::info!(
        "conversations are kept in {path}: {} entries, {} MiB of {} MiB; every program that can read the folder can read them",
        stats.entries,
        stats.bytes >> 20,
        stats.max_bytes >> 20
    );
    Ok(Some(store))
}

/// Loads a model in a thread of its own, because the runtime must react to a signal during the load.
fn load_in_thread(loader: &Arc<ModelLoader>) -> Result<(JoinHandle<()>, LoadedOnly), Error> {
    let (done, loaded) = oneshot::channel();
    let loader = Arc::clone(loader);
    let thread = std::thread::Builder::new().name("load".into()).spawn(move || {
        // The model gets its service here, because after a signal the receiver of the channel no longer exists.
        let started = loader.start().map(|Loaded { service, report }| {
            loader.model.set_report(report);
            loader.model.set_ready(service);
        });
        drop(done.send(started));
    });
    Ok((thread.map_err(Error::Runtime)?, loaded))
}

type LoadedOnly = oneshot::Receiver<Result<(), Error>>;

/// Waits until the only model is loaded, and watches its engine from then on.
async fn take_only(loaded: LoadedOnly, server: &Server, lose: oneshot::Sender<()>) -> Result<(), Error> {
    loaded.await.map_err(|_| Error::LoadPanicked)??;
    server.library().fit_queue();
    let service = server.library().first().1.service().expect("the model is loaded");
    watch_engine(service.engine().clone(), lose).map_err(Error::Runtime)?;
    // Runs in parallel with the first answers, so that the first request with a schema does not wait.
    let prepare = std::thread::Builder::new().name("grammars".into());
    // If the thread cannot be started, the first request with a schema does this work.
    drop(prepare.spawn(move || service.prepare_grammars()));
    Ok(())
}

/// Reads what lists say about each of several models, and loads those that are configured so.
async fn preload(catalogue: &Catalogue, server: &Server) -> Result<(), Error> {
    let models = catalogue.models();
    for (_, loader) in &models {
        let reading = Arc::clone(loader);
        let read = tokio::task::spawn_blocking(move || reading.read_card()).await;
        match read.map_err(|_| Error::LoadPanicked)? {
            Err(error) if !loader.is_pulled() => return Err(error),
            // A pulled model that is not listed may be one that no server can serve.
            Err(error) => tracing::warn!("{:?} cannot be served: {error}", loader.model.id()),
            Ok(()) => {}
        }
    }
    for (index, _) in models.iter().filter(|(_, loader)| loader.is_preloaded()) {
        match server.library().admit(*index, ClientId::default()).await {
            // The configuration was read again in the meantime.
            Err(LibraryError::Gone(_)) => {}
            admitted => drop(admitted?),
        }
    }
    Ok(())
}

/// Checks the options for clients and connections. Returns the number of API keys.
pub fn check(options: &config::Server, addresses: &[SocketAddr]) -> Result<usize, Error> {
    check_ports(options)?;
    let keys = access_policy(options)?.keys;
    addresses.iter().try_for_each(|&address| check_keyless(address, keys.is_empty(), options))?;
    connections(options)?;
    Ok(keys.len())
}

fn check_ports(options: &config::Server) -> Result<(), Error> {
    match options.ollama_port == Some(options.port) {
        true => Err(Error::Argument(format!(
            "server.ollama_port and server.port are both {}: the first is a second port; choose another one, or 0 for none",
            options.port
        ))),
        false => Ok(()),
    }
}

/// The runtime of the server. All thread pools start here. tokio and rayon panic if the system refuses the first thread of
/// a pool; here that is an error, and in the middle of a request it would be a failed request.
fn runtime() -> Result<Runtime, Error> {
    let build = || {
        check_address_space()?;
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

/// Checks that the process may reserve as much memory as the threads of a server do. With less, any small allocation may
/// fail, which ends the process without an error.
fn check_address_space() -> std::io::Result<()> {
    /// Each thread reserves 64 MiB for its allocations.
    const LEAST_MIB: usize = 512;
    Vec::<u8>::new().try_reserve_exact(LEAST_MIB << 20).map_err(|_| {
        let problem = format!(
            "this process may reserve less than {LEAST_MIB} MiB of memory (`ulimit -v`, MemoryMax=, vm.overcommit_memory)"
        );
        std::io::Error::new(std::io::ErrorKind::OutOfMemory, problem)
    })
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

/// Waits until the loads have ended, so that the process does not exit while a thread is inside the driver. Returns false
/// after [`LOAD_END`].
fn wait_for_load_end(load: Option<JoinHandle<()>>, server: &Server) -> bool {
    let since = Instant::now();
    while load.as_ref().is_some_and(|load| !load.is_finished()) || server.library().is_swapping() {
        if since.elapsed() > LOAD_END {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// `other` selects another port.
async fn bind(host: &str, port: u16, other: &str) -> Result<TcpListener, Error> {
    TcpListener::bind((host, port)).await.map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            Error::PortTaken { host: host.to_owned(), port, other: other.to_owned() }
        }
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
/// Loads in progress are cancelled. A second signal ends the process immediately.
fn stop(
    server: Arc<Server>,
    loads: Loads,
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
        let has_engine = !server.library().engines().is_empty();
        if has_engine || server.library().is_shared() {
            tracing::info!("stopping: finishing the answers in progress; a second signal stops immediately");
        } else {
            tracing::info!("stopping: cancelling the load");
        }
        server.library().close();
        loads.cancel();
        tokio::spawn(async move {
            either(&mut interrupt, &mut terminate).await;
            let only = server.library().first().1.engine().filter(|_| !server.library().is_shared());
            let ended = only.and_then(|engine| engine.ended());
            std::process::exit(ended.map_or(INTERRUPTED, |error| Error::from(error).exit_code()).into());
        });
        grace
    })
}
