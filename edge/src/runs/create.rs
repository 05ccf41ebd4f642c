//! Acceptance of runs: who may start what, with which limits (D10, D25, D59).

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use iop_durable::graph::Deadline;
use iop_durable::ids::RunId;
use iop_durable::patterns::TURNS;
use iop_durable::payload::Digest;
use iop_durable::record::Lineage;
use iop_durable::runner::{RunError, Start};
use iop_durable::store::{Created, IdempotencyKey, StoreError};
use serde_json::Value;
use serde_json::value::RawValue;

use super::catalog::Version;
use super::people::ANYBODY;
use super::problem::{Code, Problem};
use super::{Engine, Runs};
use crate::agents::prices::spend;
use crate::agents::program::{SAME_CALL, SPEND, TOKENS, TOOL_CALLS};
use crate::agents::state::AgentState;
use crate::agents::transcript::conversation;
use crate::http::auth::Caller;

/// What a caller asks for.
pub(crate) struct CreateRun {
    pub(crate) agent: String,
    pub(crate) input: Box<RawValue>,
    pub(crate) run_id: Option<String>,
    pub(crate) metadata: BTreeMap<String, String>,
    /// In place of the agent's.
    pub(crate) deadline: Option<Deadline>,
    /// In place of the agent's, by name.
    pub(crate) budgets: BTreeMap<String, Value>,
    /// In place of the agent's.
    pub(crate) durable: Option<bool>,
    /// The caller's key, and SHA-256 of method, path and body.
    pub(crate) idempotency: Option<(String, Digest)>,
    pub(crate) traceparent: Option<String>,
}

/// A run that is durable, or as durable as was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Made {
    pub(crate) run: RunId,
    /// Whether its engine is the durable one.
    pub(crate) durable: bool,
    /// The same key, or the same id and input, made it before.
    pub(crate) replayed: bool,
}

/// A run that a run starts.
pub(crate) struct Child {
    pub(crate) run: RunId,
    pub(crate) agent: String,
    /// JSON.
    pub(crate) input: Bytes,
    pub(crate) lineage: Lineage,
    pub(crate) owner: Option<String>,
    pub(crate) durable: bool,
}

impl Runs {
    /// Accepts a run: it is stored when this returns (D25).
    ///
    /// # Errors
    /// `agent_not_found`, `permission_denied`, `invalid_request`, `invalid_encoding`, `budget_invalid`, `payload_too_large`,
    /// `idempotency_conflict`, `unsupported_guarantee`; the store's.
    pub(crate) async fn create(&self, caller: &Caller, create: CreateRun) -> Result<Made, Problem> {
        let owner = caller.name().map(|name| name.to_string());
        let idempotency = create.idempotency.map(|(key, request)| IdempotencyKey {
            scope: owner.clone().unwrap_or_else(|| ANYBODY.to_owned()),
            key,
            request,
        });
        // What was made is answered whatever became of its agent.
        for engine in self.engines() {
            if let Some(key) = &idempotency
                && let Some(made) = made_by(engine, key).await?
            {
                return Ok(made);
            }
        }
        let version = self.catalog().newest(&create.agent).await?;
        if !caller.may_use(&version.spec.model) {
            let why = "This key may not use the model of this agent.";
            return Err(Problem::new(Code::PermissionDenied, why).at("agent"));
        }
        let run = create
            .run_id
            .as_deref()
            .map(|id| {
                RunId::new(id).map_err(|e| Problem::new(Code::InvalidEncoding, e.to_string()).at("run_id"))
            })
            .transpose()?;
        let durable = match (create.durable, &run) {
            (Some(durable), _) => durable,
            // The same request once more is about the run that it made, whatever its agent says since.
            (None, Some(run)) => self.holder(run).await?.unwrap_or(version.spec.durable),
            (None, None) => version.spec.durable,
        };
        if !durable && pauses(&version) {
            let why = "Runs of this agent wait for approvals; they cannot be without durability.";
            return Err(Problem::new(Code::UnsupportedGuarantee, why).at("durable"));
        }
        // It becomes a result of the run's own: one that could not be stored then is not accepted.
        let (bytes, limit) = (create.input.get().len() as u64, self.settings().max_result);
        if bytes > limit {
            let why = format!("input is {bytes} bytes, at most {limit} are allowed.");
            return Err(Problem::new(Code::PayloadTooLarge, why).at("input"));
        }
        conversation(&create.input).map_err(|why| Problem::invalid("input", format!("input: {why}.")))?;
        let mut start = Start::new(AgentState::of_input(create.input));
        start.run = run;
        start.metadata = create.metadata;
        start.deadline = create
            .deadline
            .or(version.spec.deadline.map(|span| Deadline::In(span.0)));
        start.budgets = budgets(
            &version,
            &create.budgets,
            self.catalog().has_price(&version.spec.model),
        )?;
        start.traceparent = create.traceparent;
        start.idempotency = idempotency;
        start.owner = owner;
        // One name is one run: what both engines could make at once is made one after the other.
        let (mut _together, mut _alone) = (None, None);
        if start.run.is_some() || start.idempotency.is_some() {
            if durable {
                _together = Some(self.names.read().await);
            } else {
                _alone = Some(self.names.write().await);
            }
            let other = self.engine(!durable);
            if let Some(key) = &start.idempotency
                && let Some(made) = made_by(other, key).await?
            {
                return Ok(made);
            }
            if let Some(run) = &start.run
                && holds(other, run).await?
            {
                let why = "There is another run of this id.";
                let problem = Problem::new(Code::IdempotencyConflict, why).at("run_id");
                return Err(problem.of(run.as_str()));
            }
        }
        self.accept(&version, durable, start).await
    }

    /// Accepts a run that another run starts; the same child twice is one run.
    ///
    /// # Errors
    /// As `create`.
    pub(crate) async fn start_child(&self, child: &Child) -> Result<(), Problem> {
        // What was started is there, whatever became of its agent since.
        match self.engine(child.durable).store.load(&child.run).await {
            Ok(made) if made.head.lineage == child.lineage => return Ok(()),
            Ok(_) | Err(StoreError::NotFound) => {}
            Err(error) => return Err(error.into()),
        }
        let version = self.catalog().newest(&child.agent).await?;
        if !child.durable && pauses(&version) {
            let why = "Runs of this agent wait for approvals; a run without durability cannot start one.";
            return Err(Problem::new(Code::UnsupportedGuarantee, why));
        }
        let text = std::str::from_utf8(&child.input)
            .map_err(|_| Problem::new(Code::InvalidEncoding, "input: is not valid UTF-8").at("input"))?;
        let input = RawValue::from_string(text.to_owned())
            .map_err(|_| Problem::invalid("input", "input: is no JSON."))?;
        let mut start = Start::new(AgentState::of_input(input)).run(child.run.clone());
        start.parent = Some(child.lineage.clone());
        start.owner.clone_from(&child.owner);
        start.deadline = version.spec.deadline.map(|span| Deadline::In(span.0));
        self.accept(&version, child.durable, start).await.map(|_| ())
    }

    /// Whether the run of this id is durable; `None` when there is none.
    async fn holder(&self, run: &RunId) -> Result<Option<bool>, Problem> {
        for engine in self.engines() {
            if holds(engine, run).await? {
                return Ok(Some(engine.durable));
            }
        }
        Ok(None)
    }

    async fn accept(
        &self,
        version: &Arc<Version>,
        durable: bool,
        start: Start<AgentState>,
    ) -> Result<Made, Problem> {
        let engine = self.engine(durable);
        let compiled = engine.shelf.compiled(version)?;
        let run = start.run.clone();
        match compiled.runner.accept(start).await {
            Ok(accepted) => Ok(Made {
                run: accepted.run,
                durable,
                replayed: accepted.replayed,
            }),
            // An id is never used twice (D228).
            Err(RunError::Deleted) => {
                let problem =
                    Problem::new(Code::IdempotencyConflict, "A run of this id was deleted.").at("run_id");
                Err(match run {
                    Some(run) => problem.of(run.as_str()),
                    None => problem,
                })
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// The run that this key made before.
///
/// # Errors
/// `idempotency_conflict` when that was another request; the store's.
async fn made_by(engine: &Engine, key: &IdempotencyKey) -> Result<Option<Made>, Problem> {
    match engine.store.keyed(key).await? {
        Some(Created::Replayed { run }) => Ok(Some(Made {
            run,
            durable: engine.durable,
            replayed: true,
        })),
        Some(_) => Err(RunError::Conflict.into()),
        None => Ok(None),
    }
}

/// Whether this id names a run of the engine, or did.
async fn holds(engine: &Engine, run: &RunId) -> Result<bool, Problem> {
    match engine.store.load(run).await {
        Ok(_) | Err(StoreError::Deleted | StoreError::Corrupt { .. }) => Ok(true),
        Err(StoreError::NotFound) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Whether runs of this version may wait for a decision that a process must not take along (D76).
fn pauses(version: &Version) -> bool {
    let spec = &version.spec;
    spec.approvals.default != "never" || spec.approval_rules.iter().any(|rule| rule.when != "never")
}

/// The limits of a run, over those of its agent.
fn budgets(
    version: &Version,
    asked: &BTreeMap<String, Value>,
    has_price: bool,
) -> Result<BTreeMap<String, u64>, Problem> {
    let mut limits = BTreeMap::new();
    for (name, value) in asked {
        let invalid = |why: &str| {
            let field = format!("budgets.{name}");
            Problem::new(Code::BudgetInvalid, format!("{field}: {why}.")).at(field)
        };
        let limit = match name.as_str() {
            TURNS | TOOL_CALLS | SAME_CALL | TOKENS => value.as_u64(),
            SPEND if !has_price => {
                return Err(invalid(&format!("model {:?} has no price", version.spec.model)));
            }
            SPEND => match value {
                Value::String(text) => spend(text),
                Value::Number(number) => spend(&number.to_string()),
                Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
            },
            _ => return Err(invalid("there is no such budget")),
        };
        match limit {
            Some(limit) if limit > 0 => limits.insert(name.clone(), limit),
            Some(_) | None => return Err(invalid("must be a number above 0")),
        };
    }
    Ok(limits)
}
