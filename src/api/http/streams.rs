//! HTTP/2, where one connection carries many requests, each as a stream: how many, what each buffers, how long a client may
//! leave its answer alone, and what becomes of a body that nobody reads.
//!
//! A client of HTTP/1.1 that takes nothing of its answer blocks the socket, and the socket has a clock (`http::patient`). A
//! client of HTTP/2 can close the window of one stream and go on with the others, which blocks no socket. So each stream
//! has a clock here. The clock runs from when an answer hands over a piece until hyper asks for the next piece. hyper does
//! so once the client's window has room for the first byte of the piece at hand, and thus for all pieces before. A stream
//! whose clock runs out is reset, with all that waits in it, and the others of its connection go on.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::Response;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::rt::Executor;
use hyper_util::rt::TokioTimer;
use hyper_util::server::conn::auto::Http2Builder;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// Streams of one connection that may be open at once: the fewest that RFC 9113 recommends (6.5.2). The requests of one
/// client are bounded beside that, on all of its connections together.
const MAX_STREAMS: u32 = 100;
/// What a stream may send of a body that nobody reads yet. A client that is 200 ms away sends 80 KB/s through it, and the
/// largest body must come at 70 KB/s (`exchange`).
const STREAM_WINDOW: u32 = 16 << 10;
/// What all streams may send together. With any less, bodies that wait for their turn to be read could keep out the body
/// that is being read.
const CONNECTION_WINDOW: u32 = MAX_STREAMS * STREAM_WINDOW;
/// What a stream may hold of an answer that the client's window has room for and the socket has not.
const SEND_BUFFER: usize = 16 << 10;
/// An answer is handed over in pieces of at most so many bytes. The last piece may wait for the client's window when the
/// request has ended, and is then all that the connection keeps of the answer.
const PIECE: usize = 4 << 10;
/// Streams that may be reset before hyper has seen their heads; one more ends the connection. This is h2's own bound.
const MAX_UNSEEN_RESETS: usize = 20;

/// For the rest of a body that nobody reads.
const REST_OF_BODY: Duration = Duration::from_secs(1);

/// Sets the bounds of this file.
///
/// A client that sends nothing is asked by a ping whether it is there, and loses its connection where it does not answer
/// for the time that a client of HTTP/1.1 may leave bytes unread. So a machine that is gone ends its generations.
pub(in crate::api) fn bound<E>(
    http2: &mut Http2Builder<'_, E>,
    max_head_bytes: usize,
    write_timeout: Duration,
) {
    http2
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(max_head_bytes as u32)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(SEND_BUFFER)
        .max_pending_accept_reset_streams(MAX_UNSEEN_RESETS)
        .keep_alive_interval(write_timeout / 2)
        .keep_alive_timeout(write_timeout);
}

tokio::task_local! {
    /// When the answer of this task's stream handed over a piece, until hyper asks for the next one.
    static HANDED_OVER: Cell<Option<Instant>>;
}

/// Runs each stream as a task, with its clock.
#[derive(Debug, Clone)]
pub(in crate::api) struct Streams {
    /// While nothing of a piece is taken.
    pub write_timeout: Duration,
    /// Counts streams that were given up for that.
    pub unread: Arc<AtomicU64>,
}

impl<F: Future + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        let (timeout, unread) = (self.write_timeout, Arc::clone(&self.unread));
        tokio::spawn(HANDED_OVER.scope(Cell::new(None), async move {
            tokio::select! {
                _ = stream => {}
                () = nothing_taken(timeout) => {
                    unread.fetch_add(1, Ordering::Relaxed);
                    tracing::debug!("a stream is reset: nothing of it was taken");
                }
            }
        }));
    }
}

/// Resolves when a piece has waited for so long.
async fn nothing_taken(timeout: Duration) {
    loop {
        match HANDED_OVER.with(Cell::get) {
            Some(since) if since.elapsed() >= timeout => return,
            Some(since) => sleep_until(since + timeout).await,
            None => sleep(timeout).await,
        }
    }
}

/// The body of a stream. What its reader leaves of it is read on, and dropped, for up to a second.
///
/// h2 resets a stream whose answer has ended and whose body has not. The code of that reset says that nothing is wrong, but
/// some clients, curl 7.88 among them, drop the answer with it. Most refusals come before the body has.
pub(in crate::api) fn read_on(body: Incoming) -> Body {
    Body::new(ReadOn(Some(body)))
}

/// None when dropped.
struct ReadOn(Option<Incoming>);

impl Drop for ReadOn {
    fn drop(&mut self) {
        if let Some(body) = self.0.take().filter(|body| !body.is_end_stream()) {
            read_rest(body);
        }
    }
}

/// Reads a body that nobody wants, and drops it, for up to a second.
pub(in crate::api) fn read_rest(mut body: impl HttpBody<Data: Send, Error: Send> + Send + Unpin + 'static) {
    if let Ok(runtime) = Handle::try_current() {
        runtime.spawn(timeout(REST_OF_BODY, async move {
            while let Some(Ok(_)) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {}
        }));
    }
}

impl HttpBody for ReadOn {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        self.0.as_mut().map_or(Poll::Ready(None), |body| Pin::new(body).poll_frame(cx))
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.0.as_ref().map_or_else(SizeHint::default, Incoming::size_hint)
    }
}

/// `response` in pieces that set the clock of their stream.
pub(in crate::api) fn in_pieces(response: Response<Body>) -> Response<Body> {
    response.map(|body| Body::new(Pieces { body, rest: Bytes::new() }))
}

struct Pieces {
    body: Body,
    /// What has come of `body` and was not handed over.
    rest: Bytes,
}

impl Pieces {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                end => return Poll::Ready(end),
            }
        }
        let piece = self.rest.split_to(self.rest.len().min(PIECE));
        // A part of `rest` would keep all of it in memory for as long as the connection keeps the part.
        Poll::Ready(Some(Ok(Frame::data(Bytes::copy_from_slice(&piece)))))
    }
}

impl HttpBody for Pieces {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let piece = self.poll_piece(cx);
        let since = matches!(piece, Poll::Ready(Some(Ok(_)))).then(Instant::now);
        HANDED_OVER.with(|handed_over| handed_over.set(since));
        piece
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.rest.is_empty() { self.body.size_hint() } else { SizeHint::default() }
    }
}
