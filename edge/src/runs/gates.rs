//! What comes to a gate from outside: where the gate stands, and one delivery to it. The engine stores the delivery and decides
//! which one wins; here its answer gets the words of the API.

#[cfg(test)]
pub(crate) mod bench;

use bytes::Bytes;
use iop_durable::ids::{CorrelationId, DecisionId, check_text};
use iop_durable::machine::wait::{Delivery, Verdict, WaitDecision};
use iop_durable::payload::Payload;
use iop_durable::record::{DecisionRecord, Scope, Status, WaitRecord, WaitStatus};
use iop_durable::runner::{Addressed, Operator, RunError};
use iop_durable::time::Timestamp;
use iop_durable::token::ResumeToken;

use super::problem::{Code, Problem};

/// Longest reason, evidence and the like, in bytes of UTF-8.
const TEXT_MAX: usize = 16 << 10;

/// Where a gate stands at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    Open,
    /// Somebody's word settled it.
    Decided,
    /// Its time is over, whether its timer was committed or not (D87).
    Expired,
    /// It ended with a life of its run.
    Withdrawn,
}

impl Standing {
    pub(crate) fn of(wait: &WaitRecord, now: Timestamp) -> Self {
        match wait.status {
            WaitStatus::Armed if wait.deadline.is_some_and(|deadline| deadline <= now) => Self::Expired,
            WaitStatus::Armed => Self::Open,
            WaitStatus::Delivered => Self::Decided,
            WaitStatus::TimedOut => Self::Expired,
            WaitStatus::Cancelled => Self::Withdrawn,
        }
    }
}

/// A gate as it is after a delivery.
#[derive(Debug, Clone)]
pub(crate) struct Told {
    pub(crate) verdict: Verdict,
    /// The same delivery was answered before.
    pub(crate) replayed: bool,
    pub(crate) wait: WaitRecord,
    /// Of the run after it.
    pub(crate) token: ResumeToken,
    pub(crate) standing: Standing,
    /// Of the run when it was told, and the moment of that.
    pub(crate) status: Status,
    pub(crate) now: Timestamp,
}

/// Why a delivery was not taken.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum NotTold {
    /// The id names another delivery to this gate.
    OtherContent,
    /// Its time is over.
    Expired,
    Problem(Box<Problem>),
}

impl From<Problem> for NotTold {
    fn from(problem: Problem) -> Self {
        Self::Problem(Box::new(problem))
    }
}

/// One delivery.
#[derive(Debug, Clone)]
pub(crate) struct Word {
    pub(crate) id: DecisionId,
    /// What the sender says it is about; `None`: whatever the gate is about.
    pub(crate) correlation: Option<CorrelationId>,
    pub(crate) payload: Bytes,
}

/// Delivers to a gate, on any host and whoever works on the run. Durable when this returns.
pub(crate) async fn tell(
    operator: &Operator,
    addressed: Addressed,
    word: Word,
    by: &str,
) -> Result<Told, NotTold> {
    let run = addressed.loaded.head.id.clone();
    let wait = addressed.wait.id.clone();
    let delivery = Delivery {
        id: word.id,
        correlation: word
            .correlation
            .unwrap_or_else(|| addressed.wait.correlation.clone()),
        generation: None,
        labels: None,
        payload: Payload::new(word.payload),
        by: Some(by.to_owned()),
        revision: addressed.loaded.head.revision,
    };
    // It holds a run: callers need not be as large.
    match Box::pin(operator.deliver_addressed(addressed, &delivery)).await {
        Ok(outcome) => Ok(Told {
            verdict: outcome.verdict,
            replayed: outcome.replayed,
            standing: Standing::of(&outcome.wait, outcome.now),
            wait: outcome.wait,
            token: outcome.token,
            status: outcome.status,
            now: outcome.now,
        }),
        Err(RunError::DeliveryConflict(why)) => {
            let store = operator.store();
            let now = store.wait(&run, &wait).await.map_err(Problem::from)?;
            let now = now.ok_or_else(|| Problem::from(RunError::WaitNotFound))?;
            if earlier(operator, &now, &delivery.id).await?.is_some() {
                return Err(NotTold::OtherContent);
            }
            let time = store.now().await.map_err(Problem::from)?;
            if Standing::of(&now, time) == Standing::Expired {
                return Err(NotTold::Expired);
            }
            Err(Problem::from(RunError::DeliveryConflict(why))
                .of(run.as_str())
                .into())
        }
        Err(error) => Err(Problem::from(error).of(run.as_str()).into()),
    }
}

/// What was delivered to this gate under this id before.
///
/// # Errors
/// The store's.
pub(crate) async fn earlier(
    operator: &Operator,
    wait: &WaitRecord,
    id: &DecisionId,
) -> Result<Option<DecisionRecord>, Problem> {
    let scope = Scope::Wait(wait.id.clone());
    Ok(operator.store().decision(&wait.run, &scope, id).await?)
}

/// Whether it was this sender's word. The engine then answers as it did, whatever holds by now.
pub(crate) fn said_by(earlier: Option<&DecisionRecord>, by: &str) -> bool {
    earlier.is_some_and(|record| sender(record).as_deref() == Some(by))
}

/// Who sent what a gate's ledger records.
pub(crate) fn sender(record: &DecisionRecord) -> Option<String> {
    match WaitDecision::decode(&record.body) {
        Ok(WaitDecision::Deliver { by, .. } | WaitDecision::Cancel { by, .. }) => by,
        Err(_) => None,
    }
}

/// An id that was used before with something else.
pub(crate) fn other_content(field: &'static str) -> Problem {
    Problem::new(
        Code::DeliveryConflict,
        format!("{field} was used before with other content."),
    )
    .at(field)
}

/// A gate that ended with a life of its run takes no answer.
pub(crate) fn withdrawn(what: &str, status: Status) -> Problem {
    if status.is_terminal() {
        Problem::new(
            Code::RunTerminal,
            format!("The run is over ({status}); its {what} ended with it."),
        )
    } else {
        Problem::new(
            Code::RunNotWaiting,
            format!("The {what} ended with an earlier life of its run."),
        )
    }
}

/// An id of the caller's for a decision, a delivery or a cancellation.
///
/// # Errors
/// `invalid_encoding` that names `field`.
pub(crate) fn decision_id(field: &'static str, text: &str) -> Result<DecisionId, Problem> {
    check_text(field, text).map_err(RunError::from)?;
    DecisionId::new(text).map_err(|e| RunError::from(e).into())
}

/// A reason, an evidence and the like; `needed`: not blank.
///
/// # Errors
/// `invalid_request` that names `field`.
pub(crate) fn text(field: &'static str, text: &str, needed: bool) -> Result<(), Problem> {
    if needed && text.trim().is_empty() {
        return Err(Problem::invalid(field, format!("{field} must not be blank.")));
    }
    if text.len() > TEXT_MAX {
        let why = format!("{field} is {} bytes, at most {TEXT_MAX} are allowed.", text.len());
        return Err(Problem::invalid(field, why));
    }
    Ok(())
}
