//! One model turn of a run through the gateway's own gate (D33): in this process, and otherwise as any client's request.
//!
//! Admission, queue, lease and stream are the gate's; whether a failed turn is asked again is the run's (durable-api §8).
//! Dropping the future cancels the provider.

mod answer;
mod failure;
mod stream;
mod wire;

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Response, StatusCode};
use http_body_util::BodyExt;
use iop_durable::runner::CallError;
use iop_shared::execution::Endpoint;
use tokio::time::Instant;

pub(crate) use answer::{Delta, ToolCall, TurnAnswer};

use crate::app::App;
use crate::error::ApiError;
use crate::gate::{self, Asked, Exchange, GateBody, Origin, RequestGuard, Verdict, X_IOP_ATTEMPTS};
use crate::http::auth::ConcurrencyGuard;
use crate::http::request_id::{RequestId, X_REQUEST_ID};
use crate::http::route::{Routed, resolve};
use answer::Assembly;

/// Bytes of an error's body that are read.
const ERROR_MAX: usize = 64 << 10;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// What a run asks of a model.
#[derive(Debug, Clone)]
pub(crate) struct TurnRequest<'a> {
    pub(crate) run: &'a str,
    /// A name that the gateway routes.
    pub(crate) model: &'a str,
    /// A whole chat completion request, with `stream` and `stream_options.include_usage`.
    pub(crate) body: Bytes,
    /// The name of the key that made the run: its models, its places and its priority count at every turn.
    pub(crate) owner: Option<&'a str>,
    pub(crate) traceparent: Option<&'a str>,
}

/// Asks a model once and reads its whole answer. `delta` is told its pieces as they come; none of them counts when this
/// fails (S16).
///
/// # Errors
/// `CallError::Failed` with the kind, the code and whether the run may ask again.
pub(crate) async fn turn(
    app: &Arc<App>,
    request: TurnRequest<'_>,
    delta: &(dyn Fn(Delta) + Send + Sync),
) -> Result<TurnAnswer, CallError> {
    let id = RequestId::generate();
    tracing::debug!(request_id = %id, run_id = request.run, "run_turn_began");
    let endpoint = Endpoint::Chat;
    let mut guard = RequestGuard::new(app.metrics.clone(), endpoint.into(), id.clone(), Instant::now());
    let (asked, place) = match admit(app, endpoint, &id, request).await {
        Ok(admitted) => admitted,
        Err(error) => {
            guard.settle(error.kind.outcome());
            return Err(failure::refused(&error));
        }
    };
    guard.hold(place);
    let response = gate::serve(Exchange::new(Arc::clone(app), asked, guard)).await;
    let max = usize::try_from(app.settings.runs.max_result).unwrap_or(usize::MAX);
    read(response, max, delta).await
}

/// What a turn has to pass as a client's request does, but for the drain: a run that goes on is the host's to stop.
async fn admit(
    app: &App,
    endpoint: Endpoint,
    id: &RequestId,
    request: TurnRequest<'_>,
) -> Result<(Box<Asked>, ConcurrencyGuard), ApiError> {
    let caller = app.keys.owner(request.owner)?;
    let model = resolve(app, &caller, request.model)?;
    let bytes = request.body.len();
    let routed = Routed::json(request.body)?;
    let place = caller.begin_within(app.settings.queue.max_wait).await?;
    let held = app.body_memory.hold(bytes)?;
    let mut headers = HeaderMap::with_capacity(3);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(X_REQUEST_ID, id.header());
    if let Some(trace) = request.traceparent.and_then(|t| HeaderValue::from_str(t).ok()) {
        headers.insert(TRACEPARENT, trace);
    }
    let mut asked = routed.asked(Origin::Run, endpoint, model, headers, &caller);
    asked.held = Some(held);
    Ok((asked, place))
}

/// `max`: bytes of all texts of the answer.
async fn read(
    response: Response<GateBody>,
    max: usize,
    delta: &(dyn Fn(Delta) + Send + Sync),
) -> Result<TurnAnswer, CallError> {
    let (head, body) = response.into_parts();
    let body = body.into_data_stream();
    if head.status != StatusCode::OK {
        let said = stream::read_some(body, ERROR_MAX).await;
        let verdict = head.extensions.get::<Verdict>().copied();
        let retry_after = gate::retry_after(&head.headers, SystemTime::now());
        return Err(failure::unanswered(head.status, verdict, &said, retry_after));
    }
    let mut assembly = Assembly::new(max);
    let complete = if gate::is_json(&head.headers) {
        stream::read_whole(body, max, &mut assembly, delta).await
    } else {
        stream::read_events(body, max, &mut assembly, delta).await
    };
    let answer = complete.and_then(|()| assembly.finish(attempts(&head.headers)));
    answer.map_err(failure::broken)
}

/// What the gate counted.
fn attempts(headers: &HeaderMap) -> u32 {
    headers
        .get(X_IOP_ATTEMPTS)
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.parse().ok())
        .unwrap_or(1)
}

#[cfg(test)]
mod tests;
