//! One client connection from its first byte to its end: hyper's future, and beside it the two reasons to end it early:
//! the process drains, or nobody speaks.
//!
//! Neither costs anything while bytes move: both wake-ups are registered once and looked at only after they fired.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

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
use crate::gate::GateBody;
use crate::tasks;

/// The first request's head must be here by then; a slow loris is not.
pub(super) const FIRST_REQUEST_WITHIN: Duration = Duration::from_secs(30);
/// How often a connection is looked at after that.
const TICK: Duration = Duration::from_secs(30);
/// Ticks without a byte after which a connection is asked to end; a running request is not touched by that.
const IDLE_TICKS: u32 = 5;

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
pub(super) async fn serve<IO, H, Fut>(
    io: IO,
    state: Arc<ConnState>,
    builder: &auto::Builder<Tasks>,
    handler: &H,
    mut closing: Pin<&mut Notified<'_>>,
    is_closing: impl Fn() -> bool,
) where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    H: Fn(ConnHandle, http::Request<Incoming>) -> Fut,
    Fut: Future<Output = http::Response<GateBody>> + Send + 'static,
{
    let service = service_fn(|request: http::Request<Incoming>| {
        state.begin_request(request.version() < http::Version::HTTP_2);
        let answer = handler(ConnHandle::new(&state), request);
        async move { Ok::<_, std::convert::Infallible>(answer.await) }
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

