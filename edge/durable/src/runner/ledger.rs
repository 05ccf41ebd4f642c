//! What a node and the drive loop share while the node runs: the journal of its activation, its gates and budgets, and what of
//! them is not committed yet. The drive loop takes everything that has gathered since the last commit and commits it at once:
//! intents of parallel calls and outcomes of finished ones travel together.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::failure::{Failure, FailureKind};
use crate::ids::{ActivityId, Key, NodeName, RunId, WaitId};
use crate::machine::activity::{self, Admission, After, Context, Refused, Request, Settlement};
use crate::machine::wait::{self, Address, Armed, WaitSpec};
use crate::payload::Payload;
use crate::record::{
    ActivityRecord, ActivityState, Budget, Continuation, Effect, Exhausted, WaitRecord, WaitStatus,
    WaitingKind, WaitingOn,
};
use crate::runner::ctx::within_limit;
use crate::time::Timestamp;

/// The fixed facts of one entry into a node.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub run: RunId,
    pub node: NodeName,
    pub activation: u64,
    pub attempt: u32,
    pub life: u32,
    pub incarnation: u64,
    pub recovery_limit: u32,
    pub max_payload: u64,
}

pub(crate) struct Ledger {
    pub(crate) entry: Entry,
    inner: Mutex<Inner>,
    /// A gate may have been settled.
    waits_changed: Notify,
}

struct Inner {
    activities: BTreeMap<ActivityId, ActivityRecord>,
    waits: BTreeMap<WaitId, WaitRecord>,
    budgets: BTreeMap<String, Budget>,
    /// Changed since the last commit took them.
    dirty_activities: BTreeSet<ActivityId>,
    dirty_waits: BTreeSet<WaitId>,
    /// Read-only calls under way: nothing is stored of them before they have an outcome.
    unstored: BTreeSet<ActivityId>,
    /// Dispatches that wait for their intent to be committed.
    confirms: Vec<Confirm>,
    /// Dispatches of reads that wait for a commit under way, because it has the outcome of an earlier call.
    behind: Vec<Confirm>,
    /// Intents that no commit has taken yet, with what was there before: these calls have surely not left.
    asked: BTreeMap<ActivityId, Asked>,
    /// Whether the commit under way has an outcome.
    outcome_under_way: bool,
    /// Calls being carried out, with their effect.
    in_flight: BTreeMap<ActivityId, Effect>,
    /// Calls and gates that will not go on in this segment unless something happens outside.
    parked: BTreeMap<ParkedOn, Option<Timestamp>>,
    events: Vec<(Cow<'static, str>, Bytes)>,
    /// Nothing new is dispatched any more.
    stopping: bool,
    dirty_outcome: bool,
    /// Reconciliations under way.
    probing: u32,
}

/// Whether a wait ended with its run, without anybody's word.
fn was_withdrawn(wait: &WaitRecord) -> bool {
    wait.status == WaitStatus::Cancelled && wait.settled.as_ref().is_some_and(|settled| settled.by.is_none())
}

/// Lets a call go.
pub(crate) type Confirm = (ActivityId, oneshot::Sender<()>);

struct Asked {
    before: Option<ActivityRecord>,
    /// Whether that was not committed either.
    dirty: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ParkedOn {
    Retry(ActivityId),
    Gate(WaitId),
    Unknown(ActivityId),
}

/// What a call may do.
pub(crate) enum Begin {
    Replay(Bytes),
    Failed(Failure, Option<Exhausted>),
    /// Dispatch attempt `attempt` once the receiver has spoken; at once without one.
    Dispatch {
        id: ActivityId,
        attempt: u32,
        confirmed: Option<oneshot::Receiver<()>>,
    },
    /// Reconcile or wait for an operator.
    Unknown(Box<ActivityRecord>),
    /// Not in this segment.
    Never,
}

/// What a call's outcome leads to.
pub(crate) enum End {
    Completed(Bytes),
    Failed(Failure, Option<Exhausted>),
    /// Ask again: its effect is unknown.
    Unknown,
    Never,
}

/// What is not committed yet.
#[derive(Default)]
pub(crate) struct Dirty {
    pub activities: Vec<ActivityRecord>,
    pub waits: Vec<WaitRecord>,
    pub events: Vec<(Cow<'static, str>, Bytes)>,
    pub confirms: Vec<Confirm>,
    /// Whether the outcome of a dispatch is among them: what cannot be computed again.
    pub outcome: bool,
}

/// What holds a step back.
#[derive(Default, Debug)]
pub(crate) struct Holding {
    pub on: Vec<WaitingOn>,
    pub due_at: Option<Timestamp>,
    pub unknown: bool,
}

pub(crate) fn conflict(what: impl std::fmt::Display) -> Failure {
    Failure::new(
        FailureKind::Internal,
        format!("the journal has another call under this key: {what}"),
    )
    .code("activity_conflict")
}

impl Ledger {
    pub(crate) fn new(
        entry: Entry,
        activities: Vec<ActivityRecord>,
        waits: Vec<WaitRecord>,
        budgets: BTreeMap<String, Budget>,
    ) -> Self {
        Self {
            entry,
            inner: Mutex::new(Inner {
                activities: activities.into_iter().map(|a| (a.id.clone(), a)).collect(),
                waits: waits.into_iter().map(|w| (w.id.clone(), w)).collect(),
                budgets,
                dirty_activities: BTreeSet::new(),
                dirty_waits: BTreeSet::new(),
                unstored: BTreeSet::new(),
                confirms: Vec::new(),
                behind: Vec::new(),
                asked: BTreeMap::new(),
                outcome_under_way: false,
                in_flight: BTreeMap::new(),
                parked: BTreeMap::new(),
                events: Vec::new(),
                stopping: false,
                dirty_outcome: false,
                probing: 0,
            }),
            waits_changed: Notify::new(),
        }
    }

    /// The journal for another entry into the same activation: everything stored, what is not committed yet still marked so.
    pub(crate) fn again(&self, entry: Entry, budgets: BTreeMap<String, Budget>) -> Self {
        let inner = self.inner.lock();
        let activities = inner
            .activities
            .iter()
            .filter(|(id, _)| !inner.unstored.contains(*id));
        let next = Self::new(
            entry,
            activities.map(|(_, record)| record.clone()).collect(),
            inner.waits.values().cloned().collect(),
            budgets,
        );
        {
            let mut next = next.inner.lock();
            next.dirty_activities.clone_from(&inner.dirty_activities);
            next.dirty_waits.clone_from(&inner.dirty_waits);
            next.dirty_outcome = inner.dirty_outcome;
        }
        next
    }

    /// A commit with these did not land: they are still to be committed.
    pub(crate) fn put_back(&self, activities: &[ActivityRecord], waits: &[WaitRecord], outcome: bool) {
        let mut inner = self.inner.lock();
        inner
            .dirty_activities
            .extend(activities.iter().map(|a| a.id.clone()));
        let known = waits
            .iter()
            .map(|w| &w.id)
            .filter(|id| inner.waits.contains_key(id));
        let known: Vec<WaitId> = known.cloned().collect();
        inner.dirty_waits.extend(known);
        inner.dirty_outcome |= outcome;
    }

    /// Whether the outcome of a dispatch is not stored yet.
    pub(crate) fn has_outcome(&self) -> bool {
        self.inner.lock().dirty_outcome
    }

    fn context(&self, now: Timestamp) -> Context {
        Context {
            step_attempt: self.entry.attempt,
            incarnation: self.entry.incarnation,
            now,
            recovery_limit: self.entry.recovery_limit,
        }
    }

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

    /// Settles the armed wait of the graph by its timer, when it is due. Its route, or `None`.
    pub(crate) fn time_out_route(&self, now: Timestamp) -> Option<NodeName> {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        for (id, record) in &mut inner.waits {
            if let Continuation::Nodes { on_timeout, .. } = &record.continuation {
                let to = on_timeout.clone();
                if wait::time_out(record, now) {
                    inner.dirty_waits.insert(id.clone());
                    return Some(to);
                }
            }
        }
        None
    }

    /// Withdraws every armed wait: a resume goes on elsewhere.
    pub(crate) fn withdraw_waits(&self, now: Timestamp) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        for (id, record) in &mut inner.waits {
            if wait::withdraw(record, now) {
                inner.dirty_waits.insert(id.clone());
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

    /// Asks for a gate: its settled record, or `None` while it is armed. A new one is armed with the next commit.
    pub(crate) fn gate(
        &self,
        mut spec: WaitSpec,
        within: Option<Duration>,
        now: Timestamp,
    ) -> Result<Option<WaitRecord>, Failure> {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        let mut generation = 1;
        let id = loop {
            let (run, node) = (&self.entry.run, &self.entry.node);
            let id = WaitId::derive(run, node, self.entry.activation, &spec.key, generation);
            match inner.waits.get(&id) {
                // Withdrawn when an earlier life ended: this one asks anew.
                Some(wait) if was_withdrawn(wait) => generation += 1,
                Some(_) | None => break id,
            }
        };
        let Some(existing) = inner.waits.get(&id) else {
            if inner.stopping {
                return Ok(None);
            }
            spec.deadline = spec.deadline.or_else(|| within.map(|within| now.plus(within)));
            wait::check(&spec).map_err(|e| Failure::new(FailureKind::Configuration, e.to_string()))?;
            let address = Address {
                run: self.entry.run.clone(),
                node: self.entry.node.clone(),
                activation: self.entry.activation,
            };
            let record = wait::arm(&address, &spec, generation, now);
            inner.parked.insert(ParkedOn::Gate(id.clone()), record.deadline);
            inner.dirty_waits.insert(id.clone());
            inner.waits.insert(id, record);
            return Ok(None);
        };
        if within.is_some() {
            // A span counts from when the gate was armed.
            spec.deadline = existing.deadline;
        }
        match wait::rearm(existing, &spec) {
            Ok(Armed::Settled) => {
                inner.parked.remove(&ParkedOn::Gate(id.clone()));
                Ok(inner.waits.get(&id).cloned())
            }
            Ok(Armed::StillArmed) => {
                inner.parked.insert(ParkedOn::Gate(id), existing.deadline);
                Ok(None)
            }
            Err(e) => Err(conflict(e)),
        }
    }

    pub(crate) async fn wait_changed(&self) {
        self.waits_changed.notified().await;
    }

    /// What the inbox says about the gates; the calls that wait for them look again.
    pub(crate) fn refresh_waits(&self, waits: Vec<WaitRecord>) {
        let mut inner = self.inner.lock();
        for wait in waits {
            // What is stored was there first: a settlement of ours that did not land gives way.
            inner.dirty_waits.remove(&wait.id);
            if wait.status != WaitStatus::Armed {
                inner.parked.remove(&ParkedOn::Gate(wait.id.clone()));
            }
            inner.waits.insert(wait.id.clone(), wait);
        }
        drop(inner);
        self.waits_changed.notify_waiters();
    }

    /// Lets the timer settle gates whose deadline has passed. Whether any was.
    pub(crate) fn time_out_gates(&self, now: Timestamp) -> bool {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        let mut any = false;
        for (id, record) in &mut inner.waits {
            if wait::time_out(record, now) {
                inner.dirty_waits.insert(id.clone());
                any = true;
            }
        }
        any
    }

    pub(crate) fn use_budget(&self, name: &str, amount: u64) -> Result<(), BudgetRefused> {
        let mut inner = self.inner.lock();
        let Some(budget) = inner.budgets.get_mut(name) else {
            return Err(BudgetRefused::Undeclared(name.to_owned()));
        };
        match budget
            .used
            .checked_add(amount)
            .filter(|used| *used <= budget.limit)
        {
            Some(used) => {
                budget.used = used;
                Ok(())
            }
            None => Err(BudgetRefused::Exhausted(Exhausted {
                budget: name.to_owned(),
                used: budget.used,
                limit: budget.limit,
            })),
        }
    }

    pub(crate) fn budget(&self, name: &str) -> Option<Budget> {
        self.inner.lock().budgets.get(name).copied()
    }

    pub(crate) fn budgets(&self) -> BTreeMap<String, Budget> {
        self.inner.lock().budgets.clone()
    }

    pub(crate) fn emit(&self, name: Cow<'static, str>, data: Bytes) {
        self.inner.lock().events.push((name, data));
    }

    /// Nothing new is dispatched from here on, and what has not left stays.
    pub(crate) fn stop(&self) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        inner.stopping = true;
        let waiting: Vec<Confirm> = inner.confirms.drain(..).chain(inner.behind.drain(..)).collect();
        for (id, _) in waiting {
            inner.take_back(&id);
        }
    }

    pub(crate) fn in_flight(&self) -> bool {
        !self.inner.lock().in_flight.is_empty()
    }

    pub(crate) fn unsafe_in_flight(&self) -> bool {
        self.inner
            .lock()
            .in_flight
            .values()
            .any(|effect| *effect == Effect::Unsafe)
    }

    pub(crate) fn has_dirty(&self) -> bool {
        let inner = self.inner.lock();
        !inner.dirty_activities.is_empty() || !inner.dirty_waits.is_empty()
    }

    /// Takes what has gathered, for one commit.
    pub(crate) fn take_dirty(&self) -> Dirty {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        let activities = std::mem::take(&mut inner.dirty_activities);
        let waits = std::mem::take(&mut inner.dirty_waits);
        inner.asked.clear();
        inner.outcome_under_way = inner.dirty_outcome;
        Dirty {
            activities: activities
                .iter()
                .filter_map(|id| inner.activities.get(id).cloned())
                .collect(),
            waits: waits
                .iter()
                .filter_map(|id| inner.waits.get(id).cloned())
                .collect(),
            events: std::mem::take(&mut inner.events),
            confirms: std::mem::take(&mut inner.confirms),
            outcome: std::mem::take(&mut inner.dirty_outcome),
        }
    }

    /// A commit is in the store, and with it the payloads of these.
    pub(crate) fn mark_stored(&self, committed: &[ActivityRecord]) {
        let mut inner = self.inner.lock();
        inner.outcome_under_way = false;
        for (_, behind) in std::mem::take(&mut inner.behind) {
            let _ = behind.send(());
        }
        for record in committed {
            if let Some(mine) = inner.activities.get_mut(&record.id) {
                mine.input.mark_stored();
                if record.output.is_some()
                    && let Some(output) = &mut mine.output
                {
                    output.mark_stored();
                }
            }
        }
    }

    /// How many stored activities are open, and how many waits are armed: what the sealed head says.
    pub(crate) fn open(&self) -> (u32, u32) {
        let inner = self.inner.lock();
        let open = inner
            .activities
            .iter()
            .filter(|(id, record)| record.state.is_open() && !inner.unstored.contains(*id))
            .count();
        let armed = inner
            .waits
            .values()
            .filter(|w| w.status == WaitStatus::Armed)
            .count();
        (
            u32::try_from(open).unwrap_or(u32::MAX),
            u32::try_from(armed).unwrap_or(u32::MAX),
        )
    }

    /// The open activities with the number of their attempts: the same twice means that the node did not come back to them.
    pub(crate) fn open_attempts(&self) -> Vec<(ActivityId, usize)> {
        let inner = self.inner.lock();
        let open = inner.activities.values().filter(|record| record.state.is_open());
        open.map(|record| (record.id.clone(), record.attempts.len()))
            .collect()
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
            })
    }

    /// Whether the node only waits for things that do not happen here.
    pub(crate) fn is_parked(&self) -> bool {
        let inner = self.inner.lock();
        inner.in_flight.is_empty() && inner.probing == 0 && !inner.parked.is_empty()
    }

    /// What holds the step back: open activities and armed gates (D143).
    pub(crate) fn holding(&self) -> Holding {
        let inner = self.inner.lock();
        let mut holding = Holding::default();
        let mut due = |at: Option<Timestamp>| {
            holding.due_at = [holding.due_at, at].into_iter().flatten().min();
        };
        let on = |kind, id: &str, node: &NodeName, key: &Key| WaitingOn {
            kind,
            id: id.to_owned(),
            node: node.clone(),
            key: key.as_str().to_owned(),
        };
        let mut unknown = Vec::new();
        let mut others = Vec::new();
        for (id, record) in &inner.activities {
            match record.state {
                ActivityState::Completed | ActivityState::Failed => {}
                ActivityState::Running if inner.unstored.contains(id) => {}
                // Repeating it is declared safe: it is due again at once.
                ActivityState::Unknown | ActivityState::Running if record.effect != Effect::Unsafe => {
                    due(Some(Timestamp::MIN));
                    others.push(on(WaitingKind::Retry, id.as_str(), &record.node, &record.key));
                }
                ActivityState::Unknown | ActivityState::Running => {
                    unknown.push(on(
                        WaitingKind::Reconciliation,
                        id.as_str(),
                        &record.node,
                        &record.key,
                    ));
                }
                ActivityState::Prepared => {
                    due(Some(record.not_before.as_ref().map_or(Timestamp::MIN, |n| n.at)));
                    others.push(on(WaitingKind::Retry, id.as_str(), &record.node, &record.key));
                }
            }
        }
        for (id, record) in &inner.waits {
            if record.status == WaitStatus::Armed {
                due(record.deadline);
                others.push(on(record.kind, id.as_str(), &record.node, &record.key));
            }
        }
        holding.unknown = !unknown.is_empty();
        holding.on = unknown;
        // People first: a list shows what somebody can decide.
        others.sort_by_key(|on| on.kind);
        holding.on.extend(others);
        holding
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

    /// The run ends: gates are withdrawn, and calls that are not under way or may be repeated safely are closed. What remains
    /// open is an effect that is not known. The evidence of completed calls is returned (durable-api §8, "Cancel").
    pub(crate) fn close(&self, why: &Failure, now: Timestamp) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        for (id, record) in &mut inner.waits {
            if wait::withdraw(record, now) {
                inner.dirty_waits.insert(id.clone());
            }
        }
        for (id, record) in &mut inner.activities {
            if activity::close(record, why, now) {
                inner.dirty_activities.insert(id.clone());
            }
        }
        inner.parked.clear();
    }

    /// Whether nothing has been asked for in this activation.
    pub(crate) fn is_empty(&self) -> bool {
        let inner = self.inner.lock();
        inner.activities.is_empty() && inner.waits.is_empty()
    }

    /// Whether the step of this activation is over and recorded: the run waits behind it.
    pub(crate) fn step_is_recorded(&self) -> bool {
        let inner = self.inner.lock();
        inner
            .waits
            .values()
            .any(|wait| matches!(wait.continuation, Continuation::Nodes { .. }))
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

    /// Changes one wait.
    pub(crate) fn put_wait(&self, record: WaitRecord) {
        let mut inner = self.inner.lock();
        inner.dirty_waits.insert(record.id.clone());
        inner.waits.insert(record.id.clone(), record);
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
}

impl Inner {
    /// A call that has not left, or that is a read, is as if it had not been asked for. False for any other.
    fn take_back(&mut self, id: &ActivityId) -> bool {
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

/// Why a budget was not drawn on. Nothing was changed (D252).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BudgetRefused {
    #[error("budget {0:?} is not declared")]
    Undeclared(String),
    #[error("{} of {} {} are used", .0.used, .0.limit, .0.budget)]
    Exhausted(Exhausted),
}

impl From<BudgetRefused> for crate::graph::NodeError {
    fn from(refused: BudgetRefused) -> Self {
        match refused {
            BudgetRefused::Exhausted(exhausted) => Self::from(exhausted),
            BudgetRefused::Undeclared(_) => Self::Failed(
                Failure::new(FailureKind::Configuration, refused.to_string()).code("budget_invalid"),
            ),
        }
    }
}
