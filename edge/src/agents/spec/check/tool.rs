//! Rules of one tool and of one MCP server.

use super::{Checked, Invalid, NAME_RULE, http, is_name, refuse, retry, span};
use crate::agents::journal::REQUEST_INPUT;
use crate::agents::spec::{AgentSpec, EffectSpec, McpServerSpec, ReconcileSpec, ToolSpec};
use crate::agents::tools::http::method;
use crate::agents::tools::path::Path;
use crate::agents::tools::schema::Arguments;

/// Longest name of a tool at an MCP server, in bytes.
const MCP_TOOL_MAX: usize = 256;

pub(super) fn tool(tool: &ToolSpec, spec: &AgentSpec) -> Checked {
    if let Some(kind) = tool.kind.as_deref()
        && kind != "function"
    {
        return refuse(
            "type",
            format!(
                "must be \"function\": a {kind:?} tool runs at the provider, where a call is not recorded, approved or recovered"
            ),
        );
    }
    if !is_name(&tool.name) {
        return refuse("name", NAME_RULE);
    }
    if spec.human_input && tool.name == REQUEST_INPUT {
        return refuse(
            "name",
            "is the built-in tool that asks a person; choose another, or set human_input = false",
        );
    }
    schema(tool)?;
    target(tool, spec)?;
    if let Some(policy) = &tool.retry {
        retries(policy.max_attempts, tool)?;
        retry(policy).map_err(|e| e.under("retry"))?;
    }
    match &tool.reconcile {
        Some(_) if tool.agent.is_some() => refuse(
            "reconcile",
            "an agent's run is found by its id; there is nothing to ask",
        ),
        Some(reconcile) => question(reconcile, tool).map_err(|e| e.under("reconcile")),
        None => Ok(()),
    }
}

fn schema(tool: &ToolSpec) -> Checked {
    let Some(schema) = &tool.parameters else {
        return Ok(());
    };
    let Some(members) = schema.as_object() else {
        return refuse("parameters", "must be a JSON Schema of an object");
    };
    if members.get("type").is_some_and(|it| it != "object") {
        return refuse("parameters.type", "must be \"object\": arguments have names");
    }
    match Arguments::compile(schema) {
        Ok(_) => Ok(()),
        Err(why) => refuse("parameters", format!("is no JSON Schema: {why}")),
    }
}

fn target(tool: &ToolSpec, spec: &AgentSpec) -> Checked {
    match (&tool.http, &tool.mcp, &tool.agent) {
        (Some(call), None, None) => {
            let at = |e: Invalid| e.under("http");
            if let Err(why) = method(&call.method) {
                return refuse("http.method", why);
            }
            http::template(&call.url, tool.parameters.as_ref()).map_err(at)?;
            http::headers(&call.headers).map_err(at)?;
            span("timeout", call.timeout).map_err(at)
        }
        (None, Some(call), None) => {
            if !spec.mcp_servers.contains_key(&call.server) {
                return refuse(
                    "mcp.server",
                    format!("no mcp_servers.{} is declared", call.server),
                );
            }
            if call.tool.is_empty()
                || call.tool.len() > MCP_TOOL_MAX
                || call.tool.chars().any(char::is_control)
            {
                return refuse("mcp.tool", "must be 1 to 256 bytes of printable text");
            }
            Ok(())
        }
        (None, None, Some(call)) if !is_name(&call.name) => refuse("agent.name", NAME_RULE),
        (None, None, Some(_)) => Ok(()),
        (None, None, None) => refuse("http", "exactly one of http, mcp and agent says what a call does"),
        (Some(_), Some(_), _) => refuse("mcp", "exactly one of http, mcp and agent; http is there too"),
        (Some(_), None, Some(_)) => refuse("agent", "exactly one of http, mcp and agent; http is there too"),
        (None, Some(_), Some(_)) => refuse("agent", "exactly one of http, mcp and agent; mcp is there too"),
    }
}

/// One owner of retries, and only of what may be repeated (D24, D147).
fn retries(max_attempts: u32, tool: &ToolSpec) -> Checked {
    if tool.agent.is_some() {
        return refuse("retry", "the agent that is called owns its own retries");
    }
    match tool.effect {
        EffectSpec::Unsafe if max_attempts > 1 => refuse(
            "retry.max_attempts",
            "must be 1 while effect is \"unsafe\": repeating the call may do it twice; say read_only or idempotent if it may not",
        ),
        EffectSpec::Unsafe | EffectSpec::Idempotent | EffectSpec::ReadOnly => Ok(()),
    }
}

/// The question whether a call was carried out (D26, D152).
fn question(reconcile: &ReconcileSpec, tool: &ToolSpec) -> Checked {
    if reconcile.method != "GET" {
        return refuse("method", "must be \"GET\": a question changes nothing");
    }
    let names = http::template(&reconcile.url, tool.parameters.as_ref())?;
    if names.is_empty() {
        return refuse(
            "url",
            "must name the call it asks about: {idempotency_key}, or an argument that no two calls share",
        );
    }
    http::headers(&reconcile.headers)?;
    if let Err(why) = Path::parse(&reconcile.found) {
        return refuse("found", why);
    }
    span("timeout", reconcile.timeout)
}

pub(super) fn server(name: &str, server: &McpServerSpec) -> Checked {
    if !is_name(name) {
        return refuse(name, NAME_RULE);
    }
    let at = |e: Invalid| e.under(name);
    http::plain(&server.url).map_err(at)?;
    http::headers(&server.headers).map_err(at)?;
    span("timeout", server.timeout).map_err(at)
}
