//! Agents that the scenarios share: one that asks nobody, one that does, and one that gives up at once.

use super::Stubs;
use crate::llm::MODEL;

/// Asks nobody: `lookup` (read only), `reserve`, `charge`, `confirm` (idempotent), `deploy`, `launch` (unsafe; `launch` over MCP).
pub const WORKER: &str = "worker";
/// The same tools; `deploy`, `launch` and charges over 100 need an approval.
pub const GUARDED: &str = "guarded";

/// Like `WORKER`, but a model's error is not tried again: its run fails and may be resumed.
pub const FRAGILE: &str = "fragile";

/// All of them, as TOML.
pub fn all(stubs: &Stubs) -> String {
    let retried = "model_retry = { max_attempts = 2";
    let fragile = agent(stubs, FRAGILE, "").replace(retried, "model_retry = { max_attempts = 1");
    [agent(stubs, WORKER, ""), agent(stubs, GUARDED, RULES), fragile].concat()
}

const RULES: &str = r#"
[[agents.guarded.approval_rules]]
tool = "deploy"
when = "always"
[[agents.guarded.approval_rules]]
tool = "launch"
when = "always"
[[agents.guarded.approval_rules]]
tool = "charge"
when = "args.amount > 100"
"#;

/// One agent with every tool.
pub fn agent(stubs: &Stubs, name: &str, rules: &str) -> String {
    let text = r#"
[agents.NAME]
model = "MODEL"
instructions = "You are tested."
durable = true
model_retry = { max_attempts = 2, backoff = "fixed", initial = "100ms" }
RULES
[[agents.NAME.tools]]
name = "lookup"
parameters = { type = "object", properties = { sku = { type = "string" } }, required = ["sku"] }
http = { method = "GET", url = "TOOLS/items/{sku}", timeout = "60s" }
effect = "read_only"

[[agents.NAME.tools]]
name = "reserve"
http = { method = "POST", url = "TOOLS/reserve" }
effect = "idempotent"

[[agents.NAME.tools]]
name = "charge"
parameters = { type = "object", properties = { amount = { type = "number" } }, required = ["amount"] }
http = { method = "POST", url = "TOOLS/charge", timeout = "60s" }
effect = "idempotent"
retry = { max_attempts = 2, backoff = "fixed", initial = "100ms" }

[[agents.NAME.tools]]
name = "confirm"
http = { method = "POST", url = "TOOLS/confirm" }
effect = "idempotent"

[[agents.NAME.tools]]
name = "transfer"
http = { method = "POST", url = "TOOLS/transfer", timeout = "60s" }
reconcile = { url = "TOOLS/found/transfer?key={idempotency_key}", found = "$.id" }

[[agents.NAME.tools]]
name = "deploy"
http = { method = "POST", url = "TOOLS/deploy", timeout = "60s" }

[[agents.NAME.tools]]
name = "launch"
mcp = { server = "ops", tool = "launch" }

[agents.NAME.mcp_servers.ops]
url = "MCP"
timeout = "60s"
"#;
    text.replace("NAME", name)
        .replace("MODEL", MODEL)
        .replace("RULES", rules)
        .replace("TOOLS", &stubs.tools.url(""))
        .replace("MCP", &stubs.mcp.url())
}
