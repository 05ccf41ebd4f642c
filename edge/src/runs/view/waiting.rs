//! What a run waits for, with what its readers need to answer it.

use iop_durable::record::{ActivityRecord, RunHead, WaitRecord, WaitStatus, WaitingKind, WaitingOn};
use iop_durable::time::Timestamp;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::{raw, shown, time, url_of};
use crate::agents::journal::{ApprovalSubject, InputSubject, approval_id, call_of};

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
