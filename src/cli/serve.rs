//! `unicorn serve`: bind, answer, and load the model meanwhile.

use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::error::Error;
use super::load::{self, EndEngine};
use crate::api::{self, Options, Server, Service};
use crate::config::Config;
use crate::engine::EngineHandle;

/// How often a stream that waits for its first token carries a comment.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// How long a body may pause: it holds one of few places meanwhile.
const BODY_STALL: Duration = Duration::from_secs(5);
/// For the load to end that a signal came into; it cannot be told to.
const LOAD_END: Duration = Duration::from_secs(20);

/// Serves until SIGINT or SIGTERM, or until the model cannot be loaded.
pub fn serve(config: &Config) -> Result<(), Error> {
    let files = load::files(&config.model)?;
    let model_id = config.model.name.clone().unwrap_or_else(|| files.name().to_owned());
    let options = Options {
        max_body_bytes: config.server.max_body_bytes,
        body_stall: BODY_STALL,
        keep_alive: KEEP_ALIVE,
    };
    let server = Server::new(model_id.clone(), options);
    let grace = Duration::from_secs(config.server.shutdown_grace_s);

    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(Error::Runtime)?;
    let mut load = None;
    let engine: Arc<OnceLock<EngineHandle>> = Arc::default();
    let result = runtime.block_on(async {
        let listener = bind(&config.server.host, config.server.port).await?;
        let address = listener.local_addr().map_err(Error::Serve)?;
        tracing::info!("listening on http://{address}/v1, model {model_id:?}; loading");

        // A thread of its own, not the runtime's: a signal while loading must not wait for it.
        let (done, loaded) = tokio::sync::oneshot::channel();
        let (load_config, started) = (config.clone(), Arc::clone(&engine));
        load = Some(std::thread::spawn(move || {
            let service = load::service(&files, &load_config);
            // Beside the channel, whose receiver is gone where a signal came first.
            let service = service.inspect(|s| drop(started.set(s.engine().clone())));
            drop(done.send(service));
        }));

        let stop = stop_signal()?;
        let serving = api::serve(listener, Arc::clone(&server), stop, grace);
        let loading = async {
            match loaded.await {
                Ok(Ok(service)) => {
                    say_ready(&service, &address.to_string());
                    server.set_ready(service);
                    std::future::pending().await
                }
                Ok(Err(error)) => error,
                Err(_) => Error::LoadPanicked,
            }
        };
        tokio::select! {
            result = serving => result.map_err(Error::Serve),
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

fn say_ready(service: &Service, address: &str) {
    let context = service.engine().limits().max_context;
    tracing::info!("ready: http://{address}/v1, context {context} tokens");
}
