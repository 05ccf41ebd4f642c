//! Valid records, short to write: a run that is queued, and commits that move it on.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use uuid::Uuid;

use crate::ids::{ActivityId, CorrelationId, DecisionId, Key, NodeName, Owner, Revision, RunId, WaitId};
use crate::payload::{Digest, Payload};
use crate::record::{
    ActivityRecord, ActivityState, Attempt, AttemptClass, Continuation, DeadlinePolicy, DecisionRecord,
    DefinitionRef, Effect, EventName, EventRecord, Lineage, Origin, Outcome, Reason, RunHead, Scope, Settled,
    Status, StepRecord, StepStatus, WaitLabels, WaitRecord, WaitStatus, Waiting, WaitingKind, WaitingOn,
};
use crate::store::{
    Acquired, Authority, Claim, Commit, Create, Define, Guard, IdempotencyKey, Lease, LeaseRequest, Loaded,
    Post,
};
use crate::time::Timestamp;

/// A lease that outlives every case.
pub const LONG: Duration = Duration::from_mins(10);
/// A lease that has expired after `pass(SHORT)`. Nothing in the suite depends on its being alive.
pub const SHORT: Duration = Duration::from_millis(50);

/// The kind and name of every definition here, unless a case says otherwise.
pub const DEFINITION: (&str, &str) = ("graph", "conformance");

pub fn run(id: &str) -> RunId {
    RunId::new(id).unwrap()
}

pub fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

pub fn key(key: &str) -> Key {
    Key::new(key).unwrap()
}

pub fn decision_id(id: &str) -> DecisionId {
    DecisionId::new(id).unwrap()
}

pub fn correlation(id: &str) -> CorrelationId {
    CorrelationId::new(id).unwrap()
}

pub fn at(ms: i64) -> Timestamp {
    Timestamp::from_millis(ms).unwrap()
}

pub fn payload(bytes: impl Into<Bytes>) -> Payload {
    Payload::new(bytes)
}

pub fn lease_for(owner: &str, ttl: Duration) -> LeaseRequest {
    LeaseRequest {
        owner: Owner::new(owner).unwrap(),
        ttl,
    }
}

/// A claim for `DEFINITION`.
pub fn claim(owner: &str, limit: u32) -> Claim {
    Claim {
        lease: lease_for(owner, LONG),
        definitions: vec![(DEFINITION.0.to_owned(), DEFINITION.1.to_owned())],
        except: Vec::new(),
        limit,
    }
}

/// A queued run at node `start`, without events.
pub fn head(id: &RunId, state: &Payload, now: Timestamp) -> RunHead {
    RunHead {
        id: id.clone(),
        revision: Revision::FIRST,
        definition: DefinitionRef {
            kind: DEFINITION.0.to_owned(),
            name: DEFINITION.1.to_owned(),
            version: 3,
            digest: "sha256:00".to_owned(),
        },
        lineage: Lineage {
            parent: None,
            root: id.clone(),
            origin: None,
        },
        life: 1,
        status: Status::Queued,
        cursor: Some(node("start")),
        activation: 1,
        attempt: 1,
        recoveries: 0,
        state_digest: *state.digest(),
        budgets: BTreeMap::new(),
        metadata: BTreeMap::from([("case".to_owned(), id.as_str().to_owned())]),
        owner: None,
        waiting: None,
        outcome: None,
        deadline: None,
        event_seq: 0,
        open_activities: 0,
        armed_waits: 0,
        effects: 0,
        traceparent: None,
        incarnation: 0,
        commit_id: Uuid::now_v7(),
        created_at: now,
        updated_at: now,
    }
}

pub fn event(seq: u64, life: u32, name: EventName, time: Timestamp) -> EventRecord {
    EventRecord {
        seq,
        life,
        name: Cow::Borrowed(name.as_str()),
        terminal: Status::ALL
            .iter()
            .any(|status| EventName::terminal(*status) == Some(name)),
        time,
        data: Bytes::from_static(b"{}"),
    }
}

/// A queued run, claimable at `now`, with its first event, no lease and no key.
pub fn create(id: &RunId, now: Timestamp) -> Create {
    create_with(id, Payload::new(format!("state of {id}")), now)
}

/// The same with this state.
pub fn create_with(id: &RunId, state: Payload, now: Timestamp) -> Create {
    let mut head = head(id, &state, now);
    head.event_seq = 1;
    Create {
        head,
        state,
        events: vec![event(1, 1, EventName::Created, now)],
        due_at: Some(now),
        lease: None,
        idempotency: None,
    }
}

pub fn idempotency(scope: &str, key: &str, request: u8) -> IdempotencyKey {
    IdempotencyKey {
        scope: scope.to_owned(),
        key: key.to_owned(),
        request: digest(request),
    }
}

/// An agent of the configuration with this body.
pub fn define(name: &str, body: impl Into<Bytes>) -> Define {
    let body = payload(body);
    Define {
        kind: "agent".to_owned(),
        name: name.to_owned(),
        origin: crate::store::Origin::Config,
        digest: crate::ids::hex(body.digest()),
        body: body.bytes().clone(),
    }
}

pub fn digest(byte: u8) -> Digest {
    [byte; 32]
}

/// A commit that moves a loaded run on under its lease: running, the next activation, one event, still claimable.
pub fn advance(acquired: &Acquired) -> Commit {
    advance_loaded(&acquired.loaded, Authority::Lease(acquired.lease.clone()))
}

/// The same on another authority.
pub fn advance_loaded(loaded: &Loaded, authority: Authority) -> Commit {
    let mut head = loaded.head.clone();
    head.status = Status::Running;
    head.activation += 1;
    head.waiting = None;
    head.event_seq += 1;
    head.updated_at = loaded.now;
    head.commit_id = Uuid::now_v7();
    let state = Payload::new(format!("state of {} at {}", head.id, head.activation));
    head.state_digest = *state.digest();
    Commit {
        guard: Guard {
            revision: loaded.head.revision,
            authority,
            signal: None,
        },
        events: vec![event(
            head.event_seq,
            head.life,
            EventName::StepCompleted,
            loaded.now,
        )],
        head,
        state,
        activities: Vec::new(),
        waits: Vec::new(),
        steps: Vec::new(),
        decisions: Vec::new(),
        due_at: Some(loaded.now),
        release: false,
    }
}

/// Makes a commit one that parks the run, until `due_at` or for ever, seeing this signal and giving the lease back.
#[must_use]
pub fn parked(mut commit: Commit, kind: WaitingKind, due_at: Option<Timestamp>, signal: u64) -> Commit {
    commit.head.status = Status::Waiting;
    commit.head.waiting = Some(Waiting {
        reason: kind.as_str().to_owned(),
        due_at,
        on: vec![WaitingOn {
            kind,
            id: "what".to_owned(),
            node: node("start"),
            key: "k".to_owned(),
        }],
    });
    if let Some(event) = commit.events.last_mut() {
        event.name = Cow::Borrowed(EventName::Waiting.as_str());
    }
    commit.due_at = due_at;
    commit.guard.signal = Some(signal);
    commit.release = matches!(commit.guard.authority, Authority::Lease(_));
    commit
}

/// Makes a commit one that ends the run with this status, which is terminal, and gives the lease back.
#[must_use]
pub fn ended(mut commit: Commit, status: Status) -> Commit {
    let name = EventName::terminal(status).unwrap();
    commit.head.status = status;
    commit.head.cursor = None;
    commit.head.outcome = Some(Outcome::new(status, Reason::Completed).encode().unwrap());
    if let Some(last) = commit.events.last_mut() {
        *last = event(last.seq, last.life, name, last.time);
    }
    commit.due_at = None;
    commit.release = matches!(commit.guard.authority, Authority::Lease(_));
    commit
}

/// A prepared idempotent activity.
pub fn activity(run: &RunId, activation: u64, name: &str) -> ActivityRecord {
    let node = node("start");
    let key = key(name);
    ActivityRecord {
        run: run.clone(),
        id: ActivityId::derive(run, &node, activation, &key),
        node,
        activation,
        key,
        implementation: "charge@1".to_owned(),
        effect: Effect::Idempotent,
        retry: None,
        state: ActivityState::Prepared,
        origin: None,
        attempts: Vec::new(),
        not_before: None,
        step_attempt: 1,
        input: Payload::new(format!("input of {name}")),
        output: None,
        error: None,
        decision: None,
    }
}

/// The same activity, completed in its first attempt with this output.
#[must_use]
pub fn completed(mut activity: ActivityRecord, output: Payload, now: Timestamp) -> ActivityRecord {
    activity.state = ActivityState::Completed;
    activity.origin = Some(Origin::Live);
    activity.attempts = vec![Attempt {
        n: 1,
        incarnation: 1,
        recovery: false,
        started_at: now,
        ended_at: Some(now),
        class: AttemptClass::Completed,
        error: None,
    }];
    activity.output = Some(output);
    activity
}

/// An armed gate, correlated by `about`.
pub fn wait(run: &RunId, activation: u64, name: &str, about: &str, now: Timestamp) -> WaitRecord {
    let node = node("start");
    let key = key(name);
    WaitRecord {
        run: run.clone(),
        id: WaitId::derive(run, &node, activation, &key, 1),
        node,
        activation,
        key,
        correlation: correlation(about),
        generation: 1,
        kind: WaitingKind::Event,
        status: WaitStatus::Armed,
        continuation: Continuation::Gate,
        labels: WaitLabels {
            matcher: "any".to_owned(),
            payload: "json".to_owned(),
            continuation: "gate".to_owned(),
        },
        subject: Payload::new(format!("subject of {name}")),
        deadline: None,
        deadline_policy: DeadlinePolicy::FirstCommitted,
        armed_at: now,
        deliveries: 0,
        settled: None,
    }
}

/// The same wait, settled by a delivery.
#[must_use]
pub fn delivered(mut wait: WaitRecord, by: &str, payload: Payload, now: Timestamp) -> WaitRecord {
    wait.status = WaitStatus::Delivered;
    wait.deliveries += 1;
    wait.settled = Some(Settled {
        by: Some(decision_id(by)),
        payload: Some(payload),
        at: now,
    });
    wait
}

pub fn decision(run: &RunId, scope: Scope, id: &str, now: Timestamp) -> DecisionRecord {
    DecisionRecord {
        run: run.clone(),
        scope,
        id: decision_id(id),
        content: digest(7),
        body: Bytes::from(format!("{{\"decision\":\"{}\"}}", id.len())),
        created_at: now,
    }
}

pub fn step(activation: u64, now: Timestamp) -> StepRecord {
    StepRecord {
        activation,
        node: node("start"),
        status: StepStatus::Done,
        attempts: 1,
        result: Some("done".to_owned()),
        error: None,
        effects: Vec::new(),
        started_at: now,
        ended_at: now,
    }
}

/// A post that changes nothing but the number and wakes the run.
pub fn post(run: &RunId, signal: u64) -> Post {
    Post {
        run: run.clone(),
        signal,
        cancel: None,
        waits: Vec::new(),
        decisions: Vec::new(),
        wake: true,
    }
}

/// The same handle with another incarnation: somebody who never held the lease.
pub fn forged(lease: &Lease, incarnation: u64) -> Lease {
    Lease {
        incarnation,
        ..lease.clone()
    }
}
