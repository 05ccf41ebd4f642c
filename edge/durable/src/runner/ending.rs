//! How a segment is left: parked, over, or cut short.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::failure::{Failure, FailureKind};
use crate::graph::caught;
use crate::record::{
    CancelRequest, EventName, Outcome, OutcomeCancel, Reason, RunHead, Status, StepRecord, StepStatus,
    Waiting, WaitingKind, WaitingOn,
};
use crate::runner::draft::{Draft, Halt, read_on};
use crate::runner::drive::Why;
use crate::runner::keeper::Held;
use crate::runner::ledger::{Holding, Ledger};
use crate::runner::segment::{Segment, Turn};
use crate::store::{Store, StoreError};
use crate::time::Timestamp;

#[derive(Serialize)]
struct WaitingEvent<'a> {
    reason: &'a str,
    waiting_on: Vec<OnEvent<'a>>,
}

/// What a pause is on, and where that stood then: the attempt behind it, and when the next one is due.
#[derive(Serialize)]
struct OnEvent<'a> {
    #[serde(flatten)]
    on: &'a WaitingOn,
    #[serde(skip_serializing_if = "Option::is_none")]
    attempt: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    at: Option<Timestamp>,
}

impl<'a> OnEvent<'a> {
    /// `attempt`: of the step.
    fn of(on: &'a WaitingOn, holding: &Holding, attempt: u32) -> Self {
        let stand = holding.stands.get(&on.id).copied();
        let (attempt, at) = match (on.kind, stand) {
            (WaitingKind::Retry, None) => (Some(attempt), holding.due_at),
            (WaitingKind::Retry, Some(stand)) => (Some(stand.attempt), stand.at.or(holding.due_at)),
            (_, Some(stand)) => (Some(stand.attempt), None),
            (WaitingKind::Timer, None) => (None, holding.due_at),
            (_, None) => (None, None),
        };
        Self { on, attempt, at }
    }
}

impl<S, E> Segment<S, E>
where
    S: Send + Sync + 'static,
    E: Serialize + DeserializeOwned + Send + Sync + 'static,
{
    /// The terminal commit (D235). A request to cancel that was accepted before it wins over every other end.
    pub(crate) async fn end(&mut self, mut draft: Draft, mut outcome: Outcome) -> Result<Turn, Halt> {
        if let Some(usage) = &self.inner.graph.usage
            && let Ok(state) = self.inner.graph.decode(&draft.state)
        {
            outcome.usage = caught(|| usage(&state)).and_then(Result::ok);
        }
        draft.watch_inbox |= outcome.status != Status::Cancelled;
        end(&self.inner.store, &self.held, &mut draft, outcome).await?;
        self.leave(draft).await
    }

    /// Cancel, deadline or stop, at the last committed point: what the node had not committed is discarded (D103).
    pub(crate) async fn interrupt(&mut self, why: Why) -> Result<Turn, Halt> {
        let now = self.held.now();
        self.ledger.abandon_in_flight(now);
        if why == Why::Stop {
            if self.ledger.holding().unknown {
                return self.hold().await;
            }
            let mut draft = self.draft();
            draft.take(self.ledger.take_dirty(), self.ledger.open());
            draft.head.status = Status::Queued;
            draft.head.waiting = None;
            return self.leave(draft).await;
        }
        self.cancel_children().await?;
        let mut draft = self.draft();
        match cut_short(
            &mut draft,
            &self.ledger,
            self.cancel.as_ref(),
            self.entered_at,
            now,
        ) {
            Some(outcome) => self.end(draft, outcome).await,
            None => self.leave(draft).await,
        }
    }
}

impl<S, E> Segment<S, E> {
    /// Before the end: the runs that this one started are asked to end with it. A store that is away is asked again while an
    /// outcome is not stored.
    async fn cancel_children(&self) -> Result<(), Halt> {
        let operator = self.inner.operator();
        let by = self.cancel.as_ref().and_then(|cancel| cancel.by.as_deref());
        let mut pause = Duration::from_millis(20);
        loop {
            match operator.cancel_children(&self.head.id, by).await {
                Err(StoreError::Unavailable { .. }) if self.ledger.has_outcome() && self.held.is_live() => {}
                asked => return asked.map_err(Halt::Store),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }
}

/// Parks: `ambiguous` when an effect is unknown, else `waiting`. An unknown effect is not ended by a deadline: it stays until
/// it is resolved.
pub(crate) fn park(draft: &mut Draft, holding: Holding, reason: Option<String>) {
    let (status, name) = if holding.unknown {
        (Status::Ambiguous, EventName::Ambiguous)
    } else {
        (Status::Waiting, EventName::Waiting)
    };
    let kind = holding.on.first().map_or("resume", |on| on.kind.as_str());
    let reason = reason.unwrap_or_else(|| kind.to_owned());
    draft.due_at = if holding.unknown {
        None
    } else {
        [holding.due_at, draft.head.deadline].into_iter().flatten().min()
    };
    draft.engine_event(
        name,
        &WaitingEvent {
            reason: &reason,
            waiting_on: holding
                .on
                .iter()
                .map(|on| OnEvent::of(on, &holding, draft.head.attempt))
                .collect(),
        },
    );
    draft.head.status = status;
    draft.head.waiting = Some(Waiting {
        reason,
        due_at: holding.due_at,
        on: holding.on,
    });
    draft.watch_inbox = true;
}

/// Ends: the outcome with every typed effect of the run, in order (D105), encoded once.
pub(crate) async fn end(
    store: &Arc<dyn Store>,
    held: &Held,
    draft: &mut Draft,
    mut outcome: Outcome,
) -> Result<(), Halt> {
    if draft.head.effects > 0 {
        let mut after = 0;
        loop {
            let page = read_on(held, draft.outcome, || store.steps(&draft.head.id, after, 500)).await?;
            let Some(last) = page.last() else { break };
            after = last.activation;
            // A step that is done again, in another life, tells its own once more.
            let others = page
                .into_iter()
                .filter(|step| draft.steps.iter().all(|own| own.activation != step.activation));
            outcome.effects.extend(others.flat_map(|step| step.effects));
        }
        outcome
            .effects
            .extend(draft.steps.iter().flat_map(|step| step.effects.clone()));
    }
    let encoded = outcome
        .encode()
        .map_err(|e| Halt::Store(StoreError::corrupt(format!("the outcome cannot be encoded: {e}"))))?;
    if outcome.status != Status::Failed {
        draft.head.cursor = None;
    }
    draft.end(outcome.status, encoded);
    Ok(())
}

/// A run cut short by a cancellation or its deadline: everything that can be closed is closed. The outcome, or `None` when an
/// unknown effect keeps the run `ambiguous` (durable-api §8, "Cancel").
pub(crate) fn cut_short(
    draft: &mut Draft,
    ledger: &Ledger,
    cancel: Option<&CancelRequest>,
    entered_at: Timestamp,
    now: Timestamp,
) -> Option<Outcome> {
    let completed = ledger.completed();
    let recorded = ledger.step_is_recorded();
    let failure = Failure::new(FailureKind::Refused, "the run was cancelled").code("cancelled");
    ledger.close(&failure, now);
    let holding = ledger.holding();
    draft.take(ledger.take_dirty(), ledger.open());
    if holding.unknown {
        park(draft, holding, None);
        return None;
    }
    if let (false, Some(node)) = (recorded, draft.head.cursor.clone()) {
        let step = StepRecord {
            activation: draft.head.activation,
            node,
            status: StepStatus::Cancelled,
            attempts: draft.head.attempt.max(ledger.most_attempts()),
            result: None,
            error: None,
            effects: Vec::new(),
            started_at: entered_at,
            ended_at: now,
        };
        draft.step_completed(step);
    }
    let reason = if cancel.is_some() {
        Reason::Cancelled
    } else {
        Reason::Deadline
    };
    let mut outcome = Outcome::new(Status::Cancelled, reason);
    outcome.cancel = Some(match cancel {
        Some(cancel) => OutcomeCancel {
            by: cancel.by.clone(),
            reason: cancel.reason.clone(),
            deadline: None,
        },
        None => OutcomeCancel {
            by: None,
            reason: "deadline".to_owned(),
            deadline: draft.head.deadline.map(|deadline| deadline.to_string()),
        },
    });
    outcome.evidence = completed
        .iter()
        .filter_map(|(id, key)| {
            let text = serde_json::json!({ "activity_id": id.as_str(), "key": key.as_str() });
            serde_json::value::to_raw_value(&text).ok()
        })
        .collect();
    Some(outcome)
}

/// Bytes of an outcome, for errors that carry it.
pub(crate) fn outcome_of(head: &RunHead) -> Bytes {
    head.outcome.clone().unwrap_or_default()
}
