//! Whether a journal could have been written by this machine (D145). A seal shows that bytes are unchanged; this shows that
//! they make sense, before anything runs on them.

use std::collections::BTreeSet;

use crate::ids::{ActivityId, RunId, check_text};
use crate::machine::activity::paid;
use crate::machine::retry;
use crate::record::{ActivityRecord, ActivityState, Attempt, AttemptClass, Effect, Origin};

/// Checks the activities of `run` that a segment works with: those of its present `activation` and all that are open, of which
/// the sealed head says there are `open`.
///
/// # Errors
/// The first rule that does not hold, for people: the run is corrupt.
pub fn validate(records: &[ActivityRecord], run: &RunId, activation: u64, open: u32) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    for record in records {
        if !seen.insert(&record.id) {
            return Err(format!("activity {}: stands there twice", record.id));
        }
        check(record, run, activation).map_err(|why| format!("activity {}: {why}", record.id))?;
    }
    let found = records.iter().filter(|r| r.state.is_open()).count();
    if u64::try_from(found) != Ok(u64::from(open)) {
        return Err(format!("activities: {found} are open, the head says {open}"));
    }
    Ok(())
}

fn check(record: &ActivityRecord, run: &RunId, activation: u64) -> Result<(), &'static str> {
    if record.run != *run {
        return Err("belongs to another run");
    }
    if ActivityId::derive(run, &record.node, record.activation, &record.key) != record.id {
        return Err("its address is not its identity");
    }
    if record.activation == 0 {
        return Err("activations count from 1");
    }
    if record.activation > activation {
        return Err("belongs to a future activation");
    }
    check_contract(record)?;
    check_attempts(record)?;
    check_state(record)
}

fn check_contract(record: &ActivityRecord) -> Result<(), &'static str> {
    check_text("implementation", &record.implementation).map_err(|_| "its implementation is no label")?;
    if let Some(policy) = &record.retry {
        retry::check_for(policy, record.effect).map_err(|_| "its retry policy is invalid")?;
    }
    let limit = retry::limit(record.retry.as_ref());
    if limit > 1 && paid(record) > limit {
        return Err("has more attempts than its limit");
    }
    if record.attempts.is_empty() != (record.step_attempt == 0) {
        return Err("its attempt of the step does not fit its attempts");
    }
    Ok(())
}

fn check_attempts(record: &ActivityRecord) -> Result<(), &'static str> {
    let mut previous: Option<&Attempt> = None;
    for attempt in &record.attempts {
        if previous.map_or(Some(1), |p| p.n.checked_add(1)) != Some(attempt.n) {
            return Err("its attempts are not numbered from 1 without gaps");
        }
        if previous.is_some_and(|p| p.incarnation > attempt.incarnation) {
            return Err("an attempt belongs to an older lease than the one before");
        }
        check_end(attempt)?;
        check_order(record, previous, attempt)?;
        previous = Some(attempt);
    }
    Ok(())
}

fn check_end(attempt: &Attempt) -> Result<(), &'static str> {
    let fits = match attempt.class {
        AttemptClass::Running => attempt.ended_at.is_none() && attempt.error.is_none(),
        AttemptClass::Completed | AttemptClass::Abandoned => {
            attempt.ended_at.is_some() && attempt.error.is_none()
        }
        AttemptClass::Failed => attempt.ended_at.is_some() && attempt.error.is_some(),
    };
    if !fits {
        return Err("an attempt's end and error do not fit its class");
    }
    if attempt.ended_at.is_some_and(|end| end < attempt.started_at) {
        return Err("an attempt ends before it starts");
    }
    Ok(())
}

/// What may follow what: nothing an attempt that is under way or completed; a retry a retryable failure; a recovery, or what an
/// operator decided, an abandoned attempt whose effect may be repeated.
fn check_order(
    record: &ActivityRecord,
    previous: Option<&Attempt>,
    attempt: &Attempt,
) -> Result<(), &'static str> {
    let Some(previous) = previous else {
        return if attempt.recovery {
            Err("its first attempt recovers nothing")
        } else {
            Ok(())
        };
    };
    match previous.class {
        AttemptClass::Running => Err("an attempt follows one that is under way"),
        AttemptClass::Completed => Err("an attempt follows one that completed"),
        AttemptClass::Failed if attempt.recovery => Err("a recovery follows a failure"),
        AttemptClass::Failed if !previous.error.as_ref().is_some_and(|e| e.retryable) => {
            Err("an attempt follows a failure that is not retryable")
        }
        AttemptClass::Failed => Ok(()),
        AttemptClass::Abandoned => match record.effect {
            Effect::Unsafe => Err("an attempt repeats an unsafe one that was abandoned"),
            Effect::ReadOnly | Effect::Idempotent if attempt.recovery || record.decision.is_some() => Ok(()),
            Effect::ReadOnly | Effect::Idempotent => {
                Err("an abandoned attempt is repeated neither as a recovery nor by a decision")
            }
        },
    }
}

fn check_state(record: &ActivityRecord) -> Result<(), &'static str> {
    let last = record.attempts.last();
    let class = last.map(|a| a.class);
    let fits = match record.state {
        ActivityState::Prepared => match class {
            None => record.not_before.is_none(),
            Some(AttemptClass::Failed | AttemptClass::Abandoned) => {
                record.not_before.is_some()
                    && paid(record) < retry::limit(record.retry.as_ref())
                    && (class == Some(AttemptClass::Failed) || record.decision.is_some())
            }
            Some(AttemptClass::Running | AttemptClass::Completed) => false,
        },
        ActivityState::Running => class == Some(AttemptClass::Running),
        ActivityState::Unknown => class == Some(AttemptClass::Abandoned),
        ActivityState::Completed => outcome_fits(record, AttemptClass::Completed),
        ActivityState::Failed => {
            outcome_fits(record, AttemptClass::Failed)
                && (record.origin != Some(Origin::Live)
                    || class == Some(AttemptClass::Abandoned)
                    || record.error == last.and_then(|a| a.error.clone()))
        }
    };
    if !fits {
        return Err("its state does not fit its attempts");
    }
    let (output, error, settled) = match record.state {
        ActivityState::Prepared | ActivityState::Running | ActivityState::Unknown => (false, false, false),
        ActivityState::Completed => (true, false, true),
        ActivityState::Failed => (false, true, true),
    };
    if record.output.is_some() != output
        || record.error.is_some() != error
        || record.origin.is_some() != settled
    {
        return Err("its output, error and origin do not fit its state");
    }
    if record.not_before.is_some() && record.state != ActivityState::Prepared {
        return Err("only a prepared retry has a time");
    }
    Ok(())
}

/// Whether an outcome with this origin may stand after the last attempt; `own` is how an attempt with that outcome ends.
fn outcome_fits(record: &ActivityRecord, own: AttemptClass) -> bool {
    let class = record.attempts.last().map(|a| a.class);
    match record.origin {
        Some(Origin::Live | Origin::Simulated) => {
            // An interrupted call that may be repeated safely is closed when its run ends.
            let closed = record.state == ActivityState::Failed
                && record.effect != Effect::Unsafe
                && record.error.as_ref().is_none_or(|e| e.retryable)
                && class == Some(AttemptClass::Abandoned);
            class == Some(own) || closed
        }
        Some(Origin::Reconciled) => {
            class == Some(AttemptClass::Abandoned) && record.state == ActivityState::Completed
        }
        Some(Origin::Manual) => class == Some(AttemptClass::Abandoned) && record.decision.is_some(),
        // Told to a node, never stored.
        Some(Origin::Replayed) | None => false,
    }
}
