//! Events as they are told: the stored ones by number, and those of a stream that are not stored.

use iop_durable::ids::{RunId, WaitId};
use iop_durable::patterns::REASON;
use iop_durable::record::{EventName, EventRecord, WaitingKind};
use iop_durable::time::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::step::StepKind;
use super::waiting::call_id;
use super::{raw, time, url_of, written};
use crate::agents::journal::{approval_id, step_name};

/// A stored event.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct EventObject {
    /// From 1 without gaps.
    seq: u64,
    /// Of the run, from 1.
    life: u32,
    event: String,
    time: String,
    #[schema(value_type = Object)]
    data: Box<RawValue>,
}

/// An event of a stream that is not stored: it has no number.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct Transient {
    /// Of the run, from 1.
    life: u32,
    event: &'static str,
    time: String,
    #[schema(value_type = Object)]
    data: Box<RawValue>,
}

impl Transient {
    pub(crate) fn new(event: &'static str, life: u32, at: Timestamp, data: Box<RawValue>) -> Self {
        Self {
            life,
            event,
            time: time(at),
            data,
        }
    }
}

/// The engine's own words about a step.
#[derive(Deserialize)]
struct EngineStep {
    step: String,
    activation: u64,
    attempt: u32,
    status: Option<String>,
}

#[derive(Serialize)]
struct StepData<'a> {
    step: String,
    kind: StepKind,
    activation: u64,
    attempt: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<&'a str>,
}

/// The engine's own words about a pause.
#[derive(Deserialize)]
struct EnginePause {
    reason: String,
    waiting_on: Vec<EngineOn>,
}

#[derive(Deserialize)]
struct EngineOn {
    kind: WaitingKind,
    id: String,
    key: String,
}

#[derive(Serialize)]
struct PauseData {
    reason: String,
    waiting_on: Vec<OnData>,
}

#[derive(Serialize)]
struct OnData {
    kind: WaitingKind,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    activity_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    call_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
}

impl EventObject {
    pub(crate) fn of(run: &RunId, event: &EventRecord) -> Self {
        Self {
            seq: event.seq,
            life: event.life,
            event: event.name.clone().into_owned(),
            time: time(event.time),
            data: data(run, event),
        }
    }
}

/// The data of an event, in the words of the API: steps are turns, approvals have their own ids. What agents and outcomes say is
/// passed on byte for byte.
fn data(run: &RunId, event: &EventRecord) -> Box<RawValue> {
    let told = match EventName::parse(&event.name) {
        Some(EventName::StepStarted | EventName::StepCompleted) => {
            serde_json::from_slice(&event.data).ok().map(|step: EngineStep| {
                raw(&StepData {
                    step: step_name(step.activation),
                    kind: StepKind::of(step.step == REASON),
                    activation: step.activation,
                    attempt: step.attempt,
                    status: step.status.as_deref(),
                })
            })
        }
        Some(EventName::Waiting | EventName::Ambiguous) => {
            serde_json::from_slice(&event.data)
                .ok()
                .map(|pause: EnginePause| {
                    raw(&PauseData {
                        reason: pause.reason,
                        waiting_on: pause.waiting_on.into_iter().map(|on| on_data(run, on)).collect(),
                    })
                })
        }
        Some(
            EventName::Created
            | EventName::Started
            | EventName::Resumed
            | EventName::Succeeded
            | EventName::Failed
            | EventName::Cancelled
            | EventName::Exhausted
            | EventName::Transferred,
        )
        | None => None,
    };
    told.unwrap_or_else(|| written(&event.data))
}

fn on_data(run: &RunId, on: EngineOn) -> OnData {
    let call = || Some(call_id(&on.key)).filter(|id| !id.is_empty());
    let mut data = OnData {
        kind: on.kind,
        id: None,
        activity_id: None,
        call_id: None,
        url: None,
    };
    match on.kind {
        WaitingKind::Approval => {
            let id = WaitId::new(&on.id).map_or_else(|_| on.id.clone(), |wait| approval_id(&wait));
            data.url = Some(format!("{}/approvals/{id}", url_of(run)));
            data.call_id = call();
            data.id = Some(id);
        }
        WaitingKind::Input => {
            data.url = Some(format!("{}/inputs/{}", url_of(run), on.id));
            data.call_id = call();
            data.id = Some(on.id);
        }
        WaitingKind::Reconciliation | WaitingKind::Retry => {
            data.call_id = call();
            data.activity_id = Some(on.id).filter(|id| !id.is_empty());
        }
        WaitingKind::Event | WaitingKind::Timer | WaitingKind::Children => data.id = Some(on.id),
        WaitingKind::Resume | WaitingKind::Handoff => {}
    }
    data
}
