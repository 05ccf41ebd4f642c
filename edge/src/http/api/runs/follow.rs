//! Waiting for a run without a stream.

use std::time::Duration;

use axum::response::Response;
use http::StatusCode;
use iop_durable::ids::RunId;
use iop_durable::record::{EventName, Status};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use tokio::time::Instant;
use utoipa::IntoParams;

use super::super::callers::Reader;
use super::super::extract::{Edge, Hosted, Search, Url};
use super::super::shown;
use crate::app::App;
use crate::http::auth::Caller;
use crate::runs::live::Update;
use crate::runs::problem::Problem;
use crate::runs::view::{RunObject, waiting_on};
use crate::runs::{Runs, Seen};

/// The longest wait.
const LONGEST: Duration = Duration::from_secs(600);
const DEFAULT: Duration = Duration::from_secs(30);

/// How long a caller waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Patience(Duration);

impl Default for Patience {
    fn default() -> Self {
        Self(DEFAULT)
    }
}

impl<'de> Deserialize<'de> for Patience {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        match humantime::parse_duration(&text) {
            Ok(span) if span <= LONGEST => Ok(Self(span)),
            Ok(_) | Err(_) => Err(D::Error::custom("must be a duration such as 30s, at most 10m")),
        }
    }
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct WaitQuery {
    /// A duration such as `30s`, at most `10m`.
    #[serde(default)]
    #[param(value_type = Option<String>, default = "30s")]
    timeout: Patience,
}

/// Whether nothing happens by itself that a caller should wait for. A run that was told all that it waited for goes on.
async fn rests(seen: &Seen<'_>) -> Result<bool, Problem> {
    let head = &seen.loaded.head;
    Ok(match head.status {
        Status::Queued | Status::Running => false,
        Status::Waiting => {
            let open = shown::open(seen.engine, head).await?;
            !waiting_on(head, &open).is_empty()
        }
        Status::Ambiguous
        | Status::Succeeded
        | Status::Failed
        | Status::Cancelled
        | Status::Exhausted
        | Status::Transferred => true,
    })
}

/// The run once it is over or waits, or as it is when the caller's patience or the process ends; and whether it is over or waits.
///
/// # Errors
/// As `Runs::see`.
pub(super) async fn settled<'a>(
    app: &App,
    runs: &'a Runs,
    caller: &Caller,
    mut seen: Seen<'a>,
    patience: Patience,
) -> Result<(Seen<'a>, bool), Problem> {
    let until = Instant::now() + patience.0;
    let run = seen.loaded.head.id.clone();
    let mut follow = seen.engine.follow(&run, seen.loaded.head.event_seq);
    while !rests(&seen).await? {
        let update = tokio::select! {
            biased;
            () = app.drain.started() => return late(runs, caller, &run).await,
            () = tokio::time::sleep_until(until) => return late(runs, caller, &run).await,
            update = follow.next() => update?,
        };
        if let Update::Event(event) = update
            && (event.terminal
                || matches!(
                    EventName::parse(&event.name),
                    Some(EventName::Waiting | EventName::Ambiguous)
                ))
        {
            seen = runs.see(caller, run.as_str()).await?;
        }
    }
    Ok((seen, true))
}

/// The run as it is when nobody waits for it any more.
async fn late<'a>(runs: &'a Runs, caller: &Caller, run: &RunId) -> Result<(Seen<'a>, bool), Problem> {
    let seen = runs.see(caller, run.as_str()).await?;
    let ready = rests(&seen).await?;
    Ok((seen, ready))
}

/// Waits for a run, at most so long.
///
/// The run as it is then: over, waiting, or neither.
#[utoipa::path(
    get, path = "/runs/{id}/wait", tag = "runs", operation_id = "wait_for_run",
    params(("id" = String, Path), WaitQuery),
    responses((status = 200, body = RunObject))
)]
pub(super) async fn wait(
    Reader(caller): Reader,
    Edge(app): Edge,
    Hosted(runs): Hosted,
    Url(id): Url<String>,
    Search(query): Search<WaitQuery>,
) -> Result<Response, Problem> {
    let seen = runs.see(&caller, &id).await?;
    let (seen, _) = settled(&app, &runs, &caller, seen, query.timeout).await?;
    Ok(shown::answer(StatusCode::OK, shown::seen(&runs, &seen).await?))
}

#[cfg(test)]
mod tests {
    use super::super::super::extract::query;
    use super::*;

    #[test]
    fn patience_is_bounded() {
        let of = |text: &str| query::<WaitQuery>(&format!("/x{text}").parse().unwrap()).map(|q| q.timeout.0);
        assert_eq!(of("").unwrap(), DEFAULT);
        assert_eq!(of("?timeout=250ms").unwrap(), Duration::from_millis(250));
        assert_eq!(of("?timeout=0s").unwrap(), Duration::ZERO);
        for wrong in ["?timeout=x", "?timeout=11m", "?timeout=30", "?timeout=-1s"] {
            assert_eq!(
                of(wrong).unwrap_err().param.as_deref(),
                Some("timeout"),
                "{wrong}"
            );
        }
    }
}
