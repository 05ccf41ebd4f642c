//! Gates over all runs, and how much there is of what is not over.

use super::connect::Pool;
use super::sql::Sql;
use crate::record::{DefinitionRef, Status, WaitRecord, WaitingKind};
use crate::store::rows::{self, Cells, GatePlace, signed};
use crate::store::{Counts, GateFilter, StoreError};

/// The bytes of a payload of `w`, from the row or from `blobs`.
macro_rules! bytes_of {
    ($bytes:literal, $digest:literal) => {
        concat!(
            "COALESCE(w.",
            $bytes,
            ", (SELECT b.bytes FROM blobs b WHERE b.run_id = w.run_id AND b.digest = w.",
            $digest,
            "))"
        )
    };
}

pub(super) async fn gates(
    pool: &Pool,
    filter: &GateFilter,
) -> Result<Vec<(WaitRecord, DefinitionRef)>, StoreError> {
    let mut after = filter.after.as_ref().map_or_else(
        || (i64::MIN, String::new(), String::new()),
        |(time, run, wait)| {
            (
                time.as_millis(),
                run.as_str().to_owned(),
                wait.as_str().to_owned(),
            )
        },
    );
    let mut gates = Vec::new();
    loop {
        let missing = filter.limit as usize - gates.len();
        let page = pool.read(|| page(filter, &after, missing)).await?;
        if let Some(last) = page.last() {
            after = rows::gate_place(last)?;
        }
        let whole = page.iter().filter_map(|row| rows::gate(row).ok());
        gates.extend(whole.filter(|(wait, _)| wait.kind == filter.kind));
        if page.len() < missing || gates.len() >= filter.limit as usize {
            return Ok(gates);
        }
    }
}

/// The index of the kind leads, in its order, and the run of each wait is looked up: the statement is written so that no other
/// way gives that order, see `lists`.
fn page(filter: &GateFilter, after: &GatePlace, limit: usize) -> Sql {
    let mut sql = Sql::new(concat!(
        "SELECT ",
        rows::gate_columns!(
            bytes_of!("subject", "subject_digest"),
            bytes_of!("delivered", "delivered_digest"),
            "NULL::bytea"
        ),
        " FROM waits w JOIN LATERAL (SELECT * FROM runs h WHERE h.run_id = w.run_id OFFSET 0) AS r \
         ON r.quarantine IS NULL"
    ));
    if let Some((kind, name)) = &filter.definition {
        sql.push(" AND r.kind = ").bind(&**kind);
        sql.push(" AND r.definition = ").bind(&**name);
    }
    if let Some(owner) = &filter.owner {
        sql.push(" AND r.owner = ").bind(&**owner);
    }
    sql.push(" WHERE (w.kind, w.armed_at, w.run_id, w.wait_id) > (");
    sql.bind(filter.kind.as_str()).push(", ").bind(after.0);
    sql.push(", ").bind(&*after.1).push(", ").bind(&*after.2);
    sql.push(") AND w.kind <= ").bind(filter.kind.as_str());
    if filter.armed {
        sql.push(" AND w.status = 'armed'");
    }
    sql.push(" ORDER BY w.kind, w.armed_at, w.run_id, w.wait_id LIMIT ")
        .bind(signed(limit as u64));
    sql
}

/// What is over is in none of the ranges that are read.
pub(super) async fn counts(pool: &Pool) -> Result<Counts, StoreError> {
    const ARMED: &str = "SELECT w.kind, count(*), min(w.armed_at) FROM waits w WHERE w.status = 'armed' \
         AND w.kind IS NOT NULL GROUP BY w.kind";
    let mut counts = Counts::default();
    let live = Status::ALL.iter().filter(|status| !status.is_terminal());
    let runs = pool
        .read(|| {
            let mut sql = Sql::new(
                "SELECT s.status, (SELECT count(*) FROM runs r WHERE r.status = s.status) \
                 - (SELECT count(*) FROM runs r WHERE r.status = s.status AND r.quarantine IS NOT NULL) FROM ",
            );
            sql.table();
            sql.column("text", live.clone().map(|status| status.as_str()))
                .named("s(status)");
            sql
        })
        .await?;
    for row in &runs {
        let mut cells = Cells::new(row);
        let status = Status::parse(cells.get()?);
        if let (Some(status), count @ 1..) = (status, cells.count()?) {
            counts.runs.insert(status, count);
        }
    }
    for row in &pool.read(|| Sql::new(ARMED)).await? {
        let mut cells = Cells::new(row);
        if let Some(kind) = WaitingKind::parse(cells.get()?) {
            counts.armed.insert(kind, cells.count()?);
            counts.oldest_armed.insert(kind, cells.time()?);
        }
    }
    Ok(counts)
}
