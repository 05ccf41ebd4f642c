//! One client connection from its first byte to its end: hyper's future, and beside it the two reasons to end it early:
//! the process drains, or nobody speaks.
//!
//! Neither costs anything while bytes move: both wake-ups are registered once and looked at only after they fired.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http_body::Body;
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::futures::Notified;
use tokio::time::Instant;

use super::server::ConnHandle;
use super::write_deadline::ConnState;
use crate::tasks;

/// The first request's head must be here by then; a slow loris is not.
pub(super) const FIRST_REQUEST_WITHIN: Duration = Duration::from_secs(30);
/// How often a connection is looked at after that.
const TICK: Duration = Duration::from_secs(30);
/// Ticks without a byte after which a connection is asked to end; a running request is not touched by that.
const IDLE_TICKS: u32 = 5;

pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Starts hyper's own tasks (HTTP/2 streams) the way every task is started.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tasks;

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Tasks {
    fn execute(&self, future: F) {
        tasks::spawn(tasks::Kind::Session, "http2_stream", future);
    }
}

/// How both HTTP versions are spoken with clients.
pub(super) fn builder() -> auto::Builder<Tasks> {
    let mut builder = auto::Builder::new(Tasks);
    builder
        .http1()
        .timer(TokioTimer::new())
        // A timer per request would cost more than the request; `FIRST_REQUEST_WITHIN` and ticks do it per connection.
        .header_read_timeout(None)
        // A half-closed client is a departed one (gateway.md §13).
        .half_close(false)
        .pipeline_flush(false)
        .keep_alive(true)
        .max_buf_size(64 << 10);
    builder
        .http2()
        .timer(TokioTimer::new())
        .initial_stream_window_size(Some(256 << 10))
        .initial_connection_window_size(Some(16 << 20))
        .max_concurrent_streams(Some(1024))
        .max_pending_accept_reset_streams(Some(1024))
        .max_header_list_size(128 << 10)
        .max_send_buf_size(128 << 10)
        .keep_alive_interval(Some(Duration::from_secs(20)))
        .keep_alive_timeout(Duration::from_secs(20));
    builder
}

/// Serves a connection to its end. `closing` fires once when the process drains.
pub(super) async fn serve<IO, H, Fut, B>(
    io: IO,
    state: Arc<ConnState>,
    builder: &auto::Builder<Tasks>,
    handler: &H,
    mut closing: Pin<&mut Notified<'_>>,
    is_closing: impl Fn() -> bool,
) where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    H: Fn(ConnHandle, http::Request<Incoming>) -> Fut,
    Fut: Future<Output = http::Response<B>> + Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let service = service_fn(|request: http::Request<Incoming>| {
        state.begin_request(request.version() < http::Version::HTTP_2);
        handler(ConnHandle::new(&state), request).map(Ok::<_, std::convert::Infallible>)
    });
    let mut connection = pin!(builder.serve_connection(TokioIo::new(io), service));
    let mut tick = pin!(tokio::time::sleep(FIRST_REQUEST_WITHIN));
    let mut idle_ticks = 0;
    let mut leaving = false;
    // The task's waker stays the same, so a future polled once wakes this one without being polled again.
    let mut registered = false;
    std::future::poll_fn(|cx| {
        loop {
            // How a client left is seen by its request's guards; there is nothing to say about the connection.
            if connection.as_mut().poll(cx).is_ready() {
                return Poll::Ready(());
            }
            if !leaving && (is_closing() || (!registered && closing.as_mut().poll(cx).is_ready())) {
                leaving = true;
                connection.as_mut().graceful_shutdown();
                continue;
            }
            if (!registered || tick.is_elapsed()) && tick.as_mut().poll(cx).is_ready() {
                if state.requests() == 0 {
                    return Poll::Ready(());
                }
                idle_ticks = if state.take_moved() { 0 } else { idle_ticks + 1 };
                tick.as_mut().reset(Instant::now() + TICK);
                registered = false;
                if idle_ticks >= IDLE_TICKS && !leaving {
                    leaving = true;
                    connection.as_mut().graceful_shutdown();
                }
                continue;
            }
            registered = true;
            return Poll::Pending;
        }
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::write_deadline::WriteDeadline;
    use http_body_util::Full;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
    use tokio::sync::Notify;

    const ASK: &[u8] = b"GET /x HTTP/1.1\r\nhost: h\r\n\r\n";

    /// A served connection; the answer to `/x` takes `thinking`.
    struct Served {
        client: DuplexStream,
        closing: Arc<(AtomicBool, Notify)>,
        started: Instant,
    }

    fn served(thinking: Duration) -> Served {
        let (client, io) = tokio::io::duplex(1024);
        let closing = Arc::new((AtomicBool::new(false), Notify::new()));
        let shared = Arc::clone(&closing);
        tasks::spawn(tasks::Kind::Session, "test_connection", async move {
            let state = ConnState::new(Duration::from_secs(30));
            let io = WriteDeadline::new(io, Arc::clone(&state));
            let mut closed = pin!(shared.1.notified());
            closed.as_mut().enable();
            let handler = move |_: ConnHandle, _: http::Request<Incoming>| async move {
                tokio::time::sleep(thinking).await;
                http::Response::new(Full::new(Bytes::from_static(b"done")))
            };
            serve(io, state, &builder(), &handler, closed, || {
                shared.0.load(Ordering::SeqCst)
            })
            .await;
        });
        Served {
            client,
            closing,
            started: Instant::now(),
        }
    }

    impl Served {
        async fn read_all(&mut self) -> (String, u64) {
            let mut text = String::new();
            self.client.read_to_string(&mut text).await.unwrap();
            (text, self.started.elapsed().as_secs())
        }

        async fn one_answer(&mut self) {
            let mut text = Vec::new();
            while !text.ends_with(b"done") {
                assert_ne!(self.client.read_buf(&mut text).await.unwrap(), 0);
            }
        }

        fn close(&self) {
            self.closing.0.store(true, Ordering::SeqCst);
            self.closing.1.notify_waiters();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_that_never_ends_is_given_30_seconds() {
        for begun in [&b""[..], b"P", b"GET / HTTP/1.1\r\nhost: h\r\nx-"] {
            let mut c = served(Duration::ZERO);
            c.client.write_all(begun).await.unwrap();
            assert_eq!(c.read_all().await.1, 30, "{begun:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_connection_is_closed_after_minutes_not_seconds() {
        let mut c = served(Duration::ZERO);
        c.client.write_all(ASK).await.unwrap();
        c.one_answer().await;
        let (rest, after) = c.read_all().await;
        assert_eq!(rest, "");
        assert!((150..=210).contains(&after), "{after}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_takes_an_hour_is_answered() {
        let mut c = served(Duration::from_secs(3600));
        c.client.write_all(ASK).await.unwrap();
        let (text, after) = c.read_all().await;
        assert!(
            text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("done"),
            "{text}"
        );
        assert_eq!(after, 3600);
    }

    #[tokio::test(start_paused = true)]
    async fn closing_ends_an_idle_connection_at_once_and_a_busy_one_after_its_answer() {
        let mut fresh = served(Duration::ZERO);
        tokio::task::yield_now().await;
        fresh.close();
        assert_eq!(fresh.read_all().await, (String::new(), 0));

        let mut idle = served(Duration::ZERO);
        idle.client.write_all(ASK).await.unwrap();
        idle.one_answer().await;
        idle.close();
        assert_eq!(idle.read_all().await, (String::new(), 0));

        let mut busy = served(Duration::from_secs(60));
        busy.client.write_all(ASK).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        busy.close();
        let (text, after) = busy.read_all().await;
        assert!(
            text.contains("connection: close\r\n") && text.ends_with("done"),
            "{text}"
        );
        assert_eq!(after, 60);
    }

    #[tokio::test(start_paused = true)]
    async fn a_half_closed_client_has_left() {
        let mut c = served(Duration::from_secs(60));
        c.client.write_all(ASK).await.unwrap();
        c.client.shutdown().await.unwrap();
        assert_eq!(c.read_all().await, (String::new(), 0));
    }
}
