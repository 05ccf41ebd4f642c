//! Gates over all runs, and how much there is of what is not over.

use super::args::Args;
use super::read::Reads;
use super::rows::bytes_of;
use crate::record::{DefinitionRef, Status, WaitRecord, WaitingKind};
use crate::store::rows::{self, Cells, GatePlace, signed};
use crate::store::{Counts, GateFilter, StoreError};

impl Reads {
    pub(super) async fn gates(
        &self,
        filter: GateFilter,
    ) -> Result<Vec<(WaitRecord, DefinitionRef)>, StoreError> {
        let mut after = filter.after.as_ref().map(|(time, run, wait)| {
            (
                time.as_millis(),
                run.as_str().to_owned(),
                wait.as_str().to_owned(),
            )
        });
        let mut gates = Vec::new();
        loop {
            let missing = filter.limit as usize - gates.len();
            let (sql, args) = page(&filter, after.as_ref(), missing);
            let page = self.readers.rows(sql, args).await?;
            if let Some(last) = page.last() {
                after = Some(rows::gate_place(last)?);
            }
            let whole = page.iter().filter_map(|row| rows::gate(row).ok());
            gates.extend(whole.filter(|(wait, _)| wait.kind == filter.kind));
            if page.len() < missing || gates.len() >= filter.limit as usize {
                return Ok(gates);
            }
        }
    }

    /// Runs from two indexes that have nothing of what is over: of what can be claimed, and of what waits.
    pub(super) async fn counts(&self) -> Result<Counts, StoreError> {
        const CLAIMABLE: &str = "runs INDEXED BY runs_due \
             WHERE due_at IS NOT NULL AND quarantine IS NULL AND waiting_kind IS NULL";
        const WAITING: &str =
            "runs INDEXED BY runs_waiting WHERE waiting_kind IS NOT NULL AND quarantine IS NULL";
        const ARMED: &str = "SELECT kind, count(*), min(armed_at) FROM waits INDEXED BY waits_kind_armed \
             WHERE status = 'armed' AND kind IS NOT NULL GROUP BY kind";
        let mut counts = Counts::default();
        let live = || Status::ALL.iter().filter(|status| !status.is_terminal());
        // Counted as they come: groups would be sorted first.
        let of = |status: &Status| format!("count(*) FILTER (WHERE status = '{status}')");
        let each = live().map(of).collect::<Vec<_>>().join(", ");
        for runs in [CLAIMABLE, WAITING] {
            let rows = self
                .readers
                .rows(format!("SELECT {each} FROM {runs}"), Args::default())
                .await?;
            let mut cells = Cells::new(rows.first().ok_or_else(|| StoreError::corrupt("no counts"))?);
            for status in live() {
                if let count @ 1.. = cells.count()? {
                    *counts.runs.entry(*status).or_default() += count;
                }
            }
        }
        for row in &self.readers.rows(ARMED, Args::default()).await? {
            let mut cells = Cells::new(row);
            if let Some(kind) = WaitingKind::parse(cells.get()?) {
                counts.armed.insert(kind, cells.count()?);
                counts.oldest_armed.insert(kind, cells.time()?);
            }
        }
        Ok(counts)
    }
}

/// The text of a page. The index of the kind leads, in its order; the run of each wait is looked up.
fn page(filter: &GateFilter, after: Option<&GatePlace>, limit: usize) -> (String, Args) {
    const COLUMNS: &str = rows::gate_columns!(
        bytes_of!("w", "subject", "subject_digest"),
        bytes_of!("w", "delivered", "delivered_digest"),
        "NULL"
    );
    let (index, armed) = if filter.armed {
        ("waits_kind_armed", " AND w.status = 'armed'")
    } else {
        ("waits_kind", "")
    };
    let mut sql = format!(
        "SELECT {COLUMNS} FROM waits w INDEXED BY {index} CROSS JOIN runs r ON r.run_id = w.run_id \
         WHERE r.quarantine IS NULL AND w.kind = ?{armed}"
    );
    let mut args = Args::default();
    args.put(filter.kind.as_str());
    if let Some((time, run, wait)) = after {
        sql.push_str(" AND (w.armed_at, w.run_id, w.wait_id) > (?, ?, ?)");
        args.put(*time).put(run.clone()).put(wait.clone());
    }
    if let Some((kind, name)) = &filter.definition {
        sql.push_str(" AND r.kind = ? AND r.definition = ?");
        args.put(kind.clone()).put(name.clone());
    }
    if let Some(owner) = &filter.owner {
        sql.push_str(" AND r.owner = ?");
        args.put(owner.clone());
    }
    sql.push_str(" ORDER BY w.armed_at, w.run_id, w.wait_id LIMIT ?");
    args.put(signed(limit as u64));
    (sql, args)
}
