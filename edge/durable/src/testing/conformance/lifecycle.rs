//! Deletion: only when it is over and nobody holds it, and for ever (D134, D228, D229).

use futures_util::future::join;

use super::support::{commit, held, hold, over, queued, refused, revision};
use crate::record::{Scope, Status, WaitingKind};
use crate::store::RunFilter;
use crate::testing::Fixture;
use crate::testing::build::{
    LONG, SHORT, activity, advance, completed, correlation, decision, ended, lease_for, parked, payload,
    post, run, step, wait,
};

pub async fn a_held_run_is_not_deleted(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = over(&*store, "r").await;
    let acquired = hold(&*store, &id).await;
    refused(store.delete_if_idle(&id).await, "busy");
    store.load(&id).await.unwrap();
    store.release(acquired.lease).await.unwrap();
    store.delete_if_idle(&id).await.unwrap();
}

pub async fn a_run_that_is_not_over_is_not_deleted(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "queued").await;
    refused(store.delete_if_idle(&id).await, "not_idle");
    let acquired = held(&*store, "waiting").await;
    let park = parked(advance(&acquired), WaitingKind::Event, None, 0);
    store.commit(park).await.unwrap();
    refused(store.delete_if_idle(&acquired.lease.run).await, "not_idle");
    let acquired = held(&*store, "ambiguous").await;
    let mut park = parked(advance(&acquired), WaitingKind::Reconciliation, None, 0);
    park.head.status = Status::Ambiguous;
    store.commit(park).await.unwrap();
    refused(store.delete_if_idle(&acquired.lease.run).await, "not_idle");
    for id in ["queued", "waiting", "ambiguous"] {
        store.load(&run(id)).await.unwrap();
    }
}

pub async fn every_end_can_be_deleted(fixture: &dyn Fixture) {
    let store = fixture.store();
    for status in Status::ALL.iter().filter(|status| status.is_terminal()) {
        let acquired = held(&*store, status.as_str()).await;
        store.commit(ended(advance(&acquired), *status)).await.unwrap();
        store.delete_if_idle(&acquired.lease.run).await.unwrap();
    }
}

pub async fn an_expired_lease_does_not_keep_a_run(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = over(&*store, "r").await;
    store.acquire(&id, lease_for("worker", SHORT)).await.unwrap();
    fixture.pass(SHORT).await;
    store.delete_if_idle(&id).await.unwrap();
}

pub async fn nothing_of_a_deleted_run_is_left(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    let id = acquired.lease.run.clone();
    let now = acquired.loaded.now;
    let big = payload(vec![5; crate::envelope::INLINE_MAX + 1]);
    let called = completed(activity(&id, 1, "a"), big, now);
    let gate = wait(&id, 1, "w", "about", now);
    let mut next = advance(&acquired);
    next.activities = vec![called.clone()];
    next.waits = vec![gate.clone()];
    next.steps = vec![step(1, now)];
    next.decisions = vec![decision(&id, Scope::Operator, "d", now)];
    commit(&*store, &mut acquired, next).await;
    let end = ended(advance(&acquired), Status::Succeeded);
    store.commit(end).await.unwrap();
    store.delete_if_idle(&id).await.unwrap();

    refused(store.load(&id).await, "deleted");
    refused(store.acquire(&id, lease_for("worker", LONG)).await, "deleted");
    refused(store.commit(advance(&acquired)).await, "deleted");
    refused(store.post(post(&id, 0)).await, "deleted");
    refused(store.delete_if_idle(&id).await, "deleted");
    refused(store.quarantine(&id, "why").await, "deleted");
    assert!(store.checkpoint(&id, revision(1)).await.is_err());
    assert_eq!(store.activity(&id, &called.id).await.ok().flatten(), None);
    assert_eq!(store.wait(&id, &gate.id).await.ok().flatten(), None);
    assert_eq!(store.armed(&correlation("about"), 10).await.unwrap(), []);
    assert_eq!(store.events(&id, 0, 10).await.unwrap_or_default(), []);
    assert_eq!(store.steps(&id, 0, 10).await.unwrap_or_default().len(), 0);
    assert_eq!(store.history(&id, None, 10).await.unwrap_or_default(), []);
    let ledger = store.decisions(&id, &Scope::Operator).await;
    assert_eq!(ledger.unwrap_or_default(), []);
    let filter = RunFilter {
        limit: 10,
        ..RunFilter::default()
    };
    assert_eq!(store.list(filter).await.unwrap(), []);
}

pub async fn deleting_and_acquiring_at_once_have_one_winner(fixture: &dyn Fixture) {
    let store = fixture.store();
    for n in 0..10 {
        let id = over(&*store, &format!("r{n}")).await;
        let (deleted, acquired) = join(
            store.delete_if_idle(&id),
            store.acquire(&id, lease_for("worker", LONG)),
        )
        .await;
        match (deleted, acquired) {
            (Ok(()), Err(error)) => assert_eq!(error.kind(), "deleted"),
            (Err(error), Ok(_)) => assert_eq!(error.kind(), "busy"),
            other => panic!("{other:?}"),
        }
    }
}

pub async fn deleting_twice_at_once_deletes_once(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = over(&*store, "r").await;
    let (first, second) = join(store.delete_if_idle(&id), store.delete_if_idle(&id)).await;
    assert_ne!(first.is_ok(), second.is_ok());
    for answer in [first, second].into_iter().filter(Result::is_err) {
        refused(answer, "deleted");
    }
}
