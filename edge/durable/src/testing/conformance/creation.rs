//! Creation, idempotency keys, tombstones.

use std::time::Duration;

use futures_util::future::join_all;

use super::support::{held, hold, new, over, queued, refused, revision, snapshot};
use crate::ids::Revision;
use crate::record::{Status, WaitingKind};
use crate::store::{Created, Store};
use crate::testing::Fixture;
use crate::testing::build::{
    LONG, advance, create, create_with, ended, idempotency, lease_for, parked, payload, post, run,
};
use crate::time::Timestamp;

pub async fn a_new_run_is_loaded_as_it_was_written(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    let id = run("r");
    let creation = create(&id, now);
    assert_eq!(new(store.create(creation.clone()).await.unwrap()), None);
    let loaded = store.load(&id).await.unwrap();
    assert_eq!(loaded.head, creation.head);
    assert_eq!(loaded.state, creation.state);
    assert_eq!(loaded.inbox, crate::record::Inbox::default());
    assert_eq!(loaded.lease, None);
    assert_eq!(store.events(&id, 0, 10).await.unwrap(), creation.events);
    let first = store.checkpoint(&id, Revision::FIRST).await.unwrap();
    assert_eq!(first.state, Some(creation.state));
    assert_eq!(first.status, creation.head.status);
    assert_eq!(first.cursor, creation.head.cursor);
}

pub async fn a_new_run_may_be_held_from_its_first_moment(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    let id = run("r");
    let mut creation = create(&id, now);
    creation.lease = Some(lease_for("worker", LONG));
    let lease = new(store.create(creation).await.unwrap()).expect("a lease was asked for");
    assert_eq!(lease.run, id);
    assert_eq!(lease.owner.as_str(), "worker");
    let loaded = store.load(&id).await.unwrap();
    assert_eq!(loaded.lease, Some(lease.clone()));
    refused(store.acquire(&id, lease_for("other", LONG)).await, "busy");
    let held = crate::store::Acquired { lease, loaded };
    assert_eq!(store.commit(advance(&held)).await.unwrap().revision, revision(2));
}

pub async fn the_first_revision_is_the_stores(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut creation = create(&run("r"), store.now().await.unwrap());
    creation.head.revision = revision(99);
    new(store.create(creation).await.unwrap());
    assert_eq!(
        store.load(&run("r")).await.unwrap().head.revision,
        Revision::FIRST
    );
}

pub async fn a_taken_id_is_told_and_nothing_is_written(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    let before = snapshot(&*store, &id).await;
    let mut twin = create_with(&id, payload("another state"), store.now().await.unwrap());
    twin.idempotency = Some(idempotency("caller", "key", 1));
    twin.lease = Some(lease_for("thief", LONG));
    assert_eq!(store.create(twin).await.unwrap(), Created::Exists);
    assert_eq!(snapshot(&*store, &id).await, before);
    assert_eq!(store.load(&id).await.unwrap().lease, None);
    // The key was not used up.
    let mut other = create(&run("other"), store.now().await.unwrap());
    other.idempotency = Some(idempotency("caller", "key", 2));
    new(store.create(other).await.unwrap());
}

pub async fn the_same_key_and_request_make_one_run(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    let mut first = create(&run("first"), now);
    first.idempotency = Some(idempotency("caller", "key", 1));
    new(store.create(first.clone()).await.unwrap());
    let mut again = create(&run("second"), now);
    again.idempotency.clone_from(&first.idempotency);
    let replayed = Created::Replayed { run: run("first") };
    assert_eq!(store.create(again).await.unwrap(), replayed);
    // Also when the caller named the run, which exists by then.
    assert_eq!(store.create(first).await.unwrap(), replayed);
    refused(store.load(&run("second")).await, "not_found");
}

pub async fn the_same_key_with_another_request_conflicts(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    let mut first = create(&run("first"), now);
    first.idempotency = Some(idempotency("caller", "key", 1));
    new(store.create(first).await.unwrap());
    let mut other = create(&run("second"), now);
    other.idempotency = Some(idempotency("caller", "key", 2));
    assert_eq!(
        store.create(other).await.unwrap(),
        Created::KeyConflict { run: run("first") }
    );
    refused(store.load(&run("second")).await, "not_found");
}

pub async fn keys_of_two_callers_are_two_keys(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    // The second pair would be the first one if scope and key were put together into one text.
    for (id, scope, key) in [
        ("a", "x", "yz"),
        ("b", "xy", "z"),
        ("c", "x", "YZ"),
        ("d", "x", "yz "),
    ] {
        let mut creation = create(&run(id), now);
        creation.idempotency = Some(idempotency(scope, key, 1));
        new(store.create(creation).await.unwrap());
    }
}

/// A queued run that was made with a key of this name, at this time of the caller's clock.
async fn keyed(store: &dyn Store, name: &str, now: Timestamp) {
    let mut creation = create(&run(name), now);
    creation.idempotency = Some(idempotency("caller", name, 1));
    new(store.create(creation).await.unwrap());
}

/// Whether a creation with the key of this name is answered with its run.
async fn is_kept(store: &dyn Store, name: &str) -> bool {
    let mut again = create(&run("another"), store.now().await.unwrap());
    again.idempotency = Some(idempotency("caller", name, 2));
    let first = store.keyed(&idempotency("caller", name, 1)).await.unwrap();
    let known = store.keyed(&idempotency("caller", name, 2)).await.unwrap();
    assert_eq!(store.keyed(&idempotency("another", name, 1)).await.unwrap(), None);
    match store.create(again).await.unwrap() {
        Created::KeyConflict { run: made } => {
            assert_eq!(made, run(name));
            assert_eq!(known, Some(Created::KeyConflict { run: made.clone() }));
            assert_eq!(first, Some(Created::Replayed { run: made }));
            true
        }
        Created::New { .. } => {
            assert_eq!((known, first), (None, None));
            let end = ended(advance(&hold(store, &run("another")).await), Status::Failed);
            store.commit(end).await.unwrap();
            false
        }
        other @ (Created::Replayed { .. } | Created::Exists) => panic!("{other:?}"),
    }
}

pub async fn old_keys_are_forgotten_when_their_run_is_over_or_gone(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    for name in ["queued", "waiting", "over", "gone"] {
        keyed(&*store, name, now).await;
    }
    let acquired = hold(&*store, &run("waiting")).await;
    let park = parked(advance(&acquired), WaitingKind::Approval, None, 0);
    store.commit(park).await.unwrap();
    for name in ["over", "gone"] {
        let acquired = hold(&*store, &run(name)).await;
        let end = ended(advance(&acquired), Status::Succeeded);
        store.commit(end).await.unwrap();
    }
    store.delete_if_idle(&run("gone")).await.unwrap();
    // None is older than the first of them.
    assert_eq!(store.forget_keys(now, 100).await.unwrap(), 0);
    assert!(is_kept(&*store, "over").await);
    let later = store.now().await.unwrap().plus(Duration::from_secs(1));
    assert_eq!(store.forget_keys(later, 100).await.unwrap(), 2);
    assert_eq!(store.forget_keys(later, 100).await.unwrap(), 0);
    assert!(is_kept(&*store, "queued").await);
    assert!(is_kept(&*store, "waiting").await);
    assert!(!is_kept(&*store, "over").await);
}

pub async fn the_oldest_keys_are_forgotten_first(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut times = Vec::new();
    for name in ["z first", "m second", "a third"] {
        let id = over(&*store, &format!("before {name}")).await;
        store.delete_if_idle(&id).await.unwrap();
        fixture.pass(Duration::from_millis(2)).await;
        let now = store.now().await.unwrap();
        times.push(now);
        keyed(&*store, name, now).await;
        let acquired = hold(&*store, &run(name)).await;
        store
            .commit(ended(advance(&acquired), Status::Succeeded))
            .await
            .unwrap();
    }
    fixture.pass(Duration::from_millis(2)).await;
    let later = store.now().await.unwrap();
    assert_eq!(store.forget_keys(later, 0).await.unwrap(), 0);
    assert_eq!(store.forget_keys(later, 1).await.unwrap(), 1);
    assert!(is_kept(&*store, "m second").await && is_kept(&*store, "a third").await);
    // Up to a time that the last of them is not older than.
    assert_eq!(store.forget_keys(times[2], 100).await.unwrap(), 1);
    assert!(is_kept(&*store, "a third").await);
    assert_eq!(store.forget_keys(later, 100).await.unwrap(), 1);
}

pub async fn concurrent_twins_make_one_run(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    let answers = join_all((0..8).map(|n| {
        let mut creation = create(&run(&format!("twin {n}")), now);
        creation.idempotency = Some(idempotency("caller", "key", 1));
        store.create(creation)
    }))
    .await;
    let mut made = Vec::new();
    let mut replayed = Vec::new();
    for (n, answer) in answers.into_iter().enumerate() {
        match answer.unwrap() {
            Created::New { .. } => made.push(run(&format!("twin {n}"))),
            Created::Replayed { run } => replayed.push(run),
            other @ (Created::KeyConflict { .. } | Created::Exists) => panic!("{other:?}"),
        }
    }
    assert_eq!(made.len(), 1, "{made:?}");
    assert_eq!(replayed, vec![made[0].clone(); 7]);
}

pub async fn concurrent_creations_of_one_id_make_one_run(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    let answers = join_all((0..8).map(|n| {
        let state = payload(format!("state {n}"));
        store.create(create_with(&run("r"), state, now))
    }))
    .await;
    let mut winner = None;
    for (n, answer) in answers.into_iter().enumerate() {
        match answer.unwrap() {
            Created::New { .. } => assert_eq!(winner.replace(n), None),
            Created::Exists => {}
            other @ (Created::KeyConflict { .. } | Created::Replayed { .. }) => panic!("{other:?}"),
        }
    }
    let winner = winner.expect("one of them made it");
    let loaded = store.load(&run("r")).await.unwrap();
    assert_eq!(loaded.state, payload(format!("state {winner}")));
}

pub async fn a_deleted_id_is_never_used_again(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = over(&*store, "r").await;
    store.delete_if_idle(&id).await.unwrap();
    let now = store.now().await.unwrap();
    let mut again = create(&id, now);
    again.idempotency = Some(idempotency("caller", "key", 1));
    refused(store.create(again).await, "deleted");
    refused(store.load(&id).await, "deleted");
    // The key was not used up.
    let mut other = create(&run("other"), now);
    other.idempotency = Some(idempotency("caller", "key", 2));
    new(store.create(other).await.unwrap());
}

pub async fn events_of_a_new_run_start_at_one(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut creation = create(&run("r"), store.now().await.unwrap());
    creation.events[0].seq = 2;
    creation.head.event_seq = 2;
    assert!(store.create(creation).await.is_err());
    refused(store.load(&run("r")).await, "not_found");
}

pub async fn an_unknown_run_is_not_found(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut known = held(&*store, "known").await;
    let id = run("unknown");
    known.lease.run = id.clone();
    known.loaded.head.id = id.clone();
    refused(store.load(&id).await, "not_found");
    refused(store.acquire(&id, lease_for("worker", LONG)).await, "not_found");
    refused(store.commit(advance(&known)).await, "not_found");
    refused(store.post(post(&id, 0)).await, "not_found");
    refused(store.release(known.lease.clone()).await, "lease_lost");
    refused(store.delete_if_idle(&id).await, "not_found");
    refused(store.quarantine(&id, "why").await, "not_found");
    assert_eq!(
        store.renew(vec![known.lease], LONG).await.unwrap(),
        [crate::store::Renewal::Lost]
    );
}
