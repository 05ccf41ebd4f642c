//! Leases: who may write to a run (D123 to D131). One statement each: the head is locked, then the lease, then the fence moves.
//!
//! What is granted is opened afterwards: a run that turns out to be corrupt is set aside and its lease given back, one of a
//! newer schema is left to those who know it.

use std::time::Duration;

use sqlx::postgres::PgRow;

use super::commit::{LOCK_HEAD, LOCK_LEASE};
use super::connect::Pool;
use super::read::{absent, fetch_state};
use super::sql::{NOW, Sql};
use super::work::ttl_ms;
use crate::envelope::SCHEMA_VERSION;
use crate::ids::{Owner, RunId};
use crate::store::rows::{self, Cells, HeadCells, signed, time, unsigned};
use crate::store::{Acquired, Claim, Claimed, Lease, LeaseRequest, Loaded, Renewal, StoreError};
use crate::time::Timestamp;

/// What is read of a head `r`: another statement fetches a state that is in `blobs`.
const HEAD: &str = concat!("r.due_at, ", rows::head_columns!("r.state"));

/// `locked`: these heads, which are locked, with `now`, `held`, `free`. Their leases are locked, then the clock is asked.
fn locked(sql: &mut Sql, heads: impl FnOnce(&mut Sql)) {
    sql.push(
        "locked AS MATERIALIZED (SELECT y.*, NOT y.held AND y.quarantine IS NULL AS free FROM (\
         SELECT z.*, COALESCE(z.lease_expires_at > z.now, false) AS held FROM (\
         SELECT r.*, l.expires_at AS lease_expires_at, ",
    )
    .push(NOW)
    .push(" AS now FROM ");
    heads(sql);
    sql.push(" AS r").push(LOCK_LEASE).push(" OFFSET 0) AS z) AS y)");
}

/// Moves the fence of every run in `locked` that is free, and gives its lease out. One row for each that was locked.
fn grant(sql: &mut Sql, request: &LeaseRequest) {
    sql.push(
        ", fence AS (UPDATE run_fences AS t SET fence = t.fence + 1 FROM locked k \
         WHERE k.free AND t.run_id = k.run_id RETURNING t.fence, k.*), \
         lease AS (INSERT INTO run_leases AS t (run_id, owner, incarnation, expires_at) SELECT f.run_id, ",
    );
    sql.bind(request.owner.as_str().to_owned()).push(", f.fence, ");
    expires(sql, "f.now", request.ttl);
    sql.push(
        " FROM fence f ON CONFLICT (run_id) DO UPDATE SET owner = EXCLUDED.owner, \
         incarnation = EXCLUDED.incarnation, expires_at = EXCLUDED.expires_at) \
         SELECT r.run_id, r.now, r.held, r.fence, ",
    );
    expires(sql, "r.now", request.ttl);
    sql.push(", ")
        .push(HEAD)
        .push(" FROM fence r UNION ALL SELECT r.run_id, r.now, r.held, NULL::bigint, NULL::bigint, ")
        .push(HEAD)
        .push(" FROM locked r WHERE NOT r.free");
}

/// When a lease ends that is given at `now`.
fn expires(sql: &mut Sql, now: &str, ttl: Duration) {
    sql.push("LEAST(")
        .push(now)
        .push(" + ")
        .bind(ttl_ms(ttl))
        .push(", ");
    sql.bind(Timestamp::MAX.as_millis()).push(")");
}

/// A row of `grant`.
struct Grant {
    run: RunId,
    now: i64,
    held: bool,
    /// Incarnation and end.
    lease: Option<(i64, i64)>,
    due_at: Option<i64>,
    head: Result<HeadCells, StoreError>,
}

impl Grant {
    fn read(row: &PgRow) -> Result<Self, StoreError> {
        let mut cells = Cells::new(row);
        let run = cells.run()?;
        let (now, held) = (cells.get()?, cells.get()?);
        let lease = match (cells.get()?, cells.get()?) {
            (Some(incarnation), Some(expires_at)) => Some((incarnation, expires_at)),
            (None, _) | (_, None) => None,
        };
        Ok(Self {
            run,
            now,
            held,
            lease,
            due_at: cells.get()?,
            head: rows::head(&mut cells),
        })
    }

    async fn open(self, pool: &Pool, owner: &Owner) -> Result<Acquired, StoreError> {
        if self.held {
            return Err(StoreError::Busy);
        }
        let mut head = self.head?;
        let Some((incarnation, expires_at)) = self.lease else {
            let why = head.inbox.quarantine;
            return Err(StoreError::corrupt(
                why.unwrap_or_else(|| "the fence is missing".to_owned()),
            ));
        };
        let lease = Lease {
            run: self.run.clone(),
            owner: owner.clone(),
            incarnation: unsigned(incarnation)?,
            expires_at: time(expires_at)?,
        };
        // Not part of the statement: what another transaction wrote while its lock was waited for is not seen there.
        fetch_state(pool, &mut head.row).await?;
        let loaded: Loaded = head.open(&self.run, Some(lease.clone()), time(self.now)?)?;
        Ok(Acquired { lease, loaded })
    }
}

/// Opens what was granted; what cannot be opened is not kept.
async fn open(pool: &Pool, grant: Grant, owner: &Owner) -> Result<Acquired, StoreError> {
    let (run, granted) = (grant.run.clone(), grant.lease);
    let answer = grant.open(pool, owner).await;
    if let (Err(error), Some((incarnation, _))) = (&answer, granted) {
        give_back(pool, &run, incarnation, error).await?;
    }
    answer
}

/// Gives back a lease on a run that cannot be opened; a corrupt one is set aside.
async fn give_back(pool: &Pool, run: &RunId, incarnation: i64, error: &StoreError) -> Result<(), StoreError> {
    let why = if let StoreError::Corrupt { what } = error {
        Some(what.clone())
    } else {
        None
    };
    pool.write(|| {
        let mut sql = Sql::new("WITH head AS (UPDATE runs SET quarantine = COALESCE(");
        sql.bind(why.as_deref())
            .push(", quarantine) WHERE run_id = ")
            .bind(run.as_str());
        sql.push(
            " RETURNING run_id) UPDATE run_leases AS t SET expires_at = 0 FROM head h \
             WHERE t.run_id = h.run_id AND t.incarnation = ",
        )
        .bind(incarnation);
        sql
    })
    .await
    .map(|_| ())
}

/// # Errors
/// `busy`, `not_found`, `deleted`, `corrupt`, `schema_unsupported`.
pub(super) async fn acquire(
    pool: &Pool,
    run: &RunId,
    request: &LeaseRequest,
) -> Result<Acquired, StoreError> {
    let rows = pool
        .write(|| {
            let mut sql = Sql::new("WITH ");
            locked(&mut sql, |sql| {
                sql.push("(SELECT * FROM runs h WHERE h.run_id = ")
                    .bind(run.as_str().to_owned())
                    .push(" FOR UPDATE)");
            });
            grant(&mut sql, request);
            sql
        })
        .await?;
    match rows.first() {
        Some(row) => open(pool, Grant::read(row)?, &request.owner).await,
        None => Err(absent(pool, run).await),
    }
}

/// # Errors
/// `unavailable`, `unconfirmed`.
pub(super) async fn claim(pool: &Pool, claim: &Claim) -> Result<Claimed, StoreError> {
    let mut claimed = Claimed::default();
    loop {
        let wanted = i64::from(claim.limit) - i64::try_from(claimed.runs.len()).unwrap_or(i64::MAX);
        if wanted <= 0 {
            return Ok(claimed);
        }
        let rows = pool.write(|| claim_sql(claim, wanted)).await?;
        let mut aside = false;
        let mut grants = rows.iter().map(Grant::read).collect::<Result<Vec<_>, _>>()?;
        grants.sort_by(|a, b| (a.due_at, &a.run).cmp(&(b.due_at, &b.run)));
        for grant in grants {
            let run = grant.run.clone();
            match open(pool, grant, &claim.lease.owner).await {
                Ok(acquired) => claimed.runs.push(acquired),
                Err(StoreError::Corrupt { what }) => {
                    aside = true;
                    claimed.quarantined.push((run, what));
                }
                // Somebody took it meanwhile, or a newer program is to run it.
                Err(StoreError::Busy | StoreError::SchemaUnsupported { .. }) => {}
                // What was granted runs out; what was opened is the caller's.
                Err(error) if claimed.runs.is_empty() => return Err(error),
                Err(_) => return Ok(claimed),
            }
        }
        // The places of those that were set aside are for others.
        if !aside {
            return Ok(claimed);
        }
    }
}

/// A definition as the claim compares it: no two pairs have the same text.
fn definition(kind: &str, name: &str) -> String {
    format!("{}:{kind}{name}", kind.chars().count())
}

fn claim_sql(claim: &Claim, limit: i64) -> Sql {
    let definitions = claim
        .definitions
        .iter()
        .map(|(kind, name)| definition(kind, name));
    let mut sql = Sql::new("WITH picked AS MATERIALIZED (SELECT h.* FROM runs h WHERE h.due_at <= (SELECT ");
    sql.push(NOW)
        .push(") AND h.quarantine IS NULL AND h.schema_version <= ")
        .bind(i64::from(SCHEMA_VERSION))
        .push(" AND length(h.kind) || ':' || h.kind || h.definition = ANY(")
        .array("text", definitions)
        .push(
            ") AND COALESCE((SELECT e.expires_at FROM run_leases e WHERE e.run_id = h.run_id), 0) <= (SELECT ",
        )
        .push(NOW)
        .push(") AND h.run_id <> ALL(")
        .array("text", claim.except.iter().map(RunId::as_str))
        .push(") ORDER BY h.due_at, h.run_id LIMIT ")
        .bind(limit)
        .push(" FOR UPDATE OF h SKIP LOCKED), ");
    locked(&mut sql, |sql| {
        sql.push("picked");
    });
    grant(&mut sql, &claim.lease);
    sql
}

/// # Errors
/// `unavailable`, `unconfirmed`.
pub(super) async fn renew(pool: &Pool, leases: &[Lease], ttl: Duration) -> Result<Vec<Renewal>, StoreError> {
    if leases.is_empty() {
        return Ok(Vec::new());
    }
    // In order of the run ids, like everything that locks several.
    let mut order: Vec<(i32, &Lease)> = (0..).zip(leases).collect();
    order.sort_by(|(_, a), (_, b)| a.run.cmp(&b.run));
    let rows = pool
        .write(|| {
            let mut sql = Sql::new("WITH ");
            handles(&mut sql, &order);
            sql.push(", renewed AS (UPDATE run_leases AS t SET expires_at = ");
            expires(&mut sql, "k.now", ttl);
            sql.push(
                " FROM (SELECT DISTINCT ON (run_id) run_id, now FROM locked WHERE live ORDER BY run_id) AS k \
                 WHERE t.run_id = k.run_id) SELECT k.place::bigint, k.signal, CASE WHEN k.live THEN ",
            );
            expires(&mut sql, "k.now", ttl);
            sql.push(" END FROM locked k");
            sql
        })
        .await?;
    let mut renewals = vec![Renewal::Lost; leases.len()];
    for row in &rows {
        let mut cells = Cells::new(row);
        let place: i64 = cells.get()?;
        let (signal, expires_at): (Option<i64>, Option<i64>) = (cells.get()?, cells.get()?);
        let place = usize::try_from(place)
            .ok()
            .and_then(|place| renewals.get_mut(place));
        if let (Some(signal), Some(expires_at), Some(renewal)) = (signal, expires_at, place) {
            *renewal = Renewal::Live {
                expires_at: time(expires_at)?,
                signal: unsigned(signal)?,
            };
        }
    }
    Ok(renewals)
}

/// `locked`: which of these handles are live.
fn handles(sql: &mut Sql, leases: &[(i32, &Lease)]) {
    sql.push(
        "locked AS MATERIALIZED (SELECT z.*, COALESCE(z.incarnation = z.wanted AND z.expires_at > z.now, false) AS live \
         FROM (SELECT i.place, i.run_id, i.wanted, r.signal, r.due_at, l.incarnation, l.expires_at, ",
    )
    .push(NOW)
    .push(" AS now FROM ")
    .table();
    sql.column("int4", leases.iter().map(|(place, _)| *place));
    sql.column("text", leases.iter().map(|(_, l)| l.run.as_str()));
    sql.column("int8", leases.iter().map(|(_, l)| signed(l.incarnation)))
        .named("i(place, run_id, wanted)")
        .push(LOCK_HEAD)
        .push(LOCK_LEASE)
        .push(" OFFSET 0) AS z)");
}

/// Whether the run can be claimed at once by anybody.
///
/// # Errors
/// `lease_lost`.
pub(super) async fn release(pool: &Pool, lease: &Lease) -> Result<bool, StoreError> {
    let rows = pool
        .write(|| {
            let mut sql = Sql::new("WITH ");
            handles(&mut sql, &[(0, lease)]);
            sql.push(
                ", released AS (UPDATE run_leases AS t SET expires_at = 0 FROM locked k \
                 WHERE k.live AND t.run_id = k.run_id) \
                 SELECT k.live, COALESCE(k.due_at <= k.now, false) FROM locked k",
            );
            sql
        })
        .await?;
    match rows.first() {
        Some(row) => {
            let mut cells = Cells::new(row);
            let (live, due): (bool, bool) = (cells.get()?, cells.get()?);
            if live { Ok(due) } else { Err(StoreError::LeaseLost) }
        }
        None => Err(StoreError::LeaseLost),
    }
}
