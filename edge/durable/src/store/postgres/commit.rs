//! A batch of transitions, or of posts, as one statement: input, locked heads and leases, who passes, everything written.
//!
//! Each member's head is locked, then its lease, then the next member's, in order of the run ids; everybody who waits for the
//! locks of more than one run keeps that order. A locked row is read as it is after the wait, and so is the clock. What is read
//! without a lock is of the statement's beginning, and nothing is decided by it that another transaction could have changed
//! without changing the revision.

use super::beside::{self, Member};
use super::head;
use super::sql::{NOW, Sql};
use super::verdict::{VERDICT, wanted};
use super::work::{Posting, Rows, Transition};
use crate::ids::RunId;
use crate::store::rows::signed;

/// One member with its run. A batch is in order of the run ids.
pub(super) type Of<'b, W> = (&'b RunId, &'b W);

/// Which member passes: `flags` has one answer per place.
const PASSES: &str = "((SELECT f FROM flags))[c.place]";
const FLAGS: &str = "flags AS MATERIALIZED (SELECT array_agg(k.written ORDER BY k.place) AS f FROM locked k)";

/// Locks the head of a row `i`, as `r`.
pub(super) const LOCK_HEAD: &str = " LEFT JOIN LATERAL (SELECT h.run_id, h.revision, h.signal, h.due_at, h.status FROM runs h \
     WHERE h.run_id = i.run_id FOR UPDATE) AS r ON true";
/// Locks the lease of `r`, as `l`.
pub(super) const LOCK_LEASE: &str = " LEFT JOIN LATERAL (SELECT e.incarnation, e.expires_at FROM run_leases e \
     WHERE e.run_id = r.run_id FOR UPDATE) AS l ON true";
/// Of a row with `incarnation`, `expires_at` and `now`.
const HELD_BY: &str = "CASE WHEN expires_at > now THEN incarnation END AS held_by";

fn places<W>(members: &[Of<'_, W>]) -> impl Iterator<Item = i32> + Clone {
    (1..).take(members.len())
}

fn beside<'b, W>(members: &[Of<'b, W>], rows: impl Fn(&'b W) -> &'b Rows) -> Vec<Member<'b>> {
    places(members)
        .zip(members)
        .map(|(place, (run, work))| Member {
            place,
            run: run.as_str(),
            rows: rows(work),
        })
        .collect()
}

fn any_known(members: &[Member<'_>]) -> bool {
    members.iter().any(|member| !member.rows.known.is_empty())
}

/// The column `known`: whether the payloads that a member does not carry are in `blobs`.
fn known(members: &[Member<'_>]) -> &'static str {
    if any_known(members) {
        "p.found = i.uncarried AS known"
    } else {
        "true AS known"
    }
}

/// What `known` is counted from: the rows are locked, so that they stay there.
fn lock_known(sql: &mut Sql, members: &[Member<'_>]) {
    if !any_known(members) {
        return;
    }
    let rows = members.iter().flat_map(|member| {
        member
            .rows
            .known
            .iter()
            .map(move |blob| (member.place, &blob.digest[..]))
    });
    sql.push(" LEFT JOIN LATERAL (SELECT count(*) AS found FROM (SELECT 1 FROM ")
        .table();
    sql.column("int4", rows.clone().map(|(place, _)| place));
    sql.column("bytea", rows.map(|(_, digest)| digest)).named(
        "n(place, digest) JOIN blobs b ON b.run_id = r.run_id AND b.digest = n.digest \
         WHERE n.place = i.place FOR KEY SHARE OF b) AS kept) AS p ON true",
    );
}

fn uncarried<'b>(members: &'b [Member<'b>]) -> impl Iterator<Item = i64> + 'b {
    members
        .iter()
        .map(|member| i64::try_from(member.rows.known.len()).unwrap_or(i64::MAX))
}

/// Commits. The answer is one `Verdict` per member.
pub(super) fn transitions(members: &[Of<'_, Transition>]) -> Sql {
    let rows = beside(members, |work: &Transition| &work.rows);
    let work = members.iter().map(|(_, work)| *work);
    let mut sql = Sql::of_rows(beside::few(&rows), "WITH input AS MATERIALIZED (SELECT * FROM ");
    sql.table();
    sql.column("int4", places(members));
    sql.column("text", members.iter().map(|(run, _)| run.as_str()));
    sql.column("int8", work.clone().map(|w| signed(w.guard.revision.get())));
    sql.column("int8", work.clone().map(|w| wanted(&w.guard)));
    sql.column("int8", work.clone().map(|w| w.guard.signal.map(signed)));
    sql.column(
        "int8",
        work.clone().map(|w| w.rows.events.first().map(|e| signed(e.seq))),
    );
    sql.column("int8", uncarried(&rows));
    sql.column("int8", work.clone().map(|w| w.head.due_at));
    sql.column("bool", work.clone().map(|w| w.release)).named("i(place, run_id, guard_revision, wanted, seen, first_seq, uncarried, due, release)), \
         locked AS MATERIALIZED (\
         SELECT x.*, COALESCE(x.written AND x.due <= x.now AND (x.held_by IS NULL OR x.release), false) AS claimable \
         FROM (SELECT y.*, COALESCE(y.revision = y.guard_revision AND (y.seen IS NULL OR y.seen = y.signal) \
         AND y.held_by IS NOT DISTINCT FROM y.wanted AND y.continued AND y.known, false) AS written \
         FROM (SELECT z.*, ",
    );
    sql.push(HELD_BY).push(
        " FROM (SELECT i.place, i.guard_revision, i.wanted, i.seen, i.due, i.release, r.revision, r.signal, \
         l.incarnation, l.expires_at, \
         i.first_seq IS NULL OR i.first_seq = 1 OR COALESCE((SELECT true FROM events v \
         WHERE v.run_id = r.run_id AND v.seq = i.first_seq - 1 LIMIT 1), false) AS continued, ",
    );
    sql.push(known(&rows))
        .push(", ")
        .push(NOW)
        .push(" AS now FROM input i");
    sql.push(LOCK_HEAD).push(LOCK_LEASE);
    lock_known(&mut sql, &rows);
    sql.push(" OFFSET 0) AS z) AS y) AS x), ").push(FLAGS).push(", ");
    heads(&mut sql, members);
    releases(&mut sql, members);
    beside::push(&mut sql, &rows, PASSES);
    sql.push(" SELECT ").push(VERDICT).push(" FROM locked k");
    sql
}

/// The new heads and the checkpoints of them.
fn heads(sql: &mut Sql, members: &[Of<'_, Transition>]) {
    let work = members.iter().map(|(_, work)| *work);
    sql.push("written AS MATERIALIZED (SELECT * FROM ").table();
    sql.column("int4", places(members));
    sql.column("int8", work.clone().map(|w| w.grows));
    head::columns(sql, work.map(|w| &w.head));
    sql.named("c(place, grows, ")
        .push(head::COLUMNS)
        .push(", checkpoint_seal) WHERE ")
        .push(PASSES);
    sql.push(
        "), head AS (UPDATE runs AS t SET kind = c.kind, definition = c.definition, status = c.status, \
         cursor = c.cursor, activation = c.activation, revision = c.revision, schema_version = c.schema_version, \
         parent_id = c.parent_id, root_id = c.root_id, state = c.state, state_digest = c.state_digest, \
         budgets = c.budgets, outcome = c.outcome, body = c.body, seal = c.seal, waiting_kind = c.waiting_kind, \
         owner = c.owner, due_at = c.due_at, deadline = c.deadline, created_at = c.created_at, updated_at = c.updated_at, \
         signal = t.signal + c.grows FROM written c WHERE t.run_id = c.run_id)",
    );
    head::checkpoints(sql, "written");
}

/// Leases that are given back.
fn releases(sql: &mut Sql, members: &[Of<'_, Transition>]) {
    let released = places(members)
        .zip(members)
        .filter(|(_, (_, work))| work.release)
        .map(|(place, (run, _))| (place, run.as_str()));
    if released.clone().next().is_none() {
        return;
    }
    sql.push(", released AS (UPDATE run_leases AS t SET expires_at = 0 FROM ")
        .table();
    sql.column("int4", released.clone().map(|(place, _)| place));
    sql.column("text", released.map(|(_, run)| run))
        .named("c(place, run_id) WHERE t.run_id = c.run_id AND ")
        .push(PASSES)
        .push(")");
}

/// Changes of inboxes. The answer is one `Verdict` per member.
pub(super) fn posts(members: &[Of<'_, Posting>]) -> Sql {
    let rows = beside(members, |work: &Posting| &work.rows);
    let work = members.iter().map(|(_, work)| *work);
    let mut sql = Sql::of_rows(beside::few(&rows), "WITH input AS MATERIALIZED (SELECT * FROM ");
    sql.table();
    sql.column("int4", places(members));
    sql.column("text", members.iter().map(|(run, _)| run.as_str()));
    sql.column("int8", work.clone().map(|w| w.signal));
    sql.column(
        "text",
        work.clone().map(|w| w.cancel.as_ref().map(|(text, _)| &**text)),
    );
    sql.column("int8", work.clone().map(|w| w.cancel.as_ref().map(|(_, at)| *at)));
    sql.column("bool", work.map(|w| w.wake));
    sql.column("int8", uncarried(&rows)).named(
        "i(place, run_id, seen, cancel, cancel_requested_at, wake, uncarried)), \
         locked AS MATERIALIZED (\
         SELECT x.*, COALESCE(x.written AND x.held_by IS NULL AND x.due <= x.now, false) AS claimable \
         FROM (SELECT y.*, COALESCE(y.seen = y.signal AND y.known, false) AS written, \
         CASE WHEN y.wake AND y.status IN ('queued', 'running', 'waiting', 'ambiguous') \
         THEN y.now ELSE y.due_at END AS due \
         FROM (SELECT z.*, true AS continued, ",
    );
    sql.push(HELD_BY).push(
        " FROM (SELECT i.place, i.run_id, i.seen, i.cancel, i.cancel_requested_at, i.wake, r.revision, r.signal, \
         r.due_at, r.status, l.incarnation, l.expires_at, ",
    );
    sql.push(known(&rows))
        .push(", ")
        .push(NOW)
        .push(" AS now FROM input i");
    sql.push(LOCK_HEAD).push(LOCK_LEASE);
    lock_known(&mut sql, &rows);
    sql.push(" OFFSET 0) AS z) AS y) AS x), ").push(FLAGS).push(
        ", head AS (UPDATE runs AS t SET signal = t.signal + 1, cancel = COALESCE(t.cancel, k.cancel), \
         cancel_requested_at = CASE WHEN t.cancel IS NULL THEN k.cancel_requested_at ELSE t.cancel_requested_at END, \
         due_at = k.due FROM locked k WHERE k.written AND t.run_id = k.run_id)",
    );
    beside::push(&mut sql, &rows, PASSES);
    sql.push(" SELECT ").push(VERDICT).push(" FROM locked k");
    sql
}
