//! Runs in PostgreSQL: several stores of several processes on one database.
//!
//! A commit is one statement of its own: input, locked heads and leases, what passes, everything written. What is queued goes
//! into one statement together; a few committers write at the same time. Everything else uses a pool. The rules of locking are
//! in `commit`; the database's clock decides about leases and due work, the host's is never asked for the time (D129).
//!
//! Revisions, incarnations and event numbers are signed 64 bits there (`ids::REVISION_MAX`, D108).

mod batched;
mod beside;
mod commit;
mod committer;
mod connect;
mod create;
mod definitions;
mod fail;
mod gates;
mod head;
mod lease;
mod lists;
mod notify;
mod queue;
mod read;
mod rows;
mod sql;
mod upkeep;
mod verdict;
mod work;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use self::batched::Batched;
use self::committer::Committer;
use self::connect::{Pool, Server};
use self::notify::Notifier;
use self::queue::Queue;
use self::work::{Creation, Job, Posting, Transition, Write};
use crate::ids::{ActivityId, CorrelationId, DecisionId, Revision, RunId, WaitId};
use crate::record::{
    ActivityRecord, CheckpointRecord, DecisionRecord, DefinitionRef, EventRecord, Scope, StepRecord,
    WaitRecord,
};
use crate::store::{
    Acquired, Answer, Claim, Claimed, Commit, Committed, Counts, Create, Created, Define, Defined,
    Definition, Due, GateFilter, Hints, IdempotencyKey, Journal, Lease, LeaseRequest, Listed, Loaded, Post,
    Rebuilt, Renewal, RunFilter, Store, StoreError,
};
use crate::tasks;
use crate::time::Timestamp;

/// How many batches are written at the same time: while one waits for the disk, the next is under way.
const COMMITTERS: usize = 2;

/// A store on a PostgreSQL database. Its tasks run on the runtime it was opened on.
pub struct PostgresStore {
    pool: Pool,
    queue: Arc<Queue>,
    notifier: Notifier,
    hints: Hints,
    listener: JoinHandle<()>,
}

impl PostgresStore {
    /// Opens the database at this `postgres://` URL and creates the tables of an empty one.
    ///
    /// # Errors
    /// `open` when it cannot be used as it is, saying what to do; `unavailable`.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        let options = connect::options(url)?;
        connect::open(&options).await?;
        let server = Server::new(options);
        let hints = Hints::new();
        let own = uuid::Uuid::now_v7().simple().to_string();
        let (notifier, gathered) = Notifier::new(hints.clone());
        tasks::spawn(
            "postgres hints",
            notify::tell_others(server.clone(), own.clone(), gathered),
        );
        let listener = tasks::spawn(
            "postgres listener",
            notify::hear(server.options.clone(), own, hints.clone()),
        );
        let queue = Arc::new(Queue::default());
        for _ in 0..COMMITTERS {
            let committer = Committer::new(server.clone(), Arc::clone(&queue), notifier.clone());
            tasks::spawn("postgres committer", committer.run());
        }
        Ok(Self {
            pool: Pool::new(server),
            queue,
            notifier,
            hints,
            listener,
        })
    }

    /// Queues a write and waits for its answer. A caller that does not wait leaves the write in the queue.
    async fn write<W: Batched>(
        &self,
        run: RunId,
        work: W,
        wrap: impl FnOnce(Box<Job<W>>) -> Write,
    ) -> Result<W::Answer, StoreError> {
        let (reply, answer) = oneshot::channel();
        let job = Box::new(Job { run, work, reply });
        if self.queue.push(wrap(job)).is_err() {
            return Err(StoreError::unavailable("the store is closed"));
        }
        match answer.await {
            Ok(answer) => answer,
            Err(_) => Err(StoreError::unconfirmed("the committer ended")),
        }
    }

    async fn create_run(&self, create: Create) -> Result<Created, StoreError> {
        let run = create.head.id.clone();
        self.write(run, Creation::new(create)?, Write::Create).await
    }

    async fn commit_run(&self, commit: Commit) -> Result<Committed, StoreError> {
        let run = commit.head.id.clone();
        let Ok(revision) = commit.guard.revision.next() else {
            crate::store::check::commit(&commit)?;
            return Err(read::last_revision(&self.pool, &run, &commit.guard).await);
        };
        self.write(run, Transition::new(commit, revision)?, Write::Commit)
            .await
    }

    async fn post_run(&self, post: Post) -> Result<u64, StoreError> {
        let run = post.run.clone();
        self.write(run, Posting::new(post)?, Write::Post).await
    }
}

impl Drop for PostgresStore {
    /// What is queued is still written.
    fn drop(&mut self) {
        self.queue.close();
        self.listener.abort();
    }
}

impl std::fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresStore").finish_non_exhaustive()
    }
}

impl Store for PostgresStore {
    fn create(&self, create: Create) -> Answer<'_, Created> {
        Box::pin(self.create_run(create))
    }

    fn acquire(&self, run: &RunId, request: LeaseRequest) -> Answer<'_, Acquired> {
        let run = run.clone();
        Box::pin(async move { lease::acquire(&self.pool, &run, &request).await })
    }

    fn claim(&self, claim: Claim) -> Answer<'_, Claimed> {
        Box::pin(async move { lease::claim(&self.pool, &claim).await })
    }

    fn renew(&self, leases: Vec<Lease>, ttl: Duration) -> Answer<'_, Vec<Renewal>> {
        Box::pin(async move { lease::renew(&self.pool, &leases, ttl).await })
    }

    fn release(&self, lease: Lease) -> Answer<'_, ()> {
        Box::pin(async move {
            let due = lease::release(&self.pool, &lease).await?;
            self.notifier.done(&lease.run, false, due);
            Ok(())
        })
    }

    fn commit(&self, commit: Commit) -> Answer<'_, Committed> {
        Box::pin(self.commit_run(commit))
    }

    fn post(&self, post: Post) -> Answer<'_, u64> {
        Box::pin(self.post_run(post))
    }

    fn load(&self, run: &RunId) -> Answer<'_, Loaded> {
        let run = run.clone();
        Box::pin(async move { read::load(&self.pool, &run).await })
    }

    fn journal(&self, run: &RunId, activation: u64) -> Answer<'_, Journal> {
        let run = run.clone();
        Box::pin(async move { read::journal(&self.pool, &run, activation).await })
    }

    fn activity(&self, run: &RunId, id: &ActivityId) -> Answer<'_, Option<ActivityRecord>> {
        let (run, id) = (run.clone(), id.clone());
        Box::pin(async move { read::activity(&self.pool, &run, &id).await })
    }

    fn activities(
        &self,
        run: &RunId,
        after: Option<ActivityId>,
        limit: u32,
    ) -> Answer<'_, Vec<ActivityRecord>> {
        let run = run.clone();
        Box::pin(async move { read::activities(&self.pool, &run, after.as_ref(), limit).await })
    }

    fn wait(&self, run: &RunId, id: &WaitId) -> Answer<'_, Option<WaitRecord>> {
        let (run, id) = (run.clone(), id.clone());
        Box::pin(async move { read::wait(&self.pool, &run, &id).await })
    }

    fn waits(&self, run: &RunId) -> Answer<'_, Vec<WaitRecord>> {
        let run = run.clone();
        Box::pin(async move { read::waits(&self.pool, &run).await })
    }

    fn armed(&self, correlation: &CorrelationId, limit: u32) -> Answer<'_, Vec<WaitRecord>> {
        let correlation = correlation.clone();
        Box::pin(async move { lists::armed(&self.pool, &correlation, limit).await })
    }

    fn addressed(
        &self,
        correlation: &CorrelationId,
        id: &DecisionId,
        limit: u32,
    ) -> Answer<'_, Vec<WaitRecord>> {
        let (correlation, id) = (correlation.clone(), id.clone());
        Box::pin(async move { lists::addressed(&self.pool, &correlation, &id, limit).await })
    }

    fn gates(&self, filter: GateFilter) -> Answer<'_, Vec<(WaitRecord, DefinitionRef)>> {
        Box::pin(async move { gates::gates(&self.pool, &filter).await })
    }

    fn decision(&self, run: &RunId, scope: &Scope, id: &DecisionId) -> Answer<'_, Option<DecisionRecord>> {
        let (run, scope, id) = (run.clone(), scope.clone(), id.clone());
        Box::pin(async move { read::decision(&self.pool, &run, &scope, &id).await })
    }

    fn decisions(&self, run: &RunId, scope: &Scope) -> Answer<'_, Vec<DecisionRecord>> {
        let (run, scope) = (run.clone(), scope.clone());
        Box::pin(async move { read::decisions(&self.pool, &run, &scope).await })
    }

    fn steps(&self, run: &RunId, after: u64, limit: u32) -> Answer<'_, Vec<StepRecord>> {
        let run = run.clone();
        Box::pin(async move { read::steps(&self.pool, &run, after, limit).await })
    }

    fn events(&self, run: &RunId, after: u64, limit: u32) -> Answer<'_, Vec<EventRecord>> {
        let run = run.clone();
        Box::pin(async move { read::events(&self.pool, &run, after, limit).await })
    }

    fn history(
        &self,
        run: &RunId,
        before: Option<Revision>,
        limit: u32,
    ) -> Answer<'_, Vec<CheckpointRecord>> {
        let run = run.clone();
        Box::pin(async move { read::history(&self.pool, &run, before, limit).await })
    }

    fn checkpoint(&self, run: &RunId, revision: Revision) -> Answer<'_, CheckpointRecord> {
        let run = run.clone();
        Box::pin(async move { read::checkpoint(&self.pool, &run, revision).await })
    }

    fn list(&self, filter: RunFilter) -> Answer<'_, Vec<Listed>> {
        Box::pin(async move { lists::list(&self.pool, &filter).await })
    }

    fn due(&self, until: Timestamp, after: Option<(Timestamp, RunId)>, limit: u32) -> Answer<'_, Vec<Due>> {
        Box::pin(async move { lists::due(&self.pool, until, after.as_ref(), limit).await })
    }

    fn counts(&self) -> Answer<'_, Counts> {
        Box::pin(gates::counts(&self.pool))
    }

    fn define(&self, define: Define) -> Answer<'_, Defined> {
        Box::pin(async move { definitions::define(&self.pool, &define).await })
    }

    fn definition(&self, kind: &str, name: &str, version: Option<u64>) -> Answer<'_, Option<Definition>> {
        let (kind, name) = (kind.to_owned(), name.to_owned());
        Box::pin(async move { definitions::definition(&self.pool, &kind, &name, version).await })
    }

    fn definitions(&self, kind: &str, after: Option<String>, limit: u32) -> Answer<'_, Vec<Definition>> {
        let kind = kind.to_owned();
        Box::pin(async move { definitions::definitions(&self.pool, &kind, after, limit).await })
    }

    fn versions(&self, kind: &str, name: &str, after: u64, limit: u32) -> Answer<'_, Vec<Definition>> {
        let (kind, name) = (kind.to_owned(), name.to_owned());
        Box::pin(async move { definitions::versions(&self.pool, &kind, &name, after, limit).await })
    }

    fn withdraw(&self, kind: &str, name: &str) -> Answer<'_, bool> {
        let (kind, name) = (kind.to_owned(), name.to_owned());
        Box::pin(async move { definitions::withdraw(&self.pool, &kind, &name).await })
    }

    fn keyed(&self, key: &IdempotencyKey) -> Answer<'_, Option<Created>> {
        let key = key.clone();
        Box::pin(async move { read::keyed(&self.pool, &key).await })
    }

    fn forget_keys(&self, before: Timestamp, limit: u32) -> Answer<'_, u64> {
        Box::pin(async move { upkeep::forget_keys(&self.pool, before, limit).await })
    }

    fn prune(&self, run: &RunId, keep: u32) -> Answer<'_, u64> {
        let run = run.clone();
        Box::pin(async move { upkeep::prune(&self.pool, &run, keep).await })
    }

    fn delete_if_idle(&self, run: &RunId) -> Answer<'_, ()> {
        let run = run.clone();
        Box::pin(async move { upkeep::delete_if_idle(&self.pool, &run).await })
    }

    fn quarantine(&self, run: &RunId, why: &str) -> Answer<'_, ()> {
        let (run, why) = (run.clone(), why.to_owned());
        Box::pin(async move { upkeep::quarantine(&self.pool, &run, &why).await })
    }

    fn rebuild_index(&self) -> Answer<'_, Rebuilt> {
        Box::pin(upkeep::rebuild_index(&self.pool, &self.notifier))
    }

    fn now(&self) -> Answer<'_, Timestamp> {
        Box::pin(read::now(&self.pool))
    }

    fn hints(&self) -> &Hints {
        &self.hints
    }
}
