//! Serves one accepted link: HTTP/2 with the node as server, the settings of `docs/link.md`, and its end.
//!
//! Each stream is a task of hyper's; a stream that the edge resets, or a connection that ends, drops what it was doing.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::rt::{Read, Write};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::TokioTimer;
use iop_shared::wire::h2;
use tokio::sync::watch;

use super::activity::Activity;
use crate::service::Node;
use crate::service::scope::Scope;
use crate::tasks::SessionExecutor;

/// How a link ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// The node said goodbye.
    Closed,
    /// The edge left or the connection broke.
    Lost,
    /// The edge gave no sign of life.
    Silent,
}

/// A ping goes out after the interval and may take the limit; hyper's own goodbye gets half a second more.
const SILENCE: Duration = Duration::from_millis(500)
    .saturating_add(h2::PING_INTERVAL)
    .saturating_add(h2::PING_TIMEOUT);

/// Serves until the link ends. When `close` turns true, or the edge drains and its last request ended, the node says
/// goodbye (GOAWAY) and the link ends with its last stream.
pub(super) async fn serve<I>(
    node: &Node,
    io: I,
    activity: &Activity,
    mut close: watch::Receiver<bool>,
) -> Ended
where
    I: Read + Write + Unpin,
{
    let scope = Arc::new(Scope::new());
    let service = service_fn(|request| {
        let (node, scope) = (node.clone(), Arc::clone(&scope));
        async move { Ok::<_, Infallible>(node.handle_in(&scope, request).await) }
    });
    let connection = http2::Builder::new(SessionExecutor("stream"))
        .timer(TokioTimer::new())
        .initial_stream_window_size(h2::NODE_STREAM_WINDOW)
        .initial_connection_window_size(h2::NODE_CONNECTION_WINDOW)
        .max_concurrent_streams(h2::node_max_concurrent_streams(node.capacity()))
        .max_pending_accept_reset_streams(h2::NODE_PENDING_ACCEPT_RESET_STREAMS)
        .max_local_error_reset_streams(None)
        .max_header_list_size(h2::MAX_HEADER_LIST)
        // What may wait in the node for one stream: no more than the edge would take at once.
        .max_send_buf_size(h2::EDGE_STREAM_WINDOW as usize)
        .keep_alive_interval(h2::PING_INTERVAL)
        .keep_alive_timeout(h2::PING_TIMEOUT)
        .auto_date_header(false)
        .serve_connection(io, service);
    let mut connection = pin!(connection);
    let mut closing = false;
    loop {
        tokio::select! {
            // An end that the node did not ask for is a loss, however politely it came.
            _ = connection.as_mut() => return if closing { Ended::Closed } else { Ended::Lost },
            () = activity.silent_for(SILENCE) => return Ended::Silent,
            () = goodbye(&scope, &mut close), if !closing => {
                closing = true;
                scope.close();
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

async fn goodbye(scope: &Scope, close: &mut watch::Receiver<bool>) {
    tokio::select! {
        // A closer that is gone will never ask.
        asked = async { close.wait_for(|c| *c).await.is_ok() } => {
            if !asked {
                scope.edge_is_done().await;
            }
        }
        () = scope.edge_is_done() => {}
    }
}

#[cfg(test)]
mod tests;
