//! All rows of a commit, or none (D110).

use futures_util::future::join_all;

use super::support::{Snapshot, commit, held, hold, over, refused, refused_as, revision, snapshot};
use crate::envelope::encode_step;
use crate::ids::RunId;
use crate::record::{EventName, Scope, Status};
use crate::store::{Acquired, Commit, Store};
use crate::testing::Fixture;
use crate::testing::build::{
    activity, advance, at, completed, decision, delivered, ended, event, payload, step, wait,
};

/// A commit with rows of every kind.
fn rich(acquired: &Acquired) -> Commit {
    let mut commit = advance(acquired);
    let id = commit.head.id.clone();
    let now = acquired.loaded.now;
    let activation = acquired.loaded.head.activation;
    commit.activities = vec![
        activity(&id, activation, "open"),
        completed(activity(&id, activation, "done"), payload("output"), now),
    ];
    commit.waits = vec![
        wait(&id, activation, "armed", "about", now),
        delivered(
            wait(&id, activation, "settled", "about", now),
            "by",
            payload("what came"),
            now,
        ),
    ];
    commit.steps = vec![step(activation, now)];
    commit.decisions = vec![decision(&id, Scope::Operator, &format!("d{activation}"), now)];
    let seq = commit.head.event_seq;
    commit.events.push(event(seq + 1, 1, EventName::StepStarted, now));
    commit.events.push(event(seq + 2, 1, EventName::Waiting, now));
    commit.head.event_seq = seq + 2;
    commit
}

/// Commits something that must be refused in one of these ways, and leave no trace.
async fn refused_whole(store: &dyn Store, commit: Commit, kinds: &[&str]) {
    let id = commit.head.id.clone();
    let before = (snapshot(store, &id).await, store.load(&id).await.unwrap().lease);
    refused_as(store.commit(commit).await, kinds);
    let after: (Snapshot, _) = (snapshot(store, &id).await, store.load(&id).await.unwrap().lease);
    assert_eq!(after, before);
}

pub async fn a_commit_writes_rows_of_every_kind(fixture: &dyn Fixture) {
    let store = fixture.store();
    let acquired = held(&*store, "r").await;
    let id = acquired.lease.run.clone();
    let written = rich(&acquired);
    store.commit(written.clone()).await.unwrap();
    for record in &written.activities {
        let stored = store.activity(&id, &record.id).await.unwrap();
        assert_eq!(stored.as_ref(), Some(record));
    }
    for record in &written.waits {
        let stored = store.wait(&id, &record.id).await.unwrap();
        assert_eq!(stored.as_ref(), Some(record));
    }
    let steps = store.steps(&id, 0, 10).await.unwrap();
    assert_eq!(steps.len(), 1);
    assert_eq!(
        encode_step(&steps[0]).unwrap(),
        encode_step(&written.steps[0]).unwrap()
    );
    assert_eq!(
        store.decisions(&id, &Scope::Operator).await.unwrap(),
        written.decisions
    );
    assert_eq!(store.events(&id, 1, 10).await.unwrap(), written.events);
}

pub async fn a_duplicate_decision_rolls_the_whole_commit_back(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    let first = rich(&acquired);
    commit(&*store, &mut acquired, first).await;
    let mut again = rich(&acquired);
    again.release = true;
    again.decisions.push(decision(
        &acquired.lease.run,
        Scope::Operator,
        "d1",
        acquired.loaded.now,
    ));
    refused_whole(&*store, again, &["duplicate"]).await;
    // The holder goes on.
    let next = rich(&acquired);
    assert_eq!(commit(&*store, &mut acquired, next).await.revision, revision(3));
}

pub async fn one_decision_twice_in_a_commit_is_refused(fixture: &dyn Fixture) {
    let store = fixture.store();
    let acquired = held(&*store, "r").await;
    let mut twice = rich(&acquired);
    twice.decisions.push(twice.decisions[0].clone());
    refused_whole(&*store, twice, &["duplicate"]).await;
}

pub async fn one_decision_id_in_two_ledgers_is_two_decisions(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    let now = acquired.loaded.now;
    let gate = wait(&acquired.lease.run, 1, "w", "about", now);
    let mut next = advance(&acquired);
    let id = next.head.id.clone();
    next.decisions = vec![
        decision(&id, Scope::Operator, "d", now),
        decision(&id, Scope::Cancel, "d", now),
        decision(&id, Scope::Wait(gate.id), "d", now),
    ];
    commit(&*store, &mut acquired, next).await;
    let other = held(&*store, "other").await;
    let mut next = advance(&other);
    next.decisions = vec![decision(&other.lease.run, Scope::Operator, "d", now)];
    store.commit(next).await.unwrap();
}

pub async fn a_life_has_one_terminal_event(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = over(&*store, "r").await;
    let acquired = hold(&*store, &id).await;
    let again = ended(advance(&acquired), Status::Failed);
    refused_whole(&*store, again, &["duplicate"]).await;
    // The next life has its own.
    let mut next = ended(advance(&acquired), Status::Failed);
    next.head.life = 2;
    next.events[0].life = 2;
    store.commit(next).await.unwrap();
}

pub async fn two_terminal_events_in_one_commit_are_refused(fixture: &dyn Fixture) {
    let store = fixture.store();
    let acquired = held(&*store, "r").await;
    let mut twice = ended(advance(&acquired), Status::Succeeded);
    let mut second = twice.events[0].clone();
    second.seq += 1;
    twice.head.event_seq = second.seq;
    twice.events.push(second);
    refused_whole(&*store, twice, &["duplicate"]).await;
}

pub async fn event_numbers_have_no_gaps_and_no_twins(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    let first = advance(&acquired);
    commit(&*store, &mut acquired, first).await;
    let last = acquired.loaded.head.event_seq;
    for seq in [last, last + 2, 1] {
        let mut wrong = advance(&acquired);
        wrong.events[0].seq = seq;
        wrong.head.event_seq = seq;
        refused_whole(&*store, wrong, &["duplicate", "corrupt"]).await;
    }
    let mut gap = rich(&acquired);
    gap.events.remove(1);
    refused_whole(&*store, gap, &["duplicate", "corrupt"]).await;
    let next = rich(&acquired);
    commit(&*store, &mut acquired, next).await;
    let seqs: Vec<u64> = store
        .events(&acquired.lease.run, 0, 100)
        .await
        .unwrap()
        .iter()
        .map(|event| event.seq)
        .collect();
    assert_eq!(seqs, [1, 2, 3, 4, 5]);
}

pub async fn a_refused_guard_writes_no_row(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    let first = rich(&acquired);
    commit(&*store, &mut acquired, first).await;
    let mut stale = rich(&acquired);
    stale.guard.revision = revision(1);
    refused_whole(&*store, stale, &["conflict"]).await;
    let mut unseen = rich(&acquired);
    unseen.guard.signal = Some(4);
    refused_whole(&*store, unseen, &["conflict"]).await;
    let mut idle = rich(&acquired);
    idle.guard.authority = crate::store::Authority::Idle;
    refused_whole(&*store, idle, &["busy"]).await;
    store.release(acquired.lease.clone()).await.unwrap();
    let lost = rich(&acquired);
    refused_whole(&*store, lost, &["lease_lost"]).await;
}

/// Adapters put transitions that arrive together into one transaction: a refused one must not take the others with it, nor be
/// carried by them.
pub async fn refusals_stay_alone_among_commits_that_arrive_together(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = Vec::new();
    for n in 0..16 {
        let mut run = held(&*store, &format!("r{n}")).await;
        let first = rich(&run);
        commit(&*store, &mut run, first).await;
        acquired.push(run);
    }
    let bad = |n: usize| n % 3 == 1;
    let answers = join_all(acquired.iter().enumerate().map(|(n, run)| {
        let mut next = rich(run);
        if bad(n) {
            next.decisions
                .push(decision(&run.lease.run, Scope::Operator, "d1", at(5)));
        }
        store.commit(next)
    }))
    .await;
    for (n, answer) in answers.into_iter().enumerate() {
        let id: &RunId = &acquired[n].lease.run;
        let loaded = store.load(id).await.unwrap();
        let steps = store.steps(id, 0, 10).await.unwrap().len();
        if bad(n) {
            refused(answer, "duplicate");
            assert_eq!((loaded.head.revision, steps), (revision(2), 1), "{id}");
        } else {
            assert_eq!(answer.unwrap().revision, revision(3));
            assert_eq!((loaded.head.revision, steps), (revision(3), 2), "{id}");
        }
    }
}
