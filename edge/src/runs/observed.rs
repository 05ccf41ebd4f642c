//! The store as the edge uses it: every write is timed and counted, and who follows a run is told. It changes nothing.

use std::sync::Arc;
use std::time::Duration;

use iop_durable::ids::{ActivityId, CorrelationId, DecisionId, Revision, RunId, WaitId};
use iop_durable::record::{
    ActivityRecord, ActivityState, CheckpointRecord, DecisionRecord, DefinitionRef, EventRecord, Origin,
    Scope, Status, StepRecord, WaitRecord, WaitStatus, WaitingKind,
};
use iop_durable::store::{
    Acquired, Answer, Claim, Claimed, Commit, Committed, Counts, Create, Created, Define, Defined,
    Definition, Due, GateFilter, Hints, IdempotencyKey, Journal, Lease, LeaseRequest, Listed, Loaded, Post,
    Rebuilt, Renewal, RunFilter, Store, StoreError,
};
use iop_durable::time::Timestamp;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::live::Live;
use crate::agents::journal::{ApprovalAnswer, ApprovalDecision, INPUT, MODEL, REFUSAL};
use crate::metrics::{CommitError, DecisionLabel, EndStatus, Metrics, StepKind};

/// A store that is watched.
pub(crate) struct Observed {
    inner: Arc<dyn Store>,
    metrics: Arc<Metrics>,
    live: Arc<Live>,
    /// Runs that ended and whose parents may wait for them.
    ended: mpsc::UnboundedSender<RunId>,
}

impl Observed {
    pub(crate) fn new(
        inner: Arc<dyn Store>,
        metrics: Arc<Metrics>,
        live: Arc<Live>,
        ended: mpsc::UnboundedSender<RunId>,
    ) -> Self {
        Self {
            inner,
            metrics,
            live,
            ended,
        }
    }

    fn failed(&self, error: &StoreError) {
        self.metrics.checkpoint_errors.at((CommitError::of(error),)).inc();
    }

    /// What a commit changed, counted once it is in the store.
    fn committed(&self, changed: Changed) {
        let metrics = &self.metrics;
        for (kind, took) in changed.steps {
            metrics.run_step_duration.at((kind,)).observe(took.as_secs_f64());
        }
        for (decision, took) in changed.approvals {
            metrics
                .approval_latency
                .at((decision,))
                .observe(took.as_secs_f64());
        }
        if let Some(status) = EndStatus::of(changed.status) {
            metrics.runs_ended.at((status,)).inc();
            metrics
                .run_duration
                .at((status,))
                .observe(changed.lasted.as_secs_f64());
            if changed.has_parent {
                // Nobody listens any more when the process ends; the parent looks by itself.
                let _ = self.ended.send(changed.run.clone());
            }
        }
        metrics.ambiguous_effects.inc_by(changed.unknown);
        self.live.committed(&changed.run, changed.event_seq);
    }
}

/// What of a commit is counted.
struct Changed {
    run: RunId,
    status: Status,
    event_seq: u64,
    lasted: Duration,
    has_parent: bool,
    steps: Vec<(StepKind, Duration)>,
    approvals: Vec<(DecisionLabel, Duration)>,
    /// Calls whose effect this commit says is unknown; one that was unknown before is not written again.
    unknown: u64,
}

impl Changed {
    fn of(commit: &Commit) -> Self {
        let head = &commit.head;
        Self {
            run: head.id.clone(),
            status: head.status,
            event_seq: head.event_seq,
            lasted: head.updated_at.since(head.created_at),
            has_parent: head.lineage.parent.is_some(),
            steps: commit.activities.iter().filter_map(measured).collect(),
            approvals: commit.waits.iter().filter_map(decided).collect(),
            unknown: commit
                .activities
                .iter()
                .map(|activity| u64::from(activity.state == ActivityState::Unknown))
                .sum(),
        }
    }
}

/// How long the attempt took that settled a turn or a call; `None` for what was not dispatched here, or is not over.
fn measured(activity: &ActivityRecord) -> Option<(StepKind, Duration)> {
    let over = matches!(activity.state, ActivityState::Completed | ActivityState::Failed);
    if !over || activity.origin != Some(Origin::Live) || activity.implementation == REFUSAL {
        return None;
    }
    let kind = match activity.key.as_str() {
        INPUT => return None,
        MODEL => StepKind::ModelTurn,
        _ => StepKind::ToolCall,
    };
    let attempt = activity.attempts.last()?;
    Some((kind, attempt.ended_at?.since(attempt.started_at)))
}

/// How an approval was settled, and how long that took; `None` for every other wait.
fn decided(wait: &WaitRecord) -> Option<(DecisionLabel, Duration)> {
    if wait.kind != WaitingKind::Approval {
        return None;
    }
    let settled = wait.settled.as_ref()?;
    let label = match wait.status {
        WaitStatus::TimedOut => DecisionLabel::Expired,
        WaitStatus::Delivered => {
            let answer: ApprovalAnswer = serde_json::from_slice(settled.payload.as_ref()?.bytes()).ok()?;
            match answer.decision {
                ApprovalDecision::Approve => DecisionLabel::Approved,
                ApprovalDecision::Deny => DecisionLabel::Denied,
                ApprovalDecision::Edit => DecisionLabel::Edited,
            }
        }
        WaitStatus::Armed | WaitStatus::Cancelled => return None,
    };
    Some((label, settled.at.since(wait.armed_at)))
}

impl Store for Observed {
    fn create(&self, create: Create) -> Answer<'_, Created> {
        let asked = Instant::now();
        let (run, seq) = (create.head.id.clone(), create.head.event_seq);
        Box::pin(async move {
            let created = self.inner.create(create).await;
            match &created {
                Ok(Created::New { .. }) => {
                    self.metrics
                        .checkpoint_commit
                        .observe(asked.elapsed().as_secs_f64());
                    self.live.committed(&run, seq);
                }
                Ok(Created::Replayed { .. } | Created::KeyConflict { .. } | Created::Exists) => {}
                Err(error) => self.failed(error),
            }
            created
        })
    }

    fn commit(&self, commit: Commit) -> Answer<'_, Committed> {
        let asked = Instant::now();
        let changed = Changed::of(&commit);
        Box::pin(async move {
            let committed = self.inner.commit(commit).await;
            match &committed {
                Ok(_) => {
                    self.metrics
                        .checkpoint_commit
                        .observe(asked.elapsed().as_secs_f64());
                    self.committed(changed);
                }
                Err(error) => self.failed(error),
            }
            committed
        })
    }

    fn post(&self, post: Post) -> Answer<'_, u64> {
        let asked = Instant::now();
        // What wakes nobody has settled nothing: it came second.
        let settles = post.waits.iter().filter(|_| post.wake);
        let approvals: Vec<_> = settles.filter_map(decided).collect();
        Box::pin(async move {
            let posted = self.inner.post(post).await;
            match &posted {
                Ok(_) => {
                    self.metrics
                        .checkpoint_commit
                        .observe(asked.elapsed().as_secs_f64());
                    for (decision, took) in approvals {
                        self.metrics
                            .approval_latency
                            .at((decision,))
                            .observe(took.as_secs_f64());
                    }
                }
                Err(error) => self.failed(error),
            }
            posted
        })
    }

    fn renew(&self, leases: Vec<Lease>, ttl: Duration) -> Answer<'_, Vec<Renewal>> {
        self.inner.renew(leases, ttl)
    }

    fn acquire(&self, run: &RunId, request: LeaseRequest) -> Answer<'_, Acquired> {
        self.inner.acquire(run, request)
    }

    fn claim(&self, claim: Claim) -> Answer<'_, Claimed> {
        self.inner.claim(claim)
    }

    fn release(&self, lease: Lease) -> Answer<'_, ()> {
        self.inner.release(lease)
    }

    fn load(&self, run: &RunId) -> Answer<'_, Loaded> {
        self.inner.load(run)
    }

    fn journal(&self, run: &RunId, activation: u64) -> Answer<'_, Journal> {
        self.inner.journal(run, activation)
    }

    fn activity(&self, run: &RunId, id: &ActivityId) -> Answer<'_, Option<ActivityRecord>> {
        self.inner.activity(run, id)
    }

    fn activities(
        &self,
        run: &RunId,
        after: Option<ActivityId>,
        limit: u32,
    ) -> Answer<'_, Vec<ActivityRecord>> {
        self.inner.activities(run, after, limit)
    }

    fn wait(&self, run: &RunId, id: &WaitId) -> Answer<'_, Option<WaitRecord>> {
        self.inner.wait(run, id)
    }

    fn waits(&self, run: &RunId) -> Answer<'_, Vec<WaitRecord>> {
        self.inner.waits(run)
    }

    fn armed(&self, correlation: &CorrelationId, limit: u32) -> Answer<'_, Vec<WaitRecord>> {
        self.inner.armed(correlation, limit)
    }

    fn addressed(
        &self,
        correlation: &CorrelationId,
        id: &DecisionId,
        limit: u32,
    ) -> Answer<'_, Vec<WaitRecord>> {
        self.inner.addressed(correlation, id, limit)
    }

    fn gates(&self, filter: GateFilter) -> Answer<'_, Vec<(WaitRecord, DefinitionRef)>> {
        self.inner.gates(filter)
    }

    fn decision(&self, run: &RunId, scope: &Scope, id: &DecisionId) -> Answer<'_, Option<DecisionRecord>> {
        self.inner.decision(run, scope, id)
    }

    fn decisions(&self, run: &RunId, scope: &Scope) -> Answer<'_, Vec<DecisionRecord>> {
        self.inner.decisions(run, scope)
    }

    fn steps(&self, run: &RunId, after: u64, limit: u32) -> Answer<'_, Vec<StepRecord>> {
        self.inner.steps(run, after, limit)
    }

    fn events(&self, run: &RunId, after: u64, limit: u32) -> Answer<'_, Vec<EventRecord>> {
        self.inner.events(run, after, limit)
    }

    fn history(
        &self,
        run: &RunId,
        before: Option<Revision>,
        limit: u32,
    ) -> Answer<'_, Vec<CheckpointRecord>> {
        self.inner.history(run, before, limit)
    }

    fn checkpoint(&self, run: &RunId, revision: Revision) -> Answer<'_, CheckpointRecord> {
        self.inner.checkpoint(run, revision)
    }

    fn list(&self, filter: RunFilter) -> Answer<'_, Vec<Listed>> {
        self.inner.list(filter)
    }

    fn due(&self, until: Timestamp, after: Option<(Timestamp, RunId)>, limit: u32) -> Answer<'_, Vec<Due>> {
        self.inner.due(until, after, limit)
    }

    fn counts(&self) -> Answer<'_, Counts> {
        self.inner.counts()
    }

    fn define(&self, define: Define) -> Answer<'_, Defined> {
        self.inner.define(define)
    }

    fn definition(&self, kind: &str, name: &str, version: Option<u64>) -> Answer<'_, Option<Definition>> {
        self.inner.definition(kind, name, version)
    }

    fn definitions(&self, kind: &str, after: Option<String>, limit: u32) -> Answer<'_, Vec<Definition>> {
        self.inner.definitions(kind, after, limit)
    }

    fn versions(&self, kind: &str, name: &str, after: u64, limit: u32) -> Answer<'_, Vec<Definition>> {
        self.inner.versions(kind, name, after, limit)
    }

    fn withdraw(&self, kind: &str, name: &str) -> Answer<'_, bool> {
        self.inner.withdraw(kind, name)
    }

    fn keyed(&self, key: &IdempotencyKey) -> Answer<'_, Option<Created>> {
        self.inner.keyed(key)
    }

    fn forget_keys(&self, before: Timestamp, limit: u32) -> Answer<'_, u64> {
        self.inner.forget_keys(before, limit)
    }

    fn prune(&self, run: &RunId, keep: u32) -> Answer<'_, u64> {
        self.inner.prune(run, keep)
    }

    fn delete_if_idle(&self, run: &RunId) -> Answer<'_, ()> {
        self.inner.delete_if_idle(run)
    }

    fn quarantine(&self, run: &RunId, why: &str) -> Answer<'_, ()> {
        self.inner.quarantine(run, why)
    }

    fn rebuild_index(&self) -> Answer<'_, Rebuilt> {
        self.inner.rebuild_index()
    }

    fn now(&self) -> Answer<'_, Timestamp> {
        self.inner.now()
    }

    fn hints(&self) -> &Hints {
        self.inner.hints()
    }
}
