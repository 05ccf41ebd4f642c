//! `GET /api/v1/runs/{id}/events`: a page of what was stored, or all of it and what comes, as a stream.

use axum::Json as Reply;
use axum::response::{IntoResponse, Response};
use http::HeaderMap;
use serde::Deserialize;
use utoipa::IntoParams;

use super::super::callers::Reader;
use super::super::extract::{Edge, Hosted, Search, Url};
use super::super::list::{Limit, List};
use super::super::shown;
use super::super::sse::{self, From, OnDisconnect, Streamed};
use crate::runs::problem::Problem;
use crate::runs::view::EventObject;

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EventsQuery {
    /// Only events behind this one; `next_after` of the page before.
    #[param(value_type = Option<u64>, format = "uint64")]
    after_seq: Option<u64>,
    #[serde(default)]
    #[param(value_type = Option<u32>, minimum = 1, maximum = 200, default = 100)]
    limit: Limit,
}

/// The events of a run.
///
/// As a page; or with `Accept: text/event-stream` as a stream: a snapshot of the run, then each event as it is stored, to the end
/// of a life.
#[utoipa::path(
    get, path = "/runs/{id}/events", tag = "runs", operation_id = "list_events",
    params(
        ("id" = String, Path),
        EventsQuery,
        ("Last-Event-ID" = Option<u64>, Header, format = "uint64", description = "Of a stream: begins behind this event; 0: with the first."),
    ),
    responses((status = 200, content((List<EventObject> = "application/json"), (Streamed = "text/event-stream"))))
)]
pub(super) async fn events(
    Reader(caller): Reader,
    Edge(app): Edge,
    Hosted(runs): Hosted,
    Url(id): Url<String>,
    Search(query): Search<EventsQuery>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let seen = runs.see(&caller, &id).await?;
    let from = From::of(&headers, query.after_seq)?;
    if sse::wanted(&headers) {
        return sse::stream(&app, &runs, &caller, &seen, from, OnDisconnect::Continue).await;
    }
    let run = &seen.loaded.head.id;
    let after = query.after_seq.unwrap_or(0);
    let events = seen
        .engine
        .store
        .events(run, after, query.limit.and_one())
        .await?;
    let list = List::of(events, query.limit, |last| last.seq.to_string());
    let open = shown::mentions(&seen.engine.store, run, &list.data).await?;
    Ok(Reply(list.map(|event| EventObject::of(run, &event, &open))).into_response())
}
