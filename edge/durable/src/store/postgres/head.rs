//! A head and its checkpoint, as creations and transitions write them.

use bytes::Bytes;

use super::sql::Sql;
use crate::envelope::{CheckpointRow, HeadRow};
use crate::ids::Revision;
use crate::payload::{Digest, Payload};
use crate::record::RunHead;
use crate::store::StoreError;
use crate::time::Timestamp;

/// A head that is written, sealed.
pub(super) struct Head {
    pub(super) row: HeadRow,
    pub(super) due_at: Option<i64>,
    checkpoint_seal: Option<Digest>,
}

impl Head {
    /// # Errors
    /// `corrupt` when the head cannot be encoded.
    pub(super) fn seal(
        head: &RunHead,
        state: &Payload,
        revision: Revision,
        due_at: Option<Timestamp>,
    ) -> Result<Self, StoreError> {
        let row = HeadRow::seal(head, state, revision)?;
        Ok(Self {
            checkpoint_seal: CheckpointRow::of(&row).seal,
            row,
            due_at: due_at.map(Timestamp::as_millis),
        })
    }

    /// Roughly what it takes on the wire.
    pub(super) fn bytes(&self) -> usize {
        const ROW: usize = 512;
        2 * self.row.state.inline.as_ref().map_or(0, Bytes::len)
            + self.row.outcome.as_ref().map_or(0, Bytes::len)
            + self.row.body.len()
            + self.row.budgets.len()
            + ROW
    }
}

/// The columns of `runs` that are written with a head. `columns` adds these and `checkpoint_seal`.
pub(super) const COLUMNS: &str = "run_id, kind, definition, status, cursor, activation, revision, schema_version, parent_id, \
     root_id, state, state_digest, budgets, outcome, body, seal, waiting_kind, owner, due_at, deadline, created_at, updated_at";

/// Adds the columns of these heads to the open table.
pub(super) fn columns<'b>(sql: &mut Sql, heads: impl Iterator<Item = &'b Head> + Clone) {
    let row = heads.clone().map(|head| &head.row);
    sql.column("text", row.clone().map(|h| &*h.run_id));
    sql.column("text", row.clone().map(|h| &*h.kind));
    sql.column("text", row.clone().map(|h| &*h.definition));
    sql.column("text", row.clone().map(|h| &*h.status));
    sql.column("text", row.clone().map(|h| &*h.cursor));
    sql.column("int8", row.clone().map(|h| h.activation));
    sql.column("int8", row.clone().map(|h| h.revision));
    sql.column("int8", row.clone().map(|h| h.schema_version));
    sql.column("text", row.clone().map(|h| h.parent_id.as_deref()));
    sql.column("text", row.clone().map(|h| &*h.root_id));
    sql.column("bytea", row.clone().map(|h| h.state.inline.as_deref()));
    sql.column("bytea", row.clone().map(|h| &h.state.digest[..]));
    sql.column("bytea", row.clone().map(|h| &*h.budgets));
    sql.column("bytea", row.clone().map(|h| h.outcome.as_deref()));
    sql.column("bytea", row.clone().map(|h| &*h.body));
    sql.column("bytea", row.clone().map(|h| h.seal.as_ref().map(|s| &s[..])));
    sql.column("text", row.clone().map(|h| h.waiting_kind.as_deref()));
    sql.column("text", row.clone().map(|h| h.owner.as_deref()));
    sql.column("int8", heads.clone().map(|h| h.due_at));
    sql.column("int8", row.clone().map(|h| h.deadline));
    sql.column("int8", row.clone().map(|h| h.created_at));
    sql.column("int8", row.map(|h| h.updated_at));
    sql.column("bytea", heads.map(|h| h.checkpoint_seal.as_ref().map(|s| &s[..])));
}

/// Adds `, checkpoint AS (INSERT …)`: the checkpoints of the heads in this table.
pub(super) fn checkpoints(sql: &mut Sql, table: &str) {
    sql.push(
        ", checkpoint AS (INSERT INTO checkpoints (run_id, revision, status, cursor, activation, state, state_digest, \
         seal, created_at) SELECT run_id, revision, status, cursor, activation, state, state_digest, \
         checkpoint_seal, updated_at FROM ",
    )
    .push(table)
    .push(")");
}
