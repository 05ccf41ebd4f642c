//! Waits for the world outside (D161 to D178).

use iop_durable::record::{WaitRecord, WaitStatus, WaitingKind};
use serde::Serialize;
use utoipa::ToSchema;

use super::words::{RunWaitStatus, RunWaitingKind};
use super::{time, url_of};
use crate::agents::journal::{InputSubject, step_name};

/// A wait.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct WaitObject {
    id: String,
    run_id: String,
    step: String,
    #[schema(value_type = RunWaitingKind)]
    kind: WaitingKind,
    key: String,
    correlation_id: String,
    /// From 1 within its address.
    generation: u32,
    #[schema(value_type = RunWaitStatus)]
    status: WaitStatus,
    /// What a person is asked.
    prompt: Option<String>,
    armed_at: String,
    settled_at: Option<String>,
    deadline: Option<String>,
    /// Where it is answered.
    url: String,
}

impl WaitObject {
    pub(crate) fn of(wait: &WaitRecord) -> Self {
        let input: Option<InputSubject> = (wait.kind == WaitingKind::Input)
            .then(|| serde_json::from_slice(wait.subject.bytes()).ok())
            .flatten();
        let run = url_of(&wait.run);
        Self {
            id: wait.id.as_str().to_owned(),
            run_id: wait.run.as_str().to_owned(),
            step: step_name(wait.activation),
            kind: wait.kind,
            key: wait.key.as_str().to_owned(),
            correlation_id: wait.correlation.as_str().to_owned(),
            generation: wait.generation,
            status: wait.status,
            url: match input {
                Some(_) => format!("{run}/inputs/{}", wait.id),
                None => format!("{run}/waits/{}/deliveries", wait.id),
            },
            prompt: input.map(|subject| subject.prompt),
            armed_at: time(wait.armed_at),
            settled_at: wait.settled.as_ref().map(|settled| time(settled.at)),
            deadline: wait.deadline.map(time),
        }
    }
}
