//! Tools of MCP servers over streamable HTTP (durable-api §5, D81).
//!
//! One request of `tools/call` per attempt: nothing here repeats one. A session is made, or made anew, only before a call is sent. When
//! the answer of a call that may have left is lost, an `unsafe` call is unknown and any other one may be tried again by its owner.
//! What a server says of its own tools is not asked for and not trusted.

mod answer;
mod rounds;
mod session;

use std::time::Duration;

use http::HeaderMap;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::runner::CallError;
use rmcp::model::{CallToolRequestParams, RequestMetaObject};
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

pub(crate) use rounds::{Answered, Asked, told};

use self::session::Sessions;
use super::arguments;
use super::client::Clients;
use crate::agents::spec::EffectSpec;

/// Where the key of a call stands in `_meta`.
const KEY: &str = "iop/idempotency-key";

/// A server as it is reached, its secrets filled in.
#[derive(Clone, Copy)]
pub(crate) struct Server<'a> {
    pub(crate) url: &'a str,
    pub(crate) headers: &'a HeaderMap,
    /// Of one call, the making of a session included.
    pub(crate) timeout: Duration,
}

/// One call.
#[derive(Clone, Copy)]
pub(crate) struct McpCall<'a> {
    pub(crate) tool: &'a str,
    /// As the model wrote them, or what [`Asked::answered`] made of them.
    pub(crate) arguments: &'a [u8],
    pub(crate) key: &'a str,
    pub(crate) effect: EffectSpec,
    /// `traceparent`, when the run has one (D242).
    pub(crate) trace: Option<&'a str>,
}

/// Calls tools, and keeps one session per server and set of headers.
pub(crate) struct Mcp {
    sessions: Sessions,
    /// In bytes, of a result.
    max_result: usize,
}

impl Mcp {
    /// # Errors
    /// When no HTTP client can be made.
    pub(crate) fn new(clients: &Clients, max_result: u64) -> anyhow::Result<Self> {
        let max_result = usize::try_from(max_result).unwrap_or(usize::MAX);
        Ok(Self {
            sessions: Sessions::new(clients, max_result)?,
            max_result,
        })
    }

    /// Calls a tool once.
    ///
    /// # Errors
    /// When the tool failed, or when it is not known whether an `unsafe` one was carried out.
    pub(crate) async fn call(&self, server: Server<'_>, call: McpCall<'_>) -> Result<Answered, CallError> {
        let deadline = Instant::now() + server.timeout;
        let params = params(call)?;
        let Ok(session) = timeout_at(deadline, self.sessions.get(server)).await else {
            // Nothing of the call has left.
            return Err(timed_out("the MCP server did not answer in time").into());
        };
        let session = session?;
        match timeout_at(deadline, session.call(params)).await {
            Ok(Ok(response)) => answer::result(response, call.effect, self.max_result),
            Ok(Err(error)) => {
                if answer::ends_session(&error) {
                    self.sessions.forget(server, &session).await;
                }
                Err(answer::failure(error, call.effect))
            }
            Err(_) => Err(answer::lost(
                call.effect,
                timed_out("the tool did not answer in time"),
            )),
        }
    }
}

fn timed_out(message: &str) -> Failure {
    Failure::new(FailureKind::Timeout, message).code("timeout")
}

fn params(call: McpCall<'_>) -> Result<CallToolRequestParams, Failure> {
    let invalid = |why: String| Failure::new(FailureKind::InvalidInput, why).code("invalid_arguments");
    let (text, answers) = rounds::split(call.arguments).map_err(invalid)?;
    let Value::Object(arguments) = arguments::value(&text).map_err(invalid)? else {
        return Err(invalid(String::from("the arguments are no JSON object")));
    };
    let mut params = CallToolRequestParams::new(call.tool.to_owned()).with_arguments(arguments);
    let mut meta = RequestMetaObject::new();
    meta.insert(KEY.to_owned(), Value::from(call.key));
    if let Some(trace) = call.trace {
        meta.set_traceparent(trace);
    }
    params.meta = Some(meta);
    if let Some(answers) = answers {
        params.input_responses = answers.responses;
        params.request_state = answers.state;
    }
    Ok(params)
}

#[cfg(test)]
mod tests;
