//! Leases: who may write to a run (D123 to D131). A new incarnation is the fence plus one; the fence is never reset.

use std::time::Duration;

use rusqlite::params;
use serde_json::json;

use super::fail::Fail;
use super::transition::absent;
use super::writer::{Tx, Work};
use crate::envelope::SCHEMA_VERSION;
use crate::ids::RunId;
use crate::store::rows::{signed, unsigned};
use crate::store::{Claim, Hint, Lease, LeaseRequest, Renewal, StoreError};

/// A lease on this run, which nobody holds.
fn grant(tx: &Tx<'_>, run: RunId, request: &LeaseRequest) -> Result<Lease, Fail> {
    let expires_at = tx.clocks().expiry(request.ttl);
    let fence = tx.row(
        "UPDATE run_fences SET fence = fence + 1 WHERE run_id = ? RETURNING fence",
        params![run.as_str()],
        |row| row.get::<_, i64>(0),
    )?;
    let fence = fence.ok_or_else(|| StoreError::corrupt("the run has no fence"))?;
    tx.execute(
        "INSERT OR REPLACE INTO run_leases (run_id, owner, incarnation, expires_at) VALUES (?, ?, ?, ?)",
        params![
            run.as_str(),
            request.owner.as_str(),
            fence,
            expires_at.as_millis()
        ],
    )?;
    Ok(Lease {
        run,
        owner: request.owner.clone(),
        incarnation: unsigned(fence)?,
        expires_at,
    })
}

/// A lease on one run.
pub(super) struct Acquire {
    pub(super) run: RunId,
    pub(super) request: LeaseRequest,
}

impl Work for Acquire {
    type Answer = Lease;

    fn run(self, tx: &mut Tx<'_>) -> Result<Lease, Fail> {
        let found = tx.row(
            "SELECT EXISTS (SELECT 1 FROM run_leases l WHERE l.run_id = r.run_id AND l.expires_at > ?), r.quarantine \
             FROM runs r WHERE r.run_id = ?",
            params![tx.now(), self.run.as_str()],
            |row| Ok((row.get::<_, bool>(0)?, row.get::<_, Option<String>>(1)?)),
        )?;
        match found {
            None => Err(absent(tx, &self.run)?.into()),
            Some((true, _)) => Err(StoreError::Busy.into()),
            Some((false, Some(why))) => Err(StoreError::corrupt(why).into()),
            Some((false, None)) => grant(tx, self.run, &self.request),
        }
    }
}

/// Leases on what is due.
pub(super) struct ClaimDue(pub(super) Claim);

impl Work for ClaimDue {
    type Answer = Vec<Lease>;

    fn run(self, tx: &mut Tx<'_>) -> Result<Vec<Lease>, Fail> {
        let Self(claim) = self;
        let except: Vec<_> = claim.except.iter().map(RunId::as_str).collect();
        // A run of a newer schema is left to those who know it.
        let runs = tx.rows(
            "SELECT r.run_id FROM runs r INDEXED BY runs_due \
             WHERE r.due_at <= ? AND r.quarantine IS NULL AND r.schema_version <= ? \
             AND (r.kind, r.definition) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?)) \
             AND r.run_id NOT IN (SELECT value FROM json_each(?)) \
             AND NOT EXISTS (SELECT 1 FROM run_leases l WHERE l.run_id = r.run_id AND l.expires_at > ?) \
             ORDER BY r.due_at, r.run_id LIMIT ?",
            params![
                tx.wall().as_millis(),
                SCHEMA_VERSION,
                json!(claim.definitions).to_string(),
                json!(except).to_string(),
                tx.now(),
                claim.limit,
            ],
            |row| row.get::<_, String>(0),
        )?;
        runs.into_iter()
            .map(|run| {
                let run = RunId::new(&run).map_err(|error| StoreError::corrupt(error.to_string()))?;
                grant(tx, run, &claim.lease)
            })
            .collect()
    }
}

/// Later ends for leases that live.
pub(super) struct Renew {
    pub(super) leases: Vec<Lease>,
    pub(super) ttl: Duration,
}

impl Work for Renew {
    type Answer = Vec<Renewal>;

    fn run(self, tx: &mut Tx<'_>) -> Result<Vec<Renewal>, Fail> {
        let (now, expires_at) = (tx.now(), tx.clocks().expiry(self.ttl));
        let mut renewals = Vec::with_capacity(self.leases.len());
        for lease in &self.leases {
            let id = lease.run.as_str();
            let live = tx.execute(
                "UPDATE run_leases SET expires_at = ? WHERE run_id = ? AND incarnation = ? AND expires_at > ?",
                params![expires_at.as_millis(), id, signed(lease.incarnation), now],
            )?;
            let signal = tx.row("SELECT signal FROM runs WHERE run_id = ?", params![id], |row| {
                row.get::<_, i64>(0)
            })?;
            renewals.push(match signal {
                Some(signal) if live == 1 => Renewal::Live {
                    expires_at,
                    signal: unsigned(signal)?,
                },
                Some(_) | None => Renewal::Lost,
            });
        }
        Ok(renewals)
    }
}

/// Gives a lease back.
pub(super) struct Release(pub(super) Lease);

impl Work for Release {
    type Answer = ();

    fn run(self, tx: &mut Tx<'_>) -> Result<(), Fail> {
        let Self(lease) = self;
        let id = lease.run.as_str();
        let given = tx.execute(
            "DELETE FROM run_leases WHERE run_id = ? AND incarnation = ? AND expires_at > ?",
            params![id, signed(lease.incarnation), tx.now()],
        )?;
        if given == 0 {
            return Err(StoreError::LeaseLost.into());
        }
        let due_at = tx.row("SELECT due_at FROM runs WHERE run_id = ?", params![id], |row| {
            row.get::<_, Option<i64>>(0)
        })?;
        if due_at.flatten().is_some_and(|due| due <= tx.wall().as_millis()) {
            tx.hint(Hint::Claimable(lease.run));
        }
        Ok(())
    }
}

/// Gives back a lease on a run that turned out to be unreadable, and sets the run aside when there is a reason.
pub(super) struct Disown {
    pub(super) lease: Lease,
    pub(super) why: Option<String>,
}

impl Work for Disown {
    type Answer = ();

    fn run(self, tx: &mut Tx<'_>) -> Result<(), Fail> {
        let Self { lease, why } = self;
        let id = lease.run.as_str();
        tx.execute(
            "DELETE FROM run_leases WHERE run_id = ? AND incarnation = ?",
            params![id, signed(lease.incarnation)],
        )?;
        if let Some(why) = why {
            tx.execute(
                "UPDATE runs SET quarantine = ? WHERE run_id = ?",
                params![why, id],
            )?;
        }
        Ok(())
    }
}
