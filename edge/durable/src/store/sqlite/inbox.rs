//! Posts: what reaches a run from outside, whoever holds it.

use super::beside::Beside;
use super::fail::{self, Fail};
use super::rows::Cells;
use super::script::{Script, args};
use super::transition::absent;
use super::writer::{Tx, Work};
use crate::ids::RunId;
use crate::record::{CancelRequest, Status};
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

impl Work for Posting {
    type Answer = u64;

    async fn run(mut self, tx: &mut Tx<'_>) -> Result<u64, Fail> {
        let sql = "SELECT r.signal, r.status, r.due_at, \
             EXISTS (SELECT 1 FROM run_leases l WHERE l.run_id = r.run_id AND l.expires_at > ?) \
             FROM runs r WHERE r.run_id = ?";
        let row = tx.row(sql, args![tx.now(), self.run.as_str()]).await?;
        let Some(row) = row else {
            return Err(absent(tx, &self.run).await?.into());
        };
        let mut cells = Cells::new(&row);
        let signal = cells.count()?;
        let over = Status::parse(cells.get()?).is_some_and(Status::is_terminal);
        let due_at: Option<i64> = cells.get()?;
        let held: bool = cells.get()?;
        if signal != self.signal {
            return Err(StoreError::Conflict(Conflict::Signal(signal)).into());
        }

        self.beside.add_missing(tx, &self.run).await?;
        let now = tx.wall().as_millis();
        // An ended run is never claimable again.
        let due_at = if self.wake && !over { Some(now) } else { due_at };
        let requested_at = self.cancel.as_ref().map(|c| c.requested_at.as_millis());
        let cancel = self
            .cancel
            .as_ref()
            .map(serde_json::to_string)
            .transpose()
            .map_err(|error| StoreError::corrupt(format!("not written: {error}")))?;
        let mut script = Script::new();
        script
            .statement(
                "UPDATE runs SET signal = signal + 1, due_at = ?, \
                 cancel_requested_at = CASE WHEN cancel IS NULL THEN ? ELSE cancel_requested_at END, \
                 cancel = coalesce(cancel, ?) WHERE run_id = ?",
            )
            .put(due_at)
            .put(requested_at)
            .put(cancel)
            .put(self.run.as_str());
        self.beside.write(&self.run, &mut script);
        if let Err((refusal, error)) = tx.script(script).await? {
            return Err(fail::refused(refusal, &error).into());
        }
        tx.hint(Hint::Posted(self.run.clone()));
        if !held && due_at.is_some_and(|due| due <= now) {
            tx.hint(Hint::Claimable(self.run));
        }
        Ok(signal + 1)
    }
}
