//! A run that ends closes what it can: an activity that waits for its next attempt, and an interrupted one that may be repeated
//! safely. What was unsafe and under way stays unknown (durable-api §8, "Cancel").

use crate::failure::Failure;
use crate::machine::activity::{abandon, fail};
use crate::record::{ActivityRecord, ActivityState, AttemptClass, Effect, Origin};
use crate::time::Timestamp;

/// Closes an open activity as failed: a prepared retry with the failure it would have retried, an interrupted call with `why`.
/// A later life of the run may try it again: the first as the retry it was, the second as a recovery. True when the record
/// changed; false leaves it open.
pub fn close(record: &mut ActivityRecord, why: &Failure, now: Timestamp) -> bool {
    match (record.state, record.effect) {
        (ActivityState::Completed | ActivityState::Failed, _)
        | (ActivityState::Running | ActivityState::Unknown, Effect::Unsafe) => false,
        (ActivityState::Running | ActivityState::Unknown, Effect::ReadOnly | Effect::Idempotent) => {
            abandon(record, now);
            fail(record, why.clone().retryable(true), Origin::Live);
            true
        }
        (ActivityState::Prepared, _) => {
            let last = record.attempts.last();
            let failed = last
                .filter(|a| a.class == AttemptClass::Failed)
                .and_then(|a| a.error.clone());
            let error = match failed {
                Some(error) => error,
                // An operator asked for a retry: that is no word of theirs that it failed.
                None if last.is_some() => why.clone().retryable(true),
                // Nothing was dispatched.
                None => return false,
            };
            fail(record, error, Origin::Live);
            record.not_before = None;
            true
        }
    }
}
