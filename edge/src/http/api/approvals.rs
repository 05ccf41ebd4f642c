//! Approvals: which there are, and a person's decision (D76 to D89).

use axum::Json as Reply;
use axum::response::Response;
use http::HeaderMap;
use iop_durable::ids::{RunId, WaitId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::after::{After, after};
use super::callers::{Operator, Reader};
use super::extract::{Hosted, Json, Search, Url};
use super::list::{Limit, List, Page, cursor, no_cursor, place};
use super::matching::{self, Said};
use crate::agents::journal::ApprovalDecision;
use crate::runs::people::Decide;
use crate::runs::people::list::Wanted;
use crate::runs::problem::Problem;
use crate::runs::view::{ApprovalObject, ApprovalStatus};

pub(super) fn router() -> OpenApiRouter {
    OpenApiRouter::new()
        .routes(routes!(all))
        .routes(routes!(of_run))
        .routes(routes!(decide))
}

/// Which approvals.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Find {
    status: Option<ApprovalStatus>,
    /// Of the runs of this agent.
    agent: Option<String>,
    /// Rows at most.
    #[serde(default)]
    #[param(value_type = Option<u32>, minimum = 1, maximum = 200, default = 100)]
    limit: Limit,
    /// `next_after` of the page before.
    after: Option<String>,
}

/// What is sent in place of a call's arguments: an object, or the text of one, which goes out as it is written.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[expect(
    dead_code,
    reason = "it is only described: what was sent is passed on as it is written"
)]
enum EditedArguments {
    #[schema(value_type = Object)]
    Object(Value),
    Text(String),
}

/// A decision. Who decided is the API key's name, never something in here.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct DecisionBody {
    decision: ApprovalDecision,
    /// The same id with the same content is answered the same again.
    decision_id: String,
    /// Of the call as it is shown: another call is not approved.
    arguments_digest: String,
    /// For the model, when the call is denied, and for the record.
    reason: Option<String>,
    /// With `edit`: what is sent instead.
    #[schema(value_type = Option<EditedArguments>)]
    edited_arguments: Option<Box<RawValue>>,
}

/// Approvals over all runs that the key may see, the oldest first. A page may be short of `limit` when there are more.
#[utoipa::path(get, path = "/approvals", tag = "people", operation_id = "list_approvals", params(Find), responses((status = 200, body = List<ApprovalObject>)))]
async fn all(
    Reader(caller): Reader,
    Hosted(runs): Hosted,
    Search(find): Search<Find>,
) -> Result<Reply<List<ApprovalObject>>, Problem> {
    let start = find.after.as_deref().map(place_of).transpose()?;
    let status = find.status;
    let wanted = Wanted {
        agent: find.agent.as_deref(),
        armed: status == Some(ApprovalStatus::Pending),
        fits: &|wait, now| status.is_none_or(|status| ApprovalStatus::of(wait, now) == status),
    };
    let (found, next) = runs.approvals(&caller, &wanted, start, find.limit.get()).await?;
    let mut rows = Vec::with_capacity(found.len());
    for found in found {
        rows.extend(
            runs.shown_approval(runs.engine(found.durable), &found.wait, &found.definition.name)
                .await?,
        );
    }
    let next = next.map(|(at, run, wait)| cursor(at, &[run.as_str(), wait.as_str()]));
    Ok(Reply(List::whole(rows).continued(next.is_some(), next)))
}

fn place_of(after: &str) -> Result<crate::runs::people::list::Place, Problem> {
    let (at, [run, wait]) = place::<2>(after)?;
    let run = RunId::new(&run).map_err(|_| no_cursor())?;
    let wait = WaitId::new(&wait).map_err(|_| no_cursor())?;
    Ok((at, run, wait))
}

/// The approvals of a run, in the order in which they were asked for.
#[utoipa::path(get, path = "/runs/{id}/approvals", tag = "people", operation_id = "list_run_approvals", params(("id" = String, Path), Page),
    responses((status = 200, body = List<ApprovalObject>)))]
async fn of_run(
    Reader(caller): Reader,
    Hosted(runs): Hosted,
    Url(run): Url<String>,
    Search(page): Search<Page>,
) -> Result<Reply<List<ApprovalObject>>, Problem> {
    let after = page.wait()?;
    let (rows, next) = runs
        .approvals_of(&caller, &run, after.as_ref(), page.limit.get())
        .await?;
    Ok(Reply(List::whole(rows).behind(next)))
}

/// Decides an approval. Role `operator`. The decision is stored before anything else happens.
#[utoipa::path(post, path = "/runs/{id}/approvals/{approval_id}", tag = "people", operation_id = "decide_approval",
    params(("id" = String, Path), ("approval_id" = String, Path), ("If-Match" = Option<String>, Header)),
    request_body = DecisionBody, responses((status = 200, body = After<ApprovalObject>)))]
async fn decide(
    Operator(caller): Operator,
    Hosted(runs): Hosted,
    Url((run, approval)): Url<(String, String)>,
    headers: HeaderMap,
    Json(body, _held): Json<DecisionBody>,
) -> Result<Response, Problem> {
    let decide = Decide::new(
        &body.decision_id,
        body.decision,
        body.arguments_digest,
        body.reason,
        body.edited_arguments.as_deref(),
    )?;
    let said = Said::Decision(&approval, &body.decision_id);
    matching::check(&runs, &caller, &run, &headers, said).await?;
    let decided = runs.decide(&caller, &run, &approval, &decide).await;
    let (object, told) = decided.map_err(|problem| problem.too_large_at("edited_arguments"))?;
    Ok(after(object, &told.token, told.replayed))
}
