//! The run object (durable-api §3).

use std::collections::BTreeMap;

use iop_durable::ids::RunId;
use iop_durable::record::{
    ActivityRecord, Budget, Inbox, Outcome, RunHead, Status, WaitRecord, WaitStatus, WaitingKind, WaitingOn,
};
use iop_durable::time::Timestamp;
use iop_shared::label_enum;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::{raw, shown, time, url_of, written};
use crate::agents::journal::{ApprovalSubject, InputSubject, approval_id, call_of, step_name};
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
    #[schema(value_type = String)]
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
    #[schema(value_type = Option<Object>)]
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

/// One thing that a run waits for.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum WaitingOnObject {
    /// A decision of a person on this exact call.
    Approval {
        id: String,
        tool: String,
        call_id: String,
        /// As the model wrote them; a text when they are no JSON.
        #[schema(value_type = Value)]
        arguments: Box<RawValue>,
        arguments_digest: String,
        expires_at: Option<String>,
        url: String,
    },
    /// An answer of a person.
    Input {
        id: String,
        prompt: String,
        /// JSON Schema of the answer.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schema(value_type = Option<Object>)]
        schema: Option<Value>,
        call_id: String,
        deadline: Option<String>,
        url: String,
    },
    /// Something from outside.
    Event {
        id: String,
        key: String,
        correlation_id: Option<String>,
        deadline: Option<String>,
        url: String,
    },
    /// A time.
    Timer { id: String, due_at: Option<String> },
    /// The next attempt of a call or a step.
    Retry {
        #[serde(skip_serializing_if = "Option::is_none")]
        activity_id: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        attempt: Option<u32>,
        next_attempt_at: Option<String>,
    },
    /// The end of a run that this one started.
    Children {
        id: String,
        child_run_id: Option<String>,
    },
    /// Somebody who knows whether a call had its effect.
    Reconciliation {
        activity_id: String,
        tool: Option<String>,
        call_id: String,
        attempt: usize,
        url: String,
    },
    /// A resume.
    Resume {},
    /// Another system that takes it over.
    Handoff {},
}

/// What of a run's journal is open: its armed waits, and the calls that its head names, each with the name of its tool.
#[derive(Debug, Default)]
pub(crate) struct Open {
    pub(crate) waits: Vec<WaitRecord>,
    pub(crate) activities: Vec<(ActivityRecord, Option<String>)>,
}

/// What a run waits for: what its head names, and approvals and inputs that are armed while its other calls are under way.
pub(crate) fn waiting_on(head: &RunHead, open: &Open) -> Vec<WaitingOnObject> {
    let named = head.waiting.as_ref().map_or(&[][..], |waiting| &waiting.on);
    let due_at = head.waiting.as_ref().and_then(|waiting| waiting.due_at);
    let armed: Vec<&WaitRecord> = open
        .waits
        .iter()
        .filter(|wait| wait.status == WaitStatus::Armed)
        .collect();
    let of_waits = armed.iter().map(|wait| of_wait(wait));
    let of_head = named
        .iter()
        .filter(|on| armed.iter().all(|wait| wait.id.as_str() != on.id))
        .filter_map(|on| of_name(head, on, open, due_at));
    of_waits.chain(of_head).collect()
}

/// What an armed wait is to who reads the run.
fn of_wait(wait: &WaitRecord) -> WaitingOnObject {
    let id = wait.id.as_str().to_owned();
    let deadline = wait.deadline.map(time);
    let run = url_of(&wait.run);
    let at = |room: &str, id: &str| format!("{run}/{room}/{id}");
    let subject = wait.subject.bytes();
    match wait.kind {
        WaitingKind::Approval => {
            let id = approval_id(&wait.id);
            let url = at("approvals", &id);
            let subject: Option<ApprovalSubject> = serde_json::from_slice(subject).ok();
            match subject {
                Some(subject) => WaitingOnObject::Approval {
                    id,
                    tool: subject.tool,
                    call_id: subject.call_id,
                    arguments: arguments(&subject.arguments),
                    arguments_digest: subject.arguments_digest,
                    expires_at: deadline,
                    url,
                },
                None => WaitingOnObject::Approval {
                    id,
                    tool: String::new(),
                    call_id: call_id(wait.key.as_str()),
                    arguments: shown(wait.subject.bytes()),
                    arguments_digest: String::new(),
                    expires_at: deadline,
                    url,
                },
            }
        }
        WaitingKind::Input => {
            let subject: Option<InputSubject> = serde_json::from_slice(subject).ok();
            let (prompt, schema) = subject.map_or((String::new(), None), |s| (s.prompt, s.schema));
            WaitingOnObject::Input {
                url: at("inputs", &id),
                id,
                prompt,
                schema,
                call_id: call_id(wait.key.as_str()),
                deadline,
            }
        }
        WaitingKind::Children => WaitingOnObject::Children {
            id,
            child_run_id: child_of(subject),
        },
        WaitingKind::Timer | WaitingKind::Retry => WaitingOnObject::Timer { id, due_at: deadline },
        WaitingKind::Event | WaitingKind::Reconciliation | WaitingKind::Resume | WaitingKind::Handoff => {
            WaitingOnObject::Event {
                url: format!("{}/deliveries", at("waits", &id)),
                id,
                key: wait.key.as_str().to_owned(),
                correlation_id: Some(wait.correlation.as_str().to_owned()),
                deadline,
            }
        }
    }
}

/// What the head names and no armed wait stands for. An approval or an input that is not armed any more has its answer.
fn of_name(
    head: &RunHead,
    on: &WaitingOn,
    open: &Open,
    due_at: Option<Timestamp>,
) -> Option<WaitingOnObject> {
    let activity = open
        .activities
        .iter()
        .find(|(record, _)| record.id.as_str() == on.id);
    Some(match on.kind {
        WaitingKind::Approval | WaitingKind::Input | WaitingKind::Event | WaitingKind::Children => {
            return None;
        }
        WaitingKind::Timer => WaitingOnObject::Timer {
            id: on.id.clone(),
            due_at: due_at.map(time),
        },
        WaitingKind::Retry => {
            let not_before = activity.and_then(|(record, _)| record.not_before.as_ref());
            WaitingOnObject::Retry {
                activity_id: activity.map(|(record, _)| record.id.as_str().to_owned()),
                attempt: match activity {
                    Some((record, _)) => u32::try_from(record.attempts.len()).ok(),
                    None => Some(head.attempt),
                },
                next_attempt_at: not_before.map(|next| next.at).or(due_at).map(time),
            }
        }
        WaitingKind::Reconciliation => WaitingOnObject::Reconciliation {
            activity_id: on.id.clone(),
            tool: activity.and_then(|(_, tool)| tool.clone()),
            call_id: call_id(&on.key),
            attempt: activity.map_or(0, |(record, _)| record.attempts.len()),
            url: format!("{}/activities/{}/resolve", url_of(&head.id), on.id),
        },
        WaitingKind::Resume => WaitingOnObject::Resume {},
        WaitingKind::Handoff => WaitingOnObject::Handoff {},
    })
}

fn child_of(subject: &[u8]) -> Option<String> {
    let subject: Value = serde_json::from_slice(subject).ok()?;
    subject.get("child_run_id")?.as_str().map(str::to_owned)
}

/// The model's id of the call with this key.
pub(super) fn call_id(key: &str) -> String {
    call_of(key).map_or(key, |(id, _)| id).to_owned()
}

/// Arguments as the model wrote them.
pub(super) fn arguments(text: &str) -> Box<RawValue> {
    serde_json::from_str::<&RawValue>(text).map_or_else(|_| raw(&text), RawValue::to_owned)
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
    #[schema(value_type = String)]
    status: Status,
    revision: String,
    /// What of the parent's budgets was given to it.
    allocation: BTreeMap<String, u64>,
    used: BTreeMap<String, BudgetObject>,
    #[schema(value_type = Option<Object>)]
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
