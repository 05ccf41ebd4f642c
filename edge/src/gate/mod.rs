//! The StreamGate: one per request, the sole owner of its liveness and of what the client gets (gateway.md §7).
//!
//! Nothing reaches the client before the first content (G52); what happened until then stays inside. After it there is
//! no second attempt: the stream ends as the provider ended it, or with one typed error (G56). Knows no sockets.

mod asked;
mod attempt;
mod body;
mod closing;
mod cycle;
mod exchange;
mod failure;
mod guard;
mod head;
mod normalized;
mod recovery;
mod relay;
mod source;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{Response, StatusCode};
use iop_shared::execution::AttemptFence;
use tokio::time::Instant;

pub(crate) use asked::{Asked, Origin, Payload};
pub use body::{Aborted, GateBody};
pub(crate) use exchange::Exchange;
pub(crate) use failure::{in_band_status, retry_after};
pub(crate) use guard::RequestGuard;
pub(crate) use head::{X_IOP_ATTEMPTS, is_json};

use crate::error::{ErrorKind, X_SHOULD_RETRY};
use body::Pace;
use exchange::{Answer, Ended, outcome_of_status};
use failure::is_retryable;

/// Among the extensions of an answer that the gate made itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Verdict {
    pub(crate) kind: ErrorKind,
    /// The status of a provider's answer that could not be used.
    pub(crate) answered: Option<StatusCode>,
    /// Of a stall: whether the provider has surely stopped.
    pub(crate) fence: AttemptFence,
}

/// Runs a request to its answer; dropping the future cancels everything.
pub(crate) async fn serve(exchange: Exchange) -> Response<GateBody> {
    let gate = &exchange.app.settings.gate;
    let company = exchange.is_at_a_socket();
    let interval = gate.keepalive_interval.filter(|_| company);
    let Some(open_after) = gate
        .keepalive_open_after
        .filter(|_| company && exchange.is_stream())
    else {
        return answer(exchange.run().await, interval);
    };
    let attempts = exchange.attempts();
    let model = exchange.model();
    let mut running = Box::pin(exchange.run());
    tokio::select! {
        biased;
        ended = &mut running => answer(ended, interval),
        () = tokio::time::sleep(open_after) => {
            let mut response = Response::new(GateBody::opened(running, model, Pace::new(interval, Instant::now())));
            let headers = response.headers_mut();
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
            headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
            headers.insert(X_IOP_ATTEMPTS, HeaderValue::from(attempts.get()));
            response
        }
    }
}

fn answer(ended: Ended, interval: Option<std::time::Duration>) -> Response<GateBody> {
    let Ended {
        answer,
        guard,
        attempts,
        dialect,
        why,
    } = ended;
    match answer {
        Answer::Stream { head, relay, attempt } => {
            let pace = Pace::new(interval, Instant::now());
            head.into_response(attempts, GateBody::live(relay, attempt, guard, dialect, pace))
        }
        Answer::Whole { head, body } => {
            let outcome = outcome_of_status(head.status);
            head.into_response(attempts, GateBody::full(body, guard, outcome))
        }
        Answer::FailedStream { head, events, status } => {
            head.into_response(attempts, GateBody::full(events, guard, outcome_of_status(status)))
        }
        Answer::Long {
            head,
            prefix,
            attempt,
        } => {
            let (status, length) = (head.status, head.provider_length);
            head.into_response(attempts, GateBody::long(prefix, attempt, guard, status, length))
        }
        Answer::InBand { status, object } => {
            let mut body = Vec::with_capacity(object.len() + 12);
            body.extend_from_slice(b"{\"error\":");
            body.extend_from_slice(&object);
            body.push(b'}');
            let mut response = Response::new(GateBody::full(
                Bytes::from(body),
                guard,
                outcome_of_status(status),
            ));
            *response.status_mut() = status;
            if is_retryable(status) {
                response
                    .headers_mut()
                    .insert(X_SHOULD_RETRY, HeaderValue::from_static("false"));
            }
            response
                .headers_mut()
                .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
            response
                .headers_mut()
                .insert(X_IOP_ATTEMPTS, HeaderValue::from(attempts));
            response
        }
        Answer::Own(error) => {
            let kind = error.kind;
            let mut response = error
                .into_response::<Bytes>()
                .map(|body| GateBody::full(body, guard, kind.outcome()));
            response.extensions_mut().insert(Verdict {
                kind,
                answered: why.answered,
                fence: why.fence,
            });
            response
                .headers_mut()
                .insert(X_IOP_ATTEMPTS, HeaderValue::from(attempts));
            response
        }
    }
}
