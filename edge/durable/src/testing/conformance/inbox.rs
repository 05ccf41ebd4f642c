//! The inbox: what reaches a run from outside while somebody may hold it. No wake-up is lost.

use futures_util::future::{join, join_all};

use super::support::{claimed, commit, held, hold, over, queued, refused, refused_as, revision, snapshot};
use crate::record::{CancelRequest, Scope, Settled, WaitStatus, WaitingKind};
use crate::store::{Conflict, Listed, RunFilter, Store, StoreError};
use crate::testing::Fixture;
use crate::testing::build::{
    LONG, advance, at, decision, decision_id, delivered, lease_for, parked, payload, post, wait,
};

/// A run that waits for nothing but a delivery, and whose lease is given back.
async fn parked_run(store: &dyn Store, id: &str) -> crate::ids::RunId {
    let acquired = held(store, id).await;
    let park = parked(advance(&acquired), WaitingKind::Event, None, 0);
    store.commit(park).await.unwrap();
    acquired.lease.run
}

fn cancel(id: &str) -> CancelRequest {
    CancelRequest {
        id: decision_id(id),
        reason: format!("because of {id}"),
        by: Some("operator".to_owned()),
        requested_at: at(1_700_000_000_000),
    }
}

pub async fn a_post_grows_the_signal_and_leaves_the_revision(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    let head = store.load(&id).await.unwrap().head;
    for signal in 0..3 {
        assert_eq!(store.post(post(&id, signal)).await.unwrap(), signal + 1);
    }
    let loaded = store.load(&id).await.unwrap();
    assert_eq!(loaded.inbox.signal, 3);
    assert_eq!(loaded.head, head);
    assert_eq!(store.history(&id, None, 10).await.unwrap().len(), 1);
}

pub async fn a_post_is_allowed_while_somebody_holds_the_run(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    store.post(post(&acquired.lease.run, 0)).await.unwrap();
    // The holder goes on, and is told.
    let next = advance(&acquired);
    assert_eq!(commit(&*store, &mut acquired, next).await.signal, 1);
    assert_eq!(acquired.loaded.lease, Some(acquired.lease.clone()));
}

pub async fn a_post_on_an_old_signal_conflicts_and_writes_nothing(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    store.post(post(&id, 0)).await.unwrap();
    let before = snapshot(&*store, &id).await;
    let mut stale = post(&id, 0);
    stale.cancel = Some(cancel("c"));
    stale.decisions = vec![decision(&id, Scope::Cancel, "c", at(5))];
    stale.waits = vec![wait(&id, 1, "w", "about", at(5))];
    let error = refused(store.post(stale).await, "conflict");
    assert!(
        matches!(error, StoreError::Conflict(Conflict::Signal(1))),
        "{error}"
    );
    refused(store.post(post(&id, 2)).await, "conflict");
    assert_eq!(snapshot(&*store, &id).await, before);
}

pub async fn of_concurrent_posts_on_one_signal_one_wins(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    let answers = join_all((0..8).map(|_| store.post(post(&id, 0)))).await;
    assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 1);
    for answer in answers.into_iter().filter(Result::is_err) {
        refused(answer, "conflict");
    }
    assert_eq!(store.load(&id).await.unwrap().inbox.signal, 1);
}

pub async fn a_commit_that_saw_an_old_inbox_is_refused(fixture: &dyn Fixture) {
    let store = fixture.store();
    let acquired = held(&*store, "r").await;
    let park = parked(advance(&acquired), WaitingKind::Event, None, 0);
    store.post(post(&acquired.lease.run, 0)).await.unwrap();
    let before = snapshot(&*store, &acquired.lease.run).await;
    let error = refused(store.commit(park.clone()).await, "conflict");
    assert!(
        matches!(error, StoreError::Conflict(Conflict::Signal(1))),
        "{error}"
    );
    assert_eq!(snapshot(&*store, &acquired.lease.run).await, before);
    // The lease was not given back by it.
    let lease = store.load(&acquired.lease.run).await.unwrap().lease;
    assert_eq!(lease, Some(acquired.lease.clone()));
    // Having read the inbox, the holder may park.
    let mut park = park;
    park.guard.signal = Some(1);
    assert_eq!(store.commit(park).await.unwrap().revision, revision(2));
}

pub async fn a_post_wakes_a_parked_run(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = parked_run(&*store, "r").await;
    assert_eq!(claimed(&*store, 10).await, Vec::<String>::new());
    store.post(post(&id, 0)).await.unwrap();
    assert_eq!(claimed(&*store, 10).await, ["r"]);
}

pub async fn a_post_that_changes_nothing_wakes_nobody(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = parked_run(&*store, "r").await;
    let mut quiet = post(&id, 0);
    quiet.wake = false;
    quiet.decisions = vec![decision(&id, Scope::Operator, "unmatched", at(5))];
    assert_eq!(store.post(quiet).await.unwrap(), 1);
    assert_eq!(claimed(&*store, 10).await, Vec::<String>::new());
    assert_eq!(store.decisions(&id, &Scope::Operator).await.unwrap().len(), 1);
}

pub async fn a_post_wakes_no_run_that_is_over(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = over(&*store, "r").await;
    // Its end has grown the signal: who read the inbox before looks again, and sees that it is over.
    refused(store.post(post(&id, 0)).await, "conflict");
    store.post(post(&id, 1)).await.unwrap();
    assert_eq!(claimed(&*store, 10).await, Vec::<String>::new());
}

pub async fn parking_and_posting_at_once_lose_no_wake_up(fixture: &dyn Fixture) {
    let store = fixture.store();
    for n in 0..20 {
        let mut acquired = held(&*store, &format!("r{n}")).await;
        let id = acquired.lease.run.clone();
        let park = parked(advance(&acquired), WaitingKind::Event, None, 0);
        let (parking, posting) = if n % 2 == 0 {
            join(store.commit(park), store.post(post(&id, 0))).await
        } else {
            let (posting, parking) = join(store.post(post(&id, 0)), store.commit(park)).await;
            (parking, posting)
        };
        posting.unwrap();
        if let Err(error) = parking {
            // The holder still has the run and sees what was posted.
            assert!(
                matches!(error, StoreError::Conflict(Conflict::Signal(1))),
                "{error}"
            );
            let next = advance(&acquired);
            assert_eq!(commit(&*store, &mut acquired, next).await.signal, 1);
            store.release(acquired.lease).await.unwrap();
        }
        assert_eq!(claimed(&*store, 10).await, [id.as_str()]);
    }
}

pub async fn the_first_request_to_cancel_stays(fixture: &dyn Fixture) {
    let store = fixture.store();
    let acquired = held(&*store, "r").await;
    let id = acquired.lease.run.clone();
    for (signal, request) in [(0, "first"), (1, "second")] {
        let mut asked = post(&id, signal);
        asked.cancel = Some(cancel(request));
        asked.decisions = vec![decision(&id, Scope::Cancel, request, at(5))];
        store.post(asked).await.unwrap();
    }
    // A post without a request does not take it away either, and neither does a commit.
    store.post(post(&id, 2)).await.unwrap();
    store.commit(advance(&acquired)).await.unwrap();
    let loaded = store.load(&id).await.unwrap();
    assert_eq!(loaded.inbox.cancel, Some(cancel("first")));
    assert_eq!(store.decisions(&id, &Scope::Cancel).await.unwrap().len(), 2);
    let filter = RunFilter {
        limit: 10,
        ..RunFilter::default()
    };
    let listed = store.list(filter).await.unwrap();
    let [Listed::Run { inbox, .. }] = &listed[..] else {
        panic!("{listed:?}");
    };
    assert_eq!(*inbox, loaded.inbox);
}

pub async fn a_delivery_settles_a_gate_beside_the_holder(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    let id = acquired.lease.run.clone();
    let armed = wait(&id, 1, "w", "about", acquired.loaded.now);
    let mut arming = advance(&acquired);
    arming.waits = vec![armed.clone()];
    arming.head.armed_waits = 1;
    commit(&*store, &mut acquired, arming).await;
    let settled = delivered(armed, "d1", payload("the answer"), acquired.loaded.now);
    let scope = Scope::Wait(settled.id.clone());
    let mut delivery = post(&id, 0);
    delivery.waits = vec![settled.clone()];
    delivery.decisions = vec![decision(&id, scope.clone(), "d1", acquired.loaded.now)];
    store.post(delivery.clone()).await.unwrap();
    assert_eq!(store.wait(&id, &settled.id).await.unwrap(), Some(settled.clone()));
    assert_eq!(store.waits(&id).await.unwrap().first(), Some(&settled));
    assert_eq!(
        store.decision(&id, &scope, &decision_id("d1")).await.unwrap(),
        delivery.decisions.first().cloned()
    );
    // The same delivery again: the decision's id is taken, nothing changes.
    let before = snapshot(&*store, &id).await;
    delivery.signal = 1;
    delivery.waits[0].deliveries = 9;
    refused(store.post(delivery).await, "duplicate");
    assert_eq!(snapshot(&*store, &id).await, before);
    assert!(store.armed(&settled.correlation, 10).await.unwrap().is_empty());
}

pub async fn of_a_timer_and_a_delivery_one_settles_the_wait(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    let id = acquired.lease.run.clone();
    let now = acquired.loaded.now;
    let armed = wait(&id, 1, "w", "about", now);
    let mut arming = advance(&acquired);
    arming.waits = vec![armed.clone()];
    arming.head.armed_waits = 1;
    // Arming settles nothing.
    assert_eq!(commit(&*store, &mut acquired, arming).await.signal, 0);
    let mut timed_out = armed.clone();
    timed_out.status = WaitStatus::TimedOut;
    timed_out.settled = Some(Settled {
        by: None,
        payload: None,
        at: now,
    });
    let mut timer = advance(&acquired);
    timer.waits = vec![timed_out.clone()];
    timer.head.armed_waits = 0;
    timer.guard.signal = Some(0);
    assert_eq!(commit(&*store, &mut acquired, timer).await.signal, 1);
    // Deliveries that read the armed wait before: one that would win, and one that leaves it armed.
    let mut unmatched = armed.clone();
    unmatched.deliveries += 1;
    for late in [delivered(armed, "d1", payload("the answer"), now), unmatched] {
        let mut delivery = post(&id, 0);
        delivery.waits = vec![late];
        refused(store.post(delivery).await, "conflict");
    }
    let stands = store.wait(&id, &timed_out.id).await.unwrap();
    assert_eq!(stands, Some(timed_out));
    assert_eq!(store.post(post(&id, 1)).await.unwrap(), 2);
}

pub async fn nothing_is_posted_to_a_deleted_run(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = over(&*store, "r").await;
    store.delete_if_idle(&id).await.unwrap();
    refused(store.post(post(&id, 0)).await, "deleted");
    refused_as(store.acquire(&id, lease_for("worker", LONG)).await, &["deleted"]);
}

pub async fn a_parked_run_can_be_taken_without_being_due(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = parked_run(&*store, "r").await;
    let acquired = hold(&*store, &id).await;
    store.commit(advance(&acquired)).await.unwrap();
}
