//! A database of the step before agents: rows as its program wrote them, and what must still be there after the migration.
#![allow(clippy::unwrap_used, reason = "tests: what goes wrong here ends the case")]

use std::collections::BTreeMap;

use iop_durable::ids::RunId;
use iop_durable::payload::Payload;
use iop_durable::record::{RunHead, Status, WaitRecord, WaitingKind};
use iop_durable::store::{Created, Defined, GateFilter, Origin, RunFilter, Store};
use iop_durable::testing::build::{
    LONG, advance, create, define, ended, idempotency, lease_for, parked, run, wait,
};

/// Undoes the step, one statement each. No run has an owner, so what is left is what the step before had.
pub(crate) const UNDO: [&str; 11] = [
    "DROP INDEX IF EXISTS runs_aside",
    "DROP INDEX runs_owner",
    "ALTER TABLE runs DROP COLUMN owner",
    "DROP INDEX waits_kind",
    "DROP INDEX waits_kind_armed",
    "ALTER TABLE waits DROP COLUMN kind",
    "DROP INDEX idempotency_keys_created",
    "DROP INDEX decisions_of_waits",
    "DROP TABLE definition_names",
    "DELETE FROM _sqlx_migrations WHERE version > 2",
    // Two versions of an agent, which nothing but their rows knew.
    "INSERT INTO definitions (kind, name, version, digest, body, created_at) VALUES \
     ('agent', 'old', 1, '4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945', '[]', 1), \
     ('agent', 'old', 2, '038966de9f6b9a901b20b4c6ca8b2a46009feebe031babc842d43690c0bc222b', '[2]', 2)",
];

/// What there was.
pub(crate) struct Before {
    runs: Vec<(RunHead, Payload)>,
    gate: WaitRecord,
}

/// A queued run with a key, one that waits for an approval, and one that is over.
pub(crate) async fn fill(store: &dyn Store) -> Before {
    let now = store.now().await.unwrap();
    let mut queued = create(&run("queued"), now);
    queued.idempotency = Some(idempotency("caller", "key", 1));
    store.create(queued).await.unwrap();
    for id in ["waiting", "over"] {
        store.create(create(&run(id), now)).await.unwrap();
    }
    let held = store
        .acquire(&run("waiting"), lease_for("worker", LONG))
        .await
        .unwrap();
    let mut gate = wait(&run("waiting"), 1, "call_1.1", "about", now);
    gate.kind = WaitingKind::Approval;
    let mut park = parked(advance(&held), WaitingKind::Approval, None, 0);
    park.waits = vec![gate.clone()];
    store.commit(park).await.unwrap();
    let held = store
        .acquire(&run("over"), lease_for("worker", LONG))
        .await
        .unwrap();
    let end = ended(advance(&held), Status::Succeeded);
    store.commit(end).await.unwrap();
    let mut runs = Vec::new();
    for id in ["queued", "waiting", "over"] {
        let loaded = store.load(&run(id)).await.unwrap();
        runs.push((loaded.head, loaded.state));
    }
    Before { runs, gate }
}

/// That all of it is there, and can be used.
pub(crate) async fn check(store: &dyn Store, before: &Before) {
    for (head, state) in &before.runs {
        let loaded = store.load(&head.id).await.unwrap();
        assert_eq!((&loaded.head, &loaded.state), (head, state));
        assert_eq!(loaded.head.owner, None);
    }
    let all = RunFilter {
        limit: 10,
        ..RunFilter::default()
    };
    assert_eq!(store.list(all).await.unwrap().len(), 3);
    let counts = store.counts().await.unwrap();
    let expected = BTreeMap::from([(Status::Queued, 1), (Status::Waiting, 1)]);
    assert_eq!(counts.runs, expected);

    // A gate of before is found by its kind once the index is rebuilt.
    let approvals = GateFilter {
        kind: WaitingKind::Approval,
        armed: true,
        definition: None,
        owner: None,
        after: None,
        limit: 10,
    };
    let found = store.waits(&run("waiting")).await.unwrap();
    assert_eq!(found, std::slice::from_ref(&before.gate));
    assert_eq!(store.gates(approvals.clone()).await.unwrap(), []);
    let rebuilt = store.rebuild_index().await.unwrap();
    assert_eq!((rebuilt.runs, rebuilt.repaired, rebuilt.quarantined), (3, 1, 0));
    let gates = store.gates(approvals).await.unwrap();
    assert_eq!(gates.len(), 1);
    assert_eq!(gates[0].0, before.gate);
    let counts = store.counts().await.unwrap();
    assert_eq!(counts.armed, BTreeMap::from([(WaitingKind::Approval, 1)]));

    // Keys answer, and runs go on.
    let mut again = create(&run("another"), store.now().await.unwrap());
    again.idempotency = Some(idempotency("caller", "key", 1));
    let replayed = Created::Replayed { run: run("queued") };
    assert_eq!(store.create(again).await.unwrap(), replayed);
    goes_on(store, &run("queued")).await;
    goes_on(store, &run("waiting")).await;

    // Names of before are there.
    let old = store.definition("agent", "old", None).await.unwrap().unwrap();
    assert_eq!((old.version, old.origin, old.withdrawn), (2, Origin::Api, false));
    let defined = store.define(define("old", "[2]")).await.unwrap();
    assert_eq!(defined, Defined::Same { version: 2 });
    let defined = store.define(define("old", "[3]")).await.unwrap();
    assert_eq!(defined, Defined::New { version: 3 });
}

async fn goes_on(store: &dyn Store, id: &RunId) {
    let held = store.acquire(id, lease_for("worker", LONG)).await.unwrap();
    store.commit(advance(&held)).await.unwrap();
    store.release(held.lease).await.unwrap();
}
