//! `POST /api/v1/runs`: a run is stored before anybody is told of it (D25).

use std::collections::BTreeMap;
use std::time::Duration;

use axum::response::Response;
use http::StatusCode;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use iop_durable::graph::Deadline;
use iop_durable::ids::check_text;
use iop_durable::payload::Digest;
use iop_durable::time::Timestamp;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use utoipa::{IntoParams, ToSchema};

use super::super::callers::Beginner;
use super::super::extract::{Edge, Hosted, Search, Sent};
use super::super::shown::{self, replayed};
use super::super::sse::{self, From, OnDisconnect, Streamed};
use super::follow::{Patience, settled};
use crate::runs::problem::{Code, Problem};
use crate::runs::view::{RunObject, url_of};
use crate::runs::{CreateRun, Made};

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Pairs of metadata, and bytes of a value: it is part of every commit.
const METADATA_MAX: usize = 64;
const METADATA_VALUE_MAX: usize = 4 << 10;
/// The longest time to an end, in seconds: a hundred years.
const DEADLINE_MAX: Duration = Duration::from_secs(100 * 366 * 24 * 3600);

/// A run to begin.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct CreateBody {
    /// The name of an agent; this or `flow`.
    agent: Option<String>,
    flow: Option<String>,
    /// For an agent: a text is the user's message, an object with `messages` the conversation, other JSON is sent as text.
    #[schema(value_type = Value)]
    input: Box<RawValue>,
    /// Made up when absent. The same id with the same input is the same run.
    #[schema(max_length = 256)]
    run_id: Option<String>,
    metadata: Option<BTreeMap<String, String>>,
    /// A duration such as `"24h"`, or a time in RFC 3339.
    deadline: Option<String>,
    /// In place of the agent's, by name.
    #[schema(value_type = Option<Object>)]
    budgets: Option<BTreeMap<String, Value>>,
    /// In place of the agent's.
    durable: Option<bool>,
    /// Of a stream: what becomes of the run when the client leaves.
    on_disconnect: Option<OnDisconnect>,
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct CreateQuery {
    /// Answers when the run is over or waits, at most this much later; a duration such as `30s`.
    #[param(value_type = Option<String>)]
    wait: Option<Patience>,
}

/// Begins a run. Role `inference`.
///
/// With `Accept: text/event-stream` its events are streamed, from the first.
#[utoipa::path(
    post, path = "/runs", tag = "runs",
    params(
        CreateQuery,
        ("Idempotency-Key" = Option<String>, Header, description = "The same key with the same request is the same run."),
    ),
    request_body = CreateBody,
    responses(
        (status = 202, description = "It is stored.", body = RunObject, headers(("Location" = String, description = "The run."))),
        (status = 200, description = "The same request made it before; or, with `wait`, it is over or waits.",
            content((RunObject = "application/json"), (Streamed = "text/event-stream"))),
    )
)]
pub(super) async fn create(
    Beginner(caller): Beginner,
    Edge(app): Edge,
    Hosted(runs): Hosted,
    Search(query): Search<CreateQuery>,
    headers: HeaderMap,
    Sent(body, bytes, _held): Sent<CreateBody>,
) -> Result<Response, Problem> {
    if app.drain.is_draining() {
        return Err(Problem::new(
            Code::Draining,
            "This edge is shutting down; try another.",
        ));
    }
    let streams = sse::wanted(&headers);
    let on_disconnect = sse::on_disconnect(body.on_disconnect, streams)?;
    let key = idempotency_key(&headers)?;
    let idempotency = key.map(|key| (key, request_digest(&bytes)));
    let asked = asked(body, idempotency, traceparent(&headers))?;
    let Made {
        run, replayed: again, ..
    } = runs
        .create(&caller, asked)
        .await
        .map_err(|problem| problem.too_large_at("input"))?;
    let mut seen = runs.see(&caller, run.as_str()).await?;
    let mut response = if streams {
        sse::stream(&app, &runs, &caller, &seen, From::After(0), on_disconnect).await?
    } else {
        let mut ready = false;
        if let Some(patience) = query.wait {
            (seen, ready) = settled(&app, &runs, &caller, seen, patience).await?;
        }
        let status = if again || ready {
            StatusCode::OK
        } else {
            StatusCode::ACCEPTED
        };
        shown::answer(status, shown::seen(&runs, &seen).await?)
    };
    if let Ok(location) = HeaderValue::from_str(&url_of(&run)) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    Ok(replayed(response, again))
}

fn asked(
    body: CreateBody,
    idempotency: Option<(String, Digest)>,
    traceparent: Option<String>,
) -> Result<CreateRun, Problem> {
    let agent = match (body.agent, body.flow) {
        (Some(agent), None) => agent,
        (None, Some(_)) => {
            return Err(Problem::new(Code::FlowNotFound, "There is no flow of this name.").at("flow"));
        }
        (None, None) => return Err(Problem::invalid("agent", "agent is missing.")),
        (Some(_), Some(_)) => {
            return Err(Problem::invalid(
                "flow",
                "A run is of an agent or of a flow, not of both.",
            ));
        }
    };
    let metadata = body.metadata.unwrap_or_default();
    check_metadata(&metadata)?;
    Ok(CreateRun {
        agent,
        input: body.input,
        run_id: body.run_id,
        metadata,
        deadline: body.deadline.as_deref().map(deadline).transpose()?,
        budgets: body.budgets.unwrap_or_default(),
        durable: body.durable,
        idempotency,
        traceparent,
    })
}

/// # Errors
/// `invalid_request` that names the pair.
pub(in crate::http) fn check_metadata(metadata: &BTreeMap<String, String>) -> Result<(), Problem> {
    if metadata.len() > METADATA_MAX {
        let why = format!(
            "metadata has {} pairs, at most {METADATA_MAX} are allowed.",
            metadata.len()
        );
        return Err(Problem::invalid("metadata", why));
    }
    for (name, value) in metadata {
        if check_text("metadata", name).is_err() {
            let why = "A name in metadata has 1 to 256 bytes, without U+0000.";
            return Err(Problem::invalid("metadata", why));
        }
        if value.len() > METADATA_VALUE_MAX {
            let field = format!("metadata.{name}");
            let why = format!(
                "{field} is {} bytes, at most {METADATA_VALUE_MAX} are allowed.",
                value.len()
            );
            return Err(Problem::invalid(field, why));
        }
    }
    Ok(())
}

/// A duration from the run's acceptance, or a time.
///
/// # Errors
/// `invalid_request` at `deadline`.
fn deadline(text: &str) -> Result<Deadline, Problem> {
    let invalid = |why: &'static str| Problem::invalid("deadline", why);
    if let Ok(span) = humantime::parse_duration(text) {
        if span.is_zero() || span > DEADLINE_MAX {
            return Err(invalid(
                "deadline must be above zero and at most a hundred years.",
            ));
        }
        return Ok(Deadline::In(span));
    }
    moment(text).map(Deadline::At).ok_or_else(|| {
        invalid("deadline must be a duration such as \"24h\" or a time such as \"2030-01-31T12:00:00Z\".")
    })
}

/// A time in RFC 3339.
pub(super) fn moment(text: &str) -> Option<Timestamp> {
    let at: jiff::Timestamp = text.parse().ok()?;
    Timestamp::from_millis(at.as_millisecond()).ok()
}

/// # Errors
/// `invalid_encoding`, `invalid_request`; both name the header.
pub(in crate::http) fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let name = "Idempotency-Key";
    let mut sent = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(key) = sent.next() else { return Ok(None) };
    if sent.next().is_some() {
        return Err(Problem::invalid(name, "This header was sent twice."));
    }
    let key = std::str::from_utf8(key.as_bytes())
        .map_err(|_| Problem::new(Code::InvalidEncoding, "The key is not valid UTF-8.").at(name))?;
    match check_text("Idempotency-Key", key) {
        Ok(()) => Ok(Some(key.to_owned())),
        Err(why) => Err(Problem::invalid(name, why.to_string())),
    }
}

/// SHA-256 of method, path and body (durable-api §1).
fn request_digest(body: &[u8]) -> Digest {
    let mut hash = Sha256::new();
    hash.update(b"POST\0/api/v1/runs\0");
    hash.update(body);
    hash.finalize().into()
}

/// The caller's trace, when it is one (W3C Trace Context).
pub(in crate::http) fn traceparent(headers: &HeaderMap) -> Option<String> {
    let text = headers.get(TRACEPARENT)?.to_str().ok()?;
    let mut parts = text.split('-');
    let lengths = [2, 32, 16, 2];
    let fits = lengths.iter().all(|length| {
        parts.next().is_some_and(|part| {
            part.len() == *length && part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        })
    });
    (fits && parts.next().is_none()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(text: &str) -> Result<CreateRun, Problem> {
        let body: CreateBody = super::super::super::extract::json(text.as_bytes())?;
        asked(body, None, None)
    }

    fn fault(text: &str) -> (Code, String) {
        let problem = body(text).err().unwrap();
        (problem.code, problem.param.unwrap_or_default().into_owned())
    }

    #[test]
    fn a_run_is_asked_for_with_everything_or_with_little() {
        let run = body(r#"{"agent":"a","input":null}"#).unwrap();
        assert_eq!(
            (run.agent.as_str(), run.input.get(), run.deadline),
            ("a", "null", None)
        );
        let run = body(
            r#"{"agent":"a","input":{"x": 1.0},"run_id":"r","metadata":{"k":"v"},"deadline":"90m",
                "budgets":{"turns":3},"durable":true,"on_disconnect":"cancel"}"#,
        )
        .unwrap();
        assert_eq!(run.input.get(), r#"{"x": 1.0}"#);
        assert_eq!(run.deadline, Some(Deadline::In(Duration::from_secs(5400))));
        assert_eq!((run.run_id.as_deref(), run.durable), (Some("r"), Some(true)));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let long = format!(
            r#"{{"agent":"a","input":1,"metadata":{{"k":"{}"}}}}"#,
            "x".repeat(4097)
        );
        for (text, code, field) in [
            (r#"{"agent":"a"}"#, Code::InvalidRequest, "input"),
            (r#"{"input":1}"#, Code::InvalidRequest, "agent"),
            (r#"{"flow":"f","input":1}"#, Code::FlowNotFound, "flow"),
            (
                r#"{"agent":"a","flow":"f","input":1}"#,
                Code::InvalidRequest,
                "flow",
            ),
            (
                r#"{"agent":"a","input":1,"inputs":2}"#,
                Code::InvalidRequest,
                "inputs",
            ),
            (
                r#"{"agent":"a","input":1,"deadline":"soon"}"#,
                Code::InvalidRequest,
                "deadline",
            ),
            (
                r#"{"agent":"a","input":1,"deadline":"0s"}"#,
                Code::InvalidRequest,
                "deadline",
            ),
            (
                r#"{"agent":"a","input":1,"deadline":"1000years"}"#,
                Code::InvalidRequest,
                "deadline",
            ),
            (
                r#"{"agent":"a","input":1,"deadline":"1900-01-01T00:00:00Z"}"#,
                Code::InvalidRequest,
                "deadline",
            ),
            (
                r#"{"agent":"a","input":1,"metadata":{"k":1}}"#,
                Code::InvalidRequest,
                "metadata.k",
            ),
            (
                r#"{"agent":"a","input":1,"metadata":{"":"v"}}"#,
                Code::InvalidRequest,
                "metadata",
            ),
            (long.as_str(), Code::InvalidRequest, "metadata.k"),
            (
                r#"{"agent":"a","input":1,"on_disconnect":"stop"}"#,
                Code::InvalidRequest,
                "on_disconnect",
            ),
        ] {
            assert_eq!(fault(text), (code, field.to_owned()), "{text}");
        }
    }

    #[test]
    fn a_deadline_is_a_span_or_a_time() {
        assert_eq!(deadline("2s").unwrap(), Deadline::In(Duration::from_secs(2)));
        let at = Timestamp::from_millis(1_893_499_200_000).unwrap();
        assert_eq!(deadline("2030-01-01T12:00:00Z").unwrap(), Deadline::At(at));
        assert_eq!(deadline("2030-01-01T14:00:00+02:00").unwrap(), Deadline::At(at));
    }

    #[test]
    fn a_key_is_text_and_the_body_is_part_of_its_digest() {
        let with = |value: &[u8]| {
            let value = HeaderValue::from_bytes(value).unwrap();
            idempotency_key(&HeaderMap::from_iter([(IDEMPOTENCY_KEY, value)]))
        };
        assert_eq!(idempotency_key(&HeaderMap::new()), Ok(None));
        assert_eq!(with("ü-1".as_bytes()), Ok(Some("ü-1".to_owned())));
        assert_eq!(with(b"\xff").unwrap_err().code, Code::InvalidEncoding);
        assert_eq!(with(b"").unwrap_err().param.as_deref(), Some("Idempotency-Key"));
        assert!(with(&[b'x'; 257]).is_err());
        let mut twice = HeaderMap::new();
        twice.append(IDEMPOTENCY_KEY, HeaderValue::from_static("a"));
        twice.append(IDEMPOTENCY_KEY, HeaderValue::from_static("a"));
        assert!(idempotency_key(&twice).is_err());
        assert_ne!(request_digest(b"{}"), request_digest(b"{ }"));
    }

    #[test]
    fn a_trace_is_taken_over_when_it_is_one() {
        let of = |text: &'static str| {
            traceparent(&HeaderMap::from_iter([(
                TRACEPARENT,
                HeaderValue::from_static(text),
            )]))
        };
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        assert_eq!(of(good).as_deref(), Some(good));
        for bad in [
            "",
            "00",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "x",
        ] {
            assert_eq!(of(bad), None, "{bad}");
        }
    }
}
