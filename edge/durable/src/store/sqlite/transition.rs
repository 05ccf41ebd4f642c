//! Commits: one transition of one run. Rows are sealed before they are queued, so that the writer only writes.

use rusqlite::params;

use super::beside::Beside;
use super::fail::Fail;
use super::writer::{Tx, Work};
use crate::envelope::{CheckpointRow, HeadRow};
use crate::ids::{Revision, RunId};
use crate::payload::Digest;
use crate::store::rows::{signed, unsigned};
use crate::store::{Authority, Commit, Committed, Conflict, Guard, Hint, StoreError, check};
use crate::time::Timestamp;

/// A commit, sealed and ready to be written.
pub(super) struct Transition {
    run: RunId,
    guard: Guard,
    /// What will be assigned; `None` when the last one is used up.
    revision: Option<Revision>,
    head: HeadRow,
    checkpoint_seal: Option<Digest>,
    due_at: Option<Timestamp>,
    release: bool,
    settles: bool,
    beside: Beside,
}

impl Transition {
    /// # Errors
    /// `corrupt` when the commit is none; `too_large`.
    pub(super) fn new(mut commit: Commit) -> Result<Self, StoreError> {
        check::commit(&commit)?;
        // The guard pins what is found, so the revision that will be assigned is known here.
        let revision = commit.guard.revision.next().ok();
        let head = HeadRow::seal(
            &commit.head,
            &commit.state,
            revision.unwrap_or(commit.guard.revision),
        )?;
        Ok(Self {
            settles: commit.settles(),
            beside: Beside::of_commit(&mut commit)?,
            run: commit.head.id,
            guard: commit.guard,
            revision,
            checkpoint_seal: CheckpointRow::of(&head).seal,
            head,
            due_at: commit.due_at,
            release: commit.release,
        })
    }

    /// Writes the head when the guard holds. Head, lease and inbox are looked at in the statement that writes.
    fn write_head(&self, tx: &Tx<'_>, revision: Revision, now: i64) -> Result<bool, Fail> {
        let head = &self.head;
        let incarnation = match &self.guard.authority {
            Authority::Lease(lease) => Some(signed(lease.incarnation)),
            Authority::Idle => None,
        };
        let written = tx.execute(
            "UPDATE runs SET status = ?6, cursor = ?7, activation = ?8, revision = ?9, schema_version = ?10, \
             root_id = ?11, state = ?12, state_digest = ?13, budgets = ?14, outcome = ?15, body = ?16, seal = ?17, \
             deadline = ?18, updated_at = ?19, signal = signal + ?20 \
             WHERE run_id = ?1 AND revision = ?2 AND (?3 IS NULL OR signal = ?3) AND CASE WHEN ?4 IS NULL \
             THEN NOT EXISTS (SELECT 1 FROM run_leases l WHERE l.run_id = ?1 AND l.expires_at > ?5) \
             ELSE EXISTS (SELECT 1 FROM run_leases l WHERE l.run_id = ?1 AND l.incarnation = ?4 \
             AND l.expires_at > ?5) END",
            params![
                head.run_id,
                signed(self.guard.revision.get()),
                self.guard.signal.map(signed),
                incarnation,
                now,
                head.status,
                head.cursor,
                head.activation,
                signed(revision.get()),
                head.schema_version,
                head.root_id,
                head.state.inline.as_deref(),
                head.state.digest,
                &*head.budgets,
                head.outcome.as_deref(),
                &*head.body,
                head.seal,
                head.deadline,
                head.updated_at,
                self.settles,
            ],
        )?;
        Ok(written == 1)
    }

    /// Writes the indexed columns, when one of them changes: they hardly do while a run runs, and each costs its index twice.
    /// The inbox's number.
    fn write_indexed(&self, tx: &Tx<'_>) -> Result<u64, Fail> {
        let head = &self.head;
        let columns = params![
            head.run_id,
            head.kind,
            head.definition,
            head.parent_id,
            head.created_at,
            head.waiting_kind,
            self.due_at.map(Timestamp::as_millis),
            head.owner,
        ];
        let found = tx.row(
            "SELECT signal, kind IS ?2 AND definition IS ?3 AND parent_id IS ?4 AND created_at IS ?5 \
             AND waiting_kind IS ?6 AND due_at IS ?7 AND owner IS ?8 FROM runs WHERE run_id = ?1",
            columns,
            |row| Ok((row.get(0)?, row.get(1)?)),
        )?;
        let (signal, same): (i64, bool) = found.ok_or(StoreError::NotFound)?;
        if !same {
            tx.execute(
                "UPDATE runs SET kind = ?2, definition = ?3, parent_id = ?4, created_at = ?5, waiting_kind = ?6, \
                 due_at = ?7, owner = ?8 WHERE run_id = ?1",
                columns,
            )?;
        }
        Ok(unsigned(signal)?)
    }
}

impl Work for Transition {
    type Answer = Committed;

    fn run(self, tx: &mut Tx<'_>) -> Result<Committed, Fail> {
        let now = tx.now();
        let Some(revision) = self.revision else {
            let why = verdict(tx, &self.run, &self.guard, now)?;
            return Err(why.unwrap_or(StoreError::RevisionsExhausted).into());
        };
        if !self.write_head(tx, revision, now)? {
            let why = verdict(tx, &self.run, &self.guard, now)?;
            return Err(why
                .unwrap_or_else(|| StoreError::corrupt("not written: the guard holds and does not"))
                .into());
        }
        let signal = self.write_indexed(tx)?;
        write_checkpoint(tx, &self.head, self.checkpoint_seal.as_ref())?;
        self.beside.write(tx, &self.run)?;
        if self.release {
            tx.execute(
                "DELETE FROM run_leases WHERE run_id = ?",
                params![self.head.run_id],
            )?;
        }
        let now = tx.wall();
        let unheld = self.release || self.guard.authority == Authority::Idle;
        if unheld && self.due_at.is_some_and(|due| due <= now) {
            tx.hint(Hint::Claimable(self.run));
        }
        Ok(Committed {
            revision,
            signal,
            now,
        })
    }
}

/// The checkpoint of a head, see `CheckpointRow::of`.
pub(super) fn write_checkpoint(tx: &Tx<'_>, head: &HeadRow, seal: Option<&Digest>) -> Result<(), Fail> {
    tx.execute(
        "INSERT INTO checkpoints (run_id, revision, status, cursor, activation, state, state_digest, seal, created_at) \
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        params![
            head.run_id,
            head.revision,
            head.status,
            head.cursor,
            head.activation,
            head.state.inline.as_deref(),
            head.state.digest,
            seal,
            head.updated_at,
        ],
    )?;
    Ok(())
}

/// Why a guard does not hold at this moment of the lease clock: head first, then lease, then inbox.
fn verdict(tx: &Tx<'_>, run: &RunId, guard: &Guard, now: i64) -> Result<Option<StoreError>, Fail> {
    let found = tx.row(
        "SELECT r.revision, r.signal, l.incarnation FROM runs r \
         LEFT JOIN run_leases l ON l.run_id = r.run_id AND l.expires_at > ? WHERE r.run_id = ?",
        params![now, run.as_str()],
        |row| {
            Ok((
                row.get::<_, i64>(0)?,
                row.get::<_, i64>(1)?,
                row.get::<_, Option<i64>>(2)?,
            ))
        },
    )?;
    let Some((revision, signal, live)) = found else {
        return absent(tx, run).map(Some);
    };
    let revision = Revision::new(unsigned(revision)?).map_err(|_| StoreError::corrupt("head: revision"))?;
    if revision != guard.revision {
        return Ok(Some(StoreError::Conflict(Conflict::Revision(revision))));
    }
    match &guard.authority {
        Authority::Lease(lease) if live != Some(signed(lease.incarnation)) => {
            return Ok(Some(StoreError::LeaseLost));
        }
        Authority::Idle if live.is_some() => return Ok(Some(StoreError::Busy)),
        Authority::Lease(_) | Authority::Idle => {}
    }
    let signal = unsigned(signal)?;
    Ok(match guard.signal {
        Some(seen) if seen != signal => Some(StoreError::Conflict(Conflict::Signal(signal))),
        Some(_) | None => None,
    })
}

/// What is said of a run that has no row: a fence without one is a tombstone.
pub(super) fn absent(tx: &Tx<'_>, run: &RunId) -> Result<StoreError, Fail> {
    let sql = "SELECT 1 FROM run_fences WHERE run_id = ?";
    Ok(match tx.row(sql, params![run.as_str()], |_| Ok(()))? {
        Some(()) => StoreError::Deleted,
        None => StoreError::NotFound,
    })
}
