//! Calls of the activation: what each may do, and what became of it.

use bytes::Bytes;
use tokio::sync::oneshot;

use super::{Asked, Begin, End, Inner, Ledger, ParkedOn, conflict};
use crate::failure::{Failure, FailureKind};
use crate::ids::{ActivityId, Key};
use crate::machine::activity::{self, Admission, After, Context, Refused, Request, Settlement};
use crate::payload::Payload;
use crate::record::{ActivityRecord, ActivityState, Effect, Exhausted};
use crate::runner::ctx::within_limit;
use crate::time::Timestamp;

impl Ledger {
    /// Asks for one call. What it may do is decided by the activity machine alone.
    pub(crate) fn begin(&self, request: Request, now: Timestamp) -> Begin {
        let id = ActivityId::derive(&request.run, &request.node, request.activation, &request.key);
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        if inner.in_flight.contains_key(&id) {
            return Begin::Failed(conflict("a call with this key is under way"), None);
        }
        let context = self.context(now);
        let admission = match activity::admit(inner.activities.get(&id), &request, &context) {
            Ok(admission) => admission,
            Err(Refused::Conflict { what }) => {
                return Begin::Failed(conflict(format_args!("{what} differs")), None);
            }
            Err(Refused::RecoveryExhausted { used, limit }) => {
                let failure = Failure::new(FailureKind::Unavailable, "its worker was lost too often");
                let exhausted = Exhausted {
                    budget: "recovery_attempts".to_owned(),
                    used: used.into(),
                    limit: limit.into(),
                    decimals: 0,
                };
                return Begin::Failed(failure, Some(exhausted));
            }
            Err(refused @ Refused::InFlight) => return Begin::Failed(conflict(refused), None),
            Err(Refused::InvalidLabel(why)) => {
                return Begin::Failed(Failure::new(FailureKind::Configuration, why.to_string()), None);
            }
            Err(Refused::InvalidPolicy { why }) => {
                return Begin::Failed(Failure::new(FailureKind::Configuration, why.to_string()), None);
            }
        };
        match admission {
            Admission::Replay => match inner.activities.get(&id).and_then(|a| a.output.as_ref()) {
                Some(output) => Begin::Replay(output.bytes().clone()),
                None => Begin::Failed(conflict("it has no output"), None),
            },
            Admission::Failed => match inner.activities.get(&id) {
                Some(record) => {
                    let failure = record
                        .error
                        .clone()
                        .unwrap_or_else(|| Failure::new(FailureKind::Internal, "no error is recorded"));
                    Begin::Failed(failure, activity::exhausted(record))
                }
                None => Begin::Failed(conflict("it is gone"), None),
            },
            Admission::NotBefore(at) => {
                inner.parked.insert(ParkedOn::Retry(id), Some(at));
                Begin::Never
            }
            Admission::Unknown => match inner.activities.get(&id) {
                Some(record) => Begin::Unknown(Box::new(record.clone())),
                None => Begin::Never,
            },
            Admission::Dispatch { .. } if inner.stopping => Begin::Never,
            Admission::Dispatch { recovery } => {
                let bytes = request.input.bytes().len();
                if let Err(failure) = within_limit("the input", bytes, self.entry.max_payload) {
                    return Begin::Failed(failure, None);
                }
                let effect = request.effect;
                let asked = Asked {
                    before: inner.activities.get(&id).cloned(),
                    dirty: inner.dirty_activities.contains(&id),
                };
                let record = inner.activities.entry(id.clone()).or_insert_with(|| {
                    if effect == Effect::ReadOnly {
                        inner.unstored.insert(id.clone());
                    }
                    activity::prepare(request)
                });
                activity::start(record, &context, recovery);
                let attempt = record.attempts.last().map_or(1, |a| a.n);
                inner.in_flight.insert(id.clone(), effect);
                // A read has no intent, but what came before it is stored before it is dispatched: the answer that a
                // node acts on is never asked for anew.
                let behind = if !inner.unstored.contains(&id) {
                    inner.dirty_activities.insert(id.clone());
                    inner.asked.insert(id.clone(), asked);
                    Some(&mut inner.confirms)
                } else if inner.dirty_outcome {
                    Some(&mut inner.confirms)
                } else if inner.outcome_under_way {
                    Some(&mut inner.behind)
                } else {
                    None
                };
                let confirmed = behind.map(|senders| {
                    let (sender, receiver) = oneshot::channel();
                    senders.push((id.clone(), sender));
                    receiver
                });
                Begin::Dispatch {
                    id,
                    attempt,
                    confirmed,
                }
            }
        }
    }

    /// Records how a call ended.
    pub(crate) fn finish(&self, id: &ActivityId, settlement: Settlement, now: Timestamp, jitter: f64) -> End {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        inner.in_flight.remove(id);
        inner.unstored.remove(id);
        let Some(record) = inner.activities.get_mut(id) else {
            return End::Never;
        };
        let after = activity::settle(record, settlement, now, jitter);
        inner.dirty_activities.insert(id.clone());
        inner.dirty_outcome = true;
        match after {
            After::Completed => match &record.output {
                Some(output) => End::Completed(output.bytes().clone()),
                None => End::Never,
            },
            After::Failed { exhausted } => {
                let failure = record
                    .error
                    .clone()
                    .unwrap_or_else(|| Failure::new(FailureKind::Internal, "no error is recorded"));
                End::Failed(failure, exhausted)
            }
            After::Retry(at) => {
                inner.parked.insert(ParkedOn::Retry(id.clone()), Some(at));
                End::Never
            }
            After::Unknown => End::Unknown,
        }
    }

    /// Whether a call of this key was ever asked for in this activation.
    pub(crate) fn knows(&self, key: &Key) -> bool {
        let (run, node) = (&self.entry.run, &self.entry.node);
        let id = ActivityId::derive(run, node, self.entry.activation, key);
        self.inner.lock().activities.contains_key(&id)
    }

    /// A reconciliation begins or ends.
    pub(crate) fn probing(&self, begins: bool) {
        let mut inner = self.inner.lock();
        inner.probing = if begins {
            inner.probing + 1
        } else {
            inner.probing.saturating_sub(1)
        };
    }

    /// Attempts of a lost worker were marked when the journal was opened; the next commit stores that.
    pub(crate) fn touch_recovered(&self) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        for (id, record) in &inner.activities {
            if record.state == ActivityState::Unknown {
                inner.dirty_activities.insert(id.clone());
            }
        }
    }

    /// A reconciliation's answer for an unknown call: the output when there is evidence, else the call waits for an operator.
    pub(crate) fn reconciled(
        &self,
        id: &ActivityId,
        found: Option<Payload>,
        now: Timestamp,
    ) -> Option<Bytes> {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        let record = inner.activities.get_mut(id)?;
        if activity::reconcile(record, found, now) {
            inner.dirty_activities.insert(id.clone());
            inner.dirty_outcome = true;
            return record.output.as_ref().map(|output| output.bytes().clone());
        }
        inner.parked.insert(ParkedOn::Unknown(id.clone()), None);
        None
    }

    /// Calls whose future the node dropped: they were cut off, and what they did is not known. Read-only ones are forgotten.
    pub(crate) fn abandon_in_flight(&self, now: Timestamp) {
        let ids: Vec<ActivityId> = self.inner.lock().in_flight.keys().cloned().collect();
        for id in ids {
            self.abandon(&id, now);
        }
    }

    /// One call that was cut off.
    pub(crate) fn abandon(&self, id: &ActivityId, now: Timestamp) {
        {
            let mut inner = self.inner.lock();
            if !inner.in_flight.contains_key(id) || inner.take_back(id) {
                return;
            }
        }
        self.finish(id, Settlement::Abandoned, now, 0.0);
    }

    /// One call whose intent is stored and which does not leave: it surely has no effect.
    pub(crate) fn withhold(&self, id: &ActivityId, now: Timestamp) {
        {
            let mut inner = self.inner.lock();
            if !inner.in_flight.contains_key(id) || inner.take_back(id) {
                return;
            }
        }
        let error = Failure::new(FailureKind::Refused, "the run was cancelled").code("cancelled");
        let settlement = Settlement::Failed {
            error,
            retry_after: None,
        };
        self.finish(id, settlement, now, 0.0);
    }

    /// Changes one activity by an operator's hand.
    pub(crate) fn amend<T>(
        &self,
        id: &ActivityId,
        change: impl FnOnce(&mut ActivityRecord) -> T,
    ) -> Option<T> {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        let changed = inner.activities.get_mut(id).map(change)?;
        inner.dirty_activities.insert(id.clone());
        Some(changed)
    }

    /// The recovery limit that an open activity has used up.
    pub(crate) fn recoveries_exhausted(&self) -> Option<Exhausted> {
        let limit = self.entry.recovery_limit;
        let inner = self.inner.lock();
        inner
            .activities
            .values()
            .filter(|record| record.state == ActivityState::Unknown)
            .map(activity::recoveries)
            .find(|used| *used >= limit)
            .map(|used| Exhausted {
                budget: "recovery_attempts".to_owned(),
                used: used.into(),
                limit: limit.into(),
                decimals: 0,
            })
    }

    /// The open activities with the number of their attempts: the same twice means that the node did not come back to them.
    pub(crate) fn open_attempts(&self) -> Vec<(ActivityId, usize)> {
        let inner = self.inner.lock();
        let open = inner.activities.values().filter(|record| record.state.is_open());
        open.map(|record| (record.id.clone(), record.attempts.len()))
            .collect()
    }

    pub(crate) fn completed(&self) -> Vec<(ActivityId, Key)> {
        let inner = self.inner.lock();
        inner
            .activities
            .values()
            .filter(|record| record.state == ActivityState::Completed)
            .map(|record| (record.id.clone(), record.key.clone()))
            .collect()
    }

    pub(crate) fn in_flight(&self) -> bool {
        !self.inner.lock().in_flight.is_empty()
    }

    /// Calls under way, and questions about earlier ones.
    pub(crate) fn calls(&self) -> bool {
        let inner = self.inner.lock();
        !inner.in_flight.is_empty() || inner.probing > 0
    }

    pub(crate) fn unsafe_in_flight(&self) -> bool {
        self.inner
            .lock()
            .in_flight
            .values()
            .any(|effect| *effect == Effect::Unsafe)
    }

    fn context(&self, now: Timestamp) -> Context {
        Context {
            step_attempt: self.entry.attempt,
            incarnation: self.entry.incarnation,
            now,
            recovery_limit: self.entry.recovery_limit,
        }
    }
}

impl Inner {
    /// A call that has not left, or that is a read, is as if it had not been asked for. False for any other.
    pub(super) fn take_back(&mut self, id: &ActivityId) -> bool {
        if self.unstored.remove(id) {
            self.in_flight.remove(id);
            self.activities.remove(id);
            return true;
        }
        let Some(asked) = self.asked.remove(id) else {
            return false;
        };
        self.in_flight.remove(id);
        if !asked.dirty {
            self.dirty_activities.remove(id);
        }
        match asked.before {
            Some(before) => self.activities.insert(id.clone(), before),
            None => self.activities.remove(id),
        };
        true
    }
}
