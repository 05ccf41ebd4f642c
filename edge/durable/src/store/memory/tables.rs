//! The tables and what every operation needs of them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;

use crate::envelope::{ActivityRow, CheckpointRow, HeadRow, INLINE_MAX, PayloadColumns, WaitRow};
use crate::ids::{Owner, RunId};
use crate::payload::{Digest, Payload};
use crate::record::{DecisionRecord, EventRecord, Inbox, Scope, Status};
use crate::store::{Hint, Lease, Loaded, Origin, StoreError};
use crate::time::Timestamp;

/// Both clocks, read once per operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Now {
    /// Due work and every stored time.
    pub(super) wall: Timestamp,
    /// Leases.
    pub(super) monotonic: Duration,
}

/// A row of `run_leases`.
#[derive(Debug, Clone)]
pub(super) struct LeaseRow {
    pub(super) owner: Owner,
    pub(super) incarnation: u64,
    /// On the monotonic clock; the lease is live before it.
    pub(super) until: Duration,
    pub(super) expires_at: Timestamp,
}

/// Where a wait stands among those of its run: by the time it was armed, then id.
pub(super) type WaitPlace = (i64, String);

/// What one run has in every table.
#[derive(Debug)]
pub(super) struct RunRows {
    pub(super) head: HeadRow,
    pub(super) due_at: Option<Timestamp>,
    pub(super) inbox: Inbox,
    pub(super) checkpoints: BTreeMap<i64, CheckpointRow>,
    /// Ordered as pages are: by activation, then id.
    pub(super) activities: BTreeMap<(i64, String), ActivityRow>,
    pub(super) waits: BTreeMap<WaitPlace, WaitRow>,
    /// JSON by activation.
    pub(super) steps: BTreeMap<u64, Bytes>,
    pub(super) decisions: BTreeMap<(Scope, String), DecisionRecord>,
    pub(super) events: BTreeMap<u64, EventRecord>,
    pub(super) blobs: BTreeMap<Digest, Bytes>,
}

/// A row of `idempotency_keys`.
#[derive(Debug, Clone)]
pub(super) struct KeyRow {
    pub(super) request: Digest,
    pub(super) run: RunId,
    pub(super) created_at: Timestamp,
}

/// A row of `definition_names` and its versions.
#[derive(Debug)]
pub(super) struct NameRow {
    pub(super) origin: Origin,
    pub(super) withdrawn: bool,
    pub(super) versions: BTreeMap<u64, VersionRow>,
}

/// A row of `definitions`.
#[derive(Debug)]
pub(super) struct VersionRow {
    pub(super) digest: String,
    pub(super) body: Bytes,
    pub(super) created_at: Timestamp,
}

/// All runs, by id.
#[derive(Debug, Default)]
pub(super) struct Tables {
    /// The last incarnation given out for each run there ever was.
    pub(super) fences: BTreeMap<RunId, u64>,
    pub(super) leases: BTreeMap<RunId, LeaseRow>,
    pub(super) runs: BTreeMap<RunId, RunRows>,
    /// By scope and key.
    pub(super) keys: BTreeMap<(String, String), KeyRow>,
    /// By kind and name.
    pub(super) definitions: BTreeMap<(String, String), NameRow>,
}

/// A span as leases count it: whole milliseconds, at least one.
pub(super) fn whole_millis(span: Duration) -> Duration {
    let ms = u64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
    Duration::from_millis(ms.max(1))
}

impl RunRows {
    pub(super) fn is_terminal(&self) -> bool {
        Status::parse(&self.head.status).is_some_and(Status::is_terminal)
    }

    pub(super) fn blob(&self, payload: &PayloadColumns) -> Option<Bytes> {
        match payload.inline {
            Some(_) => None,
            None => self.blobs.get(&payload.digest).cloned(),
        }
    }

    pub(super) fn keep_blob(&mut self, payload: &Payload) {
        if payload.bytes().len() > INLINE_MAX {
            self.blobs
                .entry(*payload.digest())
                .or_insert_with(|| payload.bytes().clone());
        }
    }

    /// Removes the blobs no row names any more.
    pub(super) fn drop_unused_blobs(&mut self) {
        let mut used: BTreeSet<Digest> = BTreeSet::from([self.head.state.digest]);
        used.extend(
            self.checkpoints
                .values()
                .filter(|c| !c.pruned)
                .map(|c| c.state.digest),
        );
        for row in self.activities.values() {
            used.insert(row.input.digest);
            used.extend(row.output.as_ref().map(|o| o.digest));
        }
        for row in self.waits.values() {
            used.insert(row.subject.digest);
            used.extend(row.delivered.as_ref().map(|d| d.digest));
        }
        self.blobs.retain(|digest, _| used.contains(digest));
    }
}

impl Tables {
    /// # Errors
    /// `not_found`, `deleted`.
    pub(super) fn rows(&self, run: &RunId) -> Result<&RunRows, StoreError> {
        self.runs.get(run).ok_or_else(|| self.absent(run))
    }

    /// # Errors
    /// `not_found`, `deleted`.
    pub(super) fn rows_mut(&mut self, run: &RunId) -> Result<&mut RunRows, StoreError> {
        let absent = self.absent(run);
        self.runs.get_mut(run).ok_or(absent)
    }

    fn absent(&self, run: &RunId) -> StoreError {
        if self.fences.contains_key(run) {
            StoreError::Deleted
        } else {
            StoreError::NotFound
        }
    }

    /// The lease on this run that is live at this moment.
    pub(super) fn live(&self, now: Now, run: &RunId) -> Option<&LeaseRow> {
        self.leases.get(run).filter(|row| now.monotonic < row.until)
    }

    /// Whether this handle is the live lease.
    pub(super) fn holds(&self, now: Now, lease: &Lease) -> bool {
        self.live(now, &lease.run)
            .is_some_and(|row| row.incarnation == lease.incarnation)
    }

    /// A hint when the run is due and nobody holds it.
    pub(super) fn hint(&self, now: Now, run: &RunId, hints: &mut Vec<Hint>) {
        let due = self
            .runs
            .get(run)
            .and_then(|rows| rows.due_at)
            .is_some_and(|due| due <= now.wall);
        if due && self.live(now, run).is_none() {
            hints.push(Hint::Claimable(run.clone()));
        }
    }

    /// # Errors
    /// `not_found`, `deleted`, `corrupt`, `schema_unsupported`.
    pub(super) fn load(&self, now: Now, run: &RunId) -> Result<Loaded, StoreError> {
        let rows = self.rows(run)?;
        let (head, seal) = rows.head.open(run.as_str())?;
        let state = rows
            .head
            .state
            .clone()
            .open("state", rows.blob(&rows.head.state))?;
        Ok(Loaded {
            head,
            state,
            seal,
            inbox: rows.inbox.clone(),
            lease: self.live(now, run).map(|row| row.handle(run)),
            now: now.wall,
        })
    }
}

impl LeaseRow {
    pub(super) fn handle(&self, run: &RunId) -> Lease {
        Lease {
            run: run.clone(),
            owner: self.owner.clone(),
            incarnation: self.incarnation,
            expires_at: self.expires_at,
        }
    }
}
