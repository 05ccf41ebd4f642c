//! Ends that are asked for: of a run, and of a run by one of its waits.

use bytes::Bytes;
use tokio::time::Instant;

use super::deliver::refused;
use super::{Operator, PATIENCE, Resolved, fresh, replayed};
use crate::ids::{DecisionId, RunId, WaitId, digest_of};
use crate::machine::wait::{self, Cancellation};
use crate::record::{
    CancelRequest, DecisionRecord, OutcomeCancel, Reason, Scope, Status, WaitRecord, Waiting,
};
use crate::runner::RunError;
use crate::runner::draft::Draft;
use crate::runner::ending::cut_short;
use crate::runner::keeper::Held;
use crate::store::{Acquired, Loaded, Post, StoreError};
use crate::token::ResumeToken;

/// What a request to cancel found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CancelOutcome {
    /// It is stored; whoever holds the run acts on it.
    Requested,
    /// The run is cancelled, or ambiguous until its effect is resolved.
    Done(Status),
    /// The run was over before.
    Over(Status),
}

/// The answer to a cancellation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cancelled {
    pub outcome: CancelOutcome,
    /// The same id asked the same before.
    pub replayed: bool,
}
/// What a request to cancel found before anybody acted on it.
pub(super) enum Asked {
    /// It is stored.
    Now,
    /// It was stored before; where the run stands.
    Before(Status),
    /// The run was over.
    Over(Status),
    /// The id was used with another reason.
    Otherwise,
}

impl Operator {
    /// Asks for the end of a run. The request is stored first; then the run is ended here, when nobody works on it, or by
    /// whoever does (durable-api §8, "Cancel"). The runs that it started and that are not over are asked before it has ended.
    ///
    /// # Errors
    /// `run_not_found`, `run_deleted`; `delivery_conflict` when the id was used with another reason; the store's.
    pub async fn cancel(
        &self,
        run: &RunId,
        id: &DecisionId,
        reason: &str,
        by: Option<&str>,
    ) -> Result<Cancelled, RunError> {
        let (outcome, replayed) = match self.ask(run, id, reason, by).await? {
            Asked::Now => (self.act_on_cancel(run, by).await, false),
            Asked::Before(status) if status.is_terminal() => (CancelOutcome::Done(status), true),
            // The first answer may have been lost before anybody acted on it.
            Asked::Before(_) => (self.act_on_cancel(run, by).await, true),
            Asked::Over(status) => (CancelOutcome::Over(status), false),
            Asked::Otherwise => {
                let why = "cancel_id: used with another reason";
                return Err(RunError::DeliveryConflict(why.to_owned()));
            }
        };
        Ok(Cancelled { outcome, replayed })
    }

    /// Stores a request to cancel.
    ///
    /// # Errors
    /// The store's.
    pub(super) async fn ask(
        &self,
        run: &RunId,
        id: &DecisionId,
        reason: &str,
        by: Option<&str>,
    ) -> Result<Asked, StoreError> {
        let content = digest_of(&[b"cancel", reason.as_bytes()]);
        let started = Instant::now();
        loop {
            let loaded = self.store.load(run).await?;
            let status = loaded.head.status;
            if let Some(earlier) = self.store.decision(run, &Scope::Cancel, id).await? {
                return Ok(if earlier.content == content {
                    Asked::Before(status)
                } else {
                    Asked::Otherwise
                });
            }
            if status.is_terminal() {
                return Ok(Asked::Over(status));
            }
            let request = CancelRequest {
                id: id.clone(),
                reason: reason.to_owned(),
                by: by.map(str::to_owned),
                requested_at: loaded.now,
            };
            let body = serde_json::json!({ "action": "cancel", "reason": reason, "by": by, "revision": loaded.head.revision });
            let post = Post {
                run: run.clone(),
                signal: loaded.inbox.signal,
                cancel: Some(request),
                waits: Vec::new(),
                decisions: vec![DecisionRecord {
                    run: run.clone(),
                    scope: Scope::Cancel,
                    id: id.clone(),
                    content,
                    body: Bytes::from(body.to_string()),
                    created_at: loaded.now,
                }],
                wake: true,
            };
            match self.store.post(post).await {
                Ok(_) => return Ok(Asked::Now),
                Err(StoreError::Conflict(_) | StoreError::Duplicate | StoreError::Unconfirmed { .. })
                    if started.elapsed() < PATIENCE => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Stored is what was promised: when the run cannot be ended here, its holder or the next one does it.
    async fn act_on_cancel(&self, run: &RunId, by: Option<&str>) -> CancelOutcome {
        let done = async {
            self.cancel_children(run, by).await?;
            self.finish_cancelled(run).await
        };
        match done.await {
            Ok(status) => CancelOutcome::Done(status),
            Err(_) => CancelOutcome::Requested,
        }
    }

    /// Ends a run that is to be cancelled and that nobody works on.
    pub(super) async fn finish_cancelled(&self, run: &RunId) -> Result<Status, RunError> {
        let (acquired, held) = self.acquire_now(run).await?;
        let done = self.finish_held(&acquired, &held).await;
        if done.is_err() {
            self.keeper.release(&held).await;
        }
        done
    }

    async fn finish_held(&self, acquired: &Acquired, held: &Held) -> Result<Status, RunError> {
        let loaded = &acquired.loaded;
        if loaded.head.status.is_terminal() {
            self.keeper.release(held).await;
            return Ok(loaded.head.status);
        }
        let ledger = self.ledger(acquired).await?;
        if loaded.head.status == Status::Ambiguous && ledger.holding().unknown {
            // Asking resolves no effect: the run stays as it is, and so do the tokens of those who will resolve it.
            self.keeper.release(held).await;
            return Ok(Status::Ambiguous);
        }
        let mut draft = Draft::new(&loaded.head, &loaded.state, loaded.now);
        let outcome = cut_short(
            &mut draft,
            &ledger,
            loaded.inbox.cancel.as_ref(),
            loaded.now,
            loaded.now,
        );
        if let Some(outcome) = outcome {
            self.end(held, &mut draft, outcome).await?;
        }
        Ok(self.write(draft, held, loaded.inbox.signal).await?.status)
    }

    /// Cancels an armed wait and with it the run: terminal `cancelled`, reason `wait_cancelled`, no node and no remote call
    /// (D173).
    ///
    /// # Errors
    /// `stale_token`, `wait_not_found`, `delivery_conflict`, `effect_ambiguous`, `run_busy`; the store's.
    pub async fn cancel_wait(
        &self,
        token: &ResumeToken,
        id: &WaitId,
        decision: &DecisionId,
        reason: &str,
        evidence: &str,
        by: Option<&str>,
    ) -> Result<Resolved, RunError> {
        let loaded = self.store.load(&token.run).await?;
        let cancellation = Cancellation {
            id: decision.clone(),
            reason: reason.to_owned(),
            evidence: evidence.to_owned(),
            by: by.map(str::to_owned),
            revision: loaded.head.revision,
        };
        if self.cancelled_wait(&loaded, id, &cancellation).await?.is_none() {
            return Ok(replayed(&loaded));
        }
        fresh(token, &loaded)?;
        let (acquired, held) = self.acquire(&token.run).await?;
        let done = self
            .cancel_wait_held(token, id, &cancellation, &acquired, &held)
            .await;
        if done.is_err() {
            self.keeper.release(&held).await;
            // A twin may have been first.
            let loaded = self.store.load(&token.run).await?;
            if let Ok(None) = self.cancelled_wait(&loaded, id, &cancellation).await {
                return Ok(replayed(&loaded));
            }
        }
        done
    }

    async fn cancel_wait_held(
        &self,
        token: &ResumeToken,
        id: &WaitId,
        cancellation: &Cancellation,
        acquired: &Acquired,
        held: &Held,
    ) -> Result<Resolved, RunError> {
        let loaded = &acquired.loaded;
        fresh(token, loaded)?;
        let ledger = self.ledger(acquired).await?;
        // Looked at again under the lease: a delivery moves no revision, and the winner stays the winner.
        let Some((record, decision)) = self.cancelled_wait(loaded, id, cancellation).await? else {
            return Err(RunError::Busy);
        };
        ledger.put_wait(record);
        let mut draft = Draft::new(&loaded.head, &loaded.state, loaded.now);
        draft.decisions.push(decision);
        let Some(mut outcome) = cut_short(&mut draft, &ledger, None, loaded.now, loaded.now) else {
            let waiting = draft.head.waiting.unwrap_or_else(nothing);
            return Err(RunError::Ambiguous(Box::new(waiting)));
        };
        self.cancel_children(&token.run, cancellation.by.as_deref())
            .await?;
        outcome.reason = Reason::WaitCancelled;
        outcome.cancel = Some(OutcomeCancel {
            by: cancellation.by.clone(),
            reason: cancellation.reason.clone(),
            deadline: None,
        });
        self.end(held, &mut draft, outcome).await?;
        self.write(draft, held, loaded.inbox.signal).await
    }

    /// The wait as this cancellation leaves it, with its decision; `None` when it was taken before.
    async fn cancelled_wait(
        &self,
        loaded: &Loaded,
        id: &WaitId,
        cancellation: &Cancellation,
    ) -> Result<Option<(WaitRecord, DecisionRecord)>, RunError> {
        let run = &loaded.head.id;
        let Some(mut record) = self.store.wait(run, id).await? else {
            return Err(RunError::WaitNotFound);
        };
        let scope = Scope::Wait(id.clone());
        let earlier = self.store.decision(run, &scope, &cancellation.id).await?;
        match wait::cancel(&mut record, cancellation, earlier.as_ref(), loaded.now).map_err(refused)? {
            wait::Cancelled::Replayed => Ok(None),
            wait::Cancelled::Recorded { decision } => Ok(Some((record, decision))),
        }
    }
}

fn nothing() -> Waiting {
    Waiting {
        reason: String::new(),
        due_at: None,
        on: Vec::new(),
    }
}
