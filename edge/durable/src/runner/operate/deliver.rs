//! Answers to waits: to gates by anybody, to waits of a graph by the runner that has its route.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::{Operator, PATIENCE, PAUSE};
use crate::graph::caught;
use crate::ids::{DecisionId, Revision, RunId, WaitId};
use crate::machine::wait::{self, Delivered, Delivery, DeliveryRefused, Verdict};
use crate::record::{Continuation, DecisionRecord, Scope, Status, WaitRecord};
use crate::runner::draft::Draft;
use crate::runner::step::enter;
use crate::runner::{RunError, Runner};
use crate::store::{Authority, Loaded, Post, StoreError};
use crate::time::Timestamp;
use crate::token::ResumeToken;

/// The answer to a delivery.
#[derive(Debug, Clone, PartialEq)]
pub struct DeliverOutcome {
    pub verdict: Verdict,
    pub replayed: bool,
    /// Of the run after it.
    pub token: ResumeToken,
    /// The wait after it.
    pub wait: WaitRecord,
    /// Of the run when it was looked at, and the moment of that by the store's clock.
    pub status: Status,
    pub now: Timestamp,
}

/// What a delivery is judged by, in the order in which it is read: its run, its wait, what an earlier delivery of its id was.
#[derive(Debug, Clone)]
pub struct Addressed {
    pub loaded: Loaded,
    pub wait: WaitRecord,
    pub earlier: Option<DecisionRecord>,
}

impl Operator {
    /// What a delivery of this id meets.
    async fn address(
        &self,
        run: &RunId,
        wait: &WaitId,
        delivery: &DecisionId,
    ) -> Result<Addressed, RunError> {
        let loaded = self.store.load(run).await?;
        let scope = Scope::Wait(wait.clone());
        Ok(Addressed {
            wait: self.store.wait(run, wait).await?.ok_or(RunError::WaitNotFound)?,
            earlier: self.store.decision(run, &scope, delivery).await?,
            loaded,
        })
    }

    /// A delivery that changes no head: to a gate, or one that loses.
    async fn post_delivery(
        &self,
        loaded: &Loaded,
        record: WaitRecord,
        decision: DecisionRecord,
        wake: bool,
    ) -> Result<Revision, StoreError> {
        let post = Post {
            run: loaded.head.id.clone(),
            signal: loaded.inbox.signal,
            cancel: None,
            waits: vec![record],
            decisions: vec![decision],
            wake,
        };
        self.store.post(post).await?;
        Ok(loaded.head.revision)
    }

    /// Delivers to a gate: an approval, an input, an event inside a node. Works while the run's other calls are under way, on
    /// any host, whether its graph is loaded or not (D166 to D169).
    ///
    /// # Errors
    /// `wait_not_found` (also for a wait of the graph: those go through `Runner::deliver`), `delivery_conflict`,
    /// `wait_not_armed`, `too_many_deliveries`, `payload_too_large`; the store's.
    pub async fn deliver_to_gate(
        &self,
        run: &RunId,
        id: &WaitId,
        delivery: &Delivery,
    ) -> Result<DeliverOutcome, RunError> {
        self.deliver_from(run, id, None, delivery).await
    }

    /// The same for who has looked already. When the run moved on since, it is looked at again.
    ///
    /// # Errors
    /// As `deliver_to_gate`.
    pub async fn deliver_addressed(
        &self,
        addressed: Addressed,
        delivery: &Delivery,
    ) -> Result<DeliverOutcome, RunError> {
        let (run, id) = (addressed.loaded.head.id.clone(), addressed.wait.id.clone());
        self.deliver_from(&run, &id, Some(addressed), delivery).await
    }

    async fn deliver_from(
        &self,
        run: &RunId,
        id: &WaitId,
        addressed: Option<Addressed>,
        delivery: &Delivery,
    ) -> Result<DeliverOutcome, RunError> {
        self.deliver_with(
            run,
            id,
            addressed,
            delivery,
            |loaded, _, record, decision, verdict| async move {
                if record.continuation != Continuation::Gate {
                    return Err(RunError::WaitNotFound);
                }
                // Settling a gate of a run that has ended wakes nobody.
                let wake = verdict == Verdict::Accepted;
                Ok(self.post_delivery(&loaded, record, decision, wake).await?)
            },
            |_, _| true,
        )
        .await
    }

    /// `write` says the revision of the run after it.
    async fn deliver_with<W, Fut>(
        &self,
        run: &RunId,
        id: &WaitId,
        mut addressed: Option<Addressed>,
        delivery: &Delivery,
        write: W,
        matched: impl Fn(&Loaded, &WaitRecord) -> bool,
    ) -> Result<DeliverOutcome, RunError>
    where
        W: Fn(Loaded, Delivery, WaitRecord, DecisionRecord, Verdict) -> Fut,
        Fut: Future<Output = Result<Revision, RunError>>,
    {
        self.limits
            .check_payload("payload", delivery.payload.bytes().len())?;
        let started = Instant::now();
        loop {
            let Addressed {
                loaded,
                mut wait,
                earlier,
            } = match addressed.take() {
                Some(addressed) => addressed,
                None => self.address(run, id, &delivery.id).await?,
            };
            let mut delivery = delivery.clone();
            delivery.revision = loaded.head.revision;
            let before = wait.clone();
            let delivered = wait::deliver(
                &mut wait,
                &delivery,
                earlier.as_ref(),
                || matched(&loaded, &before),
                loaded.now,
                self.limits.max_deliveries,
            )
            .map_err(refused)?;
            let mut outcome = DeliverOutcome {
                verdict: Verdict::Accepted,
                replayed: true,
                token: loaded.head.token(),
                wait,
                status: loaded.head.status,
                now: loaded.now,
            };
            let decision = match delivered {
                Delivered::Replayed { verdict } => {
                    outcome.verdict = verdict;
                    return Ok(outcome);
                }
                Delivered::Recorded { verdict, decision } => {
                    outcome.verdict = verdict;
                    outcome.replayed = false;
                    decision
                }
            };
            let record = outcome.wait.clone();
            match write(loaded, delivery, record, decision, outcome.verdict).await {
                Ok(revision) => {
                    outcome.token.revision = revision;
                    return Ok(outcome);
                }
                // Somebody was faster, or the answer was lost: the next look tells.
                Err(
                    RunError::Busy
                    | RunError::JournalUnavailable(_)
                    | RunError::StoreUnavailable(StoreError::Duplicate),
                ) if started.elapsed() < PATIENCE => {
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

pub(super) fn refused(refused: DeliveryRefused) -> RunError {
    match refused {
        DeliveryRefused::NotArmed => RunError::WaitNotArmed,
        DeliveryRefused::TooMany { limit } => RunError::TooManyDeliveries { limit },
        DeliveryRefused::Corrupt { what } => RunError::Corrupt(what),
        DeliveryRefused::Conflict
        | DeliveryRefused::StaleGeneration { .. }
        | DeliveryRefused::FutureGeneration
        | DeliveryRefused::LabelMismatch { .. }
        | DeliveryRefused::WrongCorrelation
        | DeliveryRefused::Expired
        | DeliveryRefused::AlreadySettled { .. } => RunError::DeliveryConflict(refused.to_string()),
    }
}

impl<S, E> Runner<S, E>
where
    S: Send + Sync + 'static,
    E: Serialize + DeserializeOwned + Send + Sync + 'static,
{
    /// Delivers an event to a wait of this graph or to a gate. The decision, the transformed state and the selected node are
    /// one commit; no node runs (D166). A delivery that does not match, loses or comes late is recorded and changes nothing.
    ///
    /// # Errors
    /// `wait_not_found`, `wait_not_armed`, `delivery_conflict`, `too_many_deliveries`, `payload_too_large`,
    /// `definition_changed`, `run_busy`; `invalid_request` when the transition refuses the payload (nothing is recorded); the
    /// store's.
    pub async fn deliver(
        &self,
        run: &RunId,
        id: &WaitId,
        delivery: &Delivery,
    ) -> Result<DeliverOutcome, RunError> {
        let operator = self.operator();
        let operator = &operator;
        let inner = &self.inner;
        // Whether the matcher had no answer.
        let broken = &AtomicBool::new(false);
        operator
            .deliver_with(
                run,
                id,
                None,
                delivery,
                |loaded, delivery, record, decision, verdict| async move {
                    if broken.load(Ordering::Relaxed) {
                        return Err(RunError::InvalidRequest {
                            field: "payload",
                            why: "the matcher panicked".to_owned(),
                        });
                    }
                    let wins = verdict == Verdict::Accepted;
                    let Continuation::Nodes { on_event, .. } = record.continuation.clone() else {
                        return Ok(operator.post_delivery(&loaded, record, decision, wins).await?);
                    };
                    if !wins {
                        return Ok(operator.post_delivery(&loaded, record, decision, false).await?);
                    }
                    inner.check_definition(&loaded.head)?;
                    let route = inner
                        .graph
                        .nodes
                        .get(&record.node)
                        .and_then(|node| node.wait.as_ref());
                    let Some(route) = route else {
                        return Err(RunError::DefinitionChanged(format!(
                            "node {} has no wait route",
                            record.node
                        )));
                    };
                    if route.labels != record.labels {
                        return Err(RunError::DefinitionChanged(
                            "the labels of the wait route differ".to_owned(),
                        ));
                    }
                    let invalid = |why: String| RunError::InvalidRequest {
                        field: "payload",
                        why,
                    };
                    let typed = inner.decode(&loaded.state)?;
                    let typed = caught(|| (route.transition)(typed, &delivery.payload))
                        .unwrap_or_else(|| Err("the transition panicked".to_owned()))
                        .map_err(invalid)?;
                    let state = inner.graph.encode(&typed).map_err(invalid)?;
                    inner.limits.check_state(&state)?;
                    let mut draft = Draft::new(&loaded.head, &loaded.state, loaded.now);
                    draft.head.state_digest = *state.digest();
                    draft.state = state;
                    draft.head.armed_waits = draft.head.armed_waits.saturating_sub(1);
                    draft.head.status = Status::Queued;
                    draft.head.waiting = None;
                    enter(&mut draft.head, on_event);
                    draft.waits.push(record);
                    draft.decisions.push(decision);
                    let commit = draft.commit(Authority::Idle, Some(loaded.inbox.signal));
                    Ok(inner.store.commit(commit).await?.revision)
                },
                |loaded, record| {
                    let Continuation::Nodes { .. } = &record.continuation else {
                        return true;
                    };
                    // Labels before callbacks (D166): another definition's wait is not judged by this one's matcher.
                    let route = inner
                        .graph
                        .nodes
                        .get(&record.node)
                        .and_then(|node| node.wait.as_ref())
                        .filter(|route| {
                            route.labels == record.labels && inner.mismatch(&loaded.head).is_none()
                        });
                    match (route, inner.decode(&loaded.state)) {
                        (Some(route), Ok(typed)) => {
                            let matched = caught(|| (route.matcher)(&typed, &delivery.payload));
                            broken.store(matched.is_none(), Ordering::Relaxed);
                            matched.unwrap_or(false)
                        }
                        // The write finds out and says which.
                        (None, _) | (_, Err(_)) => true,
                    }
                },
            )
            .await
    }
}
