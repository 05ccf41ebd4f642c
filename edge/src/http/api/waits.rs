//! What runs wait for from the world outside, and how it reaches them (D161 to D177, D269).

use axum::Json as Reply;
use axum::response::{IntoResponse, Response};
use http::header::IF_MATCH;
use http::{HeaderMap, StatusCode};
use iop_durable::machine::wait::Verdict;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::callers::{Operator, Reader, Steerer};
use super::extract::{Hosted, Json, Search, Url, evidence};
use super::list::{List, Page};
use super::matching::{self, Said};
use super::shown;
use crate::http::auth::Caller;
use crate::runs::Runs;
use crate::runs::gates::Told;
use crate::runs::outside::{Deliver, GiveUp};
use crate::runs::problem::{Code, Problem};
use crate::runs::steer::resume::token;
use crate::runs::view::{DeliveryDecision, RunObject, WaitObject};

pub(super) fn router() -> OpenApiRouter {
    OpenApiRouter::new()
        .routes(routes!(of_run))
        .routes(routes!(deliver))
        .routes(routes!(cancel))
        .routes(routes!(event))
}

/// Something that happened outside.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Delivery {
    /// The same id with the same content is answered the same again.
    delivery_id: String,
    /// What it is about.
    correlation_id: String,
    #[schema(value_type = Value)]
    payload: Box<RawValue>,
}

/// What became of it: the first delivery that fits is `accepted`, and its run goes on.
#[derive(Debug, Serialize, ToSchema)]
struct Delivered {
    #[schema(value_type = DeliveryDecision)]
    decision: Verdict,
    /// Null for a key that may not see it.
    run: Option<RunObject>,
}

/// A wait that will not be answered.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct WaitCancellation {
    /// The same id with the same content is answered the same again.
    cancel_id: String,
    reason: String,
    /// What the decision rests on: a ticket, an entry of a log, as a text or as other JSON.
    #[serde(deserialize_with = "evidence")]
    #[schema(value_type = Value)]
    evidence: String,
    /// When given, the run must not have moved on.
    resume_token: Option<String>,
}

/// The waits of a run, whatever became of them, in order of their arming. Approvals have a list of their own.
#[utoipa::path(get, path = "/runs/{id}/waits", tag = "outside", operation_id = "list_waits", params(("id" = String, Path), Page),
    responses((status = 200, body = List<WaitObject>)))]
async fn of_run(
    Reader(caller): Reader,
    Hosted(runs): Hosted,
    Url(run): Url<String>,
    Search(page): Search<Page>,
) -> Result<Reply<List<WaitObject>>, Problem> {
    let after = page.wait()?;
    let (waits, next) = runs
        .waits(&caller, &run, after.as_ref(), page.limit.get())
        .await?;
    Ok(Reply(
        List::whole(waits.iter().map(WaitObject::of).collect()).behind(next),
    ))
}

/// Delivers to one wait. Role `operator`.
#[utoipa::path(post, path = "/runs/{id}/waits/{wait_id}/deliveries", tag = "outside", operation_id = "deliver_to_wait",
    params(("id" = String, Path), ("wait_id" = String, Path), ("If-Match" = Option<String>, Header)),
    request_body = Delivery, responses((status = 200, body = Delivered)))]
async fn deliver(
    Operator(caller): Operator,
    Hosted(runs): Hosted,
    Url((run, wait)): Url<(String, String)>,
    headers: HeaderMap,
    Json(body, _held): Json<Delivery>,
) -> Result<Response, Problem> {
    let delivery = Deliver::new(&body.delivery_id, &body.correlation_id, body.payload)?;
    let said = Said::Delivery(&wait, &body.delivery_id);
    matching::check(&runs, &caller, &run, &headers, said).await?;
    let told = runs.deliver(&caller, &run, &wait, &delivery).await;
    let told = told.map_err(|problem| problem.too_large_at("payload"))?;
    delivered(&runs, &caller, &told).await
}

/// Delivers to the one wait that is armed for this correlation id.
#[utoipa::path(post, path = "/events", tag = "outside", operation_id = "deliver_event", request_body = Delivery,
    responses((status = 200, body = Delivered)))]
async fn event(
    Steerer(caller): Steerer,
    Hosted(runs): Hosted,
    Json(body, _held): Json<Delivery>,
) -> Result<Response, Problem> {
    let delivery = Deliver::new(&body.delivery_id, &body.correlation_id, body.payload)?;
    let told = runs.event(&caller, &delivery).await;
    let told = told.map_err(|problem| problem.too_large_at("payload"))?;
    delivered(&runs, &caller, &told).await
}

async fn delivered(runs: &Runs, caller: &Caller, told: &Told) -> Result<Response, Problem> {
    let run = match run_of(runs, caller, told.wait.run.as_str()).await {
        Ok(run) => Some(run),
        Err(problem) if problem.code == Code::RunNotFound => None,
        Err(problem) => return Err(problem),
    };
    let tag = run.as_ref().and_then(|run| shown::etag(&run.revision));
    let answer = Delivered {
        decision: told.verdict,
        run,
    };
    let mut response = Reply(answer).into_response();
    response.headers_mut().extend(tag);
    Ok(shown::replayed(response, told.replayed))
}

/// Cancels a wait, and with it the run: it ends `cancelled`. Role `operator`.
#[utoipa::path(post, path = "/runs/{id}/waits/{wait_id}/cancel", tag = "outside", operation_id = "cancel_wait",
    params(("id" = String, Path), ("wait_id" = String, Path), ("If-Match" = Option<String>, Header)),
    request_body = WaitCancellation, responses((status = 200, body = RunObject)))]
async fn cancel(
    Operator(caller): Operator,
    Hosted(runs): Hosted,
    Url((run, wait)): Url<(String, String)>,
    headers: HeaderMap,
    Json(body, _held): Json<WaitCancellation>,
) -> Result<Response, Problem> {
    let give_up = GiveUp::new(&body.cancel_id, body.reason, body.evidence)?;
    let given = |run: &_| token(run, body.resume_token.as_deref(), headers.get(IF_MATCH));
    let resolved = runs.cancel_wait(&caller, &run, &wait, &give_up, given).await?;
    let answer = shown::answer(StatusCode::OK, run_of(&runs, &caller, &run).await?);
    Ok(shown::replayed(answer, resolved.replayed))
}

async fn run_of(runs: &Runs, caller: &Caller, run: &str) -> Result<RunObject, Problem> {
    shown::seen(runs, &runs.see(caller, run).await?).await
}
