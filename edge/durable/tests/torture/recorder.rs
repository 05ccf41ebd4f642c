//! A store that tells the ledger which revision was written under which incarnation.

use std::sync::Arc;
use std::time::Duration;

use iop_durable::ids::{ActivityId, CorrelationId, DecisionId, Revision, RunId, WaitId};
use iop_durable::record::{
    ActivityRecord, CheckpointRecord, DecisionRecord, EventRecord, Scope, StepRecord, WaitRecord,
};
use iop_durable::store::{
    Acquired, Answer, Authority, Claim, Claimed, Commit, Committed, Create, Created, Due, Hints, Journal,
    Lease, LeaseRequest, Listed, Loaded, Post, Rebuilt, Renewal, RunFilter, Store,
};
use iop_durable::time::Timestamp;

use super::ledger::{Ledger, Line};

/// Everything passes; commits that were written are noted.
pub struct Recorder {
    inner: Arc<dyn Store>,
    ledger: Arc<dyn Ledger>,
}

impl Recorder {
    pub fn new(inner: Arc<dyn Store>, ledger: Arc<dyn Ledger>) -> Self {
        Self { inner, ledger }
    }
}

impl Store for Recorder {
    fn commit(&self, commit: Commit) -> Answer<'_, Committed> {
        Box::pin(async move {
            let run = commit.head.id.clone();
            let incarnation = match &commit.guard.authority {
                Authority::Lease(lease) => Some(lease.incarnation),
                Authority::Idle => None,
            };
            let committed = self.inner.commit(commit).await?;
            let revision = committed.revision.get();
            self.ledger.add(
                &run,
                &Line::Commit {
                    revision,
                    incarnation,
                },
            );
            Ok(committed)
        })
    }

    fn create(&self, create: Create) -> Answer<'_, Created> {
        self.inner.create(create)
    }

    fn acquire(&self, run: &RunId, request: LeaseRequest) -> Answer<'_, Acquired> {
        self.inner.acquire(run, request)
    }

    fn claim(&self, claim: Claim) -> Answer<'_, Claimed> {
        self.inner.claim(claim)
    }

    fn renew(&self, leases: Vec<Lease>, ttl: Duration) -> Answer<'_, Vec<Renewal>> {
        self.inner.renew(leases, ttl)
    }

    fn release(&self, lease: Lease) -> Answer<'_, ()> {
        self.inner.release(lease)
    }

    fn post(&self, post: Post) -> Answer<'_, u64> {
        self.inner.post(post)
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
