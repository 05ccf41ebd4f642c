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

/// The two columns every table has here: whose row it is.
fn whose<'b, R: 'b>(sql: &mut Sql, what: &str, rows: impl Iterator<Item = (&'b Member<'b>, &'b R)> + Clone) {
    sql.push(what).table();
    sql.column("int4", rows.clone().map(|(member, _)| member.place));
    sql.column("text", rows.map(|(member, _)| member.run));
}

fn activities(sql: &mut Sql, members: &[Member<'_>], when: &str) {
    let rows = of(members, |rows| &rows.activities);
    if rows.clone().next().is_none() {
        return;
    }
    let what = ", activity AS (INSERT INTO activities AS t (run_id, activity_id, activation, state, body, input, \
         input_digest, output, output_digest, seal) \
         SELECT c.run_id, c.activity_id, c.activation, c.state, c.body, c.input, c.input_digest, c.output, \
         c.output_digest, c.seal FROM ";
    whose(sql, what, rows.clone());
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
    sql.named("c(place, run_id, activity_id, activation, state, body, input, input_digest, output, output_digest, seal) \
         WHERE ",
    )
    .push(when)
    .push(
        " ON CONFLICT (run_id, activation, activity_id) DO UPDATE SET state = EXCLUDED.state, body = EXCLUDED.body, \
         input = EXCLUDED.input, input_digest = EXCLUDED.input_digest, output = EXCLUDED.output, \
         output_digest = EXCLUDED.output_digest, seal = EXCLUDED.seal)",
    );
}

fn waits(sql: &mut Sql, members: &[Member<'_>], when: &str) {
    let rows = of(members, |rows| &rows.waits);
    if rows.clone().next().is_none() {
        return;
    }
    let what = ", wait AS (INSERT INTO waits AS t (run_id, wait_id, correlation_id, activation, status, deadline, armed_at, \
         body, subject, subject_digest, delivered, delivered_digest, seal) \
         SELECT c.run_id, c.wait_id, c.correlation_id, c.activation, c.status, c.deadline, c.armed_at, c.body, c.subject, \
         c.subject_digest, c.delivered, c.delivered_digest, c.seal FROM ";
    whose(sql, what, rows.clone());
    sql.column("text", rows.clone().map(|(_, r)| &*r.wait_id));
    sql.column("text", rows.clone().map(|(_, r)| &*r.correlation_id));
    sql.column("int8", rows.clone().map(|(_, r)| r.activation));
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
    sql.named(
        "c(place, run_id, wait_id, correlation_id, activation, status, deadline, armed_at, body, subject, \
         subject_digest, delivered, delivered_digest, seal) WHERE ",
    )
    .push(when)
    .push(
        " ON CONFLICT (run_id, wait_id) DO UPDATE SET correlation_id = EXCLUDED.correlation_id, \
         activation = EXCLUDED.activation, status = EXCLUDED.status, deadline = EXCLUDED.deadline, \
         armed_at = EXCLUDED.armed_at, body = EXCLUDED.body, subject = EXCLUDED.subject, \
         subject_digest = EXCLUDED.subject_digest, delivered = EXCLUDED.delivered, \
         delivered_digest = EXCLUDED.delivered_digest, seal = EXCLUDED.seal)",
    );
}

fn steps(sql: &mut Sql, members: &[Member<'_>], when: &str) {
    let rows = of(members, |rows| &rows.steps);
    if rows.clone().next().is_none() {
        return;
    }
    let what = ", step AS (INSERT INTO steps AS t (run_id, activation, node, status, body) \
         SELECT c.run_id, c.activation, c.node, c.status, c.body FROM ";
    whose(sql, what, rows.clone());
    sql.column("int8", rows.clone().map(|(_, r)| r.activation));
    sql.column("text", rows.clone().map(|(_, r)| &*r.node));
    sql.column("text", rows.clone().map(|(_, r)| r.status));
    sql.column("bytea", rows.map(|(_, r)| &*r.body));
    sql.named("c(place, run_id, activation, node, status, body) WHERE ")
        .push(when)
        .push(
            " ON CONFLICT (run_id, activation) DO UPDATE SET node = EXCLUDED.node, status = EXCLUDED.status, \
         body = EXCLUDED.body)",
        );
}

fn decisions(sql: &mut Sql, members: &[Member<'_>], when: &str) {
    let rows = of(members, |rows| &rows.decisions);
    if rows.clone().next().is_none() {
        return;
    }
    let what = ", decision AS (INSERT INTO decisions (run_id, scope, decision_id, content, body, created_at) \
         SELECT c.run_id, c.scope, c.decision_id, c.content, c.body, c.created_at FROM ";
    whose(sql, what, rows.clone());
    sql.column("text", rows.clone().map(|(_, r)| r.scope.to_text()));
    sql.column("text", rows.clone().map(|(_, r)| r.id.as_str()));
    sql.column("bytea", rows.clone().map(|(_, r)| &r.content[..]));
    sql.column("bytea", rows.clone().map(|(_, r)| &*r.body));
    sql.column("int8", rows.map(|(_, r)| r.created_at.as_millis()));
    sql.named("c(place, run_id, scope, decision_id, content, body, created_at) WHERE ")
        .push(when)
        .push(")");
}

fn events(sql: &mut Sql, members: &[Member<'_>], when: &str) {
    let rows = of(members, |rows| &rows.events);
    if rows.clone().next().is_none() {
        return;
    }
    let what = ", event AS (INSERT INTO events (run_id, seq, life, name, terminal, time, data) \
         SELECT c.run_id, c.seq, c.life, c.name, c.terminal, c.time, c.data FROM ";
    whose(sql, what, rows.clone());
    sql.column("int8", rows.clone().map(|(_, r)| signed(r.seq)));
    sql.column("int8", rows.clone().map(|(_, r)| i64::from(r.life)));
    sql.column("text", rows.clone().map(|(_, r)| &*r.name));
    sql.column("bool", rows.clone().map(|(_, r)| r.terminal));
    sql.column("int8", rows.clone().map(|(_, r)| r.time.as_millis()));
    sql.column("bytea", rows.map(|(_, r)| &*r.data));
    sql.named("c(place, run_id, seq, life, name, terminal, time, data) WHERE ")
        .push(when)
        .push(")");
}

fn blobs(sql: &mut Sql, members: &[Member<'_>], when: &str) {
    let rows = of(members, |rows| &rows.blobs);
    if rows.clone().next().is_none() {
        return;
    }
    let what = ", blob AS (INSERT INTO blobs (run_id, digest, bytes) \
         SELECT c.run_id, c.digest, c.bytes FROM ";
    whose(sql, what, rows.clone());
    sql.column("bytea", rows.clone().map(|(_, r)| &r.digest[..]));
    sql.column("bytea", rows.map(|(_, r)| &*r.bytes));
    sql.named("c(place, run_id, digest, bytes) WHERE ")
        .push(when)
        .push(" ON CONFLICT (run_id, digest) DO NOTHING)");
}
