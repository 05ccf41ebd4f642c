//! The run object (durable-api §3).

use std::collections::BTreeMap;

use iop_durable::ids::RunId;
use iop_durable::record::{Budget, Inbox, Outcome, RunHead, Status};
use iop_shared::label_enum;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::outcome::OutcomeObject;
use super::waiting::{Open, WaitingOnObject, waiting_on};
use super::words::RunStatus;
use super::{raw, time, written};
use crate::agents::journal::step_name;
use crate::agents::program::{SPEND, UNLIMITED};
use crate::runs::catalog::AGENT;
use crate::schema::words_schema;

label_enum! {
    /// What a run's records promise about effects (D20).
    pub enum Guarantee {
        AtLeastOnceWithStableKeys => "at_least_once_with_stable_keys",
        /// It ends with its process.
        None => "none",
    }
}

label_enum! {
    /// Why nobody works on a run.
    pub enum Blocked {
        DefinitionMissing => "definition_missing",
        RunCorrupt => "run_corrupt",
    }
}
words_schema!(Guarantee, Blocked);

/// The version that a run is pinned to.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct DefinitionObject {
    version: u64,
    digest: String,
}

/// How much of a budget is used. `spend` is in the currency of the prices.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct BudgetObject {
    #[schema(value_type = f64)]
    used: Box<RawValue>,
    /// Null: without a limit.
    #[schema(value_type = Option<f64>)]
    limit: Option<Box<RawValue>>,
}

/// A run.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct RunObject {
    id: String,
    /// `run`.
    object: &'static str,
    /// The front-end: `agent`.
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    flow: Option<String>,
    definition: DefinitionObject,
    #[schema(value_type = RunStatus)]
    pub(crate) status: Status,
    /// From 1; a resume after a failure opens the next.
    life: u32,
    parent_run_id: Option<String>,
    root_run_id: String,
    /// A decimal number.
    pub(crate) revision: String,
    /// What a resume of the run as it is needs.
    resume_token: String,
    /// Of the last lease that it was written under, a decimal number; 0 before the first.
    incarnation: String,
    /// Where it is; null when it is over and cannot go on.
    step: Option<String>,
    /// Empty when it waits for nothing.
    waiting_on: Vec<WaitingOnObject>,
    budgets: BTreeMap<String, BudgetObject>,
    /// How it ended; null while it has not.
    #[schema(value_type = Option<OutcomeObject>)]
    outcome: Option<Box<RawValue>>,
    /// Whether it goes on, or a resume may let it.
    resumable: bool,
    guarantee: Guarantee,
    /// Why nobody works on it, when nobody can.
    blocked: Option<Blocked>,
    metadata: BTreeMap<String, String>,
    cancel_requested_at: Option<String>,
    created_at: String,
    updated_at: String,
    deadline: Option<String>,
}

/// A run whose stored records do not verify. Lists name it beside the others.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct CorruptRun {
    id: String,
    /// `run`.
    object: &'static str,
    /// `run_corrupt`.
    blocked: Blocked,
}

impl CorruptRun {
    pub(crate) fn of(run: &RunId) -> Self {
        Self {
            id: run.as_str().to_owned(),
            object: "run",
            blocked: Blocked::RunCorrupt,
        }
    }
}

impl RunObject {
    pub(crate) fn of(
        head: &RunHead,
        inbox: &Inbox,
        open: &Open,
        durable: bool,
        blocked: Option<Blocked>,
    ) -> Self {
        let name = |kind: &str| (head.definition.kind == kind).then(|| head.definition.name.clone());
        let over = head.status.is_terminal();
        let resumable = durable
            && (!over
                || head
                    .outcome
                    .as_deref()
                    .and_then(|outcome| Outcome::decode(outcome).ok())
                    .is_some_and(|outcome| outcome.resumable()));
        Self {
            id: head.id.as_str().to_owned(),
            object: "run",
            kind: head.definition.kind.clone(),
            agent: name(AGENT),
            flow: name("flow"),
            definition: DefinitionObject {
                version: head.definition.version,
                digest: head.definition.digest.clone(),
            },
            status: head.status,
            life: head.life,
            parent_run_id: head.lineage.parent.as_ref().map(|id| id.as_str().to_owned()),
            root_run_id: head.lineage.root.as_str().to_owned(),
            revision: head.revision.to_string(),
            resume_token: head.token().to_string(),
            incarnation: head.incarnation.to_string(),
            step: head.cursor.as_ref().map(|_| step_name(head.activation)),
            waiting_on: if over { Vec::new() } else { waiting_on(head, open) },
            budgets: head.budgets.iter().filter_map(budget).collect(),
            outcome: head.outcome.as_deref().map(written),
            resumable,
            guarantee: if durable {
                Guarantee::AtLeastOnceWithStableKeys
            } else {
                Guarantee::None
            },
            blocked,
            metadata: head.metadata.clone(),
            cancel_requested_at: inbox.cancel.as_ref().map(|cancel| time(cancel.requested_at)),
            created_at: time(head.created_at),
            updated_at: time(head.updated_at),
            deadline: head.deadline.map(time),
        }
    }
}

/// A budget that has no limit and was not used is not shown.
fn budget((name, budget): (&String, &Budget)) -> Option<(String, BudgetObject)> {
    let unlimited = budget.limit == UNLIMITED;
    if unlimited && budget.used == 0 {
        return None;
    }
    let number = |n: u64| if name == SPEND { money(n) } else { raw(&n) };
    let object = BudgetObject {
        used: number(budget.used),
        limit: (!unlimited).then(|| number(budget.limit)),
    };
    Some((name.clone(), object))
}

/// Units of 1e-12 as a decimal number, exactly.
fn money(units: u64) -> Box<RawValue> {
    const ONE: u64 = 1_000_000_000_000;
    let (whole, part) = (units / ONE, units % ONE);
    let digits = format!("{part:012}");
    let digits = digits.trim_end_matches('0');
    let text = if digits.is_empty() {
        whole.to_string()
    } else {
        format!("{whole}.{digits}")
    };
    written(text.as_bytes())
}

/// A run that another one started.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct ChildObject {
    id: String,
    run_id: String,
    /// Of a planned group; null for a run that a tool call started.
    group_id: Option<String>,
    /// The step of the parent.
    step: Option<String>,
    agent: String,
    #[schema(value_type = RunStatus)]
    status: Status,
    revision: String,
    /// What of the parent's budgets was given to it.
    allocation: BTreeMap<String, u64>,
    used: BTreeMap<String, BudgetObject>,
    #[schema(value_type = Option<OutcomeObject>)]
    outcome: Option<Box<RawValue>>,
    created_at: String,
}

impl ChildObject {
    pub(crate) fn of(head: &RunHead) -> Self {
        Self {
            id: head.id.as_str().to_owned(),
            run_id: head.id.as_str().to_owned(),
            group_id: None,
            step: head.lineage.origin.clone(),
            agent: head.definition.name.clone(),
            status: head.status,
            revision: head.revision.to_string(),
            allocation: BTreeMap::new(),
            used: head.budgets.iter().filter_map(budget).collect(),
            outcome: head.outcome.as_deref().map(written),
            created_at: time(head.created_at),
        }
    }
}
