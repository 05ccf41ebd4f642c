//! What an operator decides about an unknown effect (D153 to D158). Nothing is called: the decision is checked against the
//! record, and either the whole of it is taken or nothing.

use crate::failure::Failure;
use crate::ids::{ActivityId, DecisionId};
use crate::machine::activity::{complete, fail, paid, prepare_retry};
use crate::machine::retry;
use crate::payload::{Digest, Payload};
use crate::record::{ActivityRecord, ActivityState, Effect, Origin};
use crate::time::Timestamp;

/// What is to become of it.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// It had its effect, with this result.
    Complete { output: Payload },
    /// It is over without one. Definitive: no retry of the step repeats it.
    Fail { error: Failure },
    /// Another attempt, under the activity's own policy and within its limit.
    Retry,
}

/// A decision, addressed to what the operator saw.
#[derive(Debug, Clone, PartialEq)]
pub struct Resolution {
    pub id: ActivityId,
    pub action: Action,
    pub decision: DecisionId,
    pub input_digest: Digest,
    pub implementation: String,
    /// The number of the last attempt.
    pub attempt: u32,
    /// Not blank.
    pub reason: String,
    /// A reference to what the decision rests on; not blank.
    pub evidence: String,
}

/// Why a decision is not taken. The record is unchanged (D157).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResolveRefused {
    #[error("the decision is about another activity")]
    OtherActivity,
    #[error("reason: is blank")]
    NoReason,
    #[error("evidence: is blank")]
    NoEvidence,
    #[error("input_digest: the activity has another input")]
    OtherInput,
    #[error("implementation: the activity has another one")]
    OtherImplementation,
    #[error("attempt: is {given}, the last one is {last}")]
    OtherAttempt { given: u32, last: u32 },
    #[error("the activity is {state}, only an unknown one is resolved")]
    NotUnknown { state: ActivityState },
    #[error("an unsafe effect is not repeated")]
    UnsafeRetry,
    #[error("{used} of {limit} attempts are used")]
    RetryExhausted { used: u32, limit: u32 },
}

/// Takes a decision about an unknown activity. A retry is prepared, not dispatched, and due after the policy's pause from
/// `now`; `jitter` is from 0 to 1, sampled for this call (D154). Attempts stay as they are (D156). The caller keeps the ledger:
/// whether the decision's id was used before is not looked at here.
///
/// # Errors
/// `ResolveRefused`, for the first rule that does not hold.
pub fn resolve(
    record: &mut ActivityRecord,
    resolution: &Resolution,
    now: Timestamp,
    jitter: f64,
) -> Result<(), ResolveRefused> {
    check(record, resolution)?;
    match &resolution.action {
        Action::Complete { output } => complete(record, output.clone(), Origin::Manual),
        Action::Fail { error } => fail(record, error.clone(), Origin::Manual),
        Action::Retry => {
            let used = paid(record);
            let limit = retry::limit(record.retry.as_ref());
            match (record.effect, &record.retry) {
                (Effect::Unsafe, _) => return Err(ResolveRefused::UnsafeRetry),
                (Effect::ReadOnly | Effect::Idempotent, Some(policy)) if used < limit => {
                    let not_before = retry::not_before(policy, used, None, now, jitter);
                    prepare_retry(record, not_before);
                }
                (Effect::ReadOnly | Effect::Idempotent, Some(_) | None) => {
                    return Err(ResolveRefused::RetryExhausted { used, limit });
                }
            }
        }
    }
    record.decision = Some(resolution.decision.clone());
    Ok(())
}

fn check(record: &ActivityRecord, resolution: &Resolution) -> Result<(), ResolveRefused> {
    if resolution.id != record.id {
        return Err(ResolveRefused::OtherActivity);
    }
    if resolution.reason.trim().is_empty() {
        return Err(ResolveRefused::NoReason);
    }
    if resolution.evidence.trim().is_empty() {
        return Err(ResolveRefused::NoEvidence);
    }
    if resolution.input_digest != *record.input.digest() {
        return Err(ResolveRefused::OtherInput);
    }
    if resolution.implementation != record.implementation {
        return Err(ResolveRefused::OtherImplementation);
    }
    let last = record.attempts.last().map_or(0, |a| a.n);
    if resolution.attempt != last {
        return Err(ResolveRefused::OtherAttempt {
            given: resolution.attempt,
            last,
        });
    }
    match record.state {
        ActivityState::Unknown => Ok(()),
        state @ (ActivityState::Prepared
        | ActivityState::Running
        | ActivityState::Completed
        | ActivityState::Failed) => Err(ResolveRefused::NotUnknown { state }),
    }
}
