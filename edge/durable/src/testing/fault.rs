//! A store that fails where it is told to: before an operation, after it, or by ending the process. It counts operations, so a
//! test can run something once to learn how many there are and then once for every k.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::ids::{ActivityId, CorrelationId, DecisionId, Revision, RunId, WaitId};
use crate::record::{
    ActivityRecord, CheckpointRecord, DecisionRecord, DefinitionRef, EventRecord, Scope, StepRecord,
    WaitRecord, words,
};
use crate::store::{
    Acquired, Answer, Claim, Claimed, Commit, Committed, Counts, Create, Created, Define, Defined,
    Definition, Due, GateFilter, Hints, IdempotencyKey, Journal, Lease, LeaseRequest, Listed, Loaded, Post,
    Rebuilt, Renewal, RunFilter, Store, StoreError,
};
use crate::time::Timestamp;

words! {
    /// The operations of a store.
    pub enum Op {
        Create => "create",
        Acquire => "acquire",
        Claim => "claim",
        Renew => "renew",
        Release => "release",
        Commit => "commit",
        Post => "post",
        Load => "load",
        Journal => "journal",
        Activity => "activity",
        Activities => "activities",
        Wait => "wait",
        Waits => "waits",
        Armed => "armed",
        Addressed => "addressed",
        Gates => "gates",
        Decision => "decision",
        Decisions => "decisions",
        Steps => "steps",
        Events => "events",
        History => "history",
        Checkpoint => "checkpoint",
        List => "list",
        Due => "due",
        Counts => "counts",
        Define => "define",
        Definition => "definition",
        Definitions => "definitions",
        Versions => "versions",
        Withdraw => "withdraw",
        Keyed => "keyed",
        ForgetKeys => "forget_keys",
        Prune => "prune",
        Delete => "delete",
        Quarantine => "quarantine",
        Rebuild => "rebuild",
        Now => "now",
    }
}

impl Op {
    /// Whether it can change anything; only these can be left unconfirmed.
    pub const fn writes(self) -> bool {
        match self {
            Self::Create
            | Self::Acquire
            | Self::Claim
            | Self::Renew
            | Self::Release
            | Self::Commit
            | Self::Post
            | Self::Define
            | Self::Withdraw
            | Self::ForgetKeys
            | Self::Prune
            | Self::Delete
            | Self::Quarantine
            | Self::Rebuild => true,
            Self::Load
            | Self::Journal
            | Self::Activity
            | Self::Activities
            | Self::Wait
            | Self::Waits
            | Self::Armed
            | Self::Addressed
            | Self::Gates
            | Self::Decision
            | Self::Decisions
            | Self::Steps
            | Self::Events
            | Self::History
            | Self::Checkpoint
            | Self::List
            | Self::Due
            | Self::Counts
            | Self::Definition
            | Self::Definitions
            | Self::Versions
            | Self::Keyed
            | Self::Now => false,
        }
    }
}

words! {
    /// What happens to an operation. A read cannot be left unconfirmed: it is answered `unavailable` instead.
    pub enum Fault {
        /// Nothing is done, `unavailable` is answered.
        Refused => "refused",
        /// It is done, and `unconfirmed` is answered: the acknowledgement was lost.
        DoneUnconfirmed => "done_unconfirmed",
        /// Nothing is done, and `unconfirmed` is answered: the request was lost.
        LostUnconfirmed => "lost_unconfirmed",
        /// The process ends before it is done.
        AbortBefore => "abort_before",
        /// The process ends when it is done and not answered.
        AbortAfter => "abort_after",
    }
}

/// An operation that a fault hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hit {
    /// From 1, over counted operations.
    pub k: u64,
    pub op: Op,
    pub fault: Fault,
}

#[derive(Debug, Default)]
struct Plan {
    faults: Vec<(u64, Fault)>,
    operations: Vec<Op>,
    hits: Vec<Hit>,
}

/// A store around a store.
pub struct FaultStore {
    inner: Arc<dyn Store>,
    counts: fn(Op) -> bool,
    down: AtomicBool,
    plan: Mutex<Plan>,
}

impl FaultStore {
    /// Counts every operation.
    pub fn new(inner: Arc<dyn Store>) -> Self {
        Self::counting(inner, |_| true)
    }

    /// Counts these operations only; the others pass. Reads of a poll or renewals by a clock have no stable number.
    pub fn counting(inner: Arc<dyn Store>, counts: fn(Op) -> bool) -> Self {
        Self {
            inner,
            counts,
            down: AtomicBool::new(false),
            plan: Mutex::new(Plan::default()),
        }
    }

    /// The k-th counted operation, from 1, meets this fault; once.
    pub fn fail(&self, k: u64, fault: Fault) {
        self.plan.lock().faults.push((k, fault));
    }

    /// While down, every operation, counted or not, is answered `unavailable` and nothing is done.
    pub fn set_down(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
    }

    /// The counted operations so far, in the order they began.
    pub fn operations(&self) -> Vec<Op> {
        self.plan.lock().operations.clone()
    }

    /// How many counted operations there were.
    pub fn count(&self) -> u64 {
        self.plan.lock().operations.len() as u64
    }

    /// The faults that were met, in order. A fault that is not here was never reached.
    pub fn hits(&self) -> Vec<Hit> {
        self.plan.lock().hits.clone()
    }

    fn begin(&self, op: Op) -> Option<Fault> {
        let mut plan = self.plan.lock();
        let mut planned = None;
        if (self.counts)(op) {
            plan.operations.push(op);
            let k = plan.operations.len() as u64;
            if let Some(at) = plan.faults.iter().position(|(planned, _)| *planned == k) {
                let (_, fault) = plan.faults.swap_remove(at);
                plan.hits.push(Hit { k, op, fault });
                planned = Some(fault);
            }
        }
        if self.down.load(Ordering::SeqCst) {
            return Some(Fault::Refused);
        }
        planned
    }

    fn run<'a, T: Send + 'a>(
        &'a self,
        op: Op,
        call: impl FnOnce(&'a dyn Store) -> Answer<'a, T> + Send + 'a,
    ) -> Answer<'a, T> {
        Box::pin(async move {
            let unsure = || {
                if op.writes() {
                    StoreError::unconfirmed("the fault store kept the answer")
                } else {
                    StoreError::unavailable("the fault store kept the answer")
                }
            };
            match self.begin(op) {
                None => call(&*self.inner).await,
                Some(Fault::Refused) => Err(StoreError::unavailable("the fault store refused")),
                Some(Fault::LostUnconfirmed) => Err(unsure()),
                Some(Fault::DoneUnconfirmed) => {
                    // What it was answered is lost, whatever it was.
                    let _ = call(&*self.inner).await;
                    Err(unsure())
                }
                Some(Fault::AbortBefore) => std::process::abort(),
                Some(Fault::AbortAfter) => {
                    let _ = call(&*self.inner).await;
                    std::process::abort()
                }
            }
        })
    }
}

impl std::fmt::Debug for FaultStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FaultStore")
            .field("plan", &self.plan)
            .finish_non_exhaustive()
    }
}

impl Store for FaultStore {
    fn create(&self, create: Create) -> Answer<'_, Created> {
        self.run(Op::Create, |store| store.create(create))
    }

    fn acquire(&self, run: &RunId, request: LeaseRequest) -> Answer<'_, Acquired> {
        let run = run.clone();
        self.run(Op::Acquire, move |store| store.acquire(&run, request))
    }

    fn claim(&self, claim: Claim) -> Answer<'_, Claimed> {
        self.run(Op::Claim, |store| store.claim(claim))
    }

    fn renew(&self, leases: Vec<Lease>, ttl: Duration) -> Answer<'_, Vec<Renewal>> {
        self.run(Op::Renew, move |store| store.renew(leases, ttl))
    }

    fn release(&self, lease: Lease) -> Answer<'_, ()> {
        self.run(Op::Release, |store| store.release(lease))
    }

    fn commit(&self, commit: Commit) -> Answer<'_, Committed> {
        self.run(Op::Commit, |store| store.commit(commit))
    }

    fn post(&self, post: Post) -> Answer<'_, u64> {
        self.run(Op::Post, |store| store.post(post))
    }

    fn load(&self, run: &RunId) -> Answer<'_, Loaded> {
        let run = run.clone();
        self.run(Op::Load, move |store| store.load(&run))
    }

    fn journal(&self, run: &RunId, activation: u64) -> Answer<'_, Journal> {
        let run = run.clone();
        self.run(Op::Journal, move |store| store.journal(&run, activation))
    }

    fn activity(&self, run: &RunId, id: &ActivityId) -> Answer<'_, Option<ActivityRecord>> {
        let (run, id) = (run.clone(), id.clone());
        self.run(Op::Activity, move |store| store.activity(&run, &id))
    }

    fn activities(
        &self,
        run: &RunId,
        after: Option<ActivityId>,
        limit: u32,
    ) -> Answer<'_, Vec<ActivityRecord>> {
        let run = run.clone();
        self.run(Op::Activities, move |store| store.activities(&run, after, limit))
    }

    fn wait(&self, run: &RunId, id: &WaitId) -> Answer<'_, Option<WaitRecord>> {
        let (run, id) = (run.clone(), id.clone());
        self.run(Op::Wait, move |store| store.wait(&run, &id))
    }

    fn waits(&self, run: &RunId) -> Answer<'_, Vec<WaitRecord>> {
        let run = run.clone();
        self.run(Op::Waits, move |store| store.waits(&run))
    }

    fn armed(&self, correlation: &CorrelationId, limit: u32) -> Answer<'_, Vec<WaitRecord>> {
        let correlation = correlation.clone();
        self.run(Op::Armed, move |store| store.armed(&correlation, limit))
    }

    fn addressed(
        &self,
        correlation: &CorrelationId,
        id: &DecisionId,
        limit: u32,
    ) -> Answer<'_, Vec<WaitRecord>> {
        let (correlation, id) = (correlation.clone(), id.clone());
        self.run(Op::Addressed, move |store| {
            store.addressed(&correlation, &id, limit)
        })
    }

    fn gates(&self, filter: GateFilter) -> Answer<'_, Vec<(WaitRecord, DefinitionRef)>> {
        self.run(Op::Gates, |store| store.gates(filter))
    }

    fn decision(&self, run: &RunId, scope: &Scope, id: &DecisionId) -> Answer<'_, Option<DecisionRecord>> {
        let (run, scope, id) = (run.clone(), scope.clone(), id.clone());
        self.run(Op::Decision, move |store| store.decision(&run, &scope, &id))
    }

    fn decisions(&self, run: &RunId, scope: &Scope) -> Answer<'_, Vec<DecisionRecord>> {
        let (run, scope) = (run.clone(), scope.clone());
        self.run(Op::Decisions, move |store| store.decisions(&run, &scope))
    }

    fn steps(&self, run: &RunId, after: u64, limit: u32) -> Answer<'_, Vec<StepRecord>> {
        let run = run.clone();
        self.run(Op::Steps, move |store| store.steps(&run, after, limit))
    }

    fn events(&self, run: &RunId, after: u64, limit: u32) -> Answer<'_, Vec<EventRecord>> {
        let run = run.clone();
        self.run(Op::Events, move |store| store.events(&run, after, limit))
    }

    fn history(
        &self,
        run: &RunId,
        before: Option<Revision>,
        limit: u32,
    ) -> Answer<'_, Vec<CheckpointRecord>> {
        let run = run.clone();
        self.run(Op::History, move |store| store.history(&run, before, limit))
    }

    fn checkpoint(&self, run: &RunId, revision: Revision) -> Answer<'_, CheckpointRecord> {
        let run = run.clone();
        self.run(Op::Checkpoint, move |store| store.checkpoint(&run, revision))
    }

    fn list(&self, filter: RunFilter) -> Answer<'_, Vec<Listed>> {
        self.run(Op::List, |store| store.list(filter))
    }

    fn due(&self, until: Timestamp, after: Option<(Timestamp, RunId)>, limit: u32) -> Answer<'_, Vec<Due>> {
        self.run(Op::Due, move |store| store.due(until, after, limit))
    }

    fn counts(&self) -> Answer<'_, Counts> {
        self.run(Op::Counts, Store::counts)
    }

    fn define(&self, define: Define) -> Answer<'_, Defined> {
        self.run(Op::Define, |store| store.define(define))
    }

    fn definition(&self, kind: &str, name: &str, version: Option<u64>) -> Answer<'_, Option<Definition>> {
        let (kind, name) = (kind.to_owned(), name.to_owned());
        self.run(Op::Definition, move |store| {
            store.definition(&kind, &name, version)
        })
    }

    fn definitions(&self, kind: &str, after: Option<String>, limit: u32) -> Answer<'_, Vec<Definition>> {
        let kind = kind.to_owned();
        self.run(Op::Definitions, move |store| {
            store.definitions(&kind, after, limit)
        })
    }

    fn versions(&self, kind: &str, name: &str, after: u64, limit: u32) -> Answer<'_, Vec<Definition>> {
        let (kind, name) = (kind.to_owned(), name.to_owned());
        self.run(Op::Versions, move |store| {
            store.versions(&kind, &name, after, limit)
        })
    }

    fn withdraw(&self, kind: &str, name: &str) -> Answer<'_, bool> {
        let (kind, name) = (kind.to_owned(), name.to_owned());
        self.run(Op::Withdraw, move |store| store.withdraw(&kind, &name))
    }

    fn keyed(&self, key: &IdempotencyKey) -> Answer<'_, Option<Created>> {
        let key = key.clone();
        self.run(Op::Keyed, move |store| store.keyed(&key))
    }

    fn forget_keys(&self, before: Timestamp, limit: u32) -> Answer<'_, u64> {
        self.run(Op::ForgetKeys, move |store| store.forget_keys(before, limit))
    }

    fn prune(&self, run: &RunId, keep: u32) -> Answer<'_, u64> {
        let run = run.clone();
        self.run(Op::Prune, move |store| store.prune(&run, keep))
    }

    fn delete_if_idle(&self, run: &RunId) -> Answer<'_, ()> {
        let run = run.clone();
        self.run(Op::Delete, move |store| store.delete_if_idle(&run))
    }

    fn quarantine(&self, run: &RunId, why: &str) -> Answer<'_, ()> {
        let (run, why) = (run.clone(), why.to_owned());
        self.run(Op::Quarantine, move |store| store.quarantine(&run, &why))
    }

    fn rebuild_index(&self) -> Answer<'_, Rebuilt> {
        self.run(Op::Rebuild, Store::rebuild_index)
    }

    fn now(&self) -> Answer<'_, Timestamp> {
        self.run(Op::Now, Store::now)
    }

    fn hints(&self) -> &Hints {
        self.inner.hints()
    }
}
