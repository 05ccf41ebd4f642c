//! The engine's word lists as the OpenAPI document names them. Nothing is of these types: they stand in `value_type`.

use iop_durable::failure::FailureKind;
use iop_durable::machine::wait::Verdict;
use iop_durable::record::{
    ActivityState, AttemptClass, Effect, EventName, Origin, Reason, Status, StepStatus, WaitStatus,
    WaitingKind,
};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;
use utoipa::{PartialSchema, ToSchema};

use crate::agents::journal::AGENT_EVENTS;
use crate::schema::{one_of, words_named};

words_named! {
    RunStatus => Status,
    RunStepStatus => StepStatus,
    RunWaitingKind => WaitingKind,
    RunWaitStatus => WaitStatus,
    RunActivityState => ActivityState,
    RunAttemptClass => AttemptClass,
    RunEffect => Effect,
    RunOrigin => Origin,
    OutcomeReason => Reason,
    ErrorKind => FailureKind,
    DeliveryDecision => Verdict,
}

/// The name of a stored event: the engine's and an agent's.
pub(crate) enum EventWord {}

impl PartialSchema for EventWord {
    fn schema() -> RefOr<Schema> {
        let engine = EventName::ALL.iter().map(|name| name.as_str());
        one_of(engine.chain(AGENT_EVENTS))
    }
}

impl ToSchema for EventWord {}
