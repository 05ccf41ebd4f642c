//! What an answer of an MCP server means: a result, a failure that is sure, or a loss. Pure.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "the library's enums are open: what it adds to them says nothing of a call"
)]

use std::time::Duration;

use iop_durable::failure::{Failure, FailureKind};
use iop_durable::runner::CallError;
use rmcp::ServiceError;
use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock};
use rmcp::service::ClientInitializeError;
use rmcp::transport::streamable_http_client::{HttpStatusError, StreamableHttpError};
use serde_json::json;

use super::rounds::is_reserved;
use super::{Answered, Asked};
use crate::agents::spec::EffectSpec;

/// The longest pause that a server may ask for.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(3600);
/// Of a failure's text, in bytes.
const MAX_MESSAGE: usize = 16 * 1024;

/// # Errors
/// A tool that says that it failed, or a result that cannot be used.
pub(super) fn result(
    response: CallToolResponse,
    effect: EffectSpec,
    max_result: usize,
) -> Result<Answered, CallError> {
    match response {
        CallToolResponse::Complete(result) if result.is_error == Some(true) => {
            Err(tool_error("mcp_error", cut(text(&result))).into())
        }
        CallToolResponse::Complete(result) => {
            let bytes = bytes(&result);
            if bytes.len() > max_result {
                return Err(too_large().into());
            }
            if is_reserved(&bytes) {
                return Err(invalid_response().into());
            }
            Ok(Answered::Result(bytes.into()))
        }
        CallToolResponse::InputRequired(result) => match Asked::of(result) {
            Ok(asked) => Ok(Answered::InputRequired(asked)),
            Err(why) => Err(tool_error("mcp_error", why.to_owned()).into()),
        },
        // A task goes on at the server, and nobody said here that tasks are followed.
        _ => Err(lost(effect, invalid_response())),
    }
}

/// Structured content as JSON; else texts, one a line; else the content as JSON.
fn bytes(result: &CallToolResult) -> Vec<u8> {
    let texts_only = result.content.iter().all(|c| matches!(c, ContentBlock::Text(_)));
    match &result.structured_content {
        Some(structured) if texts_only => structured.to_string().into_bytes(),
        Some(structured) => json!({"content": result.content, "structuredContent": structured})
            .to_string()
            .into_bytes(),
        None if texts_only => text(result).into_bytes(),
        None => json!(result.content).to_string().into_bytes(),
    }
}

fn text(result: &CallToolResult) -> String {
    let texts = result.content.iter().filter_map(|c| match c {
        ContentBlock::Text(text) => Some(text.text.as_str()),
        _ => None,
    });
    texts.collect::<Vec<_>>().join("\n")
}

/// Of a call that may have left: unknown when it must not be repeated, else a failure that may be tried again.
pub(super) fn lost(effect: EffectSpec, failure: Failure) -> CallError {
    match effect {
        EffectSpec::Unsafe => CallError::Unknown,
        EffectSpec::ReadOnly | EffectSpec::Idempotent => failure.retryable(true).into(),
    }
}

/// Whether the session cannot be used for another call.
pub(super) fn ends_session(error: &ServiceError) -> bool {
    match error {
        ServiceError::TransportSend(error) => !matches!(
            streamable(error.error.as_ref()),
            Some(StreamableHttpError::HttpStatus(_))
        ),
        ServiceError::TransportClosed => true,
        _ => false,
    }
}

/// What a call's error means.
pub(super) fn failure(error: ServiceError, effect: EffectSpec) -> CallError {
    match error {
        ServiceError::McpError(error) => tool_error("mcp_error", cut(error.message.into_owned())).into(),
        ServiceError::TransportSend(error) => match streamable(error.error.as_ref()) {
            Some(error) => sent(error, effect),
            None => lost(effect, cut_off()),
        },
        ServiceError::UnexpectedResponse => invalid_response().into(),
        ServiceError::Timeout { .. } => lost(effect, super::timed_out("the tool did not answer in time")),
        // The rest says nothing of what became of the call.
        _ => lost(effect, cut_off()),
    }
}

fn sent(error: &StreamableHttpError<reqwest::Error>, effect: EffectSpec) -> CallError {
    match answered(error) {
        Some(answered) => answered,
        None => lost(effect, cut_off()),
    }
}

/// What a session's error means: nothing of a call has left.
pub(super) fn refused(error: &ClientInitializeError) -> CallError {
    let unavailable = || {
        Failure::new(FailureKind::Unavailable, "no session with the MCP server")
            .code("connect_failed")
            .into()
    };
    match error {
        ClientInitializeError::TransportError { error, .. } => streamable(error.error.as_ref())
            .and_then(answered)
            .unwrap_or_else(unavailable),
        ClientInitializeError::JsonRpcError(error) => {
            tool_error("mcp_error", cut(error.message.to_string())).into()
        }
        ClientInitializeError::NoCompatibleProtocolVersion { .. } => tool_error(
            "mcp_error",
            "the server speaks no version of MCP that is known".to_owned(),
        )
        .into(),
        ClientInitializeError::LegacyFallbackFailed { fallback, .. } => refused(fallback),
        _ => unavailable(),
    }
}

/// Whether nobody was reached: another way of speaking would not help.
pub(super) fn unreachable(error: &ClientInitializeError) -> bool {
    match error {
        ClientInitializeError::TransportError { error, .. } => {
            matches!(streamable(error.error.as_ref()), Some(StreamableHttpError::Client(e)) if e.is_connect())
        }
        _ => false,
    }
}

/// What the server answered, or that nothing reached it; `None`: nobody knows.
fn answered(error: &StreamableHttpError<reqwest::Error>) -> Option<CallError> {
    let auth = |status: u16| {
        Failure::new(FailureKind::Auth, "the MCP server wants other credentials")
            .code(format!("http_{status}"))
            .into()
    };
    match error {
        StreamableHttpError::Client(error) if error.is_connect() => Some(
            Failure::new(FailureKind::Unavailable, "the MCP server cannot be reached")
                .code("connect_failed")
                .into(),
        ),
        StreamableHttpError::Client(error) if error.is_builder() || error.is_redirect() => Some(
            Failure::new(FailureKind::Configuration, "the MCP server's URL cannot be used")
                .code("configuration")
                .into(),
        ),
        StreamableHttpError::HttpStatus(status) => Some(status_error(status)),
        StreamableHttpError::AuthRequired(_) => Some(auth(401)),
        StreamableHttpError::InsufficientScope(_) => Some(auth(403)),
        StreamableHttpError::ResponseBodyTooLarge { .. } => Some(too_large().into()),
        StreamableHttpError::ReservedHeaderConflict(name) => Some(
            Failure::new(
                FailureKind::Configuration,
                format!("the header {name} belongs to the protocol"),
            )
            .code("configuration")
            .into(),
        ),
        StreamableHttpError::UnexpectedServerResponse(said) => Some(match status_of(said) {
            Some(status @ (401 | 403)) => auth(status),
            Some(status) => status_error(&HttpStatusError::new(status, None)),
            None => invalid_response().into(),
        }),
        StreamableHttpError::UnexpectedContentType(_) | StreamableHttpError::Deserialize(_) => {
            Some(invalid_response().into())
        }
        // A session that is gone says nothing of the call that it came back to; the rest are cuts.
        _ => None,
    }
}

/// The status in the library's text of an answer that is neither a success nor JSON-RPC: `HTTP 403 Forbidden: …`.
fn status_of(said: &str) -> Option<u16> {
    let digits = said.strip_prefix("HTTP ")?.get(..3)?;
    let status = digits.parse().ok()?;
    (400..600).contains(&status).then_some(status)
}

fn status_error(error: &HttpStatusError) -> CallError {
    let kind = match error.status {
        429 => FailureKind::RateLimited,
        _ => FailureKind::ToolError,
    };
    let failure =
        Failure::new(kind, "the MCP server refused the request").code(format!("http_{}", error.status));
    CallError::Failed {
        failure: failure.retryable(retryable(error.status)),
        retry_after: error.retry_after.as_deref().and_then(retry_after),
    }
}

/// durable-api §8 "Who retries".
fn retryable(status: u16) -> bool {
    matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504)
}

/// Only the form in seconds: a date is measured by a clock that is not read here.
fn retry_after(text: &str) -> Option<Duration> {
    let asked = text.trim().parse().ok().map(Duration::from_secs)?;
    Some(asked.min(MAX_RETRY_AFTER))
}

fn streamable<'a>(
    error: &'a (dyn std::error::Error + Send + Sync + 'static),
) -> Option<&'a StreamableHttpError<reqwest::Error>> {
    error.downcast_ref()
}

fn tool_error(code: &str, message: String) -> Failure {
    Failure::new(FailureKind::ToolError, message).code(code)
}

fn too_large() -> Failure {
    tool_error(
        "payload_too_large",
        "the result is larger than [runs] max_result".to_owned(),
    )
}

fn invalid_response() -> Failure {
    tool_error(
        "mcp_invalid_response",
        "the server's answer is not one that MCP knows".to_owned(),
    )
}

fn cut_off() -> Failure {
    Failure::new(
        FailureKind::Unavailable,
        "the connection ended before the answer did",
    )
    .code("connection_lost")
}

/// At most [`MAX_MESSAGE`], at a character's end.
fn cut(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(MAX_MESSAGE));
    text
}
