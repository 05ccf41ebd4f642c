//! Optimistic concurrency: a commit says what it is based on, the store says what it became (D106 to D108).

use futures_util::future::join_all;

use super::support::{commit, held, hold, queued, refused, revision, snapshot};
use crate::envelope::HeadRow;
use crate::ids::{REVISION_MAX, Revision};
use crate::store::{Authority, Conflict, StoreError};
use crate::testing::build::{advance, advance_loaded, payload};
use crate::testing::{Fixture, Tamper};

pub async fn a_commit_is_loaded_as_it_was_written(fixture: &dyn Fixture) {
    let store = fixture.store();
    let acquired = held(&*store, "r").await;
    let written = advance(&acquired);
    let committed = store.commit(written.clone()).await.unwrap();
    assert_eq!(committed.revision, revision(2));
    assert_eq!(committed.signal, 0);
    let loaded = store.load(&acquired.lease.run).await.unwrap();
    let mut expected = written.head;
    expected.revision = revision(2);
    assert_eq!(loaded.head, expected);
    assert_eq!(loaded.state, written.state);
    assert_eq!(loaded.lease, Some(acquired.lease));
    let checkpoint = store.checkpoint(&loaded.head.id, revision(2)).await.unwrap();
    assert_eq!(checkpoint.state, Some(written.state));
}

pub async fn the_next_revision_is_the_stores_not_the_callers(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    for (n, claimed) in [(2, 1), (3, 77), (4, REVISION_MAX)] {
        let mut next = advance(&acquired);
        next.head.revision = revision(claimed);
        let committed = commit(&*store, &mut acquired, next).await;
        assert_eq!(committed.revision, revision(n));
        assert_eq!(acquired.loaded.head.revision, revision(n));
    }
}

pub async fn a_stale_revision_conflicts_and_writes_nothing(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    let stale = advance(&acquired);
    let next = advance(&acquired);
    commit(&*store, &mut acquired, next).await;
    let before = snapshot(&*store, &acquired.lease.run).await;
    let error = refused(store.commit(stale).await, "conflict");
    assert!(
        matches!(error, StoreError::Conflict(Conflict::Revision(found)) if found == revision(2)),
        "{error}"
    );
    let mut ahead = advance(&acquired);
    ahead.guard.revision = revision(3);
    refused(store.commit(ahead).await, "conflict");
    assert_eq!(snapshot(&*store, &acquired.lease.run).await, before);
}

pub async fn of_commits_on_one_revision_one_wins(fixture: &dyn Fixture) {
    let store = fixture.store();
    let acquired = held(&*store, "r").await;
    let answers = join_all((0..8).map(|n| {
        let mut commit = advance(&acquired);
        commit.state = payload(format!("writer {n}"));
        commit.head.state_digest = *commit.state.digest();
        store.commit(commit)
    }))
    .await;
    let won: Vec<usize> = answers
        .iter()
        .enumerate()
        .filter_map(|(n, answer)| answer.is_ok().then_some(n))
        .collect();
    assert_eq!(won.len(), 1, "{won:?}");
    for answer in answers.into_iter().filter(Result::is_err) {
        refused(answer, "conflict");
    }
    let loaded = store.load(&acquired.lease.run).await.unwrap();
    assert_eq!(loaded.head.revision, revision(2));
    assert_eq!(loaded.state, payload(format!("writer {}", won[0])));
    assert_eq!(store.history(&loaded.head.id, None, 10).await.unwrap().len(), 2);
}

pub async fn of_idle_commits_on_one_revision_one_wins(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    let loaded = store.load(&id).await.unwrap();
    let answers = join_all((0..8).map(|_| store.commit(advance_loaded(&loaded, Authority::Idle)))).await;
    assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 1);
    for answer in answers.into_iter().filter(Result::is_err) {
        refused(answer, "conflict");
    }
}

pub async fn the_last_revision_is_an_end_and_never_wraps(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = queued(&*store, "r").await;
    let loaded = store.load(&id).await.unwrap();
    let last = revision(REVISION_MAX);
    let row = HeadRow::seal(&loaded.head, &loaded.state, last).unwrap();
    let seal = row.seal.expect("a sealed row has a seal");
    fixture
        .tamper(&id, Tamper::Revision { revision: last, seal })
        .await;
    let acquired = hold(&*store, &id).await;
    assert_eq!(acquired.loaded.head.revision, last);
    refused(store.commit(advance(&acquired)).await, "revisions_exhausted");
    assert_eq!(store.load(&id).await.unwrap().head.revision, last);
    let history = store.history(&id, None, 10).await.unwrap();
    assert_eq!(
        history.iter().map(|c| c.revision).collect::<Vec<_>>(),
        [Revision::FIRST]
    );
}
