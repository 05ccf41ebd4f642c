//! Calls of runs to the world outside: what is known of them, and how one that nobody knows of is settled (D137 to D160).

use axum::Json as Reply;
use axum::response::Response;
use http::HeaderMap;
use http::header::IF_MATCH;
use serde::Deserialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::after::{After, after};
use super::callers::{Operator, Reader};
use super::extract::{Hosted, Json, MaybeJson, Search, Url, evidence};
use super::list::{List, Page};
use super::matching::{self, Said};
use crate::runs::problem::Problem;
use crate::runs::steer::effects::{Resolve, ResolveAction};
use crate::runs::steer::resume::token;
use crate::runs::view::ActivityObject;

pub(super) fn router() -> OpenApiRouter {
    OpenApiRouter::new()
        .routes(routes!(of_run))
        .routes(routes!(one))
        .routes(routes!(reconcile))
        .routes(routes!(resolve))
}

/// An operator's decision about a call of unknown effect.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Resolution {
    action: ResolveAction,
    /// The same id with the same content is answered the same again.
    decision_id: String,
    /// Of the call as it is shown.
    input_digest: String,
    /// The number of its last attempt.
    attempt: u32,
    reason: String,
    /// What the decision rests on: a ticket, an entry of a log, as a text or as other JSON.
    #[serde(deserialize_with = "evidence")]
    #[schema(value_type = Value)]
    evidence: String,
    /// With `complete`: what the call gave. A text is told to the model as it is, everything else as JSON.
    #[schema(value_type = Option<Value>)]
    output: Option<Box<RawValue>>,
    /// Whether the run goes on at once; else it waits for its resume.
    #[serde(default)]
    resume: bool,
    /// When given, the run must not have moved on.
    resume_token: Option<String>,
}

/// A body without members.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Nothing {}

/// The calls of a run, in order. A page may have fewer than `limit` when what they sent and gave is long.
#[utoipa::path(get, path = "/runs/{id}/activities", tag = "outside", operation_id = "list_activities", params(("id" = String, Path), Page),
    responses((status = 200, body = List<ActivityObject>)))]
async fn of_run(
    Reader(caller): Reader,
    Hosted(runs): Hosted,
    Url(run): Url<String>,
    Search(page): Search<Page>,
) -> Result<Reply<List<ActivityObject>>, Problem> {
    let (rows, next) = runs
        .activities(&caller, &run, page.after.as_deref(), page.limit.get())
        .await?;
    Ok(Reply(List::whole(rows).continued(next.is_some(), next)))
}

/// One call of a run.
#[utoipa::path(get, path = "/runs/{id}/activities/{activity_id}", tag = "outside", operation_id = "get_activity",
    params(("id" = String, Path), ("activity_id" = String, Path)), responses((status = 200, body = ActivityObject)))]
async fn one(
    Reader(caller): Reader,
    Hosted(runs): Hosted,
    Url((run, activity)): Url<(String, String)>,
) -> Result<Reply<ActivityObject>, Problem> {
    let (object, _) = runs.activity(&caller, &run, &activity).await?;
    Ok(Reply(object))
}

/// Asks the callee whether a call of unknown effect was carried out, as its tool declares. Evidence lets the run go on; without any
/// the call stays unknown. Role `operator`.
#[utoipa::path(post, path = "/runs/{id}/activities/{activity_id}/reconcile", tag = "outside", operation_id = "reconcile_activity",
    params(("id" = String, Path), ("activity_id" = String, Path), ("If-Match" = Option<String>, Header)),
    request_body(content = Option<Nothing>), responses((status = 200, body = After<ActivityObject>)))]
async fn reconcile(
    Operator(caller): Operator,
    Hosted(runs): Hosted,
    Url((run, activity)): Url<(String, String)>,
    headers: HeaderMap,
    MaybeJson(Nothing {}, _held): MaybeJson<Nothing>,
) -> Result<Response, Problem> {
    matching::check(&runs, &caller, &run, &headers, Said::Nothing).await?;
    let replayed = runs.reconcile(&caller, &run, &activity).await?;
    let (object, token) = runs.activity(&caller, &run, &activity).await?;
    Ok(after(object, &token, replayed))
}

/// Settles a call of unknown effect by hand. Role `operator`.
#[utoipa::path(post, path = "/runs/{id}/activities/{activity_id}/resolve", tag = "outside", operation_id = "resolve_activity",
    params(("id" = String, Path), ("activity_id" = String, Path), ("If-Match" = Option<String>, Header)),
    request_body = Resolution, responses((status = 200, body = After<ActivityObject>)))]
async fn resolve(
    Operator(caller): Operator,
    Hosted(runs): Hosted,
    Url((run, activity)): Url<(String, String)>,
    headers: HeaderMap,
    Json(body, _held): Json<Resolution>,
) -> Result<Response, Problem> {
    let resolve = Resolve {
        action: body.action,
        decision_id: body.decision_id,
        input_digest: body.input_digest,
        attempt: body.attempt,
        reason: body.reason,
        evidence: body.evidence,
        output: body.output,
        resume: body.resume,
    };
    let given = |run: &_| token(run, body.resume_token.as_deref(), headers.get(IF_MATCH));
    let resolved = runs.resolve(&caller, &run, &activity, &resolve, given).await;
    let resolved = resolved.map_err(|problem| problem.too_large_at("output"))?;
    let (object, _) = runs.activity(&caller, &run, &activity).await?;
    Ok(after(object, &resolved.token, resolved.replayed))
}
