//! Leases: who may write to a run (D123 to D131).

use std::time::Duration;

use super::tables::{LeaseRow, Now, Tables, whole_millis};
use crate::ids::RunId;
use crate::store::{Acquired, Claim, Claimed, Hint, Lease, LeaseRequest, Renewal, StoreError};

impl Tables {
    /// The next incarnation, on a run that nobody holds.
    pub(super) fn grant(&mut self, now: Now, run: &RunId, request: &LeaseRequest) -> Lease {
        let fence = self.fences.entry(run.clone()).or_insert(0);
        *fence += 1;
        let ttl = whole_millis(request.ttl);
        let row = LeaseRow {
            owner: request.owner.clone(),
            incarnation: *fence,
            until: now.monotonic.saturating_add(ttl),
            expires_at: now.wall.plus(ttl),
        };
        let lease = row.handle(run);
        self.leases.insert(run.clone(), row);
        lease
    }

    pub(super) fn acquire(
        &mut self,
        now: Now,
        run: &RunId,
        request: &LeaseRequest,
    ) -> Result<Acquired, StoreError> {
        let rows = self.rows(run)?;
        if self.live(now, run).is_some() {
            return Err(StoreError::Busy);
        }
        if let Some(why) = &rows.inbox.quarantine {
            return Err(StoreError::corrupt(why.clone()));
        }
        match self.load(now, run) {
            Ok(mut loaded) => {
                let lease = self.grant(now, run, request);
                loaded.lease = Some(lease.clone());
                Ok(Acquired { lease, loaded })
            }
            Err(StoreError::Corrupt { what }) => {
                self.quarantine(run, what.clone())?;
                Err(StoreError::Corrupt { what })
            }
            Err(other) => Err(other),
        }
    }

    /// A run that is corrupt is set aside and named; one of a newer schema is left to those who know it.
    pub(super) fn claim(&mut self, now: Now, claim: &Claim) -> Claimed {
        let mut due: Vec<_> = self
            .runs
            .iter()
            .filter(|(run, rows)| {
                rows.inbox.quarantine.is_none()
                    && !claim.except.contains(run)
                    && claim
                        .definitions
                        .iter()
                        .any(|(kind, name)| *kind == rows.head.kind && *name == rows.head.definition)
                    && self.live(now, run).is_none()
            })
            .filter_map(|(run, rows)| Some((rows.due_at.filter(|due| *due <= now.wall)?, run.clone())))
            .collect();
        due.sort();
        let mut claimed = Claimed::default();
        for (_, run) in due {
            if claimed.runs.len() >= claim.limit as usize {
                break;
            }
            match self.acquire(now, &run, &claim.lease) {
                Ok(acquired) => claimed.runs.push(acquired),
                Err(StoreError::Corrupt { what }) => claimed.quarantined.push((run, what)),
                Err(_) => {}
            }
        }
        claimed
    }

    pub(super) fn renew(&mut self, now: Now, lease: &Lease, ttl: Duration) -> Renewal {
        if !self.holds(now, lease) {
            return Renewal::Lost;
        }
        let ttl = whole_millis(ttl);
        match (self.leases.get_mut(&lease.run), self.runs.get(&lease.run)) {
            (Some(row), Some(rows)) => {
                row.until = now.monotonic.saturating_add(ttl);
                row.expires_at = now.wall.plus(ttl);
                Renewal::Live {
                    expires_at: row.expires_at,
                    signal: rows.inbox.signal,
                }
            }
            (None, _) | (_, None) => Renewal::Lost,
        }
    }

    pub(super) fn release(
        &mut self,
        now: Now,
        lease: &Lease,
        hints: &mut Vec<Hint>,
    ) -> Result<(), StoreError> {
        if !self.holds(now, lease) {
            return Err(StoreError::LeaseLost);
        }
        self.leases.remove(&lease.run);
        self.hint(now, &lease.run, hints);
        Ok(())
    }
}
