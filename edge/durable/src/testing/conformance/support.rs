//! What the cases share.

use std::collections::BTreeSet;
use std::fmt::Debug;

use bytes::Bytes;

use crate::envelope::encode_step;
use crate::ids::{ActivityId, Revision, RunId, WaitId};
use crate::payload::Payload;
use crate::record::{
    ActivityRecord, CheckpointRecord, DecisionRecord, EventRecord, Inbox, RunHead, Scope, WaitRecord,
};
use crate::store::{Acquired, Commit, Committed, Created, Lease, Store, StoreError};
use crate::testing::build::{LONG, advance, claim, create, ended, lease_for, run};

/// The refusal, which must be of this kind.
#[track_caller]
pub(super) fn refused<T: Debug>(answer: Result<T, StoreError>, kind: &str) -> StoreError {
    match answer {
        Ok(done) => panic!("expected {kind}, but it was done: {done:?}"),
        Err(error) => {
            assert_eq!(error.kind(), kind, "{error}");
            error
        }
    }
}

/// The refusal, which must be of one of these kinds.
#[track_caller]
pub(super) fn refused_as<T: Debug>(answer: Result<T, StoreError>, kinds: &[&str]) {
    match answer {
        Ok(done) => panic!("expected one of {kinds:?}, but it was done: {done:?}"),
        Err(error) => assert!(kinds.contains(&error.kind()), "{kinds:?}: {error}"),
    }
}

/// A queued run that is due and unheld.
pub(super) async fn queued(store: &dyn Store, id: &str) -> RunId {
    let id = run(id);
    let now = store.now().await.unwrap();
    new(store.create(create(&id, now)).await.unwrap());
    id
}

/// That a run was made, and its lease.
#[track_caller]
pub(super) fn new(created: Created) -> Option<Lease> {
    match created {
        Created::New { lease, .. } => lease,
        Created::Replayed { .. } | Created::KeyConflict { .. } | Created::Exists => {
            panic!("no run was made: {created:?}")
        }
    }
}

/// A queued run under a lease that outlives the case.
pub(super) async fn held(store: &dyn Store, id: &str) -> Acquired {
    let id = queued(store, id).await;
    hold(store, &id).await
}

pub(super) async fn hold(store: &dyn Store, id: &RunId) -> Acquired {
    store.acquire(id, lease_for("worker", LONG)).await.unwrap()
}

/// Commits, and goes on from what was written.
pub(super) async fn commit(store: &dyn Store, acquired: &mut Acquired, commit: Commit) -> Committed {
    let committed = store.commit(commit).await.unwrap();
    let now = store.now().await.unwrap();
    acquired.loaded = store.load(&acquired.lease.run).await.unwrap();
    acquired.loaded.now = now;
    committed
}

/// A run that is over, and nobody holds it.
pub(super) async fn over(store: &dyn Store, id: &str) -> RunId {
    let acquired = held(store, id).await;
    let end = ended(advance(&acquired), crate::record::Status::Succeeded);
    store.commit(end).await.unwrap();
    acquired.lease.run
}

/// The ids of runs that a claim finds now, in its order. The leases stay.
pub(super) async fn claimed(store: &dyn Store, limit: u32) -> Vec<String> {
    let claimed = store.claim(claim("claimer", limit)).await.unwrap();
    assert!(claimed.quarantined.is_empty(), "{:?}", claimed.quarantined);
    claimed
        .runs
        .iter()
        .map(|acquired| acquired.lease.run.as_str().to_owned())
        .collect()
}

/// The number n.
pub(super) fn revision(n: u64) -> Revision {
    Revision::new(n).unwrap()
}

/// Everything that can be read about a run, except its lease and the time.
#[derive(Debug, PartialEq)]
pub(super) struct Snapshot {
    head: RunHead,
    state: Payload,
    inbox: Inbox,
    activities: Vec<ActivityRecord>,
    waits: Vec<WaitRecord>,
    decisions: Vec<Vec<DecisionRecord>>,
    steps: Vec<Bytes>,
    events: Vec<EventRecord>,
    history: Vec<CheckpointRecord>,
}

pub(super) async fn snapshot(store: &dyn Store, id: &RunId) -> Snapshot {
    let loaded = store.load(id).await.unwrap();
    let waits = store.waits(id).await.unwrap();
    let mut scopes = BTreeSet::from([Scope::Operator, Scope::Cancel]);
    scopes.extend(waits.iter().map(|wait| Scope::Wait(wait.id.clone())));
    let mut decisions = Vec::new();
    for scope in scopes {
        decisions.push(store.decisions(id, &scope).await.unwrap());
    }
    Snapshot {
        head: loaded.head,
        state: loaded.state,
        inbox: loaded.inbox,
        activities: store.activities(id, None, 1_000).await.unwrap(),
        waits,
        decisions,
        steps: store
            .steps(id, 0, 1_000)
            .await
            .unwrap()
            .iter()
            .map(|step| encode_step(step).unwrap())
            .collect(),
        events: store.events(id, 0, 1_000).await.unwrap(),
        history: store.history(id, None, 1_000).await.unwrap(),
    }
}

pub(super) fn activity_ids(activities: &[ActivityRecord]) -> Vec<ActivityId> {
    activities.iter().map(|activity| activity.id.clone()).collect()
}

pub(super) fn wait_ids(waits: &[WaitRecord]) -> Vec<WaitId> {
    waits.iter().map(|wait| wait.id.clone()).collect()
}
