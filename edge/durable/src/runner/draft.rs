//! One transition in the making, and how it gets into the store: written, looked up again when the answer was lost, and tried
//! again only when it carries what cannot be computed anew.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use uuid::Uuid;

use crate::ids::NodeName;
use crate::payload::Payload;
use crate::record::{
    ActivityRecord, DecisionRecord, EventName, EventRecord, RunHead, Status, StepRecord, WaitRecord,
    WaitStatus,
};
use crate::runner::keeper::Held;
use crate::runner::ledger::{Confirm, Dirty};
use crate::store::{Answer, Authority, Commit, Committed, Conflict, Guard, Store, StoreError};
use crate::time::Timestamp;

/// Why a segment cannot go on.
#[derive(Debug, Clone)]
pub(crate) enum Halt {
    LeaseLost,
    /// The inbox changed; nothing was written.
    Signal,
    Store(StoreError),
    /// This graph's codec does not read the stored state.
    Undecodable(String),
}

/// A commit without its guard.
#[derive(Debug, Clone)]
pub(crate) struct Draft {
    pub head: RunHead,
    pub state: Payload,
    pub activities: Vec<ActivityRecord>,
    pub waits: Vec<WaitRecord>,
    pub steps: Vec<StepRecord>,
    pub decisions: Vec<DecisionRecord>,
    pub events: Vec<EventRecord>,
    pub due_at: Option<Timestamp>,
    pub release: bool,
    /// Whether the inbox must be as it was last read.
    pub watch_inbox: bool,
    /// Whether it carries the outcome of a dispatch.
    pub outcome: bool,
    now: Timestamp,
}

#[derive(Serialize)]
struct StepEvent<'a> {
    step: &'a str,
    activation: u64,
    attempt: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<&'a str>,
}

impl Draft {
    /// Of a run that goes on: due from its creation on, so that a lost worker's run is claimed oldest first.
    pub(crate) fn new(head: &RunHead, state: &Payload, now: Timestamp) -> Self {
        let mut head = head.clone();
        head.commit_id = Uuid::from_u64_pair(fastrand::u64(..), fastrand::u64(..));
        head.updated_at = now.max(head.updated_at);
        Self {
            due_at: Some(head.created_at),
            head,
            state: state.clone(),
            activities: Vec::new(),
            waits: Vec::new(),
            steps: Vec::new(),
            decisions: Vec::new(),
            events: Vec::new(),
            release: false,
            watch_inbox: false,
            outcome: false,
            now,
        }
    }

    pub(crate) fn event(&mut self, name: impl Into<Cow<'static, str>>, data: Bytes) {
        self.push(name.into(), data, false);
    }

    fn push(&mut self, name: Cow<'static, str>, data: Bytes, terminal: bool) {
        self.head.event_seq += 1;
        self.events.push(EventRecord {
            seq: self.head.event_seq,
            life: self.head.life,
            name,
            terminal,
            time: self.now,
            data,
        });
    }

    pub(crate) fn engine_event(&mut self, name: EventName, data: &impl Serialize) {
        // Values of our own, without maps that have no text keys: encoding them cannot fail.
        let data = serde_json::to_vec(data).unwrap_or_else(|_| b"{}".to_vec());
        self.push(Cow::Borrowed(name.as_str()), Bytes::from(data), false);
    }

    /// A step begins, or begins again.
    pub(crate) fn step_started(&mut self, node: &NodeName) {
        let event = StepEvent {
            step: node.as_str(),
            activation: self.head.activation,
            attempt: self.head.attempt,
            status: None,
        };
        self.engine_event(EventName::StepStarted, &event);
    }

    /// A step is over.
    pub(crate) fn step_completed(&mut self, step: StepRecord) {
        let event = StepEvent {
            step: step.node.as_str(),
            activation: step.activation,
            attempt: step.attempts,
            status: Some(step.status.as_str()),
        };
        self.engine_event(EventName::StepCompleted, &event);
        self.steps.push(step);
    }

    /// The terminal event: the outcome's own bytes (D233).
    pub(crate) fn end(&mut self, status: Status, outcome: Bytes) {
        self.head.status = status;
        self.head.waiting = None;
        self.due_at = None;
        if let Some(name) = EventName::terminal(status) {
            let mut data = Vec::with_capacity(outcome.len() + 12);
            data.extend_from_slice(b"{\"outcome\":");
            data.extend_from_slice(&outcome);
            data.push(b'}');
            self.push(Cow::Borrowed(name.as_str()), Bytes::from(data), true);
        }
        self.head.outcome = Some(outcome);
    }

    /// Adds what gathered in the ledger.
    pub(crate) fn take(&mut self, dirty: Dirty, open: (u32, u32)) -> Vec<Confirm> {
        self.activities.extend(dirty.activities);
        // Arming is ours alone; settling and withdrawing race with deliveries.
        self.watch_inbox |= dirty.waits.iter().any(|wait| wait.status != WaitStatus::Armed);
        self.waits.extend(dirty.waits);
        self.outcome |= dirty.outcome;
        for (name, data) in dirty.events {
            self.event(name, data);
        }
        (self.head.open_activities, self.head.armed_waits) = open;
        dirty.confirms
    }

    pub(crate) fn commit(mut self, authority: Authority, signal: Option<u64>) -> Commit {
        if let Authority::Lease(lease) = &authority {
            self.head.incarnation = lease.incarnation;
        }
        Commit {
            guard: Guard {
                revision: self.head.revision,
                authority,
                signal,
            },
            head: self.head,
            state: self.state,
            activities: self.activities,
            waits: self.waits,
            steps: self.steps,
            decisions: self.decisions,
            events: self.events,
            due_at: self.due_at,
            release: self.release,
        }
    }
}

/// Writes under a lease. A lost answer is looked up by the commit's own id. With `outcome` an unavailable store is tried again
/// while the lease lives: what a dispatch returned exists nowhere else.
pub(crate) async fn persist(
    store: &Arc<dyn Store>,
    held: &Held,
    commit: &Commit,
    outcome: bool,
) -> Result<Committed, Halt> {
    let mut pause = Duration::from_millis(20);
    loop {
        if !held.is_live() {
            return Err(Halt::LeaseLost);
        }
        let error = match store.commit(commit.clone()).await {
            Ok(committed) => {
                held.heard(&committed);
                return Ok(committed);
            }
            Err(error) => error,
        };
        match error {
            StoreError::Conflict(Conflict::Signal(_)) => return Err(Halt::Signal),
            StoreError::LeaseLost | StoreError::Busy => {
                held.lose();
                return Err(Halt::LeaseLost);
            }
            // Another revision under a lease: this very commit, whose answer was lost, or a successor's.
            StoreError::Unconfirmed { .. } | StoreError::Conflict(Conflict::Revision(_)) => {
                match look_up(store, commit).await {
                    Some(Looked::Landed(committed)) => {
                        held.heard(&committed);
                        return Ok(committed);
                    }
                    Some(Looked::Absent) => {}
                    Some(Looked::Superseded) => {
                        held.lose();
                        return Err(Halt::LeaseLost);
                    }
                    None if outcome => {}
                    None => return Err(Halt::Store(error)),
                }
            }
            StoreError::Unavailable { .. } if outcome => {}
            StoreError::NotFound
            | StoreError::Deleted
            | StoreError::NotIdle
            | StoreError::Duplicate
            | StoreError::Corrupt { .. }
            | StoreError::SchemaUnsupported { .. }
            | StoreError::CheckpointUnavailable
            | StoreError::RevisionsExhausted
            | StoreError::TooLarge { .. }
            | StoreError::Unavailable { .. }
            | StoreError::Open(_) => return Err(Halt::Store(error)),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// A read on the way to a commit. When that has an outcome, an unavailable store is asked again while the lease lives, as it is
/// for the commit itself.
pub(crate) async fn read_on<'s, T>(
    held: &Held,
    outcome: bool,
    read: impl Fn() -> Answer<'s, T>,
) -> Result<T, Halt> {
    let mut pause = Duration::from_millis(20);
    loop {
        match read().await {
            Err(StoreError::Unavailable { .. }) if outcome && held.is_live() => {}
            answer => return answer.map_err(Halt::Store),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

enum Looked {
    Landed(Committed),
    /// The head is as it was before.
    Absent,
    Superseded,
}

/// Whether an unconfirmed commit landed. `None` when the store does not say.
async fn look_up(store: &Arc<dyn Store>, commit: &Commit) -> Option<Looked> {
    let loaded = store.load(&commit.head.id).await.ok()?;
    if loaded.head.commit_id == commit.head.commit_id {
        return Some(Looked::Landed(Committed {
            revision: loaded.head.revision,
            signal: loaded.inbox.signal,
            now: loaded.now,
        }));
    }
    if loaded.head.revision == commit.guard.revision {
        Some(Looked::Absent)
    } else {
        Some(Looked::Superseded)
    }
}
