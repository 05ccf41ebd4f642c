//! What a statement found about one run, and what its caller is told: pure.

use sqlx::postgres::PgRow;

use super::rows::{Cells, time, unsigned};
use super::work::signed;
use crate::ids::Revision;
use crate::store::{Authority, Committed, Conflict, Guard, StoreError};

/// What the statement says about one member of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Verdict {
    /// From 1.
    pub(super) place: i32,
    /// What was found; `None`: no such run.
    pub(super) revision: Option<i64>,
    pub(super) signal: i64,
    /// The incarnation of the live lease, if there is one.
    pub(super) held_by: Option<i64>,
    /// Whether the event before the first new one is there.
    pub(super) continued: bool,
    /// Whether every payload that was not sent is there.
    pub(super) known: bool,
    pub(super) written: bool,
    /// Whether the run is due and unheld from here on.
    pub(super) claimable: bool,
    pub(super) now: i64,
}

/// The columns of `Verdict`, of a row `k`.
pub(super) const VERDICT: &str = "k.place, k.revision, COALESCE(k.signal, 0), k.held_by, k.continued, k.known, k.written, \
     k.claimable, k.now";

impl Verdict {
    pub(super) fn read(row: &PgRow) -> Result<Self, StoreError> {
        let mut cells = Cells::new(row);
        Ok(Self {
            place: cells.get()?,
            revision: cells.get()?,
            signal: cells.get()?,
            held_by: cells.get()?,
            continued: cells.get()?,
            known: cells.get()?,
            written: cells.get()?,
            claimable: cells.get()?,
            now: cells.get()?,
        })
    }
}

/// Why a member was not written.
#[derive(Debug)]
pub(super) enum Refusal {
    Error(StoreError),
    /// No such run: whether there ever was one has to be asked.
    Gone,
    /// Payloads that were said to be stored are not any more: to be written again, carrying them.
    Carry,
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        Self::Error(error)
    }
}

fn revision_of(n: i64) -> Result<Revision, StoreError> {
    Revision::new(unsigned(n)?).map_err(|_| StoreError::corrupt("head: revision"))
}

/// The incarnation a guard needs; `None` needs that nobody holds the run.
pub(super) fn wanted(guard: &Guard) -> Option<i64> {
    match &guard.authority {
        Authority::Lease(lease) => Some(signed(lease.incarnation)),
        Authority::Idle => None,
    }
}

/// What a guard makes of what was found: revision first, then authority, then signal.
///
/// # Errors
/// `Gone`, or the guard's refusal.
pub(super) fn judge(guard: &Guard, verdict: &Verdict) -> Result<(), Refusal> {
    let wanted = wanted(guard);
    let found = revision_of(verdict.revision.ok_or(Refusal::Gone)?)?;
    if found != guard.revision {
        return Err(StoreError::Conflict(Conflict::Revision(found)).into());
    }
    match wanted {
        Some(_) if verdict.held_by != wanted => return Err(StoreError::LeaseLost.into()),
        None if verdict.held_by.is_some() => return Err(StoreError::Busy.into()),
        Some(_) | None => {}
    }
    let signal = unsigned(verdict.signal)?;
    if guard.signal.is_some_and(|seen| seen != signal) {
        return Err(StoreError::Conflict(Conflict::Signal(signal)).into());
    }
    Ok(())
}

/// The answer to a commit.
///
/// # Errors
/// Why it was not written.
pub(super) fn committed(guard: &Guard, verdict: &Verdict) -> Result<Committed, Refusal> {
    if verdict.written {
        let found = revision_of(verdict.revision.unwrap_or(0))?;
        return Ok(Committed {
            revision: found.next().map_err(|_| StoreError::RevisionsExhausted)?,
            signal: unsigned(verdict.signal)?,
            now: time(verdict.now)?,
        });
    }
    judge(guard, verdict)?;
    if !verdict.continued {
        return Err(StoreError::corrupt("not written: events are missing before these").into());
    }
    Err(Refusal::Carry)
}

/// The answer to a post: the new number of the inbox.
///
/// # Errors
/// Why it was not written.
pub(super) fn posted(verdict: &Verdict) -> Result<u64, Refusal> {
    if verdict.revision.is_none() {
        return Err(Refusal::Gone);
    }
    let signal = unsigned(verdict.signal)?;
    if verdict.written {
        return Ok(signal + 1);
    }
    if verdict.known {
        return Err(StoreError::Conflict(Conflict::Signal(signal)).into());
    }
    Err(Refusal::Carry)
}
