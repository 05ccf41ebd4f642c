//! A store that tells the ledger which revision was written under which incarnation, and that can stall its worker once, at the
//! k-th operation: everything of that worker stands still while others go on. Or everything takes its time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures_util::future::BoxFuture;
use iop_durable::ids::{ActivityId, CorrelationId, DecisionId, Revision, RunId, WaitId};
use iop_durable::record::{
    ActivityRecord, CheckpointRecord, DecisionRecord, DefinitionRef, EventRecord, Scope, StepRecord,
    WaitRecord,
};
use iop_durable::store::{
    Acquired, Answer, Authority, Claim, Claimed, Commit, Committed, Counts, Create, Created, Define, Defined,
    Definition, Due, GateFilter, Hints, IdempotencyKey, Journal, Lease, LeaseRequest, Listed, Loaded, Post,
    Rebuilt, Renewal, RunFilter, Store,
};
use iop_durable::time::Timestamp;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::ledger::{Ledger, Line};

/// When a worker stalls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Before its operation reaches the store.
    Before,
    /// After it, before the worker has the answer.
    After,
}

struct Stall {
    k: u64,
    when: When,
    meanwhile: Mutex<Option<BoxFuture<'static, ()>>>,
    state: watch::Sender<State>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Awake,
    Stalled,
    Woken,
}

/// How long an operation takes on its way.
type Lag = Box<dyn Fn() -> Duration + Send + Sync>;

/// Everything passes; commits that were written are noted.
pub struct Recorder {
    inner: Arc<dyn Store>,
    ledger: Option<Arc<dyn Ledger>>,
    lag: Option<Lag>,
    operations: AtomicU64,
    stall: Option<Stall>,
}

impl Recorder {
    pub fn new(inner: Arc<dyn Store>, ledger: Arc<dyn Ledger>) -> Self {
        Self {
            inner,
            ledger: Some(ledger),
            lag: None,
            operations: AtomicU64::new(0),
            stall: None,
        }
    }

    /// The way of one worker to the store: every operation takes so long to it, and its answer so long back. Nothing is noted.
    pub fn lagging(inner: Arc<dyn Store>, lag: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self {
            inner,
            ledger: None,
            lag: Some(Box::new(lag)),
            operations: AtomicU64::new(0),
            stall: None,
        }
    }

    /// Stalls at the k-th operation, from 1, until `meanwhile` is over.
    pub fn stalling(mut self, k: u64, when: When, meanwhile: BoxFuture<'static, ()>) -> Self {
        self.stall = Some(Stall {
            k,
            when,
            meanwhile: Mutex::new(Some(meanwhile)),
            state: watch::channel(State::Awake).0,
        });
        self
    }

    /// Whether it has stalled and `meanwhile` came to its end.
    pub fn has_stalled(&self) -> bool {
        let state = self.stall.as_ref().map(|stall| *stall.state.borrow());
        assert_ne!(state, Some(State::Stalled), "what happened meanwhile failed");
        state == Some(State::Woken)
    }

    /// The worker itself: nothing of it goes on while it is stalled, and then everything at once.
    pub async fn freezing<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            let frozen = || {
                let state = self.stall.as_ref().map(|stall| *stall.state.borrow());
                state == Some(State::Stalled)
            };
            let done = std::future::poll_fn(|cx| {
                if !frozen()
                    && let Poll::Ready(done) = work.as_mut().poll(cx)
                {
                    return Poll::Ready(Some(done));
                }
                if frozen() {
                    Poll::Ready(None)
                } else {
                    Poll::Pending
                }
            });
            match (done.await, &self.stall) {
                (Some(done), _) => return done,
                (None, Some(stall)) => stall.awake().await,
                (None, None) => {}
            }
        }
    }

    fn pass<'a, T: Send + 'a>(
        &'a self,
        call: impl FnOnce(&'a dyn Store) -> Answer<'a, T> + Send + 'a,
    ) -> Answer<'a, T> {
        if let Some(lag) = &self.lag {
            return Box::pin(async move {
                tokio::time::sleep(lag()).await;
                let answer = call(&*self.inner).await;
                tokio::time::sleep(lag()).await;
                answer
            });
        }
        let Some(stall) = &self.stall else {
            return call(&*self.inner);
        };
        let mine = self.operations.fetch_add(1, Ordering::SeqCst) + 1 == stall.k;
        Box::pin(async move {
            let at = |when| mine && stall.when == when;
            if at(When::Before) {
                stall.begin();
            }
            stall.awake().await;
            let answer = call(&*self.inner).await;
            if at(When::After) {
                stall.begin();
            }
            // What was asked before the stall is heard after it.
            stall.awake().await;
            answer
        })
    }
}

impl Stall {
    /// What happens meanwhile is nobody's to cut off: it is a task of its own.
    fn begin(&self) {
        let Some(meanwhile) = self.meanwhile.lock().take() else {
            return;
        };
        let state = self.state.clone();
        state.send_replace(State::Stalled);
        tokio::runtime::Handle::current().spawn(async move {
            meanwhile.await;
            state.send_replace(State::Woken);
        });
    }

    async fn awake(&self) {
        let mut state = self.state.subscribe();
        let awake = state.wait_for(|state| *state != State::Stalled);
        // Far longer than anything takes: it failed, and says so itself.
        let hour = Duration::from_hours(1);
        let _ = tokio::time::timeout(hour, awake).await;
    }
}

impl Store for Recorder {
    fn commit(&self, commit: Commit) -> Answer<'_, Committed> {
        self.pass(move |store| {
            Box::pin(async move {
                let run = commit.head.id.clone();
                let incarnation = match &commit.guard.authority {
                    Authority::Lease(lease) => Some(lease.incarnation),
                    Authority::Idle => None,
                };
                let committed = store.commit(commit).await?;
                let revision = committed.revision.get();
                let line = Line::Commit {
                    revision,
                    incarnation,
                };
                if let Some(ledger) = &self.ledger {
                    ledger.add(&run, &line);
                }
                Ok(committed)
            })
        })
    }

    fn create(&self, create: Create) -> Answer<'_, Created> {
        self.pass(|store| store.create(create))
    }

    fn acquire(&self, run: &RunId, request: LeaseRequest) -> Answer<'_, Acquired> {
        let run = run.clone();
        self.pass(move |store| store.acquire(&run, request))
    }

    fn claim(&self, claim: Claim) -> Answer<'_, Claimed> {
        self.pass(|store| store.claim(claim))
    }

    fn renew(&self, leases: Vec<Lease>, ttl: Duration) -> Answer<'_, Vec<Renewal>> {
        self.pass(move |store| store.renew(leases, ttl))
    }

    fn release(&self, lease: Lease) -> Answer<'_, ()> {
        self.pass(|store| store.release(lease))
    }

    fn post(&self, post: Post) -> Answer<'_, u64> {
        self.pass(|store| store.post(post))
    }

    fn load(&self, run: &RunId) -> Answer<'_, Loaded> {
        let run = run.clone();
        self.pass(move |store| store.load(&run))
    }

    fn journal(&self, run: &RunId, activation: u64) -> Answer<'_, Journal> {
        let run = run.clone();
        self.pass(move |store| store.journal(&run, activation))
    }

    fn activity(&self, run: &RunId, id: &ActivityId) -> Answer<'_, Option<ActivityRecord>> {
        let (run, id) = (run.clone(), id.clone());
        self.pass(move |store| store.activity(&run, &id))
    }

    fn activities(
        &self,
        run: &RunId,
        after: Option<ActivityId>,
        limit: u32,
    ) -> Answer<'_, Vec<ActivityRecord>> {
        let run = run.clone();
        self.pass(move |store| store.activities(&run, after, limit))
    }

    fn wait(&self, run: &RunId, id: &WaitId) -> Answer<'_, Option<WaitRecord>> {
        let (run, id) = (run.clone(), id.clone());
        self.pass(move |store| store.wait(&run, &id))
    }

    fn waits(&self, run: &RunId) -> Answer<'_, Vec<WaitRecord>> {
        let run = run.clone();
        self.pass(move |store| store.waits(&run))
    }

    fn armed(&self, correlation: &CorrelationId, limit: u32) -> Answer<'_, Vec<WaitRecord>> {
        let correlation = correlation.clone();
        self.pass(move |store| store.armed(&correlation, limit))
    }

    fn addressed(
        &self,
        correlation: &CorrelationId,
        id: &DecisionId,
        limit: u32,
    ) -> Answer<'_, Vec<WaitRecord>> {
        let (correlation, id) = (correlation.clone(), id.clone());
        self.pass(move |store| store.addressed(&correlation, &id, limit))
    }

    fn gates(&self, filter: GateFilter) -> Answer<'_, Vec<(WaitRecord, DefinitionRef)>> {
        self.pass(|store| store.gates(filter))
    }

    fn decision(&self, run: &RunId, scope: &Scope, id: &DecisionId) -> Answer<'_, Option<DecisionRecord>> {
        let (run, scope, id) = (run.clone(), scope.clone(), id.clone());
        self.pass(move |store| store.decision(&run, &scope, &id))
    }

    fn decisions(&self, run: &RunId, scope: &Scope) -> Answer<'_, Vec<DecisionRecord>> {
        let (run, scope) = (run.clone(), scope.clone());
        self.pass(move |store| store.decisions(&run, &scope))
    }

    fn steps(&self, run: &RunId, after: u64, limit: u32) -> Answer<'_, Vec<StepRecord>> {
        let run = run.clone();
        self.pass(move |store| store.steps(&run, after, limit))
    }

    fn events(&self, run: &RunId, after: u64, limit: u32) -> Answer<'_, Vec<EventRecord>> {
        let run = run.clone();
        self.pass(move |store| store.events(&run, after, limit))
    }

    fn history(
        &self,
        run: &RunId,
        before: Option<Revision>,
        limit: u32,
    ) -> Answer<'_, Vec<CheckpointRecord>> {
        let run = run.clone();
        self.pass(move |store| store.history(&run, before, limit))
    }

    fn checkpoint(&self, run: &RunId, revision: Revision) -> Answer<'_, CheckpointRecord> {
        let run = run.clone();
        self.pass(move |store| store.checkpoint(&run, revision))
    }

    fn list(&self, filter: RunFilter) -> Answer<'_, Vec<Listed>> {
        self.pass(|store| store.list(filter))
    }

    fn due(&self, until: Timestamp, after: Option<(Timestamp, RunId)>, limit: u32) -> Answer<'_, Vec<Due>> {
        self.pass(move |store| store.due(until, after, limit))
    }

    fn counts(&self) -> Answer<'_, Counts> {
        self.pass(Store::counts)
    }

    fn define(&self, define: Define) -> Answer<'_, Defined> {
        self.pass(|store| store.define(define))
    }

    fn definition(&self, kind: &str, name: &str, version: Option<u64>) -> Answer<'_, Option<Definition>> {
        let (kind, name) = (kind.to_owned(), name.to_owned());
        self.pass(move |store| store.definition(&kind, &name, version))
    }

    fn definitions(&self, kind: &str, after: Option<String>, limit: u32) -> Answer<'_, Vec<Definition>> {
        let kind = kind.to_owned();
        self.pass(move |store| store.definitions(&kind, after, limit))
    }

    fn versions(&self, kind: &str, name: &str, after: u64, limit: u32) -> Answer<'_, Vec<Definition>> {
        let (kind, name) = (kind.to_owned(), name.to_owned());
        self.pass(move |store| store.versions(&kind, &name, after, limit))
    }

    fn withdraw(&self, kind: &str, name: &str) -> Answer<'_, bool> {
        let (kind, name) = (kind.to_owned(), name.to_owned());
        self.pass(move |store| store.withdraw(&kind, &name))
    }

    fn keyed(&self, key: &IdempotencyKey) -> Answer<'_, Option<Created>> {
        let key = key.clone();
        self.pass(move |store| store.keyed(&key))
    }

    fn forget_keys(&self, before: Timestamp, limit: u32) -> Answer<'_, u64> {
        self.pass(move |store| store.forget_keys(before, limit))
    }

    fn prune(&self, run: &RunId, keep: u32) -> Answer<'_, u64> {
        let run = run.clone();
        self.pass(move |store| store.prune(&run, keep))
    }

    fn delete_if_idle(&self, run: &RunId) -> Answer<'_, ()> {
        let run = run.clone();
        self.pass(move |store| store.delete_if_idle(&run))
    }

    fn quarantine(&self, run: &RunId, why: &str) -> Answer<'_, ()> {
        let (run, why) = (run.clone(), why.to_owned());
        self.pass(move |store| store.quarantine(&run, &why))
    }

    fn rebuild_index(&self) -> Answer<'_, Rebuilt> {
        self.pass(Store::rebuild_index)
    }

    fn now(&self) -> Answer<'_, Timestamp> {
        self.pass(Store::now)
    }

    fn hints(&self) -> &Hints {
        self.inner.hints()
    }
}
