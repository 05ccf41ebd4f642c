//! Commits: one transition of one run. What most of them have is one statement, see `transition.sql`; whatever else there is
//! follows it in a script. Rows are sealed before they are queued, so that the writer only writes.

use super::beside::{Beside, First, put_activity, put_event, put_step};
use super::fail::{self, Fail, Refusal};
use super::rows::{Cells, signed};
use super::script::{Args, Script, args};
use super::writer::{Tx, Work};
use crate::envelope::{CheckpointRow, HeadRow};
use crate::ids::{Revision, RunId};
use crate::payload::Digest;
use crate::store::{Authority, Commit, Committed, Conflict, Guard, Hint, StoreError, check};
use crate::time::Timestamp;

const WRITE: &str = "INSERT INTO transition VALUES (\
     ?, ?, ?, ?, ?, \
     ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, \
     ?, ?, \
     ?, ?, ?, ?, ?, ?, ?, ?, ?, \
     ?, ?, ?, ?, \
     ?, ?, ?, ?, ?, ?, \
     ?, ?, ?, ?, ?, ?\
     ) RETURNING (SELECT signal FROM runs WHERE run_id = ?)";

/// The columns of a head from `kind` to `updated_at`, in the order in which `transition` and `runs` are written.
pub(super) fn put_head(args: &mut Args, head: HeadRow, due_at: Option<Timestamp>) {
    args.put(head.kind)
        .put(head.definition)
        .put(head.status)
        .put(head.cursor)
        .put(head.activation)
        .put(head.schema_version)
        .put(head.parent_id)
        .put(head.root_id)
        .payload(head.state)
        .bytes(head.budgets)
        .some_bytes(head.outcome)
        .bytes(head.body)
        .some_digest(head.seal.as_ref())
        .put(head.waiting_kind)
        .put(due_at.map(Timestamp::as_millis))
        .put(head.deadline)
        .put(head.created_at)
        .put(head.updated_at);
}

/// A commit, sealed and ready to be written.
pub(super) struct Transition {
    run: RunId,
    guard: Guard,
    revision: Revision,
    head: HeadRow,
    checkpoint_seal: Option<Digest>,
    due_at: Option<Timestamp>,
    release: bool,
    first: First,
    /// What the statement has no columns for.
    more: Beside,
}

impl Transition {
    /// # Errors
    /// `corrupt` when the commit is none; `too_large`. `None` for the revision after the last one, see `LastRevision`.
    pub(super) fn new(mut commit: Commit) -> Result<Option<Self>, StoreError> {
        check::commit(&commit)?;
        // The guard pins what is found, so the revision that will be assigned is known here.
        let Ok(revision) = commit.guard.revision.next() else {
            return Ok(None);
        };
        let head = HeadRow::seal(&commit.head, &commit.state, revision)?;
        let mut more = Beside::of_commit(&mut commit)?;
        Ok(Some(Self {
            run: commit.head.id,
            guard: commit.guard,
            revision,
            checkpoint_seal: CheckpointRow::of(&head).seal,
            head,
            due_at: commit.due_at,
            release: commit.release,
            first: more.take_first(),
            more,
        }))
    }
}

impl Work for Transition {
    type Answer = Committed;

    async fn run(mut self, tx: &mut Tx<'_>) -> Result<Committed, Fail> {
        let run = self.run;
        self.more.add_missing(tx, &run).await?;
        let incarnation = match &self.guard.authority {
            Authority::Lease(lease) => Some(signed(lease.incarnation)),
            Authority::Idle => None,
        };
        let now = tx.now();
        let mut script = Script::new();
        let mut alone = Args::default();
        let is_alone = self.more.is_empty();
        let args = if is_alone {
            &mut alone
        } else {
            script.statement(WRITE)
        };
        args.put(run.as_str())
            .put(signed(self.guard.revision.get()))
            .put(incarnation)
            .put(self.guard.signal.map(signed))
            .put(now);
        put_head(args, self.head, self.due_at);
        args.some_digest(self.checkpoint_seal.as_ref()).put(self.release);
        match self.first.activity {
            Some(row) => put_activity(args, row),
            None => drop(args.nulls(9)),
        }
        match self.first.step {
            Some(row) => put_step(args, row),
            None => drop(args.nulls(4)),
        }
        for event in self.first.events {
            match event {
                Some(event) => put_event(args, event),
                None => drop(args.nulls(6)),
            }
        }
        args.put(run.as_str());

        let answer = if is_alone {
            tx.statement(WRITE, alone).await?
        } else {
            self.more.write(&run, &mut script);
            let rows = tx.script(script).await?;
            rows.map(|rows| rows.into_iter().next())
        };
        let row = match answer {
            Ok(row) => row.ok_or_else(|| StoreError::corrupt("not written: no answer"))?,
            Err((Refusal::Guard, error)) => {
                let why = verdict(tx, &run, &self.guard, now).await?;
                return Err(why
                    .unwrap_or_else(|| fail::refused(Refusal::Guard, &error))
                    .into());
            }
            Err((refusal, error)) => return Err(fail::refused(refusal, &error).into()),
        };
        let now = tx.wall();
        if (self.release || incarnation.is_none()) && self.due_at.is_some_and(|due| due <= now) {
            tx.hint(Hint::Claimable(run));
        }
        Ok(Committed {
            revision: self.revision,
            signal: Cells::new(&row).count()?,
            now,
        })
    }
}

/// A commit over the last revision there is: refused, after the guard has had its say (D108).
pub(super) struct LastRevision {
    pub(super) run: RunId,
    pub(super) guard: Guard,
}

impl Work for LastRevision {
    type Answer = Committed;

    async fn run(self, tx: &mut Tx<'_>) -> Result<Committed, Fail> {
        let now = tx.now();
        let why = verdict(tx, &self.run, &self.guard, now).await?;
        Err(why.unwrap_or(StoreError::RevisionsExhausted).into())
    }
}

/// Why a guard does not hold at this moment of the lease clock: head first, then lease, then inbox.
async fn verdict(tx: &mut Tx<'_>, run: &RunId, guard: &Guard, now: i64) -> Result<Option<StoreError>, Fail> {
    let sql = "SELECT r.revision, r.signal, l.incarnation FROM runs r \
         LEFT JOIN run_leases l ON l.run_id = r.run_id AND l.expires_at > ? WHERE r.run_id = ?";
    let row = tx.row(sql, args![now, run.as_str()]).await?;
    let Some(row) = row else {
        return absent(tx, run).await.map(Some);
    };
    let mut cells = Cells::new(&row);
    let found = cells.count()?;
    let signal = cells.count()?;
    let live = cells.get::<Option<i64>>()?;
    let found = Revision::new(found).map_err(|_| StoreError::corrupt("head: revision"))?;
    if found != guard.revision {
        return Ok(Some(StoreError::Conflict(Conflict::Revision(found))));
    }
    match &guard.authority {
        Authority::Lease(lease) if live != Some(signed(lease.incarnation)) => {
            return Ok(Some(StoreError::LeaseLost));
        }
        Authority::Idle if live.is_some() => return Ok(Some(StoreError::Busy)),
        Authority::Lease(_) | Authority::Idle => {}
    }
    Ok(match guard.signal {
        Some(seen) if seen != signal => Some(StoreError::Conflict(Conflict::Signal(signal))),
        Some(_) | None => None,
    })
}

/// What is said of a run that has no row: a fence without one is a tombstone.
pub(super) async fn absent(tx: &mut Tx<'_>, run: &RunId) -> Result<StoreError, Fail> {
    let sql = "SELECT 1 FROM run_fences WHERE run_id = ?";
    Ok(match tx.row(sql, args![run.as_str()]).await? {
        Some(_) => StoreError::Deleted,
        None => StoreError::NotFound,
    })
}
