//! Run objects with everything that they show, read from where it stands.

use std::collections::HashSet;
use std::sync::Arc;

use axum::Json as Reply;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::{self, HeaderName, HeaderValue};
use iop_durable::ids::{ActivityId, RunId};
use iop_durable::record::{EventRecord, Inbox, RunHead, WaitingKind};
use iop_durable::store::Store;

use crate::runs::calls::Tools;
use crate::runs::problem::Problem;
use crate::runs::view::{Blocked, Mentioned, Open, RunObject, mentioned};
use crate::runs::{Engine, Runs, Seen};

pub(super) const IDEMPOTENCY_REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");

/// What of a run's journal its object shows.
///
/// # Errors
/// The store's.
pub(super) async fn open(engine: &Engine, head: &RunHead) -> Result<Open, Problem> {
    let mut open = Open::default();
    if head.status.is_terminal() {
        return Ok(open);
    }
    if head.armed_waits > 0 {
        open.waits = engine.store.waits(&head.id).await?;
    }
    let mut tools = Tools::new(&engine.store);
    for on in head.waiting.iter().flat_map(|waiting| &waiting.on) {
        if !matches!(on.kind, WaitingKind::Reconciliation | WaitingKind::Retry) {
            continue;
        }
        // A retry of a step names no activity.
        let Ok(id) = ActivityId::new(&on.id) else { continue };
        if let Some(record) = engine.store.activity(&head.id, &id).await? {
            let tool = tools.of(&record).await?;
            open.activities.push((record, tool));
        }
    }
    Ok(open)
}

/// What of a run's journal these events mention.
///
/// # Errors
/// The store's.
pub(super) async fn mentions(
    store: &Arc<dyn Store>,
    run: &RunId,
    events: &[EventRecord],
) -> Result<Open, Problem> {
    let mut open = Open::default();
    let mut tools = Tools::new(store);
    let mut found = HashSet::new();
    for mentioned in events.iter().flat_map(mentioned) {
        match &mentioned {
            Mentioned::Wait(id) if found.insert(id.as_str().to_owned()) => {
                open.waits.extend(store.wait(run, id).await?);
            }
            Mentioned::Activity(id) if found.insert(id.as_str().to_owned()) => {
                if let Some(record) = store.activity(run, id).await? {
                    let called = tools.of(&record).await?;
                    open.activities.push((record, called));
                }
            }
            Mentioned::Wait(_) | Mentioned::Activity(_) => {}
        }
    }
    Ok(open)
}

/// The object of a run.
///
/// # Errors
/// The store's.
pub(super) async fn object(
    runs: &Runs,
    engine: &Engine,
    head: &RunHead,
    inbox: &Inbox,
) -> Result<RunObject, Problem> {
    let open = open(engine, head).await?;
    let missing = !head.status.is_terminal() && !runs.catalog().has(&head.definition.name);
    let blocked = missing.then_some(Blocked::DefinitionMissing);
    Ok(RunObject::of(head, inbox, &open, engine.durable, blocked))
}

/// The object of a run that somebody may see.
///
/// # Errors
/// The store's.
pub(super) async fn seen(runs: &Runs, seen: &Seen<'_>) -> Result<RunObject, Problem> {
    let loaded = &seen.loaded;
    object(runs, seen.engine, &loaded.head, &loaded.inbox).await
}

/// An answer that is a run.
pub(super) fn answer(status: StatusCode, run: RunObject) -> Response {
    let tag = etag(&run.revision);
    let mut response = (status, Reply(run)).into_response();
    response.headers_mut().extend(tag);
    response
}

/// The `ETag` of a run at this revision.
pub(super) fn etag(revision: &str) -> Option<(HeaderName, HeaderValue)> {
    let value = HeaderValue::from_str(&format!("\"{revision}\"")).ok()?;
    Some((header::ETAG, value))
}

/// Says of an answer that it was given before.
pub(super) fn replayed(mut response: Response, replayed: bool) -> Response {
    if replayed {
        response
            .headers_mut()
            .insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("true"));
    }
    response
}
