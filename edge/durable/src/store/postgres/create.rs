//! A batch of creations as one statement. Every row of it is new or none is written: a taken id or key fails the statement, and
//! its members are then written one by one, each told why it failed.
//!
//! Tables are written in one order, keys in theirs and runs in theirs: of two batches that share several of them only one waits
//! for the other.

use super::beside::{self, Member};
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
    let head = members.iter().map(|(_, work)| &work.head);
    let mut sql = Sql::of_rows(beside::few(&rows), "WITH clock AS MATERIALIZED (SELECT ");
    sql.push(NOW).push(" AS now)");
    keys(&mut sql, members);
    sql.push(", input AS MATERIALIZED (SELECT * FROM ").table();
    sql.column("text", head.clone().map(|h| &*h.run_id));
    sql.column("text", head.clone().map(|h| &*h.kind));
    sql.column("text", head.clone().map(|h| &*h.definition));
    sql.column("text", head.clone().map(|h| &*h.status));
    sql.column("text", head.clone().map(|h| &*h.cursor));
    sql.column("int8", head.clone().map(|h| h.activation));
    sql.column("int8", head.clone().map(|h| h.revision));
    sql.column("int8", head.clone().map(|h| h.schema_version));
    sql.column("text", head.clone().map(|h| h.parent_id.as_deref()));
    sql.column("text", head.clone().map(|h| &*h.root_id));
    sql.column("bytea", head.clone().map(|h| h.state.inline.as_deref()));
    sql.column("bytea", head.clone().map(|h| &h.state.digest[..]));
    sql.column("bytea", head.clone().map(|h| &*h.budgets));
    sql.column("bytea", head.clone().map(|h| h.outcome.as_deref()));
    sql.column("bytea", head.clone().map(|h| &*h.body));
    sql.column("bytea", head.clone().map(|h| h.seal.as_ref().map(|s| &s[..])));
    sql.column("text", head.clone().map(|h| h.waiting_kind.as_deref()));
    sql.column("int8", work.clone().map(|w| w.due_at));
    sql.column("int8", head.clone().map(|h| h.deadline));
    sql.column("int8", head.clone().map(|h| h.created_at));
    sql.column("int8", head.map(|h| h.updated_at));
    sql.column(
        "bytea",
        work.clone().map(|w| w.checkpoint_seal.as_ref().map(|s| &s[..])),
    );
    sql.column(
        "text",
        work.clone().map(|w| w.lease.as_ref().map(|l| l.owner.as_str())),
    );
    sql.column("int8", work.map(|w| w.lease.as_ref().map(|l| ttl_ms(l.ttl)))).named("c(run_id, kind, definition, status, cursor, activation, revision, schema_version, parent_id, root_id, \
         state, state_digest, budgets, outcome, body, seal, waiting_kind, due_at, deadline, created_at, updated_at, \
         checkpoint_seal, owner, ttl)), \
         fence AS (INSERT INTO run_fences (run_id, fence) \
         SELECT c.run_id, CASE WHEN c.owner IS NULL THEN 0 ELSE 1 END FROM input c), \
         head AS (INSERT INTO runs (run_id, kind, definition, status, cursor, activation, revision, schema_version, \
         parent_id, root_id, state, state_digest, budgets, outcome, body, seal, waiting_kind, due_at, deadline, \
         created_at, updated_at) SELECT c.run_id, c.kind, c.definition, c.status, c.cursor, c.activation, c.revision, \
         c.schema_version, c.parent_id, c.root_id, c.state, c.state_digest, c.budgets, c.outcome, c.body, c.seal, \
         c.waiting_kind, c.due_at, c.deadline, c.created_at, c.updated_at FROM input c), \
         checkpoint AS (INSERT INTO checkpoints (run_id, revision, status, cursor, activation, state, state_digest, \
         seal, created_at) SELECT c.run_id, c.revision, c.status, c.cursor, c.activation, c.state, c.state_digest, \
         c.checkpoint_seal, c.updated_at FROM input c), \
         lease AS (INSERT INTO run_leases (run_id, owner, incarnation, expires_at) \
         SELECT c.run_id, COALESCE(c.owner, ''), CASE WHEN c.owner IS NULL THEN 0 ELSE 1 END, \
         CASE WHEN c.owner IS NULL THEN 0 ELSE ",
    );
    sql.push("LEAST((SELECT now FROM clock) + c.ttl, ")
        .bind(Timestamp::MAX.as_millis())
        .push(") END FROM input c)");
    beside::push(&mut sql, &rows, "true");
    sql.push(" SELECT now FROM clock");
    sql
}

fn keys(sql: &mut Sql, members: &[(&RunId, &Creation)]) {
    let mut keys: Vec<_> = members
        .iter()
        .filter_map(|(_, work)| work.key.as_ref().map(|key| (key, &work.head)))
        .collect();
    if keys.is_empty() {
        return;
    }
    keys.sort_by(|(a, _), (b, _)| (&a.scope, &a.key).cmp(&(&b.scope, &b.key)));
    sql.push(
        ", named AS (INSERT INTO idempotency_keys (scope, key, request, run_id, created_at) \
         SELECT c.scope, c.key, c.request, c.run_id, c.created_at FROM ",
    )
    .table();
    sql.column("text", keys.iter().map(|(k, _)| &*k.scope));
    sql.column("text", keys.iter().map(|(k, _)| &*k.key));
    sql.column("bytea", keys.iter().map(|(k, _)| &k.request[..]));
    sql.column("text", keys.iter().map(|(_, h)| &*h.run_id));
    sql.column("int8", keys.iter().map(|(_, h)| h.created_at))
        .named("c(scope, key, request, run_id, created_at))");
}
