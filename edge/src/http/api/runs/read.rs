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
use serde_json::value::{RawValue, to_raw_value};
use utoipa::{IntoParams, ToSchema};

use super::super::callers::Reader;
use super::super::extract::{Hosted, Search, Url};
use super::super::list::{Limit, List, Page, cursor, no_cursor, place};
use super::super::shown;
use super::begin::moment;
use crate::config::Role;
use crate::http::auth::Caller;
use crate::runs::catalog::AGENT;
use crate::runs::merged::{Merged, PAGE_BYTES, Rows};
use crate::runs::problem::{Code, Problem};
use crate::runs::view::{
    ChildObject, CorruptRun, OutcomeObject, RunObject, RunStatus, RunWaitingKind, waiting_on,
};
use crate::runs::{Engine, Seen};

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
    responses((status = 200, body = OutcomeObject))
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
    #[param(value_type = Option<RunStatus>)]
    status: Option<Status>,
    /// The name of an agent.
    agent: Option<String>,
    /// The name of a flow.
    flow: Option<String>,
    #[param(value_type = Option<String>)]
    parent_id: Option<RunId>,
    /// What a waiting run waits for first.
    #[param(value_type = Option<RunWaitingKind>)]
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

/// Runs, the oldest first. An `inference` key sees the runs it made. A page may have fewer than `limit` when its outcomes are long.
#[utoipa::path(
    get, path = "/runs", tag = "runs", operation_id = "list_runs",
    params(RunsQuery),
    responses((status = 200, body = List<ListedRun>))
)]
pub(super) async fn list(
    Reader(caller): Reader,
    Hosted(runs): Hosted,
    Search(query): Search<RunsQuery>,
) -> Result<Reply<List<Box<RawValue>>>, Problem> {
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
        ..RunFilter::default()
    };
    let after = query.after.as_deref().map(position).transpose()?;
    let mut found = Merged::new(&runs, Found(filter), after.as_ref());
    let mut page = Filling::new(query.limit);
    while let Some((engine, listed)) = found.next().await? {
        let here = Found::place(&listed);
        let run = match listed {
            Listed::Run { head, inbox } => {
                let object = shown::object(&runs, engine, &head, &inbox).await?;
                ListedRun::Run(Box::new(object))
            }
            Listed::Corrupt { run, .. } => ListedRun::Corrupt(CorruptRun::of(&run)),
        };
        if !page.takes(here, &run) {
            break;
        }
    }
    Ok(page.done())
}

/// The runs that a run started, the oldest first. A page may have fewer than `limit` when their outcomes are long.
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
) -> Result<Reply<List<Box<RawValue>>>, Problem> {
    let seen = runs.see(&caller, &id).await?;
    let filter = RunFilter {
        parent: Some(seen.loaded.head.id.clone()),
        owner: only_of(&caller),
        ..RunFilter::default()
    };
    let after = query.after.as_deref().map(position).transpose()?;
    let mut found = Merged::new(&runs, Found(filter), after.as_ref());
    let mut page = Filling::new(query.limit);
    while let Some((_, listed)) = found.next().await? {
        let child = match &listed {
            Listed::Run { head, .. } => ChildObject::of(head),
            Listed::Corrupt { run, .. } => {
                let why = "A child's records do not verify.";
                return Err(Problem::new(Code::RunCorrupt, why).of(run.as_str()));
            }
        };
        if !page.takes(Found::place(&listed), &child) {
            break;
        }
    }
    Ok(page.done())
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
    let run = RunId::new(&id).map_err(|_| no_cursor())?;
    Ok((at, run))
}

/// Runs as the filter says.
struct Found(RunFilter);

impl Rows for Found {
    type Row = Listed;
    type Place = (Timestamp, RunId);

    fn place(listed: &Listed) -> Self::Place {
        match listed {
            Listed::Run { head, .. } => (head.created_at, head.id.clone()),
            Listed::Corrupt { run, created_at, .. } => (*created_at, run.clone()),
        }
    }

    fn bytes(listed: &Listed) -> usize {
        match listed {
            Listed::Run { head, .. } => head.outcome.as_ref().map_or(0, |outcome| outcome.len()),
            Listed::Corrupt { .. } => 0,
        }
    }

    async fn read(
        &self,
        engine: &Engine,
        after: Option<Self::Place>,
        limit: u32,
    ) -> Result<Vec<Listed>, Problem> {
        let filter = RunFilter {
            after,
            limit,
            ..self.0.clone()
        };
        Ok(engine.store.list(filter).await?)
    }
}

/// A page of runs that is written as it grows: outcomes are long, and a page of them is bounded in bytes as well as in rows.
struct Filling {
    rows: Vec<Box<RawValue>>,
    limit: Limit,
    bytes: usize,
    /// The place of the last row, and whether there is one behind it.
    last: Option<(Timestamp, RunId)>,
    has_more: bool,
}

impl Filling {
    fn new(limit: Limit) -> Self {
        Self {
            rows: Vec::new(),
            limit,
            bytes: 0,
            last: None,
            has_more: false,
        }
    }

    /// Whether the page took this row and may take another one. It takes at least one.
    fn takes(&mut self, place: (Timestamp, RunId), row: &impl Serialize) -> bool {
        let row = to_raw_value(row).unwrap_or_else(|_| RawValue::NULL.to_owned());
        let bytes = self.bytes.saturating_add(row.get().len());
        let full = self.rows.len() >= self.limit.get() as usize || bytes > PAGE_BYTES;
        if full && !self.rows.is_empty() {
            self.has_more = true;
            return false;
        }
        (self.bytes, self.last) = (bytes, Some(place));
        self.rows.push(row);
        true
    }

    fn done(self) -> Reply<List<Box<RawValue>>> {
        let last = self.last.filter(|_| self.has_more);
        let next = last.map(|(at, run)| cursor(at, &[run.as_str()]));
        Reply(List::whole(self.rows).continued(self.has_more, next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(limit: u32, sizes: &[usize]) -> (usize, bool, Option<String>) {
        let limit = serde_json::from_value(limit.into()).unwrap();
        let mut page = Filling::new(limit);
        for (n, size) in sizes.iter().enumerate() {
            let run = RunId::new(&format!("r{n}")).unwrap();
            if !page.takes((Timestamp::MIN, run), &"x".repeat(*size)) {
                break;
            }
        }
        let Reply(list) = page.done();
        assert_eq!(list.has_more, list.next_after.is_some());
        let last = list
            .next_after
            .map(|next| position(&next).unwrap().1.as_str().to_owned());
        (list.data.len(), list.has_more, last)
    }

    #[test]
    fn a_page_is_bounded_in_rows_and_in_bytes_and_is_never_empty_before_the_end() {
        let big = PAGE_BYTES + 1;
        for (limit, sizes, is) in [
            (2, &[][..], (0, false, None)),
            (2, &[1, 1], (2, false, None)),
            (2, &[1, 1, 1], (2, true, Some("r1"))),
            (200, &[big], (1, false, None)),
            (200, &[big, big], (1, true, Some("r0"))),
            (200, &[1, big, 1], (1, true, Some("r0"))),
            (
                200,
                &[PAGE_BYTES / 2, PAGE_BYTES / 2 - 4, 1],
                (2, true, Some("r1")),
            ),
        ] {
            let (rows, more, last) = is;
            assert_eq!(
                filled(limit, sizes),
                (rows, more, last.map(str::to_owned)),
                "{limit} {sizes:?}"
            );
        }
    }
}
