//! `POST /link/v1/runs`: one attempt at one provider by the normalized path (link.md, Run).
//!
//! Checks come in the order of a tunnel's; the answer's last line and its trailers are the one terminal.

use std::sync::Arc;

use bytes::Bytes;
use http::Response;
use http_body::Body;
use http_body_util::{BodyExt, Limited};
use iop_shared::execution::{ExecutionPath, FailureCode};
use iop_shared::wire::event::RunRequest;
use iop_shared::wire::headers;
use iop_shared::wire::terminal::NodeError;

use super::body::{ResponseBody, failed};
use super::scope::Scope;
use super::tunnel::{refused, stall_timeout};
use super::{BoxError, Inner};
use crate::providers::registry::Permit;
use crate::providers::{Ask, RunAsk};
use crate::run::task::{self, Attempt, RunGuard};

/// Text only, so far above what any model reads, in bytes.
const MAX_BODY: usize = 64 << 20;

/// From the link: the request stands in the body.
pub(super) async fn handle<B>(node: &Inner, scope: &Arc<Scope>, body: B) -> Response<ResponseBody>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let invalid = |text: &str| refused(node, NodeError::new(FailureCode::InvalidRequest, text));
    let Ok(body) = Limited::new(body, MAX_BODY).collect().await else {
        return invalid("the run's body ended early or is too large");
    };
    match RunRequest::parse(&body.to_bytes()) {
        Ok(request) => run(node, scope, request).await,
        Err(e) => invalid(&e.to_string()),
    }
}

/// One attempt, its request already read.
pub(super) async fn run(node: &Inner, scope: &Arc<Scope>, request: RunRequest) -> Response<ResponseBody> {
    let (guard, ask) = match admit(node, scope, request) {
        Ok(admitted) => admitted,
        Err(error) => return refused(node, error),
    };
    match task::dispatch(guard, ask).await {
        Ok(answer) => {
            // A refusal is the provider's own words, as on a tunnel.
            let made = if answer.status().is_success() {
                ResponseBody::events
            } else {
                ResponseBody::run
            };
            let mut response = answer.map(made);
            response
                .headers_mut()
                .insert(headers::ORIGIN, headers::ORIGIN_PROVIDER);
            response
        }
        Err(error) => failed(error),
    }
}

/// Everything that is decided before a provider is called.
fn admit(node: &Inner, scope: &Arc<Scope>, request: RunRequest) -> Result<(RunGuard, Ask), NodeError> {
    let stall_timeout = stall_timeout(request.response_stall_timeout_ms)?;
    let slot = node.registry.find(&request.provider)?;
    slot.check(ExecutionPath::Normalized, request.endpoint, &request.target)?;
    let permit = Permit::take(slot, &node.busy, &scope.busy, &node.metrics.in_flight)?;
    // Looked at while holding a place, so that a drain that sees no place taken has missed nobody.
    if node.is_draining() {
        return Err(NodeError::new(FailureCode::Draining, "the node is draining"));
    }
    let attempt = Attempt {
        path: ExecutionPath::Normalized,
        endpoint: request.endpoint,
        run_id: request.run_id,
        attempt_id: request.attempt_id,
        target: request.target,
        stall_timeout,
        scope: Arc::clone(scope),
    };
    let ask = RunAsk {
        messages: request.messages,
    };
    Ok((
        RunGuard::new(permit, Arc::clone(&node.metrics), attempt),
        Ask::Run(ask),
    ))
}

#[cfg(test)]
mod tests;
