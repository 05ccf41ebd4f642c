//! A run as a stream of events (durable-api §3): a snapshot first, then what is stored, in order, and what is not stored in
//! between; at the end of a life one terminal event, then the end of the stream. It is pulled: a reader that does not read costs
//! no memory.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::stream::unfold;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use iop_durable::ids::{DecisionId, RunId};
use iop_durable::record::{EventRecord, RunHead};
use iop_durable::store::Store;
use iop_durable::time::Timestamp;
use iop_shared::label_enum;
use serde::Serialize;
use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};
use tokio::time::Instant;
use utoipa::ToSchema;

use super::problem::ErrorBody;
use super::{accept, shown};
use crate::app::App;
use crate::drain::Drain;
use crate::http::auth::Caller;
use crate::runs::live::{Follow, Update};
use crate::runs::people::decider;
use crate::runs::problem::{Code, Problem};
use crate::runs::view::{EventObject, Open, RunObject, Transient, TransientWord};
use crate::runs::{Runs, Seen};
use crate::schema::words_schema;
use crate::tasks;

const MEDIA: &str = "text/event-stream";
pub(super) const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
const X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// A comment goes out after this long without a byte.
const COMMENT_AFTER: Duration = Duration::from_secs(15);
const COMMENT: Bytes = Bytes::from_static(b": keep-alive\n\n");
/// How long a store that does not answer is left alone.
const PAUSE: Duration = Duration::from_millis(500);

/// What stands in `data` of one event of a stream: an event as it is stored, one that is told on streams only, or, as the last one and
/// under the name `error`, why the stream cannot go on.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[expect(
    dead_code,
    reason = "it is only described: each is written where it comes from"
)]
pub(super) enum Streamed {
    Stored(EventObject),
    Transient(Transient),
    Broken(ErrorBody),
}

label_enum! {
    /// What becomes of a run whose stream is left (D3).
    pub enum OnDisconnect {
        Continue => "continue",
        Cancel => "cancel",
    }
}
words_schema!(OnDisconnect);

/// Whether a stream is asked for.
pub(super) fn wanted(headers: &HeaderMap) -> bool {
    accept::names(headers, MEDIA)
}

/// What becomes of the run when its stream is left: it goes on where nothing is said.
///
/// # Errors
/// `invalid_request` for an end that nobody would see come: there is no stream.
pub(super) fn on_disconnect(said: Option<OnDisconnect>, streams: bool) -> Result<OnDisconnect, Problem> {
    match said.unwrap_or(OnDisconnect::Continue) {
        OnDisconnect::Cancel if !streams => Err(Problem::invalid(
            "on_disconnect",
            "on_disconnect is for streams; send Accept: text/event-stream.",
        )),
        said @ (OnDisconnect::Cancel | OnDisconnect::Continue) => Ok(said),
    }
}

/// Where a stream begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum From {
    /// With what happens next; the end of a life that is over is told all the same.
    Now,
    /// Behind this event.
    After(u64),
}

impl From {
    /// # Errors
    /// `invalid_request` for an id that is no number of an event.
    pub(super) fn of(headers: &HeaderMap, after_seq: Option<u64>) -> Result<Self, Problem> {
        match headers.get(LAST_EVENT_ID) {
            None => Ok(after_seq.map_or(Self::Now, Self::After)),
            Some(id) => id
                .to_str()
                .ok()
                .and_then(|id| id.trim().parse().ok())
                .map(Self::After)
                .ok_or_else(|| {
                    Problem::invalid("Last-Event-ID", "Last-Event-ID must be the id of an event.")
                }),
        }
    }

    /// Behind which event the stream goes on, and whether the one asked for is not known here.
    fn start(self, head: &RunHead) -> (u64, bool) {
        let last = head.event_seq;
        match self {
            Self::After(seq) if seq <= last => (seq, false),
            Self::After(_) if head.status.is_terminal() => (last.saturating_sub(1), true),
            Self::After(_) => (last, true),
            Self::Now if head.status.is_terminal() => (last.saturating_sub(1), false),
            Self::Now => (last, false),
        }
    }
}

/// One stream.
struct Stream {
    follow: Follow,
    store: Arc<dyn Store>,
    run: RunId,
    drain: Drain,
    leaving: Leaving,
    ready: VecDeque<Bytes>,
    /// After this event nothing comes any more.
    last: Option<u64>,
    /// Of the run, as of what was told last.
    life: u32,
    quiet_until: Instant,
    over: bool,
}

/// Cancels a run whose stream was left before its end.
struct Leaving(Option<(Arc<Runs>, bool, RunId, String)>);

impl Leaving {
    fn stays(&mut self) {
        self.0 = None;
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let Some((runs, durable, run, by)) = self.0.take() else {
            return;
        };
        tasks::spawn(tasks::Kind::Session, "cancel_on_disconnect", async move {
            let id = format!("disconnect-{}", uuid::Uuid::now_v7().simple());
            let Ok(id) = DecisionId::new(&id) else { return };
            let operator = &runs.engine(durable).operator;
            if let Err(error) = operator
                .cancel(&run, &id, "The client left its stream.", Some(&by))
                .await
            {
                tracing::warn!(
                    code = error.code(),
                    "a run whose client left could not be cancelled"
                );
            }
        });
    }
}

/// The run as a stream.
///
/// # Errors
/// The store's, before the first byte.
pub(super) async fn stream(
    app: &App,
    runs: &Arc<Runs>,
    caller: &Caller,
    seen: &Seen<'_>,
    from: From,
    on_disconnect: OnDisconnect,
) -> Result<Response, Problem> {
    let Seen { engine, loaded } = seen;
    let head = &loaded.head;
    let (mut after, mut gap) = from.start(head);
    if after < head.event_seq {
        let next = engine.store.events(&head.id, after, 1).await?;
        if let Some(next) = next.first().filter(|next| next.seq > after + 1) {
            gap = true;
            after = next.seq - 1;
        }
    }
    let object = shown::seen(runs, seen).await?;
    let revision = object.revision.clone();
    let over = head.status.is_terminal();
    let leaving = match on_disconnect {
        OnDisconnect::Cancel if !over => {
            Some((Arc::clone(runs), engine.durable, head.id.clone(), decider(caller)))
        }
        OnDisconnect::Cancel | OnDisconnect::Continue => None,
    };
    let stream = Stream {
        follow: engine.follow(&head.id, after).with_pieces(),
        store: Arc::clone(&engine.store),
        run: head.id.clone(),
        drain: app.drain.clone(),
        leaving: Leaving(leaving),
        ready: VecDeque::from([snapshot(object, gap, head.life, loaded.now)]),
        last: over.then_some(head.event_seq),
        life: head.life,
        quiet_until: Instant::now() + COMMENT_AFTER,
        over: over && after >= head.event_seq,
    };
    let pieces = unfold(stream, |mut stream| async move {
        let piece = stream.next().await?;
        stream.quiet_until = Instant::now() + COMMENT_AFTER;
        Some((Ok::<_, std::convert::Infallible>(piece), stream))
    });
    let mut response = Body::from_stream(pieces).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(MEDIA));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(X_ACCEL_BUFFERING, HeaderValue::from_static("no"));
    headers.extend(shown::etag(&revision));
    Ok(response)
}

impl Stream {
    /// The next bytes; `None` when the stream is over.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Some(piece);
            }
            if self.over {
                self.leaving.stays();
                return None;
            }
            tokio::select! {
                biased;
                // The client asks another edge, or this one again, and goes on from where it was.
                () = self.drain.started() => self.over = true,
                update = self.follow.next() => match update {
                    Ok(update) => return Some(self.tell(update).await),
                    Err(problem) if problem.retryable => tokio::time::sleep(PAUSE).await,
                    Err(problem) => {
                        self.over = true;
                        return Some(failed(&problem));
                    }
                },
                () = tokio::time::sleep_until(self.quiet_until) => return Some(COMMENT),
            }
        }
    }

    async fn tell(&mut self, update: Update) -> Bytes {
        match update {
            Update::Event(event) => {
                self.life = event.life;
                self.over = event.terminal || self.last.is_some_and(|last| event.seq >= last);
                let open = self.mentions(&event).await;
                written(
                    Some(event.seq),
                    &event.name,
                    &EventObject::of(&self.run, &event, &open),
                )
            }
            Update::Delta(data) => {
                let data = serde_json::from_slice::<Box<RawValue>>(&data).unwrap_or_default();
                let now = Timestamp::from_millis(jiff::Timestamp::now().as_millisecond());
                transient(
                    TransientWord::TurnDelta,
                    self.life,
                    now.unwrap_or(Timestamp::MIN),
                    data,
                )
            }
        }
    }
}

impl Stream {
    /// What an event mentions. A store that is away for a moment is asked again.
    async fn mentions(&self, event: &EventRecord) -> Open {
        loop {
            match shown::mentions(&self.store, &self.run, std::slice::from_ref(event)).await {
                Ok(open) => return open,
                Err(problem) if problem.retryable => tokio::time::sleep(PAUSE).await,
                // The run was deleted meanwhile.
                Err(_) => return Open::default(),
            }
        }
    }
}

#[derive(Serialize)]
struct Snapshot {
    run: RunObject,
    /// The event that was asked for is not kept any more; the run as it is stands in its place.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    gap: bool,
}

fn snapshot(run: RunObject, gap: bool, life: u32, now: Timestamp) -> Bytes {
    let data = to_raw_value(&Snapshot { run, gap }).unwrap_or_default();
    transient(TransientWord::Snapshot, life, now, data)
}

fn transient(word: TransientWord, life: u32, at: Timestamp, data: Box<RawValue>) -> Bytes {
    written(None, word.as_str(), &Transient::new(word, life, at, data))
}

/// The stream cannot go on.
fn failed(problem: &Problem) -> Bytes {
    let code = if problem.code == Code::RunNotFound {
        Code::RunDeleted
    } else {
        problem.code
    };
    let error = json!({ "error": { "type": code.kind(), "code": code, "message": problem.message,
        "retryable": problem.retryable } });
    written(None, "error", &error)
}

/// One event as it goes over the wire. JSON of others may have line ends between its values.
fn written(id: Option<u64>, name: &str, data: &impl Serialize) -> Bytes {
    let json = serde_json::to_string(data).unwrap_or_default();
    let mut out = BytesMut::with_capacity(json.len() + name.len() + 48);
    if let Some(id) = id {
        out.put_slice(format!("id: {id}\n").as_bytes());
    }
    out.put_slice(b"event: ");
    // An agent names its events itself; a line end would end the field.
    out.extend(name.bytes().filter(|b| !matches!(b, b'\r' | b'\n')));
    out.put_u8(b'\n');
    for line in json.split(['\r', '\n']) {
        out.put_slice(b"data: ");
        out.put_slice(line.as_bytes());
        out.put_u8(b'\n');
    }
    out.put_u8(b'\n');
    out.freeze()
}

#[cfg(test)]
mod tests;
