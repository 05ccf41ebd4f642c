//! What the types of a declaration cannot say, and its digest. Every refusal names its field.

mod http;
mod tool;

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use iop_shared::ids::NodeId;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::{AgentSpec, ApprovalsSpec, BudgetsSpec, RetentionSpec, RetrySpec, Span};
use crate::agents::policy::Policy;
use crate::agents::prices::{Prices, spend};
use crate::config::{hex, is_key_name};

/// A declaration that cannot be run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct Invalid {
    /// The path from the declaration's root, such as `tools[1].retry.max_attempts`.
    pub field: String,
    /// Goes on from the field's name, such as "must be at least 1".
    pub message: String,
}

impl Invalid {
    pub(crate) fn at(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            message: message.into(),
        }
    }

    /// The same under a parent.
    fn under(self, parent: &str) -> Self {
        Self {
            field: format!("{parent}.{}", self.field),
            message: self.message,
        }
    }
}

pub(super) type Checked = Result<(), Invalid>;

fn refuse(field: impl Into<String>, message: impl Into<String>) -> Checked {
    Err(Invalid::at(field, message))
}

/// Whether a text may name an agent, a tool or an MCP server.
pub fn is_name(name: &str) -> bool {
    // Names of one shape everywhere.
    NodeId::new(name).is_ok()
}

const NAME_RULE: &str = "must match [A-Za-z0-9._-]{1,64}";

/// Longest model name, in bytes.
const MODEL_MAX: usize = 512;

/// As long as a duration may be written.
const LONGEST: Duration = Duration::from_secs(100 * 366 * 24 * 3600);

/// Checks a declaration by itself: whether its model, its agents or its keys exist is not known here.
///
/// # Errors
/// The first rule that is broken, at its field.
pub fn check(spec: &AgentSpec, prices: &Prices) -> Result<(), Invalid> {
    model(&spec.model)?;
    lasting(spec)?;
    span("deadline", spec.deadline)?;
    budgets(&spec.budgets, &spec.model, prices).map_err(|e| e.under("budgets"))?;
    approvals(&spec.approvals).map_err(|e| e.under("approvals"))?;
    for (name, server) in &spec.mcp_servers {
        tool::server(name, server).map_err(|e| e.under("mcp_servers"))?;
    }
    for (i, it) in spec.tools.iter().enumerate() {
        let at = |e: Invalid| e.under(&format!("tools[{i}]"));
        tool::tool(it, spec).map_err(at)?;
        if spec.tools[..i].iter().any(|other| other.name == it.name) {
            return refuse("name", format!("tool {:?} is declared twice", it.name)).map_err(at);
        }
    }
    rules(spec)?;
    Policy::compile(spec)?;
    retention(&spec.retention).map_err(|e| e.under("retention"))?;
    if let Some(policy) = &spec.model_retry {
        retry(policy).map_err(|e| e.under("model_retry"))?;
    }
    parameters(spec)
}

fn model(model: &str) -> Checked {
    if model.is_empty() || model.len() > MODEL_MAX || model.chars().any(char::is_control) {
        return refuse("model", "must be 1 to 512 bytes of printable text");
    }
    if model.starts_with("agent:") {
        return refuse(
            "model",
            "an agent is no model of an agent; declare a tool with `agent = { name = … }`",
        );
    }
    Ok(())
}

/// A pause must outlive the process (D4, D76).
fn lasting(spec: &AgentSpec) -> Checked {
    const WHY: &str = "needs durable = true: who waits for a person must survive a restart";
    if spec.durable {
        return Ok(());
    }
    if !spec.approval_rules.is_empty() {
        return refuse("approval_rules", WHY);
    }
    if spec.approvals.default != "never" {
        return refuse("approvals.default", WHY);
    }
    Ok(())
}

fn span(field: &str, span: Option<Span>) -> Checked {
    match span {
        Some(Span(it)) if it.is_zero() => refuse(field, "must be longer than zero"),
        Some(Span(it)) if it > LONGEST => refuse(field, "must be at most a hundred years"),
        Some(_) | None => Ok(()),
    }
}

fn budgets(budgets: &BudgetsSpec, model: &str, prices: &Prices) -> Checked {
    for (field, limit) in [
        ("turns", budgets.turns),
        ("tool_calls", budgets.tool_calls),
        ("same_call", budgets.same_call),
        ("tokens", budgets.tokens),
        ("recovery_attempts", budgets.recovery_attempts.map(u64::from)),
    ] {
        if limit == Some(0) {
            return refuse(field, "must be at least 1; leave it out for the default");
        }
    }
    let Some(text) = &budgets.spend else {
        return Ok(());
    };
    match spend(text) {
        None => refuse(
            "spend",
            "must be a decimal text such as \"2.50\", with at most 12 decimals and at most 18000000",
        ),
        Some(0) => refuse("spend", "must be more than zero"),
        Some(_) if prices.get(model).is_none() => refuse(
            "spend",
            format!("needs a price: [prices.{model:?}] with input and output per million tokens"),
        ),
        Some(_) => Ok(()),
    }
}

fn approvals(approvals: &ApprovalsSpec) -> Checked {
    span("expires", approvals.expires)?;
    for (i, name) in approvals.deciders.iter().enumerate() {
        let field = format!("deciders[{i}]");
        if !is_key_name(name) {
            return refuse(field, "must be a key's name: [A-Za-z0-9._-]{1,64}");
        }
        if approvals.deciders[..i].contains(name) {
            return refuse(field, format!("{name:?} is named twice"));
        }
    }
    Ok(())
}

/// The expressions are the policy's to judge.
fn rules(spec: &AgentSpec) -> Checked {
    for (i, rule) in spec.approval_rules.iter().enumerate() {
        let field = format!("approval_rules[{i}].tool");
        if rule.tool != "*" && spec.tools.iter().all(|tool| tool.name != rule.tool) {
            return refuse(field, format!("no tool {:?} is declared", rule.tool));
        }
        let before = |other: &super::ApprovalRule| other.tool == "*" || other.tool == rule.tool;
        if let Some(first) = spec.approval_rules[..i].iter().position(before) {
            return refuse(
                field,
                format!(
                    "is never reached: approval_rules[{first}] decides about this tool; join them with ||"
                ),
            );
        }
    }
    Ok(())
}

fn retention(retention: &RetentionSpec) -> Checked {
    if retention.keep_checkpoints == Some(0) {
        return refuse(
            "keep_checkpoints",
            "must be at least 1: the newest one is the run",
        );
    }
    span("ttl", retention.ttl)
}

/// As the runtime will ask for it (D147).
fn retry(retry: &RetrySpec) -> Checked {
    if retry.max_attempts == 0 {
        return refuse("max_attempts", "must be at least 1: the first attempt counts");
    }
    span("initial", retry.initial)?;
    span("max", retry.max)?;
    let (initial, max) = retry.pauses();
    if initial > max {
        let field = if retry.max.is_some() { "max" } else { "initial" };
        return refuse(
            field,
            "the first pause must not be longer than the longest, 60s when `max` is absent",
        );
    }
    if !(0.0..=1.0).contains(&retry.jitter) {
        return refuse("jitter", "must be from 0 to 1");
    }
    Ok(())
}

/// What every model request is made of by the edge itself.
const OWN: [&str; 6] = ["model", "messages", "stream", "stream_options", "tools", "n"];

/// What makes the provider call tools by itself, or in a way that is not read here.
const HOSTED: [&str; 5] = [
    "web_search_options",
    "functions",
    "function_call",
    "plugins",
    "mcp_servers",
];

fn parameters(spec: &AgentSpec) -> Checked {
    for name in spec.parameters.keys() {
        let field = format!("parameters.{name}");
        if name == "tools" {
            return refuse(
                field,
                "is made of the declared tools; a tool that runs at the provider would act without being recorded, approved or \
                 recovered",
            );
        }
        if OWN.contains(&name.as_str()) {
            return refuse(field, "is set by the edge in every request of a run");
        }
        if HOSTED.contains(&name.as_str()) {
            return refuse(
                field,
                "lets the provider call tools, and what runs there is not recorded, approved or recovered",
            );
        }
    }
    Ok(())
}

/// The stored form of a declaration: JSON with its keys sorted, and the SHA-256 of these bytes in hex. Two texts of one
/// declaration, in TOML or in JSON, have the same.
pub fn canonical(spec: &AgentSpec) -> (Bytes, String) {
    let mut text = String::new();
    // A declaration is made of texts, numbers and lists of them: it has a JSON form.
    write(&serde_json::to_value(spec).unwrap_or_default(), &mut text);
    let digest = hex(&Sha256::digest(text.as_bytes()).into());
    (Bytes::from(text), digest)
}

fn write(value: &Value, out: &mut String) {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            out.push_str(&value.to_string())
        }
        Value::Array(items) => {
            list(out, ['[', ']'], items, write);
        }
        Value::Object(members) => {
            // Whatever order the map keeps.
            let sorted: BTreeMap<&String, &Value> = members.iter().collect();
            list(out, ['{', '}'], sorted, |(key, value), out| {
                out.push_str(&Value::from(key.as_str()).to_string());
                out.push(':');
                write(value, out);
            });
        }
    }
}

fn list<T>(
    out: &mut String,
    [open, close]: [char; 2],
    items: impl IntoIterator<Item = T>,
    each: impl Fn(T, &mut String),
) {
    out.push(open);
    for (i, item) in items.into_iter().enumerate() {
        if i > 0 {
            out.push(',');
        }
        each(item, out);
    }
    out.push(close);
}

#[cfg(test)]
mod tests;
