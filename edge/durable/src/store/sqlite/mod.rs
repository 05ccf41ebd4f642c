//! The SQLite adapter: one file, one process. A lock beside the file keeps a second store out and proves at opening that every
//! earlier holder of a lease is dead. One connection writes, in batches, see `writer`; a few read.
//!
//! Leases live by the host's monotonic clock, due work by its wall clock, see `clock`.

mod args;
mod backup;
mod beside;
mod checkpoint;
mod clock;
mod connect;
mod create;
mod definitions;
mod fail;
mod gates;
mod inbox;
mod lease;
mod lifecycle;
mod lock;
mod read;
mod readers;
mod rebuild;
mod rows;
mod transition;
mod writer;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use self::clock::Clocks;
use self::create::Creation;
use self::definitions::{Defining, Withdraw};
use self::inbox::Posting;
use self::lease::{Acquire, ClaimDue, Disown, Release, Renew};
use self::lifecycle::{Delete, ForgetKeys, KEYS_AT_ONCE, Prune, Quarantine};
use self::lock::FileLock;
use self::read::Reads;
use self::readers::Readers;
use self::transition::Transition;
use self::writer::Writer;
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
use crate::time::{Clock, HostClock, Timestamp};

pub(crate) use self::backup::backup;
pub(crate) use self::connect::migrate;
pub use self::connect::path_of;

/// Runs in one SQLite file.
///
/// The file stays locked until `close` has returned, or until some time after the last use when the store is dropped without it.
pub struct SqliteStore {
    writer: Writer,
    reads: Reads,
    clocks: Clocks,
    hints: Hints,
    /// What was counted last, and after how many changes: where nothing changes, nothing is counted.
    counted: Mutex<Option<(u64, Counts)>>,
    /// Hears when the writer has ended.
    ended: Mutex<Option<oneshot::Receiver<()>>>,
}

impl SqliteStore {
    /// Opens this file, or makes it.
    ///
    /// # Errors
    /// `open` when another store has the file, or its schema is not this program's, saying what to do; `unavailable`.
    pub async fn open(path: &Path) -> Result<Self, StoreError> {
        Self::open_with(path, Arc::new(HostClock::new())).await
    }

    /// The same with a clock of the caller's.
    ///
    /// # Errors
    /// As `open`.
    pub async fn open_with(path: &Path, clock: Arc<dyn Clock>) -> Result<Self, StoreError> {
        let path = &connect::absolute(path)?;
        let lock = FileLock::take(path)?;
        let conn = connect::open(path).await?;
        let clocks = Clocks::new(clock);
        let hints = Hints::new();
        let (writer, ended) = Writer::start(path.to_owned(), conn, lock, clocks.clone(), hints.clone())?;
        Ok(Self {
            writer,
            reads: Reads::new(Readers::new(path), clocks.clone()),
            clocks,
            hints,
            counted: Mutex::new(None),
            ended: Mutex::new(Some(ended)),
        })
    }

    /// Finishes what is queued, closes the file and gives the lock back. Whatever is asked of the store afterwards is refused as
    /// unavailable.
    pub async fn close(&self) {
        self.writer.close();
        self.reads.close().await;
        let ended = self.ended.lock().take();
        if let Some(ended) = ended
            && ended.await.is_err()
        {
            tracing::error!("the writer did not end in order");
        }
    }

    /// From here on the file grows by at most this many pages of 4 KiB, or without limit: a full disk, for tests. A batch that
    /// finds the disk full fails whole, and this with it: then it is asked again.
    ///
    /// # Errors
    /// All but `unavailable`.
    #[cfg(feature = "testing")]
    pub async fn limit_growth(&self, pages: Option<u32>) -> Result<(), StoreError> {
        loop {
            match self.writer.write(lifecycle::LimitGrowth(pages)).await {
                Err(StoreError::Unavailable { .. }) => tokio::task::yield_now().await,
                answer => return answer,
            }
        }
    }

    /// The run of a lease that was just taken, as it was found. One that cannot be read is given back, and set aside when it is
    /// corrupt.
    async fn acquired(
        &self,
        lease: Lease,
        found: Result<Loaded, StoreError>,
    ) -> Result<Acquired, StoreError> {
        let error = match found {
            Ok(loaded) => {
                return Ok(Acquired {
                    loaded: Loaded {
                        lease: Some(lease.clone()),
                        ..loaded
                    },
                    lease,
                });
            }
            Err(error) => error,
        };
        let why = if let StoreError::Corrupt { what } = &error {
            Some(what.clone())
        } else {
            None
        };
        self.writer.write(Disown { lease, why }).await?;
        Err(error)
    }

    /// Corrupt runs do not stand in the place of healthy ones: as many more are taken as were found corrupt.
    async fn claim_due(&self, mut claim: Claim) -> Result<Claimed, StoreError> {
        let mut claimed = Claimed::default();
        let mut failed = None;
        while claim.limit > 0 {
            let leases = self.writer.write(ClaimDue(claim.clone())).await?;
            if leases.is_empty() {
                break;
            }
            let runs: Vec<_> = leases.iter().map(|lease| lease.run.clone()).collect();
            let found = match self.reads.load_all(&runs).await {
                Ok(found) => found,
                Err(error) => runs.iter().map(|_| Err(error.clone())).collect(),
            };
            for (lease, found) in leases.into_iter().zip(found) {
                let run = lease.run.clone();
                match self.acquired(lease, found).await {
                    Ok(acquired) => {
                        claim.limit -= 1;
                        claimed.runs.push(acquired);
                    }
                    Err(StoreError::Corrupt { what }) => claimed.quarantined.push((run, what)),
                    Err(other) => failed = Some(other),
                }
            }
            if claimed.quarantined.is_empty() || failed.is_some() {
                break;
            }
        }
        match failed {
            Some(error) if claimed.runs.is_empty() => Err(error),
            Some(_) | None => Ok(claimed),
        }
    }

    /// In several writes, so that nobody waits long for the writer.
    async fn forget(&self, before: Timestamp, limit: u32) -> Result<u64, StoreError> {
        let mut dropped = 0;
        loop {
            let left = u64::from(limit).saturating_sub(dropped);
            let limit = u32::try_from(left).unwrap_or(u32::MAX).min(KEYS_AT_ONCE);
            let these = self.writer.write(ForgetKeys { before, limit }).await?;
            dropped += these;
            if these < u64::from(KEYS_AT_ONCE) {
                return Ok(dropped);
            }
        }
    }
}

impl std::fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteStore").finish_non_exhaustive()
    }
}

impl Store for SqliteStore {
    fn create(&self, create: Create) -> Answer<'_, Created> {
        Box::pin(async move { self.writer.write(Creation::new(create)?).await })
    }

    fn acquire(&self, run: &RunId, request: LeaseRequest) -> Answer<'_, Acquired> {
        let run = run.clone();
        Box::pin(async move {
            let lease = self.writer.write(Acquire { run, request }).await?;
            let found = self.reads.load(&lease.run).await;
            self.acquired(lease, found).await
        })
    }

    fn claim(&self, claim: Claim) -> Answer<'_, Claimed> {
        Box::pin(self.claim_due(claim))
    }

    fn renew(&self, leases: Vec<Lease>, ttl: Duration) -> Answer<'_, Vec<Renewal>> {
        Box::pin(self.writer.write(Renew { leases, ttl }))
    }

    fn release(&self, lease: Lease) -> Answer<'_, ()> {
        Box::pin(self.writer.write(Release(lease)))
    }

    fn commit(&self, commit: Commit) -> Answer<'_, Committed> {
        Box::pin(async move { self.writer.write(Transition::new(commit)?).await })
    }

    fn post(&self, post: Post) -> Answer<'_, u64> {
        Box::pin(async move { self.writer.write(Posting::new(post)?).await })
    }

    fn load(&self, run: &RunId) -> Answer<'_, Loaded> {
        let run = run.clone();
        Box::pin(async move { self.reads.load(&run).await })
    }

    fn journal(&self, run: &RunId, activation: u64) -> Answer<'_, Journal> {
        let run = run.clone();
        Box::pin(async move { self.reads.journal(&run, activation).await })
    }

    fn activity(&self, run: &RunId, id: &ActivityId) -> Answer<'_, Option<ActivityRecord>> {
        let (run, id) = (run.clone(), id.clone());
        Box::pin(async move { self.reads.activity(&run, &id).await })
    }

    fn activities(
        &self,
        run: &RunId,
        after: Option<ActivityId>,
        limit: u32,
    ) -> Answer<'_, Vec<ActivityRecord>> {
        let run = run.clone();
        Box::pin(async move { self.reads.activities(&run, after.as_ref(), limit).await })
    }

    fn wait(&self, run: &RunId, id: &WaitId) -> Answer<'_, Option<WaitRecord>> {
        let (run, id) = (run.clone(), id.clone());
        Box::pin(async move { self.reads.wait(&run, &id).await })
    }

    fn waits(&self, run: &RunId) -> Answer<'_, Vec<WaitRecord>> {
        let run = run.clone();
        Box::pin(async move { self.reads.waits(&run).await })
    }

    fn armed(&self, correlation: &CorrelationId, limit: u32) -> Answer<'_, Vec<WaitRecord>> {
        let correlation = correlation.clone();
        Box::pin(async move { self.reads.armed(&correlation, limit).await })
    }

    fn addressed(
        &self,
        correlation: &CorrelationId,
        id: &DecisionId,
        limit: u32,
    ) -> Answer<'_, Vec<WaitRecord>> {
        let (correlation, id) = (correlation.clone(), id.clone());
        Box::pin(async move { self.reads.addressed(&correlation, &id, limit).await })
    }

    fn gates(&self, filter: GateFilter) -> Answer<'_, Vec<(WaitRecord, DefinitionRef)>> {
        Box::pin(self.reads.gates(filter))
    }

    fn decision(&self, run: &RunId, scope: &Scope, id: &DecisionId) -> Answer<'_, Option<DecisionRecord>> {
        let (run, scope, id) = (run.clone(), scope.clone(), id.clone());
        Box::pin(async move { self.reads.decision(&run, &scope, &id).await })
    }

    fn decisions(&self, run: &RunId, scope: &Scope) -> Answer<'_, Vec<DecisionRecord>> {
        let (run, scope) = (run.clone(), scope.clone());
        Box::pin(async move { self.reads.decisions(&run, &scope).await })
    }

    fn steps(&self, run: &RunId, after: u64, limit: u32) -> Answer<'_, Vec<StepRecord>> {
        let run = run.clone();
        Box::pin(async move { self.reads.steps(&run, after, limit).await })
    }

    fn events(&self, run: &RunId, after: u64, limit: u32) -> Answer<'_, Vec<EventRecord>> {
        let run = run.clone();
        Box::pin(async move { self.reads.events(&run, after, limit).await })
    }

    fn history(
        &self,
        run: &RunId,
        before: Option<Revision>,
        limit: u32,
    ) -> Answer<'_, Vec<CheckpointRecord>> {
        let run = run.clone();
        Box::pin(async move { self.reads.history(&run, before, limit).await })
    }

    fn checkpoint(&self, run: &RunId, revision: Revision) -> Answer<'_, CheckpointRecord> {
        let run = run.clone();
        Box::pin(async move { self.reads.checkpoint(&run, revision).await })
    }

    fn list(&self, filter: RunFilter) -> Answer<'_, Vec<Listed>> {
        Box::pin(self.reads.list(filter))
    }

    fn due(&self, until: Timestamp, after: Option<(Timestamp, RunId)>, limit: u32) -> Answer<'_, Vec<Due>> {
        Box::pin(async move { self.reads.due(until, after.as_ref(), limit).await })
    }

    fn counts(&self) -> Answer<'_, Counts> {
        Box::pin(async move {
            let changes = self.writer.changes();
            if let Some((at, counts)) = &*self.counted.lock()
                && *at == changes
            {
                return Ok(counts.clone());
            }
            let counts = self.reads.counts().await?;
            *self.counted.lock() = Some((changes, counts.clone()));
            Ok(counts)
        })
    }

    fn define(&self, define: Define) -> Answer<'_, Defined> {
        Box::pin(async move { self.writer.write(Defining::new(define)?).await })
    }

    fn definition(&self, kind: &str, name: &str, version: Option<u64>) -> Answer<'_, Option<Definition>> {
        let (kind, name) = (kind.to_owned(), name.to_owned());
        Box::pin(async move { self.reads.definition(&kind, &name, version).await })
    }

    fn definitions(&self, kind: &str, after: Option<String>, limit: u32) -> Answer<'_, Vec<Definition>> {
        let kind = kind.to_owned();
        Box::pin(async move { self.reads.definitions(&kind, after, limit).await })
    }

    fn versions(&self, kind: &str, name: &str, after: u64, limit: u32) -> Answer<'_, Vec<Definition>> {
        let (kind, name) = (kind.to_owned(), name.to_owned());
        Box::pin(async move { self.reads.versions(&kind, &name, after, limit).await })
    }

    fn withdraw(&self, kind: &str, name: &str) -> Answer<'_, bool> {
        let (kind, name) = (kind.to_owned(), name.to_owned());
        Box::pin(self.writer.write(Withdraw { kind, name }))
    }

    fn keyed(&self, key: &IdempotencyKey) -> Answer<'_, Option<Created>> {
        let key = key.clone();
        Box::pin(async move { self.reads.keyed(&key).await })
    }

    fn forget_keys(&self, before: Timestamp, limit: u32) -> Answer<'_, u64> {
        Box::pin(self.forget(before, limit))
    }

    fn prune(&self, run: &RunId, keep: u32) -> Answer<'_, u64> {
        let run = run.clone();
        Box::pin(self.writer.write(Prune { run, keep }))
    }

    fn delete_if_idle(&self, run: &RunId) -> Answer<'_, ()> {
        Box::pin(self.writer.write(Delete(run.clone())))
    }

    fn quarantine(&self, run: &RunId, why: &str) -> Answer<'_, ()> {
        let (run, why) = (run.clone(), why.to_owned());
        Box::pin(self.writer.write(Quarantine { run, why }))
    }

    fn rebuild_index(&self) -> Answer<'_, Rebuilt> {
        Box::pin(self.rebuild())
    }

    fn now(&self) -> Answer<'_, Timestamp> {
        Box::pin(async move { Ok(self.clocks.wall()) })
    }

    fn hints(&self) -> &Hints {
        &self.hints
    }
}
