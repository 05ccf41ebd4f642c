//! The journal of external effects (D137 to D160): one record per activity, attempts inside it, never rewritten.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::ids::{ActivityId, DecisionId, Key, NodeName, RunId};
use crate::payload::Payload;
use crate::record::words;
use crate::time::Timestamp;

words! {
    /// Where an activity stands (D139).
    pub enum ActivityState {
        /// Intended, not dispatched: before its first attempt, or between two.
        Prepared => "prepared",
        /// An attempt may be under way.
        Running => "running",
        Completed => "completed",
        Failed => "failed",
        /// An attempt may or may not have had its effect.
        Unknown => "unknown",
    }
}

impl ActivityState {
    /// Prepared, running and unknown activities hold their step back (D143).
    pub const fn is_open(self) -> bool {
        match self {
            Self::Prepared | Self::Running | Self::Unknown => true,
            Self::Completed | Self::Failed => false,
        }
    }
}

words! {
    /// Where a result comes from (D144).
    pub enum Origin {
        Live => "live",
        Replayed => "replayed",
        Reconciled => "reconciled",
        Manual => "manual",
        Simulated => "simulated",
    }
}

words! {
    /// What repeating a call does outside: the safe-retry contract of an activity (D24, D147).
    pub enum Effect {
        /// Nothing: may be repeated freely, no intent is stored first.
        ReadOnly => "read_only",
        /// Once per idempotency key: may be repeated with the same key.
        Idempotent => "idempotent",
        /// Something, each time: never repeated by the engine.
        Unsafe => "unsafe",
    }
}

words! {
    /// How the pause between attempts grows.
    pub enum Backoff {
        Fixed => "fixed",
        Exponential => "exponential",
    }
}

/// When and how often an activity or a step is tried again (D147). It cannot change for an existing identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetryPolicy {
    /// A name for the contract; compared, never interpreted.
    pub label: String,
    /// Attempts in all, from 1.
    pub max_attempts: u32,
    pub backoff: Backoff,
    pub initial: Duration,
    /// The longest pause.
    pub max: Duration,
    /// Growth per attempt in thousandths; 2000 doubles. Read when exponential.
    pub multiplier_permille: u32,
    /// The pause is shortened by up to this many thousandths; sampled once and stored (D150).
    pub jitter_permille: u16,
}

words! {
    /// How an attempt ended.
    pub enum AttemptClass {
        Running => "running",
        Completed => "completed",
        Failed => "failed",
        /// Its worker was lost or it was cut off: the effect is not known (D140).
        Abandoned => "abandoned",
    }
}

/// One dispatch (D156: immutable once it has ended).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// From 1, over all causes.
    pub n: u32,
    /// Of the lease that dispatched it.
    pub incarnation: u64,
    /// Whether it repeats an attempt whose worker was lost; those are counted apart from retries.
    pub recovery: bool,
    pub started_at: Timestamp,
    pub ended_at: Option<Timestamp>,
    pub class: AttemptClass,
    pub error: Option<Failure>,
}

/// The earliest next attempt, with where it comes from (D150).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotBefore {
    pub at: Timestamp,
    /// Whether the callee's own hint (`Retry-After`) set it rather than the policy.
    pub hinted: bool,
}

/// One external effect and what is known of it.
#[derive(Debug, Clone, PartialEq)]
pub struct ActivityRecord {
    pub run: RunId,
    pub id: ActivityId,
    pub node: NodeName,
    pub activation: u64,
    pub key: Key,
    /// What carries it out, as a label: a changed one conflicts (D141).
    pub implementation: String,
    pub effect: Effect,
    pub retry: Option<RetryPolicy>,
    pub state: ActivityState,
    /// Set when completed or failed.
    pub origin: Option<Origin>,
    pub attempts: Vec<Attempt>,
    pub not_before: Option<NotBefore>,
    /// The run's attempt of the step in which the last attempt was made: a failed activity is tried again only when its step is.
    pub step_attempt: u32,
    pub input: Payload,
    pub output: Option<Payload>,
    pub error: Option<Failure>,
    /// The decision that settled or re-opened it by hand (D153).
    pub decision: Option<DecisionId>,
}

/// The most attempts that any one of these took; 0 for none.
pub fn most_attempts<'a>(activities: impl IntoIterator<Item = &'a ActivityRecord>) -> u32 {
    let taken = activities
        .into_iter()
        .map(|activity| u32::try_from(activity.attempts.len()).unwrap_or(u32::MAX));
    taken.max().unwrap_or(0)
}
