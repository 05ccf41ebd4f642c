//! When a link last gave a sign of life.
//!
//! Both sides ping every 5 s, so a living link is never silent for long. hyper ends a connection whose ping stays
//! unanswered, but says goodbye first, and a path that swallows bytes can keep that from ever ending. Here the rule is
//! about the socket itself: nothing read for too long means dead, whatever waits to be written.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

/// The last sign of life of one socket.
#[derive(Debug, Clone)]
pub(crate) struct Activity {
    begun: Instant,
    /// Milliseconds after `begun`.
    last_ms: Arc<AtomicU64>,
}

impl Activity {
    pub(crate) fn new() -> Self {
        Self {
            begun: Instant::now(),
            last_ms: Arc::new(AtomicU64::new(0)),
        }
    }

    fn mark(&self) {
        let ms = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(ms, Ordering::Relaxed);
    }

    /// Resolves when nothing was read for `bound`.
    pub(crate) async fn silent_for(&self, bound: Duration) {
        loop {
            let deadline = self.begun + Duration::from_millis(self.last_ms.load(Ordering::Relaxed)) + bound;
            if Instant::now() >= deadline {
                return;
            }
            tokio::time::sleep_until(deadline).await;
        }
    }
}

/// A socket whose reads are noticed.
pub(crate) struct Watched<S> {
    io: S,
    activity: Activity,
}

impl<S> Watched<S> {
    pub(crate) fn new(io: S, activity: Activity) -> Self {
        Self { io, activity }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.io).poll_read(cx, buf);
        if polled.is_ready() {
            self.activity.mark();
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn silence_is_counted_from_the_last_read() {
        let (near, mut far) = tokio::io::duplex(64);
        let activity = Activity::new();
        let mut near = Watched::new(near, activity.clone());
        let start = Instant::now();
        let bound = Duration::from_secs(13);
        tokio::time::sleep(Duration::from_secs(10)).await;
        far.write_all(b"x").await.unwrap();
        assert_eq!(near.read_u8().await.unwrap(), b'x');
        // What is written says nothing about the peer.
        near.write_all(b"y").await.unwrap();
        activity.silent_for(bound).await;
        assert_eq!(start.elapsed().as_secs(), 23);
    }
}
