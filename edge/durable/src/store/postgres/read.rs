//! One run: its head, its journal and its rows. One statement each, so what it says is of one moment.

use sqlx::postgres::PgRow;

use super::connect::Pool;
use super::rows::{ACTIVITIES, WAITS};
use super::sql::{NOW, Sql};
use super::verdict::{self, Refusal, Verdict};
use crate::envelope::HeadRow;
use crate::ids::{ActivityId, DecisionId, Revision, RunId, WaitId};
use crate::record::{
    ActivityRecord, CheckpointRecord, DecisionRecord, EventRecord, Scope, StepRecord, WaitRecord, WaitingKind,
};
use crate::store::rows::{self, Cells, HeadCells, all, signed, time};
use crate::store::{Created, Guard, IdempotencyKey, Journal, Lease, Loaded, StoreError};
use crate::time::Timestamp;

/// A row when there ever was a run of this id.
pub(super) fn was_there(run: &RunId) -> Sql {
    let mut sql = Sql::new("SELECT 1 FROM run_fences WHERE run_id = ");
    sql.bind(run.as_str());
    sql
}

/// Why there is no such run.
pub(super) async fn absent(pool: &Pool, run: &RunId) -> StoreError {
    match pool.read(|| was_there(run)).await {
        Ok(rows) if rows.is_empty() => StoreError::NotFound,
        Ok(_) => StoreError::Deleted,
        Err(error) => error,
    }
}

/// Rows that belong to a run. No rows may mean that there is no run, which is asked then.
async fn of_run(pool: &Pool, run: &RunId, sql: impl Fn() -> Sql + Send) -> Result<Vec<PgRow>, StoreError> {
    let rows = pool.read(sql).await?;
    if rows.is_empty() {
        exists(pool, run).await?;
    }
    Ok(rows)
}

/// # Errors
/// `not_found`, `deleted`.
pub(super) async fn exists(pool: &Pool, run: &RunId) -> Result<(), StoreError> {
    let rows = pool
        .read(|| {
            let mut sql = Sql::new("SELECT 1 FROM runs WHERE run_id = ");
            sql.bind(run.as_str());
            sql
        })
        .await?;
    if rows.is_empty() {
        Err(absent(pool, run).await)
    } else {
        Ok(())
    }
}

/// Fetches the bytes of a head's state when they are not in its row.
pub(super) async fn fetch_state(pool: &Pool, head: &mut HeadRow) -> Result<(), StoreError> {
    if head.state.inline.is_some() {
        return Ok(());
    }
    let rows = pool
        .read(|| {
            let mut sql = Sql::new("SELECT bytes FROM blobs WHERE run_id = ");
            sql.bind(&*head.run_id)
                .push(" AND digest = ")
                .bind(&head.state.digest[..]);
            sql
        })
        .await?;
    if let Some(row) = rows.first() {
        head.state.inline = Some(Cells::new(row).get()?);
    }
    Ok(())
}

/// The database's clock.
pub(super) async fn now(pool: &Pool) -> Result<Timestamp, StoreError> {
    let rows = pool
        .read(|| {
            let mut sql = Sql::new("SELECT ");
            sql.push(NOW);
            sql
        })
        .await?;
    let row = rows
        .first()
        .ok_or_else(|| StoreError::corrupt("the clock did not answer"))?;
    Cells::new(row).time()
}

/// A run as it is stored, not opened yet.
pub(super) struct Look {
    pub(super) head: HeadCells,
    pub(super) due_at: Option<i64>,
    lease: Option<Lease>,
    now: i64,
}

impl Look {
    /// # Errors
    /// `corrupt`, `schema_unsupported`.
    pub(super) fn open(self, run: &RunId) -> Result<Loaded, StoreError> {
        self.head.open(run, self.lease, time(self.now)?)
    }
}

/// # Errors
/// `not_found`, `deleted`, `corrupt`.
pub(super) async fn look(pool: &Pool, run: &RunId) -> Result<Look, StoreError> {
    let rows = pool
        .read(|| {
            let mut sql = Sql::new("SELECT ");
            sql.push(NOW).push(concat!(
                ", r.due_at, ",
                rows::lease_columns!(),
                ", ",
                rows::head_columns!("COALESCE(r.state, b.bytes)"),
                " FROM runs r LEFT JOIN run_leases l ON l.run_id = r.run_id \
                 LEFT JOIN blobs b ON r.state IS NULL AND b.run_id = r.run_id AND b.digest = r.state_digest \
                 WHERE r.run_id = "
            ));
            sql.bind(run.as_str());
            sql
        })
        .await?;
    let Some(row) = rows.first() else {
        return Err(absent(pool, run).await);
    };
    let mut cells = Cells::new(row);
    let now = cells.get()?;
    Ok(Look {
        due_at: cells.get()?,
        lease: rows::live_lease(&mut cells, run, now)?,
        head: rows::head(&mut cells)?,
        now,
    })
}

/// # Errors
/// `not_found`, `deleted`, `corrupt`, `schema_unsupported`.
pub(super) async fn load(pool: &Pool, run: &RunId) -> Result<Loaded, StoreError> {
    look(pool, run).await?.open(run)
}

/// Opens every activity and wait of a run. The waits of another kind than their column says.
///
/// # Errors
/// `corrupt`.
pub(super) async fn whole(pool: &Pool, run: &RunId) -> Result<Vec<(WaitId, WaitingKind)>, StoreError> {
    let activities = pool
        .read(|| {
            let mut sql = Sql::new(ACTIVITIES);
            sql.push("WHERE a.run_id = ").bind(run.as_str());
            sql
        })
        .await?;
    all(&activities, |row| rows::activity(row, run))?;
    let waits = pool
        .read(|| {
            let mut sql = Sql::new(WAITS);
            sql.push("WHERE w.run_id = ").bind(run.as_str());
            sql
        })
        .await?;
    rows::misfiled(&waits, run)
}

pub(super) async fn journal(pool: &Pool, run: &RunId, activation: u64) -> Result<Journal, StoreError> {
    let activation = signed(activation);
    let activities = pool
        .read(|| {
            let mut sql = Sql::new(ACTIVITIES);
            sql.push("WHERE a.run_id = ")
                .bind(run.as_str())
                .push(" AND a.activation = ")
                .bind(activation);
            sql.push(" UNION ALL ").push(ACTIVITIES);
            sql.push("WHERE a.run_id = ")
                .bind(run.as_str())
                .push(" AND a.activation <> ")
                .bind(activation);
            sql.push(" AND a.state IN ('prepared', 'running', 'unknown') ORDER BY 3, 2");
            sql
        })
        .await?;
    let waits = pool
        .read(|| {
            let mut sql = Sql::new(WAITS);
            sql.push("WHERE w.run_id = ")
                .bind(run.as_str())
                .push(" AND (w.status = 'armed' OR w.activation = ");
            sql.bind(activation).push(") ORDER BY w.armed_at, w.wait_id");
            sql
        })
        .await?;
    if activities.is_empty() && waits.is_empty() {
        exists(pool, run).await?;
    }
    Ok(Journal {
        activities: all(&activities, |row| rows::activity(row, run))?,
        waits: all(&waits, |row| rows::wait(row, Some(run)))?,
    })
}

pub(super) async fn activity(
    pool: &Pool,
    run: &RunId,
    id: &ActivityId,
) -> Result<Option<ActivityRecord>, StoreError> {
    let rows = of_run(pool, run, || {
        let mut sql = Sql::new(ACTIVITIES);
        sql.push("WHERE a.run_id = ")
            .bind(run.as_str())
            .push(" AND a.activity_id = ")
            .bind(id.as_str());
        sql
    })
    .await?;
    rows.first().map(|row| rows::activity(row, run)).transpose()
}

pub(super) async fn activities(
    pool: &Pool,
    run: &RunId,
    after: Option<&ActivityId>,
    limit: u32,
) -> Result<Vec<ActivityRecord>, StoreError> {
    let rows = of_run(pool, run, || {
        let mut sql = Sql::new(ACTIVITIES);
        sql.push("WHERE a.run_id = ").bind(run.as_str());
        if let Some(id) = after {
            sql.push(
                " AND (a.activation, a.activity_id) > ((SELECT activation FROM activities WHERE run_id = ",
            )
            .bind(run.as_str())
            .push(" AND activity_id = ")
            .bind(id.as_str())
            .push("), ")
            .bind(id.as_str())
            .push(")");
        }
        sql.push(" ORDER BY a.activation, a.activity_id LIMIT ")
            .bind(i64::from(limit));
        sql
    })
    .await?;
    all(&rows, |row| rows::activity(row, run))
}

pub(super) async fn wait(pool: &Pool, run: &RunId, id: &WaitId) -> Result<Option<WaitRecord>, StoreError> {
    let rows = of_run(pool, run, || {
        let mut sql = Sql::new(WAITS);
        sql.push("WHERE w.run_id = ")
            .bind(run.as_str())
            .push(" AND w.wait_id = ")
            .bind(id.as_str());
        sql
    })
    .await?;
    rows.first().map(|row| rows::wait(row, Some(run))).transpose()
}

pub(super) async fn waits(pool: &Pool, run: &RunId) -> Result<Vec<WaitRecord>, StoreError> {
    let rows = of_run(pool, run, || {
        let mut sql = Sql::new(WAITS);
        sql.push("WHERE w.run_id = ")
            .bind(run.as_str())
            .push(" ORDER BY w.armed_at, w.wait_id");
        sql
    })
    .await?;
    all(&rows, |row| rows::wait(row, Some(run)))
}

pub(super) async fn keyed(pool: &Pool, key: &IdempotencyKey) -> Result<Option<Created>, StoreError> {
    let found = pool
        .read(|| {
            let mut sql = Sql::new("SELECT k.request, k.run_id FROM idempotency_keys k WHERE k.scope = ");
            sql.bind(key.scope.as_str())
                .push(" AND k.key = ")
                .bind(key.key.as_str());
            sql
        })
        .await?;
    found.first().map(|row| rows::keyed(row, key)).transpose()
}

fn decisions_of(run: &RunId, scope: &Scope) -> Sql {
    let mut sql = Sql::new(concat!(
        "SELECT ",
        rows::decision_columns!(),
        " FROM decisions d WHERE d.run_id = "
    ));
    sql.bind(run.as_str())
        .push(" AND d.scope = ")
        .bind(scope.to_text());
    sql
}

pub(super) async fn decision(
    pool: &Pool,
    run: &RunId,
    scope: &Scope,
    id: &DecisionId,
) -> Result<Option<DecisionRecord>, StoreError> {
    let rows = pool
        .read(|| {
            let mut sql = decisions_of(run, scope);
            sql.push(" AND d.decision_id = ").bind(id.as_str());
            sql
        })
        .await?;
    rows.first().map(|row| rows::decision(row, run)).transpose()
}

pub(super) async fn decisions(
    pool: &Pool,
    run: &RunId,
    scope: &Scope,
) -> Result<Vec<DecisionRecord>, StoreError> {
    let rows = pool
        .read(|| {
            let mut sql = decisions_of(run, scope);
            sql.push(" ORDER BY d.created_at, d.decision_id");
            sql
        })
        .await?;
    all(&rows, |row| rows::decision(row, run))
}

pub(super) async fn steps(
    pool: &Pool,
    run: &RunId,
    after: u64,
    limit: u32,
) -> Result<Vec<StepRecord>, StoreError> {
    let rows = of_run(pool, run, || {
        let mut sql = Sql::new("SELECT body FROM steps WHERE run_id = ");
        sql.bind(run.as_str())
            .push(" AND activation > ")
            .bind(signed(after));
        sql.push(" ORDER BY activation LIMIT ").bind(i64::from(limit));
        sql
    })
    .await?;
    all(&rows, rows::step)
}

pub(super) async fn events(
    pool: &Pool,
    run: &RunId,
    after: u64,
    limit: u32,
) -> Result<Vec<EventRecord>, StoreError> {
    let rows = pool
        .read(|| {
            let mut sql = Sql::new(concat!(
                "SELECT ",
                rows::event_columns!(),
                " FROM events e WHERE e.run_id = "
            ));
            sql.bind(run.as_str())
                .push(" AND e.seq > ")
                .bind(signed(after))
                .push(" ORDER BY e.seq LIMIT ")
                .bind(i64::from(limit));
            sql
        })
        .await?;
    all(&rows, rows::event)
}

pub(super) async fn history(
    pool: &Pool,
    run: &RunId,
    before: Option<Revision>,
    limit: u32,
) -> Result<Vec<CheckpointRecord>, StoreError> {
    let rows = of_run(pool, run, || {
        let mut sql = Sql::new(concat!(
            "SELECT ",
            rows::checkpoint_columns!("NULL::bytea"),
            " FROM checkpoints c WHERE c.run_id = "
        ));
        sql.bind(run.as_str());
        if let Some(before) = before {
            sql.push(" AND c.revision < ").bind(signed(before.get()));
        }
        sql.push(" ORDER BY c.revision DESC LIMIT ")
            .bind(i64::from(limit));
        sql
    })
    .await?;
    all(&rows, |row| rows::listed_checkpoint(row, run))
}

/// # Errors
/// `checkpoint_unavailable`, `corrupt`, `not_found`, `deleted`.
pub(super) async fn checkpoint(
    pool: &Pool,
    run: &RunId,
    revision: Revision,
) -> Result<CheckpointRecord, StoreError> {
    let rows = of_run(pool, run, || {
        let mut sql = Sql::new(concat!(
            "SELECT ",
            rows::checkpoint_columns!(
                "COALESCE(c.state, (SELECT b.bytes FROM blobs b WHERE NOT c.pruned AND b.run_id = c.run_id \
                 AND b.digest = c.state_digest))"
            ),
            " FROM checkpoints c WHERE c.run_id = "
        ));
        sql.bind(run.as_str())
            .push(" AND c.revision = ")
            .bind(signed(revision.get()));
        sql
    })
    .await?;
    let row = rows.first().ok_or(StoreError::CheckpointUnavailable)?;
    rows::checkpoint(row, run)
}

/// The refusal of a commit after the last revision there is: what its guard says, and else that.
pub(super) async fn last_revision(pool: &Pool, run: &RunId, guard: &Guard) -> StoreError {
    let rows = pool
        .read(|| {
            let mut sql = Sql::new(
                "SELECT 1::bigint, r.revision, r.signal, CASE WHEN l.expires_at > r.now THEN l.incarnation END, true, true, \
                 false, false, r.now FROM (SELECT revision, signal, run_id, ",
            );
            sql.push(NOW).push(" AS now FROM runs WHERE run_id = ").bind(run.as_str());
            sql.push(" OFFSET 0) AS r LEFT JOIN run_leases l ON l.run_id = r.run_id");
            sql
        })
        .await;
    let verdict = match rows.map(|rows| rows.first().map(Verdict::read).transpose()) {
        Ok(Ok(Some(verdict))) => verdict,
        Ok(Ok(None)) => return absent(pool, run).await,
        Ok(Err(error)) | Err(error) => return error,
    };
    match verdict::judge(guard, &verdict) {
        Ok(()) | Err(Refusal::Carry) => StoreError::RevisionsExhausted,
        Err(Refusal::Error(error)) => error,
        Err(Refusal::Gone) => absent(pool, run).await,
    }
}
