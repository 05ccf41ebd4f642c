//! `POST /link/v1/tunnels/{endpoint}`: one attempt at one provider (link.md, Tunnel).
//!
//! Checks come in 004's order: the request itself, then who is asked, then room; a provider is called last.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Response, request};
use http_body::Body;
use iop_shared::execution::FailureCode;
use iop_shared::execution::liveness::resolve_stall_timeout_ms;
use iop_shared::wire::headers;
use iop_shared::wire::terminal::{NodeError, Terminal};
use iop_shared::wire::tunnel::TunnelHead;

use super::body::{ResponseBody, failed};
use super::scope::Scope;
use super::{BoxError, Inner};
use crate::providers::Ask;
use crate::providers::client::SendBody;
use crate::providers::registry::Permit;
use crate::run::head;
use crate::run::task::{RunBody, RunGuard};

/// From the link: the head stands in the request's own path and headers.
pub(super) async fn handle<B>(
    node: &Inner,
    scope: &Scope,
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
    scope: &Scope,
    head: TunnelHead,
    headers: HeaderMap,
    body: B,
) -> Response<ResponseBody>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    match admit(node, scope, head, headers, body) {
        Ok((guard, ask)) => dispatch(guard, ask).await,
        Err(error) => refused(node, error),
    }
}

fn refused(node: &Inner, error: NodeError) -> Response<ResponseBody> {
    node.metrics.refusals.at((error.code,)).inc();
    failed(error)
}

/// Everything that is decided before a provider is called.
fn admit<B>(
    node: &Inner,
    scope: &Scope,
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
    resolve_stall_timeout_ms(tunnel.response_stall_timeout_ms).map_err(|e| invalid(e.to_string()))?;
    let slot = node.registry.find(&tunnel.provider)?;
    slot.check(tunnel.endpoint, &tunnel.target)?;
    let permit = Permit::take(slot, &node.busy, &scope.busy, &node.metrics.in_flight)?;
    // Looked at while holding a place, so that a drain that sees no place taken has missed nobody.
    if node.is_draining() {
        return Err(NodeError::new(FailureCode::Draining, "the node is draining"));
    }
    let guard = RunGuard::new(permit, Arc::clone(&node.metrics), tunnel.endpoint);
    let ask = Ask {
        endpoint: tunnel.endpoint,
        method: tunnel.method,
        path: tunnel.path,
        target: tunnel.target,
        headers,
        accept_encoding: tunnel.accept_encoding,
        body: SendBody::new(body),
    };
    Ok((guard, ask))
}

async fn dispatch(mut guard: RunGuard, ask: Ask) -> Response<ResponseBody> {
    let answer = guard.slot().backend.call(ask).await;
    match answer {
        Ok(answer) => {
            guard.answered(answer.status());
            let mut response = answer.map(|source| ResponseBody::run(RunBody::new(source, guard)));
            response
                .headers_mut()
                .insert(headers::ORIGIN, headers::ORIGIN_PROVIDER);
            response
        }
        Err(error) => {
            guard.settle(&Terminal::Error(error.clone()));
            failed(error)
        }
    }
}
