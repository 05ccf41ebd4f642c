//! Gates over all runs: order, filters, pages, and what does not hide what.

use super::support::{commit, held, hold, new, refused};
use crate::envelope::INLINE_MAX;
use crate::ids::{RunId, WaitId};
use crate::record::{DefinitionRef, WaitRecord, WaitingKind};
use crate::store::{Acquired, GateFilter, Store};
use crate::testing::build::{advance, at, create, delivered, payload, run, wait};
use crate::testing::{Fixture, Tamper};
use crate::time::Timestamp;

/// All armed approvals.
fn approvals() -> GateFilter {
    GateFilter {
        kind: WaitingKind::Approval,
        armed: true,
        definition: None,
        owner: None,
        after: None,
        limit: 100,
    }
}

/// An armed approval of the first activation.
fn approval(run: &RunId, key: &str, time: Timestamp) -> WaitRecord {
    let mut gate = wait(run, 1, key, "about", time);
    gate.kind = WaitingKind::Approval;
    gate
}

/// A held run with these waits.
async fn with(store: &dyn Store, id: &str, waits: Vec<WaitRecord>) -> Acquired {
    let mut acquired = held(store, id).await;
    let mut next = advance(&acquired);
    next.waits = waits;
    commit(store, &mut acquired, next).await;
    acquired
}

async fn gates(store: &dyn Store, filter: GateFilter) -> Vec<WaitRecord> {
    let found = store.gates(filter).await.unwrap();
    found.into_iter().map(|(wait, _)| wait).collect()
}

/// `run/key` of each.
async fn names(store: &dyn Store, filter: GateFilter) -> Vec<String> {
    let found = gates(store, filter).await;
    found.iter().map(name).collect()
}

fn name(wait: &WaitRecord) -> String {
    format!("{}/{}", wait.run, wait.key)
}

fn place(wait: &WaitRecord) -> (Timestamp, RunId, WaitId) {
    (wait.armed_at, wait.run.clone(), wait.id.clone())
}

/// Ten approvals of four runs, some of them armed at one time, as they are listed.
async fn several(store: &dyn Store) -> Vec<WaitRecord> {
    let mut expected = Vec::new();
    for (id, times) in [
        ("b", [3_000, 1_000, 2_000].as_slice()),
        ("a", &[2_000, 2_000, 2_000]),
        ("B", &[2_000, 4_000, 999]),
        ("\u{e9}", &[2_000]),
    ] {
        let waits: Vec<WaitRecord> = (0..)
            .zip(times)
            .map(|(n, time)| approval(&run(id), &format!("k{n}"), at(*time)))
            .collect();
        expected.extend(waits.clone());
        with(store, id, waits).await;
    }
    expected.sort_by_key(place);
    expected
}

pub async fn gates_come_in_order_over_all_runs(fixture: &dyn Fixture) {
    let store = fixture.store();
    let expected = several(&*store).await;
    for armed in [true, false] {
        let all = GateFilter { armed, ..approvals() };
        assert_eq!(gates(&*store, all.clone()).await, expected);
        for limit in [1, 3, 10] {
            let mut paged = Vec::new();
            let mut after = None;
            loop {
                let page = gates(
                    &*store,
                    GateFilter {
                        after: after.clone(),
                        limit,
                        ..all.clone()
                    },
                )
                .await;
                assert!(page.len() <= limit as usize);
                let Some(last) = page.last() else { break };
                after = Some(place(last));
                paged.extend(page);
                assert!(paged.len() <= expected.len(), "a page came twice");
            }
            assert_eq!(paged, expected);
        }
    }
}

pub async fn gates_can_be_filtered(fixture: &dyn Fixture) {
    let store = fixture.store();
    for (id, kind, definition, owner) in [
        ("1", "agent", "x", Some("mine")),
        ("2", "agent", "y", Some("mine")),
        ("3", "flow", "x", Some("Mine")),
        ("4", "agent", "x", None),
    ] {
        let mut creation = create(&run(id), store.now().await.unwrap());
        creation.head.definition.kind = kind.to_owned();
        creation.head.definition.name = definition.to_owned();
        creation.head.owner = owner.map(str::to_owned);
        new(store.create(creation).await.unwrap());
        let mut acquired = hold(&*store, &run(id)).await;
        let mut input = wait(&run(id), 1, "input", "about", at(500));
        input.kind = WaitingKind::Input;
        let mut next = advance(&acquired);
        next.waits = vec![approval(&run(id), "approval", at(1_000)), input];
        commit(&*store, &mut acquired, next).await;
    }
    let all = ["1/approval", "2/approval", "3/approval", "4/approval"];
    assert_eq!(names(&*store, approvals()).await, all);
    let inputs = GateFilter {
        kind: WaitingKind::Input,
        ..approvals()
    };
    assert_eq!(
        names(&*store, inputs).await,
        ["1/input", "2/input", "3/input", "4/input"]
    );
    let events = GateFilter {
        kind: WaitingKind::Event,
        ..approvals()
    };
    assert_eq!(names(&*store, events).await, [""; 0]);
    for armed in [true, false] {
        let of = |kind: &str, name: &str| GateFilter {
            armed,
            definition: Some((kind.to_owned(), name.to_owned())),
            ..approvals()
        };
        assert_eq!(
            names(&*store, of("agent", "x")).await,
            ["1/approval", "4/approval"]
        );
        assert_eq!(names(&*store, of("flow", "x")).await, ["3/approval"]);
        assert_eq!(names(&*store, of("flow", "y")).await, [""; 0]);
        let by = |owner: &str| GateFilter {
            armed,
            owner: Some(owner.to_owned()),
            ..approvals()
        };
        assert_eq!(names(&*store, by("mine")).await, ["1/approval", "2/approval"]);
        assert_eq!(names(&*store, by("Mine")).await, ["3/approval"]);
        assert_eq!(names(&*store, by("")).await, [""; 0]);
        let both = GateFilter {
            owner: Some("mine".to_owned()),
            limit: 1,
            ..of("agent", "y")
        };
        assert_eq!(names(&*store, both).await, ["2/approval"]);
    }
}

pub async fn a_settled_gate_is_not_armed_and_stays_among_all(fixture: &dyn Fixture) {
    let store = fixture.store();
    let gates_of = |id: &str| {
        vec![
            approval(&run(id), "first", at(1_000)),
            approval(&run(id), "second", at(2_000)),
        ]
    };
    let mut acquired = with(&*store, "r", gates_of("r")).await;
    let settled = delivered(gates_of("r").remove(0), "d", payload("approve"), at(3_000));
    let mut next = advance(&acquired);
    next.waits = vec![settled.clone()];
    commit(&*store, &mut acquired, next).await;
    assert_eq!(names(&*store, approvals()).await, ["r/second"]);
    let all = GateFilter {
        armed: false,
        ..approvals()
    };
    assert_eq!(
        gates(&*store, all.clone()).await,
        [settled, gates_of("r").remove(1)]
    );
    // Nothing is left of a run that is deleted.
    let end = crate::testing::build::ended(advance(&acquired), crate::record::Status::Succeeded);
    store.commit(end).await.unwrap();
    assert_eq!(gates(&*store, all.clone()).await.len(), 2);
    store.delete_if_idle(&run("r")).await.unwrap();
    assert_eq!(gates(&*store, all).await, []);
}

pub async fn a_gate_comes_whole_with_the_definition_of_its_run(fixture: &dyn Fixture) {
    let store = fixture.store();
    let id = run("r");
    let definition = DefinitionRef {
        kind: "agent".to_owned(),
        name: "deployer".to_owned(),
        version: 42,
        digest: "sha256:beef".to_owned(),
    };
    let mut creation = create(&id, store.now().await.unwrap());
    creation.head.definition = definition.clone();
    new(store.create(creation).await.unwrap());
    let mut acquired = hold(&*store, &id).await;
    let mut open = approval(&id, "open", at(1_000));
    open.subject = payload(vec![7; INLINE_MAX + 1]);
    let mut settled = approval(&id, "settled", at(2_000));
    settled.subject = payload("short");
    settled = delivered(settled, "d", payload(vec![9; INLINE_MAX + 1]), at(3_000));
    let mut next = advance(&acquired);
    next.waits = vec![open.clone(), settled.clone()];
    commit(&*store, &mut acquired, next).await;
    let armed = store.gates(approvals()).await.unwrap();
    assert_eq!(armed, [(open.clone(), definition.clone())]);
    assert_eq!(armed[0].0.subject.bytes(), open.subject.bytes());
    let all = GateFilter {
        armed: false,
        ..approvals()
    };
    let found = store.gates(all).await.unwrap();
    assert_eq!(found, [(open, definition.clone()), (settled, definition)]);
}

pub async fn what_is_corrupt_or_set_aside_hides_no_gate(fixture: &dyn Fixture) {
    let store = fixture.store();
    for (id, time) in [
        ("wait", 1_000),
        ("head", 2_000),
        ("whole", 3_000),
        ("aside", 4_000),
        ("subject", 5_000),
        ("last", 6_000),
    ] {
        let mut gate = approval(&run(id), "k", at(time));
        if id == "subject" {
            gate.subject = payload(vec![7; INLINE_MAX + 1]);
        }
        with(&*store, id, vec![gate]).await;
    }
    let gate = approval(&run("wait"), "k", at(1_000));
    fixture.tamper(&run("wait"), Tamper::WaitBody(gate.id)).await;
    fixture.tamper(&run("head"), Tamper::HeadBody).await;
    store.quarantine(&run("aside"), "why").await.unwrap();
    let subject = payload(vec![7; INLINE_MAX + 1]);
    fixture
        .tamper(&run("subject"), Tamper::DropBlob(*subject.digest()))
        .await;
    for armed in [true, false] {
        for (limit, expected) in [
            (1, &["whole/k"][..]),
            (2, &["whole/k", "last/k"]),
            (9, &["whole/k", "last/k"]),
        ] {
            let filter = GateFilter {
                armed,
                limit,
                ..approvals()
            };
            assert_eq!(names(&*store, filter).await, expected, "{limit}");
        }
    }
    refused(store.waits(&run("wait")).await, "corrupt");
}

pub async fn a_gate_under_a_wrong_kind_is_not_shown_and_is_found_again(fixture: &dyn Fixture) {
    let store = fixture.store();
    for id in ["missing", "wrong", "right"] {
        let acquired = with(&*store, id, vec![approval(&run(id), "k", at(1_000))]).await;
        store.release(acquired.lease).await.unwrap();
    }
    let id_of = |id: &str| approval(&run(id), "k", at(1_000)).id;
    fixture
        .tamper(&run("missing"), Tamper::WaitKind(id_of("missing"), None))
        .await;
    fixture
        .tamper(&run("wrong"), Tamper::WaitKind(id_of("wrong"), Some("input")))
        .await;
    let inputs = GateFilter {
        kind: WaitingKind::Input,
        ..approvals()
    };
    assert_eq!(names(&*store, approvals()).await, ["right/k"]);
    assert_eq!(names(&*store, inputs.clone()).await, [""; 0]);
    // The wait itself is whole.
    let found = store.wait(&run("missing"), &id_of("missing")).await.unwrap();
    assert_eq!(found.map(|wait| wait.kind), Some(WaitingKind::Approval));
    let rebuilt = store.rebuild_index().await.unwrap();
    assert_eq!((rebuilt.runs, rebuilt.repaired, rebuilt.quarantined), (3, 2, 0));
    assert_eq!(
        names(&*store, approvals()).await,
        ["missing/k", "right/k", "wrong/k"]
    );
    assert_eq!(names(&*store, inputs).await, [""; 0]);
    let rebuilt = store.rebuild_index().await.unwrap();
    assert_eq!((rebuilt.runs, rebuilt.repaired, rebuilt.quarantined), (3, 0, 0));
}
