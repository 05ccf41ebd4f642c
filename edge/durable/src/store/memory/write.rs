//! What changes a run. Everything that can refuse is asked before the first row is written, so a refusal leaves no trace.

use std::collections::{BTreeMap, BTreeSet};

use super::tables::{KeyRow, Now, RunRows, Tables};
use crate::envelope::{ActivityRow, CheckpointRow, HeadRow, WaitRow, encode_step};
use crate::ids::{Revision, RunId};
use crate::record::{DecisionRecord, EventRecord, Inbox, WaitRecord};
use crate::store::{
    Authority, Commit, Committed, Conflict, Create, Created, Guard, Hint, Post, StoreError, check,
};

impl Tables {
    pub(super) fn create(
        &mut self,
        now: Now,
        create: &Create,
        hints: &mut Vec<Hint>,
    ) -> Result<Created, StoreError> {
        check::create(create)?;
        let id = &create.head.id;
        if let Some(key) = &create.idempotency
            && let Some(created) = self.keyed(key)
        {
            return Ok(created);
        }
        let key = create.idempotency.as_ref().map(|key| {
            let at = (key.scope.clone(), key.key.clone());
            (at, key.request)
        });
        if self.runs.contains_key(id) {
            return Ok(Created::Exists);
        }
        if self.fences.contains_key(id) {
            return Err(StoreError::Deleted);
        }
        let head = HeadRow::seal(&create.head, &create.state, Revision::FIRST)?;
        let checkpoint = CheckpointRow::of(&head);
        let mut rows = RunRows {
            checkpoints: BTreeMap::from([(checkpoint.revision, checkpoint)]),
            head,
            due_at: create.due_at,
            inbox: Inbox::default(),
            activities: BTreeMap::new(),
            waits: BTreeMap::new(),
            steps: BTreeMap::new(),
            decisions: BTreeMap::new(),
            events: BTreeMap::new(),
            blobs: BTreeMap::new(),
        };
        rows.check_events(&create.events)?;
        rows.keep_blob(&create.state);
        rows.append_events(&create.events);

        self.fences.insert(id.clone(), 0);
        self.runs.insert(id.clone(), rows);
        if let Some((at, request)) = key {
            let row = KeyRow {
                request,
                run: id.clone(),
                created_at: now.wall,
            };
            self.keys.insert(at, row);
        }
        let lease = create.lease.as_ref().map(|request| self.grant(now, id, request));
        self.hint(now, id, hints);
        Ok(Created::New { lease, now: now.wall })
    }

    pub(super) fn commit(
        &mut self,
        now: Now,
        commit: &Commit,
        hints: &mut Vec<Hint>,
    ) -> Result<Committed, StoreError> {
        check::commit(commit)?;
        let id = &commit.head.id;
        let found = self.guard(now, id, &commit.guard)?;
        let revision = found.next().map_err(|_| StoreError::RevisionsExhausted)?;
        let head = HeadRow::seal(&commit.head, &commit.state, revision)?;
        let checkpoint = CheckpointRow::of(&head);
        let activities = commit
            .activities
            .iter()
            .map(ActivityRow::seal)
            .collect::<Result<Vec<_>, _>>()?;
        let waits = seal_waits(&commit.waits)?;
        let steps = commit
            .steps
            .iter()
            .map(|step| Ok((step.activation, encode_step(step)?)))
            .collect::<Result<Vec<_>, StoreError>>()?;
        let rows = self.rows_mut(id)?;
        rows.check_decisions(&commit.decisions)?;
        rows.check_events(&commit.events)?;

        rows.checkpoints.insert(checkpoint.revision, checkpoint);
        rows.head = head;
        rows.due_at = commit.due_at;
        rows.keep_blob(&commit.state);
        for (record, row) in commit.activities.iter().zip(activities) {
            rows.keep_blob(&record.input);
            if let Some(output) = &record.output {
                rows.keep_blob(output);
            }
            rows.activities
                .insert((row.activation, row.activity_id.clone()), row);
        }
        rows.put_waits(&commit.waits, waits);
        rows.steps.extend(steps);
        rows.append_decisions(&commit.decisions);
        rows.append_events(&commit.events);
        rows.inbox.signal += u64::from(commit.settles());
        let signal = rows.inbox.signal;
        if commit.release {
            self.leases.remove(id);
        }
        self.hint(now, id, hints);
        Ok(Committed {
            revision,
            signal,
            now: now.wall,
        })
    }

    /// Head first, then lease. The revision that was found.
    fn guard(&self, now: Now, id: &RunId, guard: &Guard) -> Result<Revision, StoreError> {
        let rows = self.rows(id)?;
        let found = u64::try_from(rows.head.revision)
            .ok()
            .and_then(|n| Revision::new(n).ok())
            .ok_or_else(|| StoreError::corrupt("head: revision"))?;
        if found != guard.revision {
            return Err(StoreError::Conflict(Conflict::Revision(found)));
        }
        match &guard.authority {
            Authority::Lease(lease) if !self.holds(now, lease) => return Err(StoreError::LeaseLost),
            Authority::Idle if self.live(now, id).is_some() => return Err(StoreError::Busy),
            Authority::Lease(_) | Authority::Idle => {}
        }
        match guard.signal {
            Some(seen) if seen != rows.inbox.signal => {
                Err(StoreError::Conflict(Conflict::Signal(rows.inbox.signal)))
            }
            Some(_) | None => Ok(found),
        }
    }

    pub(super) fn post(&mut self, now: Now, post: &Post, hints: &mut Vec<Hint>) -> Result<u64, StoreError> {
        check::post(post)?;
        let waits = seal_waits(&post.waits)?;
        let rows = self.rows_mut(&post.run)?;
        if rows.inbox.signal != post.signal {
            return Err(StoreError::Conflict(Conflict::Signal(rows.inbox.signal)));
        }
        rows.check_decisions(&post.decisions)?;

        rows.put_waits(&post.waits, waits);
        rows.append_decisions(&post.decisions);
        if rows.inbox.cancel.is_none() {
            rows.inbox.cancel.clone_from(&post.cancel);
        }
        rows.inbox.signal += 1;
        let signal = rows.inbox.signal;
        if post.wake && !rows.is_terminal() {
            rows.due_at = Some(now.wall);
        }
        hints.push(Hint::Posted(post.run.clone()));
        self.hint(now, &post.run, hints);
        Ok(signal)
    }
}

fn seal_waits(waits: &[WaitRecord]) -> Result<Vec<WaitRow>, StoreError> {
    waits.iter().map(WaitRow::seal).collect()
}

impl RunRows {
    /// # Errors
    /// `duplicate` for an id that is taken in its scope.
    fn check_decisions(&self, decisions: &[DecisionRecord]) -> Result<(), StoreError> {
        let mut new = BTreeSet::new();
        for decision in decisions {
            let key = (decision.scope.clone(), decision.id.as_str().to_owned());
            if self.decisions.contains_key(&key) || !new.insert(key) {
                return Err(StoreError::Duplicate);
            }
        }
        Ok(())
    }

    /// # Errors
    /// `duplicate` for a number that is taken and for a second end of one life; `corrupt` for a number that leaves a gap.
    fn check_events(&self, events: &[EventRecord]) -> Result<(), StoreError> {
        let last = self.events.last_key_value().map_or(0, |(seq, _)| *seq);
        match events.first() {
            Some(first) if first.seq <= last => return Err(StoreError::Duplicate),
            Some(first) if first.seq != last + 1 => {
                return Err(StoreError::corrupt(
                    "not written: events are missing before these",
                ));
            }
            Some(_) | None => {}
        }
        if !events.iter().any(|event| event.terminal) {
            return Ok(());
        }
        let mut ended: BTreeSet<u32> = self
            .events
            .values()
            .filter(|event| event.terminal)
            .map(|event| event.life)
            .collect();
        if events
            .iter()
            .any(|event| event.terminal && !ended.insert(event.life))
        {
            return Err(StoreError::Duplicate);
        }
        Ok(())
    }

    fn append_events(&mut self, events: &[EventRecord]) {
        self.events
            .extend(events.iter().map(|event| (event.seq, event.clone())));
    }

    fn append_decisions(&mut self, decisions: &[DecisionRecord]) {
        self.decisions.extend(decisions.iter().map(|decision| {
            let key = (decision.scope.clone(), decision.id.as_str().to_owned());
            (key, decision.clone())
        }));
    }

    fn put_waits(&mut self, records: &[WaitRecord], rows: Vec<WaitRow>) {
        for (record, row) in records.iter().zip(rows) {
            self.keep_blob(&record.subject);
            if let Some(payload) = record.settled.as_ref().and_then(|s| s.payload.as_ref()) {
                self.keep_blob(payload);
            }
            self.waits.retain(|(_, id), _| *id != row.wait_id);
            self.waits.insert((row.armed_at, row.wait_id.clone()), row);
        }
    }
}
