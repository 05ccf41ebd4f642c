//! The rows beside the head: the journal, waits, decisions, steps, events, and their pages.

use super::support::{activity_ids, commit, held, queued, wait_ids};
use crate::ids::ActivityId;
use crate::record::{ActivityRecord, ActivityState, EventName, Scope, WaitRecord, WaitStatus};
use crate::store::{Acquired, Store};
use crate::testing::Fixture;
use crate::testing::build::{
    activity, advance, at, completed, correlation, decision, decision_id, delivered, event, payload, run,
    step, wait,
};

/// Activities in every state over three activations.
async fn journalled(store: &dyn Store) -> (Acquired, Vec<ActivityRecord>) {
    let mut acquired = held(store, "r").await;
    let id = acquired.lease.run.clone();
    let now = acquired.loaded.now;
    let in_state = |activation, name: &str, state| {
        let mut record = activity(&id, activation, name);
        record.state = state;
        record
    };
    let mut next = advance(&acquired);
    next.activities = vec![
        completed(activity(&id, 1, "old done"), payload("1"), now),
        in_state(1, "old failed", ActivityState::Failed),
        in_state(1, "old prepared", ActivityState::Prepared),
        in_state(1, "old running", ActivityState::Running),
        in_state(2, "old unknown", ActivityState::Unknown),
        completed(activity(&id, 3, "done"), payload("2"), now),
        in_state(3, "failed", ActivityState::Failed),
        in_state(3, "prepared", ActivityState::Prepared),
    ];
    let mut written = next.activities.clone();
    commit(store, &mut acquired, next).await;
    written.sort_by(|a, b| (a.activation, &a.id).cmp(&(b.activation, &b.id)));
    (acquired, written)
}

pub async fn a_journal_has_its_activation_and_whatever_is_open(fixture: &dyn Fixture) {
    let store = fixture.store();
    let (mut acquired, written) = journalled(&*store).await;
    let id = acquired.lease.run.clone();
    let now = acquired.loaded.now;
    let waits = [
        wait(&id, 1, "old armed", "about", now),
        delivered(wait(&id, 1, "old settled", "about", now), "d", payload("x"), now),
        wait(&id, 3, "armed", "about", now),
        delivered(wait(&id, 3, "settled", "about", now), "d", payload("x"), now),
    ];
    let mut next = advance(&acquired);
    next.waits = waits.to_vec();
    commit(&*store, &mut acquired, next).await;
    let journal = store.journal(&id, 3).await.unwrap();
    let expected: Vec<ActivityRecord> = written
        .iter()
        .filter(|record| record.activation == 3 || record.state.is_open())
        .cloned()
        .collect();
    assert_eq!(expected.len(), 6);
    let mut found = journal.activities;
    found.sort_by(|a, b| (a.activation, &a.id).cmp(&(b.activation, &b.id)));
    assert_eq!(found, expected);
    let mut found = wait_ids(&journal.waits);
    found.sort();
    let mut expected = wait_ids(&[waits[0].clone(), waits[2].clone(), waits[3].clone()]);
    expected.sort();
    assert_eq!(found, expected);
    // Another run's journal is its own.
    let other = queued(&*store, "other").await;
    assert_eq!(
        store.journal(&other, 3).await.unwrap(),
        crate::store::Journal::default()
    );
}

pub async fn activities_come_in_pages_in_order(fixture: &dyn Fixture) {
    let store = fixture.store();
    let (acquired, written) = journalled(&*store).await;
    let id = &acquired.lease.run;
    assert_eq!(store.activities(id, None, 100).await.unwrap(), written);
    let mut paged = Vec::new();
    let mut after: Option<ActivityId> = None;
    loop {
        let page = store.activities(id, after.clone(), 3).await.unwrap();
        assert!(page.len() <= 3);
        let Some(last) = page.last() else { break };
        after = Some(last.id.clone());
        paged.extend(page);
        assert!(paged.len() <= written.len(), "a page came twice");
    }
    assert_eq!(activity_ids(&paged), activity_ids(&written));
}

pub async fn an_activity_is_written_over_its_earlier_self(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    let id = acquired.lease.run.clone();
    let prepared = activity(&id, 1, "a");
    let mut intent = advance(&acquired);
    intent.activities = vec![prepared.clone()];
    commit(&*store, &mut acquired, intent).await;
    assert_eq!(
        store.activity(&id, &prepared.id).await.unwrap(),
        Some(prepared.clone())
    );
    let done = completed(prepared, payload("output"), acquired.loaded.now);
    let mut outcome = advance(&acquired);
    outcome.activities = vec![done.clone()];
    commit(&*store, &mut acquired, outcome).await;
    let page = store.activities(&id, None, 10).await.unwrap();
    assert_eq!((page.len(), page.first()), (1, Some(&done)));
    let unknown = activity(&id, 9, "never");
    assert_eq!(store.activity(&id, &unknown.id).await.unwrap(), None);
    assert_eq!(store.activity(&run("other"), &done.id).await.ok().flatten(), None);
}

pub async fn waits_come_in_the_order_they_were_armed(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    let id = acquired.lease.run.clone();
    let mut waits = vec![
        wait(&id, 1, "third", "about", at(3_000)),
        wait(&id, 1, "first", "about", at(1_000)),
        wait(&id, 1, "second", "about", at(2_000)),
        wait(&id, 2, "second too", "about", at(2_000)),
    ];
    waits[0].deadline = Some(at(9_000));
    let mut next = advance(&acquired);
    next.waits.clone_from(&waits);
    commit(&*store, &mut acquired, next).await;
    waits.sort_by(|a, b| (a.armed_at, &a.id).cmp(&(b.armed_at, &b.id)));
    assert_eq!(store.waits(&id).await.unwrap(), waits);
    let unknown = wait(&id, 9, "never", "about", at(1));
    assert_eq!(store.wait(&id, &unknown.id).await.unwrap(), None);
}

pub async fn armed_waits_are_found_by_correlation_over_all_runs(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut expected = Vec::new();
    for name in ["a", "b", "c"] {
        let mut acquired = held(&*store, name).await;
        let id = acquired.lease.run.clone();
        let now = acquired.loaded.now;
        let armed = wait(&id, 1, "armed", "order 7", now);
        expected.push(armed.id.clone());
        let mut cancelled = wait(&id, 1, "cancelled", "order 7", now);
        cancelled.status = WaitStatus::Cancelled;
        let mut next = advance(&acquired);
        next.waits = vec![
            armed,
            cancelled,
            delivered(wait(&id, 1, "settled", "order 7", now), "d", payload("x"), now),
            wait(&id, 1, "other", "order 77", now),
            wait(&id, 1, "folded", "ORDER 7", now),
        ];
        commit(&*store, &mut acquired, next).await;
    }
    let mut found = wait_ids(&store.armed(&correlation("order 7"), 10).await.unwrap());
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
    assert_eq!(store.armed(&correlation("order 7"), 2).await.unwrap().len(), 2);
    assert!(store.armed(&correlation("order"), 10).await.unwrap().is_empty());
}

pub async fn a_delivery_is_found_again_over_all_runs(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut expected = Vec::new();
    for name in ["a", "b"] {
        let mut acquired = held(&*store, name).await;
        let id = acquired.lease.run.clone();
        let now = acquired.loaded.now;
        let armed = wait(&id, 1, "armed", "order 7", now);
        let settled = delivered(wait(&id, 1, "settled", "order 7", now), "d", payload("x"), now);
        let other = wait(&id, 1, "other", "order 77", now);
        let scope = |wait: &WaitRecord| Scope::Wait(wait.id.clone());
        let mut next = advance(&acquired);
        next.decisions = vec![
            decision(&id, scope(&settled), "d", now),
            decision(&id, scope(&other), "d", now),
            decision(&id, scope(&armed), "late", now),
            decision(&id, Scope::Operator, "d", now),
            decision(&id, Scope::Cancel, "d", now),
        ];
        expected.push(settled.id.clone());
        next.waits = vec![armed, settled, other];
        commit(&*store, &mut acquired, next).await;
    }
    let find = async |about: &str, id: &str, limit: u32| {
        let found = store
            .addressed(&correlation(about), &decision_id(id), limit)
            .await;
        wait_ids(&found.unwrap())
    };
    let mut found = find("order 7", "d", 10).await;
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
    assert_eq!(find("order 7", "d", 1).await.len(), 1);
    assert_eq!(find("order 7", "late", 10).await.len(), 2);
    assert_eq!(find("order 77", "d", 10).await.len(), 2);
    assert!(find("order", "d", 10).await.is_empty());
    assert!(find("order 7", "D", 10).await.is_empty());
}

pub async fn decisions_come_in_order_per_ledger(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    let id = acquired.lease.run.clone();
    let late = decision(&id, Scope::Operator, "a", at(2_000));
    let early = decision(&id, Scope::Operator, "c", at(1_000));
    let middle = decision(&id, Scope::Operator, "b", at(2_000));
    let cancel = decision(&id, Scope::Cancel, "a", at(1_500));
    let mut next = advance(&acquired);
    next.decisions = vec![middle.clone(), late.clone(), early.clone(), cancel.clone()];
    commit(&*store, &mut acquired, next).await;
    assert_eq!(
        store.decisions(&id, &Scope::Operator).await.unwrap(),
        [early.clone(), late, middle]
    );
    assert_eq!(store.decisions(&id, &Scope::Cancel).await.unwrap(), [cancel]);
    assert_eq!(
        store.decision(&id, &Scope::Operator, &early.id).await.unwrap(),
        Some(early.clone())
    );
    assert_eq!(
        store.decision(&id, &Scope::Cancel, &early.id).await.unwrap(),
        None
    );
}

pub async fn steps_come_in_pages_in_order(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    let id = acquired.lease.run.clone();
    let now = acquired.loaded.now;
    for activation in 1..=7 {
        let mut next = advance(&acquired);
        let mut done = step(activation, now);
        done.result = Some(format!("result {activation}"));
        done.effects = vec![serde_json::value::to_raw_value(&activation).unwrap()];
        next.steps = vec![done];
        commit(&*store, &mut acquired, next).await;
    }
    let page = |after, limit| {
        let (store, id) = (store.clone(), id.clone());
        async move {
            store
                .steps(&id, after, limit)
                .await
                .unwrap()
                .into_iter()
                .map(|step| {
                    (
                        step.activation,
                        step.result.unwrap(),
                        step.effects[0].get().to_owned(),
                    )
                })
                .collect::<Vec<_>>()
        }
    };
    let expected = |range: std::ops::RangeInclusive<u64>| {
        range
            .map(|n| (n, format!("result {n}"), n.to_string()))
            .collect::<Vec<_>>()
    };
    assert_eq!(page(0, 100).await, expected(1..=7));
    assert_eq!(page(0, 3).await, expected(1..=3));
    assert_eq!(page(3, 3).await, expected(4..=6));
    assert_eq!(page(6, 3).await, expected(7..=7));
    assert_eq!(page(7, 3).await, []);
}

pub async fn events_come_in_pages_in_order(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    let id = acquired.lease.run.clone();
    let mut next = advance(&acquired);
    // Creation wrote 1. Ten and more: the order is of numbers, not of text.
    next.events = (2..=12)
        .map(|seq| event(seq, 1, EventName::StepStarted, at(1_000)))
        .collect();
    next.events[0].name = "order.shipped".into();
    next.head.event_seq = 12;
    let written = next.events.clone();
    commit(&*store, &mut acquired, next).await;
    assert_eq!(store.events(&id, 1, 100).await.unwrap(), written);
    assert_eq!(store.events(&id, 8, 2).await.unwrap(), written[7..9]);
    assert_eq!(store.events(&id, 12, 2).await.unwrap(), []);
}
