//! What people and other systems do to runs: cancel, deliver, resolve, reconcile. None of it calls a node, a dispatcher or a
//! codec (D155), so all of it works for runs whose graph is not loaded; only a delivery to a wait of the graph needs its
//! route, and lives in `Runner::deliver`.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::graph::caught;
use crate::ids::{ActivityId, DecisionId, Owner, RunId, WaitId, digest_of, hex};
use crate::machine::activity::{self, Action, Resolution};
use crate::machine::wait::{self, Cancellation, Delivered, Delivery, DeliveryRefused, Verdict};
use crate::payload::{Digest, Payload};
use crate::record::{
    ActivityRecord, ActivityState, CancelRequest, Continuation, DecisionRecord, OutcomeCancel, Reason, Scope,
    Status, WaitRecord, Waiting, WaitingKind, WaitingOn,
};
use crate::runner::draft::{Draft, persist};
use crate::runner::ending::{cut_short, end, outcome_of, park};
use crate::runner::keeper::{Held, Keeper};
use crate::runner::ledger::{Entry, Holding, Ledger};
use crate::runner::step::enter;
use crate::runner::{Limits, RunError, Runner, doubted};
use crate::store::{Acquired, Authority, LeaseRequest, Loaded, Post, Store, StoreError};
use crate::token::ResumeToken;

/// How often a change is tried against others' changes, and how long a live lease is waited out.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(10);

/// Operations that need no graph.
pub struct Operator {
    store: Arc<dyn Store>,
    keeper: Arc<Keeper>,
    owner: Owner,
    limits: Limits,
}

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

/// The answer to a delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeliverOutcome {
    pub verdict: Verdict,
    pub replayed: bool,
    /// Of the run after it.
    pub token: ResumeToken,
}

/// The answer to a resolution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    pub replayed: bool,
    /// Where the run stands after it.
    pub status: Status,
    pub token: ResumeToken,
}

/// What a reconciliation found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reconciled {
    /// The effect is proved; the run goes on.
    Found(ResumeToken),
    /// No evidence: the run stays ambiguous (D152).
    Absent,
}

/// What a run does once an unknown effect is settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    /// It waits for its resume.
    Rest,
    GoOn,
    /// It waits for the prepared attempt.
    Retry,
}

#[derive(Serialize)]
struct OperatorDecision<'a> {
    action: &'static str,
    activity_id: &'a str,
    attempt: u32,
    reason: &'a str,
    evidence: &'a str,
    by: Option<&'a str>,
    revision: String,
    incarnation: u64,
    implementation: &'a str,
    input_digest: String,
}

impl Operator {
    /// `ttl` bounds how long one operation holds a run.
    pub fn new(store: Arc<dyn Store>, owner: Owner, ttl: Duration, limits: Limits) -> Self {
        let keeper = Keeper::new(Arc::clone(&store), ttl);
        Self::of(store, keeper, owner, limits)
    }

    /// One that shares a runner's keeper.
    pub(crate) fn of(store: Arc<dyn Store>, keeper: Arc<Keeper>, owner: Owner, limits: Limits) -> Self {
        Self {
            store,
            keeper,
            owner,
            limits,
        }
    }

    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    fn request(&self) -> LeaseRequest {
        LeaseRequest {
            owner: self.owner.clone(),
            ttl: self.keeper.ttl(),
        }
    }

    /// A lease on a run nobody works on; waits out a moment's holder.
    async fn acquire(&self, run: &RunId) -> Result<(Acquired, Held), RunError> {
        let started = Instant::now();
        loop {
            let asked = Instant::now();
            match self.store.acquire(run, self.request()).await {
                Ok(acquired) => {
                    let (now, signal) = (acquired.loaded.now, acquired.loaded.inbox.signal);
                    let held = self.keeper.hold(acquired.lease.clone(), asked, now, signal);
                    return Ok((acquired, held));
                }
                Err(StoreError::Busy) if started.elapsed() < PATIENCE / 10 => tokio::time::sleep(PAUSE).await,
                Err(error) => return Err(error.into()),
            }
        }
    }

    async fn release(&self, held: &Held) {
        // Not released is expired later.
        let _ = tokio::time::timeout(PATIENCE, self.store.release(held.lease().clone())).await;
    }

    fn within_limit(&self, what: &'static str, bytes: usize) -> Result<(), RunError> {
        let (bytes, limit) = (bytes as u64, self.limits.max_payload);
        if bytes > limit {
            Err(RunError::PayloadTooLarge { what, bytes, limit })
        } else {
            Ok(())
        }
    }

    /// The journal of a held run, verified, as a ledger.
    async fn ledger(&self, loaded: &Loaded, incarnation: u64) -> Result<Ledger, RunError> {
        match self.open_ledger(loaded, incarnation).await {
            Err(error) => Err(doubted(&self.store, &loaded.head, error).await),
            opened => opened,
        }
    }

    async fn open_ledger(&self, loaded: &Loaded, incarnation: u64) -> Result<Ledger, RunError> {
        let head = &loaded.head;
        let journal = self.store.journal(&head.id, head.activation).await?;
        let corrupt = RunError::Corrupt;
        activity::validate(
            &journal.activities,
            &head.id,
            head.activation,
            head.open_activities,
        )
        .map_err(corrupt)?;
        let armed = journal
            .waits
            .iter()
            .filter(|w| w.status == crate::record::WaitStatus::Armed)
            .count();
        let armed = u32::try_from(armed).unwrap_or(u32::MAX);
        wait::validate(&journal.waits, &head.id, head.activation, armed).map_err(corrupt)?;
        let node = match &head.cursor {
            Some(node) => node.clone(),
            None => crate::ids::NodeName::new("-")?,
        };
        let mut activities = journal.activities;
        let mut recovered = false;
        for record in &mut activities {
            recovered |= activity::recover(record, incarnation, loaded.now);
        }
        let entry = Entry {
            run: head.id.clone(),
            node,
            activation: head.activation,
            attempt: head.attempt,
            life: head.life,
            incarnation,
            recovery_limit: 0,
            max_payload: self.limits.max_payload,
        };
        let ledger = Ledger::new(entry, activities, journal.waits, head.budgets.clone());
        if recovered {
            ledger.touch_recovered();
        }
        Ok(ledger)
    }

    /// Asks for the end of a run. The request is stored first; then the run is ended here, when nobody works on it, or by
    /// whoever does (durable-api §8, "Cancel").
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
        let content = digest_of(&[b"cancel", reason.as_bytes()]);
        let started = Instant::now();
        loop {
            let loaded = self.store.load(run).await?;
            if let Some(earlier) = self.store.decision(run, &Scope::Cancel, id).await? {
                if earlier.content != content {
                    return Err(RunError::DeliveryConflict(
                        "cancel_id: used with another reason".to_owned(),
                    ));
                }
                let status = loaded.head.status;
                let outcome = if status.is_terminal() {
                    CancelOutcome::Done(status)
                } else {
                    // The first answer may have been lost before anybody acted on it.
                    self.act_on_cancel(run).await
                };
                return Ok(Cancelled {
                    outcome,
                    replayed: true,
                });
            }
            if loaded.head.status.is_terminal() {
                return Ok(Cancelled {
                    outcome: CancelOutcome::Over(loaded.head.status),
                    replayed: false,
                });
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
                Ok(_) => break,
                Err(StoreError::Conflict(_) | StoreError::Duplicate | StoreError::Unconfirmed { .. })
                    if started.elapsed() < PATIENCE => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Cancelled {
            outcome: self.act_on_cancel(run).await,
            replayed: false,
        })
    }

    /// Stored is what was promised: when the run cannot be ended here, its holder or the next one does it.
    async fn act_on_cancel(&self, run: &RunId) -> CancelOutcome {
        match self.finish_cancelled(run).await {
            Ok(status) => CancelOutcome::Done(status),
            Err(_) => CancelOutcome::Requested,
        }
    }

    /// Ends a run that is to be cancelled and that nobody works on.
    async fn finish_cancelled(&self, run: &RunId) -> Result<Status, RunError> {
        let asked = Instant::now();
        let acquired = self.store.acquire(run, self.request()).await?;
        let (now, signal) = (acquired.loaded.now, acquired.loaded.inbox.signal);
        let held = self.keeper.hold(acquired.lease.clone(), asked, now, signal);
        let done = self.finish_held(&acquired, &held).await;
        if done.is_err() {
            self.release(&held).await;
        }
        done
    }

    async fn finish_held(&self, acquired: &Acquired, held: &Held) -> Result<Status, RunError> {
        let loaded = &acquired.loaded;
        if loaded.head.status.is_terminal() {
            self.release(held).await;
            return Ok(loaded.head.status);
        }
        let ledger = self.ledger(loaded, acquired.lease.incarnation).await?;
        if loaded.head.status == Status::Ambiguous && ledger.holding().unknown {
            // Asking resolves no effect: the run stays as it is, and so do the tokens of those who will resolve it.
            self.release(held).await;
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
            end(&self.store, held, &mut draft, outcome).await?;
        }
        self.write(draft, held, loaded.inbox.signal).await
    }

    /// Commits a draft under a lease and gives the lease back. Where the run stands then.
    async fn write(&self, mut draft: Draft, held: &Held, signal: u64) -> Result<Status, RunError> {
        draft.release = true;
        draft.watch_inbox = true;
        let status = draft.head.status;
        let commit = draft.commit(Authority::Lease(held.lease().clone()), Some(signal));
        persist(&self.store, held, &commit, false).await?;
        Ok(status)
    }

    /// Records an operator's decision about an unknown effect (D153). Attempts are never reset; a retry is committed with its
    /// time, not dispatched. The run then waits for a resume unless `resume` says to go on (D159).
    ///
    /// # Errors
    /// `stale_token`; `activity_not_found`; `activity_conflict` for every rule that does not hold and for a decision id used
    /// with other content; `run_not_found`, `run_busy`; the store's.
    pub async fn resolve(
        &self,
        token: &ResumeToken,
        resolution: &Resolution,
        by: Option<&str>,
        resume: bool,
    ) -> Result<Resolved, RunError> {
        if let Action::Complete { output } = &resolution.action {
            self.within_limit("output", output.bytes().len())?;
        }
        let content = resolution_content(resolution);
        let replay = |earlier: &DecisionRecord, loaded: &Loaded| {
            if earlier.content != content {
                return Err(RunError::ActivityConflict(
                    "decision_id: used with other content".to_owned(),
                ));
            }
            Ok(Resolved {
                replayed: true,
                status: loaded.head.status,
                token: ResumeToken {
                    run: token.run.clone(),
                    revision: loaded.head.revision,
                },
            })
        };
        let loaded = self.store.load(&token.run).await?;
        if let Some(earlier) = self
            .store
            .decision(&token.run, &Scope::Operator, &resolution.decision)
            .await?
        {
            return replay(&earlier, &loaded);
        }
        self.fresh(token, &loaded)?;
        let (acquired, held) = self.acquire(&token.run).await?;
        let done = self
            .resolve_held(token, resolution, by, resume, content, &acquired, &held)
            .await;
        if done.is_err() {
            self.release(&held).await;
            // A twin may have been first.
            if let Some(earlier) = self
                .store
                .decision(&token.run, &Scope::Operator, &resolution.decision)
                .await?
            {
                return replay(&earlier, &self.store.load(&token.run).await?);
            }
        }
        done
    }

    fn fresh(&self, token: &ResumeToken, loaded: &Loaded) -> Result<(), RunError> {
        if loaded.head.status.is_terminal() {
            return Err(RunError::Terminal {
                status: loaded.head.status,
                outcome: outcome_of(&loaded.head),
            });
        }
        if loaded.head.revision != token.revision {
            let current = ResumeToken {
                run: token.run.clone(),
                revision: loaded.head.revision,
            };
            return Err(RunError::StaleToken { current });
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "one decision with its authority")]
    async fn resolve_held(
        &self,
        token: &ResumeToken,
        resolution: &Resolution,
        by: Option<&str>,
        resume: bool,
        content: Digest,
        acquired: &Acquired,
        held: &Held,
    ) -> Result<Resolved, RunError> {
        let loaded = &acquired.loaded;
        self.fresh(token, loaded)?;
        let ledger = self.ledger(loaded, acquired.lease.incarnation).await?;
        let now = loaded.now;
        match ledger.amend(&resolution.id, |record| {
            activity::resolve(record, resolution, now, fastrand::f64())
        }) {
            None => return Err(RunError::ActivityNotFound),
            Some(Err(refused)) => return Err(RunError::ActivityConflict(refused.to_string())),
            Some(Ok(())) => {}
        }
        let action = action_name(&resolution.action);
        let body = OperatorDecision {
            action,
            activity_id: resolution.id.as_str(),
            attempt: resolution.attempt,
            reason: &resolution.reason,
            evidence: &resolution.evidence,
            by,
            revision: loaded.head.revision.to_string(),
            incarnation: acquired.lease.incarnation,
            implementation: &resolution.implementation,
            input_digest: hex(&resolution.input_digest),
        };
        let decision = DecisionRecord {
            run: token.run.clone(),
            scope: Scope::Operator,
            id: resolution.decision.clone(),
            content,
            body: serde_json::to_vec(&body)
                .map(Bytes::from)
                .map_err(|e| RunError::ActivityConflict(e.to_string()))?,
            created_at: now,
        };
        let then = match resolution.action {
            Action::Retry => Then::Retry,
            Action::Complete { .. } | Action::Fail { .. } if resume => Then::GoOn,
            Action::Complete { .. } | Action::Fail { .. } => Then::Rest,
        };
        self.settled(loaded, &ledger, held, vec![decision], then).await
    }

    /// After an unknown effect is settled: on to the end of a cancelled run, to the next unknown effect, to a queue or to a
    /// resume.
    async fn settled(
        &self,
        loaded: &Loaded,
        ledger: &Ledger,
        held: &Held,
        decisions: Vec<DecisionRecord>,
        then: Then,
    ) -> Result<Resolved, RunError> {
        let now = loaded.now;
        let mut draft = Draft::new(&loaded.head, &loaded.state, now);
        draft.decisions = decisions;
        let holding = ledger.holding();
        if loaded.inbox.cancel.is_some() && !holding.unknown {
            if let Some(outcome) = cut_short(&mut draft, ledger, loaded.inbox.cancel.as_ref(), now, now) {
                end(&self.store, held, &mut draft, outcome).await?;
            }
        } else {
            draft.take(ledger.take_dirty(), ledger.open());
            match then {
                _ if holding.unknown => park(&mut draft, holding, None),
                Then::Retry => park(&mut draft, holding, None),
                // Whatever else it waits for, the node has an answer to work on.
                Then::GoOn => {
                    draft.head.status = Status::Queued;
                    draft.head.waiting = None;
                }
                Then::Rest => {
                    let mut on = vec![WaitingOn {
                        kind: WaitingKind::Resume,
                        id: String::new(),
                        node: ledger.entry.node.clone(),
                        key: String::new(),
                    }];
                    on.extend(holding.on);
                    let holding = Holding {
                        on,
                        due_at: None,
                        unknown: false,
                    };
                    park(&mut draft, holding, None);
                }
            }
        }
        let (run, revision) = (draft.head.id.clone(), draft.head.revision);
        let status = self.write(draft, held, loaded.inbox.signal).await?;
        let revision = revision
            .next()
            .map_err(|_| RunError::from(StoreError::RevisionsExhausted))?;
        Ok(Resolved {
            replayed: false,
            status,
            token: ResumeToken { run, revision },
        })
    }

    /// Asks the callee about an unknown effect, with the host's own read-only probe (D152). Found: the outcome is recorded as
    /// reconciled and the run goes on. The run is held only while the answer is written.
    ///
    /// # Errors
    /// `activity_not_found`, `activity_conflict` when the activity is not unknown; `run_busy`; the store's.
    pub async fn reconcile<F, Fut>(
        &self,
        run: &RunId,
        id: &ActivityId,
        probe: F,
    ) -> Result<Reconciled, RunError>
    where
        F: FnOnce(ActivityRecord) -> Fut,
        Fut: Future<Output = Option<Bytes>>,
    {
        let Some(record) = self.store.activity(run, id).await? else {
            // Missing run or missing activity.
            self.store.load(run).await?;
            return Err(RunError::ActivityNotFound);
        };
        if record.state != ActivityState::Unknown {
            return Err(RunError::ActivityConflict(format!(
                "the activity is {}",
                record.state
            )));
        }
        let attempt = record.attempts.len();
        let Some(found) = probe(record).await else {
            return Ok(Reconciled::Absent);
        };
        self.within_limit("output", found.len())?;
        let (acquired, held) = self.acquire(run).await?;
        let done = async {
            let loaded = &acquired.loaded;
            let ledger = self.ledger(loaded, acquired.lease.incarnation).await?;
            let changed = ledger.amend(id, |record| {
                record.attempts.len() == attempt
                    && activity::reconcile(record, Some(Payload::new(found)), loaded.now)
            });
            if changed != Some(true) {
                return Err(RunError::ActivityConflict(
                    "the activity changed meanwhile".to_owned(),
                ));
            }
            self.settled(loaded, &ledger, &held, Vec::new(), Then::GoOn).await
        };
        match done.await {
            Ok(resolved) => Ok(Reconciled::Found(resolved.token)),
            Err(error) => {
                self.release(&held).await;
                Err(error)
            }
        }
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
        let replayed = |loaded: &Loaded| Resolved {
            replayed: true,
            status: loaded.head.status,
            token: ResumeToken {
                run: token.run.clone(),
                revision: loaded.head.revision,
            },
        };
        if self.cancelled_wait(&loaded, id, &cancellation).await?.is_none() {
            return Ok(replayed(&loaded));
        }
        self.fresh(token, &loaded)?;
        let (acquired, held) = self.acquire(&token.run).await?;
        let done = self
            .cancel_wait_held(token, id, &cancellation, &acquired, &held)
            .await;
        if done.is_err() {
            self.release(&held).await;
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
        self.fresh(token, loaded)?;
        let ledger = self.ledger(loaded, acquired.lease.incarnation).await?;
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
        outcome.reason = Reason::WaitCancelled;
        outcome.cancel = Some(OutcomeCancel {
            by: cancellation.by.clone(),
            reason: cancellation.reason.clone(),
        });
        end(&self.store, held, &mut draft, outcome).await?;
        let revision = draft
            .head
            .revision
            .next()
            .map_err(|_| RunError::from(StoreError::RevisionsExhausted))?;
        let status = self.write(draft, held, loaded.inbox.signal).await?;
        Ok(Resolved {
            replayed: false,
            status,
            token: ResumeToken {
                run: token.run.clone(),
                revision,
            },
        })
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

    /// A delivery that changes no head: to a gate, or one that loses.
    async fn post_delivery(
        &self,
        loaded: &Loaded,
        record: WaitRecord,
        decision: DecisionRecord,
        wake: bool,
    ) -> Result<(), StoreError> {
        let post = Post {
            run: loaded.head.id.clone(),
            signal: loaded.inbox.signal,
            cancel: None,
            waits: vec![record],
            decisions: vec![decision],
            wake,
        };
        self.store.post(post).await.map(|_| ())
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
        self.deliver_with(
            run,
            id,
            delivery,
            |loaded, _, record, decision, verdict| async move {
                if record.continuation != Continuation::Gate {
                    return Err(RunError::WaitNotFound);
                }
                // Settling a gate of a run that has ended wakes nobody.
                let wake = verdict == Verdict::Accepted;
                self.post_delivery(&loaded, record, decision, wake)
                    .await
                    .map_err(RunError::from)
            },
            |_, _| true,
        )
        .await
    }

    async fn deliver_with<W, Fut>(
        &self,
        run: &RunId,
        id: &WaitId,
        delivery: &Delivery,
        write: W,
        matched: impl Fn(&Loaded, &WaitRecord) -> bool,
    ) -> Result<DeliverOutcome, RunError>
    where
        W: Fn(Loaded, Delivery, WaitRecord, DecisionRecord, Verdict) -> Fut,
        Fut: Future<Output = Result<(), RunError>>,
    {
        self.within_limit("payload", delivery.payload.bytes().len())?;
        let started = Instant::now();
        loop {
            let loaded = self.store.load(run).await?;
            let Some(mut record) = self.store.wait(run, id).await? else {
                return Err(RunError::WaitNotFound);
            };
            let scope = Scope::Wait(id.clone());
            let earlier = self.store.decision(run, &scope, &delivery.id).await?;
            let mut delivery = delivery.clone();
            delivery.revision = loaded.head.revision;
            let before = record.clone();
            let delivered = wait::deliver(
                &mut record,
                &delivery,
                earlier.as_ref(),
                || matched(&loaded, &before),
                loaded.now,
                self.limits.max_deliveries,
            )
            .map_err(refused)?;
            let mut token = ResumeToken {
                run: run.clone(),
                revision: loaded.head.revision,
            };
            let (verdict, decision) = match delivered {
                Delivered::Replayed { verdict } => {
                    return Ok(DeliverOutcome {
                        verdict,
                        replayed: true,
                        token,
                    });
                }
                Delivered::Recorded { verdict, decision } => (verdict, decision),
            };
            match write(loaded, delivery, record, decision, verdict).await {
                Ok(()) => {
                    token.revision = self
                        .store
                        .load(run)
                        .await
                        .map_or(token.revision, |loaded| loaded.head.revision);
                    return Ok(DeliverOutcome {
                        verdict,
                        replayed: false,
                        token,
                    });
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

fn nothing() -> Waiting {
    Waiting {
        reason: String::new(),
        due_at: None,
        on: Vec::new(),
    }
}

fn action_name(action: &Action) -> &'static str {
    match action {
        Action::Complete { .. } => "complete",
        Action::Fail { .. } => "fail",
        Action::Retry => "retry",
    }
}

fn resolution_content(resolution: &Resolution) -> Digest {
    let outcome: Vec<u8> = match &resolution.action {
        Action::Complete { output } => output.digest().to_vec(),
        Action::Fail { error } => serde_json::to_vec(error).unwrap_or_default(),
        Action::Retry => Vec::new(),
    };
    digest_of(&[
        b"resolve",
        resolution.id.as_str().as_bytes(),
        action_name(&resolution.action).as_bytes(),
        &outcome,
        &resolution.input_digest,
        resolution.implementation.as_bytes(),
        &resolution.attempt.to_be_bytes(),
        resolution.reason.as_bytes(),
        resolution.evidence.as_bytes(),
    ])
}

fn refused(refused: DeliveryRefused) -> RunError {
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
                        return operator
                            .post_delivery(&loaded, record, decision, wins)
                            .await
                            .map_err(RunError::from);
                    };
                    if !wins {
                        return operator
                            .post_delivery(&loaded, record, decision, false)
                            .await
                            .map_err(RunError::from);
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
                    inner.check_state(&state)?;
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
                    inner
                        .store
                        .commit(commit)
                        .await
                        .map(|_| ())
                        .map_err(RunError::from)
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
