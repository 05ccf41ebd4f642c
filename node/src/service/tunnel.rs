//! `POST /link/v1/tunnels/{endpoint}`: one attempt at one provider (link.md, Tunnel).
//!
//! Checks come in 004's order: the request itself, then who is asked, then room; a provider is called last.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Response, request};
use http_body::Body;
use iop_shared::execution::liveness::resolve_stall_timeout_ms;
use iop_shared::execution::{ExecutionPath, FailureCode};
use iop_shared::wire::headers;
use iop_shared::wire::terminal::NodeError;
use iop_shared::wire::tunnel::TunnelHead;

use super::body::{ResponseBody, failed};
use super::scope::Scope;
use super::{BoxError, Inner};
use crate::providers::client::SendBody;
use crate::providers::registry::Permit;
use crate::providers::{Ask, TunnelAsk};
use crate::run::head;
use crate::run::task::{self, Attempt, RunGuard};

/// From the link: the head stands in the request's own path and headers.
pub(super) async fn handle<B>(
    node: &Inner,
    scope: &Arc<Scope>,
    mut parts: request::Parts,
    body: B,
) -> Response<ResponseBody>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    match TunnelHead::take(parts.uri.path(), &mut parts.headers) {
        Ok(head) => {
            // An edge strips what may not travel; a node does not take its word for it.
            headers::client_to_provider(&mut parts.headers);
            run(node, scope, head, parts.headers, body).await
        }
        Err(e) => refused(node, NodeError::new(FailureCode::InvalidRequest, e.to_string())),
    }
}

/// One attempt, its head already read.
pub(super) async fn run<B>(
    node: &Inner,
    scope: &Arc<Scope>,
    head: TunnelHead,
    headers: HeaderMap,
    body: B,
) -> Response<ResponseBody>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let (guard, ask) = match admit(node, scope, head, headers, body) {
        Ok(admitted) => admitted,
        Err(error) => return refused(node, error),
    };
    match task::dispatch(guard, ask).await {
        Ok(answer) => {
            let mut response = answer.map(ResponseBody::run);
            response
                .headers_mut()
                .insert(headers::ORIGIN, headers::ORIGIN_PROVIDER);
            response
        }
        Err(error) => failed(error),
    }
}

pub(super) fn refused(node: &Inner, error: NodeError) -> Response<ResponseBody> {
    node.metrics.refusals.at((error.code,)).inc();
    failed(error)
}

/// Everything that is decided before a provider is called.
fn admit<B>(
    node: &Inner,
    scope: &Arc<Scope>,
    tunnel: TunnelHead,
    headers: HeaderMap,
    body: B,
) -> Result<(RunGuard, Ask), NodeError>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let invalid = |text: String| NodeError::new(FailureCode::InvalidRequest, text);
    if !head::fits(&headers) {
        return Err(invalid(String::from(
            "the request's header list is larger than 128 KiB",
        )));
    }
    let stall_timeout = stall_timeout(tunnel.response_stall_timeout_ms)?;
    let slot = node.registry.find(&tunnel.provider)?;
    slot.check(ExecutionPath::ProviderTunnel, tunnel.endpoint, &tunnel.target)?;
    let permit = Permit::take(slot, &node.busy, &scope.busy, &node.metrics.in_flight)?;
    // Looked at while holding a place, so that a drain that sees no place taken has missed nobody.
    if node.is_draining() {
        return Err(NodeError::new(FailureCode::Draining, "the node is draining"));
    }
    let attempt = Attempt {
        path: ExecutionPath::ProviderTunnel,
        endpoint: tunnel.endpoint,
        run_id: tunnel.run_id,
        attempt_id: tunnel.attempt_id,
        target: tunnel.target,
        stall_timeout,
        scope: Arc::clone(scope),
    };
    let guard = RunGuard::new(permit, Arc::clone(&node.metrics), attempt);
    let ask = TunnelAsk {
        endpoint: tunnel.endpoint,
        method: tunnel.method,
        path: tunnel.path,
        headers,
        accept_encoding: tunnel.accept_encoding,
        body: SendBody::new(body),
    };
    Ok((guard, Ask::Tunnel(ask)))
}

/// The stall timeout of a request, in milliseconds on the wire.
///
/// # Errors
/// `invalid_request`, when it is negative or too large (004).
pub(super) fn stall_timeout(ms: i64) -> Result<Duration, NodeError> {
    resolve_stall_timeout_ms(ms)
        .map(|ms| Duration::from_millis(ms.unsigned_abs()))
        .map_err(|e| NodeError::new(FailureCode::InvalidRequest, e.to_string()))
}
