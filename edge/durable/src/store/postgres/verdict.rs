//! What a statement found about one run, and what its caller is told: pure.

use sqlx::postgres::PgRow;

use crate::ids::Revision;
use crate::store::rows::{Cells, signed, time, unsigned};
use crate::store::{Authority, Committed, Conflict, Guard, StoreError};

/// What the statement says about one member of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Verdict {
    /// From 1.
    pub(super) place: i64,
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
pub(super) const VERDICT: &str = "k.place::bigint, k.revision, COALESCE(k.signal, 0), k.held_by, k.continued, k.known, \
     k.written, k.claimable, k.now";

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

/// The answer to a commit that grows the inbox's number by so much.
///
/// # Errors
/// Why it was not written.
pub(super) fn committed(guard: &Guard, grows: i64, verdict: &Verdict) -> Result<Committed, Refusal> {
    if verdict.written {
        let found = revision_of(verdict.revision.unwrap_or(0))?;
        return Ok(Committed {
            revision: found.next().map_err(|_| StoreError::RevisionsExhausted)?,
            signal: unsigned(verdict.signal.saturating_add(grows))?,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Owner, RunId};
    use crate::store::Lease;
    use crate::time::Timestamp;

    fn guard(incarnation: Option<u64>, signal: Option<u64>) -> Guard {
        Guard {
            revision: Revision::new(5).unwrap(),
            authority: incarnation.map_or(Authority::Idle, |incarnation| {
                Authority::Lease(Lease {
                    run: RunId::new("r").unwrap(),
                    owner: Owner::new("worker").unwrap(),
                    incarnation,
                    expires_at: Timestamp::MIN,
                })
            }),
            signal,
        }
    }

    fn found(revision: Option<i64>, held_by: Option<i64>, signal: i64) -> Verdict {
        Verdict {
            place: 1,
            revision,
            signal,
            held_by,
            continued: true,
            known: true,
            written: false,
            claimable: false,
            now: 1,
        }
    }

    fn word<T: std::fmt::Debug>(answer: Result<T, Refusal>) -> &'static str {
        match answer {
            Ok(_) => "passes",
            Err(Refusal::Gone) => "gone",
            Err(Refusal::Carry) => "carry",
            Err(Refusal::Error(StoreError::Conflict(Conflict::Revision(_)))) => "revision",
            Err(Refusal::Error(StoreError::Conflict(Conflict::Signal(_)))) => "signal",
            Err(Refusal::Error(error)) => error.kind(),
        }
    }

    /// Over everything that can be found: what is told is the first of the guard's conditions that does not hold.
    #[test]
    fn a_guard_tells_the_first_thing_that_is_wrong() {
        for revision in [None, Some(5), Some(4), Some(6)] {
            for held_by in [None, Some(3), Some(4)] {
                for signal in [0, 7] {
                    for wanted in [None, Some(3)] {
                        for seen in [None, Some(7)] {
                            let verdict = found(revision, held_by, signal);
                            let told = word(judge(&guard(wanted, seen), &verdict));
                            let expected = match (revision, wanted, held_by) {
                                (None, _, _) => "gone",
                                (Some(4 | 6), _, _) => "revision",
                                (Some(_), None, Some(_)) => "busy",
                                (Some(_), Some(_), None | Some(4)) => "lease_lost",
                                (Some(_), _, _) if seen.is_some() && signal != 7 => "signal",
                                (Some(_), _, _) => "passes",
                            };
                            assert_eq!(told, expected, "{verdict:?} {wanted:?} {seen:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_was_written_is_told_with_the_revision_after_the_found_one() {
        let guard = guard(Some(3), None);
        let mut verdict = found(Some(5), Some(3), 2);
        verdict.written = true;
        let told = committed(&guard, 0, &verdict).unwrap();
        assert_eq!((told.revision.get(), told.signal), (6, 2));
        assert_eq!(posted(&verdict).unwrap(), 3);
        verdict.written = false;
        verdict.known = false;
        assert_eq!(word(committed(&guard, 0, &verdict)), "carry");
        assert_eq!(word(posted(&verdict)), "carry");
        verdict.continued = false;
        assert_eq!(word(committed(&guard, 0, &verdict)), "corrupt");
        verdict.known = true;
        assert_eq!(word(posted(&verdict)), "signal");
        verdict.revision = None;
        assert_eq!(word(posted(&verdict)), "gone");
    }
}
