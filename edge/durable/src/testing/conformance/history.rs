//! Committed revisions: gapless, exact, and honest about what is gone (D209 to D211, D226).

use super::support::{commit, held, refused, revision};
use crate::envelope::INLINE_MAX;
use crate::ids::RunId;
use crate::payload::Payload;
use crate::store::Store;
use crate::testing::Fixture;
use crate::testing::build::{advance, payload, run};

/// A run at revision `n`, and its states in order. Every other state is too long for its row.
async fn with_history(store: &dyn Store, id: &str, n: u64) -> (RunId, Vec<Payload>) {
    let mut acquired = held(store, id).await;
    let mut states = vec![acquired.loaded.state.clone()];
    for revision in 2..=n {
        let mut next = advance(&acquired);
        let len = if revision % 2 == 0 { 10 } else { INLINE_MAX + 10 };
        next.state = payload(format!("{id} {revision} ").repeat(len / 4));
        next.head.state_digest = *next.state.digest();
        states.push(next.state.clone());
        commit(store, &mut acquired, next).await;
    }
    store.release(acquired.lease.clone()).await.unwrap();
    (acquired.lease.run, states)
}

async fn revisions(store: &dyn Store, id: &RunId, before: Option<u64>, limit: u32) -> Vec<u64> {
    store
        .history(id, before.map(revision), limit)
        .await
        .unwrap()
        .iter()
        .map(|checkpoint| {
            assert_eq!(checkpoint.state, None, "a listing has no states");
            assert_eq!(checkpoint.run, *id);
            checkpoint.revision.get()
        })
        .collect()
}

pub async fn history_is_gapless_newest_first(fixture: &dyn Fixture) {
    let store = fixture.store();
    let (id, _) = with_history(&*store, "r", 12).await;
    with_history(&*store, "other", 3).await;
    let all: Vec<u64> = (1..=12).rev().collect();
    assert_eq!(revisions(&*store, &id, None, 100).await, all);
    assert_eq!(revisions(&*store, &id, None, 3).await, [12, 11, 10]);
    assert_eq!(revisions(&*store, &id, Some(10), 3).await, [9, 8, 7]);
    assert_eq!(revisions(&*store, &id, Some(2), 3).await, [1]);
    assert_eq!(revisions(&*store, &id, Some(1), 3).await, [0; 0]);
}

pub async fn a_checkpoint_is_exactly_what_was_committed(fixture: &dyn Fixture) {
    let store = fixture.store();
    let (id, states) = with_history(&*store, "r", 6).await;
    with_history(&*store, "other", 6).await;
    let listed = store.history(&id, None, 100).await.unwrap();
    for (n, state) in (1..).zip(&states) {
        let checkpoint = store.checkpoint(&id, revision(n)).await.unwrap();
        assert_eq!(checkpoint.revision, revision(n));
        assert_eq!(checkpoint.activation, n);
        assert_eq!(checkpoint.state_digest, *state.digest());
        assert_eq!(checkpoint.state.as_ref().map(Payload::bytes), Some(state.bytes()));
        let mut without_state = checkpoint;
        without_state.state = None;
        assert_eq!(listed[states.len() - usize::try_from(n).unwrap()], without_state);
    }
}

pub async fn a_revision_never_written_is_unavailable(fixture: &dyn Fixture) {
    let store = fixture.store();
    let (id, _) = with_history(&*store, "r", 2).await;
    for n in [3, 4, u64::from(u32::MAX), crate::ids::REVISION_MAX] {
        refused(store.checkpoint(&id, revision(n)).await, "checkpoint_unavailable");
    }
}

pub async fn a_pruned_checkpoint_is_unavailable_and_stays_listed(fixture: &dyn Fixture) {
    let store = fixture.store();
    let (id, states) = with_history(&*store, "r", 7).await;
    let (other, _) = with_history(&*store, "other", 3).await;
    let before = store.history(&id, None, 100).await.unwrap();
    assert_eq!(store.prune(&id, 3).await.unwrap(), 4);
    for n in 1..=4 {
        refused(store.checkpoint(&id, revision(n)).await, "checkpoint_unavailable");
    }
    for n in 5..=7 {
        let checkpoint = store.checkpoint(&id, revision(n)).await.unwrap();
        assert_eq!(
            checkpoint.state.as_ref(),
            states.get(usize::try_from(n).unwrap() - 1)
        );
    }
    let after = store.history(&id, None, 100).await.unwrap();
    assert_eq!(after.len(), before.len());
    for (mut then, now) in before.into_iter().zip(after) {
        then.pruned = now.revision <= revision(4);
        assert_eq!(now, then);
    }
    // The head is whole, and so is every other run.
    assert_eq!(store.load(&id).await.unwrap().state, states[6]);
    store.checkpoint(&other, revision(1)).await.unwrap();
}

pub async fn pruning_again_prunes_what_is_new(fixture: &dyn Fixture) {
    let store = fixture.store();
    let (id, _) = with_history(&*store, "r", 5).await;
    assert_eq!(store.prune(&id, 10).await.unwrap(), 0);
    assert_eq!(store.prune(&id, 4).await.unwrap(), 1);
    assert_eq!(store.prune(&id, 4).await.unwrap(), 0);
    assert_eq!(store.prune(&id, 1).await.unwrap(), 3);
    store.checkpoint(&id, revision(5)).await.unwrap();
    assert_eq!(store.prune(&id, 1).await.unwrap(), 0);
}

pub async fn pruning_keeps_what_the_head_and_the_journal_need(fixture: &dyn Fixture) {
    let store = fixture.store();
    let big = payload(vec![7; INLINE_MAX + 1]);
    let mut acquired = held(&*store, "r").await;
    let id = acquired.lease.run.clone();
    let called = crate::testing::build::completed(
        crate::testing::build::activity(&id, 1, "a"),
        big.clone(),
        acquired.loaded.now,
    );
    let mut next = advance(&acquired);
    next.state = big.clone();
    next.head.state_digest = *big.digest();
    next.activities = vec![called.clone()];
    commit(&*store, &mut acquired, next).await;
    let next = advance(&acquired);
    commit(&*store, &mut acquired, next).await;
    let mut next = advance(&acquired);
    next.state = payload(vec![8; INLINE_MAX + 1]);
    next.head.state_digest = *next.state.digest();
    commit(&*store, &mut acquired, next).await;
    assert_eq!(store.prune(&id, 1).await.unwrap(), 3);
    let stored = store.activity(&id, &called.id).await.unwrap().unwrap();
    assert_eq!(stored.output, Some(big));
    assert_eq!(
        store.load(&id).await.unwrap().state,
        payload(vec![8; INLINE_MAX + 1])
    );
}

pub async fn an_unknown_runs_history_is_not_another_ones(fixture: &dyn Fixture) {
    let store = fixture.store();
    with_history(&*store, "r", 2).await;
    if let Ok(history) = store.history(&run("unknown"), None, 10).await {
        assert_eq!(history, []);
    }
    assert!(store.checkpoint(&run("unknown"), revision(1)).await.is_err());
}
