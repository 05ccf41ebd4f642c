//! Leases: who may write to a run (D123 to D131). A new incarnation is the fence plus one; the fence is never reset.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;

use super::fail::{self, Fail};
use super::rows::{Cells, signed, unsigned};
use super::script::{Script, args};
use super::transition::absent;
use super::writer::{Tx, Work};
use crate::envelope::SCHEMA_VERSION;
use crate::ids::RunId;
use crate::store::{Claim, Hint, Lease, LeaseRequest, Renewal, StoreError};

/// The ids as one parameter.
fn ids<'a>(runs: impl Iterator<Item = &'a RunId>) -> String {
    json!(runs.map(RunId::as_str).collect::<Vec<_>>()).to_string()
}

/// Leases on these runs, which nobody holds. In the order given.
async fn grant(tx: &mut Tx<'_>, runs: Vec<RunId>, request: LeaseRequest) -> Result<Vec<Lease>, Fail> {
    let expires_at = tx.clocks().expiry(request.ttl);
    let list = ids(runs.iter());
    let mut script = Script::new();
    script
        .statement("UPDATE run_fences SET fence = fence + 1 WHERE run_id IN (SELECT value FROM json_each(?))")
        .put(list.as_str());
    script
        .statement(
            "INSERT OR REPLACE INTO run_leases (run_id, owner, incarnation, expires_at) \
             SELECT run_id, ?, fence, ? FROM run_fences WHERE run_id IN (SELECT value FROM json_each(?)) \
             RETURNING run_id, incarnation",
        )
        .put(request.owner.as_str())
        .put(expires_at.as_millis())
        .put(list.as_str());
    let rows = match tx.script(script).await? {
        Ok(rows) => rows,
        Err((refusal, error)) => return Err(fail::refused(refusal, &error).into()),
    };
    let mut granted = BTreeMap::new();
    for row in &rows {
        let mut cells = Cells::new(row);
        granted.insert(cells.run()?, cells.count()?);
    }
    runs.into_iter()
        .map(|run| {
            let incarnation = granted
                .remove(&run)
                .ok_or_else(|| StoreError::corrupt("the run has no fence"))?;
            Ok(Lease {
                run,
                owner: request.owner.clone(),
                incarnation,
                expires_at,
            })
        })
        .collect()
}

/// A lease on one run.
pub(super) struct Acquire {
    pub(super) run: RunId,
    pub(super) request: LeaseRequest,
}

impl Work for Acquire {
    type Answer = Lease;

    async fn run(self, tx: &mut Tx<'_>) -> Result<Lease, Fail> {
        let sql = "SELECT r.quarantine, \
             EXISTS (SELECT 1 FROM run_leases l WHERE l.run_id = r.run_id AND l.expires_at > ?) \
             FROM runs r WHERE r.run_id = ?";
        let row = tx.row(sql, args![tx.now(), self.run.as_str()]).await?;
        let Some(row) = row else {
            return Err(absent(tx, &self.run).await?.into());
        };
        let mut cells = Cells::new(&row);
        let quarantine: Option<String> = cells.get()?;
        if cells.get()? {
            return Err(StoreError::Busy.into());
        }
        if let Some(why) = quarantine {
            return Err(StoreError::corrupt(why).into());
        }
        let lease = grant(tx, vec![self.run], self.request).await?.pop();
        Ok(lease.ok_or_else(|| StoreError::corrupt("the run has no fence"))?)
    }
}

/// Leases on what is due.
pub(super) struct ClaimDue(pub(super) Claim);

impl Work for ClaimDue {
    type Answer = Vec<Lease>;

    async fn run(self, tx: &mut Tx<'_>) -> Result<Vec<Lease>, Fail> {
        // A run of a newer schema is left to those who know it.
        let sql = "SELECT r.run_id FROM runs r INDEXED BY runs_due \
             WHERE r.due_at <= ? AND r.quarantine IS NULL AND r.schema_version <= ? \
             AND (r.kind, r.definition) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?)) \
             AND r.run_id NOT IN (SELECT value FROM json_each(?)) \
             AND NOT EXISTS (SELECT 1 FROM run_leases l WHERE l.run_id = r.run_id AND l.expires_at > ?) \
             ORDER BY r.due_at, r.run_id LIMIT ?";
        let Self(claim) = self;
        let args = args![
            tx.wall().as_millis(),
            SCHEMA_VERSION,
            json!(claim.definitions).to_string(),
            ids(claim.except.iter()),
            tx.now(),
            i64::from(claim.limit),
        ];
        let rows = tx.rows(sql, args).await?;
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let runs = rows
            .iter()
            .map(|row| Cells::new(row).run())
            .collect::<Result<_, _>>()?;
        grant(tx, runs, claim.lease).await
    }
}

/// Later ends for leases that live.
pub(super) struct Renew {
    pub(super) leases: Vec<Lease>,
    pub(super) ttl: Duration,
}

impl Work for Renew {
    type Answer = Vec<Renewal>;

    async fn run(self, tx: &mut Tx<'_>) -> Result<Vec<Renewal>, Fail> {
        let expires_at = tx.clocks().expiry(self.ttl);
        let handles: Vec<_> = self
            .leases
            .iter()
            .map(|lease| json!([lease.run, signed(lease.incarnation)]))
            .collect();
        let sql = "UPDATE run_leases SET expires_at = ? WHERE expires_at > ? \
             AND (run_id, incarnation) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?)) \
             RETURNING run_id, incarnation, (SELECT r.signal FROM runs r WHERE r.run_id = run_leases.run_id)";
        let args = args![expires_at.as_millis(), tx.now(), json!(handles).to_string()];
        let mut live = BTreeMap::new();
        for row in tx.rows(sql, args).await? {
            let mut cells = Cells::new(&row);
            let (run, incarnation) = (cells.run()?, cells.count()?);
            if let Some(signal) = cells.get::<Option<i64>>()? {
                live.insert(run, (incarnation, unsigned(signal)?));
            }
        }
        Ok(self
            .leases
            .iter()
            .map(|lease| match live.get(&lease.run) {
                Some((incarnation, signal)) if *incarnation == lease.incarnation => Renewal::Live {
                    expires_at,
                    signal: *signal,
                },
                Some(_) | None => Renewal::Lost,
            })
            .collect())
    }
}

/// Gives a lease back.
pub(super) struct Release(pub(super) Lease);

impl Work for Release {
    type Answer = ();

    async fn run(self, tx: &mut Tx<'_>) -> Result<(), Fail> {
        let Self(lease) = self;
        let sql = "DELETE FROM run_leases WHERE run_id = ? AND incarnation = ? AND expires_at > ? \
             RETURNING (SELECT r.due_at FROM runs r WHERE r.run_id = run_leases.run_id)";
        let args = args![lease.run.as_str(), signed(lease.incarnation), tx.now()];
        let Some(row) = tx.row(sql, args).await? else {
            return Err(StoreError::LeaseLost.into());
        };
        let due_at: Option<i64> = Cells::new(&row).get()?;
        if due_at.is_some_and(|due| due <= tx.wall().as_millis()) {
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

    async fn run(self, tx: &mut Tx<'_>) -> Result<(), Fail> {
        let Self { lease, why } = self;
        let mut script = Script::new();
        script
            .statement("DELETE FROM run_leases WHERE run_id = ? AND incarnation = ?")
            .put(lease.run.as_str())
            .put(signed(lease.incarnation));
        if let Some(why) = why {
            script
                .statement("UPDATE runs SET quarantine = ? WHERE run_id = ?")
                .put(why)
                .put(lease.run.as_str());
        }
        match tx.script(script).await? {
            Ok(_) => Ok(()),
            Err((refusal, error)) => Err(fail::refused(refusal, &error).into()),
        }
    }
}
