//! How much there is of what is not over.

use std::collections::BTreeMap;
use std::time::Duration;

use super::support::{commit, held, over, queued};
use crate::record::{Status, WaitRecord, WaitStatus, WaitingKind};
use crate::store::{Counts, Store};
use crate::testing::Fixture;
use crate::testing::build::{advance, at, delivered, parked, payload, post, run, wait};
use crate::time::Timestamp;

async fn runs(store: &dyn Store) -> Vec<(Status, u64)> {
    store.counts().await.unwrap().runs.into_iter().collect()
}

pub async fn what_is_not_over_is_counted_by_status(fixture: &dyn Fixture) {
    let store = fixture.store();
    assert_eq!(store.counts().await.unwrap(), Counts::default());
    for id in ["a", "b", "c"] {
        over(&*store, id).await;
    }
    assert_eq!(store.counts().await.unwrap(), Counts::default());
    for id in ["queued", "also queued"] {
        queued(&*store, id).await;
    }
    let acquired = held(&*store, "running").await;
    store.commit(advance(&acquired)).await.unwrap();
    let far = store.now().await.unwrap().plus(Duration::from_hours(1));
    for (id, kind, due_at) in [
        ("gate", WaitingKind::Approval, None),
        ("timer", WaitingKind::Timer, Some(far)),
        ("posted", WaitingKind::Event, None),
        ("retry", WaitingKind::Retry, Some(at(1_000))),
    ] {
        let acquired = held(&*store, id).await;
        let park = parked(advance(&acquired), kind, due_at, 0);
        store.commit(park).await.unwrap();
    }
    store.post(post(&run("posted"), 0)).await.unwrap();
    let acquired = held(&*store, "unknown").await;
    let mut park = parked(advance(&acquired), WaitingKind::Reconciliation, None, 0);
    park.head.status = Status::Ambiguous;
    store.commit(park).await.unwrap();
    let expected = [
        (Status::Queued, 2),
        (Status::Running, 1),
        (Status::Waiting, 4),
        (Status::Ambiguous, 1),
    ];
    assert_eq!(runs(&*store).await, expected);
}

pub async fn what_is_set_aside_is_not_counted(fixture: &dyn Fixture) {
    let store = fixture.store();
    for id in ["queued", "aside"] {
        queued(&*store, id).await;
    }
    for id in ["waiting", "waiting aside"] {
        let acquired = held(&*store, id).await;
        let park = parked(advance(&acquired), WaitingKind::Approval, None, 0);
        store.commit(park).await.unwrap();
    }
    for id in ["aside", "waiting aside"] {
        store.quarantine(&run(id), "why").await.unwrap();
    }
    let expected = [(Status::Queued, 1), (Status::Waiting, 1)];
    assert_eq!(runs(&*store).await, expected);
    store.rebuild_index().await.unwrap();
    let expected = [(Status::Queued, 2), (Status::Waiting, 2)];
    assert_eq!(runs(&*store).await, expected);
}

/// A wait of this kind, armed at this time.
fn of(kind: WaitingKind, id: &str, key: &str, time: Timestamp) -> WaitRecord {
    let mut wait = wait(&run(id), 1, key, "about", time);
    wait.kind = kind;
    wait
}

pub async fn armed_waits_are_counted_by_kind(fixture: &dyn Fixture) {
    let store = fixture.store();
    let (approval, input) = (WaitingKind::Approval, WaitingKind::Input);
    let mut settled = of(approval, "a", "settled", at(1_000));
    settled = delivered(settled, "d", payload("yes"), at(2_000));
    let mut cancelled = of(input, "a", "cancelled", at(1_000));
    cancelled.status = WaitStatus::Cancelled;
    let mut acquired = held(&*store, "a").await;
    let mut next = advance(&acquired);
    next.waits = vec![
        settled,
        cancelled,
        of(approval, "a", "late", at(9_000)),
        of(approval, "a", "early", at(7_000)),
    ];
    commit(&*store, &mut acquired, next).await;
    let acquired_b = held(&*store, "b").await;
    let mut next = advance(&acquired_b);
    next.waits = vec![
        of(approval, "b", "middle", at(8_000)),
        of(input, "b", "only", at(3_000)),
    ];
    store.commit(next).await.unwrap();
    let counts = store.counts().await.unwrap();
    assert_eq!(counts.armed, BTreeMap::from([(approval, 3), (input, 1)]));
    assert_eq!(
        counts.oldest_armed,
        BTreeMap::from([(approval, at(7_000)), (input, at(3_000))])
    );
    // Settled, it is counted no more.
    let early = of(approval, "a", "early", at(7_000));
    let mut next = advance(&acquired);
    next.waits = vec![delivered(early, "d", payload("no"), at(9_500))];
    commit(&*store, &mut acquired, next).await;
    let counts = store.counts().await.unwrap();
    assert_eq!(counts.armed, BTreeMap::from([(approval, 2), (input, 1)]));
    assert_eq!(counts.oldest_armed[&approval], at(8_000));
}
