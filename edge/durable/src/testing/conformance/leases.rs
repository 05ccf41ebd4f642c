//! Leases: an incarnation is the authority, the store's clock its end (D123 to D131).

use futures_util::future::join_all;

use super::support::{claimed, held, hold, over, queued, refused, refused_as, snapshot};
use crate::store::{Authority, Renewal};
use crate::testing::Fixture;
use crate::testing::build::{LONG, SHORT, advance, advance_loaded, create, forged, lease_for, run};

pub async fn each_acquisition_has_a_new_incarnation_also_for_the_same_owner(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut creation = create(&run("r"), store.now().await.unwrap());
    creation.lease = Some(lease_for("worker", SHORT));
    let mut last = super::support::new(store.create(creation).await.unwrap())
        .expect("a lease was asked for")
        .incarnation;
    fixture.pass(SHORT).await;
    for _ in 0..3 {
        let acquired = hold(&*store, &run("r")).await;
        assert!(acquired.lease.incarnation > last);
        last = acquired.lease.incarnation;
        store.release(acquired.lease).await.unwrap();
    }
    let claimed = store
        .claim(crate::testing::build::claim("worker", 1))
        .await
        .unwrap();
    assert!(claimed.runs[0].lease.incarnation > last);
}

pub async fn a_live_lease_is_busy_for_everybody_also_its_owner(fixture: &dyn Fixture) {
    let store = fixture.store();
    let acquired = held(&*store, "r").await;
    let id = &acquired.lease.run;
    for owner in ["worker", "other"] {
        refused(store.acquire(id, lease_for(owner, LONG)).await, "busy");
    }
    assert_eq!(claimed(&*store, 10).await, Vec::<String>::new());
    // The refusals took nothing from the holder.
    store.commit(advance(&acquired)).await.unwrap();
}

pub async fn of_concurrent_acquisitions_one_wins(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    let answers = join_all((0..8).map(|n| store.acquire(&id, lease_for(&format!("w{n}"), LONG)))).await;
    let (won, lost): (Vec<_>, Vec<_>) = answers.into_iter().partition(Result::is_ok);
    assert_eq!(won.len(), 1);
    for answer in lost {
        refused(answer, "busy");
    }
    let lease = store.load(&id).await.unwrap().lease;
    assert_eq!(lease, won.into_iter().next().map(|answer| answer.unwrap().lease));
}

pub async fn a_stale_handle_cannot_renew_release_or_commit(fixture: &dyn Fixture) {
    let store = fixture.store();
    let stale = held(&*store, "r").await;
    store.release(stale.lease.clone()).await.unwrap();
    // The same owner: only the incarnation differs.
    let successor = hold(&*store, &stale.lease.run).await;
    let before = snapshot(&*store, &stale.lease.run).await;
    assert_eq!(
        store.renew(vec![stale.lease.clone()], LONG).await.unwrap(),
        [Renewal::Lost]
    );
    refused(store.release(stale.lease.clone()).await, "lease_lost");
    refused(store.commit(advance(&stale)).await, "lease_lost");
    assert_eq!(snapshot(&*store, &stale.lease.run).await, before);
    assert_eq!(
        store.load(&stale.lease.run).await.unwrap().lease,
        Some(successor.lease.clone())
    );
    store.commit(advance(&successor)).await.unwrap();
}

pub async fn an_expired_lease_is_lost_although_nobody_took_it(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    let acquired = store.acquire(&id, lease_for("worker", SHORT)).await.unwrap();
    fixture.pass(SHORT).await;
    let before = snapshot(&*store, &id).await;
    refused(store.commit(advance(&acquired)).await, "lease_lost");
    assert_eq!(
        store.renew(vec![acquired.lease.clone()], LONG).await.unwrap(),
        [Renewal::Lost]
    );
    refused(store.release(acquired.lease.clone()).await, "lease_lost");
    // The refused renewal did not bring it back.
    refused(store.commit(advance(&acquired)).await, "lease_lost");
    assert_eq!(snapshot(&*store, &id).await, before);
    assert_eq!(store.load(&id).await.unwrap().lease, None);
}

pub async fn an_expired_lease_can_be_taken(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    let lost = store.acquire(&id, lease_for("worker", SHORT)).await.unwrap();
    fixture.pass(SHORT).await;
    let taken = hold(&*store, &id).await;
    assert!(taken.lease.incarnation > lost.lease.incarnation);
    refused(store.commit(advance(&lost)).await, "lease_lost");
    store.commit(advance(&taken)).await.unwrap();
}

pub async fn owner_and_expiry_in_a_handle_are_no_authority(fixture: &dyn Fixture) {
    let store = fixture.store();
    let acquired = held(&*store, "r").await;
    // Who names the owner and a late expiry without the incarnation has nothing.
    for incarnation in [0, acquired.lease.incarnation + 1] {
        let lease = forged(&acquired.lease, incarnation);
        let commit = advance_loaded(&acquired.loaded, Authority::Lease(lease.clone()));
        refused(store.commit(commit).await, "lease_lost");
        refused(store.release(lease.clone()).await, "lease_lost");
        assert_eq!(store.renew(vec![lease], LONG).await.unwrap(), [Renewal::Lost]);
    }
    // And the holder needs neither.
    let mut lease = acquired.lease.clone();
    lease.owner = lease_for("somebody", LONG).owner;
    lease.expires_at = crate::time::Timestamp::MIN;
    store
        .commit(advance_loaded(&acquired.loaded, Authority::Lease(lease)))
        .await
        .unwrap();
}

pub async fn a_released_run_is_free_at_once(fixture: &dyn Fixture) {
    let store = fixture.store();
    let first = held(&*store, "r").await;
    store.release(first.lease.clone()).await.unwrap();
    refused(store.release(first.lease.clone()).await, "lease_lost");
    assert_eq!(store.load(&first.lease.run).await.unwrap().lease, None);
    assert_eq!(claimed(&*store, 10).await, ["r"]);
}

pub async fn a_commit_may_give_the_lease_back(fixture: &dyn Fixture) {
    let store = fixture.store();
    let first = held(&*store, "r").await;
    let mut last = advance(&first);
    last.release = true;
    store.commit(last).await.unwrap();
    let loaded = store.load(&first.lease.run).await.unwrap();
    assert_eq!(loaded.lease, None);
    let next = advance_loaded(&loaded, Authority::Lease(first.lease.clone()));
    refused(store.commit(next).await, "lease_lost");
    assert!(hold(&*store, &first.lease.run).await.lease.incarnation > first.lease.incarnation);
}

pub async fn renewals_are_answered_lease_by_lease_in_order(fixture: &dyn Fixture) {
    let store = fixture.store();
    let a = held(&*store, "a").await;
    let b = held(&*store, "b").await;
    let c = held(&*store, "c").await;
    store.release(b.lease.clone()).await.unwrap();
    store
        .post(crate::testing::build::post(&c.lease.run, 0))
        .await
        .unwrap();
    // Not in the order of their ids.
    let asked = vec![c.lease.clone(), b.lease, a.lease.clone()];
    let answers = store.renew(asked, 2 * LONG).await.unwrap();
    let [
        Renewal::Live {
            expires_at: c_expires,
            signal: 1,
        },
        Renewal::Lost,
        Renewal::Live { signal: 0, .. },
    ] = answers[..]
    else {
        panic!("{answers:?}");
    };
    assert!(c_expires > c.lease.expires_at);
    let lease = store.load(&c.lease.run).await.unwrap().lease.unwrap();
    assert_eq!(lease.expires_at, c_expires);
    assert_eq!(lease.incarnation, c.lease.incarnation);
    assert_eq!(store.renew(Vec::new(), LONG).await.unwrap(), []);
}

pub async fn a_lease_lasts_at_least_a_moment(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    let acquired = store
        .acquire(&id, lease_for("worker", std::time::Duration::ZERO))
        .await
        .unwrap();
    assert!(acquired.lease.expires_at > acquired.loaded.now);
    fixture.pass(SHORT).await;
    refused(store.commit(advance(&acquired)).await, "lease_lost");
}

pub async fn a_fence_survives_deletion(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    let stale = store.acquire(&id, lease_for("worker", SHORT)).await.unwrap();
    fixture.pass(SHORT).await;
    let holder = hold(&*store, &id).await;
    let end = crate::testing::build::ended(advance(&holder), crate::record::Status::Failed);
    store.commit(end).await.unwrap();
    store.delete_if_idle(&id).await.unwrap();
    for old in [&stale, &holder] {
        refused_as(store.commit(advance(old)).await, &["deleted", "lease_lost"]);
        refused_as(store.release(old.lease.clone()).await, &["deleted", "lease_lost"]);
        assert_eq!(
            store.renew(vec![old.lease.clone()], LONG).await.unwrap(),
            [Renewal::Lost]
        );
    }
    refused(store.acquire(&id, lease_for("worker", LONG)).await, "deleted");
}

pub async fn a_run_that_is_over_can_be_held(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = over(&*store, "r").await;
    hold(&*store, &id).await;
}

pub async fn an_idle_commit_is_refused_while_somebody_holds_the_run(fixture: &dyn Fixture) {
    let store = fixture.store();
    let acquired = held(&*store, "r").await;
    let before = snapshot(&*store, &acquired.lease.run).await;
    let idle = advance_loaded(&acquired.loaded, Authority::Idle);
    refused(store.commit(idle.clone()).await, "busy");
    assert_eq!(snapshot(&*store, &acquired.lease.run).await, before);
    store.release(acquired.lease).await.unwrap();
    store.commit(idle).await.unwrap();
}

pub async fn an_idle_commit_is_allowed_when_the_lease_has_expired(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    let acquired = store.acquire(&id, lease_for("worker", SHORT)).await.unwrap();
    fixture.pass(SHORT).await;
    let idle = advance_loaded(&acquired.loaded, Authority::Idle);
    store.commit(idle).await.unwrap();
    refused_as(
        store.commit(advance(&acquired)).await,
        &["lease_lost", "conflict"],
    );
}
