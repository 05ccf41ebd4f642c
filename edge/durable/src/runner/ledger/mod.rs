//! What a node and the drive loop share while the node runs: the journal of its activation, its gates and budgets, and what of
//! them is not committed yet. The drive loop takes everything that has gathered since the last commit and commits it at once:
//! intents of parallel calls and outcomes of finished ones travel together.

mod budgets;
mod calls;
mod waits;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

pub use budgets::BudgetRefused;

use crate::failure::{Failure, FailureKind};
use crate::ids::{ActivityId, Key, NodeName, RunId, WaitId};
use crate::machine::{activity, wait};
use crate::record::{
    ActivityRecord, ActivityState, Budget, Effect, Exhausted, RunHead, WaitRecord, WaitStatus, WaitingKind,
    WaitingOn, most_attempts,
};
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

impl Entry {
    /// Of the run as it stands; without limits, which are the host's and the graph's.
    pub(crate) fn of(head: &RunHead, node: NodeName, incarnation: u64) -> Self {
        Self {
            run: head.id.clone(),
            node,
            activation: head.activation,
            attempt: head.attempt,
            life: head.life,
            incarnation,
            recovery_limit: 0,
            max_payload: 0,
        }
    }
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
    /// The open activities, by id.
    pub stands: BTreeMap<String, Stand>,
}

/// Where an open activity stands: the number of its last attempt, and when it is tried again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stand {
    pub attempt: u32,
    pub at: Option<Timestamp>,
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

    /// The number of the last attempt of the call that failed with this.
    pub(crate) fn attempt_of(&self, failure: &Failure) -> Option<u32> {
        let inner = self.inner.lock();
        let failed = inner
            .activities
            .values()
            .filter(|a| a.error.as_ref() == Some(failure));
        failed
            .filter_map(|a| a.attempts.last())
            .map(|attempt| attempt.n)
            .max()
    }

    /// The most attempts that one call of this activation took; 0 without calls.
    pub(crate) fn most_attempts(&self) -> u32 {
        most_attempts(self.inner.lock().activities.values())
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
            if record.state.is_open() {
                let stand = Stand {
                    attempt: record.attempts.last().map_or(0, |attempt| attempt.n),
                    at: record.not_before.as_ref().map(|next| next.at),
                };
                holding.stands.insert(id.as_str().to_owned(), stand);
            }
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
}
