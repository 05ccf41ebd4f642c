//! The rows beside the heads of a batch: one data-modifying part per table that the batch touches.

use super::sql::Sql;
use super::work::Rows;
use crate::store::rows::signed;

/// The rows of one member of a batch; `place` counts from 1.
pub(super) struct Member<'b> {
    pub(super) place: i32,
    pub(super) run: &'b str,
    pub(super) rows: &'b Rows,
}

/// Rows of a table that are written out one by one: each number of them is a statement of its own to be prepared.
const FEW: usize = 4;

/// Whether every table has so few rows that they are worth more text.
pub(super) fn few(members: &[Member<'_>]) -> bool {
    let [member] = members else {
        return false;
    };
    let rows = member.rows;
    let counts = [
        rows.activities.len(),
        rows.waits.len(),
        rows.steps.len(),
        rows.decisions.len(),
        rows.events.len(),
        rows.blobs.len(),
        rows.known.len(),
    ];
    counts.iter().all(|count| *count <= FEW)
}

/// Adds `, name AS (INSERT …)` for every table that has rows in this batch. `when` is a condition on `c.place`, true for the
/// members that pass.
pub(super) fn push(sql: &mut Sql, members: &[Member<'_>], when: &str) {
    activities(sql, members, when);
    waits(sql, members, when);
    steps(sql, members, when);
    decisions(sql, members, when);
    events(sql, members, when);
    blobs(sql, members, when);
}

/// All rows of one table, each with its member.
fn of<'b, R: 'b>(
    members: &'b [Member<'b>],
    rows: impl Fn(&'b Rows) -> &'b [R] + Clone + 'b,
) -> impl Iterator<Item = (&'b Member<'b>, &'b R)> + Clone + 'b {
    members
        .iter()
        .flat_map(move |member| rows(member.rows).iter().map(move |row| (member, row)))
}

/// A table of rows, each with its member's place. Its columns begin with `run_id`; the others follow.
fn insert<'b, R: 'b>(
    sql: &mut Sql,
    name: &str,
    table: &str,
    columns: &str,
    rows: impl Iterator<Item = (&'b Member<'b>, &'b R)> + Clone,
) {
    sql.push(", ").insert(name, table, columns).table();
    sql.column("int4", rows.clone().map(|(member, _)| member.place));
    sql.column("text", rows.map(|(member, _)| member.run));
}

/// Closes what `insert` began with the same columns.
fn passing<'s>(sql: &'s mut Sql, columns: &str, when: &str) -> &'s mut Sql {
    sql.named("c(place, ").push(columns).push(") WHERE ").push(when)
}

fn activities(sql: &mut Sql, members: &[Member<'_>], when: &str) {
    const COLUMNS: &str =
        "run_id, activity_id, activation, state, body, input, input_digest, output, output_digest, seal";
    let rows = of(members, |rows| &rows.activities);
    if rows.clone().next().is_none() {
        return;
    }
    insert(sql, "activity", "activities", COLUMNS, rows.clone());
    sql.column("text", rows.clone().map(|(_, r)| &*r.activity_id));
    sql.column("int8", rows.clone().map(|(_, r)| r.activation));
    sql.column("text", rows.clone().map(|(_, r)| &*r.state));
    sql.column("bytea", rows.clone().map(|(_, r)| &*r.body));
    sql.column("bytea", rows.clone().map(|(_, r)| r.input.inline.as_deref()));
    sql.column("bytea", rows.clone().map(|(_, r)| &r.input.digest[..]));
    sql.column(
        "bytea",
        rows.clone()
            .map(|(_, r)| r.output.as_ref().and_then(|o| o.inline.as_deref())),
    );
    sql.column(
        "bytea",
        rows.clone()
            .map(|(_, r)| r.output.as_ref().map(|o| &o.digest[..])),
    );
    sql.column("bytea", rows.map(|(_, r)| r.seal.as_ref().map(|s| &s[..])));
    passing(sql, COLUMNS, when).push(
        " ON CONFLICT (run_id, activation, activity_id) DO UPDATE SET state = EXCLUDED.state, body = EXCLUDED.body, \
         input = EXCLUDED.input, input_digest = EXCLUDED.input_digest, output = EXCLUDED.output, \
         output_digest = EXCLUDED.output_digest, seal = EXCLUDED.seal)",
    );
}

fn waits(sql: &mut Sql, members: &[Member<'_>], when: &str) {
    const COLUMNS: &str = "run_id, wait_id, correlation_id, activation, kind, status, deadline, armed_at, body, \
         subject, subject_digest, delivered, delivered_digest, seal";
    let rows = of(members, |rows| &rows.waits);
    if rows.clone().next().is_none() {
        return;
    }
    insert(sql, "wait", "waits", COLUMNS, rows.clone());
    sql.column("text", rows.clone().map(|(_, r)| &*r.wait_id));
    sql.column("text", rows.clone().map(|(_, r)| &*r.correlation_id));
    sql.column("int8", rows.clone().map(|(_, r)| r.activation));
    sql.column("text", rows.clone().map(|(_, r)| r.kind.as_deref()));
    sql.column("text", rows.clone().map(|(_, r)| &*r.status));
    sql.column("int8", rows.clone().map(|(_, r)| r.deadline));
    sql.column("int8", rows.clone().map(|(_, r)| r.armed_at));
    sql.column("bytea", rows.clone().map(|(_, r)| &*r.body));
    sql.column("bytea", rows.clone().map(|(_, r)| r.subject.inline.as_deref()));
    sql.column("bytea", rows.clone().map(|(_, r)| &r.subject.digest[..]));
    sql.column(
        "bytea",
        rows.clone()
            .map(|(_, r)| r.delivered.as_ref().and_then(|d| d.inline.as_deref())),
    );
    sql.column(
        "bytea",
        rows.clone()
            .map(|(_, r)| r.delivered.as_ref().map(|d| &d.digest[..])),
    );
    sql.column("bytea", rows.map(|(_, r)| r.seal.as_ref().map(|s| &s[..])));
    passing(sql, COLUMNS, when).push(
        " ON CONFLICT (run_id, wait_id) DO UPDATE SET correlation_id = EXCLUDED.correlation_id, \
         activation = EXCLUDED.activation, kind = EXCLUDED.kind, status = EXCLUDED.status, deadline = EXCLUDED.deadline, \
         armed_at = EXCLUDED.armed_at, body = EXCLUDED.body, subject = EXCLUDED.subject, \
         subject_digest = EXCLUDED.subject_digest, delivered = EXCLUDED.delivered, \
         delivered_digest = EXCLUDED.delivered_digest, seal = EXCLUDED.seal)",
    );
}

fn steps(sql: &mut Sql, members: &[Member<'_>], when: &str) {
    const COLUMNS: &str = "run_id, activation, node, status, body";
    let rows = of(members, |rows| &rows.steps);
    if rows.clone().next().is_none() {
        return;
    }
    insert(sql, "step", "steps", COLUMNS, rows.clone());
    sql.column("int8", rows.clone().map(|(_, r)| r.activation));
    sql.column("text", rows.clone().map(|(_, r)| &*r.node));
    sql.column("text", rows.clone().map(|(_, r)| r.status));
    sql.column("bytea", rows.map(|(_, r)| &*r.body));
    passing(sql, COLUMNS, when).push(
        " ON CONFLICT (run_id, activation) DO UPDATE SET node = EXCLUDED.node, status = EXCLUDED.status, \
         body = EXCLUDED.body)",
    );
}

fn decisions(sql: &mut Sql, members: &[Member<'_>], when: &str) {
    const COLUMNS: &str = "run_id, scope, decision_id, content, body, created_at";
    let rows = of(members, |rows| &rows.decisions);
    if rows.clone().next().is_none() {
        return;
    }
    insert(sql, "decision", "decisions", COLUMNS, rows.clone());
    sql.column("text", rows.clone().map(|(_, r)| r.scope.to_text()));
    sql.column("text", rows.clone().map(|(_, r)| r.id.as_str()));
    sql.column("bytea", rows.clone().map(|(_, r)| &r.content[..]));
    sql.column("bytea", rows.clone().map(|(_, r)| &*r.body));
    sql.column("int8", rows.map(|(_, r)| r.created_at.as_millis()));
    passing(sql, COLUMNS, when).push(")");
}

fn events(sql: &mut Sql, members: &[Member<'_>], when: &str) {
    const COLUMNS: &str = "run_id, seq, life, name, terminal, time, data";
    let rows = of(members, |rows| &rows.events);
    if rows.clone().next().is_none() {
        return;
    }
    insert(sql, "event", "events", COLUMNS, rows.clone());
    sql.column("int8", rows.clone().map(|(_, r)| signed(r.seq)));
    sql.column("int8", rows.clone().map(|(_, r)| i64::from(r.life)));
    sql.column("text", rows.clone().map(|(_, r)| &*r.name));
    sql.column("bool", rows.clone().map(|(_, r)| r.terminal));
    sql.column("int8", rows.clone().map(|(_, r)| r.time.as_millis()));
    sql.column("bytea", rows.map(|(_, r)| &*r.data));
    passing(sql, COLUMNS, when).push(")");
}

fn blobs(sql: &mut Sql, members: &[Member<'_>], when: &str) {
    const COLUMNS: &str = "run_id, digest, bytes";
    let rows = of(members, |rows| &rows.blobs);
    if rows.clone().next().is_none() {
        return;
    }
    insert(sql, "blob", "blobs", COLUMNS, rows.clone());
    sql.column("bytea", rows.clone().map(|(_, r)| &r.digest[..]));
    sql.column("bytea", rows.map(|(_, r)| &*r.bytes));
    passing(sql, COLUMNS, when).push(" ON CONFLICT (run_id, digest) DO NOTHING)");
}
