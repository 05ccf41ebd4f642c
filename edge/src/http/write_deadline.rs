//! A client that takes nothing for too long is cut off (link.md rule 1): the write fails, hyper drops the connection and
//! with it the request. It is the client that ended by policy, never a provider that stalled.
//!
//! A timer is armed only when a write blocks; writes that go through touch none.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// What the request handlers and the connection's own task know of one connection.
#[derive(Debug)]
pub(super) struct ConnState {
    default_ms: u64,
    write_timeout_ms: AtomicU64,
    /// Requests that arrived so far.
    requests: AtomicU64,
    /// Whether bytes moved since `take_moved`.
    moved: AtomicBool,
}

impl ConnState {
    pub(super) fn new(write_timeout: Duration) -> Arc<Self> {
        let default_ms = millis(write_timeout);
        Arc::new(Self {
            default_ms,
            write_timeout_ms: AtomicU64::new(default_ms),
            requests: AtomicU64::new(0),
            moved: AtomicBool::new(false),
        })
    }

    /// A request arrived. On HTTP/1.1 it is alone, so limits of the one before are gone.
    pub(super) fn begin_request(&self, alone: bool) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        if alone {
            self.write_timeout_ms.store(self.default_ms, Ordering::Relaxed);
        }
    }

    pub(super) fn limit_write_stall(&self, longest: Duration) {
        self.write_timeout_ms
            .fetch_min(millis(longest), Ordering::Relaxed);
    }

    pub(super) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    pub(super) fn take_moved(&self) -> bool {
        self.moved.swap(false, Ordering::Relaxed)
    }

    fn write_timeout(&self) -> Duration {
        Duration::from_millis(self.write_timeout_ms.load(Ordering::Relaxed))
    }

    fn move_bytes(&self) {
        self.moved.store(true, Ordering::Relaxed);
    }
}

fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX).max(1)
}

/// The socket of a connection, with a limit on how long a write may block.
pub(super) struct WriteDeadline<IO> {
    io: IO,
    state: Arc<ConnState>,
    /// Kept for the next time.
    timer: Option<Pin<Box<Sleep>>>,
    blocked: bool,
}

impl<IO> WriteDeadline<IO> {
    pub(super) fn new(io: IO, state: Arc<ConnState>) -> Self {
        Self {
            io,
            state,
            timer: None,
            blocked: false,
        }
    }

    /// Passes progress on; starts or looks at the clock where there is none.
    fn judge<T>(&mut self, cx: &mut Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.blocked = false;
            self.state.move_bytes();
            return polled;
        }
        if !self.blocked {
            self.blocked = true;
            let deadline = Instant::now() + self.state.write_timeout();
            match &mut self.timer {
                Some(timer) => timer.as_mut().reset(deadline),
                None => self.timer = Some(Box::pin(tokio::time::sleep_until(deadline))),
            }
        }
        let Some(timer) = &mut self.timer else {
            return Poll::Pending;
        };
        ready!(timer.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the client takes no more bytes",
        )))
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for WriteDeadline<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = ready!(Pin::new(&mut self.io).poll_read(cx, buf));
        self.state.move_bytes();
        Poll::Ready(read)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for WriteDeadline<IO> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.io).poll_write(cx, buf);
        self.judge(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.judge(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // A plain socket has nothing to flush: only what blocks inside (TLS) is judged, so that a flush that finds
        // nothing to do is no sign of a client that reads.
        match Pin::new(&mut self.io).poll_flush(cx) {
            Poll::Ready(done) => Poll::Ready(done),
            Poll::Pending => self.judge(cx, Poll::Pending),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.io).poll_shutdown(cx) {
            Poll::Ready(done) => Poll::Ready(done),
            Poll::Pending => self.judge(cx, Poll::Pending),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const LIMIT: Duration = Duration::from_secs(30);

    fn pair() -> (
        WriteDeadline<tokio::io::DuplexStream>,
        tokio::io::DuplexStream,
        Arc<ConnState>,
    ) {
        let (near, far) = tokio::io::duplex(8);
        let state = ConnState::new(LIMIT);
        (WriteDeadline::new(near, Arc::clone(&state)), far, state)
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_nothing_is_cut_off_after_the_limit() {
        let (mut io, _far, _) = pair();
        let start = Instant::now();
        let e = io.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(
            (e.kind(), start.elapsed().as_secs()),
            (io::ErrorKind::TimedOut, 30)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_client_that_goes_on_taking_is_not() {
        let (mut io, mut far, _) = pair();
        let reader = async {
            let mut got = 0;
            while got < 64 {
                tokio::time::sleep(LIMIT - Duration::from_secs(1)).await;
                got += far.read(&mut [0; 4]).await.unwrap();
            }
        };
        let (written, ()) = tokio::join!(io.write_all(&[0; 64]), reader);
        written.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_flush_with_nothing_to_do_does_not_stop_the_clock() {
        let (mut io, _far, _) = pair();
        let start = Instant::now();
        let mut left: &[u8] = &[0; 64];
        // As hyper does it: write what fits, then flush, again and again.
        let e = std::future::poll_fn(|cx| {
            loop {
                match Pin::new(&mut io).poll_write(cx, left) {
                    Poll::Ready(Ok(n)) => left = &left[n..],
                    Poll::Ready(Err(e)) => return Poll::Ready(e),
                    Poll::Pending => {
                        assert!(Pin::new(&mut io).poll_flush(cx).is_ready());
                        return Poll::Pending;
                    }
                }
            }
        })
        .await;
        assert_eq!(
            (e.kind(), start.elapsed().as_secs()),
            (io::ErrorKind::TimedOut, 30)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_can_shorten_its_limit_but_not_the_next_ones() {
        let (mut io, mut far, state) = pair();
        state.begin_request(true);
        state.limit_write_stall(Duration::from_secs(10));
        state.limit_write_stall(Duration::from_secs(20));
        let start = Instant::now();
        io.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(start.elapsed().as_secs(), 10);

        far.read_exact(&mut [0; 8]).await.unwrap();
        state.begin_request(true);
        let start = Instant::now();
        io.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(start.elapsed().as_secs(), 30);
    }

    #[tokio::test(start_paused = true)]
    async fn no_timer_exists_while_writes_go_through() {
        let (mut io, mut far, _) = pair();
        // A task that used up its turn is told to wait too; that is no blocked write.
        tokio::task::unconstrained(async {
            for _ in 0..1_000 {
                io.write_all(&[0; 8]).await.unwrap();
                far.read_exact(&mut [0; 8]).await.unwrap();
            }
        })
        .await;
        assert!(io.timer.is_none());
    }
}
