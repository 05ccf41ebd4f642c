//! A batch of creations as one statement. Every row of it is new or none is written: a taken id or key fails the statement, and
//! its members are then written one by one, each told why it failed.
//!
//! Tables are written in one order, keys in theirs and runs in theirs: of two batches that share several of them only one waits
//! for the other.

use super::beside::{self, Member};
use super::head;
use super::sql::{NOW, Sql};
use super::work::{Creation, ttl_ms};
use crate::ids::RunId;
use crate::time::Timestamp;

/// The answer is one row: the clock.
pub(super) fn creations(members: &[(&RunId, &Creation)]) -> Sql {
    let rows: Vec<Member<'_>> = (1..)
        .zip(members)
        .map(|(place, (run, work))| Member {
            place,
            run: run.as_str(),
            rows: &work.rows,
        })
        .collect();
    let work = members.iter().map(|(_, work)| *work);
    let mut sql = Sql::of_rows(beside::few(&rows), "WITH clock AS MATERIALIZED (SELECT ");
    sql.push(NOW).push(" AS now)");
    keys(&mut sql, members);
    sql.push(", input AS MATERIALIZED (SELECT * FROM ").table();
    head::columns(&mut sql, work.clone().map(|w| &w.head));
    sql.column(
        "text",
        work.clone().map(|w| w.lease.as_ref().map(|l| l.owner.as_str())),
    );
    sql.column("int8", work.map(|w| w.lease.as_ref().map(|l| ttl_ms(l.ttl))));
    sql.named("c(").push(head::COLUMNS).push(
        ", checkpoint_seal, holder, ttl)), fence AS (INSERT INTO run_fences (run_id, fence) \
         SELECT c.run_id, CASE WHEN c.holder IS NULL THEN 0 ELSE 1 END FROM input c), ",
    );
    sql.insert("head", "runs", head::COLUMNS).push("input)");
    head::checkpoints(&mut sql, "input");
    sql.push(
        ", lease AS (INSERT INTO run_leases (run_id, owner, incarnation, expires_at) \
         SELECT c.run_id, COALESCE(c.holder, ''), CASE WHEN c.holder IS NULL THEN 0 ELSE 1 END, \
         CASE WHEN c.holder IS NULL THEN 0 ELSE ",
    );
    sql.push("LEAST((SELECT now FROM clock) + c.ttl, ")
        .bind(Timestamp::MAX.as_millis())
        .push(") END FROM input c)");
    beside::push(&mut sql, &rows, "true");
    sql.push(" SELECT now FROM clock");
    sql
}

fn keys(sql: &mut Sql, members: &[(&RunId, &Creation)]) {
    const COLUMNS: &str = "scope, key, request, run_id, created_at";
    let mut keys: Vec<_> = members
        .iter()
        .filter_map(|(_, work)| work.key.as_ref().map(|key| (key, &work.head.row)))
        .collect();
    if keys.is_empty() {
        return;
    }
    keys.sort_by(|(a, _), (b, _)| (&a.scope, &a.key).cmp(&(&b.scope, &b.key)));
    sql.push(", ")
        .insert("named", "idempotency_keys", COLUMNS)
        .table();
    sql.column("text", keys.iter().map(|(k, _)| &*k.scope));
    sql.column("text", keys.iter().map(|(k, _)| &*k.key));
    sql.column("bytea", keys.iter().map(|(k, _)| &k.request[..]));
    sql.column("text", keys.iter().map(|(_, h)| &*h.run_id));
    sql.column("int8", keys.iter().map(|(_, h)| h.created_at))
        .named("c(")
        .push(COLUMNS)
        .push("))");
}
