//! Bytes in, the same bytes out (D259), and ids as they are (D120, D258).

use bytes::Bytes;

use super::support::{commit, held, hold, new, over, queued, refused, revision};
use crate::envelope::INLINE_MAX;
use crate::ids::ID_MAX;
use crate::payload::Payload;
use crate::record::Scope;
use crate::store::{Created, RunFilter, Store};
use crate::testing::build::{
    LONG, activity, advance, completed, correlation, create, create_with, decision, decision_id, delivered,
    idempotency, lease_for, payload, run, wait,
};
use crate::testing::{Fixture, Tamper};

/// Writes this payload everywhere a payload can stand, and reads it back.
async fn round_trip(store: &dyn Store, id: &str, bytes: Bytes) {
    let written = payload(bytes.clone());
    let same = |what: &str, found: Option<&Payload>| {
        let found = found.unwrap_or_else(|| panic!("{what}: there is none"));
        assert_eq!(found.bytes(), &bytes, "{what}");
        assert_eq!(found.digest(), written.digest(), "{what}");
    };
    let now = store.now().await.unwrap();
    let id = run(id);
    new(store
        .create(create_with(&id, written.clone(), now))
        .await
        .unwrap());
    let mut acquired = hold(store, &id).await;
    same("state of a new run", Some(&acquired.loaded.state));
    let mut called = completed(activity(&id, 1, "a"), written.clone(), now);
    called.input = written.clone();
    let mut gate = delivered(wait(&id, 1, "w", "about", now), "d", written.clone(), now);
    gate.subject = written.clone();
    let mut next = advance(&acquired);
    next.state = written.clone();
    next.head.state_digest = *written.digest();
    next.activities = vec![called.clone()];
    next.waits = vec![gate.clone()];
    commit(store, &mut acquired, next).await;
    same("state", Some(&acquired.loaded.state));
    for n in 1..=2 {
        let checkpoint = store.checkpoint(&id, revision(n)).await.unwrap();
        same("checkpoint", checkpoint.state.as_ref());
    }
    let stored = store.activity(&id, &called.id).await.unwrap().unwrap();
    same("input", Some(&stored.input));
    same("output", stored.output.as_ref());
    let stored = store.wait(&id, &gate.id).await.unwrap().unwrap();
    same("subject", Some(&stored.subject));
    same(
        "delivery",
        stored.settled.as_ref().and_then(|s| s.payload.as_ref()),
    );
    let journal = store.journal(&id, 1).await.unwrap();
    same("journalled input", Some(&journal.activities[0].input));
    same("journalled output", journal.activities[0].output.as_ref());
    same("journalled subject", Some(&journal.waits[0].subject));
    let page = store.activities(&id, None, 1).await.unwrap();
    same("listed input", Some(&page[0].input));
    same("listed output", page[0].output.as_ref());
    let listed = store.waits(&id).await.unwrap();
    same("listed subject", Some(&listed[0].subject));
    store.release(acquired.lease).await.unwrap();
}

fn patterned(len: usize) -> Bytes {
    (0..len).map(|n| u8::try_from(n * 31 % 251).unwrap()).collect()
}

pub async fn payloads_of_every_size_come_back(fixture: &dyn Fixture) {
    let store = fixture.store();
    for len in [0, 1, INLINE_MAX - 1, INLINE_MAX, INLINE_MAX + 1, 1 << 20] {
        round_trip(&*store, &format!("len {len}"), patterned(len)).await;
    }
}

/// The largest state a host may allow; an adapter that cannot hold it says so before anything is written.
pub async fn a_state_of_64_mib_comes_back_or_is_refused(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    let id = run("r");
    let state = payload(patterned(64 << 20));
    match store.create(create_with(&id, state.clone(), now)).await {
        Ok(created) => {
            new(created);
            let loaded = store.load(&id).await.unwrap();
            assert_eq!(loaded.state.bytes().len(), state.bytes().len());
            assert!(loaded.state.bytes() == state.bytes(), "other bytes");
        }
        Err(error) => {
            assert_eq!(error.kind(), "too_large", "{error}");
            refused(store.load(&id).await, "not_found");
        }
    }
}

pub async fn bytes_are_never_read_or_converted(fixture: &dyn Fixture) {
    let store = fixture.store();
    let opaque: [&[u8]; 9] = [
        b"\0",
        b"a\0b\0",
        b"\xff\xfe\x00\x80",
        b"\xed\xa0\x80",
        br#"{"lone":"\ud800","nul":"\u0000","big":1e400,"dup":1,"dup":2}"#,
        br#"{ "b" : 1.10, "a" : 100000000000000000000000001 }"#,
        b"\\x00\\000",
        "\u{feff}\u{fffd}e\u{301}\r\n".as_bytes(),
        b"'; DROP TABLE runs; --",
    ];
    for (n, bytes) in opaque.into_iter().enumerate() {
        round_trip(&*store, &format!("inline {n}"), Bytes::from_static(bytes)).await;
        let long = bytes.repeat(INLINE_MAX / bytes.len() + 1);
        round_trip(&*store, &format!("long {n}"), long.into()).await;
    }
}

pub async fn documents_come_back_byte_for_byte(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut acquired = held(&*store, "r").await;
    let id = acquired.lease.run.clone();
    let document = Bytes::from_static(br#"{"z":1e400, "a":"\ud800\u0000", "a":2.50}"#);
    let mut next = advance(&acquired);
    next.head.outcome = Some(document.clone());
    next.head
        .metadata
        .insert("nul \0 and \u{fffd}".to_owned(), "'\"\\ \0 \u{1f980}".to_owned());
    next.events[0].data = document.clone();
    let mut decided = decision(&id, Scope::Operator, "d", acquired.loaded.now);
    decided.body = document.clone();
    next.decisions = vec![decided.clone()];
    let metadata = next.head.metadata.clone();
    commit(&*store, &mut acquired, next).await;
    assert_eq!(acquired.loaded.head.outcome.as_ref(), Some(&document));
    assert_eq!(acquired.loaded.head.metadata, metadata);
    assert_eq!(store.events(&id, 1, 1).await.unwrap()[0].data, document);
    assert_eq!(store.decisions(&id, &Scope::Operator).await.unwrap(), [decided]);
}

pub async fn one_long_payload_is_stored_once_per_run(fixture: &dyn Fixture) {
    let store = fixture.store();
    let big = payload(patterned(INLINE_MAX + 100));
    let mut acquired = held(&*store, "r").await;
    let id = acquired.lease.run.clone();
    let called = completed(activity(&id, 1, "a"), big.clone(), acquired.loaded.now);
    let mut next = advance(&acquired);
    next.state = big.clone();
    next.head.state_digest = *big.digest();
    next.activities = vec![called.clone()];
    commit(&*store, &mut acquired, next).await;
    // Another run has its own copy.
    let now = store.now().await.unwrap();
    new(store
        .create(create_with(&run("other"), big.clone(), now))
        .await
        .unwrap());
    fixture.tamper(&id, Tamper::DropBlob(*big.digest())).await;
    refused(store.load(&id).await, "corrupt");
    refused(store.activity(&id, &called.id).await, "corrupt");
    refused(store.checkpoint(&id, revision(2)).await, "corrupt");
    assert_eq!(store.load(&run("other")).await.unwrap().state, big);
}

pub async fn a_payload_read_from_one_run_is_whole_in_another(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    let big = payload(patterned(INLINE_MAX + 1));
    new(store
        .create(create_with(&run("a"), big.clone(), now))
        .await
        .unwrap());
    let read = store.load(&run("a")).await.unwrap().state;
    new(store
        .create(create_with(&run("b"), read.clone(), now))
        .await
        .unwrap());
    let mut c = held(&*store, "c").await;
    let mut next = advance(&c);
    next.activities = vec![completed(activity(&run("c"), 1, "child"), read, now)];
    commit(&*store, &mut c, next).await;
    assert_eq!(store.load(&run("b")).await.unwrap().state, big);
    let page = store.activities(&run("c"), None, 10).await.unwrap();
    assert_eq!(page[0].output.as_ref(), Some(&big));
}

pub async fn a_state_whose_checkpoint_was_pruned_can_be_committed_again(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    let id = run("r");
    let big = payload(patterned(INLINE_MAX + 1));
    new(store.create(create_with(&id, big.clone(), now)).await.unwrap());
    let mut acquired = hold(&*store, &id).await;
    let first = acquired.loaded.state.clone();
    let next = advance(&acquired);
    commit(&*store, &mut acquired, next).await;
    assert_eq!(store.prune(&id, 1).await.unwrap(), 1);
    let mut back = advance(&acquired);
    back.head.state_digest = *first.digest();
    back.state = first;
    commit(&*store, &mut acquired, back).await;
    assert_eq!(acquired.loaded.state, big);
    assert_eq!(acquired.loaded.state.bytes(), big.bytes());
}

/// Ids that are cut, folded, normalised, trimmed, escaped or matched as patterns somewhere else.
fn awkward() -> Vec<String> {
    let long = "x".repeat(ID_MAX - 1);
    let mut ids: Vec<String> = [
        "plain",
        "Plain",
        "plain ",
        " plain",
        "%",
        "_lain",
        "p%n",
        "'; DROP TABLE runs; --",
        "\"quoted\"",
        "back\\slash",
        "$1",
        "?",
        ":id",
        "new\nline\ttab\r",
        "\u{1}\u{1b}[31m\u{7f}",
        "\u{fffd}",
        "\u{fffd}\u{fffd}",
        "\u{feff}",
        "\u{e9}",
        "e\u{301}",
        "\u{1f980}",
        "\u{10ffff}",
        "null",
        "0",
        "00",
        "run/with/../slashes",
    ]
    .map(str::to_owned)
    .to_vec();
    ids.push(format!("{long}a"));
    ids.push(format!("{long}b"));
    ids.push(long);
    ids.push("\u{e9}".repeat(ID_MAX / 2));
    ids
}

pub async fn awkward_run_ids_are_all_different(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    let ids = awkward();
    for id in &ids {
        new(store.create(create(&run(id), now)).await.unwrap());
    }
    for id in &ids {
        assert_eq!(
            store.create(create(&run(id), now)).await.unwrap(),
            Created::Exists
        );
        let acquired = hold(&*store, &run(id)).await;
        assert_eq!(acquired.loaded.head.id.as_str(), id);
        assert_eq!(acquired.loaded.state, payload(format!("state of {id}")));
        store.commit(advance(&acquired)).await.unwrap();
    }
    let filter = RunFilter {
        limit: 1_000,
        ..RunFilter::default()
    };
    assert_eq!(store.list(filter).await.unwrap().len(), ids.len());
}

pub async fn awkward_texts_are_kept_in_every_place(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    for (n, text) in awkward().iter().enumerate() {
        let id = run(&format!("r{n}"));
        let mut creation = create(&id, now);
        creation.head.definition.name.clone_from(text);
        creation.head.definition.kind.clone_from(text);
        creation.head.lineage.parent = Some(run(text));
        creation.head.owner = Some(text.clone());
        creation.idempotency = Some(idempotency(text, text, 1));
        new(store.create(creation.clone()).await.unwrap());
        assert_eq!(
            store.create(creation.clone()).await.unwrap(),
            Created::Replayed { run: id.clone() }
        );
        let filter = RunFilter {
            definition: Some((text.clone(), text.clone())),
            parent: Some(run(text)),
            owner: Some(text.clone()),
            limit: 10,
            ..RunFilter::default()
        };
        assert_eq!(store.list(filter).await.unwrap().len(), 1, "{text:?}");
        let mut acquired = store.acquire(&id, lease_for(text, LONG)).await.unwrap();
        assert_eq!(acquired.lease.owner.as_str(), text);
        let gate = wait(&id, 1, text, text, now);
        let called = activity(&id, 1, text);
        let decided = decision(&id, Scope::Wait(gate.id.clone()), text, now);
        let mut next = advance(&acquired);
        next.head.cursor = Some(crate::testing::build::node(text));
        next.events[0].name = text.clone().into();
        next.waits = vec![gate.clone()];
        next.activities = vec![called.clone()];
        next.decisions = vec![decided.clone()];
        commit(&*store, &mut acquired, next).await;
        assert_eq!(
            acquired.loaded.head.cursor.as_ref().map(|c| c.as_str()),
            Some(text.as_str())
        );
        assert_eq!(store.events(&id, 1, 1).await.unwrap()[0].name, *text);
        assert_eq!(store.armed(&correlation(text), 10).await.unwrap(), [gate]);
        assert_eq!(store.activity(&id, &called.id).await.unwrap(), Some(called));
        let found = store
            .decision(&id, &decided.scope, &decision_id(text))
            .await
            .unwrap();
        assert_eq!(found, Some(decided));
    }
}

pub async fn awkward_ids_can_be_deleted_one_by_one(fixture: &dyn Fixture) {
    let store = fixture.store();
    let kept = over(&*store, "plain text").await;
    queued(&*store, "p").await;
    for id in ["p%", "plain_text", "%", "'", "plain"] {
        let id = over(&*store, id).await;
        store.delete_if_idle(&id).await.unwrap();
        refused(store.load(&id).await, "deleted");
    }
    store.load(&kept).await.unwrap();
}
