//! A version of an agent, compiled: its graph, and what its nodes need.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{Graph, GraphErrors, NoEffect};
use iop_durable::patterns::react;
use iop_durable::record::{Backoff, Effect, RetryPolicy};
use iop_durable::store::Store;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use super::action::act;
use super::journal::{REQUEST_INPUT, step_name};
use super::policy::Policy;
use super::prices::Price;
use super::reason::reason;
use super::spec::{AgentSpec, BackoffSpec, EffectSpec, RetrySpec, ToolSpec};
use super::state::AgentState;
use super::tools::arguments::Members;
use super::tools::schema::Arguments;
use crate::app::App;
use crate::metrics::Metrics;
use crate::runs::catalog::Version;
use crate::runs::live::Live;

/// Turns of an agent that names no limit.
const TURNS: u64 = 100;
/// A budget without a limit.
pub(crate) const UNLIMITED: u64 = u64::MAX;

/// The budgets of an agent beside `turns` (D251).
pub(crate) const TOOL_CALLS: &str = "tool_calls";
pub(crate) const SAME_CALL: &str = "same_call";
pub(crate) const TOKENS: &str = "tokens";
pub(crate) const SPEND: &str = "spend";
/// Money is counted in units of 1e-12.
pub(crate) const SPEND_DECIMALS: u8 = 12;

/// What of the process an agent's nodes work with.
pub(crate) struct Room {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) live: Arc<Live>,
    pub(crate) metrics: Arc<Metrics>,
    /// Whether a pause outlives the process.
    pub(crate) durable: bool,
    /// Set once the process serves.
    pub(crate) app: Arc<std::sync::OnceLock<Weak<App>>>,
}

impl Room {
    /// # Errors
    /// `unavailable` while the process starts or ends.
    pub(crate) fn app(&self) -> Result<Arc<App>, Failure> {
        let app = self.app.get().and_then(Weak::upgrade);
        app.ok_or_else(Self::ending)
    }

    /// The failure of a node whose process is ending.
    pub(crate) fn ending() -> Failure {
        Failure::new(FailureKind::Unavailable, "this process is ending")
    }
}

/// A version with what its nodes need.
pub(crate) struct Program {
    pub(crate) version: Arc<Version>,
    pub(crate) room: Arc<Room>,
    pub(crate) policy: Policy,
    pub(crate) price: Option<Price>,
    /// By tool.
    arguments: HashMap<String, Arguments>,
    /// The list of tools of every request.
    pub(crate) tools: Option<Box<RawValue>>,
}

/// Why a stored declaration cannot be compiled.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Uncompiled(String);

#[derive(Serialize)]
struct ToolEntry<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    function: FunctionEntry<'a>,
}

#[derive(Serialize)]
struct FunctionEntry<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<&'a str>,
    parameters: &'a Value,
}

impl Program {
    /// # Errors
    /// When the declaration was checked by other rules than these.
    pub(crate) fn new(
        version: Arc<Version>,
        price: Option<Price>,
        room: Arc<Room>,
    ) -> Result<Self, Uncompiled> {
        let spec = Arc::clone(&version.spec);
        let policy = Policy::compile(&spec).map_err(|e| Uncompiled(format!("{}: {}", e.field, e.message)))?;
        let mut arguments = HashMap::new();
        for tool in &spec.tools {
            if let Some(schema) = &tool.parameters {
                let compiled = Arguments::compile(schema)
                    .map_err(|e| Uncompiled(format!("tools.{}.parameters: {e}", tool.name)))?;
                arguments.insert(tool.name.clone(), compiled);
            }
        }
        let mut program = Self {
            tools: None,
            version,
            room,
            policy,
            price,
            arguments,
        };
        program.tools = program.tool_list().map_err(|e| Uncompiled(e.to_string()))?;
        Ok(program)
    }

    pub(crate) fn spec(&self) -> &AgentSpec {
        &self.version.spec
    }

    pub(crate) fn tool(&self, name: &str) -> Option<&ToolSpec> {
        self.spec().tools.iter().find(|tool| tool.name == name)
    }

    /// # Errors
    /// The path and the rule that the arguments break; never a value.
    pub(crate) fn check_arguments(&self, tool: &str, arguments: &str) -> Result<(), String> {
        match self.arguments.get(tool) {
            Some(schema) => schema.check(arguments),
            None => Members::parse(arguments.as_bytes()).map(|_| ()),
        }
    }

    /// Whether the model may ask a person (D74). A pause that its process takes along is not offered.
    pub(crate) fn asks_people(&self) -> bool {
        self.spec().human_input && self.room.durable
    }

    fn tool_list(&self) -> serde_json::Result<Option<Box<RawValue>>> {
        let any = serde_json::json!({ "type": "object" });
        let question = serde_json::json!({
            "type": "object",
            "properties": {
                "prompt": { "type": "string", "description": "What the person is asked." },
                "schema": { "type": "object", "description": "JSON Schema of the answer; a text when absent." },
            },
            "required": ["prompt"],
        });
        let entry = |name, description, parameters| ToolEntry {
            kind: "function",
            function: FunctionEntry {
                name,
                description,
                parameters,
            },
        };
        let mut entries: Vec<ToolEntry<'_>> = self
            .spec()
            .tools
            .iter()
            .map(|tool| {
                let parameters = tool.parameters.as_ref().unwrap_or(&any);
                entry(tool.name.as_str(), tool.description.as_deref(), parameters)
            })
            .collect();
        if self.asks_people() {
            let description = "Asks a person and waits for the answer.";
            entries.push(entry(REQUEST_INPUT, Some(description), &question));
        }
        if entries.is_empty() {
            return Ok(None);
        }
        to_raw_value(&entries).map(Some)
    }

    /// The graph that runs of this version are pinned to.
    ///
    /// # Errors
    /// What `compile` finds; nothing, for a declaration that was checked.
    pub(crate) fn graph(self: Arc<Self>) -> Result<Graph<AgentState, NoEffect>, GraphErrors> {
        let version = Arc::clone(&self.version);
        let spec = &version.spec;
        let budgets = &spec.budgets;
        let (thinks, acts) = (Arc::clone(&self), self);
        let limit = |n: Option<u64>| n.unwrap_or(UNLIMITED);
        let spend = budgets.spend.as_deref().and_then(super::prices::spend);
        let mut builder = react(
            &version.name,
            version.version,
            move |ctx, state| reason(Arc::clone(&thinks), ctx, state),
            move |ctx, state| act(Arc::clone(&acts), ctx, state),
            |state: &AgentState| state.pending > 0,
            budgets.turns.unwrap_or(TURNS),
        )
        .kind("agent")
        .declared(&version.digest)
        .step_name(|_, activation| step_name(activation))
        .output(|state: &AgentState| {
            to_raw_value(state.answer.as_deref().unwrap_or_default()).map_err(|e| e.to_string())
        })
        .usage(|state: &AgentState| to_raw_value(&state.usage).map_err(|e| e.to_string()))
        .budget(TOOL_CALLS, limit(budgets.tool_calls))
        .budget(SAME_CALL, limit(budgets.same_call))
        .budget(TOKENS, limit(budgets.tokens))
        .budget(SPEND, limit(spend))
        .max_steps(u64::MAX);
        if let Some(attempts) = budgets.recovery_attempts {
            builder = builder.recovery_attempts(attempts);
        }
        if let Some(keep) = spec.retention.keep_checkpoints {
            builder = builder.keep_checkpoints(keep);
        }
        if spec.retention.delete_on_success {
            builder = builder.delete_on_success();
        }
        builder.compile()
    }
}

/// The engine's word for a declared effect.
pub(crate) const fn effect(spec: EffectSpec) -> Effect {
    match spec {
        EffectSpec::ReadOnly => Effect::ReadOnly,
        EffectSpec::Idempotent => Effect::Idempotent,
        EffectSpec::Unsafe => Effect::Unsafe,
    }
}

/// The engine's policy for a declared retry; `label` names its owner.
pub(crate) fn retry_policy(label: &str, spec: &RetrySpec) -> RetryPolicy {
    let (initial, max) = spec.pauses();
    RetryPolicy {
        label: label.to_owned(),
        max_attempts: spec.max_attempts,
        backoff: match spec.backoff {
            BackoffSpec::Fixed => Backoff::Fixed,
            BackoffSpec::Exponential => Backoff::Exponential,
        },
        initial,
        max,
        multiplier_permille: 2000,
        // From 0 to 1, as checked: at most 1000.
        jitter_permille: (spec.jitter * 1000.0).round() as u16,
    }
}

/// The retry of an agent's model when it declares none (durable-api §8).
pub(crate) fn model_retry(spec: &AgentSpec) -> RetryPolicy {
    match &spec.model_retry {
        Some(retry) => retry_policy("model", retry),
        None => RetryPolicy {
            label: "model".to_owned(),
            max_attempts: 3,
            backoff: Backoff::Exponential,
            initial: Duration::from_secs(1),
            max: Duration::from_secs(60),
            multiplier_permille: 2000,
            jitter_permille: 0,
        },
    }
}
