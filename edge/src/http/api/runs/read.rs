//! Runs as they stand: one, its result, many, and those that one started.

use axum::Json as Reply;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header;
use iop_durable::ids::RunId;
use iop_durable::record::{Status, WaitingKind};
use iop_durable::store::{Listed, RunFilter};
use iop_durable::time::Timestamp;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::super::callers::Reader;
use super::super::extract::{Hosted, Search, Url};
use super::super::list::{Limit, List, Page, cursor, place};
use super::super::shown;
use super::begin::moment;
use crate::config::Role;
use crate::http::auth::Caller;
use crate::runs::catalog::AGENT;
use crate::runs::problem::{Code, Problem};
use crate::runs::view::{ChildObject, CorruptRun, RunObject, waiting_on};
use crate::runs::{Engine, Runs, Seen};

/// One run.
#[utoipa::path(
    get, path = "/runs/{id}", tag = "runs", operation_id = "get_run",
    params(("id" = String, Path)),
    responses((status = 200, body = RunObject, headers(("ETag" = String, description = "Its revision."))))
)]
pub(super) async fn one(
    Reader(caller): Reader,
    Hosted(runs): Hosted,
    Url(id): Url<String>,
) -> Result<Response, Problem> {
    let seen = runs.see(&caller, &id).await?;
    Ok(shown::answer(StatusCode::OK, shown::seen(&runs, &seen).await?))
}

/// How a run ended.
///
/// The bytes of `outcome`. A run that has not ended answers what it waits for.
#[utoipa::path(
    get, path = "/runs/{id}/result", tag = "runs", operation_id = "get_result",
    params(("id" = String, Path)),
    responses((status = 200, body = Object))
)]
pub(super) async fn result(
    Reader(caller): Reader,
    Hosted(runs): Hosted,
    Url(id): Url<String>,
) -> Result<Response, Problem> {
    let seen = runs.see(&caller, &id).await?;
    let head = &seen.loaded.head;
    if let Some(outcome) = head.outcome.clone().filter(|_| head.status.is_terminal()) {
        let json = [(header::CONTENT_TYPE, "application/json")];
        let mut response = (json, outcome).into_response();
        response
            .headers_mut()
            .extend(shown::etag(&head.revision.to_string()));
        return Ok(response);
    }
    Err(unfinished(&seen).await?)
}

/// Why there is no result.
async fn unfinished(seen: &Seen<'_>) -> Result<Problem, Problem> {
    let head = &seen.loaded.head;
    let problem = match head.status {
        Status::Waiting => Problem::new(Code::RunWaiting, "The run waits; it has no result."),
        Status::Ambiguous => Problem::new(
            Code::EffectAmbiguous,
            "An effect may or may not have happened; the run has no result.",
        ),
        Status::Queued
        | Status::Running
        | Status::Succeeded
        | Status::Failed
        | Status::Cancelled
        | Status::Exhausted
        | Status::Transferred => Problem::new(Code::RunBusy, "The run is not over; it has no result."),
    };
    let open = shown::open(seen.engine, head).await?;
    let on = serde_json::to_value(waiting_on(head, &open)).unwrap_or_default();
    let mut problem = problem.of(head.id.as_str()).with("waiting_on", on);
    problem.current_resume_token = Some(head.token().to_string());
    Ok(problem)
}

/// Which runs.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct RunsQuery {
    #[param(value_type = Option<String>)]
    status: Option<Status>,
    /// The name of an agent.
    agent: Option<String>,
    /// The name of a flow.
    flow: Option<String>,
    #[param(value_type = Option<String>)]
    parent_id: Option<RunId>,
    /// What a waiting run waits for first.
    #[param(value_type = Option<String>)]
    waiting_kind: Option<WaitingKind>,
    /// Runs that go on by themselves before this time, in RFC 3339.
    #[param(value_type = Option<String>)]
    due_before: Option<Moment>,
    #[serde(default)]
    #[param(value_type = Option<u32>, minimum = 1, maximum = 200, default = 100)]
    limit: Limit,
    /// `next_after` of the page before.
    after: Option<String>,
}

struct Moment(Timestamp);

impl<'de> Deserialize<'de> for Moment {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        moment(&text)
            .map(Self)
            .ok_or_else(|| D::Error::custom("must be a time such as 2030-01-31T12:00:00Z"))
    }
}

/// A run of a list; of one whose records do not verify there is only the name.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum ListedRun {
    Run(Box<RunObject>),
    Corrupt(CorruptRun),
}

/// Runs, the oldest first. An `inference` key sees the runs it made.
#[utoipa::path(
    get, path = "/runs", tag = "runs", operation_id = "list_runs",
    params(RunsQuery),
    responses((status = 200, body = List<ListedRun>))
)]
pub(super) async fn list(
    Reader(caller): Reader,
    Hosted(runs): Hosted,
    Search(query): Search<RunsQuery>,
) -> Result<Reply<List<ListedRun>>, Problem> {
    let definition = match (query.agent, query.flow) {
        (Some(_), Some(_)) => {
            return Err(Problem::invalid(
                "flow",
                "A run is of an agent or of a flow, not of both.",
            ));
        }
        (Some(agent), None) => Some((AGENT.to_owned(), agent)),
        (None, flow) => flow.map(|flow| ("flow".to_owned(), flow)),
    };
    let filter = RunFilter {
        status: query.status,
        definition,
        parent: query.parent_id,
        owner: only_of(&caller),
        waiting_kind: query.waiting_kind,
        due_before: query.due_before.map(|moment| moment.0),
        after: query.after.as_deref().map(position).transpose()?,
        limit: query.limit.and_one(),
    };
    let page = page(&runs, filter, query.limit).await?;
    let mut shown_runs = Vec::with_capacity(page.data.len());
    for (engine, listed) in page.data {
        shown_runs.push(match listed {
            Listed::Run { head, inbox } => {
                let object = shown::object(&runs, engine, &head, &inbox).await?;
                ListedRun::Run(Box::new(object))
            }
            Listed::Corrupt { run, .. } => ListedRun::Corrupt(CorruptRun::of(&run)),
        });
    }
    Ok(Reply(
        List::whole(shown_runs).continued(page.has_more, page.next_after),
    ))
}

/// The runs that a run started, the oldest first.
#[utoipa::path(
    get, path = "/runs/{id}/children", tag = "runs", operation_id = "list_children",
    params(("id" = String, Path), Page),
    responses((status = 200, body = List<ChildObject>))
)]
pub(super) async fn children(
    Reader(caller): Reader,
    Hosted(runs): Hosted,
    Url(id): Url<String>,
    Search(query): Search<Page>,
) -> Result<Reply<List<ChildObject>>, Problem> {
    let seen = runs.see(&caller, &id).await?;
    let filter = RunFilter {
        parent: Some(seen.loaded.head.id.clone()),
        owner: only_of(&caller),
        after: query.after.as_deref().map(position).transpose()?,
        limit: query.limit.and_one(),
        ..RunFilter::default()
    };
    let page = page(&runs, filter, query.limit).await?;
    let mut children = Vec::with_capacity(page.data.len());
    for (_, listed) in &page.data {
        match listed {
            Listed::Run { head, .. } => children.push(ChildObject::of(head)),
            Listed::Corrupt { run, .. } => {
                let why = "A child's records do not verify.";
                return Err(Problem::new(Code::RunCorrupt, why).of(run.as_str()));
            }
        }
    }
    Ok(Reply(
        List::whole(children).continued(page.has_more, page.next_after),
    ))
}

/// Whose runs a caller sees; `None`: everybody's.
fn only_of(caller: &Caller) -> Option<String> {
    if caller.has(Role::Operator) || caller.has(Role::Admin) {
        return None;
    }
    caller.name().map(|name| name.to_string())
}

fn position(after: &str) -> Result<(Timestamp, RunId), Problem> {
    let (at, [id]) = place::<1>(after)?;
    let run = RunId::new(&id)
        .map_err(|_| Problem::invalid("after", "after must be the next_after of the page before."))?;
    Ok((at, run))
}

/// A page of both engines' runs as one list.
async fn page(runs: &Runs, filter: RunFilter, limit: Limit) -> Result<List<(&Engine, Listed)>, Problem> {
    let mut found: Vec<(&Engine, Listed)> = Vec::new();
    for engine in runs.engines() {
        let listed = engine.store.list(filter.clone()).await?;
        found.extend(listed.into_iter().map(|listed| (engine, listed)));
    }
    found.sort_by(|(_, a), (_, b)| order(a).cmp(&order(b)));
    Ok(List::of(found, limit, |(_, last)| {
        let (at, run) = order(last);
        cursor(at, &[run.as_str()])
    }))
}

fn order(listed: &Listed) -> (Timestamp, &RunId) {
    match listed {
        Listed::Run { head, .. } => (head.created_at, &head.id),
        Listed::Corrupt { run, created_at, .. } => (*created_at, run),
    }
}
