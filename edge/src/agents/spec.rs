//! The declaration of an agent (durable-api §5): the same shape as TOML in the configuration and as JSON over REST.

pub mod check;
mod json;
pub(crate) mod notes;
mod retry;

use std::collections::BTreeMap;
use std::time::Duration;

use iop_shared::config::Period;
use iop_shared::label_enum;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::schema::words_schema;

words_schema!(OnInvalidArguments, OnDeny, OnError, EffectSpec, BackoffSpec);

/// A duration with a unit, such as `"10s"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ToSchema)]
#[schema(value_type = String, example = "10s")]
pub struct Span(pub Duration);

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        Period::deserialize(d).map(|period| Self(period.0))
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(&humantime::format_duration(self.0))
    }
}

/// An agent: a model, what it is told, its tools, and its limits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentSpec {
    /// A model that the gateway routes.
    pub model: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// The system message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instructions: Option<String>,
    /// Whether its runs are stored (D63). Without it they live and end with the process.
    #[serde(default)]
    pub durable: bool,
    /// Of each run, from its acceptance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Span>,
    #[serde(default)]
    pub budgets: BudgetsSpec,
    #[serde(default)]
    pub approvals: ApprovalsSpec,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub approval_rules: Vec<ApprovalRule>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<ToolSpec>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub mcp_servers: BTreeMap<String, McpServerSpec>,
    #[serde(default)]
    pub retention: RetentionSpec,
    /// When an answered 429 or 5xx of the model is tried again; 3 attempts, exponential from 1 s, when absent.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "retry::retry"
    )]
    #[schema(value_type = Option<retry::Retry>)]
    pub model_retry: Option<RetrySpec>,
    /// Whether the model has the tool `request_input`.
    #[serde(default = "yes")]
    pub human_input: bool,
    /// Members of every model request, such as `temperature`.
    #[serde(
        default,
        skip_serializing_if = "Map::is_empty",
        deserialize_with = "json::object"
    )]
    #[schema(value_type = Object)]
    pub parameters: Map<String, Value>,
}

const fn yes() -> bool {
    true
}

/// Limits of one run (D68, D251).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BudgetsSpec {
    /// Model turns; 100 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turns: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<u64>,
    /// How often one tool may be called with the same arguments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub same_call: Option<u64>,
    /// Input and output tokens together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// In the currency of `[prices]`, a decimal string such as `"2.50"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spend: Option<String>,
    /// How often one call is repeated after lost workers; 10 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery_attempts: Option<u32>,
}

/// Who has to approve what.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ApprovalsSpec {
    /// For tools that no rule names: `never`, `always`, or a CEL expression over `args` and `tool`.
    pub default: String,
    pub on_invalid_arguments: OnInvalidArguments,
    /// How long a decision may take; without it for ever.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires: Option<Span>,
    pub on_deny: OnDeny,
    /// Names of the keys that may decide; empty: every operator.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub deciders: Vec<String>,
}

impl Default for ApprovalsSpec {
    fn default() -> Self {
        Self {
            default: "never".to_owned(),
            on_invalid_arguments: OnInvalidArguments::Require,
            expires: None,
            on_deny: OnDeny::TellModel,
            deciders: Vec::new(),
        }
    }
}

label_enum! {
    /// What a gated tool's call does whose arguments no rule can judge.
    pub enum OnInvalidArguments {
        /// A person decides.
        Require => "require",
        /// The call is refused and the model told so.
        Refuse => "refuse",
    }
}

label_enum! {
    /// What a denial or an expired approval does.
    pub enum OnDeny {
        TellModel => "tell_model",
        FailRun => "fail_run",
    }
}

label_enum! {
    /// What a tool's failure does.
    #[derive(Default)]
    pub enum OnError {
        #[default]
        TellModel => "tell_model",
        FailRun => "fail_run",
    }
}

/// One rule; the first that names the tool decides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ApprovalRule {
    /// A tool's name, or `*`.
    pub tool: String,
    /// `always`, `never`, or a CEL expression over `args` and `tool`.
    pub when: String,
}

/// One tool: exactly one of `http`, `mcp` and `agent`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ToolSpec {
    /// Required; read without it so that a provider's own kind of tool is refused as that.
    #[serde(default)]
    #[schema(required)]
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// JSON Schema of the arguments.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "json::value"
    )]
    #[schema(value_type = Option<Object>)]
    pub parameters: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpSpec>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mcp: Option<McpToolSpec>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentToolSpec>,
    /// What repeating a call does; `unsafe` when not said.
    #[serde(default)]
    pub effect: EffectSpec,
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "retry::retry"
    )]
    #[schema(value_type = Option<retry::Retry>)]
    pub retry: Option<RetrySpec>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reconcile: Option<ReconcileSpec>,
    #[serde(default)]
    pub on_error: OnError,
    /// OpenAI's word; only `function` runs here.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
}

label_enum! {
    /// What repeating a call does outside (D24).
    #[derive(Default)]
    pub enum EffectSpec {
        ReadOnly => "read_only",
        Idempotent => "idempotent",
        #[default]
        Unsafe => "unsafe",
    }
}

/// A call over HTTP. `{name}` in the URL is an argument, percent-encoded; `{idempotency_key}` is the call's key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HttpSpec {
    #[serde(default = "get")]
    pub method: String,
    pub url: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, HeaderText>,
    /// From the dispatch to the last byte; 60 s when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Span>,
}

fn get() -> String {
    "GET".to_owned()
}

/// A header's value: text, or where a secret stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "expected a text, { env = \"NAME\" } or { file = \"PATH\" }"
)]
pub enum HeaderText {
    Plain(String),
    Env(EnvRef),
    File(FileRef),
}

/// An environment variable of the edge.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EnvRef {
    pub env: String,
}

/// A file on the edge's machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FileRef {
    pub file: String,
}

/// A tool of an MCP server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct McpToolSpec {
    /// A name under `mcp_servers`.
    pub server: String,
    pub tool: String,
}

/// An MCP server, spoken to over streamable HTTP.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct McpServerSpec {
    pub url: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, HeaderText>,
    /// Of one call, all of it; 60 s when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Span>,
}

/// Another agent: the call is a run of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentToolSpec {
    pub name: String,
}

/// When a call is tried again (D147).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RetrySpec {
    /// In all, from 1.
    pub max_attempts: u32,
    #[serde(default)]
    pub backoff: BackoffSpec,
    /// 1 s when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial: Option<Span>,
    /// 60 s when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<Span>,
    /// The part of a pause, from 0 to 1, that may be cut off it.
    #[serde(default)]
    pub jitter: f64,
}

impl RetrySpec {
    /// The first pause and the longest one, defaults filled in.
    pub fn pauses(&self) -> (Duration, Duration) {
        let or = |span: Option<Span>, seconds| span.map_or(Duration::from_secs(seconds), |it| it.0);
        (or(self.initial, 1), or(self.max, 60))
    }
}

label_enum! {
    /// How the pause between attempts grows.
    #[derive(Default)]
    pub enum BackoffSpec {
        #[default]
        Exponential => "exponential",
        Fixed => "fixed",
    }
}

/// How the service is asked whether a call was carried out (D26, D152).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReconcileSpec {
    #[serde(default = "get")]
    pub method: String,
    /// `{idempotency_key}` and arguments are filled in.
    pub url: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, HeaderText>,
    /// A path such as `$.id`: the call was carried out when the answer has something other than null there.
    pub found: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Span>,
}

/// What is kept of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RetentionSpec {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_checkpoints: Option<u32>,
    #[serde(default)]
    pub delete_on_success: bool,
    /// A run that is over is deleted this long after its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl: Option<Span>,
}

/// `[prices."<model>"]`: decimal strings per million tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PriceSpec {
    pub input: String,
    pub output: String,
    #[serde(default)]
    pub cached_input: Option<String>,
}
