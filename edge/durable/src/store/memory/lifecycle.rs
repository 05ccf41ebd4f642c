//! Retention, deletion, and what is done about corrupt runs.

use super::tables::{Now, RunRows, Tables, WaitPlace};
use crate::ids::RunId;
use crate::record::WaitingKind;
use crate::store::index;
use crate::store::{Hint, Rebuilt, StoreError};
use crate::time::Timestamp;

impl Tables {
    pub(super) fn prune(&mut self, run: &RunId, keep: u32) -> Result<u64, StoreError> {
        let rows = self.rows_mut(run)?;
        let mut pruned = 0;
        for row in rows.checkpoints.values_mut().rev().skip(keep.max(1) as usize) {
            if !row.pruned {
                row.pruned = true;
                row.state.inline = None;
                pruned += 1;
            }
        }
        rows.drop_unused_blobs();
        Ok(pruned)
    }

    pub(super) fn delete_if_idle(&mut self, now: Now, run: &RunId) -> Result<(), StoreError> {
        let rows = self.rows(run)?;
        if self.live(now, run).is_some() {
            return Err(StoreError::Busy);
        }
        if !rows.is_terminal() {
            return Err(StoreError::NotIdle);
        }
        self.leases.remove(run);
        self.runs.remove(run);
        Ok(())
    }

    pub(super) fn forget_keys(&mut self, before: Timestamp, limit: u32) -> u64 {
        let mut old: Vec<_> = self
            .keys
            .iter()
            .filter(|(_, row)| {
                row.created_at < before && self.runs.get(&row.run).is_none_or(RunRows::is_terminal)
            })
            .map(|(at, row)| (row.created_at, at.clone()))
            .collect();
        old.sort();
        old.truncate(limit as usize);
        for (_, at) in &old {
            self.keys.remove(at);
        }
        old.len() as u64
    }

    pub(super) fn quarantine(&mut self, run: &RunId, why: String) -> Result<(), StoreError> {
        self.rows_mut(run)?.inbox.quarantine = Some(why);
        Ok(())
    }

    pub(super) fn rebuild_index(&mut self, now: Now, hints: &mut Vec<Hint>) -> Rebuilt {
        let mut rebuilt = Rebuilt::default();
        let runs: Vec<RunId> = self.runs.keys().cloned().collect();
        for run in runs {
            rebuilt.runs += 1;
            let whole = self
                .load(now, &run)
                .and_then(|loaded| Ok((loaded, self.rows(&run)?.whole(&run)?)));
            let Some(rows) = self.runs.get_mut(&run) else {
                continue;
            };
            match whole {
                Ok((loaded, misfiled)) => {
                    let due_at = index::due_at(&loaded.head, rows.inbox.signal, rows.due_at, now.wall);
                    let right = due_at == rows.due_at && misfiled.is_empty();
                    for (at, kind) in misfiled {
                        if let Some(wait) = rows.waits.get_mut(&at) {
                            wait.kind = Some(kind.as_str().to_owned());
                        }
                    }
                    if !right || rows.inbox.quarantine.is_some() {
                        rebuilt.repaired += 1;
                        rows.due_at = due_at;
                        rows.inbox.quarantine = None;
                        self.hint(now, &run, hints);
                    }
                }
                Err(StoreError::Corrupt { what }) => {
                    rebuilt.quarantined += 1;
                    rows.inbox.quarantine.get_or_insert(what);
                }
                // A newer schema is for a newer program to judge.
                Err(_) => {}
            }
        }
        rebuilt
    }
}

impl RunRows {
    /// The waits whose column `kind` is not what their body says, and what it should be.
    ///
    /// # Errors
    /// `corrupt` when a row of the journal is.
    fn whole(&self, run: &RunId) -> Result<Vec<(WaitPlace, WaitingKind)>, StoreError> {
        for row in self.activities.values() {
            self.open_activity(run, row)?;
        }
        let mut misfiled = Vec::new();
        for (at, row) in &self.waits {
            let kind = self.open_wait(run, row)?.kind;
            if row.kind.as_deref() != Some(kind.as_str()) {
                misfiled.push((at.clone(), kind));
            }
        }
        Ok(misfiled)
    }
}
