//! Clocks of one connection: its stream fails with `TimedOut` where its peer keeps it waiting.
//!
//! Three silences have a bound: a head that does not end, no next request, and bytes that nobody takes. While a request is
//! under way, no clock runs for what is read.
//!
//! hyper's `header_read_timeout` cannot do this. Its clock begins where the request before ended, so a client could be
//! idle for no longer than a head may take. Its length is fixed when the connection begins, and a crowd shortens the clocks
//! here. It knows neither writes nor the handshake of TLS.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep};

/// For silence of any kind, while there is no place left.
pub(in crate::api) const CROWDED: Duration = Duration::from_secs(1);

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
    /// Wakes the stream when the last request ends.
    ended: AtomicWaker,
}

impl Requests {
    /// Counts a request whose head has come, until the result is dropped.
    pub fn begin(self: &Arc<Self>) -> UnderWay {
        self.begun.fetch_add(1, Ordering::AcqRel);
        self.under_way.fetch_add(1, Ordering::AcqRel);
        UnderWay(Arc::clone(self))
    }

    pub fn any_begun(&self) -> bool {
        self.begun.load(Ordering::Acquire) > 0
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
        if this.requests.under_way.load(Ordering::Acquire) > 0 {
            return read;
        }
        if read.is_ready() {
            let more = buffer.filled().len() > before;
            if more && !this.waits.is_some_and(|(wait, _)| wait == Wait::Head) {
                this.waits = Some((Wait::Head, Instant::now()));
            }
            return read;
        }
        ready!(this.poll_silence(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
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
    async fn a_stream_that_takes_nothing_is_given_up_and_one_that_takes_little_is_not() {
        let patience = Patience {
            head_timeout: Duration::from_secs(60),
            idle_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_millis(200),
        };
        let (ours, mut theirs) = tokio::io::duplex(8);
        let mut stream = Patient::new(ours, Arc::default(), watch::channel(false).1, patience);
        let reader = async {
            let mut little = [0; 8];
            for _ in 0..10 {
                tokio::time::sleep(Duration::from_millis(40)).await;
                theirs.read_exact(&mut little).await.unwrap();
            }
        };
        let (sent, ()) = tokio::join!(stream.write_all(&[7; 80]), reader);
        sent.expect("slowly, and longer than the timeout in all");
        let error = stream.write_all(&[7; 80]).await.expect_err("nobody reads any more");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
