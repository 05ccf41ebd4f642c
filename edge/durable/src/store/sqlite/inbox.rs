//! Posts: what reaches a run from outside, whoever holds it.

use rusqlite::params;

use super::beside::Beside;
use super::fail::Fail;
use super::transition::absent;
use super::writer::{Tx, Work};
use crate::ids::RunId;
use crate::record::{CancelRequest, Status};
use crate::store::rows::unsigned;
use crate::store::{Conflict, Hint, Post, StoreError, check};

/// A post, sealed and ready to be written.
pub(super) struct Posting {
    run: RunId,
    signal: u64,
    cancel: Option<CancelRequest>,
    wake: bool,
    beside: Beside,
}

impl Posting {
    /// # Errors
    /// `corrupt` when it is none; `too_large`.
    pub(super) fn new(post: Post) -> Result<Self, StoreError> {
        check::post(&post)?;
        Ok(Self {
            beside: Beside::of_post(&post.waits, post.decisions)?,
            run: post.run,
            signal: post.signal,
            cancel: post.cancel,
            wake: post.wake,
        })
    }
}

/// What a post looks at.
struct Found {
    signal: i64,
    status: String,
    due_at: Option<i64>,
    held: bool,
}

impl Work for Posting {
    type Answer = u64;

    fn run(self, tx: &mut Tx<'_>) -> Result<u64, Fail> {
        let id = self.run.as_str();
        let found = tx.row(
            "SELECT r.signal, r.status, r.due_at, \
             EXISTS (SELECT 1 FROM run_leases l WHERE l.run_id = r.run_id AND l.expires_at > ?) \
             FROM runs r WHERE r.run_id = ?",
            params![tx.now(), id],
            |row| {
                Ok(Found {
                    signal: row.get(0)?,
                    status: row.get(1)?,
                    due_at: row.get(2)?,
                    held: row.get(3)?,
                })
            },
        )?;
        let Some(found) = found else {
            return Err(absent(tx, &self.run)?.into());
        };
        let signal = unsigned(found.signal)?;
        if signal != self.signal {
            return Err(StoreError::Conflict(Conflict::Signal(signal)).into());
        }

        let now = tx.wall().as_millis();
        // An ended run is never claimable again.
        let over = Status::parse(&found.status).is_some_and(Status::is_terminal);
        let due_at = if self.wake && !over {
            Some(now)
        } else {
            found.due_at
        };
        let cancel = self
            .cancel
            .as_ref()
            .map(serde_json::to_string)
            .transpose()
            .map_err(|error| StoreError::corrupt(format!("not written: {error}")))?;
        tx.execute(
            "UPDATE runs SET signal = signal + 1, due_at = ?, \
             cancel_requested_at = CASE WHEN cancel IS NULL THEN ? ELSE cancel_requested_at END, \
             cancel = coalesce(cancel, ?) WHERE run_id = ?",
            params![
                due_at,
                self.cancel.as_ref().map(|cancel| cancel.requested_at.as_millis()),
                cancel,
                id,
            ],
        )?;
        self.beside.write(tx, &self.run)?;
        tx.hint(Hint::Posted(self.run.clone()));
        if !found.held && due_at.is_some_and(|due| due <= now) {
            tx.hint(Hint::Claimable(self.run));
        }
        Ok(signal + 1)
    }
}
