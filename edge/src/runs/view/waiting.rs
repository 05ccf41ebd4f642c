//! What a run waits for, with what its readers need to answer it.

use iop_durable::ids::RunId;
use iop_durable::record::{ActivityRecord, RunHead, WaitRecord, WaitStatus, WaitingKind};
use iop_durable::time::Timestamp;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::{Called, json, raw, shown, time, url_of};
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
        /// Of a call; a step has none.
        #[serde(skip_serializing_if = "Option::is_none")]
        activity_id: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        tool: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        call_id: Option<String>,
        /// The last one.
        attempt: u32,
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
        attempt: u32,
        url: String,
    },
    /// A resume.
    Resume {},
    /// Another system that takes it over.
    Handoff {},
}

/// What of a run's journal is open: its armed waits, and the activities that its head names, each with the call that it is of.
#[derive(Debug, Default)]
pub(crate) struct Open {
    pub(crate) waits: Vec<WaitRecord>,
    pub(crate) activities: Vec<(ActivityRecord, Option<Called>)>,
}

impl Open {
    fn wait(&self, id: &str) -> Option<&WaitRecord> {
        self.waits.iter().find(|wait| wait.id.as_str() == id)
    }

    fn activity(&self, id: &str) -> Option<&(ActivityRecord, Option<Called>)> {
        self.activities
            .iter()
            .find(|(record, _)| record.id.as_str() == id)
    }
}

/// What a run waits for: what its head names, in that order, then approvals and inputs that are armed while its other calls are
/// under way.
pub(crate) fn waiting_on(head: &RunHead, open: &Open) -> Vec<WaitingOnObject> {
    let named = head.waiting.as_ref().map_or(&[][..], |waiting| &waiting.on);
    let due_at = head.waiting.as_ref().and_then(|waiting| waiting.due_at);
    let of_head = named.iter().filter_map(|on| match open.wait(&on.id) {
        // An approval or an input that is not armed any more has its answer.
        Some(wait) => (wait.status == WaitStatus::Armed).then(|| of_wait(wait)),
        None => {
            let activity = open.activity(&on.id);
            let record = activity.map(|(record, _)| record);
            let not_before = record.and_then(|record| record.not_before.as_ref());
            let last = record.and_then(|record| record.attempts.last());
            let named = Named {
                kind: on.kind,
                id: &on.id,
                key: &on.key,
                attempt: last.map_or(if record.is_some() { 0 } else { head.attempt }, |last| last.n),
                at: not_before.map(|next| next.at).or(due_at),
            };
            of_name(&head.id, &named, activity)
        }
    });
    let others = open
        .waits
        .iter()
        .filter(|wait| wait.status == WaitStatus::Armed && named.iter().all(|on| on.id != wait.id.as_str()));
    of_head.chain(others.map(of_wait)).collect()
}

/// What a run waited for at an event; what is not known of it any more is told as the event names it.
pub(super) fn waited_on(run: &RunId, named: &Named<'_>, open: &Open) -> Option<WaitingOnObject> {
    match open.wait(named.id) {
        Some(wait) => Some(of_wait(wait)),
        None => of_name(run, named, open.activity(named.id)),
    }
}

/// What a pause names, and where that stands.
pub(super) struct Named<'a> {
    pub(super) kind: WaitingKind,
    /// Of a wait or an activity; empty for the step itself.
    pub(super) id: &'a str,
    pub(super) key: &'a str,
    /// The last one.
    pub(super) attempt: u32,
    /// When it goes on by itself.
    pub(super) at: Option<Timestamp>,
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
            let subject = subject.unwrap_or_else(|| InputSubject {
                prompt: String::new(),
                schema: None,
                call_id: call_id(wait.key.as_str()),
            });
            WaitingOnObject::Input {
                url: at("inputs", &id),
                id,
                prompt: subject.prompt,
                schema: subject.schema,
                call_id: subject.call_id,
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

/// What no wait stands for; `None` for what only a wait can be.
fn of_name(
    run: &RunId,
    named: &Named<'_>,
    activity: Option<&(ActivityRecord, Option<Called>)>,
) -> Option<WaitingOnObject> {
    let called = activity.and_then(|(_, called)| called.as_ref());
    let tool = called.map(|called| called.tool.clone());
    Some(match named.kind {
        WaitingKind::Approval | WaitingKind::Input | WaitingKind::Event | WaitingKind::Children => {
            return None;
        }
        WaitingKind::Timer => WaitingOnObject::Timer {
            id: named.id.to_owned(),
            due_at: named.at.map(time),
        },
        WaitingKind::Retry => WaitingOnObject::Retry {
            activity_id: activity.map(|(record, _)| record.id.as_str().to_owned()),
            tool,
            call_id: called.map(|called| called.id.clone()),
            attempt: named.attempt,
            next_attempt_at: named.at.map(time),
        },
        WaitingKind::Reconciliation => WaitingOnObject::Reconciliation {
            activity_id: named.id.to_owned(),
            tool,
            call_id: called.map_or_else(|| call_id(named.key), |called| called.id.clone()),
            attempt: named.attempt,
            url: format!("{}/activities/{}/resolve", url_of(run), named.id),
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
fn call_id(key: &str) -> String {
    call_of(key).map_or(key, |(id, _)| id).to_owned()
}

/// Arguments as the model wrote them.
pub(super) fn arguments(text: &str) -> Box<RawValue> {
    json(text).map_or_else(|| raw(&text), RawValue::to_owned)
}
