//! What is stored is not what was written: an error of its own, for the one run it concerns (D109 to D115, D231).

use super::support::{commit, held, hold, queued, refused, revision};
use crate::envelope::{INLINE_MAX, SCHEMA_VERSION};
use crate::ids::RunId;
use crate::record::WaitingKind;
use crate::store::{Listed, RunFilter, Store, StoreError};
use crate::testing::build::{
    LONG, activity, advance, at, claim, completed, correlation, create_with, lease_for, parked, payload, run,
    wait,
};
use crate::testing::{Fixture, Tamper};

async fn all(store: &dyn Store) -> Vec<Listed> {
    let filter = RunFilter {
        limit: 100,
        ..RunFilter::default()
    };
    store.list(filter).await.unwrap()
}

/// The ids of healthy and of corrupt runs in a list.
async fn listed(store: &dyn Store) -> (Vec<String>, Vec<String>) {
    let mut healthy = Vec::new();
    let mut corrupt = Vec::new();
    for row in all(store).await {
        match row {
            Listed::Run { head, .. } => healthy.push(head.id.as_str().to_owned()),
            Listed::Corrupt { run, why, .. } => {
                assert!(!why.is_empty());
                corrupt.push(run.as_str().to_owned());
            }
        }
    }
    (healthy, corrupt)
}

/// Whatever is done to a head: `corrupt`, set aside, and nobody else is held up.
async fn head_is_corrupt(fixture: &dyn Fixture, tamper: impl FnOnce(&RunId) -> Tamper, long: bool) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    let state = if long {
        payload(vec![9; INLINE_MAX + 1])
    } else {
        payload("short")
    };
    // The corrupt one is the longest due.
    let victim = run("victim");
    let mut creation = create_with(&victim, state, at(now.as_millis() - 5_000));
    creation.head.waiting = None;
    super::support::new(store.create(creation).await.unwrap());
    let other = queued(&*store, "other").await;
    let third = queued(&*store, "third").await;
    fixture.tamper(&victim, tamper(&other)).await;

    refused(store.load(&victim).await, "corrupt");
    let claimed = store.claim(claim("claimer", 10)).await.unwrap();
    let mut ids: Vec<_> = claimed.runs.iter().map(|a| a.lease.run.clone()).collect();
    ids.sort();
    assert_eq!(ids, [other.clone(), third.clone()]);
    assert_eq!(claimed.quarantined.len(), 1, "{:?}", claimed.quarantined);
    assert_eq!(claimed.quarantined[0].0, victim);

    // Set aside: listed as what it is, not found by the next claim, held by nobody.
    let (mut healthy, corrupt) = listed(&*store).await;
    healthy.sort();
    assert_eq!(healthy, ["other", "third"]);
    assert_eq!(corrupt, ["victim"]);
    let again = store.claim(claim("claimer", 10)).await.unwrap();
    assert!(again.runs.is_empty() && again.quarantined.is_empty(), "{again:?}");
    refused(store.acquire(&victim, lease_for("worker", LONG)).await, "corrupt");
    for acquired in &claimed.runs {
        store.commit(advance(acquired)).await.unwrap();
    }
    // The index cannot heal it.
    let rebuilt = store.rebuild_index().await.unwrap();
    assert_eq!(rebuilt.runs, 3);
    refused(store.acquire(&victim, lease_for("worker", LONG)).await, "corrupt");
    refused(store.load(&victim).await, "corrupt");
    // Nor was anything written over what is left (D115).
    let history = store.history(&victim, None, 10).await.unwrap();
    assert_eq!(history.len(), 1);
}

pub async fn a_changed_state_is_corrupt(fixture: &dyn Fixture) {
    head_is_corrupt(fixture, |_| Tamper::HeadState, false).await;
}

pub async fn a_changed_body_is_corrupt(fixture: &dyn Fixture) {
    head_is_corrupt(fixture, |_| Tamper::HeadBody, false).await;
}

pub async fn a_missing_seal_is_corrupt(fixture: &dyn Fixture) {
    head_is_corrupt(fixture, |_| Tamper::DropHeadSeal, false).await;
}

pub async fn a_copied_head_is_corrupt(fixture: &dyn Fixture) {
    head_is_corrupt(fixture, |other| Tamper::CopyHeadFrom(other.clone()), false).await;
}

pub async fn a_changed_sealed_column_is_corrupt(fixture: &dyn Fixture) {
    head_is_corrupt(fixture, |_| Tamper::WaitingKind(Some("timer")), false).await;
}

pub async fn a_changed_owner_is_corrupt(fixture: &dyn Fixture) {
    head_is_corrupt(fixture, |_| Tamper::Owner(Some("somebody else")), false).await;
}

pub async fn a_changed_long_state_is_corrupt(fixture: &dyn Fixture) {
    let digest = *payload(vec![9; INLINE_MAX + 1]).digest();
    head_is_corrupt(fixture, |_| Tamper::Blob(digest), true).await;
}

pub async fn a_missing_long_state_is_corrupt(fixture: &dyn Fixture) {
    let digest = *payload(vec![9; INLINE_MAX + 1]).digest();
    head_is_corrupt(fixture, |_| Tamper::DropBlob(digest), true).await;
}

pub async fn an_older_schema_than_the_first_is_corrupt(fixture: &dyn Fixture) {
    head_is_corrupt(fixture, |_| Tamper::SchemaVersion(0), false).await;
}

pub async fn acquiring_a_corrupt_run_sets_it_aside(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    queued(&*store, "whole").await;
    fixture.tamper(&id, Tamper::DropHeadSeal).await;
    refused(store.acquire(&id, lease_for("worker", LONG)).await, "corrupt");
    let claimed = store.claim(claim("claimer", 10)).await.unwrap();
    assert_eq!(claimed.runs.len(), 1);
    assert!(claimed.quarantined.is_empty(), "it was set aside before");
    assert_eq!(
        listed(&*store).await,
        (vec!["whole".to_owned()], vec!["r".to_owned()])
    );
}

pub async fn a_corrupt_run_does_not_hide_others_from_a_list(fixture: &dyn Fixture) {
    let store = fixture.store();
    for id in ["a", "b", "c"] {
        queued(&*store, id).await;
    }
    fixture.tamper(&run("b"), Tamper::HeadBody).await;
    // Nobody has set it aside yet.
    let (mut healthy, corrupt) = listed(&*store).await;
    healthy.sort();
    assert_eq!(healthy, ["a", "c"]);
    assert_eq!(corrupt, ["b"]);
}

pub async fn a_newer_schema_is_refused_and_left_to_those_who_know_it(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "newer").await;
    queued(&*store, "known").await;
    let newer = i64::from(SCHEMA_VERSION) + 1;
    fixture.tamper(&id, Tamper::SchemaVersion(newer)).await;
    for answer in [
        store.load(&id).await.map(|_| ()),
        store.acquire(&id, lease_for("worker", LONG)).await.map(|_| ()),
    ] {
        let error = refused(answer, "schema_unsupported");
        assert!(
            matches!(error, StoreError::SchemaUnsupported { found, known } if found == known + 1),
            "{error}"
        );
    }
    let claimed = store.claim(claim("claimer", 10)).await.unwrap();
    assert_eq!(claimed.runs.len(), 1);
    assert_eq!(claimed.runs[0].lease.run.as_str(), "known");
    assert_eq!(claimed.quarantined, []);
    store.rebuild_index().await.unwrap();
    // A program that knows the schema finds it as it was: nobody has set it aside.
    fixture
        .tamper(&id, Tamper::SchemaVersion(i64::from(SCHEMA_VERSION)))
        .await;
    let claimed = store.claim(claim("claimer", 10)).await.unwrap();
    assert_eq!(claimed.runs.len(), 1);
    assert_eq!(claimed.runs[0].lease.run, id);
}

pub async fn a_corrupt_checkpoint_is_corrupt_and_the_others_are_not(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    let id = acquired.lease.run.clone();
    for _ in 0..3 {
        let next = advance(&acquired);
        commit(&*store, &mut acquired, next).await;
    }
    fixture.tamper(&id, Tamper::CheckpointState(revision(1))).await;
    fixture.tamper(&id, Tamper::DropCheckpointSeal(revision(3))).await;
    for n in [1, 3] {
        refused(store.checkpoint(&id, revision(n)).await, "corrupt");
    }
    for n in [2, 4] {
        store.checkpoint(&id, revision(n)).await.unwrap();
    }
    // The head does not depend on them.
    let next = advance(&acquired);
    commit(&*store, &mut acquired, next).await;
}

pub async fn a_corrupt_activity_is_corrupt(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut ids = Vec::new();
    for name in ["victim", "whole"] {
        let mut acquired = held(&*store, name).await;
        let id = acquired.lease.run.clone();
        let now = acquired.loaded.now;
        let bad = completed(activity(&id, 1, "bad"), payload("output"), now);
        let good = completed(activity(&id, 1, "good"), payload("output"), now);
        ids = vec![bad.id.clone(), good.id.clone()];
        let mut next = advance(&acquired);
        next.activities = vec![bad.clone(), good.clone()];
        commit(&*store, &mut acquired, next).await;
        if name == "victim" {
            fixture.tamper(&id, Tamper::ActivityOutput(bad.id.clone())).await;
            refused(store.activity(&id, &bad.id).await, "corrupt");
            refused(store.activities(&id, None, 10).await, "corrupt");
            refused(store.journal(&id, 1).await, "corrupt");
            assert_eq!(store.activity(&id, &good.id).await.unwrap(), Some(good));
            store.load(&id).await.unwrap();
        }
    }
    let whole = store.journal(&run("whole"), 1).await.unwrap().activities;
    assert_eq!(whole.len(), ids.len());
}

pub async fn a_corrupt_wait_is_corrupt_and_does_not_hide_others(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut waits = Vec::new();
    for name in ["victim", "whole"] {
        let mut acquired = held(&*store, name).await;
        let armed = wait(&acquired.lease.run, 1, "w", "about", acquired.loaded.now);
        let mut next = advance(&acquired);
        next.waits = vec![armed.clone()];
        commit(&*store, &mut acquired, next).await;
        waits.push(armed);
    }
    let victim = run("victim");
    fixture
        .tamper(&victim, Tamper::WaitBody(waits[0].id.clone()))
        .await;
    refused(store.wait(&victim, &waits[0].id).await, "corrupt");
    refused(store.waits(&victim).await, "corrupt");
    refused(store.journal(&victim, 1).await, "corrupt");
    assert_eq!(
        store.armed(&correlation("about"), 10).await.unwrap(),
        [waits[1].clone()]
    );
}

pub async fn a_run_set_aside_is_listed_with_its_reason_and_freed_when_whole(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    store.quarantine(&id, "a journal of another run").await.unwrap();
    let rows = all(&*store).await;
    let [Listed::Corrupt { run, created_at, why }] = &rows[..] else {
        panic!("{rows:?}");
    };
    assert_eq!((run, why.as_str()), (&id, "a journal of another run"));
    refused(store.acquire(&id, lease_for("worker", LONG)).await, "corrupt");
    // Its head can still be looked at.
    let loaded = store.load(&id).await.unwrap();
    assert_eq!(*created_at, loaded.head.created_at);
    assert_eq!(
        loaded.inbox.quarantine.as_deref(),
        Some("a journal of another run")
    );
    let rebuilt = store.rebuild_index().await.unwrap();
    assert_eq!((rebuilt.runs, rebuilt.repaired, rebuilt.quarantined), (1, 1, 0));
    assert_eq!(store.load(&id).await.unwrap().inbox.quarantine, None);
    assert_eq!(super::support::claimed(&*store, 10).await, ["r"]);
}

pub async fn a_run_with_a_corrupt_journal_stays_aside(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    let id = acquired.lease.run.clone();
    let bad = completed(activity(&id, 1, "bad"), payload("output"), acquired.loaded.now);
    let mut next = advance(&acquired);
    next.activities = vec![bad.clone()];
    next.release = true;
    commit(&*store, &mut acquired, next).await;
    fixture.tamper(&id, Tamper::ActivityOutput(bad.id)).await;
    store.quarantine(&id, "an activity is corrupt").await.unwrap();
    store.rebuild_index().await.unwrap();
    refused(store.acquire(&id, lease_for("worker", LONG)).await, "corrupt");
    let claimed = store.claim(claim("claimer", 10)).await.unwrap();
    assert!(claimed.runs.is_empty());
}

pub async fn a_wrecked_index_is_rebuilt_from_sealed_heads(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    let far = at(now.as_millis() + 3_600_000);
    // Each kind of run, its index wrecked; and one that is right.
    let forgotten = queued(&*store, "forgotten").await;
    fixture.tamper(&forgotten, Tamper::DueAt(None)).await;
    let delayed = queued(&*store, "delayed").await;
    fixture.tamper(&delayed, Tamper::DueAt(Some(far))).await;
    let over = super::support::over(&*store, "over").await;
    fixture.tamper(&over, Tamper::DueAt(Some(now))).await;
    let acquired = held(&*store, "timer").await;
    let park = parked(advance(&acquired), WaitingKind::Timer, Some(far), 0);
    store.commit(park).await.unwrap();
    fixture.tamper(&run("timer"), Tamper::DueAt(Some(now))).await;
    let acquired = held(&*store, "gate").await;
    let park = parked(advance(&acquired), WaitingKind::Approval, None, 0);
    store.commit(park).await.unwrap();
    fixture.tamper(&run("gate"), Tamper::DueAt(Some(now))).await;
    let acquired = held(&*store, "posted").await;
    let park = parked(advance(&acquired), WaitingKind::Approval, None, 0);
    store.commit(park).await.unwrap();
    store
        .post(crate::testing::build::post(&run("posted"), 0))
        .await
        .unwrap();
    fixture.tamper(&run("posted"), Tamper::DueAt(None)).await;
    queued(&*store, "right").await;

    let rebuilt = store.rebuild_index().await.unwrap();
    assert_eq!((rebuilt.runs, rebuilt.repaired, rebuilt.quarantined), (7, 6, 0));
    let rebuilt = store.rebuild_index().await.unwrap();
    assert_eq!((rebuilt.runs, rebuilt.repaired, rebuilt.quarantined), (7, 0, 0));
    let mut found = super::support::claimed(&*store, 10).await;
    found.sort();
    assert_eq!(found, ["delayed", "forgotten", "posted", "right"]);
    let due = store.due(far, None, 10).await.unwrap();
    let timer = due.iter().find(|due| due.run.as_str() == "timer");
    assert_eq!(timer.map(|due| due.due_at), Some(far));
    assert_eq!(due.len(), 5);
    hold(&*store, &run("gate")).await;
}

pub async fn a_rebuild_sets_corrupt_runs_aside(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    queued(&*store, "whole").await;
    fixture.tamper(&id, Tamper::HeadBody).await;
    let rebuilt = store.rebuild_index().await.unwrap();
    assert_eq!((rebuilt.runs, rebuilt.repaired, rebuilt.quarantined), (2, 0, 1));
    let claimed = store.claim(claim("claimer", 10)).await.unwrap();
    assert_eq!(claimed.runs.len(), 1);
    assert_eq!(claimed.quarantined, []);
}
