//! `rebuild_index`: every run is read whole, and its index column derived anew (D231). Runs may go on meanwhile.

use super::SqliteStore;
use super::lifecycle::{Change, Repair};
use crate::ids::{ActivityId, RunId, WaitId};
use crate::record::WaitingKind;
use crate::store::{Loaded, Rebuilt, StoreError, index};
use crate::time::Timestamp;

/// Rows that are looked at between two questions to the database.
const PAGE: u32 = 100;

impl SqliteStore {
    pub(super) async fn rebuild(&self) -> Result<Rebuilt, StoreError> {
        let mut rebuilt = Rebuilt::default();
        let mut after = None;
        loop {
            let page = self.reads.index(after.as_ref(), PAGE).await?;
            let Some(last) = page.last() else {
                return Ok(rebuilt);
            };
            after = Some(last.run.clone());
            for row in page {
                self.examine(row, &mut rebuilt).await?;
            }
        }
    }

    async fn examine(&self, row: IndexRow, rebuilt: &mut Rebuilt) -> Result<(), StoreError> {
        let change = match self.whole(&row.run).await {
            Ok((loaded, misfiled)) => {
                let found = row.due_at.and_then(|ms| Timestamp::from_millis(ms).ok());
                let due_at = index::due_at(&loaded.head, loaded.inbox.signal, found, loaded.now)
                    .map(Timestamp::as_millis);
                if due_at == row.due_at && misfiled.is_empty() && loaded.inbox.quarantine.is_none() {
                    rebuilt.runs += 1;
                    return Ok(());
                }
                Change::Whole { due_at, misfiled }
            }
            Err(StoreError::Corrupt { what }) => Change::Corrupt { why: what },
            // A newer schema is for a newer program to judge.
            Err(StoreError::SchemaUnsupported { .. }) => {
                rebuilt.runs += 1;
                return Ok(());
            }
            Err(StoreError::NotFound | StoreError::Deleted) => return Ok(()),
            Err(other) => return Err(other),
        };
        rebuilt.runs += 1;
        let counts = match change {
            Change::Whole { .. } => &mut rebuilt.repaired,
            Change::Corrupt { .. } => &mut rebuilt.quarantined,
        };
        let repair = Repair {
            run: row.run,
            revision: row.revision,
            signal: row.signal,
            change,
        };
        if self.writer.write(repair).await? {
            *counts += 1;
        }
        Ok(())
    }

    /// The run, and its waits of another kind than their column says.
    ///
    /// # Errors
    /// `corrupt` when the head, its state or a row of the journal is.
    async fn whole(&self, run: &RunId) -> Result<(Loaded, Vec<(WaitId, WaitingKind)>), StoreError> {
        let loaded = self.reads.load(run).await?;
        let mut after: Option<ActivityId> = None;
        loop {
            let page = self.reads.activities(run, after.as_ref(), PAGE).await?;
            match page.last() {
                Some(last) if page.len() == PAGE as usize => after = Some(last.id.clone()),
                Some(_) | None => break,
            }
        }
        Ok((loaded, self.reads.misfiled(run).await?))
    }
}

/// What `rebuild_index` compares with.
pub(super) struct IndexRow {
    pub(super) run: RunId,
    pub(super) revision: i64,
    pub(super) signal: i64,
    pub(super) due_at: Option<i64>,
}
