//! Runs in memory: for tests and for a server that is told to forget. It has the same rows and seals as the durable adapters,
//! and answers like them; nothing survives the process.
//!
//! One mutex around all tables is the transaction. Leases live by the monotonic clock, due work by the wall clock.

mod definitions;
mod gates;
mod lease;
mod lifecycle;
mod read;
mod tables;
#[cfg(feature = "testing")]
mod tamper;
mod write;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use self::tables::{Now, Tables};
use crate::ids::{ActivityId, CorrelationId, DecisionId, Revision, RunId, WaitId};
use crate::record::{
    ActivityRecord, CheckpointRecord, DecisionRecord, DefinitionRef, EventRecord, Scope, StepRecord,
    WaitRecord,
};
use crate::store::{
    Acquired, Answer, Claim, Claimed, Commit, Committed, Counts, Create, Created, Define, Defined,
    Definition, Due, GateFilter, Hint, Hints, IdempotencyKey, Journal, Lease, LeaseRequest, Listed, Loaded,
    Post, Rebuilt, Renewal, RunFilter, Store, StoreError,
};
use crate::time::{Clock, Timestamp};

/// A store that lives as long as this value.
pub struct MemoryStore {
    clock: Arc<dyn Clock>,
    tables: Mutex<Tables>,
    hints: Hints,
}

impl MemoryStore {
    /// An empty store.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            clock,
            tables: Mutex::new(Tables::default()),
            hints: Hints::new(),
        }
    }

    fn now(&self) -> Now {
        Now {
            wall: self.clock.wall(),
            monotonic: self.clock.monotonic(),
        }
    }

    /// One look at the tables.
    fn read<T>(&self, look: impl FnOnce(&Tables, Now) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let tables = self.tables.lock();
        look(&tables, self.now())
    }

    /// One transaction: `change` checks before it writes. Its hints go out when it is over.
    fn write<T>(
        &self,
        change: impl FnOnce(&mut Tables, Now, &mut Vec<Hint>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut hints = Vec::new();
        let answer = {
            let mut tables = self.tables.lock();
            let now = self.now();
            change(&mut tables, now, &mut hints)
        };
        for hint in hints {
            self.hints.send(hint);
        }
        answer
    }
}

impl std::fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}

impl Store for MemoryStore {
    fn create(&self, create: Create) -> Answer<'_, Created> {
        Box::pin(async move { self.write(|tables, now, hints| tables.create(now, &create, hints)) })
    }

    fn acquire(&self, run: &RunId, request: LeaseRequest) -> Answer<'_, Acquired> {
        let run = run.clone();
        Box::pin(async move { self.write(|tables, now, _| tables.acquire(now, &run, &request)) })
    }

    fn claim(&self, claim: Claim) -> Answer<'_, Claimed> {
        Box::pin(async move { self.write(|tables, now, _| Ok(tables.claim(now, &claim))) })
    }

    fn renew(&self, leases: Vec<Lease>, ttl: Duration) -> Answer<'_, Vec<Renewal>> {
        Box::pin(async move {
            self.write(|tables, now, _| {
                Ok(leases.iter().map(|lease| tables.renew(now, lease, ttl)).collect())
            })
        })
    }

    fn release(&self, lease: Lease) -> Answer<'_, ()> {
        Box::pin(async move { self.write(|tables, now, hints| tables.release(now, &lease, hints)) })
    }

    fn commit(&self, commit: Commit) -> Answer<'_, Committed> {
        Box::pin(async move { self.write(|tables, now, hints| tables.commit(now, &commit, hints)) })
    }

    fn post(&self, post: Post) -> Answer<'_, u64> {
        Box::pin(async move { self.write(|tables, now, hints| tables.post(now, &post, hints)) })
    }

    fn load(&self, run: &RunId) -> Answer<'_, Loaded> {
        let run = run.clone();
        Box::pin(async move { self.read(|tables, now| tables.load(now, &run)) })
    }

    fn journal(&self, run: &RunId, activation: u64) -> Answer<'_, Journal> {
        let run = run.clone();
        Box::pin(async move { self.read(|tables, _| tables.journal(&run, activation)) })
    }

    fn activity(&self, run: &RunId, id: &ActivityId) -> Answer<'_, Option<ActivityRecord>> {
        let (run, id) = (run.clone(), id.clone());
        Box::pin(async move { self.read(|tables, _| tables.activity(&run, &id)) })
    }

    fn activities(
        &self,
        run: &RunId,
        after: Option<ActivityId>,
        limit: u32,
    ) -> Answer<'_, Vec<ActivityRecord>> {
        let run = run.clone();
        Box::pin(async move { self.read(|tables, _| tables.activities(&run, after.as_ref(), limit)) })
    }

    fn wait(&self, run: &RunId, id: &WaitId) -> Answer<'_, Option<WaitRecord>> {
        let (run, id) = (run.clone(), id.clone());
        Box::pin(async move { self.read(|tables, _| tables.wait(&run, &id)) })
    }

    fn waits(&self, run: &RunId) -> Answer<'_, Vec<WaitRecord>> {
        let run = run.clone();
        Box::pin(async move { self.read(|tables, _| tables.waits(&run)) })
    }

    fn armed(&self, correlation: &CorrelationId, limit: u32) -> Answer<'_, Vec<WaitRecord>> {
        let correlation = correlation.clone();
        Box::pin(async move { self.read(|tables, _| Ok(tables.armed(&correlation, limit))) })
    }

    fn addressed(
        &self,
        correlation: &CorrelationId,
        id: &DecisionId,
        limit: u32,
    ) -> Answer<'_, Vec<WaitRecord>> {
        let (correlation, id) = (correlation.clone(), id.clone());
        Box::pin(async move { self.read(|tables, _| Ok(tables.addressed(&correlation, &id, limit))) })
    }

    fn gates(&self, filter: GateFilter) -> Answer<'_, Vec<(WaitRecord, DefinitionRef)>> {
        Box::pin(async move { self.read(|tables, _| Ok(tables.gates(&filter))) })
    }

    fn decision(&self, run: &RunId, scope: &Scope, id: &DecisionId) -> Answer<'_, Option<DecisionRecord>> {
        let (run, scope, id) = (run.clone(), scope.clone(), id.clone());
        Box::pin(async move { self.read(|tables, _| Ok(tables.decision(&run, &scope, &id))) })
    }

    fn decisions(&self, run: &RunId, scope: &Scope) -> Answer<'_, Vec<DecisionRecord>> {
        let (run, scope) = (run.clone(), scope.clone());
        Box::pin(async move { self.read(|tables, _| Ok(tables.decisions(&run, &scope))) })
    }

    fn steps(&self, run: &RunId, after: u64, limit: u32) -> Answer<'_, Vec<StepRecord>> {
        let run = run.clone();
        Box::pin(async move { self.read(|tables, _| tables.steps(&run, after, limit)) })
    }

    fn events(&self, run: &RunId, after: u64, limit: u32) -> Answer<'_, Vec<EventRecord>> {
        let run = run.clone();
        Box::pin(async move { self.read(|tables, _| Ok(tables.events(&run, after, limit))) })
    }

    fn history(
        &self,
        run: &RunId,
        before: Option<Revision>,
        limit: u32,
    ) -> Answer<'_, Vec<CheckpointRecord>> {
        let run = run.clone();
        Box::pin(async move { self.read(|tables, _| tables.history(&run, before, limit)) })
    }

    fn checkpoint(&self, run: &RunId, revision: Revision) -> Answer<'_, CheckpointRecord> {
        let run = run.clone();
        Box::pin(async move { self.read(|tables, _| tables.checkpoint(&run, revision)) })
    }

    fn list(&self, filter: RunFilter) -> Answer<'_, Vec<Listed>> {
        Box::pin(async move { self.read(|tables, _| tables.list(&filter)) })
    }

    fn due(&self, until: Timestamp, after: Option<(Timestamp, RunId)>, limit: u32) -> Answer<'_, Vec<Due>> {
        Box::pin(async move { self.read(|tables, now| tables.due(now, until, after.as_ref(), limit)) })
    }

    fn counts(&self) -> Answer<'_, Counts> {
        Box::pin(async move { self.read(|tables, _| Ok(tables.counts())) })
    }

    fn define(&self, define: Define) -> Answer<'_, Defined> {
        Box::pin(async move { self.write(|tables, now, _| tables.define(now, define)) })
    }

    fn definition(&self, kind: &str, name: &str, version: Option<u64>) -> Answer<'_, Option<Definition>> {
        let key = (kind.to_owned(), name.to_owned());
        Box::pin(async move { self.read(|tables, _| tables.definition(&key, version)) })
    }

    fn definitions(&self, kind: &str, after: Option<String>, limit: u32) -> Answer<'_, Vec<Definition>> {
        let kind = kind.to_owned();
        Box::pin(async move { self.read(|tables, _| Ok(tables.definitions(kind, after, limit))) })
    }

    fn versions(&self, kind: &str, name: &str, after: u64, limit: u32) -> Answer<'_, Vec<Definition>> {
        let key = (kind.to_owned(), name.to_owned());
        Box::pin(async move { self.read(|tables, _| Ok(tables.versions(&key, after, limit))) })
    }

    fn withdraw(&self, kind: &str, name: &str) -> Answer<'_, bool> {
        let key = (kind.to_owned(), name.to_owned());
        Box::pin(async move { self.write(|tables, _, _| Ok(tables.withdraw(&key))) })
    }

    fn keyed(&self, key: &IdempotencyKey) -> Answer<'_, Option<Created>> {
        let key = key.clone();
        Box::pin(async move { self.read(|tables, _| Ok(tables.keyed(&key))) })
    }

    fn forget_keys(&self, before: Timestamp, limit: u32) -> Answer<'_, u64> {
        Box::pin(async move { self.write(|tables, _, _| Ok(tables.forget_keys(before, limit))) })
    }

    fn prune(&self, run: &RunId, keep: u32) -> Answer<'_, u64> {
        let run = run.clone();
        Box::pin(async move { self.write(|tables, _, _| tables.prune(&run, keep)) })
    }

    fn delete_if_idle(&self, run: &RunId) -> Answer<'_, ()> {
        let run = run.clone();
        Box::pin(async move { self.write(|tables, now, _| tables.delete_if_idle(now, &run)) })
    }

    fn quarantine(&self, run: &RunId, why: &str) -> Answer<'_, ()> {
        let (run, why) = (run.clone(), why.to_owned());
        Box::pin(async move { self.write(|tables, _, _| tables.quarantine(&run, why)) })
    }

    fn rebuild_index(&self) -> Answer<'_, Rebuilt> {
        Box::pin(async move { self.write(|tables, now, hints| Ok(tables.rebuild_index(now, hints))) })
    }

    fn now(&self) -> Answer<'_, Timestamp> {
        Box::pin(async move { Ok(self.clock.wall()) })
    }

    fn hints(&self) -> &Hints {
        &self.hints
    }
}
