//! Events as they are told: the stored ones by number, and those of a stream that are not stored.

use iop_durable::ids::{ActivityId, RunId, WaitId};
use iop_durable::patterns::REASON;
use iop_durable::record::{EventName, EventRecord, WaitingKind};
use iop_durable::time::Timestamp;
use iop_shared::label_enum;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::step::StepKind;
use super::waiting::{Named, Open, WaitingOnObject, waited_on};
use super::words::EventWord;
use super::{raw, time, written};
use crate::agents::journal::step_name;
use crate::schema::words_schema;

/// A stored event.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct EventObject {
    /// From 1 without gaps.
    seq: u64,
    /// Of the run, from 1.
    life: u32,
    #[schema(value_type = EventWord)]
    event: String,
    time: String,
    /// Of the end of a life: `outcome`, as the run has it.
    #[schema(value_type = Object)]
    data: Box<RawValue>,
}

label_enum! {
    /// What is told on streams only.
    pub enum TransientWord {
        Snapshot => "run.snapshot",
        TurnDelta => "run.turn.delta",
    }
}
words_schema!(TransientWord);

/// An event of a stream that is not stored: it has no number.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct Transient {
    /// Of the run, from 1.
    life: u32,
    event: TransientWord,
    time: String,
    /// Of `run.snapshot`: `run`, the run object, and `gap: true` when the event that was asked for is not kept any more. Of
    /// `run.turn.delta`: `turn`, and a piece of its answer: `text` with its `offset` in bytes, where 0 begins the text again;
    /// `refusal`, `reasoning` or `tool_call`.
    #[schema(value_type = Object)]
    data: Box<RawValue>,
}

impl Transient {
    pub(crate) fn new(event: TransientWord, life: u32, at: Timestamp, data: Box<RawValue>) -> Self {
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
    #[serde(default)]
    attempt: u32,
    at: Option<Timestamp>,
}

#[derive(Serialize)]
struct PauseData {
    reason: String,
    waiting_on: Vec<WaitingOnObject>,
}

/// What a pause names, which is told with more than the event has of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Mentioned {
    Wait(WaitId),
    Activity(ActivityId),
}

/// The waits and activities that an event of a pause names; none for every other event.
pub(crate) fn mentioned(event: &EventRecord) -> Vec<Mentioned> {
    let on = pause(event).map_or_else(Vec::new, |pause| pause.waiting_on);
    on.iter().filter_map(EngineOn::mentioned).collect()
}

fn pause(event: &EventRecord) -> Option<EnginePause> {
    match EventName::parse(&event.name) {
        Some(EventName::Waiting | EventName::Ambiguous) => serde_json::from_slice(&event.data).ok(),
        Some(_) | None => None,
    }
}

impl EngineOn {
    fn mentioned(&self) -> Option<Mentioned> {
        match self.kind {
            WaitingKind::Approval
            | WaitingKind::Input
            | WaitingKind::Event
            | WaitingKind::Timer
            | WaitingKind::Children => WaitId::new(&self.id).ok().map(Mentioned::Wait),
            // A retry of a step names no activity.
            WaitingKind::Retry | WaitingKind::Reconciliation => {
                ActivityId::new(&self.id).ok().map(Mentioned::Activity)
            }
            WaitingKind::Resume | WaitingKind::Handoff => None,
        }
    }

    fn told(&self, run: &RunId, open: &Open) -> Option<WaitingOnObject> {
        let named = Named {
            kind: self.kind,
            id: &self.id,
            key: &self.key,
            attempt: self.attempt,
            at: self.at,
        };
        waited_on(run, &named, open)
    }
}

impl EventObject {
    /// `open`: what the event mentions.
    pub(crate) fn of(run: &RunId, event: &EventRecord, open: &Open) -> Self {
        Self {
            seq: event.seq,
            life: event.life,
            event: event.name.clone().into_owned(),
            time: time(event.time),
            data: data(run, event, open),
        }
    }
}

/// The data of an event, in the words of the API: steps are turns, a pause is on what the run object shows then. What agents and
/// outcomes say is passed on byte for byte.
fn data(run: &RunId, event: &EventRecord, open: &Open) -> Box<RawValue> {
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
        Some(EventName::Waiting | EventName::Ambiguous) => pause(event).map(|pause| {
            let on = pause.waiting_on.iter();
            raw(&PauseData {
                waiting_on: on.filter_map(|on| on.told(run, open)).collect(),
                reason: pause.reason,
            })
        }),
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
