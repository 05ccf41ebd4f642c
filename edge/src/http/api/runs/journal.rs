//! What a run did so far: its steps, its turns, its committed revisions.

use std::collections::HashMap;

use axum::Json as Reply;
use iop_durable::ids::{ActivityId, Key, NodeName, Revision, RunId};
use iop_durable::patterns::REASON;
use iop_durable::record::RunHead;
use iop_durable::store::{Listed, RunFilter, StoreError};
use serde::Deserialize;
use utoipa::IntoParams;

use super::super::callers::Reader;
use super::super::extract::{Hosted, Search, Url};
use super::super::list::{List, Page, no_cursor};
use crate::agents::journal::{MODEL, turn_of};
use crate::runs::merged::PAGE_BYTES;
use crate::runs::problem::{Code, Problem};
use crate::runs::view::{
    CheckpointObject, HistoryObject, StepKind, StepObject, TurnObject, current_step, digest,
};
use crate::runs::{Engine, Seen};

/// Children of a run that its steps name.
const CHILDREN: u32 = 1000;

/// A cursor that is a number.
fn number(page: &Page) -> Result<u64, Problem> {
    page.after
        .as_deref()
        .map_or(Ok(0), |after| after.parse().map_err(|_| no_cursor()))
}

/// The steps of a run, the present one last.
#[utoipa::path(
    get, path = "/runs/{id}/steps", tag = "runs", operation_id = "list_steps",
    params(("id" = String, Path), Page),
    responses((status = 200, body = List<StepObject>))
)]
pub(super) async fn steps(
    Reader(caller): Reader,
    Hosted(runs): Hosted,
    Url(id): Url<String>,
    Search(page): Search<Page>,
) -> Result<Reply<List<StepObject>>, Problem> {
    let after = number(&page)?;
    let Seen { engine, loaded } = runs.see(&caller, &id).await?;
    let head = &loaded.head;
    let stored = engine.store.steps(&head.id, after, page.limit.and_one()).await?;
    let mut steps: Vec<StepObject> = stored.iter().map(StepObject::of).collect();
    let all = steps.len() < page.limit.and_one() as usize;
    if all
        && head.activation > after
        && let Some(present) = present_step(engine, head).await?
    {
        // A step that is done again is in the store as well, as it ended the last time.
        steps.retain(|step| step.activation != present.activation);
        steps.push(present);
    }
    name_children(engine, &head.id, &mut steps).await?;
    Ok(Reply(List::of(steps, page.limit, |last| {
        last.activation.to_string()
    })))
}

/// The step that a run is at; `None` when it is over.
async fn present_step(engine: &Engine, head: &RunHead) -> Result<Option<StepObject>, StoreError> {
    if head.status.is_terminal() {
        return Ok(None);
    }
    let journal = engine.store.journal(&head.id, head.activation).await?;
    Ok(current_step(head, &journal.activities))
}

/// Writes the child of each step that started one (D11).
async fn name_children(engine: &Engine, run: &RunId, steps: &mut [StepObject]) -> Result<(), StoreError> {
    if steps.iter().all(|step| step.kind != StepKind::ToolCall) {
        return Ok(());
    }
    let filter = RunFilter {
        parent: Some(run.clone()),
        limit: CHILDREN,
        ..RunFilter::default()
    };
    let mut children: HashMap<String, Vec<String>> = HashMap::new();
    for listed in engine.store.list(filter).await? {
        if let Listed::Run { head, .. } = listed
            && let Some(origin) = head.lineage.origin
        {
            children
                .entry(origin)
                .or_default()
                .push(head.id.as_str().to_owned());
        }
    }
    for step in steps.iter_mut().filter(|step| step.kind == StepKind::ToolCall) {
        if let Some([child]) = children.get(&step.name).map(Vec::as_slice) {
            step.child_run_id = Some(child.clone());
        }
    }
    Ok(())
}

/// The model turns of a run: what was asked, by digest, and what was answered.
///
/// A page may have fewer than `limit` when its answers are long.
#[utoipa::path(
    get, path = "/runs/{id}/turns", tag = "runs", operation_id = "list_turns",
    params(("id" = String, Path), Page),
    responses((status = 200, body = List<TurnObject>))
)]
pub(super) async fn turns(
    Reader(caller): Reader,
    Hosted(runs): Hosted,
    Url(id): Url<String>,
    Search(page): Search<Page>,
) -> Result<Reply<List<TurnObject>>, Problem> {
    let after = number(&page)?;
    let Seen { engine, loaded } = runs.see(&caller, &id).await?;
    let head = &loaded.head;
    let internal = |_| Problem::new(Code::InternalError, "The turns of this run cannot be addressed.");
    let node = NodeName::new(REASON).map_err(internal)?;
    let key = Key::new(MODEL).map_err(internal)?;
    let last = turn_of(head.activation);
    let (mut turns, mut bytes) = (Vec::new(), 0);
    let mut n = after;
    while n < last && turns.len() < page.limit.get() as usize && bytes < PAGE_BYTES {
        n += 1;
        let id = ActivityId::derive(&head.id, &node, 2 * n - 1, &key);
        if let Some(record) = engine.store.activity(&head.id, &id).await? {
            bytes += record.output.as_ref().map_or(0, |output| output.bytes().len());
            turns.push(TurnObject::of(&record));
        }
    }
    let has_more = n < last;
    let next_after = has_more.then(|| n.to_string());
    Ok(Reply(List::whole(turns).continued(has_more, next_after)))
}

/// The committed revisions of a run, from the first.
#[utoipa::path(
    get, path = "/runs/{id}/history", tag = "runs", operation_id = "list_history",
    params(("id" = String, Path), Page),
    responses((status = 200, body = List<HistoryObject>))
)]
pub(super) async fn history(
    Reader(caller): Reader,
    Hosted(runs): Hosted,
    Url(id): Url<String>,
    Search(page): Search<Page>,
) -> Result<Reply<List<HistoryObject>>, Problem> {
    let after = match page.after.as_deref() {
        Some(after) => revision("after", after)?.get(),
        None => 0,
    };
    let Seen { engine, loaded } = runs.see(&caller, &id).await?;
    // Revisions have no gaps: the page behind `after` is the newest one before its end.
    let wanted = page.limit.and_one();
    let end = Revision::new(after.saturating_add(u64::from(wanted)).saturating_add(1)).ok();
    let mut found = engine.store.history(&loaded.head.id, end, wanted).await?;
    found.retain(|checkpoint| checkpoint.revision.get() > after);
    found.reverse();
    let list = List::of(found, page.limit, |last| last.revision.to_string());
    Ok(Reply(list.map(|checkpoint| HistoryObject::of(&checkpoint))))
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct DigestQuery {
    /// Of the revision, as the history has it: `sha256:…`.
    digest: String,
}

/// One revision, exactly, with its state.
#[utoipa::path(
    get, path = "/runs/{id}/history/{revision}", tag = "runs", operation_id = "get_revision",
    params(("id" = String, Path), ("revision" = String, Path), DigestQuery),
    responses((status = 200, body = CheckpointObject))
)]
pub(super) async fn checkpoint(
    Reader(caller): Reader,
    Hosted(runs): Hosted,
    Url((id, number)): Url<(String, String)>,
    Search(query): Search<DigestQuery>,
) -> Result<Reply<CheckpointObject>, Problem> {
    let revision = revision("revision", &number)?;
    let Seen { engine, loaded } = runs.see(&caller, &id).await?;
    let of = |problem: Problem| problem.of(&id);
    let found = engine.store.checkpoint(&loaded.head.id, revision).await;
    let found = found.map_err(|e| of(e.into()))?;
    if digest(&found.digest) != query.digest {
        let why = "This revision has another digest.";
        return Err(of(Problem::new(Code::DigestMismatch, why).at("digest")));
    }
    CheckpointObject::of(&found).map(Reply).ok_or_else(|| {
        let why = "The state of this revision is not kept any more.";
        of(Problem::new(Code::CheckpointUnavailable, why))
    })
}

fn revision(field: &'static str, text: &str) -> Result<Revision, Problem> {
    text.parse()
        .map_err(|e: iop_durable::ids::InvalidRevision| Problem::invalid(field, format!("{field}: {e}.")))
}
