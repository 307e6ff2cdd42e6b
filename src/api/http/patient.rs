//! Timeouts of one connection: its stream fails with `TimedOut` if the peer keeps it waiting.
//!
//! Three waits are limited: for the rest of a request head, for the next request, and for the peer to read what is sent.
//! While a request is in progress, reading has no timeout.
//!
//! hyper's `header_read_timeout` does not replace these timeouts. hyper starts that timer where a request ends, so a client
//! could be idle only as long as a head may take. hyper fixes the time when a connection begins, but here the timeouts
//! become shorter while all places are taken. And a timer of hyper's sees neither the handshake of TLS nor bytes that the
//! peer does not read.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep};

/// The limit of every wait while all places for connections are taken.
pub(in crate::api) const CROWDED: Duration = Duration::from_secs(1);

/// How long a peer may keep its connection waiting.
#[derive(Debug, Clone, Copy)]
pub(in crate::api) struct Patience {
    /// For the rest of a request head.
    pub head_timeout: Duration,
    /// Between two requests.
    pub idle_timeout: Duration,
    /// While the peer reads nothing of what is sent.
    pub write_timeout: Duration,
}

/// The requests of one connection, as far as its stream must know them.
#[derive(Default)]
pub(in crate::api) struct Requests {
    in_progress: AtomicUsize,
    begun: AtomicUsize,
    /// Wakes the stream when the last request ends.
    ended: AtomicWaker,
    /// Counts connections that were closed because the peer did not read.
    unread: Arc<AtomicU64>,
}

impl Requests {
    /// The requests of one connection, which adds to `unread` if its peer does not read.
    pub fn new(unread: Arc<AtomicU64>) -> Arc<Self> {
        Arc::new(Self { unread, ..Self::default() })
    }

    /// Counts a request from its complete head until the result is dropped.
    pub fn begin(self: &Arc<Self>) -> InProgress {
        self.begun.fetch_add(1, Ordering::AcqRel);
        self.in_progress.fetch_add(1, Ordering::AcqRel);
        InProgress(Arc::clone(self))
    }

    pub fn any_begun(&self) -> bool {
        self.begun.load(Ordering::Acquire) > 0
    }
}

/// One request, from its head to the end of its answer.
pub(in crate::api) struct InProgress(Arc<Requests>);

impl Drop for InProgress {
    fn drop(&mut self) {
        self.0.in_progress.fetch_sub(1, Ordering::AcqRel);
        self.0.ended.wake();
    }
}

/// A stream that fails with `TimedOut` if its peer keeps it waiting.
pub(in crate::api) struct Patient<S> {
    stream: S,
    requests: Arc<Requests>,
    crowded: watch::Receiver<bool>,
    patience: Patience,
    /// The number of requests that had begun at the last read.
    begun: usize,
    /// What the stream waits for, and since when. `None` while a request is in progress.
    waits: Option<(Wait, Instant)>,
    clock: Pin<Box<Sleep>>,
    write_clock: Option<Pin<Box<Sleep>>>,
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
        }
    }

    /// Ready when the peer has been silent for too long.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let (wait, since) = *self.waits.get_or_insert_with(|| (Wait::Idle, Instant::now()));
        let timeout = match wait {
            Wait::Head => self.patience.head_timeout,
            Wait::Idle => self.patience.idle_timeout,
        };
        let until = since + if *self.crowded.borrow() { timeout.min(CROWDED) } else { timeout };
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
        if this.requests.in_progress.load(Ordering::Acquire) > 0 {
            return read;
        }
        if read.is_ready() {
            let begins = buffer.filled().len() > before;
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

/// Replaces the two largest 64-bit values of `Content-Length` by the next smaller one, in the part of a head that was just
/// read. hyper reserves these two values, and would answer that the head is too long. No body has such a length, and the
/// handler refuses it with the right error. A value that is split between two reads is not replaced.
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
        let shut = Pin::new(&mut this.stream).poll_shutdown(cx);
        this.written(cx, shut)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn a_peer_that_reads_nothing_times_out_and_a_slow_one_does_not() {
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
        sent.expect("slowly, and longer than the timeout in total");
        let error = stream.write_all(&[7; 80]).await.expect_err("the peer no longer reads");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
