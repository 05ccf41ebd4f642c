//! Creations: head, first checkpoint, events, key and lease, all or nothing (D25). Of two with one key the writer takes one
//! first; the other one is answered with it, when both are durable.

use rusqlite::params;

use super::beside::Beside;
use super::fail::Fail;
use super::readers::OF_RUN;
use super::transition::write_checkpoint;
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

    fn write_head(&self, tx: &Tx<'_>) -> Result<(), Fail> {
        let head = &self.head;
        tx.execute(
            "INSERT INTO runs (run_id, kind, definition, status, cursor, activation, revision, schema_version, \
             parent_id, root_id, state, state_digest, budgets, outcome, body, seal, waiting_kind, due_at, deadline, \
             created_at, updated_at, owner) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            params![
                head.run_id,
                head.kind,
                head.definition,
                head.status,
                head.cursor,
                head.activation,
                head.revision,
                head.schema_version,
                head.parent_id,
                head.root_id,
                head.state.inline.as_deref(),
                head.state.digest,
                &*head.budgets,
                head.outcome.as_deref(),
                &*head.body,
                head.seal,
                head.waiting_kind,
                self.due_at.map(Timestamp::as_millis),
                head.deadline,
                head.created_at,
                head.updated_at,
                head.owner,
            ],
        )?;
        Ok(())
    }
}

/// What a key was used for before.
fn replay(tx: &Tx<'_>, key: &IdempotencyKey) -> Result<Option<Created>, Fail> {
    let found = tx.row(
        "SELECT request, run_id FROM idempotency_keys WHERE scope = ? AND key = ?",
        params![key.scope, key.key],
        |row| Ok((row.get::<_, Vec<u8>>(0)?, row.get::<_, String>(1)?)),
    )?;
    let Some((request, run)) = found else {
        return Ok(None);
    };
    let run = RunId::new(&run).map_err(|error| StoreError::corrupt(error.to_string()))?;
    Ok(Some(key.answers(&request, run)))
}

impl Work for Creation {
    type Answer = Created;

    fn run(self, tx: &mut Tx<'_>) -> Result<Created, Fail> {
        let id = self.run.as_str();
        if let Some(key) = &self.key
            && let Some(created) = replay(tx, key)?
        {
            return Ok(created);
        }
        let taken = tx.row(OF_RUN, params![id], |row| row.get::<_, bool>(0))?;
        match taken {
            Some(true) => return Ok(Created::Exists),
            Some(false) => return Err(StoreError::Deleted.into()),
            None => {}
        }

        let now = tx.wall();
        let lease = self.lease.as_ref().map(|request| Lease {
            run: self.run.clone(),
            owner: request.owner.clone(),
            incarnation: 1,
            expires_at: tx.clocks().expiry(request.ttl),
        });
        tx.execute(
            "INSERT INTO run_fences (run_id, fence) VALUES (?, ?)",
            params![id, i64::from(lease.is_some())],
        )?;
        self.write_head(tx)?;
        write_checkpoint(tx, &self.head, self.checkpoint_seal.as_ref())?;
        if let Some(lease) = &lease {
            tx.execute(
                "INSERT INTO run_leases (run_id, owner, incarnation, expires_at) VALUES (?, ?, 1, ?)",
                params![id, lease.owner.as_str(), lease.expires_at.as_millis()],
            )?;
        }
        if let Some(key) = &self.key {
            tx.execute(
                "INSERT INTO idempotency_keys (scope, key, request, run_id, created_at) VALUES (?, ?, ?, ?, ?)",
                params![key.scope, key.key, key.request, id, now.as_millis()],
            )?;
        }
        self.beside.write(tx, &self.run)?;
        if lease.is_none() && self.due_at.is_some_and(|due| due <= now) {
            tx.hint(Hint::Claimable(self.run));
        }
        Ok(Created::New { lease, now })
    }
}
