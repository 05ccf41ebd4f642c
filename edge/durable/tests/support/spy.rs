//! A store that counts, keeps the commits it is asked for, and lets a test act right before or after an operation.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use iop_durable::ids::{ActivityId, CorrelationId, DecisionId, Revision, RunId, WaitId};
use iop_durable::record::{
    ActivityRecord, CheckpointRecord, DecisionRecord, DefinitionRef, EventRecord, Scope, StepRecord,
    WaitRecord,
};
use iop_durable::store::{
    Acquired, Answer, Claim, Claimed, Commit, Committed, Counts, Create, Created, Define, Defined,
    Definition, Due, GateFilter, Hints, IdempotencyKey, Journal, Lease, LeaseRequest, Listed, Loaded, Post,
    Rebuilt, Renewal, RunFilter, Store, StoreError,
};
use iop_durable::time::Timestamp;

pub(crate) use iop_durable::testing::fault::Op;

type Lie = Box<dyn FnOnce(&mut Acquired) + Send>;
type Act = Box<dyn FnOnce() -> BoxFuture<'static, Result<(), StoreError>> + Send>;

struct Trap {
    op: Op,
    /// How many of these operations come first.
    skip: u32,
    before: bool,
    act: Act,
}

/// A store around a store.
pub(crate) struct Spy {
    inner: Arc<dyn Store>,
    traps: Mutex<Vec<Trap>>,
    lost: Mutex<Vec<(Op, u32)>>,
    lie: Mutex<Option<Lie>>,
    operations: Mutex<Vec<Op>>,
    commits: Mutex<Vec<Commit>>,
}

impl Spy {
    pub(crate) fn new(inner: Arc<dyn Store>) -> Self {
        Self {
            inner,
            traps: Mutex::default(),
            lost: Mutex::default(),
            lie: Mutex::default(),
            operations: Mutex::default(),
            commits: Mutex::default(),
        }
    }

    /// Does `act` right before the next of these operations, once, after letting `skip` pass. Its error is the operation's answer.
    pub(crate) fn before<Fut>(&self, op: Op, skip: u32, act: impl FnOnce() -> Fut + Send + 'static)
    where
        Fut: Future<Output = Result<(), StoreError>> + Send + 'static,
    {
        self.trap(op, skip, true, Box::new(|| Box::pin(act())));
    }

    /// The same right after it.
    pub(crate) fn after<Fut>(&self, op: Op, skip: u32, act: impl FnOnce() -> Fut + Send + 'static)
    where
        Fut: Future<Output = ()> + Send + 'static,
    {
        let act = || async move {
            act().await;
            Ok(())
        };
        self.trap(op, skip, false, Box::new(|| Box::pin(act())));
    }

    /// One of these operations, after letting `skip` pass, is done and its answer lost.
    pub(crate) fn lose(&self, op: Op, skip: u32) {
        self.lost.lock().unwrap().push((op, skip));
    }

    /// The next of these operations is answered so, and not done.
    pub(crate) fn answer(&self, op: Op, skip: u32, error: StoreError) {
        self.before(op, skip, || async move { Err(error) });
    }

    /// The next acquisition answers with something else than what is stored.
    pub(crate) fn lie(&self, lie: impl FnOnce(&mut Acquired) + Send + 'static) {
        *self.lie.lock().unwrap() = Some(Box::new(lie));
    }

    fn trap(&self, op: Op, skip: u32, before: bool, act: Act) {
        self.traps.lock().unwrap().push(Trap {
            op,
            skip,
            before,
            act,
        });
    }

    /// Whether every trap was met.
    pub(crate) fn met(&self) -> bool {
        self.traps.lock().unwrap().is_empty() && self.lost.lock().unwrap().is_empty()
    }

    pub(crate) fn count(&self, op: Op) -> usize {
        self.operations
            .lock()
            .unwrap()
            .iter()
            .filter(|o| **o == op)
            .count()
    }

    /// What was asked to be committed, in order, whether it was or not.
    pub(crate) fn commits(&self) -> Vec<Commit> {
        self.commits.lock().unwrap().clone()
    }

    /// Forgets what was counted so far.
    pub(crate) fn reset(&self) {
        self.operations.lock().unwrap().clear();
        self.commits.lock().unwrap().clear();
    }

    fn note(&self, commit: &Commit) {
        self.commits.lock().unwrap().push(commit.clone());
    }

    fn sprung(&self, op: Op, before: bool) -> Option<Act> {
        let mut traps = self.traps.lock().unwrap();
        let at = traps.iter().position(|t| t.op == op && t.before == before)?;
        if traps[at].skip > 0 {
            traps[at].skip -= 1;
            return None;
        }
        Some(traps.remove(at).act)
    }

    async fn begins(&self, op: Op) -> Result<(), StoreError> {
        self.operations.lock().unwrap().push(op);
        match self.sprung(op, true) {
            Some(act) => act().await,
            None => Ok(()),
        }
    }

    async fn ended<T>(&self, op: Op, answer: Result<T, StoreError>) -> Result<T, StoreError> {
        if let Some(act) = self.sprung(op, false) {
            act().await.unwrap();
        }
        let mut lost = self.lost.lock().unwrap();
        match lost.iter().position(|(of, _)| *of == op) {
            Some(at) if lost[at].1 == 0 => {
                lost.remove(at);
                Err(StoreError::unconfirmed("the answer was lost"))
            }
            Some(at) => {
                lost[at].1 -= 1;
                answer
            }
            None => answer,
        }
    }
}

impl Store for Spy {
    fn create(&self, create: Create) -> Answer<'_, Created> {
        Box::pin(async move {
            self.begins(Op::Create).await?;

            let answer = self.inner.create(create).await;
            self.ended(Op::Create, answer).await
        })
    }

    fn claim(&self, claim: Claim) -> Answer<'_, Claimed> {
        Box::pin(async move {
            self.begins(Op::Claim).await?;

            let answer = self.inner.claim(claim).await;
            self.ended(Op::Claim, answer).await
        })
    }

    fn renew(&self, leases: Vec<Lease>, ttl: Duration) -> Answer<'_, Vec<Renewal>> {
        Box::pin(async move {
            self.begins(Op::Renew).await?;

            let answer = self.inner.renew(leases, ttl).await;
            self.ended(Op::Renew, answer).await
        })
    }

    fn release(&self, lease: Lease) -> Answer<'_, ()> {
        Box::pin(async move {
            self.begins(Op::Release).await?;

            let answer = self.inner.release(lease).await;
            self.ended(Op::Release, answer).await
        })
    }

    fn load(&self, run: &RunId) -> Answer<'_, Loaded> {
        let run = run.clone();
        Box::pin(async move {
            self.begins(Op::Load).await?;

            let answer = self.inner.load(&run).await;
            self.ended(Op::Load, answer).await
        })
    }

    fn journal(&self, run: &RunId, activation: u64) -> Answer<'_, Journal> {
        let run = run.clone();
        Box::pin(async move {
            self.begins(Op::Journal).await?;

            let answer = self.inner.journal(&run, activation).await;
            self.ended(Op::Journal, answer).await
        })
    }

    fn activity(&self, run: &RunId, id: &ActivityId) -> Answer<'_, Option<ActivityRecord>> {
        let run = run.clone();
        let id = id.clone();
        Box::pin(async move {
            self.begins(Op::Activity).await?;

            let answer = self.inner.activity(&run, &id).await;
            self.ended(Op::Activity, answer).await
        })
    }

    fn activities(
        &self,
        run: &RunId,
        after: Option<ActivityId>,
        limit: u32,
    ) -> Answer<'_, Vec<ActivityRecord>> {
        let run = run.clone();
        Box::pin(async move {
            self.begins(Op::Activities).await?;

            let answer = self.inner.activities(&run, after, limit).await;
            self.ended(Op::Activities, answer).await
        })
    }

    fn wait(&self, run: &RunId, id: &WaitId) -> Answer<'_, Option<WaitRecord>> {
        let run = run.clone();
        let id = id.clone();
        Box::pin(async move {
            self.begins(Op::Wait).await?;

            let answer = self.inner.wait(&run, &id).await;
            self.ended(Op::Wait, answer).await
        })
    }

    fn waits(&self, run: &RunId) -> Answer<'_, Vec<WaitRecord>> {
        let run = run.clone();
        Box::pin(async move {
            self.begins(Op::Waits).await?;

            let answer = self.inner.waits(&run).await;
            self.ended(Op::Waits, answer).await
        })
    }

    fn armed(&self, correlation: &CorrelationId, limit: u32) -> Answer<'_, Vec<WaitRecord>> {
        let correlation = correlation.clone();
        Box::pin(async move {
            self.begins(Op::Armed).await?;

            let answer = self.inner.armed(&correlation, limit).await;
            self.ended(Op::Armed, answer).await
        })
    }

    fn addressed(
        &self,
        correlation: &CorrelationId,
        id: &DecisionId,
        limit: u32,
    ) -> Answer<'_, Vec<WaitRecord>> {
        let (correlation, id) = (correlation.clone(), id.clone());
        Box::pin(async move {
            self.begins(Op::Addressed).await?;

            let answer = self.inner.addressed(&correlation, &id, limit).await;
            self.ended(Op::Addressed, answer).await
        })
    }

    fn decision(&self, run: &RunId, scope: &Scope, id: &DecisionId) -> Answer<'_, Option<DecisionRecord>> {
        let run = run.clone();
        let scope = scope.clone();
        let id = id.clone();
        Box::pin(async move {
            self.begins(Op::Decision).await?;

            let answer = self.inner.decision(&run, &scope, &id).await;
            self.ended(Op::Decision, answer).await
        })
    }

    fn decisions(&self, run: &RunId, scope: &Scope) -> Answer<'_, Vec<DecisionRecord>> {
        let run = run.clone();
        let scope = scope.clone();
        Box::pin(async move {
            self.begins(Op::Decisions).await?;

            let answer = self.inner.decisions(&run, &scope).await;
            self.ended(Op::Decisions, answer).await
        })
    }

    fn steps(&self, run: &RunId, after: u64, limit: u32) -> Answer<'_, Vec<StepRecord>> {
        let run = run.clone();
        Box::pin(async move {
            self.begins(Op::Steps).await?;

            let answer = self.inner.steps(&run, after, limit).await;
            self.ended(Op::Steps, answer).await
        })
    }

    fn events(&self, run: &RunId, after: u64, limit: u32) -> Answer<'_, Vec<EventRecord>> {
        let run = run.clone();
        Box::pin(async move {
            self.begins(Op::Events).await?;

            let answer = self.inner.events(&run, after, limit).await;
            self.ended(Op::Events, answer).await
        })
    }

    fn history(
        &self,
        run: &RunId,
        before: Option<Revision>,
        limit: u32,
    ) -> Answer<'_, Vec<CheckpointRecord>> {
        let run = run.clone();
        Box::pin(async move {
            self.begins(Op::History).await?;

            let answer = self.inner.history(&run, before, limit).await;
            self.ended(Op::History, answer).await
        })
    }

    fn checkpoint(&self, run: &RunId, revision: Revision) -> Answer<'_, CheckpointRecord> {
        let run = run.clone();
        Box::pin(async move {
            self.begins(Op::Checkpoint).await?;

            let answer = self.inner.checkpoint(&run, revision).await;
            self.ended(Op::Checkpoint, answer).await
        })
    }

    fn list(&self, filter: RunFilter) -> Answer<'_, Vec<Listed>> {
        Box::pin(async move {
            self.begins(Op::List).await?;

            let answer = self.inner.list(filter).await;
            self.ended(Op::List, answer).await
        })
    }

    fn due(&self, until: Timestamp, after: Option<(Timestamp, RunId)>, limit: u32) -> Answer<'_, Vec<Due>> {
        Box::pin(async move {
            self.begins(Op::Due).await?;

            let answer = self.inner.due(until, after, limit).await;
            self.ended(Op::Due, answer).await
        })
    }

    fn prune(&self, run: &RunId, keep: u32) -> Answer<'_, u64> {
        let run = run.clone();
        Box::pin(async move {
            self.begins(Op::Prune).await?;

            let answer = self.inner.prune(&run, keep).await;
            self.ended(Op::Prune, answer).await
        })
    }

    fn delete_if_idle(&self, run: &RunId) -> Answer<'_, ()> {
        let run = run.clone();
        Box::pin(async move {
            self.begins(Op::Delete).await?;

            let answer = self.inner.delete_if_idle(&run).await;
            self.ended(Op::Delete, answer).await
        })
    }

    fn quarantine(&self, run: &RunId, why: &str) -> Answer<'_, ()> {
        let run = run.clone();
        let why = why.to_owned();
        Box::pin(async move {
            self.begins(Op::Quarantine).await?;

            let answer = self.inner.quarantine(&run, &why).await;
            self.ended(Op::Quarantine, answer).await
        })
    }

    fn acquire(&self, run: &RunId, request: LeaseRequest) -> Answer<'_, Acquired> {
        let run = run.clone();
        Box::pin(async move {
            self.begins(Op::Acquire).await?;

            let mut answer = self.inner.acquire(&run, request).await;
            if let (Ok(acquired), Some(lie)) = (&mut answer, self.lie.lock().unwrap().take()) {
                lie(acquired);
            }
            self.ended(Op::Acquire, answer).await
        })
    }

    fn post(&self, post: Post) -> Answer<'_, u64> {
        Box::pin(async move {
            self.begins(Op::Post).await?;

            let answer = self.inner.post(post).await;
            self.ended(Op::Post, answer).await
        })
    }

    fn commit(&self, commit: Commit) -> Answer<'_, Committed> {
        Box::pin(async move {
            self.note(&commit);
            self.begins(Op::Commit).await?;
            let answer = self.inner.commit(commit).await;
            self.ended(Op::Commit, answer).await
        })
    }

    fn gates(&self, filter: GateFilter) -> Answer<'_, Vec<(WaitRecord, DefinitionRef)>> {
        self.inner.gates(filter)
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
