//! Retry policies of activities and of steps: whether another attempt follows a failure, and from when (D147 to D150). Pure.
//!
//! A pause becomes an absolute time once, with the jitter of that moment, and is stored: a restart neither resets nor repeats
//! it. Pauses are computed in whole nanoseconds without overflow and stop at the policy's `max`; times stop at
//! `Timestamp::MAX`.

use std::time::Duration;

use crate::failure::Failure;
use crate::ids::{InvalidId, NodeName, check_text};
use crate::record::{Backoff, Effect, Exhausted, NotBefore, RetryPolicy};
use crate::time::Timestamp;

/// Why a policy is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPolicy {
    #[error(transparent)]
    Label(#[from] InvalidId),
    #[error("max_attempts: is 0, the first attempt counts too")]
    NoAttempts,
    #[error("max_attempts: is {max_attempts}, an unsafe effect is never repeated")]
    Unsafe { max_attempts: u32 },
    #[error("initial: is longer than max")]
    InitialOverMax,
    #[error("multiplier_permille: is {permille}, an exponential pause does not shrink")]
    Shrinking { permille: u32 },
    #[error("jitter_permille: is {permille}, at most 1000 are allowed")]
    Jitter { permille: u16 },
}

/// Checks a policy by itself, as a step has it.
///
/// # Errors
/// `InvalidPolicy`, for the first rule that does not hold.
pub fn check(policy: &RetryPolicy) -> Result<(), InvalidPolicy> {
    check_text("label", &policy.label)?;
    if policy.max_attempts == 0 {
        return Err(InvalidPolicy::NoAttempts);
    }
    if policy.initial > policy.max {
        return Err(InvalidPolicy::InitialOverMax);
    }
    match policy.backoff {
        Backoff::Fixed => {}
        Backoff::Exponential if policy.multiplier_permille < 1000 => {
            return Err(InvalidPolicy::Shrinking {
                permille: policy.multiplier_permille,
            });
        }
        Backoff::Exponential => {}
    }
    if policy.jitter_permille > 1000 {
        return Err(InvalidPolicy::Jitter {
            permille: policy.jitter_permille,
        });
    }
    Ok(())
}

/// Checks a policy for an activity: more than one attempt needs an effect that may be repeated (D24, D147).
///
/// # Errors
/// As `check`, and `InvalidPolicy::Unsafe`.
pub fn check_for(policy: &RetryPolicy, effect: Effect) -> Result<(), InvalidPolicy> {
    check(policy)?;
    match effect {
        Effect::ReadOnly | Effect::Idempotent => Ok(()),
        Effect::Unsafe if policy.max_attempts > 1 => Err(InvalidPolicy::Unsafe {
            max_attempts: policy.max_attempts,
        }),
        Effect::Unsafe => Ok(()),
    }
}

/// Attempts in all. No policy is one attempt.
pub fn limit(policy: Option<&RetryPolicy>) -> u32 {
    policy.map_or(1, |p| p.max_attempts)
}

/// What follows a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// Another attempt, from then on.
    Again(NotBefore),
    /// None. `exhausted` when a limit of two or more ran out; one attempt, or an error that is not retryable, is a plain failure
    /// (durable-api §8).
    Final { exhausted: Option<Exhausted> },
}

/// What follows the failure of an attempt that `policy` paid for. `used` counts the attempts it has paid for, this one
/// included; `hint` is the callee's `Retry-After`; `jitter` is from 0 to 1 and sampled for this call.
pub fn after_failure(
    policy: Option<&RetryPolicy>,
    node: &NodeName,
    used: u32,
    error: &Failure,
    hint: Option<Duration>,
    now: Timestamp,
    jitter: f64,
) -> Next {
    match policy {
        Some(policy) if error.retryable && used < policy.max_attempts => {
            Next::Again(not_before(policy, used, hint, now, jitter))
        }
        Some(_) | None => Next::Final {
            exhausted: exhausted(policy, node, used, error),
        },
    }
}

/// The limit that ran out when `error` is the last word after `used` paid attempts.
pub fn exhausted(
    policy: Option<&RetryPolicy>,
    node: &NodeName,
    used: u32,
    error: &Failure,
) -> Option<Exhausted> {
    let limit = limit(policy);
    (error.retryable && limit > 1 && used >= limit).then(|| Exhausted {
        budget: format!("retry:{node}"),
        used: used.into(),
        limit: limit.into(),
        decimals: 0,
    })
}

/// When the next attempt may start after `used` attempts (from 1): the later of the policy's pause and the callee's hint (D150).
pub fn not_before(
    policy: &RetryPolicy,
    used: u32,
    hint: Option<Duration>,
    now: Timestamp,
    jitter: f64,
) -> NotBefore {
    let own = now.plus(pause(policy, used, jitter));
    match hint.map(|hint| now.plus(hint)) {
        Some(hint) if hint > own => NotBefore {
            at: hint,
            hinted: true,
        },
        Some(_) | None => NotBefore {
            at: own,
            hinted: false,
        },
    }
}

/// The pause after `used` attempts: `initial` after the first, then as `backoff` says, at most `max`; shortened by
/// `jitter` (0 to 1; anything else counts as the nearest, no number as 0) times `jitter_permille`.
pub fn pause(policy: &RetryPolicy, used: u32, jitter: f64) -> Duration {
    let max = policy.max.as_nanos();
    let initial = policy.initial.as_nanos().min(max);
    let full = match policy.backoff {
        Backoff::Fixed => initial,
        Backoff::Exponential => grown(initial, max, policy.multiplier_permille, used.saturating_sub(1)),
    };
    shortened(full, jitter, policy.jitter_permille)
}

/// `initial` grown `times` times by `permille` thousandths, at most `max`. Ends early where growth ends, so that the largest
/// `times` costs no more than the way from a microsecond to `max`.
fn grown(initial: u128, max: u128, permille: u32, times: u32) -> u128 {
    let mut pause = initial;
    for _ in 0..times {
        let next = (pause.saturating_mul(permille.into()) / 1000).min(max);
        if next <= pause {
            break;
        }
        pause = next;
    }
    pause
}

/// Parts of a whole that the jitter is counted in.
const PARTS: u32 = 1_000_000;

/// At most `Duration::MAX`, as `full` comes from one: 1.9e28 ns times 1000 times `PARTS` is below 2^128.
fn shortened(full: u128, jitter: f64, permille: u16) -> Duration {
    // `as` turns what is no number into 0.
    let parts = (jitter.clamp(0.0, 1.0) * f64::from(PARTS)) as u128;
    let cut = full * u128::from(permille.min(1000)) * parts / (1000 * u128::from(PARTS));
    let nanos = full - cut;
    let second = 1_000_000_000;
    match (u64::try_from(nanos / second), u32::try_from(nanos % second)) {
        (Ok(secs), Ok(subsec)) => Duration::new(secs, subsec),
        (Ok(_) | Err(_), _) => Duration::MAX,
    }
}

#[cfg(test)]
mod tests;
