//! Pages, lists and single rows.

use super::tables::{Now, RunRows, Tables};
use crate::envelope::{ActivityRow, WaitRow, decode_step};
use crate::ids::{ActivityId, CorrelationId, DecisionId, Revision, RunId, WaitId};
use crate::record::{
    ActivityRecord, CheckpointRecord, DecisionRecord, EventRecord, Scope, Status, StepRecord, WaitRecord,
    WaitStatus, WaitingKind,
};
use crate::store::{Created, Due, IdempotencyKey, Journal, Listed, RunFilter, StoreError};
use crate::time::Timestamp;

impl RunRows {
    pub(super) fn open_activity(&self, run: &RunId, row: &ActivityRow) -> Result<ActivityRecord, StoreError> {
        let input = self.blob(&row.input);
        let output = row.output.as_ref().and_then(|output| self.blob(output));
        row.clone().open(run.as_str(), input, output)
    }

    pub(super) fn open_wait(&self, run: &RunId, row: &WaitRow) -> Result<WaitRecord, StoreError> {
        let subject = self.blob(&row.subject);
        let delivered = row.delivered.as_ref().and_then(|payload| self.blob(payload));
        row.clone().open(run.as_str(), subject, delivered)
    }
}

impl Tables {
    pub(super) fn journal(&self, run: &RunId, activation: u64) -> Result<Journal, StoreError> {
        let rows = self.rows(run)?;
        let mut journal = Journal::default();
        let now = i64::try_from(activation).unwrap_or(i64::MAX);
        for row in rows.activities.values() {
            let open = !matches!(row.state.as_str(), "completed" | "failed");
            if open || row.activation == now {
                journal.activities.push(rows.open_activity(run, row)?);
            }
        }
        for row in rows.waits.values() {
            if row.status == WaitStatus::Armed.as_str() || row.activation == now {
                journal.waits.push(rows.open_wait(run, row)?);
            }
        }
        Ok(journal)
    }

    pub(super) fn activity(
        &self,
        run: &RunId,
        id: &ActivityId,
    ) -> Result<Option<ActivityRecord>, StoreError> {
        let rows = self.rows(run)?;
        rows.activities
            .values()
            .find(|row| row.activity_id == id.as_str())
            .map(|row| rows.open_activity(run, row))
            .transpose()
    }

    pub(super) fn activities(
        &self,
        run: &RunId,
        after: Option<&ActivityId>,
        limit: u32,
    ) -> Result<Vec<ActivityRecord>, StoreError> {
        let rows = self.rows(run)?;
        rows.activities
            .values()
            .skip_while(|row| after.is_some_and(|id| row.activity_id != id.as_str()))
            .skip(usize::from(after.is_some()))
            .take(limit as usize)
            .map(|row| rows.open_activity(run, row))
            .collect()
    }

    pub(super) fn wait(&self, run: &RunId, id: &WaitId) -> Result<Option<WaitRecord>, StoreError> {
        let rows = self.rows(run)?;
        rows.waits
            .values()
            .find(|row| row.wait_id == id.as_str())
            .map(|row| rows.open_wait(run, row))
            .transpose()
    }

    pub(super) fn keyed(&self, key: &IdempotencyKey) -> Option<Created> {
        let row = self.keys.get(&(key.scope.clone(), key.key.clone()))?;
        Some(key.answers(&row.request, row.run.clone()))
    }

    pub(super) fn waits(&self, run: &RunId) -> Result<Vec<WaitRecord>, StoreError> {
        let rows = self.rows(run)?;
        rows.waits.values().map(|row| rows.open_wait(run, row)).collect()
    }

    /// A corrupt row does not hide the others; whoever loads its run finds it.
    pub(super) fn armed(&self, correlation: &CorrelationId, limit: u32) -> Vec<WaitRecord> {
        let mut armed: Vec<WaitRecord> = self
            .runs
            .iter()
            .flat_map(|(run, rows)| rows.waits.values().map(move |row| (run, rows, row)))
            .filter(|(_, _, row)| {
                row.correlation_id == correlation.as_str() && row.status == WaitStatus::Armed.as_str()
            })
            .filter_map(|(run, rows, row)| rows.open_wait(run, row).ok())
            .collect();
        armed.sort_by(|a, b| (a.armed_at, &a.run, &a.id).cmp(&(b.armed_at, &b.run, &b.id)));
        armed.truncate(limit as usize);
        armed
    }

    pub(super) fn addressed(
        &self,
        correlation: &CorrelationId,
        id: &DecisionId,
        limit: u32,
    ) -> Vec<WaitRecord> {
        let told = |rows: &RunRows, wait: &str| {
            let wait = WaitId::new(wait).ok();
            wait.is_some_and(|wait| {
                rows.decisions
                    .contains_key(&(Scope::Wait(wait), id.as_str().to_owned()))
            })
        };
        let mut found: Vec<WaitRecord> = self
            .runs
            .iter()
            .flat_map(|(run, rows)| rows.waits.values().map(move |row| (run, rows, row)))
            .filter(|(_, rows, row)| row.correlation_id == correlation.as_str() && told(rows, &row.wait_id))
            .filter_map(|(run, rows, row)| rows.open_wait(run, row).ok())
            .collect();
        found.sort_by(|a, b| (a.armed_at, &a.run, &a.id).cmp(&(b.armed_at, &b.run, &b.id)));
        found.truncate(limit as usize);
        found
    }

    pub(super) fn decision(&self, run: &RunId, scope: &Scope, id: &DecisionId) -> Option<DecisionRecord> {
        let key = (scope.clone(), id.as_str().to_owned());
        self.runs.get(run)?.decisions.get(&key).cloned()
    }

    pub(super) fn decisions(&self, run: &RunId, scope: &Scope) -> Vec<DecisionRecord> {
        let mut decisions: Vec<DecisionRecord> = self
            .runs
            .get(run)
            .into_iter()
            .flat_map(|rows| rows.decisions.values())
            .filter(|decision| decision.scope == *scope)
            .cloned()
            .collect();
        decisions.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        decisions
    }

    pub(super) fn steps(&self, run: &RunId, after: u64, limit: u32) -> Result<Vec<StepRecord>, StoreError> {
        self.rows(run)?
            .steps
            .range(after.saturating_add(1)..)
            .take(limit as usize)
            .map(|(_, step)| decode_step(step))
            .collect()
    }

    pub(super) fn events(&self, run: &RunId, after: u64, limit: u32) -> Vec<EventRecord> {
        self.runs
            .get(run)
            .into_iter()
            .flat_map(|rows| rows.events.range(after.saturating_add(1)..))
            .take(limit as usize)
            .map(|(_, event)| event.clone())
            .collect()
    }

    pub(super) fn history(
        &self,
        run: &RunId,
        before: Option<Revision>,
        limit: u32,
    ) -> Result<Vec<CheckpointRecord>, StoreError> {
        let before = before.map_or(i64::MAX, |r| i64::try_from(r.get()).unwrap_or(i64::MAX));
        self.rows(run)?
            .checkpoints
            .range(..before)
            .rev()
            .take(limit as usize)
            .map(|(_, row)| row.open(run.as_str()))
            .collect()
    }

    pub(super) fn checkpoint(&self, run: &RunId, revision: Revision) -> Result<CheckpointRecord, StoreError> {
        let rows = self.rows(run)?;
        let row = i64::try_from(revision.get())
            .ok()
            .and_then(|revision| rows.checkpoints.get(&revision))
            .ok_or(StoreError::CheckpointUnavailable)?;
        let mut record = row.open(run.as_str())?;
        if row.pruned {
            return Err(StoreError::CheckpointUnavailable);
        }
        let state = row
            .state
            .clone()
            .open("checkpoint state", rows.blob(&row.state))?;
        record.state = Some(state);
        Ok(record)
    }

    pub(super) fn list(&self, filter: &RunFilter) -> Result<Vec<Listed>, StoreError> {
        let mut found: Vec<(Timestamp, &RunId, &RunRows)> = Vec::new();
        for (run, rows) in &self.runs {
            let created_at = Timestamp::from_millis(rows.head.created_at).unwrap_or(Timestamp::MIN);
            let after = filter
                .after
                .as_ref()
                .is_none_or(|(time, id)| (*time, id) < (created_at, run));
            if after && rows.matches(filter) {
                found.push((created_at, run, rows));
            }
        }
        found.sort_by(|a, b| (a.0, a.1).cmp(&(b.0, b.1)));
        Ok(found
            .into_iter()
            .take(filter.limit as usize)
            .map(|(created_at, run, rows)| rows.listed(run, created_at))
            .collect())
    }

    pub(super) fn due(
        &self,
        now: Now,
        until: Timestamp,
        after: Option<&(Timestamp, RunId)>,
        limit: u32,
    ) -> Result<Vec<Due>, StoreError> {
        let mut due: Vec<(Timestamp, &RunId, &RunRows)> = self
            .runs
            .iter()
            .filter_map(|(run, rows)| Some((rows.due_at?, run, rows)))
            .filter(|(due_at, run, rows)| {
                rows.inbox.quarantine.is_none()
                    && *due_at <= until
                    && after.is_none_or(|(time, id)| (*time, id) < (*due_at, *run))
            })
            .collect();
        due.sort_by(|a, b| (a.0, a.1).cmp(&(b.0, b.1)));
        due.into_iter()
            .take(limit as usize)
            .map(|(due_at, run, rows)| {
                Ok(Due {
                    run: run.clone(),
                    status: Status::parse(&rows.head.status)
                        .ok_or_else(|| StoreError::corrupt("status: not a word of the list"))?,
                    waiting_kind: rows.head.waiting_kind.as_deref().and_then(WaitingKind::parse),
                    due_at,
                    leased: self.live(now, run).is_some(),
                })
            })
            .collect()
    }
}

impl RunRows {
    fn matches(&self, filter: &RunFilter) -> bool {
        filter
            .status
            .is_none_or(|status| self.head.status == status.as_str())
            && filter
                .definition
                .as_ref()
                .is_none_or(|(kind, name)| self.head.kind == *kind && self.head.definition == *name)
            && filter
                .parent
                .as_ref()
                .is_none_or(|parent| self.head.parent_id.as_deref() == Some(parent.as_str()))
            && filter
                .owner
                .as_ref()
                .is_none_or(|owner| self.head.owner.as_ref() == Some(owner))
            && filter
                .waiting_kind
                .is_none_or(|kind| self.head.waiting_kind.as_deref() == Some(kind.as_str()))
            && filter
                .due_before
                .is_none_or(|before| self.due_at.is_some_and(|due_at| due_at < before))
    }

    fn listed(&self, run: &RunId, created_at: Timestamp) -> Listed {
        if let Some(why) = &self.inbox.quarantine {
            return Listed::Corrupt {
                run: run.clone(),
                created_at,
                why: why.clone(),
            };
        }
        match self.head.open(run.as_str()) {
            Ok((head, _)) => Listed::Run {
                head: Box::new(head),
                inbox: self.inbox.clone(),
            },
            Err(error) => Listed::Corrupt {
                run: run.clone(),
                created_at,
                why: error.to_string(),
            },
        }
    }
}
