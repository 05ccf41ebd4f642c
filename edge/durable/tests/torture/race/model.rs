//! What may be true of the run at the end, from what those around it were told and nothing else. The model knows neither
//! leases nor revisions: who was told that something counts must find it there, and whatever is there once is there once.

use std::collections::BTreeMap;

use iop_durable::ids::WaitId;
use iop_durable::machine::wait::{Verdict, WaitDecision};
use iop_durable::record::{DecisionRecord, Scope, Status, WaitRecord, WaitStatus};
use iop_durable::runner::CancelOutcome;
use iop_durable::store::Store;

use super::super::graph::State;
use super::super::invariants::Found;
use super::super::world::answers;
use super::Told;

/// Checks the end of one run.
pub async fn check(store: &dyn Store, found: &Found, told: &[Told]) {
    let head = &found.loaded.head;
    check_status(head.status, told);
    let waits = store.waits(&head.id).await.unwrap();
    for wait in &waits {
        let scope = Scope::Wait(wait.id.clone());
        let decisions = store.decisions(&head.id, &scope).await.unwrap();
        check_wait(wait, &decisions, told);
    }
    check_trail(found, &waits);
    check_effects(found);
    check_resumes(head.revision.get(), told);
}

/// An accepted cancellation wins over everything that comes later; without one the run succeeds.
fn check_status(status: Status, told: &[Told]) {
    let mut allowed = vec![Status::Succeeded];
    for told in told {
        let Told::Cancel(answer) = told else { continue };
        match answer {
            Ok(CancelOutcome::Requested | CancelOutcome::Done(_)) => allowed = vec![Status::Cancelled],
            Ok(CancelOutcome::Over(over)) => allowed.retain(|s| s == over),
            Err(_) if allowed == [Status::Succeeded] => allowed.push(Status::Cancelled),
            Err(_) => {}
        }
    }
    assert!(
        allowed.contains(&status),
        "{status} is not in {allowed:?}: {told:#?}"
    );
}

/// One winner; every answer is the recorded one, the same each time it is asked for.
fn check_wait(wait: &WaitRecord, decisions: &[DecisionRecord], told: &[Told]) {
    let mut recorded = BTreeMap::new();
    for decision in decisions {
        let WaitDecision::Deliver { verdict, .. } = WaitDecision::decode(&decision.body).unwrap() else {
            panic!("nobody cancels waits: {decision:?}");
        };
        recorded.insert(decision.id.as_str().to_owned(), verdict);
    }
    assert_eq!(wait.deliveries as usize, recorded.len(), "{wait:?}");
    let winners: Vec<&String> = recorded
        .iter()
        .filter(|(_, v)| **v == Verdict::Accepted)
        .map(|(id, _)| id)
        .collect();
    let by = wait
        .settled
        .as_ref()
        .and_then(|s| s.by.as_ref())
        .map(|id| id.as_str().to_owned());
    match wait.status {
        WaitStatus::Delivered => assert_eq!((winners.len(), Some(winners[0])), (1, by.as_ref())),
        WaitStatus::TimedOut | WaitStatus::Cancelled => {
            assert_eq!((winners.len(), by), (0, None), "{wait:?} {recorded:?}");
        }
        WaitStatus::Armed => panic!("{wait:?}"),
    }
    let mut first: BTreeMap<&String, u32> = BTreeMap::new();
    for (decision, verdict, replayed) in answered(told, &wait.id) {
        assert_eq!(recorded.get(decision), Some(&verdict), "{decision}: {told:#?}");
        if !replayed {
            *first.entry(decision).or_default() += 1;
        }
    }
    assert!(first.values().all(|n| *n == 1), "recorded twice: {first:?}");
}

fn answered<'a>(told: &'a [Told], wait: &WaitId) -> Vec<(&'a String, Verdict, bool)> {
    let of_wait = |told: &'a Told| match told {
        Told::Delivery {
            wait: w,
            decision,
            answer: Ok((verdict, replayed)),
        } if w == wait => Some((decision, *verdict, *replayed)),
        Told::Delivery { .. } | Told::Cancel(_) | Told::Resumed { .. } => None,
    };
    told.iter().filter_map(of_wait).collect()
}

/// The trail is the one that the waits' winners lead to; a cancelled run has a beginning of it.
fn check_trail(found: &Found, waits: &[WaitRecord]) {
    let state: State = serde_json::from_slice(found.loaded.state.bytes()).unwrap();
    let won = |key: &str| {
        let wait = waits.iter().find(|w| w.key.as_str() == key)?;
        let payload = wait.settled.as_ref()?.payload.as_ref()?;
        Some(String::from_utf8(payload.bytes().to_vec()).unwrap())
    };
    let expected = [
        "work".to_owned(),
        won("ask").map_or("asked in vain".to_owned(), |text| format!("asked: {text}")),
        "hear".to_owned(),
        won("hear").map_or("missed".to_owned(), |text| format!("heard: {text}")),
        "after".to_owned(),
    ];
    if found.loaded.head.status == Status::Succeeded {
        assert_eq!(state.trail, expected);
    } else {
        assert!(
            expected.starts_with(&state.trail),
            "{:?} {expected:?}",
            state.trail
        );
    }
}

/// Each call had its effect once, in a run that succeeded; at most once in any.
fn check_effects(found: &Found) {
    let whole = found.loaded.head.status == Status::Succeeded;
    for (name, node, activation) in [("put", "work", 1), ("send", "work", 1), ("flaky", "after", 0)] {
        let applied: usize = found
            .activities
            .iter()
            .filter(|a| a.node.as_str() == node && (activation == 0 || a.activation == activation))
            .filter(|a| a.key.as_str().split('.').next() == Some(name))
            .map(|a| {
                let key = iop_durable::runner::idempotency_key(&a.run, a.node.as_str(), a.activation, &a.key);
                answers(&found.lines, &key).len()
            })
            .sum();
        assert!(applied == 1 || (applied == 0 && !whole), "{name}: {applied}");
    }
}

/// A token is good for one resume.
fn check_resumes(last: u64, told: &[Told]) {
    let mut seen = BTreeMap::new();
    for told in told {
        if let Told::Resumed { revision } = told {
            assert!(*revision < last, "the last revision was resumed");
            *seen.entry(*revision).or_insert(0) += 1;
        }
    }
    assert!(seen.values().all(|n| *n == 1), "one token, two resumes: {seen:?}");
}
