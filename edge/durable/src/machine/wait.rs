//! The wait machine (D161 to D178): what arming, a delivery, the timer and a cancellation do to a wait. The first resolution
//! that is committed wins and nothing takes it back. The machine never reads a payload; it asks the host's matcher at most
//! once, and only about a delivery that could win.
//!
//! | status | delivery | timer, once due | cancellation | end of the run |
//! |---|---|---|---|---|
//! | armed | matched: `accepted`, becomes delivered; else `unmatched`, stays; hard and due: expired | becomes timed out | becomes cancelled | becomes cancelled |
//! | delivered | `superseded` | nothing | already settled | nothing |
//! | timed out | `superseded`; hard: expired | nothing | already settled | nothing |
//! | cancelled | `canceled` | nothing | already settled | nothing |
//!
//! Words in code marks are verdicts: each is recorded once as a decision, and the same decision is answered by it for ever,
//! whatever became of the wait. Everything else is a refusal: nothing is recorded and the wait is as it was.
//!
//! Deliveries to a wait and its cancellation share one ledger, `Scope::Wait`: an id that named a delivery cannot name the
//! cancellation, and the other way round. Before the table is read, an id that is in the ledger either replays its answer or,
//! with other content, conflicts.

mod decision;
#[cfg(test)]
mod tests;
mod validate;

pub use decision::WaitDecision;
pub use validate::{InvalidWait, check, rearm, validate};

use crate::ids::{CorrelationId, DecisionId, Key, NodeName, Revision, RunId, WaitId};
use crate::payload::{Digest, Payload};
use crate::record::{
    Continuation, DeadlinePolicy, DecisionRecord, Settled, WaitLabels, WaitRecord, WaitStatus, WaitingKind,
    words,
};
use crate::time::Timestamp;

/// What a node asks for, or a wait directive carries (D164).
#[derive(Debug, Clone, PartialEq)]
pub struct WaitSpec {
    pub key: Key,
    pub correlation: CorrelationId,
    /// An approval, an input, an event, a timer or children.
    pub kind: WaitingKind,
    pub continuation: Continuation,
    pub labels: WaitLabels,
    /// What people or callers are shown. Opaque.
    pub subject: Payload,
    /// May be over already: the timer is due at once.
    pub deadline: Option<Timestamp>,
    pub deadline_policy: DeadlinePolicy,
}

/// Where in a run a wait is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    pub run: RunId,
    pub node: NodeName,
    /// From 1.
    pub activation: u64,
}

/// What asking again for a wait finds (D163).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Armed {
    StillArmed,
    /// The record has the answer.
    Settled,
}

/// An event from outside, addressed to one wait.
#[derive(Debug, Clone, PartialEq)]
pub struct Delivery {
    pub id: DecisionId,
    pub correlation: CorrelationId,
    /// Which generation the sender means; `None`: the one it found.
    pub generation: Option<u32>,
    /// What the sender takes the wait's labels to be; `None`: it does not say.
    pub labels: Option<WaitLabels>,
    pub payload: Payload,
    /// The authenticated sender; never something the delivery says about itself (D85).
    pub by: Option<String>,
    /// Of the head as the sender's word met it. Recorded (D90), not compared.
    pub revision: Revision,
}

/// An operator's word that a wait will not be answered (D173). The runner ends the run in the same commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cancellation {
    pub id: DecisionId,
    pub reason: String,
    pub evidence: String,
    /// The authenticated operator.
    pub by: Option<String>,
    /// Of the head as the operator's word met it. Recorded (D90), not compared.
    pub revision: Revision,
}

words! {
    /// What became of a delivery.
    pub enum Verdict {
        /// It settled the wait.
        Accepted => "accepted",
        /// The matcher did not want it; the wait stays armed (D169).
        Unmatched => "unmatched",
        /// Another delivery or the timer was committed first (D168).
        Superseded => "superseded",
        /// The wait was cancelled or its run ended before (D174).
        Canceled => "canceled",
    }
}

words! {
    /// One of a wait's labels.
    pub enum Label {
        Matcher => "matcher",
        Payload => "payload",
        Continuation => "continuation",
    }
}

/// A delivery that has its answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Delivered {
    /// To be committed with the changed wait: the answer counts once both are durable.
    Recorded {
        verdict: Verdict,
        decision: DecisionRecord,
    },
    /// Nothing changed: this is the recorded answer (D167).
    Replayed { verdict: Verdict },
}

/// A cancellation that has its answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Cancelled {
    /// To be committed with the changed wait and the end of the run.
    Recorded { decision: DecisionRecord },
    /// Nothing changed.
    Replayed,
}

/// Why a delivery or a cancellation was not taken. Nothing is recorded and the wait is as it was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeliveryRefused {
    /// The id belongs to another delivery or cancellation of this wait (D167).
    #[error("this id was used with other content")]
    Conflict,
    /// There is no such wait, or it takes no deliveries: a timer (D170).
    #[error("no wait is armed for this")]
    NotArmed,
    /// Meant for an earlier generation (D172).
    #[error("this is for an earlier generation; the present one is {current}")]
    StaleGeneration { current: u32 },
    /// Meant for a generation that is not armed yet (D172).
    #[error("this is for a later generation")]
    FutureGeneration,
    #[error("the {which} label is another one")]
    LabelMismatch { which: Label },
    #[error("the correlation id is another one")]
    WrongCorrelation,
    /// The wait's ledger is full (D177).
    #[error("this wait has had {limit} deliveries, no more are taken")]
    TooMany { limit: u32 },
    /// After a hard deadline (D176).
    #[error("the deadline of this wait is over")]
    Expired,
    /// A cancellation came after the winner, or after another cancellation (D173).
    #[error("this wait is settled: {status}")]
    AlreadySettled { status: WaitStatus },
    /// The recorded decision is not one of this wait's.
    #[error("the recorded decision is corrupt: {what}")]
    Corrupt { what: String },
}

impl DeliveryRefused {
    /// A word for metrics and tests.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Conflict => "conflict",
            Self::NotArmed => "not_armed",
            Self::StaleGeneration { .. } => "stale_generation",
            Self::FutureGeneration => "future_generation",
            Self::LabelMismatch { .. } => "label_mismatch",
            Self::WrongCorrelation => "wrong_correlation",
            Self::TooMany { .. } => "too_many",
            Self::Expired => "expired",
            Self::AlreadySettled { .. } => "already_settled",
            Self::Corrupt { .. } => "corrupt",
        }
    }
}

/// The record of a wait that `check` allowed, to be committed together with the state it follows (D162). `generation` is from
/// 1 within address and key.
pub fn arm(address: &Address, spec: &WaitSpec, generation: u32, now: Timestamp) -> WaitRecord {
    WaitRecord {
        run: address.run.clone(),
        id: WaitId::derive(
            &address.run,
            &address.node,
            address.activation,
            &spec.key,
            generation,
        ),
        node: address.node.clone(),
        activation: address.activation,
        key: spec.key.clone(),
        correlation: spec.correlation.clone(),
        generation,
        kind: spec.kind,
        status: WaitStatus::Armed,
        continuation: spec.continuation.clone(),
        labels: spec.labels.clone(),
        subject: spec.subject.clone(),
        deadline: spec.deadline,
        deadline_policy: spec.deadline_policy,
        armed_at: now,
        deliveries: 0,
        settled: None,
    }
}

/// What a delivery does. `earlier` is the recorded decision of this id in this wait's scope. `matched` is the host's matcher; it
/// is called at most once, only for a delivery that could win, and before anything changes. `limit` bounds the recorded
/// deliveries of the wait; replays do not count.
///
/// # Errors
/// `DeliveryRefused`; then the wait is as it was.
pub fn deliver(
    wait: &mut WaitRecord,
    delivery: &Delivery,
    earlier: Option<&DecisionRecord>,
    matched: impl FnOnce() -> bool,
    now: Timestamp,
    limit: u32,
) -> Result<Delivered, DeliveryRefused> {
    addressed(wait, delivery.generation)?;
    let content = decision::content_of_delivery(delivery);
    if let Some(earlier) = earlier {
        return match replay(wait, &delivery.id, &content, earlier)? {
            WaitDecision::Deliver { verdict, .. } => Ok(Delivered::Replayed { verdict }),
            WaitDecision::Cancel { .. } => Err(corrupt("a cancellation with the content of a delivery")),
        };
    }
    if delivery.correlation != wait.correlation {
        return Err(DeliveryRefused::WrongCorrelation);
    }
    labelled(&wait.labels, delivery.labels.as_ref())?;
    let lost = loses(wait, now)?;
    if wait.deliveries >= limit {
        return Err(DeliveryRefused::TooMany { limit });
    }
    let verdict = match lost {
        Some(verdict) => verdict,
        None if matched() => Verdict::Accepted,
        None => Verdict::Unmatched,
    };
    let body = WaitDecision::of_delivery(wait, delivery, verdict);
    let decision = body.record(wait, &delivery.id, content, now).map_err(corrupt)?;
    if verdict == Verdict::Accepted {
        let (by, payload) = (Some(&delivery.id), Some(&delivery.payload));
        settle(wait, WaitStatus::Delivered, by, payload, now);
    }
    wait.deliveries = wait.deliveries.saturating_add(1);
    Ok(Delivered::Recorded { verdict, decision })
}

/// Lets the timer in: an armed wait whose deadline is reached times out, under either policy. Never early (D175, D176). Whether
/// it did.
pub fn time_out(wait: &mut WaitRecord, now: Timestamp) -> bool {
    is_due(wait, now) && settle(wait, WaitStatus::TimedOut, None, None, now)
}

/// What a cancellation of the wait does. `earlier` is the recorded decision of this id in this wait's scope.
///
/// # Errors
/// `Conflict`, `AlreadySettled` or `Corrupt`; then the wait is as it was.
pub fn cancel(
    wait: &mut WaitRecord,
    cancellation: &Cancellation,
    earlier: Option<&DecisionRecord>,
    now: Timestamp,
) -> Result<Cancelled, DeliveryRefused> {
    let content = decision::content_of_cancellation(cancellation);
    if let Some(earlier) = earlier {
        return match replay(wait, &cancellation.id, &content, earlier)? {
            WaitDecision::Cancel { .. } => Ok(Cancelled::Replayed),
            WaitDecision::Deliver { .. } => Err(corrupt("a delivery with the content of a cancellation")),
        };
    }
    match wait.status {
        WaitStatus::Armed => {
            let body = WaitDecision::of_cancellation(wait, cancellation);
            let decision = body
                .record(wait, &cancellation.id, content, now)
                .map_err(corrupt)?;
            settle(wait, WaitStatus::Cancelled, Some(&cancellation.id), None, now);
            Ok(Cancelled::Recorded { decision })
        }
        status @ (WaitStatus::Delivered | WaitStatus::TimedOut | WaitStatus::Cancelled) => {
            Err(DeliveryRefused::AlreadySettled { status })
        }
    }
}

/// The run ended or went elsewhere: an armed wait is cancelled without a decision. Whether it was armed.
pub fn withdraw(wait: &mut WaitRecord, now: Timestamp) -> bool {
    settle(wait, WaitStatus::Cancelled, None, None, now)
}

/// Timers take no deliveries, and a delivery that names a generation means only that one.
fn addressed(wait: &WaitRecord, generation: Option<u32>) -> Result<(), DeliveryRefused> {
    if wait.kind == WaitingKind::Timer {
        return Err(DeliveryRefused::NotArmed);
    }
    match generation {
        Some(meant) if meant < wait.generation => Err(DeliveryRefused::StaleGeneration {
            current: wait.generation,
        }),
        Some(meant) if meant > wait.generation => Err(DeliveryRefused::FutureGeneration),
        Some(_) | None => Ok(()),
    }
}

fn labelled(own: &WaitLabels, meant: Option<&WaitLabels>) -> Result<(), DeliveryRefused> {
    let Some(meant) = meant else {
        return Ok(());
    };
    let pairs = [
        (Label::Matcher, &own.matcher, &meant.matcher),
        (Label::Payload, &own.payload, &meant.payload),
        (Label::Continuation, &own.continuation, &meant.continuation),
    ];
    match pairs.into_iter().find(|(_, own, meant)| own != meant) {
        Some((which, ..)) => Err(DeliveryRefused::LabelMismatch { which }),
        None => Ok(()),
    }
}

/// The verdict of a delivery that cannot win any more; `None` when the matcher decides.
fn loses(wait: &WaitRecord, now: Timestamp) -> Result<Option<Verdict>, DeliveryRefused> {
    match (wait.status, wait.deadline_policy) {
        (WaitStatus::Armed, DeadlinePolicy::Hard) if is_due(wait, now) => Err(DeliveryRefused::Expired),
        (WaitStatus::TimedOut, DeadlinePolicy::Hard) => Err(DeliveryRefused::Expired),
        (WaitStatus::Armed, DeadlinePolicy::FirstCommitted | DeadlinePolicy::Hard) => Ok(None),
        (WaitStatus::Delivered, DeadlinePolicy::FirstCommitted | DeadlinePolicy::Hard)
        | (WaitStatus::TimedOut, DeadlinePolicy::FirstCommitted) => Ok(Some(Verdict::Superseded)),
        (WaitStatus::Cancelled, DeadlinePolicy::FirstCommitted | DeadlinePolicy::Hard) => {
            Ok(Some(Verdict::Canceled))
        }
    }
}

/// The recorded decision, when it is this one.
fn replay(
    wait: &WaitRecord,
    id: &DecisionId,
    content: &Digest,
    earlier: &DecisionRecord,
) -> Result<WaitDecision, DeliveryRefused> {
    if !decision::belongs(earlier, wait, id) {
        return Err(corrupt("it is not a decision of this wait and id"));
    }
    if earlier.content != *content {
        return Err(DeliveryRefused::Conflict);
    }
    WaitDecision::decode(&earlier.body).map_err(corrupt)
}

fn corrupt(what: impl std::fmt::Display) -> DeliveryRefused {
    DeliveryRefused::Corrupt {
        what: what.to_string(),
    }
}

fn is_due(wait: &WaitRecord, now: Timestamp) -> bool {
    wait.deadline.is_some_and(|deadline| deadline <= now)
}

/// The one place where a wait's status changes: from armed, once. Whether it did.
fn settle(
    wait: &mut WaitRecord,
    status: WaitStatus,
    by: Option<&DecisionId>,
    payload: Option<&Payload>,
    now: Timestamp,
) -> bool {
    let armed = wait.status == WaitStatus::Armed;
    if armed {
        wait.status = status;
        wait.settled = Some(Settled {
            by: by.cloned(),
            payload: payload.cloned(),
            at: now,
        });
    }
    armed
}
