//! Retention, deletion, and what is done about corrupt runs.

use sqlx::postgres::PgConnection;
use sqlx::{Connection as _, Row as _};

use super::connect::Pool;
use super::notify::Notifier;
use super::read::{self, absent};
use super::sql::{NOW, Sql};
use crate::ids::RunId;
use crate::record::Status;
use crate::store::rows::{Cells, signed};
use crate::store::{Rebuilt, StoreError, index};
use crate::time::Timestamp;

/// Locks a head; whether there is one.
async fn lock_head(conn: &mut PgConnection, run: &RunId) -> Result<bool, sqlx::Error> {
    let row = sqlx::query("SELECT 1 FROM runs WHERE run_id = $1 FOR UPDATE")
        .bind(run.as_str())
        .fetch_optional(conn)
        .await?;
    Ok(row.is_some())
}

/// # Errors
/// `not_found`, `deleted`.
pub(super) async fn prune(pool: &Pool, run: &RunId, keep: u32) -> Result<u64, StoreError> {
    let of = run.clone();
    match pool
        .transaction(move |conn| Box::pin(prune_on(conn, of.clone(), keep)))
        .await?
    {
        Some(pruned) => Ok(pruned),
        None => Err(absent(pool, run).await),
    }
}

/// `None`: there is no such run.
async fn prune_on(conn: &mut PgConnection, run: RunId, keep: u32) -> Result<Option<u64>, sqlx::Error> {
    let mut tx = conn.begin().await?;
    if !lock_head(&mut tx, &run).await? {
        return Ok(None);
    }
    let pruned = sqlx::query(
        "UPDATE checkpoints SET state = NULL, pruned = true WHERE run_id = $1 AND NOT pruned \
         AND revision <= (SELECT revision FROM checkpoints WHERE run_id = $1 ORDER BY revision DESC \
         OFFSET $2 LIMIT 1)",
    )
    .bind(run.as_str())
    .bind(i64::from(keep.max(1)))
    .execute(&mut *tx)
    .await?
    .rows_affected();
    // Under the head's lock, and so is everybody who relies on one of these without sending it.
    sqlx::query(
        "DELETE FROM blobs b WHERE b.run_id = $1 \
         AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.run_id = $1 AND r.state_digest = b.digest) \
         AND NOT EXISTS (SELECT 1 FROM checkpoints c WHERE c.run_id = $1 AND NOT c.pruned \
         AND c.state_digest = b.digest) \
         AND NOT EXISTS (SELECT 1 FROM activities a WHERE a.run_id = $1 \
         AND (a.input_digest = b.digest OR a.output_digest = b.digest)) \
         AND NOT EXISTS (SELECT 1 FROM waits w WHERE w.run_id = $1 \
         AND (w.subject_digest = b.digest OR w.delivered_digest = b.digest))",
    )
    .bind(run.as_str())
    .execute(&mut *tx)
    .await?;
    tx.commit().await?;
    Ok(Some(pruned))
}

/// What somebody else drops at this moment is passed over.
pub(super) async fn forget_keys(pool: &Pool, before: Timestamp, limit: u32) -> Result<u64, StoreError> {
    let dropped = pool
        .write(|| {
            let mut sql = Sql::new(
                "WITH old AS MATERIALIZED (SELECT k.scope, k.key FROM idempotency_keys k WHERE k.created_at < ",
            );
            sql.bind(before.as_millis())
                .push(
                    " AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.run_id = k.run_id \
                     AND r.status NOT IN ('succeeded', 'failed', 'cancelled', 'exhausted', 'transferred')) \
                     ORDER BY k.created_at LIMIT ",
                )
                .bind(i64::from(limit));
            sql.push(
                " FOR UPDATE OF k SKIP LOCKED) DELETE FROM idempotency_keys k USING old o \
                 WHERE k.scope = o.scope AND k.key = o.key RETURNING 1",
            );
            sql
        })
        .await?;
    Ok(dropped.len() as u64)
}

/// What stands in the way of a deletion.
enum Obstacle {
    Gone,
    Error(StoreError),
}

/// # Errors
/// `busy`, `not_idle`, `not_found`, `deleted`.
pub(super) async fn delete_if_idle(pool: &Pool, run: &RunId) -> Result<(), StoreError> {
    let of = run.clone();
    match pool
        .transaction(move |conn| Box::pin(delete_on(conn, of.clone())))
        .await?
    {
        Ok(()) => Ok(()),
        Err(Obstacle::Gone) => Err(absent(pool, run).await),
        Err(Obstacle::Error(error)) => Err(error),
    }
}

/// The locks are a statement of their own: the next one sees what was written while they were waited for.
async fn delete_on(conn: &mut PgConnection, run: RunId) -> Result<Result<(), Obstacle>, sqlx::Error> {
    let mut tx = conn.begin().await?;
    if !lock_head(&mut tx, &run).await? {
        return Ok(Err(Obstacle::Gone));
    }
    sqlx::query("SELECT 1 FROM run_leases WHERE run_id = $1 FOR UPDATE")
        .bind(run.as_str())
        .execute(&mut *tx)
        .await?;
    let row = sqlx::query(sqlx::AssertSqlSafe(format!(
        "SELECT r.status, COALESCE(l.expires_at > {NOW}, false) FROM runs r \
         LEFT JOIN run_leases l ON l.run_id = r.run_id WHERE r.run_id = $1"
    )))
    .bind(run.as_str())
    .fetch_one(&mut *tx)
    .await?;
    if row.try_get(1)? {
        return Ok(Err(Obstacle::Error(StoreError::Busy)));
    }
    if !Status::parse(row.try_get(0)?).is_some_and(Status::is_terminal) {
        return Ok(Err(Obstacle::Error(StoreError::NotIdle)));
    }
    sqlx::query(
        "WITH a AS (DELETE FROM checkpoints WHERE run_id = $1), b AS (DELETE FROM steps WHERE run_id = $1), \
         c AS (DELETE FROM activities WHERE run_id = $1), d AS (DELETE FROM waits WHERE run_id = $1), \
         e AS (DELETE FROM decisions WHERE run_id = $1), f AS (DELETE FROM events WHERE run_id = $1), \
         g AS (DELETE FROM blobs WHERE run_id = $1), h AS (DELETE FROM run_leases WHERE run_id = $1) \
         DELETE FROM runs WHERE run_id = $1",
    )
    .bind(run.as_str())
    .execute(&mut *tx)
    .await?;
    tx.commit().await?;
    Ok(Ok(()))
}

/// # Errors
/// `not_found`, `deleted`.
pub(super) async fn quarantine(pool: &Pool, run: &RunId, why: &str) -> Result<(), StoreError> {
    // Text in PostgreSQL has no U+0000.
    let why = why.replace('\0', "\u{fffd}");
    let found = pool
        .write(|| {
            let mut sql = Sql::new("UPDATE runs SET quarantine = ");
            sql.bind(&*why)
                .push(" WHERE run_id = ")
                .bind(run.as_str())
                .push(" RETURNING 1");
            sql
        })
        .await?;
    if found.is_empty() {
        Err(absent(pool, run).await)
    } else {
        Ok(())
    }
}

/// What became of one run.
enum Examined {
    Whole,
    Repaired {
        claimable: bool,
    },
    Corrupt,
    /// It was changed meanwhile.
    Moved,
    /// Deleted, or of a newer schema: not ours to judge.
    Left,
}

/// # Errors
/// `unavailable`, `unconfirmed`.
pub(super) async fn rebuild_index(pool: &Pool, notifier: &Notifier) -> Result<Rebuilt, StoreError> {
    const PAGE: i64 = 256;
    const ATTEMPTS: u32 = 10;
    let mut rebuilt = Rebuilt::default();
    let mut after = String::new();
    loop {
        let page = pool
            .read(|| {
                let mut sql = Sql::new("SELECT run_id FROM runs WHERE run_id > ");
                sql.bind(&*after).push(" ORDER BY run_id LIMIT ").bind(PAGE);
                sql
            })
            .await?;
        for row in &page {
            let run = Cells::new(row).run()?;
            rebuilt.runs += 1;
            for _ in 0..ATTEMPTS {
                match examine(pool, &run).await? {
                    Examined::Moved => continue,
                    Examined::Repaired { claimable } => {
                        rebuilt.repaired += 1;
                        notifier.done(&run, false, claimable);
                    }
                    Examined::Corrupt => rebuilt.quarantined += 1,
                    Examined::Whole | Examined::Left => {}
                }
                break;
            }
        }
        match page.last() {
            Some(last) => after = Cells::new(last).get()?,
            None => return Ok(rebuilt),
        }
    }
}

/// Looks without a lock, and writes only over what it has seen.
async fn examine(pool: &Pool, run: &RunId) -> Result<Examined, StoreError> {
    let (found, quarantine, opened) = match read::look(pool, run).await {
        Ok(look) => {
            let found = look.due_at;
            let quarantine = look.head.inbox.quarantine.clone();
            (found, quarantine, look.open(run))
        }
        Err(StoreError::NotFound | StoreError::Deleted) => return Ok(Examined::Left),
        Err(error @ StoreError::Corrupt { .. }) => (None, None, Err(error)),
        Err(error) => return Err(error),
    };
    let opened = match opened {
        Ok(loaded) => read::whole(pool, run).await.map(|misfiled| (loaded, misfiled)),
        Err(error) => Err(error),
    };
    let (loaded, misfiled) = match opened {
        Ok(whole) => whole,
        Err(StoreError::Corrupt { what }) => {
            if quarantine.is_none() {
                self::quarantine(pool, run, &what).await?;
            }
            return Ok(Examined::Corrupt);
        }
        Err(StoreError::SchemaUnsupported { .. }) => return Ok(Examined::Left),
        Err(error) => return Err(error),
    };
    let found_due = found.and_then(|ms| Timestamp::from_millis(ms).ok());
    let due_at =
        index::due_at(&loaded.head, loaded.inbox.signal, found_due, loaded.now).map(Timestamp::as_millis);
    if due_at == found && misfiled.is_empty() && quarantine.is_none() {
        return Ok(Examined::Whole);
    }
    let written = pool
        .write(|| {
            let mut sql = Sql::new("WITH head AS (UPDATE runs SET due_at = ");
            sql.bind(due_at)
                .push(", quarantine = NULL WHERE run_id = ")
                .bind(run.as_str());
            sql.push(" AND revision = ")
                .bind(signed(loaded.head.revision.get()));
            sql.push(" AND signal = ").bind(signed(loaded.inbox.signal));
            sql.push(" AND due_at IS NOT DISTINCT FROM ").bind(found);
            sql.push(" AND quarantine IS NOT DISTINCT FROM ")
                .bind(quarantine.as_deref());
            sql.push(" RETURNING run_id)");
            if !misfiled.is_empty() {
                // After the head, which is locked by then.
                sql.push(", kinds AS (UPDATE waits w SET kind = c.kind FROM head h, ")
                    .table();
                sql.column("text", misfiled.iter().map(|(wait, _)| wait.as_str()));
                sql.column("text", misfiled.iter().map(|(_, kind)| kind.as_str()))
                    .named("c(wait_id, kind) WHERE w.run_id = h.run_id AND w.wait_id = c.wait_id)");
            }
            sql.push(" SELECT 1 FROM head");
            sql
        })
        .await?;
    if written.is_empty() {
        return Ok(Examined::Moved);
    }
    Ok(Examined::Repaired {
        claimable: loaded.lease.is_none() && due_at.is_some_and(|due| due <= loaded.now.as_millis()),
    })
}
