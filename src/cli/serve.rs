//! `unicorn serve`: bind, answer, and load the model meanwhile.

use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::error::Error;
use super::load::{self, EndEngine};
use crate::api::{self, Connections, Door, FILES_PER_CONNECTION, Keys, Options, Server, Service, Tls};
use crate::config::{self, Config};
use crate::engine::EngineHandle;

/// How often a stream that waits for its first token carries a comment.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// How long a body may pause: it holds one of few places meanwhile.
const BODY_STALL: Duration = Duration::from_secs(5);
/// How long a body may come as slowly as it likes: time for the packets of a small one to be lost and sent again.
const BODY_GRACE: Duration = Duration::from_secs(10);
/// For one's turn to be read, and for one on a processor: longer than the two minutes that a body may take.
const TURN_TIMEOUT: Duration = Duration::from_secs(150);
/// The longest that a wrong key's refusal waits: long for a program that tries keys, short for a person who mistyped one.
const WRONG_KEY_PAUSE: Duration = Duration::from_secs(2);
/// For a step: longer than the longest of a prompt, and less than the two minutes after which the device is given up.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a client may take nothing of what is sent to it.
const WRITE_STALL: Duration = Duration::from_secs(60);
/// API keys beside those of the file, with commas or blanks between them.
const KEYS_VARIABLE: &str = "UNICORN_API_KEYS";
/// Files besides connections: a checkpoint's, the device's, the runtime's.
const OTHER_FILES: u64 = 256;
/// For the load to end that a signal came into; it cannot be told to.
const LOAD_END: Duration = Duration::from_secs(20);

/// Serves until SIGINT or SIGTERM, or until the model cannot be loaded.
pub fn serve(config: &Config) -> Result<(), Error> {
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
    };
    let door = door(&config.server)?;
    let keyless = door.keys.is_empty();
    let connections = connections(&config.server)?;
    let scheme = if connections.tls.is_some() { "https" } else { "http" };
    let server = Server::new(model_id.clone(), options, door);
    let grace = Duration::from_secs(config.server.shutdown_grace_s);

    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(Error::Runtime)?;
    let mut load = None;
    let engine: Arc<OnceLock<EngineHandle>> = Arc::default();
    let result = runtime.block_on(async {
        let listener = bind(&config.server.host, config.server.port).await?;
        let address = listener.local_addr().map_err(Error::Serve)?;
        let base = format!("{scheme}://{address}/v1");
        let public = !address.ip().to_canonical().is_loopback();
        if public && keyless {
            if !config.server.allow_keyless {
                return Err(Error::Keyless(address));
            }
            tracing::warn!("everybody who can reach {address} may use this server: it asks for no API key");
        }
        if public && scheme == "http" {
            tracing::warn!("prompts, answers and keys cross the network as they are: set server.tls_cert and server.tls_key");
        }
        tracing::info!("listening on {base}, model {model_id:?}; loading");

        // A thread of its own, not the runtime's: a signal while loading must not wait for it.
        let (done, loaded) = tokio::sync::oneshot::channel();
        let (load_config, started) = (config.clone(), Arc::clone(&engine));
        load = Some(std::thread::spawn(move || {
            let served = load::served(&files, &load_config);
            // Beside the channel, whose receiver is gone where a signal came first.
            let served = served.inspect(|(service, _)| drop(started.set(service.engine().clone())));
            drop(done.send(served));
        }));

        if let Some(tls) = &connections.tls {
            reload_on_hangup(tls.clone())?;
        }
        let stop = stop_signal()?;
        let serving = api::serve(listener, Arc::clone(&server), connections, stop, grace);
        let loading = async {
            match loaded.await {
                Ok(Ok((service, facts))) => {
                    say_ready(&service, &base);
                    server.set_facts(facts);
                    let service = server.set_ready(service);
                    // Beside the first answers, so that the first with a schema does not wait for it.
                    std::thread::spawn(move || service.prepare_grammars());
                    std::future::pending().await
                }
                Ok(Err(error)) => error,
                Err(_) => Error::LoadPanicked,
            }
        };
        tokio::select! {
            () = serving => Ok(()),
            error = loading => Err(error),
        }
    });
    if !load.is_none_or(ends) {
        tracing::warn!("the model was still loading after {} s", LOAD_END.as_secs());
    }
    drop(engine.get().cloned().map(EndEngine));
    tracing::info!("stopped");
    // Not waiting for what may still tokenize for a client that is gone.
    runtime.shutdown_background();
    result
}

/// Who may come in, with the keys of the file and of the environment together.
fn door(options: &config::Server) -> Result<Door, Error> {
    let of_file = options.api_key_file.as_ref().map(|path| Keys::read(path.as_ref())).transpose()?;
    let of_environment = match std::env::var(KEYS_VARIABLE) {
        Ok(text) => Keys::from_variable(KEYS_VARIABLE, &text)?,
        Err(std::env::VarError::NotPresent) => Keys::default(),
        Err(error) => return Err(Error::Argument(format!("{KEYS_VARIABLE}: {error}"))),
    };
    let mut allowed_hosts = options.allowed_hosts.clone();
    allowed_hosts.push(options.host.clone());
    let cors_origins = options.cors_origins.clone();
    let keys = of_environment.and(of_file.unwrap_or_default());
    if keys.is_empty() && cors_origins.iter().any(|origin| origin == "*") {
        tracing::warn!(
            "every web page that somebody here opens may use this server: server.cors_origins is \"*\", and it asks for no API key"
        );
    }
    Ok(Door { keys, allowed_hosts, cors_origins, requests_per_client: options.requests_per_client })
}

/// How connections are treated; makes sure that the process may have so many.
fn connections(options: &config::Server) -> Result<Connections, Error> {
    let needed = options.connections as u64 * FILES_PER_CONNECTION + OTHER_FILES;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|files| files < needed) {
        // What a shell gives is 1024, for programs that know no other way to wait than `select`.
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

/// Waits for the load to end, so that the process does not exit while it is inside the driver; false after
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

/// Resolves at the first SIGINT or SIGTERM; a second one ends the process at once.
fn stop_signal() -> Result<impl Future<Output = ()> + Send + 'static, Error> {
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Error::Runtime)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(Error::Runtime)?;
    async fn either(a: &mut Signal, b: &mut Signal) {
        tokio::select! {
            _ = a.recv() => {}
            _ = b.recv() => {}
        }
    }
    Ok(async move {
        either(&mut interrupt, &mut terminate).await;
        tracing::info!("stopping: answers under way are finished first; once more to stop at once");
        tokio::spawn(async move {
            either(&mut interrupt, &mut terminate).await;
            std::process::exit(130);
        });
    })
}

/// Reads the certificate and its key again at each SIGHUP, as those who renew them send it.
fn reload_on_hangup(tls: Tls) -> Result<(), Error> {
    let mut hangup = signal(SignalKind::hangup()).map_err(Error::Runtime)?;
    tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            match tls.reload() {
                Ok(()) => tracing::info!("read the certificate again"),
                Err(error) => tracing::warn!("{error}: the certificate stays what it was"),
            }
        }
    });
    Ok(())
}

fn say_ready(service: &Service, base: &str) {
    let context = service.engine().limits().max_context;
    tracing::info!("ready: {base}, context {context} tokens");
}
