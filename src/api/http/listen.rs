//! Connections: how many, TLS, and how long one may keep its place without using it.
//!
//! HTTP/1.1, and HTTP/2 where the client chooses it: by ALPN, or without TLS by beginning with HTTP/2's preface. A
//! connection must send a whole request head soon after it was opened or after the head's first byte, must begin the next
//! request before it counts as idle, and must take what is sent to it (`http::patient`); while a request is being answered
//! no clock runs here ([`Options`](crate::api::Options) bounds bodies, the engine slow readers). Beyond
//! [`Connections::most`] nobody is accepted: further ones wait in the system's backlog until a place is free, and while
//! they may be there, whoever is silent has a second.
//!
//! A connection of HTTP/2 has all of these bounds, and one on the number of its streams (`http::streams`). What belongs to
//! one stream ends that stream alone: its client's reset cancels the request, and a client that takes nothing of an answer
//! loses that answer. Frames that belong to no stream keep no connection from being idle.

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
use axum::http::{HeaderValue, Request, Version, header};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tower::ServiceExt;

use crate::api::http::guarded::hold;
use crate::api::http::patient::{CROWDED, Patience, Patient, Requests};
use crate::api::http::streams::{self, Streams};
use crate::api::http::tls::Tls;

/// A request's head is at most this long, which is what one connection of HTTP/1.1 buffers.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Where the process has no file descriptor left, or so.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);
const WARN_EVERY: Duration = Duration::from_secs(60);
/// For a plain request that came where TLS was expected.
const NOT_TLS: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n\
    this server speaks HTTPS: use https://\n";

#[derive(Debug, Clone)]
pub struct Connections {
    /// Open at once; at least 1.
    pub most: usize,
    /// For a request's head, and for the handshake of TLS.
    pub head_timeout: Duration,
    /// Between two requests.
    pub idle_timeout: Duration,
    /// While nothing of what is sent is taken.
    pub write_timeout: Duration,
    /// None is plain HTTP.
    pub tls: Option<Tls>,
}

/// File descriptors that one connection takes: its own, and the one of [`Connection`].
pub const FILES_PER_CONNECTION: u64 = 2;

/// What a request may learn of the connection that it came on. One that came on none never learns anything.
#[derive(Debug, Clone)]
pub(in crate::api) struct Connection {
    crowded: watch::Receiver<bool>,
    /// By a second descriptor: what is waited for at the first is the business of whoever reads. None where there was none
    /// to be had.
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

    /// Resolves when the client has gone. As long as nobody reads the body of a request of HTTP/1.1, nobody else sees the
    /// client go: its going is behind the body in the stream. hyper sees a client of HTTP/2 go, and drops its requests.
    pub async fn left(this: Option<&Self>) {
        let Some(socket) = this.and_then(|this| this.socket.as_ref()) else { return pending().await };
        loop {
            match socket.ready(Interest::READABLE).await {
                Ok(ready) if ready.is_read_closed() => return,
                // More of the body has come. It stays where it is; what comes after it is to be told of.
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

/// How many connections are open, and how many of them, or of their streams, were given up since their clients did not
/// read.
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

/// Answers who connects until `stop`; then those under way get to their ends, and whoever connects meanwhile is answered
/// as well, once a connection: the handlers refuse what cannot be done any more, and a load balancer that asks hears why.
/// Dropped, it breaks all of them off. Each connection counts as `open` while it has its place.
pub(in crate::api) async fn listen(
    listener: TcpListener,
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
    // Never sent to: late connections have heard of the end before they begin.
    let (_late, not_stopped) = watch::channel(());
    let mut warned: Option<Instant> = None;
    loop {
        while open.try_join_next().is_some() {}
        while late.try_join_next().is_some() {}
        let full = places.available_permits() == 0;
        crowded.send_if_modified(|crowded| std::mem::replace(crowded, full) != full);
        if full && warned.is_none_or(|at| at.elapsed() > WARN_EVERY) {
            warned = Some(Instant::now());
            tracing::warn!("{} connections are open: further ones wait", options.most);
        }
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await.expect("nobody closes it");
            (place, listener.accept().await)
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
            // One that was gone before it was accepted is nobody's loss.
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

/// What every connection hears of.
#[derive(Clone)]
struct Signals {
    stopped: watch::Receiver<()>,
    /// There is no place left.
    crowded: watch::Receiver<bool>,
    /// The server was ending already when the connection was opened.
    late: bool,
}

async fn connection(
    mut stream: TcpStream,
    peer: SocketAddr,
    app: Router,
    options: Connections,
    mut signals: Signals,
    unread: Arc<AtomicU64>,
) {
    // A token is a small packet, and the next one comes later than it should wait for.
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
            stream.write_all(NOT_TLS).await?;
            stream.shutdown().await?;
            // Closed on what it sends, it might not read what it was told.
            tokio::io::copy(&mut stream.take(MAX_HEAD_BYTES as u64), &mut tokio::io::sink()).await?;
            return Err(io::Error::new(io::ErrorKind::InvalidData, "plain HTTP"));
        }
        acceptor.accept(stream).await
    };
    let crowded = *signals.crowded.borrow();
    let patience = if crowded { options.head_timeout.min(CROWDED) } else { options.head_timeout };
    let handshake = tokio::time::timeout(patience, handshake);
    let secured = tokio::select! {
        secured = handshake => secured.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())),
        _ = signals.stopped.changed() => return,
    };
    match secured {
        Ok(stream) => http(stream, peer, seen, app, &options, signals, unread).await,
        Err(error) => tracing::debug!("{peer}: no TLS: {error}"),
    }
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
    let requests = Requests::new(Arc::clone(&unread));
    let &Connections { head_timeout, idle_timeout, write_timeout, .. } = options;
    let patience = Patience { head_timeout, idle_timeout, write_timeout };
    let io = TokioIo::new(Patient::new(stream, Arc::clone(&requests), crowded.clone(), patience));
    let begun = Arc::clone(&requests);
    let service = service_fn(move |request: Request<Incoming>| {
        let is_stream = request.version() == Version::HTTP_2;
        let under_way = begun.begin(is_stream);
        let mut request = request.map(if is_stream { streams::read_on } else { Body::new });
        request.extensions_mut().insert(ConnectInfo(peer));
        request.extensions_mut().insert(seen.clone());
        let app = app.clone();
        async move {
            let response = app.oneshot(request).await.map(|response| hold(response, under_way));
            let response = response.map(|mut response| {
                if late && !is_stream {
                    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
                }
                response
            });
            if is_stream { response.map(streams::in_pieces) } else { response }
        }
    });
    // hyper itself answers a head that it refuses (400, 414, 431), before the service has a request, and that answer has no
    // body. hyper takes no other answer: an error object would need a stream that knows those bytes and changes them.
    let mut protocols = auto::Builder::new(Streams { write_timeout, unread });
    // hyper's own timeout for heads needs a timer, and gets none: `http::patient` says why.
    protocols.http1().max_buf_size(MAX_HEAD_BYTES);
    streams::bound(&mut protocols.http2(), MAX_HEAD_BYTES, write_timeout);
    let mut connection = pin!(protocols.serve_connection(io, service));
    let ended = loop {
        tokio::select! {
            ended = connection.as_mut() => break ended,
            // The stream looks at its clock again when the connection is polled.
            Ok(()) = crowded.changed() => {}
            _ = stopped.changed() => {
                // Who has not asked yet has nothing to wait for.
                if !requests.any_begun() {
                    return;
                }
                // A client of HTTP/2 that does not answer to it could stay until it is idle.
                requests.stop();
                connection.as_mut().graceful_shutdown();
                break connection.await;
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!("{peer}: {error}");
    }
}
