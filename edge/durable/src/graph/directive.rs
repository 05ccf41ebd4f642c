//! What a node says when it is done (D248). A node never names the next node: routes belong to the graph (D249).

use std::time::Duration;

use crate::failure::Failure;
use crate::ids::{CorrelationId, Key};
use crate::payload::Payload;
use crate::record::{DeadlinePolicy, Exhausted, WaitingKind};

/// A graph without typed effects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum NoEffect {}

/// How an activation ends, with the typed effects it emits (D105).
#[derive(Debug, Clone)]
pub struct Directive<E> {
    pub(crate) base: Base,
    pub(crate) effects: Vec<E>,
    pub(crate) result: Option<String>,
}

#[derive(Debug, Clone)]
pub(crate) enum Base {
    Completed,
    End,
    Fail(Failure),
    Exhaust(Exhausted),
    Suspend {
        reason: String,
        resume_at: Option<String>,
    },
    Retry {
        max_attempts: u32,
    },
    Wait(Await),
}

/// A wait of the graph: the node is over, its state is saved, and an event or the deadline selects the next node by the
/// wait route declared for this node (D162, D164).
#[derive(Debug, Clone)]
pub struct Await {
    pub key: Key,
    pub correlation: CorrelationId,
    /// `Event`, `Input`, `Approval` or `Timer`.
    pub kind: WaitingKind,
    /// What people or callers are shown. Opaque.
    pub subject: Payload,
    pub deadline: Option<Deadline>,
    pub deadline_policy: DeadlinePolicy,
}

/// A point in time, or a span from the moment the wait is armed, by the store's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deadline {
    At(crate::time::Timestamp),
    In(Duration),
}

impl<E> Directive<E> {
    fn of(base: Base) -> Self {
        Self {
            base,
            effects: Vec::new(),
            result: None,
        }
    }

    /// The graph decides what follows. On a declared terminal node without a route the run succeeds.
    pub fn completed() -> Self {
        Self::of(Base::Completed)
    }

    /// The run succeeds here.
    pub fn end() -> Self {
        Self::of(Base::End)
    }

    /// The run fails here, with the state this node returned.
    pub fn fail(failure: Failure) -> Self {
        Self::of(Base::Fail(failure))
    }

    /// A limit ran out: the run ends `exhausted` here, with the state this node returned and what it drew on the budgets (D17).
    pub fn exhaust(exhausted: Exhausted) -> Self {
        Self::of(Base::Exhaust(exhausted))
    }

    /// The run is parked until somebody resumes it; it goes on at this node unless `resume_at` says otherwise.
    pub fn suspend(reason: impl Into<String>) -> Self {
        Self::of(Base::Suspend {
            reason: reason.into(),
            resume_at: None,
        })
    }

    /// Where a suspended run goes on (D98). Read after `suspend` only; the name is checked before anything is saved.
    #[must_use]
    pub fn resume_at(mut self, node: impl Into<String>) -> Self {
        if let Base::Suspend { resume_at, .. } = &mut self.base {
            *resume_at = Some(node.into());
        }
        self
    }

    /// This node once more, with the state it was entered with, up to so many attempts in all; then the retry route declared
    /// for it, or the run is exhausted.
    pub fn retry(max_attempts: u32) -> Self {
        Self::of(Base::Retry { max_attempts })
    }

    /// Arms a wait and parks the run.
    pub fn wait(wait: Await) -> Self {
        Self::of(Base::Wait(wait))
    }

    /// Emits a typed effect together with this step, once (D256).
    #[must_use]
    pub fn effect(mut self, effect: E) -> Self {
        self.effects.push(effect);
        self
    }

    /// A short text for the step's history (D38).
    #[must_use]
    pub fn result(mut self, text: impl Into<String>) -> Self {
        self.result = Some(text.into());
        self
    }
}

/// Why a node could not go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NodeError {
    #[error(transparent)]
    Failed(#[from] Failure),
    /// A limit ran out; the run ends `exhausted` (D17). `failure` is the last failure, when a retry limit it was.
    #[error("{exhausted} are used")]
    Exhausted {
        exhausted: Exhausted,
        failure: Option<Failure>,
    },
}

impl From<Exhausted> for NodeError {
    fn from(exhausted: Exhausted) -> Self {
        Self::Exhausted {
            exhausted,
            failure: None,
        }
    }
}
