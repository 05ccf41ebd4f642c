//! The tools of agents: what carries a call out, and what its answer means.
//!
//! A call is dispatched here once. Whether it is dispatched again, and what becomes of one whose effect is not known, decides the
//! run that it belongs to.

pub(crate) mod answer;
pub(crate) mod arguments;
pub(crate) mod client;
pub(crate) mod headers;
pub(crate) mod http;
pub(crate) mod mcp;
pub(crate) mod path;
pub(crate) mod schema;
pub(crate) mod template;

use std::time::Duration;

use bytes::Bytes;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::runner::CallError;

pub(crate) use answer::told;

use self::client::Clients;
use self::http::HttpCall;
use self::mcp::{Answered, Mcp, McpCall, Server};
use crate::agents::spec::{AgentSpec, McpToolSpec, ToolSpec};

/// Of one call of an MCP server, when the declaration does not say.
const MCP_TIMEOUT: Duration = Duration::from_secs(60);

/// Calls tools.
pub(crate) struct Toolbox {
    clients: Clients,
    mcp: Mcp,
    /// In bytes.
    max_result: u64,
}

impl Toolbox {
    /// `max_result` bounds a result, in bytes.
    ///
    /// # Errors
    /// When no HTTP client can be made.
    pub(crate) fn new(max_result: u64) -> anyhow::Result<Self> {
        let clients = Clients::new()?;
        Ok(Self {
            mcp: Mcp::new(&clients, max_result)?,
            clients,
            max_result,
        })
    }

    /// Carries a call out. What it does comes from `tool`, as the run is pinned to it; how it is reached from `now`, the newest
    /// version of its agent (durable-api §8 Which definition). `trace`: the run's `traceparent` (D242).
    ///
    /// # Errors
    /// When it failed, or when it is not known whether an `unsafe` one was carried out.
    pub(crate) async fn call(
        &self,
        now: &AgentSpec,
        tool: &ToolSpec,
        arguments: &[u8],
        key: &str,
        trace: Option<&str>,
    ) -> Result<Bytes, CallError> {
        let reached = reached(now, tool).ok_or_else(revoked)?;
        if let Some(spec) = &reached.http {
            let call = HttpCall {
                spec,
                effect: tool.effect,
                arguments,
                key,
                trace,
                max_result: self.max_result,
            };
            http::call(&self.clients, &call).await
        } else if let Some(remote) = &reached.mcp {
            let call = McpCall {
                tool: &remote.tool,
                arguments,
                key,
                effect: tool.effect,
                trace,
            };
            self.call_mcp(now, remote, call).await.map(Answered::into_output)
        } else {
            Err(revoked().into())
        }
    }

    /// The callee's evidence that a call was carried out, as its `reconcile` asks for it (D152). It changes nothing there.
    pub(crate) async fn found(
        &self,
        now: &AgentSpec,
        tool: &ToolSpec,
        arguments: &[u8],
        key: &str,
    ) -> Option<Bytes> {
        let spec = reached(now, tool)?.reconcile.as_ref()?;
        match http::found(&self.clients, spec, arguments, key, self.max_result).await {
            Ok(evidence) => Some(evidence),
            Err(why) => {
                tracing::info!(tool = %tool.name, why, "no evidence that a call was carried out");
                None
            }
        }
    }

    async fn call_mcp(
        &self,
        now: &AgentSpec,
        remote: &McpToolSpec,
        call: McpCall<'_>,
    ) -> Result<Answered, CallError> {
        let declared = now.mcp_servers.get(&remote.server).ok_or_else(revoked)?;
        let resolved = headers::resolve(&declared.headers).await?;
        let server = Server {
            url: &declared.url,
            headers: &resolved.map,
            timeout: declared.timeout.map_or(MCP_TIMEOUT, |span| span.0),
        };
        match self.mcp.call(server, call).await {
            Ok(Answered::Result(result)) => Ok(Answered::Result(resolved.redact_result(result))),
            Err(CallError::Failed {
                mut failure,
                retry_after,
            }) => {
                let text = resolved.redact(failure.message.into());
                failure.message = String::from_utf8_lossy(&text).into_owned();
                Err(CallError::Failed { failure, retry_after })
            }
            // A question has the server's own state in it, which goes back as it came.
            other => other,
        }
    }
}

/// The tool of the same name in the newest version.
fn reached<'a>(now: &'a AgentSpec, tool: &ToolSpec) -> Option<&'a ToolSpec> {
    now.tools.iter().find(|t| t.name == tool.name)
}

fn revoked() -> Failure {
    let why = "the newest version of the agent does not have this tool";
    Failure::new(FailureKind::Configuration, why).code("tool_unavailable")
}

#[cfg(test)]
mod tests;
