//! Creations: head, first checkpoint, events, key and lease, all or nothing (D25). Of two with one key the writer takes one
//! first; the other one is answered with it, when both are durable.

use super::beside::Beside;
use super::fail::{self, Fail};
use super::rows::Cells;
use super::script::{Script, args};
use super::transition::put_head;
use super::writer::{Tx, Work};
use crate::envelope::{CheckpointRow, HeadRow};
use crate::ids::{Revision, RunId};
use crate::payload::Digest;
use crate::store::{Create, Created, Hint, IdempotencyKey, Lease, LeaseRequest, StoreError, check};
use crate::time::Timestamp;

/// A creation, sealed and ready to be written.
pub(super) struct Creation {
    run: RunId,
    head: HeadRow,
    checkpoint_seal: Option<Digest>,
    due_at: Option<Timestamp>,
    lease: Option<LeaseRequest>,
    key: Option<IdempotencyKey>,
    beside: Beside,
}

impl Creation {
    /// # Errors
    /// `corrupt` when it is none; `too_large`.
    pub(super) fn new(create: Create) -> Result<Self, StoreError> {
        check::create(&create)?;
        let head = HeadRow::seal(&create.head, &create.state, Revision::FIRST)?;
        Ok(Self {
            beside: Beside::of_creation(&create.state, create.events)?,
            run: create.head.id,
            checkpoint_seal: CheckpointRow::of(&head).seal,
            head,
            due_at: create.due_at,
            lease: create.lease,
            key: create.idempotency,
        })
    }
}

impl Work for Creation {
    type Answer = Created;

    async fn run(mut self, tx: &mut Tx<'_>) -> Result<Created, Fail> {
        let id = self.run.as_str();
        if let Some(key) = &self.key {
            let sql = "SELECT request, run_id FROM idempotency_keys WHERE scope = ? AND key = ?";
            if let Some(row) = tx.row(sql, args![key.scope.as_str(), key.key.as_str()]).await? {
                let mut cells = Cells::new(&row);
                let request = cells.digest("request of a key")?;
                let run = cells.run()?;
                return Ok(if request == key.request {
                    Created::Replayed { run }
                } else {
                    Created::KeyConflict { run }
                });
            }
        }
        let sql =
            "SELECT EXISTS (SELECT 1 FROM runs WHERE run_id = f.run_id) FROM run_fences f WHERE f.run_id = ?";
        if let Some(row) = tx.row(sql, args![id]).await? {
            return if Cells::new(&row).get()? {
                Ok(Created::Exists)
            } else {
                Err(StoreError::Deleted.into())
            };
        }

        self.beside.add_missing(tx, &self.run).await?;
        let now = tx.wall();
        let lease = self.lease.map(|request| Lease {
            run: self.run.clone(),
            expires_at: tx.clocks().expiry(request.ttl),
            owner: request.owner,
            incarnation: 1,
        });
        let mut script = Script::new();
        script
            .statement("INSERT INTO run_fences (run_id, fence) VALUES (?, ?)")
            .put(id)
            .put(i64::from(lease.is_some()));
        let args = script
            .statement(
                "INSERT INTO checkpoints (run_id, revision, status, cursor, activation, state, state_digest, seal, \
                 created_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            )
            .put(id)
            .put(self.head.revision)
            .put(self.head.status.as_str())
            .put(self.head.cursor.as_str())
            .put(self.head.activation);
        args.payload(self.head.state.clone())
            .some_digest(self.checkpoint_seal.as_ref())
            .put(self.head.updated_at);
        let args = script
            .statement(
                "INSERT INTO runs (run_id, revision, kind, definition, status, cursor, activation, schema_version, \
                 parent_id, root_id, state, state_digest, budgets, outcome, body, seal, waiting_kind, due_at, deadline, \
                 created_at, updated_at) \
                 VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            )
            .put(id)
            .put(self.head.revision);
        put_head(args, self.head, self.due_at);
        if let Some(lease) = &lease {
            script
                .statement(
                    "INSERT INTO run_leases (run_id, owner, incarnation, expires_at) VALUES (?, ?, 1, ?)",
                )
                .put(id)
                .put(lease.owner.as_str())
                .put(lease.expires_at.as_millis());
        }
        if let Some(key) = &self.key {
            script
                .statement(
                    "INSERT INTO idempotency_keys (scope, key, request, run_id, created_at) VALUES (?, ?, ?, ?, ?)",
                )
                .put(key.scope.as_str())
                .put(key.key.as_str())
                .digest(&key.request)
                .put(id)
                .put(now.as_millis());
        }
        self.beside.write(&self.run, &mut script);
        if let Err((refusal, error)) = tx.script(script).await? {
            return Err(fail::refused(refusal, &error).into());
        }
        if lease.is_none() && self.due_at.is_some_and(|due| due <= now) {
            tx.hint(Hint::Claimable(self.run));
        }
        Ok(Created::New { lease, now })
    }
}
