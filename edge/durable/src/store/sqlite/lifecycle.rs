//! Retention, deletion, and what is done about corrupt runs.

use super::fail::{self, Fail};
use super::rows::Cells;
#[cfg(feature = "testing")]
use super::script::Args;
use super::script::{Script, args};
use super::transition::absent;
use super::writer::{Tx, Work};
use crate::ids::RunId;
use crate::record::Status;
use crate::store::{Hint, StoreError};

/// Writes a script that nothing can refuse.
async fn write(tx: &mut Tx<'_>, script: Script) -> Result<(), Fail> {
    match tx.script(script).await? {
        Ok(_) => Ok(()),
        Err((refusal, error)) => Err(fail::refused(refusal, &error).into()),
    }
}

/// Takes the state away from all but the newest checkpoints.
pub(super) struct Prune {
    pub(super) run: RunId,
    pub(super) keep: u32,
}

impl Work for Prune {
    type Answer = u64;

    async fn run(self, tx: &mut Tx<'_>) -> Result<u64, Fail> {
        let id = self.run.as_str();
        let sql = "SELECT (SELECT count(*) FROM checkpoints c WHERE c.run_id = r.run_id AND c.pruned = 0 \
             AND c.revision <= k.revision), k.revision \
             FROM runs r LEFT JOIN (SELECT revision FROM checkpoints WHERE run_id = ? ORDER BY revision DESC \
             LIMIT 1 OFFSET ?) k WHERE r.run_id = ?";
        let keep = i64::from(self.keep.max(1));
        let Some(row) = tx.row(sql, args![id, keep, id]).await? else {
            return Err(absent(tx, &self.run).await?.into());
        };
        let mut cells = Cells::new(&row);
        let pruned = cells.count()?;
        let newest: Option<i64> = cells.get()?;
        let mut script = Script::new();
        script
            .statement("UPDATE checkpoints SET pruned = 1, state = NULL WHERE run_id = ? AND pruned = 0 AND revision <= ?")
            .put(id)
            .put(newest);
        // Long payloads that no row names any more.
        script
            .statement(
                "DELETE FROM blobs WHERE run_id = ? AND digest NOT IN (\
                 SELECT state_digest FROM runs WHERE run_id = ? \
                 UNION ALL SELECT state_digest FROM checkpoints WHERE run_id = ? AND pruned = 0 \
                 UNION ALL SELECT input_digest FROM activities WHERE run_id = ? \
                 UNION ALL SELECT output_digest FROM activities WHERE run_id = ? AND output_digest IS NOT NULL \
                 UNION ALL SELECT subject_digest FROM waits WHERE run_id = ? \
                 UNION ALL SELECT delivered_digest FROM waits WHERE run_id = ? AND delivered_digest IS NOT NULL)",
            )
            .put(id)
            .put(id)
            .put(id)
            .put(id)
            .put(id)
            .put(id)
            .put(id);
        write(tx, script).await?;
        Ok(pruned)
    }
}

/// Removes a run; its fence stays.
pub(super) struct Delete(pub(super) RunId);

impl Work for Delete {
    type Answer = ();

    async fn run(self, tx: &mut Tx<'_>) -> Result<(), Fail> {
        const TABLES: [&str; 9] = [
            "DELETE FROM runs WHERE run_id = ?",
            "DELETE FROM run_leases WHERE run_id = ?",
            "DELETE FROM checkpoints WHERE run_id = ?",
            "DELETE FROM steps WHERE run_id = ?",
            "DELETE FROM activities WHERE run_id = ?",
            "DELETE FROM waits WHERE run_id = ?",
            "DELETE FROM decisions WHERE run_id = ?",
            "DELETE FROM events WHERE run_id = ?",
            "DELETE FROM blobs WHERE run_id = ?",
        ];
        let Self(run) = self;
        let sql = "SELECT r.status, \
             EXISTS (SELECT 1 FROM run_leases l WHERE l.run_id = r.run_id AND l.expires_at > ?) \
             FROM runs r WHERE r.run_id = ?";
        let Some(row) = tx.row(sql, args![tx.now(), run.as_str()]).await? else {
            return Err(absent(tx, &run).await?.into());
        };
        let mut cells = Cells::new(&row);
        let over = Status::parse(cells.get()?).is_some_and(Status::is_terminal);
        if cells.get()? {
            return Err(StoreError::Busy.into());
        }
        if !over {
            return Err(StoreError::NotIdle.into());
        }
        let mut script = Script::new();
        for table in TABLES {
            script.statement(table).put(run.as_str());
        }
        write(tx, script).await
    }
}

/// Sets a run aside.
pub(super) struct Quarantine {
    pub(super) run: RunId,
    pub(super) why: String,
}

impl Work for Quarantine {
    type Answer = ();

    async fn run(self, tx: &mut Tx<'_>) -> Result<(), Fail> {
        let sql = "UPDATE runs SET quarantine = ? WHERE run_id = ? RETURNING 1";
        match tx.row(sql, args![self.why, self.run.as_str()]).await? {
            Some(_) => Ok(()),
            None => Err(absent(tx, &self.run).await?.into()),
        }
    }
}

/// What `rebuild_index` found wrong with a run.
pub(super) struct Repair {
    pub(super) run: RunId,
    /// As they were read: a run that has changed since is right again.
    pub(super) revision: i64,
    pub(super) signal: i64,
    pub(super) change: Change,
}

/// And what it does about it.
pub(super) enum Change {
    /// The run is whole, and claimable at this time.
    Whole { due_at: Option<i64> },
    /// It is not; the first reason stays.
    Corrupt { why: String },
}

impl Work for Repair {
    type Answer = bool;

    async fn run(self, tx: &mut Tx<'_>) -> Result<bool, Fail> {
        let id = self.run.as_str();
        let row = match self.change {
            Change::Whole { due_at } => {
                let sql = "UPDATE runs SET due_at = ?, quarantine = NULL \
                     WHERE run_id = ? AND revision = ? AND signal = ? RETURNING due_at, \
                     EXISTS (SELECT 1 FROM run_leases l WHERE l.run_id = runs.run_id AND l.expires_at > ?)";
                let args = args![due_at, id, self.revision, self.signal, tx.now()];
                tx.row(sql, args).await?
            }
            Change::Corrupt { why } => {
                let sql = "UPDATE runs SET quarantine = coalesce(quarantine, ?) \
                     WHERE run_id = ? AND revision = ? AND signal = ? RETURNING NULL, 1";
                tx.row(sql, args![why, id, self.revision, self.signal]).await?
            }
        };
        let Some(row) = row else {
            return Ok(false);
        };
        let mut cells = Cells::new(&row);
        let due_at: Option<i64> = cells.get()?;
        let held: bool = cells.get()?;
        if !held && due_at.is_some_and(|due| due <= tx.wall().as_millis()) {
            tx.hint(Hint::Claimable(self.run));
        }
        Ok(true)
    }
}

/// Lets the file grow no further than by this many pages from here, or without limit: a full disk, for tests.
#[cfg(feature = "testing")]
pub(super) struct LimitGrowth(pub(super) Option<u32>);

#[cfg(feature = "testing")]
impl Work for LimitGrowth {
    type Answer = ();

    async fn run(self, tx: &mut Tx<'_>) -> Result<(), Fail> {
        let limit = match self.0 {
            Some(pages) => {
                let row = tx.row("PRAGMA page_count", Args::default()).await?;
                let row = row.ok_or_else(|| StoreError::corrupt("no page count"))?;
                Cells::new(&row).get::<i64>()? + i64::from(pages)
            }
            None => i64::from(u32::MAX - 1),
        };
        let sql = format!("PRAGMA max_page_count = {limit}");
        tx.row(sqlx::AssertSqlSafe(sql), Args::default()).await?;
        Ok(())
    }
}
