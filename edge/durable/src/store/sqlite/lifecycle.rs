//! Retention, deletion, and what is done about corrupt runs.

use rusqlite::{named_params, params};

use super::fail::Fail;
use super::transition::absent;
use super::writer::{Tx, Work};
use crate::ids::{RunId, WaitId};
use crate::record::{Status, WaitingKind};
use crate::store::{Hint, StoreError};
use crate::time::Timestamp;

/// Takes the state away from all but the newest checkpoints.
pub(super) struct Prune {
    pub(super) run: RunId,
    pub(super) keep: u32,
}

impl Work for Prune {
    type Answer = u64;

    fn run(self, tx: &mut Tx<'_>) -> Result<u64, Fail> {
        let id = self.run.as_str();
        let sql = "SELECT 1 FROM runs WHERE run_id = ?";
        if tx.row(sql, params![id], |_| Ok(()))?.is_none() {
            return Err(absent(tx, &self.run)?.into());
        }
        let pruned = tx.execute(
            "UPDATE checkpoints SET pruned = 1, state = NULL WHERE run_id = :run_id AND pruned = 0 AND revision <= \
             (SELECT revision FROM checkpoints WHERE run_id = :run_id ORDER BY revision DESC LIMIT 1 OFFSET :keep)",
            named_params! { ":run_id": id, ":keep": self.keep.max(1) },
        )?;
        // Long payloads that no row names any more.
        tx.execute(
            "DELETE FROM blobs WHERE run_id = :run_id AND digest NOT IN (\
             SELECT state_digest FROM runs WHERE run_id = :run_id \
             UNION ALL SELECT state_digest FROM checkpoints WHERE run_id = :run_id AND pruned = 0 \
             UNION ALL SELECT input_digest FROM activities WHERE run_id = :run_id \
             UNION ALL SELECT output_digest FROM activities WHERE run_id = :run_id AND output_digest IS NOT NULL \
             UNION ALL SELECT subject_digest FROM waits WHERE run_id = :run_id \
             UNION ALL SELECT delivered_digest FROM waits WHERE run_id = :run_id AND delivered_digest IS NOT NULL)",
            named_params! { ":run_id": id },
        )?;
        Ok(pruned as u64)
    }
}

/// Removes a run; its fence stays.
pub(super) struct Delete(pub(super) RunId);

impl Work for Delete {
    type Answer = ();

    fn run(self, tx: &mut Tx<'_>) -> Result<(), Fail> {
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
        let found = tx.row(
            "SELECT EXISTS (SELECT 1 FROM run_leases l WHERE l.run_id = r.run_id AND l.expires_at > ?), r.status \
             FROM runs r WHERE r.run_id = ?",
            params![tx.now(), run.as_str()],
            |row| Ok((row.get::<_, bool>(0)?, row.get::<_, String>(1)?)),
        )?;
        let Some((held, status)) = found else {
            return Err(absent(tx, &run)?.into());
        };
        if held {
            return Err(StoreError::Busy.into());
        }
        if !Status::parse(&status).is_some_and(Status::is_terminal) {
            return Err(StoreError::NotIdle.into());
        }
        for table in TABLES {
            tx.execute(table, params![run.as_str()])?;
        }
        Ok(())
    }
}

/// Drops keys of creations.
pub(super) struct ForgetKeys {
    pub(super) before: Timestamp,
    /// At most `KEYS_AT_ONCE`.
    pub(super) limit: u32,
}

/// Keys that are dropped in one go: commits wait for no more.
pub(super) const KEYS_AT_ONCE: u32 = 500;

impl Work for ForgetKeys {
    type Answer = u64;

    fn run(self, tx: &mut Tx<'_>) -> Result<u64, Fail> {
        let dropped = tx.execute(
            "DELETE FROM idempotency_keys WHERE (scope, key) IN (\
             SELECT k.scope, k.key FROM idempotency_keys k INDEXED BY idempotency_keys_created \
             WHERE k.created_at < ? AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.run_id = k.run_id \
             AND r.status NOT IN ('succeeded', 'failed', 'cancelled', 'exhausted', 'transferred')) \
             ORDER BY k.created_at, k.scope, k.key LIMIT ?)",
            params![self.before.as_millis(), self.limit],
        )?;
        Ok(dropped as u64)
    }
}

/// Sets a run aside.
pub(super) struct Quarantine {
    pub(super) run: RunId,
    pub(super) why: String,
}

impl Work for Quarantine {
    type Answer = ();

    fn run(self, tx: &mut Tx<'_>) -> Result<(), Fail> {
        let sql = "UPDATE runs SET quarantine = ? WHERE run_id = ?";
        match tx.execute(sql, params![self.why, self.run.as_str()])? {
            0 => Err(absent(tx, &self.run)?.into()),
            _ => Ok(()),
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
    /// The run is whole, and claimable at this time; these of its waits are of another kind than their column says.
    Whole {
        due_at: Option<i64>,
        misfiled: Vec<(WaitId, WaitingKind)>,
    },
    /// It is not; the first reason stays.
    Corrupt { why: String },
}

impl Work for Repair {
    type Answer = bool;

    fn run(self, tx: &mut Tx<'_>) -> Result<bool, Fail> {
        let id = self.run.as_str();
        let mut filed = 0;
        let (written, due_at) = match self.change {
            Change::Whole { due_at, misfiled } => {
                // A wait keeps its kind, whatever its run does meanwhile.
                for (wait, kind) in misfiled {
                    filed += tx.execute(
                        "UPDATE waits SET kind = ?1 WHERE run_id = ?2 AND wait_id = ?3 AND kind IS NOT ?1",
                        params![kind.as_str(), id, wait.as_str()],
                    )?;
                }
                let written = tx.execute(
                    "UPDATE runs SET due_at = ?, quarantine = NULL WHERE run_id = ? AND revision = ? AND signal = ?",
                    params![due_at, id, self.revision, self.signal],
                )?;
                (written, due_at)
            }
            Change::Corrupt { why } => (
                tx.execute(
                    "UPDATE runs SET quarantine = coalesce(quarantine, ?) \
                     WHERE run_id = ? AND revision = ? AND signal = ?",
                    params![why, id, self.revision, self.signal],
                )?,
                None,
            ),
        };
        if written == 0 {
            return Ok(filed > 0);
        }
        let held = tx.row(
            "SELECT 1 FROM run_leases WHERE run_id = ? AND expires_at > ?",
            params![id, tx.now()],
            |_| Ok(()),
        )?;
        if held.is_none() && due_at.is_some_and(|due| due <= tx.wall().as_millis()) {
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

    fn run(self, tx: &mut Tx<'_>) -> Result<(), Fail> {
        let limit = match self.0 {
            Some(pages) => {
                let now = tx.row("PRAGMA page_count", [], |row| row.get::<_, i64>(0))?;
                now.unwrap_or(0) + i64::from(pages)
            }
            None => i64::from(u32::MAX - 1),
        };
        tx.row(&format!("PRAGMA max_page_count = {limit}"), [], |_| Ok(()))?;
        Ok(())
    }
}
