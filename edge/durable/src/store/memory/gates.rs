//! Gates over all runs, and how much there is of what is not over.

use super::tables::{RunRows, Tables};
use crate::envelope::WaitRow;
use crate::ids::RunId;
use crate::record::{DefinitionRef, Status, WaitRecord, WaitStatus, WaitingKind};
use crate::store::{Counts, GateFilter};
use crate::time::Timestamp;

impl Tables {
    pub(super) fn gates(&self, filter: &GateFilter) -> Vec<(WaitRecord, DefinitionRef)> {
        let after = filter
            .after
            .as_ref()
            .map(|(time, run, wait)| (time.as_millis(), run.as_str(), wait.as_str()));
        let mut found: Vec<(&RunId, &RunRows, &WaitRow)> = self
            .runs
            .iter()
            .filter(|(_, rows)| rows.inbox.quarantine.is_none() && rows.has_gates_for(filter))
            .flat_map(|(run, rows)| rows.waits.values().map(move |row| (run, rows, row)))
            .filter(|(_, _, row)| {
                row.kind.as_deref() == Some(filter.kind.as_str())
                    && (!filter.armed || row.status == WaitStatus::Armed.as_str())
                    && after.is_none_or(|after| after < place(row))
            })
            .collect();
        found.sort_by(|(_, _, a), (_, _, b)| place(a).cmp(&place(b)));
        found
            .into_iter()
            .filter_map(|(run, rows, row)| {
                let wait = rows.open_wait(run, row).ok()?;
                let (head, _) = rows.head.open(run.as_str()).ok()?;
                (wait.kind == filter.kind).then_some((wait, head.definition))
            })
            .take(filter.limit as usize)
            .collect()
    }

    pub(super) fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for rows in self.runs.values() {
            if let Some(status) = Status::parse(&rows.head.status)
                && !status.is_terminal()
                && rows.inbox.quarantine.is_none()
            {
                *counts.runs.entry(status).or_default() += 1;
            }
            for row in rows.waits.values() {
                let kind = row.kind.as_deref().and_then(WaitingKind::parse);
                let armed_at = Timestamp::from_millis(row.armed_at);
                if row.status == WaitStatus::Armed.as_str()
                    && let (Some(kind), Ok(armed_at)) = (kind, armed_at)
                {
                    *counts.armed.entry(kind).or_default() += 1;
                    let oldest = counts.oldest_armed.entry(kind).or_insert(armed_at);
                    *oldest = armed_at.min(*oldest);
                }
            }
        }
        counts
    }
}

/// Where a wait stands in a list.
fn place(row: &WaitRow) -> (i64, &str, &str) {
    (row.armed_at, &row.run_id, &row.wait_id)
}

impl RunRows {
    fn has_gates_for(&self, filter: &GateFilter) -> bool {
        filter
            .definition
            .as_ref()
            .is_none_or(|(kind, name)| self.head.kind == *kind && self.head.definition == *name)
            && filter
                .owner
                .as_ref()
                .is_none_or(|owner| self.head.owner.as_ref() == Some(owner))
    }
}
