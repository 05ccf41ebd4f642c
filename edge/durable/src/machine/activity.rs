//! The activity machine (D137 to D160): what may be done about an external effect, and what an outcome makes of its record. Pure:
//! the caller commits the record and dispatches; an intent that is not known to be committed dispatches nothing (D146).
//!
//! ```text
//! prepared --start--> running --settle--> completed | failed | unknown | prepared (a retry, not before its time)
//! running --recover--> unknown --reconcile--> completed
//!                      unknown --resolve--> completed | failed | prepared
//!                      unknown --start--> running   (read-only and idempotent effects only, counted as a recovery)
//! failed --start--> running   (the step is tried again or its run resumed, and the error was retryable)
//! prepared | running | unknown --close--> failed   (its run ends)
//! ```
//!
//! Two counts bound the attempts. Those that a retry policy or a step paid for count against `max_attempts`; those that repeat
//! an abandoned attempt count against the recovery limit (durable-api §8). Attempts are numbered through and never rewritten
//! (D156).

mod close;
mod resolve;
mod validate;

use std::time::Duration;

pub use close::close;
pub use resolve::{Action, Resolution, ResolveRefused, resolve};
pub use validate::validate;

use crate::failure::Failure;
use crate::ids::{ActivityId, InvalidId, Key, NodeName, RunId, check_text};
use crate::machine::retry::{self, InvalidPolicy, Next};
use crate::payload::Payload;
use crate::record::{
    ActivityRecord, ActivityState, Attempt, AttemptClass, Effect, Exhausted, NotBefore, Origin, RetryPolicy,
};
use crate::time::Timestamp;

/// The recovery limit of an activity when its run sets none (durable-api §8).
pub const RECOVERY_LIMIT: u32 = 10;

/// What a node asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    pub run: RunId,
    pub node: NodeName,
    pub activation: u64,
    pub key: Key,
    /// A label; compared, never interpreted.
    pub implementation: String,
    pub effect: Effect,
    /// No policy is one attempt per attempt of the step.
    pub retry: Option<RetryPolicy>,
    pub input: Payload,
}

/// Who asks, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Context {
    /// The run's attempt of the step, from 1; higher after a retry of the step and after a resume.
    pub step_attempt: u32,
    /// Of the lease under which an attempt would be made.
    pub incarnation: u64,
    /// The store's clock.
    pub now: Timestamp,
    /// How often an abandoned attempt of one activity is repeated.
    pub recovery_limit: u32,
}

/// What may be done about it at this moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// Completed before: the recorded output is the answer (D141, D142).
    Replay,
    /// Failed for good in this attempt of the step: the recorded error is the answer; `exhausted` says which limit ran out.
    Failed,
    /// One attempt may be dispatched; `recovery` when it repeats an abandoned one.
    Dispatch { recovery: bool },
    /// A retry is prepared and not due (D149).
    NotBefore(Timestamp),
    /// The last attempt's effect is not known and repeating is not declared safe: reconcile or ask an operator (D151).
    Unknown,
}

/// Why nothing may be done. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The same identity with something else (D141, D147).
    #[error("the activity exists with another {what}")]
    Conflict { what: &'static str },
    /// This lease already has an attempt of it under way: one key was called twice at the same time.
    #[error("an attempt is under way")]
    InFlight,
    #[error("{used} of {limit} recovery attempts are used")]
    RecoveryExhausted { used: u32, limit: u32 },
    #[error("retry policy: {why}")]
    InvalidPolicy { why: InvalidPolicy },
    #[error(transparent)]
    InvalidLabel(InvalidId),
}

/// What may be done about `request`, of which `existing` is known.
///
/// # Errors
/// `Refused`.
pub fn admit(
    existing: Option<&ActivityRecord>,
    request: &Request,
    context: &Context,
) -> Result<Admission, Refused> {
    check_text("implementation", &request.implementation).map_err(Refused::InvalidLabel)?;
    if let Some(policy) = &request.retry {
        retry::check_for(policy, request.effect).map_err(|why| Refused::InvalidPolicy { why })?;
    }
    let Some(record) = existing else {
        return Ok(Admission::Dispatch { recovery: false });
    };
    if let Some(what) = difference(record, request) {
        return Err(Refused::Conflict { what });
    }
    match record.state {
        ActivityState::Completed => Ok(Admission::Replay),
        ActivityState::Failed if !may_repeat_failure(record, context) => Ok(Admission::Failed),
        ActivityState::Failed if ended_as(record, AttemptClass::Abandoned) => {
            repeat_abandoned(record, context)
        }
        ActivityState::Failed => Ok(if has_attempts_left(record) {
            Admission::Dispatch { recovery: false }
        } else {
            Admission::Failed
        }),
        ActivityState::Prepared => Ok(match &record.not_before {
            Some(not_before) if context.now < not_before.at => Admission::NotBefore(not_before.at),
            Some(_) | None => Admission::Dispatch { recovery: false },
        }),
        ActivityState::Running if has_attempt_of(record, context.incarnation) => Err(Refused::InFlight),
        ActivityState::Running | ActivityState::Unknown => repeat_abandoned(record, context),
    }
}

/// The first part of the identity or of the contract that differs.
fn difference(record: &ActivityRecord, request: &Request) -> Option<&'static str> {
    let same_address = record.run == request.run
        && record.node == request.node
        && record.activation == request.activation
        && record.key == request.key;
    if !same_address {
        Some("address")
    } else if record.implementation != request.implementation {
        Some("implementation")
    } else if record.effect != request.effect {
        Some("effect")
    } else if record.retry != request.retry {
        Some("retry")
    } else if record.input != request.input {
        Some("input")
    } else {
        None
    }
}

fn has_attempt_of(record: &ActivityRecord, incarnation: u64) -> bool {
    record
        .attempts
        .last()
        .is_some_and(|a| a.incarnation == incarnation)
}

/// An abandoned attempt is repeated where its effect allows that, a limited number of times.
fn repeat_abandoned(record: &ActivityRecord, context: &Context) -> Result<Admission, Refused> {
    match record.effect {
        Effect::Unsafe => Ok(Admission::Unknown),
        Effect::ReadOnly | Effect::Idempotent => {
            let used = recoveries(record);
            if used < context.recovery_limit {
                Ok(Admission::Dispatch { recovery: true })
            } else {
                Err(Refused::RecoveryExhausted {
                    used,
                    limit: context.recovery_limit,
                })
            }
        }
    }
}

/// A retry of the step, or a later life, may repeat a retryable failure, unless an operator said that it failed.
fn may_repeat_failure(record: &ActivityRecord, context: &Context) -> bool {
    context.step_attempt > record.step_attempt
        && is_own(record.origin)
        && record.error.as_ref().is_some_and(|e| e.retryable)
}

/// A limit of one is the step's to exceed; a higher one holds for the activity as long as it exists.
fn has_attempts_left(record: &ActivityRecord) -> bool {
    let limit = retry::limit(record.retry.as_ref());
    limit == 1 || paid(record) < limit
}

fn ended_as(record: &ActivityRecord, class: AttemptClass) -> bool {
    record.attempts.last().is_some_and(|a| a.class == class)
}

/// Whether an outcome is an attempt's own answer.
fn is_own(origin: Option<Origin>) -> bool {
    match origin {
        Some(Origin::Live | Origin::Simulated) => true,
        Some(Origin::Replayed | Origin::Reconciled | Origin::Manual) | None => false,
    }
}

/// Attempts that count against the retry policy.
pub fn paid(record: &ActivityRecord) -> u32 {
    count(record, false)
}

/// Attempts that count against the recovery limit.
pub fn recoveries(record: &ActivityRecord) -> u32 {
    count(record, true)
}

fn count(record: &ActivityRecord, recovery: bool) -> u32 {
    let n = record.attempts.iter().filter(|a| a.recovery == recovery).count();
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// The retry limit that a failed activity ran into; the failure itself stays in `error`.
pub fn exhausted(record: &ActivityRecord) -> Option<Exhausted> {
    match (record.state, &record.error) {
        (ActivityState::Failed, Some(error))
            if is_own(record.origin) && ended_as(record, AttemptClass::Failed) =>
        {
            retry::exhausted(record.retry.as_ref(), &record.node, paid(record), error)
        }
        (
            ActivityState::Prepared
            | ActivityState::Running
            | ActivityState::Completed
            | ActivityState::Failed
            | ActivityState::Unknown,
            _,
        ) => None,
    }
}

/// The record of an admitted request: intended, no attempt.
pub fn prepare(request: Request) -> ActivityRecord {
    let id = ActivityId::derive(&request.run, &request.node, request.activation, &request.key);
    ActivityRecord {
        run: request.run,
        id,
        node: request.node,
        activation: request.activation,
        key: request.key,
        implementation: request.implementation,
        effect: request.effect,
        retry: request.retry,
        state: ActivityState::Prepared,
        origin: None,
        attempts: Vec::new(),
        not_before: None,
        step_attempt: 0,
        input: request.input,
        output: None,
        error: None,
        decision: None,
    }
}

/// Begins the attempt that `admit` allowed. An attempt of a lost lease that is still told as running is closed first. The
/// outcome of an earlier attempt goes, the decision stays (D158); a completed record stays as it is.
pub fn start(record: &mut ActivityRecord, context: &Context, recovery: bool) {
    if record.state == ActivityState::Completed {
        return;
    }
    abandon(record, context.now);
    let n = record.attempts.last().map_or(1, |last| last.n.saturating_add(1));
    record.attempts.push(Attempt {
        n,
        incarnation: context.incarnation,
        recovery,
        started_at: context.now,
        ended_at: None,
        class: AttemptClass::Running,
        error: None,
    });
    record.state = ActivityState::Running;
    record.step_attempt = context.step_attempt;
    record.origin = None;
    record.not_before = None;
    record.output = None;
    record.error = None;
}

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Settlement {
    Completed(Payload),
    /// Answered with a failure, or known to have had no effect.
    Failed {
        error: Failure,
        /// The callee's `Retry-After`, from here.
        retry_after: Option<Duration>,
    },
    /// Cut off: whether it had its effect is not known, and no failure is made of that (D136, D244).
    Abandoned,
}

/// Where an activity stands after an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum After {
    Completed,
    /// `exhausted` when a limit of two or more attempts ran out.
    Failed {
        exhausted: Option<Exhausted>,
    },
    /// A retry is prepared; park the run until then (D148).
    Retry(Timestamp),
    /// Ask `admit` again: it says whether the attempt may be repeated.
    Unknown,
}

/// Ends the attempt under way. `jitter` is from 0 to 1, sampled for this call. Without an attempt under way nothing changes: an
/// outcome that comes after its attempt was abandoned is no second outcome.
pub fn settle(record: &mut ActivityRecord, settlement: Settlement, now: Timestamp, jitter: f64) -> After {
    match settlement {
        Settlement::Completed(output) => {
            if end_attempt(record, AttemptClass::Completed, None, now) {
                complete(record, output, Origin::Live);
            }
        }
        Settlement::Failed { error, retry_after } => {
            if end_attempt(record, AttemptClass::Failed, Some(error.clone()), now) {
                let used = paid(record);
                let policy = record.retry.as_ref();
                match retry::after_failure(policy, &record.node, used, &error, retry_after, now, jitter) {
                    Next::Again(not_before) => prepare_retry(record, not_before),
                    Next::Final { exhausted: _ } => fail(record, error, Origin::Live),
                }
            }
        }
        Settlement::Abandoned => {
            abandon(record, now);
        }
    }
    standing(record, now)
}

fn standing(record: &ActivityRecord, now: Timestamp) -> After {
    match record.state {
        ActivityState::Completed => After::Completed,
        ActivityState::Failed => After::Failed {
            exhausted: exhausted(record),
        },
        ActivityState::Prepared => After::Retry(record.not_before.as_ref().map_or(now, |n| n.at)),
        ActivityState::Running | ActivityState::Unknown => After::Unknown,
    }
}

/// Abandons an attempt that another lease had under way: its worker is lost, its effect not known (D140). True when the record
/// changed.
pub fn recover(record: &mut ActivityRecord, incarnation: u64, now: Timestamp) -> bool {
    !has_attempt_of(record, incarnation) && abandon(record, now)
}

/// Takes what a read-only probe found by the activity's identity (D152). Nothing found proves nothing. True when the record
/// changed; the abandoned attempt stays abandoned (D156).
pub fn reconcile(record: &mut ActivityRecord, found: Option<Payload>, _now: Timestamp) -> bool {
    match (record.state, found) {
        (ActivityState::Unknown, Some(output)) => {
            complete(record, output, Origin::Reconciled);
            true
        }
        (
            ActivityState::Prepared
            | ActivityState::Running
            | ActivityState::Completed
            | ActivityState::Failed
            | ActivityState::Unknown,
            _,
        ) => false,
    }
}

/// Closes the attempt under way. False when there is none.
fn end_attempt(
    record: &mut ActivityRecord,
    class: AttemptClass,
    error: Option<Failure>,
    now: Timestamp,
) -> bool {
    match record.attempts.last_mut() {
        Some(attempt) if attempt.class == AttemptClass::Running => {
            attempt.class = class;
            attempt.error = error;
            // A wall clock may step back; an attempt does not end before it starts.
            attempt.ended_at = Some(now.max(attempt.started_at));
            true
        }
        Some(_) | None => false,
    }
}

fn abandon(record: &mut ActivityRecord, now: Timestamp) -> bool {
    let ended = end_attempt(record, AttemptClass::Abandoned, None, now);
    if ended {
        record.state = ActivityState::Unknown;
    }
    ended
}

fn complete(record: &mut ActivityRecord, output: Payload, origin: Origin) {
    record.state = ActivityState::Completed;
    record.origin = Some(origin);
    record.output = Some(output);
}

fn fail(record: &mut ActivityRecord, error: Failure, origin: Origin) {
    record.state = ActivityState::Failed;
    record.origin = Some(origin);
    record.error = Some(error);
}

fn prepare_retry(record: &mut ActivityRecord, not_before: NotBefore) {
    record.state = ActivityState::Prepared;
    record.not_before = Some(not_before);
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
