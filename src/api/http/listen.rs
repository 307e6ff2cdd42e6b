//! Connections: how many there may be, TLS, and how long a connection may stay open without making progress.
//!
//! The server speaks HTTP/1.1 only. A client that begins with HTTP/2's preface gets a refusal, and ALPN offers `http/1.1`
//! only. A connection must send a complete request head soon after it was opened or after the first byte of the head. It
//! must begin the next request within the idle timeout, and it must read what is sent to it (`http::patient`). No timeout
//! of this module runs while a request is being answered: [`Options`](crate::api::Options) limits bodies, and the engine
//! limits slow readers. At most [`Connections::most`] connections are accepted. Other clients wait in the system's backlog
//! until a connection ends. While all places are taken, a silent connection is closed after one second.

use std::future::{Future, pending};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{HeaderValue, Request, header};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tower::ServiceExt;

use crate::api::http::guarded::hold;
use crate::api::http::patient::{CROWDED, Patience, Patient, Requests};
use crate::api::http::tls::Tls;

/// The maximum length of a request head, which is also what a connection buffers.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// The wait after a failed `accept`, for example because the process has no free file descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);
const WARN_EVERY: Duration = Duration::from_secs(60);
/// The answer to a plain request on a port that expects TLS.
const NOT_TLS: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n\
    this server speaks HTTPS: use https://\n";
/// The answer to the preface of HTTP/2.
const NOT_HTTP_1: &[u8] =
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n\
    this server speaks HTTP/1.1, and not HTTP/2: use a proxy in front of it for HTTP/2\n";

#[derive(Debug, Clone)]
pub struct Connections {
    /// The maximum number of open connections; at least 1.
    pub most: usize,
    /// The time for a request head, and for the handshake of TLS.
    pub head_timeout: Duration,
    /// The time between two requests.
    pub idle_timeout: Duration,
    /// The time during which the client reads nothing of what is sent.
    pub write_timeout: Duration,
    /// `None` = plain HTTP.
    pub tls: Option<Tls>,
}

/// The number of file descriptors of one connection: its own, and the one of [`Connection`].
pub const FILES_PER_CONNECTION: u64 = 2;

/// What a request can know about its connection. The futures of a request without a connection never resolve.
#[derive(Debug, Clone)]
pub(in crate::api) struct Connection {
    crowded: watch::Receiver<bool>,
    /// A second descriptor, because only one task can wait on the first descriptor, and hyper's task does. `None` = no
    /// descriptor was available.
    socket: Option<Arc<TcpStream>>,
}

impl Connection {
    /// Resolves when there is no place left for another connection.
    pub async fn crowded(this: Option<&Self>) {
        let Some(this) = this else { return pending().await };
        let crowded = this.crowded.clone().wait_for(|crowded| *crowded).await.is_ok();
        if !crowded {
            pending().await
        }
    }

    /// Resolves when the client has disconnected. hyper does not see this while the body is not read, because the end of
    /// the stream comes after the body.
    pub async fn left(this: Option<&Self>) {
        let Some(socket) = this.and_then(|this| this.socket.as_ref()) else { return pending().await };
        loop {
            match socket.ready(Interest::READABLE).await {
                Ok(ready) if ready.is_read_closed() => return,
                // More of the body has come. It is not read here: clear the readiness, and wait for the next event.
                Ok(_) => {
                    drop(socket.try_io(Interest::READABLE, || Err::<(), _>(ErrorKind::WouldBlock.into())))
                }
                Err(_) => return pending().await,
            }
        }
    }
}

/// A second descriptor of a stream's socket.
fn second(stream: &TcpStream) -> io::Result<TcpStream> {
    TcpStream::from_std(stream.as_fd().try_clone_to_owned()?.into())
}

/// The number of open connections, and the number of connections that were closed because the client did not read.
#[derive(Debug, Clone, Default)]
pub(in crate::api) struct Open {
    places: Arc<()>,
    unread: Arc<AtomicU64>,
}

impl Open {
    pub fn count(&self) -> usize {
        Arc::strong_count(&self.places) - 1
    }

    pub fn unread(&self) -> u64 {
        self.unread.load(Ordering::Relaxed)
    }
}

/// The next connection of any listener.
async fn accept(listeners: &[TcpListener]) -> io::Result<(TcpStream, SocketAddr)> {
    futures::future::select_all(listeners.iter().map(|listener| Box::pin(listener.accept()))).await.0
}

/// Serves connections until `stop`. Then it lets the requests in progress finish. Until they have finished, each new
/// connection still gets one answer: the handlers refuse what is no longer possible, so a load balancer learns the reason.
/// Dropping the future closes all connections. `count` counts the connections that have a place.
pub(in crate::api) async fn listen(
    listeners: Vec<TcpListener>,
    app: Router,
    options: Connections,
    count: &Open,
    stop: impl Future<Output = ()>,
) {
    let mut stop = pin!(stop);
    let (stopping, stopped) = watch::channel(());
    let (crowded, is_crowded) = watch::channel(false);
    let places = Arc::new(Semaphore::new(options.most));
    let (mut open, mut late) = (JoinSet::new(), JoinSet::new());
    let mut draining = false;
    // Nothing is sent to this channel: a connection that begins after `stop` already knows about it.
    let (_late, not_stopped) = watch::channel(());
    let mut warned: Option<Instant> = None;
    loop {
        while open.try_join_next().is_some() {}
        while late.try_join_next().is_some() {}
        let full = places.available_permits() == 0;
        crowded.send_if_modified(|crowded| std::mem::replace(crowded, full) != full);
        if full && warned.is_none_or(|at| at.elapsed() > WARN_EVERY) {
            warned = Some(Instant::now());
            tracing::warn!("{} connections are open: new clients wait", options.most);
        }
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await.expect("the semaphore is never closed");
            (place, accept(&listeners).await)
        };
        let (place, accepted) = tokio::select! {
            biased;
            () = &mut stop, if !draining => {
                draining = true;
                let _ = stopping.send(());
                continue;
            }
            ended = open.join_next(), if draining => match ended {
                Some(_) => continue,
                None => break,
            },
            next = next => next,
        };
        match accepted {
            Ok((stream, peer)) => {
                let stopped = if draining { &not_stopped } else { &stopped };
                let signals =
                    Signals { stopped: stopped.clone(), crowded: is_crowded.clone(), late: draining };
                let unread = Arc::clone(&count.unread);
                let connection = connection(stream, peer, app.clone(), options.clone(), signals, unread);
                let counted = Arc::clone(&count.places);
                let connections = if draining { &mut late } else { &mut open };
                connections.spawn(async move {
                    connection.await;
                    drop((place, counted));
                });
            }
            // The client disconnected before it was accepted.
            Err(error) if is_the_clients(&error) => {}
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

fn is_the_clients(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// What every connection observes.
#[derive(Clone)]
struct Signals {
    stopped: watch::Receiver<()>,
    /// There is no place left.
    crowded: watch::Receiver<bool>,
    /// Whether the connection was opened after the server began to stop.
    late: bool,
}

async fn connection(
    stream: TcpStream,
    peer: SocketAddr,
    app: Router,
    options: Connections,
    mut signals: Signals,
    unread: Arc<AtomicU64>,
) {
    // A token is a small packet, which must not wait for the next one.
    let _ = stream.set_nodelay(true);
    let seen = Connection { crowded: signals.crowded.clone(), socket: second(&stream).ok().map(Arc::new) };
    let Some(tls) = &options.tls else {
        return http(stream, peer, seen, app, &options, signals, unread).await;
    };
    let acceptor = tls.acceptor();
    let handshake = async {
        let mut first = [0];
        // TLS begins with the byte of a handshake record, HTTP with a letter.
        if stream.peek(&mut first).await? == 1 && first[0].is_ascii_alphabetic() {
            refuse(stream, NOT_TLS).await?;
            return Err(io::Error::new(io::ErrorKind::InvalidData, "plain HTTP"));
        }
        acceptor.accept(stream).await
    };
    let crowded = *signals.crowded.borrow();
    let patience = if crowded { options.head_timeout.min(CROWDED) } else { options.head_timeout };
    let handshake = timeout(patience, handshake);
    let secured = tokio::select! {
        secured = handshake => secured.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())),
        _ = signals.stopped.changed() => return,
    };
    match secured {
        Ok(stream) => http(stream, peer, seen, app, &options, signals, unread).await,
        Err(error) => tracing::debug!("{peer}: no TLS: {error}"),
    }
}

/// Sends `answer`, and closes the connection. It also reads what the client sends: closing a socket with unread bytes
/// resets the connection, and the client might lose the answer.
async fn refuse(mut stream: impl AsyncRead + AsyncWrite + Unpin, answer: &[u8]) -> io::Result<()> {
    stream.write_all(answer).await?;
    stream.shutdown().await?;
    tokio::io::copy(&mut stream.take(MAX_HEAD_BYTES as u64), &mut tokio::io::sink()).await.map(drop)
}

async fn http<S: AsyncRead + AsyncWrite + Unpin + 'static>(
    stream: S,
    peer: SocketAddr,
    seen: Connection,
    app: Router,
    options: &Connections,
    Signals { mut stopped, mut crowded, late }: Signals,
    unread: Arc<AtomicU64>,
) {
    let requests = Requests::new(unread);
    let &Connections { head_timeout, idle_timeout, write_timeout, .. } = options;
    let patience = Patience { head_timeout, idle_timeout, write_timeout };
    let io = TokioIo::new(Patient::new(stream, Arc::clone(&requests), crowded.clone(), patience));
    let begun = Arc::clone(&requests);
    let service = service_fn(move |request: Request<Incoming>| {
        let in_progress = begun.begin();
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(ConnectInfo(peer));
        request.extensions_mut().insert(seen.clone());
        let app = app.clone();
        async move {
            let response = app.oneshot(request).await.map(|response| hold(response, in_progress));
            response.map(|mut response| {
                if late {
                    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
                }
                response
            })
        }
    });
    // hyper itself answers an invalid head (400, 414, 431), before the service has a request. That answer has no body, and
    // hyper cannot be given another one.
    // hyper's own timeout for heads needs a timer, and gets none: `http::patient` says why.
    let mut connection = http1::Builder::new().max_buf_size(MAX_HEAD_BYTES).serve_connection(io, service);
    let ended = loop {
        tokio::select! {
            ended = &mut connection => break ended,
            // The stream reads its timeout again when the connection is polled.
            Ok(()) = crowded.changed() => {}
            _ = stopped.changed() => {
                // A client without a request has nothing to wait for.
                if !requests.any_begun() {
                    return;
                }
                Pin::new(&mut connection).graceful_shutdown();
                break (&mut connection).await;
            }
        }
    };
    let Err(error) = ended else { return };
    if error.is_parse_version_h2() {
        let stream = connection.into_parts().io.into_inner();
        let _ = timeout(CROWDED, refuse(stream, NOT_HTTP_1)).await;
    }
    tracing::debug!("{peer}: {error}");
}
