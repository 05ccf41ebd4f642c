//! Tools over HTTP: one request per call (durable-api §5, §8 Tools).
//!
//! Nothing is sent before everything is known to be right, and nothing is sent twice. What came of a request that may have left
//! is a failure when it can be called again, and unknown when it is `unsafe`. An answer is never unknown.

use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::runner::CallError;
use reqwest::{Client, Request, Response, Url};
use tokio::time::{Instant, timeout_at};

use super::answer::{self, TEXT_MAX, too_large};
use super::arguments::Members;
use super::client::Clients;
use super::headers::{self, Resolved};
use super::path::Path;
use super::template::Template;
use crate::agents::spec::{EffectSpec, HttpSpec, ReconcileSpec, Span};

/// The key of a call, on every attempt (D55, D56).
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The trace that the run belongs to (D242).
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// From the dispatch to the last byte, when the declaration does not say.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The longest wait for anything: sums with the present moment stay in range.
const TIMEOUT_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

/// Bytes of a failed answer that are read: what is kept of it, and the end of a secret in it.
const TEXT_READ: usize = TEXT_MAX + (4 << 10);

/// Methods of tools.
const METHODS: [Method; 6] = [
    Method::GET,
    Method::HEAD,
    Method::POST,
    Method::PUT,
    Method::PATCH,
    Method::DELETE,
];

/// A method as it is declared.
///
/// # Errors
/// When it is none of a tool's.
pub(crate) fn method(text: &str) -> Result<Method, String> {
    METHODS.into_iter().find(|m| m == text).ok_or_else(|| {
        let names = METHODS.map(|m| m.to_string()).join(", ");
        format!("must be one of {names}")
    })
}

/// One call.
pub(super) struct HttpCall<'a> {
    pub(super) spec: &'a HttpSpec,
    pub(super) effect: EffectSpec,
    /// As the model wrote them, or as a person edited them.
    pub(super) arguments: &'a [u8],
    pub(super) key: &'a str,
    /// `traceparent`, when the run has one.
    pub(super) trace: Option<&'a str>,
    /// Bytes of a result.
    pub(super) max_result: u64,
}

/// Carries a call out.
///
/// # Errors
/// When it failed, or when it is not known whether an `unsafe` one was carried out.
pub(super) async fn call(clients: &Clients, call: &HttpCall<'_>) -> Result<Bytes, CallError> {
    let until = until(call.spec.timeout);
    let (mut request, resolved) = request(call).await?;
    let key = HeaderValue::from_str(call.key).map_err(|_| internal("the key of the call is no header"))?;
    request.headers_mut().insert(IDEMPOTENCY_KEY, key);
    if let Some(Ok(trace)) = call.trace.map(HeaderValue::from_str) {
        request.headers_mut().insert(TRACEPARENT, trace);
    }
    let again = call.effect != EffectSpec::Unsafe;
    let answered = if again {
        let sent = exchange(clients.pooled(), request, call.max_result, until).await;
        sent.map_err(|lost| lost.failure.into())
    } else {
        let fresh = clients
            .fresh()
            .map_err(|_| internal("no HTTP client can be made"))?;
        let sent = exchange(&fresh.client, request, call.max_result, until).await;
        sent.map_err(|lost| match lost.failure {
            _ if !fresh.connected() => unreachable_tool(&lost.failure.message).into(),
            failure if lost.answered => failure.into(),
            _ => CallError::Unknown,
        })
    };
    let Answer {
        status,
        headers,
        body,
    } = answered?;
    if status.is_success() {
        return Ok(answer::result(resolved.redact_result(body), call.max_result)?);
    }
    let text = String::from_utf8_lossy(&resolved.redact(body)).into_owned();
    Err(answer::refused(status, &headers, text, again, SystemTime::now()))
}

/// The body of the callee's answer, when it is evidence that the call was carried out (D152).
///
/// # Errors
/// Why there is none; nothing of arguments and answer.
pub(super) async fn found(
    clients: &Clients,
    spec: &ReconcileSpec,
    arguments: &[u8],
    key: &str,
    max_result: u64,
) -> Result<Bytes, String> {
    let until = until(spec.timeout);
    let path = Path::parse(&spec.found)?;
    let method = method(&spec.method)?;
    // A later round of a call over MCP has other bytes there; its key still names it.
    let members = Members::parse(arguments).unwrap_or_default();
    let url = Template::parse(&spec.url)?.render(&members, key, false)?;
    let mut resolved = headers::resolve(&spec.headers).await.map_err(|f| f.message)?;
    let mut request = Request::new(method, url);
    *request.headers_mut() = std::mem::take(&mut resolved.map);
    let sent = exchange(clients.pooled(), request, max_result, until).await;
    let Answer { status, body, .. } = sent.map_err(|lost| lost.failure.message)?;
    if !status.is_success() {
        return Err(format!("it answered {}", status.as_u16()));
    }
    let value = serde_json::from_slice(&body).map_err(|_| "it answered no JSON")?;
    match path.find(&value) {
        Some(_) => Ok(resolved.redact_result(body)),
        None => Err(format!("there is nothing at {} in its answer", spec.found)),
    }
}

fn until(timeout: Option<Span>) -> Instant {
    Instant::now() + timeout.map_or(TIMEOUT, |span| span.0).min(TIMEOUT_MAX)
}

/// The request of a call but for its key, and the secrets in it.
async fn request(call: &HttpCall<'_>) -> Result<(Request, Resolved), Failure> {
    let members = Members::parse(call.arguments).map_err(invalid)?;
    let method = method(&call.spec.method).map_err(|why| configuration("method", &why))?;
    let template = Template::parse(&call.spec.url).map_err(|why| configuration("url", &why))?;
    let in_query = matches!(method, Method::GET | Method::HEAD | Method::DELETE);
    let url: Url = template.render(&members, call.key, in_query).map_err(invalid)?;
    let mut resolved = headers::resolve(&call.spec.headers).await?;
    let mut request = Request::new(method, url);
    *request.headers_mut() = std::mem::take(&mut resolved.map);
    if !in_query {
        let json = HeaderValue::from_static("application/json");
        request.headers_mut().entry(CONTENT_TYPE).or_insert(json);
        *request.body_mut() = Some(Bytes::copy_from_slice(call.arguments).into());
    }
    Ok((request, resolved))
}

/// What came back, up to its last byte; of an answer that is no success as much as there was.
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

/// No answer, or one that cannot be taken.
struct Lost {
    failure: Failure,
    /// Whether the callee said that it had carried the call out.
    answered: bool,
}

impl Lost {
    fn unanswered(failure: Failure) -> Self {
        Self {
            failure,
            answered: false,
        }
    }
}

async fn exchange(client: &Client, request: Request, max: u64, until: Instant) -> Result<Answer, Lost> {
    let mut response = match timeout_at(until, client.execute(request)).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => return Err(Lost::unanswered(unsent_or_cut(&error))),
        Err(_) => return Err(Lost::unanswered(late())),
    };
    let status = response.status();
    let headers = std::mem::take(response.headers_mut());
    let body = if status.is_success() {
        whole(&mut response, max, until).await?
    } else {
        beginning(&mut response, until).await
    };
    Ok(Answer {
        status,
        headers,
        body,
    })
}

async fn whole(response: &mut Response, max: u64, until: Instant) -> Result<Bytes, Lost> {
    let fits = |bytes: u64| {
        if bytes > max {
            let failure = too_large(max);
            let answered = true;
            Err(Lost { failure, answered })
        } else {
            Ok(())
        }
    };
    fits(response.content_length().unwrap_or_default())?;
    let mut body = BytesMut::new();
    loop {
        match timeout_at(until, response.chunk()).await {
            Ok(Ok(Some(chunk))) => {
                fits((body.len() + chunk.len()) as u64)?;
                if body.is_empty() {
                    body = BytesMut::from(chunk);
                } else {
                    body.extend_from_slice(&chunk);
                }
            }
            Ok(Ok(None)) => return Ok(body.freeze()),
            Ok(Err(error)) => return Err(Lost::unanswered(unsent_or_cut(&error))),
            Err(_) => return Err(Lost::unanswered(late())),
        }
    }
}

/// The status has said enough: whatever happens to the text behind it does not matter.
async fn beginning(response: &mut Response, until: Instant) -> Bytes {
    let mut body = BytesMut::new();
    while body.len() < TEXT_READ
        && let Ok(Ok(Some(chunk))) = timeout_at(until, response.chunk()).await
    {
        body.extend_from_slice(&chunk);
    }
    body.truncate(TEXT_READ);
    body.freeze()
}

fn invalid(why: String) -> Failure {
    Failure::new(FailureKind::InvalidInput, why).code("invalid_arguments")
}

fn configuration(field: &str, why: &str) -> Failure {
    Failure::new(FailureKind::Configuration, format!("http.{field} {why}"))
}

fn internal(why: &str) -> Failure {
    Failure::new(FailureKind::Internal, why)
}

fn late() -> Failure {
    Failure::new(FailureKind::Timeout, "the tool did not answer in time")
}

fn unreachable_tool(why: &str) -> Failure {
    Failure::new(FailureKind::Unavailable, why).code("connect_failed")
}

/// The innermost error names the cause; no URL and no header is in it.
fn unsent_or_cut(error: &reqwest::Error) -> Failure {
    let mut cause: &dyn std::error::Error = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    if error.is_connect() {
        unreachable_tool(&format!("no connection to the tool: {cause}"))
    } else {
        Failure::new(
            FailureKind::Unavailable,
            format!("the connection to the tool broke: {cause}"),
        )
        .code("connection_lost")
    }
}

#[cfg(test)]
mod tests;
