//! Clocks of one connection: its stream fails with `TimedOut` where its peer keeps it waiting.
//!
//! Three silences have a bound: a head that does not end, no next request, and bytes that nobody takes. While a request is
//! under way, no clock runs for what is read.
//!
//! Bytes between two requests of HTTP/1.1 begin a head. Bytes between two requests of HTTP/2 may be frames of any kind,
//! pings above all, so nothing but a whole head ends the silence there. The first head of HTTP/2 has the time of a head,
//! and each further head what is left of the time between two requests.
//!
//! hyper's `header_read_timeout` does not replace these clocks, for four reasons. hyper starts that clock where a request
//! ends, so a client could be idle for no longer than a head may take. hyper fixes the time when a connection begins, and a
//! crowd shortens the times here. hyper has no such clock for HTTP/2. And a clock of hyper's sees neither the handshake of
//! TLS nor bytes that nobody takes.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep};

/// For silence of any kind, while there is no place left, or the server stops.
pub(in crate::api) const CROWDED: Duration = Duration::from_secs(1);
/// For a client of HTTP/2 to close its side behind the last answer.
const LINGER: Duration = Duration::from_secs(1);

/// How long a peer may keep its connection waiting.
#[derive(Debug, Clone, Copy)]
pub(in crate::api) struct Patience {
    /// For a request's head.
    pub head_timeout: Duration,
    /// Between two requests.
    pub idle_timeout: Duration,
    /// While nothing of what is sent is taken.
    pub write_timeout: Duration,
}

/// The requests of one connection, as its stream has to know them.
#[derive(Default)]
pub(in crate::api) struct Requests {
    under_way: AtomicUsize,
    begun: AtomicUsize,
    /// Whether they are streams of HTTP/2, which the first of them tells.
    are_streams: AtomicBool,
    /// Whether no further one is wanted.
    stopping: AtomicBool,
    /// Wakes the stream when the last request ends.
    ended: AtomicWaker,
    /// Counts connections that were given up, since nothing of what was sent was taken.
    unread: Arc<AtomicU64>,
}

impl Requests {
    /// The requests of one connection. It counts in `unread` if its client does not read.
    pub fn new(unread: Arc<AtomicU64>) -> Arc<Self> {
        Arc::new(Self { unread, ..Self::default() })
    }

    /// Counts a request whose head has come, until the result is dropped.
    pub fn begin(self: &Arc<Self>, is_stream: bool) -> UnderWay {
        self.are_streams.store(is_stream, Ordering::Release);
        self.begun.fetch_add(1, Ordering::AcqRel);
        self.under_way.fetch_add(1, Ordering::AcqRel);
        UnderWay(Arc::clone(self))
    }

    pub fn any_begun(&self) -> bool {
        self.begun.load(Ordering::Acquire) > 0
    }

    /// Shortens the silence behind the last request, from when the connection is polled.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
    }
}

/// One request, from its head to the end of its answer.
pub(in crate::api) struct UnderWay(Arc<Requests>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::AcqRel);
        self.0.ended.wake();
    }
}

/// A stream that fails with `TimedOut` where its peer keeps it waiting.
pub(in crate::api) struct Patient<S> {
    stream: S,
    requests: Arc<Requests>,
    crowded: watch::Receiver<bool>,
    patience: Patience,
    /// Requests that had begun when this last looked.
    begun: usize,
    /// What it waits for, and since when; none while a request is under way.
    waits: Option<(Wait, Instant)>,
    clock: Pin<Box<Sleep>>,
    write_clock: Option<Pin<Box<Sleep>>>,
    /// Set when this side is shut.
    lingers_until: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    Head,
    Idle,
}

impl<S> Patient<S> {
    pub fn new(
        stream: S,
        requests: Arc<Requests>,
        crowded: watch::Receiver<bool>,
        patience: Patience,
    ) -> Self {
        Self {
            stream,
            requests,
            crowded,
            patience,
            begun: 0,
            waits: Some((Wait::Head, Instant::now())),
            clock: Box::pin(tokio::time::sleep(patience.head_timeout)),
            write_clock: None,
            lingers_until: None,
        }
    }

    /// Ready when the peer has been silent for too long.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let (wait, since) = *self.waits.get_or_insert_with(|| (Wait::Idle, Instant::now()));
        let timeout = match wait {
            Wait::Head => self.patience.head_timeout,
            Wait::Idle => self.patience.idle_timeout,
        };
        let hurried = *self.crowded.borrow() || self.requests.stopping.load(Ordering::Acquire);
        self.poll_clock(cx, since + if hurried { timeout.min(CROWDED) } else { timeout })
    }

    fn poll_clock(&mut self, cx: &mut Context<'_>, until: Instant) -> Poll<()> {
        // A peer that never stops sending uses up its task's budget, and no timer is ready for a task without one.
        if Instant::now() >= until {
            return Poll::Ready(());
        }
        if self.clock.deadline() != until {
            self.clock.as_mut().reset(until);
        }
        self.clock.as_mut().poll(cx)
    }

    fn written<T>(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.write_clock = None;
            return result;
        }
        let timeout = self.patience.write_timeout;
        let clock = self.write_clock.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
        ready!(clock.as_mut().poll(cx));
        self.requests.unread.fetch_add(1, Ordering::Relaxed);
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> Patient<S> {
    /// Ready when the peer has closed its side, or had [`LINGER`] for that. A socket that is closed with bytes unread resets
    /// the connection, and the reset overtakes what the peer has not read. A client of HTTP/2 sends window updates up to the
    /// end of its last answer.
    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let until = *self.lingers_until.get_or_insert_with(|| Instant::now() + LINGER);
        let mut unread = [0; 4096];
        loop {
            let mut unread = ReadBuf::new(&mut unread);
            match Pin::new(&mut self.stream).poll_read(cx, &mut unread) {
                Poll::Ready(Ok(())) if !unread.filled().is_empty() => {}
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => return self.poll_clock(cx, until),
            }
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.requests.ended.register(cx.waker());
        let begun = this.requests.begun.load(Ordering::Acquire);
        if begun != this.begun {
            this.begun = begun;
            this.waits = None;
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, buffer);
        if this.requests.under_way.load(Ordering::Acquire) > 0 {
            return read;
        }
        if read.is_ready() {
            let more = buffer.filled().len() > before;
            let begins = more && !this.requests.are_streams.load(Ordering::Acquire);
            if begins {
                spare_reserved_lengths(&mut buffer.filled_mut()[before..]);
            }
            if begins && !this.waits.is_some_and(|(wait, _)| wait == Wait::Head) {
                this.waits = Some((Wait::Head, Instant::now()));
            }
            return read;
        }
        ready!(this.poll_silence(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Makes the two largest `Content-Length`s of 64 bits the next smaller one, in a head that has just been read. hyper keeps
/// these two for its own purposes, and would answer that the head is too long. No body is that long, and a handler refuses
/// the length as what it is. In a head that comes in pieces, a length that is cut stays as it is.
fn spare_reserved_lengths(head: &mut [u8]) {
    for line in head.split_mut(|byte| *byte == b'\n') {
        if line.trim_ascii().is_empty() {
            return;
        }
        let Some(colon) = line.iter().position(|byte| *byte == b':') else { continue };
        let (name, value) = line.split_at_mut(colon);
        let is_reserved = [u64::MAX, u64::MAX - 1]
            .iter()
            .any(|length| value[1..].trim_ascii() == length.to_string().as_bytes());
        if is_reserved && name.eq_ignore_ascii_case(b"content-length") {
            let last = value.iter_mut().rfind(|byte| byte.is_ascii_digit());
            *last.expect("a digit") = b'3';
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.written(cx, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(cx, slices);
        this.written(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = Pin::new(&mut this.stream).poll_flush(cx);
        this.written(cx, flushed)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.lingers_until.is_none() {
            let shut = Pin::new(&mut this.stream).poll_shutdown(cx);
            ready!(this.written(cx, shut))?;
        }
        if this.requests.are_streams.load(Ordering::Acquire) {
            this.poll_linger(cx).map(Ok)
        } else {
            Poll::Ready(Ok(()))
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn a_stream_that_takes_nothing_is_given_up_and_one_that_takes_little_is_not() {
        let patience = Patience {
            head_timeout: Duration::from_secs(60),
            idle_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(2),
        };
        let (ours, mut theirs) = tokio::io::duplex(8);
        let mut stream = Patient::new(ours, Arc::default(), watch::channel(false).1, patience);
        let reader = async {
            let mut little = [0; 8];
            for _ in 0..10 {
                tokio::time::sleep(Duration::from_millis(400)).await;
                theirs.read_exact(&mut little).await.unwrap();
            }
        };
        let (sent, ()) = tokio::join!(stream.write_all(&[7; 80]), reader);
        sent.expect("slowly, and longer than the timeout in all");
        let error = stream.write_all(&[7; 80]).await.expect_err("nobody reads any more");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_connection_of_http_2_is_closed_when_its_peer_has_closed_its_side() {
        let patience = Patience {
            head_timeout: Duration::from_secs(60),
            idle_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
        };
        for (is_stream, peer_closes) in [(false, false), (true, true), (true, false)] {
            let (ours, mut theirs) = tokio::io::duplex(8);
            let requests: Arc<Requests> = Arc::default();
            drop(requests.begin(is_stream));
            let mut stream = Patient::new(ours, requests, watch::channel(false).1, patience);
            let mut shut = Box::pin(stream.shutdown());
            assert_eq!(futures::poll!(&mut shut).is_pending(), is_stream);
            if is_stream {
                // More than the pipe holds: all of it is read.
                let sending = theirs.write_all(&[7; 80]);
                tokio::select! {
                    sent = sending => sent.expect("read"),
                    _ = &mut shut => panic!("closed on what the peer sends"),
                }
                // Else the peer has a second.
                if peer_closes {
                    drop(theirs);
                    assert!(futures::poll!(&mut shut).is_ready());
                } else {
                    shut.await.expect("closed");
                }
            }
        }
    }
}
