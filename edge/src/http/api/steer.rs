//! Steering runs: resume, what a resume would meet, cancel, delete (D91 to D97, D134).

use std::collections::BTreeMap;

use axum::Json as Reply;
use axum::response::Response;
use http::header::IF_MATCH;
use http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::callers::{Admin, Steerer};
use super::extract::{Edge, Hosted, Json, MaybeJson, Url};
use super::matching::{self, Said};
use super::runs::check_metadata;
use super::shown;
use super::sse::{self, OnDisconnect, Streamed};
use crate::runs::problem::Problem;
use crate::runs::steer::resume::{Ask, Decision, Meets};
use crate::runs::steer::{Cancel, Preflight, is_settled};
use crate::runs::view::{RunObject, WaitingOnObject, waiting_on};

pub(super) fn router() -> OpenApiRouter {
    OpenApiRouter::new()
        .routes(routes!(resume))
        .routes(routes!(evaluate))
        .routes(routes!(cancel))
        .routes(routes!(delete))
}

/// On from a pause or a failure.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Resumption {
    /// Of the run's last answer; else its ETag as `If-Match`.
    resume_token: Option<String>,
    /// Not for agents.
    #[schema(value_type = Option<Object>)]
    state_overlay: Option<Value>,
    /// For agents only `{"current":true}`.
    #[schema(value_type = Option<Object>)]
    resume_target: Option<Value>,
    /// Merged over the run's.
    metadata: Option<BTreeMap<String, String>>,
    /// With `Accept: text/event-stream`: what becomes of the run when its stream is left.
    on_disconnect: Option<OnDisconnect>,
}

/// What a resume would meet. Nothing is changed by asking.
#[derive(Debug, Serialize, ToSchema)]
struct Evaluation {
    decision: Meets,
    /// The one to use.
    current_resume_token: String,
    /// Of the run, a decimal number.
    revision: String,
    /// What it waits for, or which effects are not known.
    waiting_on: Vec<WaitingOnObject>,
    /// Why a resume would be refused; null when it would not be.
    message: Option<String>,
}

/// A request for an end.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct RunCancellation {
    reason: String,
    /// The same id with the same reason is answered the same again.
    cancel_id: String,
}

/// Lets a run go on: it is queued when this is answered. A run that has succeeded is answered with its stored outcome. With
/// `Accept: text/event-stream` the run is followed from here.
#[utoipa::path(post, path = "/runs/{id}/resume", tag = "runs", operation_id = "resume_run",
    params(("id" = String, Path), ("If-Match" = Option<String>, Header)),
    request_body(content = Option<Resumption>),
    responses((status = 202, body = RunObject), (status = 200, description = "The stored outcome, or a stream.",
        content((RunObject = "application/json"), (Streamed = "text/event-stream")))))]
async fn resume(
    Steerer(caller): Steerer,
    Edge(app): Edge,
    Hosted(runs): Hosted,
    Url(run): Url<String>,
    headers: HeaderMap,
    MaybeJson(body, _held): MaybeJson<Resumption>,
) -> Result<Response, Problem> {
    let streams = sse::wanted(&headers);
    let on_disconnect = sse::on_disconnect(body.on_disconnect, streams)?;
    let ask = asked(body, &headers)?;
    let preflight = runs.preflight(&caller, &run, &ask).await?;
    let before = preflight.seen.loaded.head.event_seq;
    let over = match runs.resume(&preflight, &ask.metadata).await {
        Ok(over) => over,
        Err(problem) => return Err(with_waits(problem, &preflight).await?),
    };
    let seen = runs.see(&caller, &run).await?;
    if streams {
        // What a worker has told since belongs to the answer.
        let from = if over {
            sse::From::Now
        } else {
            sse::From::After(before)
        };
        return sse::stream(&app, &runs, &caller, &seen, from, on_disconnect).await;
    }
    let status = if over {
        StatusCode::OK
    } else {
        StatusCode::ACCEPTED
    };
    Ok(shown::answer(status, shown::seen(&runs, &seen).await?))
}

/// What a resume with this body would meet, and the token to use. Changes nothing.
#[utoipa::path(post, path = "/runs/{id}/resume/evaluate", tag = "runs", operation_id = "evaluate_resume",
    params(("id" = String, Path), ("If-Match" = Option<String>, Header)),
    request_body(content = Option<Resumption>), responses((status = 200, body = Evaluation)))]
async fn evaluate(
    Steerer(caller): Steerer,
    Hosted(runs): Hosted,
    Url(run): Url<String>,
    headers: HeaderMap,
    MaybeJson(body, _held): MaybeJson<Resumption>,
) -> Result<Reply<Evaluation>, Problem> {
    let preflight = runs.preflight(&caller, &run, &asked(body, &headers)?).await?;
    Ok(Reply(Evaluation {
        decision: preflight.decision.word(),
        current_resume_token: preflight.current.to_string(),
        revision: preflight.current.revision.to_string(),
        waiting_on: waits(&preflight).await?,
        message: preflight.refusal().map(|problem| problem.message.into_owned()),
    }))
}

fn asked(body: Resumption, headers: &HeaderMap) -> Result<Ask, Problem> {
    let metadata = body.metadata.unwrap_or_default();
    check_metadata(&metadata)?;
    Ok(Ask {
        resume_token: body.resume_token,
        if_match: headers.get(IF_MATCH).cloned(),
        state_overlay: body.state_overlay,
        resume_target: body.resume_target,
        metadata,
    })
}

/// What the run of a decision waits for.
async fn waits(preflight: &Preflight<'_>) -> Result<Vec<WaitingOnObject>, Problem> {
    match preflight.decision {
        Decision::Waiting(_) | Decision::Ambiguous(_) => {}
        Decision::Ready
        | Decision::Stale
        | Decision::Busy
        | Decision::Terminal(_)
        | Decision::DefinitionChanged(_)
        | Decision::DefinitionMissing => return Ok(Vec::new()),
    }
    let head = &preflight.seen.loaded.head;
    let open = shown::open(preflight.seen.engine, head).await?;
    Ok(waiting_on(head, &open))
}

/// A refusal with what the run waits for, when it is that (D21).
async fn with_waits(problem: Problem, preflight: &Preflight<'_>) -> Result<Problem, Problem> {
    let on = waits(preflight).await?;
    if on.is_empty() {
        return Ok(problem);
    }
    let on = serde_json::to_value(on).unwrap_or_default();
    Ok(problem.with("waiting_on", on))
}

/// Asks for the end of a run; it is stored when this is answered. 200 when the run is over by then.
#[utoipa::path(post, path = "/runs/{id}/cancel", tag = "runs", operation_id = "cancel_run",
    params(("id" = String, Path), ("If-Match" = Option<String>, Header)),
    request_body = RunCancellation,
    responses((status = 202, body = RunObject), (status = 200, description = "It is over.", body = RunObject)))]
async fn cancel(
    Steerer(caller): Steerer,
    Hosted(runs): Hosted,
    Url(run): Url<String>,
    headers: HeaderMap,
    Json(body, _held): Json<RunCancellation>,
) -> Result<Response, Problem> {
    let cancel = Cancel::new(&body.cancel_id, body.reason)?;
    let said = Said::Cancel(&body.cancel_id);
    matching::check(&runs, &caller, &run, &headers, said).await?;
    let cancelled = runs.cancel(&caller, &run, &cancel).await?;
    let object = shown::seen(&runs, &runs.see(&caller, &run).await?).await?;
    let over = is_settled(cancelled) || object.status.is_terminal();
    let status = if over {
        StatusCode::OK
    } else {
        StatusCode::ACCEPTED
    };
    Ok(shown::replayed(shown::answer(status, object), cancelled.replayed))
}

/// Removes a run that is over and that nobody works on. Its id stays taken. Role `admin`.
#[utoipa::path(delete, path = "/runs/{id}", tag = "runs", operation_id = "delete_run",
    params(("id" = String, Path), ("If-Match" = Option<String>, Header)), responses((status = 204)))]
async fn delete(
    Admin(caller): Admin,
    Hosted(runs): Hosted,
    Url(run): Url<String>,
    headers: HeaderMap,
) -> Result<StatusCode, Problem> {
    matching::check(&runs, &caller, &run, &headers, Said::Nothing).await?;
    runs.delete(&caller, &run).await?;
    Ok(StatusCode::NO_CONTENT)
}
