//! Claims: what is due and unheld, oldest first (D160, D175).

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;

use super::support::{claimed, held, hold, new, over, queued};
use crate::record::WaitingKind;
use crate::store::{Claim, Store};
use crate::testing::Fixture;
use crate::testing::build::{LONG, SHORT, advance, claim, create, lease_for, parked, run};
use crate::time::Timestamp;

const NONE: [&str; 0] = [];

/// A time this many milliseconds before `now`.
fn before(now: Timestamp, ms: i64) -> Timestamp {
    Timestamp::from_millis(now.as_millis() - ms).unwrap()
}

/// A queued run that is due at this time.
async fn due(store: &dyn Store, id: &str, due_at: Option<Timestamp>) {
    let mut creation = create(&run(id), store.now().await.unwrap());
    creation.due_at = due_at;
    new(store.create(creation).await.unwrap());
}

pub async fn the_longest_due_comes_first(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    for (id, ms) in [("b", 2_000), ("c", 1_000), ("a", 3_000), ("d", 2_500)] {
        due(&*store, id, Some(before(now, ms))).await;
    }
    assert_eq!(claimed(&*store, 10).await, ["a", "d", "b", "c"]);
}

pub async fn a_claim_takes_no_more_than_asked(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    for (id, ms) in [("a", 3_000), ("b", 2_000), ("c", 1_000)] {
        due(&*store, id, Some(before(now, ms))).await;
    }
    assert_eq!(claimed(&*store, 2).await, ["a", "b"]);
    assert_eq!(claimed(&*store, 2).await, ["c"]);
    assert_eq!(claimed(&*store, 2).await, NONE);
}

pub async fn a_claimed_run_comes_with_everything(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    store.post(crate::testing::build::post(&id, 0)).await.unwrap();
    let mut claimed = store.claim(claim("claimer", 1)).await.unwrap().runs;
    let acquired = claimed.pop().expect("it is due");
    assert_eq!(acquired.lease.owner.as_str(), "claimer");
    assert_eq!(acquired.loaded.lease, Some(acquired.lease.clone()));
    let mut loaded = store.load(&id).await.unwrap();
    loaded.now = acquired.loaded.now;
    assert_eq!(acquired.loaded, loaded);
    store.commit(advance(&acquired)).await.unwrap();
}

pub async fn what_is_not_due_yet_is_left(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    due(&*store, "later", Some(now.plus(Duration::from_hours(1)))).await;
    due(&*store, "soon", Some(now.plus(Duration::from_secs(30)))).await;
    due(&*store, "never", None).await;
    assert_eq!(claimed(&*store, 10).await, NONE);
}

pub async fn a_timer_comes_due(fixture: &dyn Fixture) {
    let store = fixture.store();
    let acquired = held(&*store, "r").await;
    let now = store.now().await.unwrap();
    let park = parked(advance(&acquired), WaitingKind::Timer, Some(now.plus(SHORT)), 0);
    store.commit(park).await.unwrap();
    fixture.pass(SHORT).await;
    assert_eq!(claimed(&*store, 10).await, ["r"]);
}

pub async fn a_waiting_run_without_a_time_is_never_claimed(fixture: &dyn Fixture) {
    let store = fixture.store();
    let acquired = held(&*store, "r").await;
    let park = parked(advance(&acquired), WaitingKind::Approval, None, 0);
    store.commit(park).await.unwrap();
    fixture.pass(SHORT).await;
    assert_eq!(claimed(&*store, 10).await, NONE);
}

pub async fn a_run_that_is_over_is_never_claimed(fixture: &dyn Fixture) {
    let store = fixture.store();
    over(&*store, "r").await;
    fixture.pass(SHORT).await;
    assert_eq!(claimed(&*store, 10).await, NONE);
}

pub async fn only_known_definitions_are_claimed(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    for (id, kind, name) in [
        ("1", "graph", "a"),
        ("2", "graph", "b"),
        ("3", "flow", "a"),
        ("4", "flow", "b"),
    ] {
        let mut creation = create(&run(id), before(now, 10 - i64::from(id.as_bytes()[0] - b'0')));
        creation.head.definition.kind = kind.to_owned();
        creation.head.definition.name = name.to_owned();
        new(store.create(creation).await.unwrap());
    }
    let known = |definitions: &[(&str, &str)]| Claim {
        lease: lease_for("claimer", LONG),
        definitions: definitions
            .iter()
            .map(|(kind, name)| ((*kind).to_owned(), (*name).to_owned()))
            .collect(),
        except: Vec::new(),
        limit: 10,
    };
    let ids = |claimed: crate::store::Claimed| -> Vec<String> {
        claimed
            .runs
            .iter()
            .map(|acquired| acquired.lease.run.as_str().to_owned())
            .collect()
    };
    // The pairs count, not their parts.
    let pairs = store
        .claim(known(&[("graph", "a"), ("flow", "b")]))
        .await
        .unwrap();
    assert_eq!(ids(pairs), ["1", "4"]);
    let none = store
        .claim(known(&[("graph", "A"), ("graph", "c")]))
        .await
        .unwrap();
    assert_eq!(ids(none), NONE);
    let last = store.claim(known(&[("flow", "a")])).await.unwrap();
    assert_eq!(ids(last), ["3"]);
}

pub async fn named_runs_are_passed_over(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    for (id, ms) in [("a", 3_000), ("b", 2_000), ("c", 1_000)] {
        due(&*store, id, Some(before(now, ms))).await;
    }
    let mut others = claim("claimer", 1);
    others.except = vec![run("a"), run("never heard of")];
    let claimed = store.claim(others.clone()).await.unwrap().runs;
    assert_eq!(claimed.len(), 1);
    assert_eq!(claimed[0].lease.run, run("b"));
    others.except = vec![run("a"), run("c")];
    assert!(store.claim(others).await.unwrap().runs.is_empty());
    assert_eq!(super::support::claimed(&*store, 10).await, ["a", "c"]);
}

pub async fn a_held_run_is_skipped(fixture: &dyn Fixture) {
    let store = fixture.store();
    let acquired = held(&*store, "held").await;
    queued(&*store, "free").await;
    assert_eq!(claimed(&*store, 10).await, ["free"]);
    store.release(acquired.lease).await.unwrap();
    assert_eq!(claimed(&*store, 10).await, ["held"]);
}

pub async fn the_run_of_a_lost_worker_is_claimed(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    let lost = store.acquire(&id, lease_for("lost", SHORT)).await.unwrap();
    fixture.pass(SHORT).await;
    let claimed = store.claim(claim("claimer", 10)).await.unwrap();
    assert_eq!(claimed.runs.len(), 1);
    assert!(claimed.runs[0].lease.incarnation > lost.lease.incarnation);
    store.commit(advance(&claimed.runs[0])).await.unwrap();
}

pub async fn a_run_set_aside_is_skipped(fixture: &dyn Fixture) {
    let store = fixture.store();
    let aside = queued(&*store, "aside").await;
    queued(&*store, "whole").await;
    store.quarantine(&aside, "for a reason").await.unwrap();
    assert_eq!(claimed(&*store, 10).await, ["whole"]);
}

pub async fn claimers_share_without_overlap(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut left = BTreeSet::new();
    for n in 0..40 {
        left.insert(queued(&*store, &format!("r{n}")).await);
    }
    // A claim may skip what another is taking at this moment, so some rounds find less.
    for _ in 0..20 {
        let claims = join_all((0..4).map(|n| store.claim(claim(&format!("claimer {n}"), 5)))).await;
        for claim in claims {
            let claim = claim.unwrap();
            assert!(claim.runs.len() <= 5);
            for acquired in claim.runs {
                assert!(
                    left.remove(&acquired.lease.run),
                    "claimed twice: {}",
                    acquired.lease.run
                );
            }
        }
    }
    assert!(left.is_empty(), "never claimed: {left:?}");
}

pub async fn claiming_and_acquiring_at_once_have_one_winner(fixture: &dyn Fixture) {
    let store = fixture.store();
    for n in 0..10 {
        let id = queued(&*store, &format!("r{n}")).await;
        let (claimed, acquired) = futures_util::future::join(
            store.claim(claim("claimer", 1)),
            store.acquire(&id, lease_for("worker", LONG)),
        )
        .await;
        let claimed = claimed.unwrap().runs.len();
        match acquired {
            Ok(_) => assert_eq!(claimed, 0),
            Err(error) => assert_eq!((error.kind(), claimed), ("busy", 1)),
        }
    }
}

pub async fn a_run_goes_on_being_due_until_a_commit_says_otherwise(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    for _ in 0..3 {
        let acquired = hold(&*store, &id).await;
        store.commit(advance(&acquired)).await.unwrap();
        store.release(acquired.lease).await.unwrap();
        let again = store.claim(claim("claimer", 1)).await.unwrap().runs;
        assert_eq!(again.len(), 1);
        store.release(again[0].lease.clone()).await.unwrap();
    }
}
