//! Definitions: immutable versions, and the names that stand before them.

use std::collections::BTreeSet;

use futures_util::future::join_all;

use super::support::refused;
use crate::store::{Defined, Definition, Origin, Store};
use crate::testing::Fixture;
use crate::testing::build::define;

async fn newest(store: &dyn Store, name: &str) -> Definition {
    store.definition("agent", name, None).await.unwrap().unwrap()
}

async fn names(store: &dyn Store, after: Option<&str>, limit: u32) -> Vec<String> {
    let page = store.definitions("agent", after.map(str::to_owned), limit);
    page.await.unwrap().into_iter().map(|d| d.name).collect()
}

async fn versions(store: &dyn Store, name: &str, after: u64, limit: u32) -> Vec<u64> {
    let page = store.versions("agent", name, after, limit);
    page.await.unwrap().into_iter().map(|d| d.version).collect()
}

pub async fn a_definition_comes_back_byte_for_byte(fixture: &dyn Fixture) {
    let store = fixture.store();
    // Everything that a database which reads JSON would change or refuse.
    let bodies = [
        "{}",
        " { \"b\" : 1,\n\t\"a\":1.0, \"a\":1e400 } ",
        "{\"nul\":\"\\u0000\",\"lone\":\"\\ud800\",\"crab\":\"\u{1f980}\"}",
        "[123456789012345678901234567890, -0.0, 1E+2]",
        "null",
    ];
    for (n, body) in (1..).zip(bodies) {
        let before = store.now().await.unwrap();
        let given = define("deployer", body);
        assert_eq!(
            store.define(given.clone()).await.unwrap(),
            Defined::New { version: n }
        );
        let found = newest(&*store, "deployer").await;
        assert!(found.created_at >= before && found.created_at <= store.now().await.unwrap());
        let expected = Definition {
            kind: given.kind,
            name: given.name,
            version: n,
            digest: given.digest,
            body: given.body,
            origin: Origin::Config,
            withdrawn: false,
            created_at: found.created_at,
        };
        assert_eq!(found, expected);
        let exactly = store.definition("agent", "deployer", Some(n)).await.unwrap();
        assert_eq!(exactly, Some(expected));
    }
    let long = define("long", format!("\"{}\"", "x".repeat(1 << 20)));
    store.define(long.clone()).await.unwrap();
    assert_eq!(newest(&*store, "long").await.body, long.body);
    for (name, version) in [
        ("Deployer", None),
        ("deployer", Some(0)),
        ("deployer", Some(u64::MAX)),
    ] {
        assert_eq!(store.definition("agent", name, version).await.unwrap(), None);
    }
}

pub async fn the_newest_digest_again_is_the_same_version(fixture: &dyn Fixture) {
    let store = fixture.store();
    let given = define("a", "[1]");
    assert_eq!(
        store.define(given.clone()).await.unwrap(),
        Defined::New { version: 1 }
    );
    let first = newest(&*store, "a").await;
    assert_eq!(
        store.define(given.clone()).await.unwrap(),
        Defined::Same { version: 1 }
    );
    assert_eq!(newest(&*store, "a").await, first);
    // Who declares it last is its origin.
    let mut api = given;
    api.origin = Origin::Api;
    assert_eq!(store.define(api).await.unwrap(), Defined::Same { version: 1 });
    let expected = Definition {
        origin: Origin::Api,
        ..first
    };
    assert_eq!(newest(&*store, "a").await, expected);
}

pub async fn a_digest_of_before_is_a_new_version(fixture: &dyn Fixture) {
    let store = fixture.store();
    for (n, body) in (1..).zip(["[1]", "[2]", "[1]", "[1 ]"]) {
        let defined = store.define(define("a", body)).await.unwrap();
        assert_eq!(defined, Defined::New { version: n });
    }
    for (n, body) in (1..).zip(["[1]", "[2]", "[1]", "[1 ]"]) {
        let found = store.definition("agent", "a", Some(n)).await.unwrap().unwrap();
        assert_eq!(found.body, body);
    }
}

pub async fn what_is_no_definition_is_refused(fixture: &dyn Fixture) {
    let store = fixture.store();
    store.define(define("a", "[1]")).await.unwrap();
    let mut other = define("a", "[2]");
    other.digest = define("a", "[1]").digest;
    refused(store.define(other).await, "corrupt");
    let mut graph = define("a", "[2]");
    graph.kind = "graph".to_owned();
    refused(store.define(graph).await, "corrupt");
    refused(store.define(define("a", "[2")).await, "corrupt");
    refused(store.define(define("", "[2]")).await, "corrupt");
    refused(store.define(define("a\0", "[2]")).await, "corrupt");
    assert_eq!(names(&*store, None, 10).await, ["a"]);
    assert_eq!(versions(&*store, "a", 0, 10).await, [1]);
}

pub async fn a_name_is_withdrawn_once_and_restored_by_either(fixture: &dyn Fixture) {
    let store = fixture.store();
    assert!(!store.withdraw("agent", "a").await.unwrap());
    store.define(define("a", "[1]")).await.unwrap();
    store.define(define("other", "[1]")).await.unwrap();
    assert!(store.withdraw("agent", "a").await.unwrap());
    assert!(!store.withdraw("agent", "a").await.unwrap());
    let found = newest(&*store, "a").await;
    assert!(found.withdrawn && found.version == 1);
    // It is still listed, and its versions stay.
    let listed = store.definitions("agent", None, 10).await.unwrap();
    let withdrawn: Vec<_> = listed.iter().map(|d| (&*d.name, d.withdrawn)).collect();
    assert_eq!(withdrawn, [("a", true), ("other", false)]);
    assert!(store.versions("agent", "a", 0, 10).await.unwrap()[0].withdrawn);

    let same = store.define(define("a", "[1]")).await.unwrap();
    assert_eq!(same, Defined::Same { version: 1 });
    assert!(!newest(&*store, "a").await.withdrawn);
    assert!(store.withdraw("agent", "a").await.unwrap());
    let new = store.define(define("a", "[2]")).await.unwrap();
    assert_eq!(new, Defined::New { version: 2 });
    assert!(!newest(&*store, "a").await.withdrawn);
}

pub async fn kinds_keep_their_names_apart(fixture: &dyn Fixture) {
    let store = fixture.store();
    for (n, kind) in (1..).zip(["agent", "flow", "trigger"]) {
        let mut given = define("a", format!("[{n}]"));
        given.kind = kind.to_owned();
        assert_eq!(store.define(given).await.unwrap(), Defined::New { version: 1 });
    }
    assert!(store.withdraw("flow", "a").await.unwrap());
    for (n, kind) in (1..).zip(["agent", "flow", "trigger"]) {
        let found = store.definition(kind, "a", None).await.unwrap().unwrap();
        assert_eq!((found.body, found.withdrawn), (format!("[{n}]").into(), n == 2));
        assert_eq!(store.definitions(kind, None, 10).await.unwrap().len(), 1);
    }
    assert_eq!(store.definitions("graph", None, 10).await.unwrap(), []);
}

pub async fn of_concurrent_twins_one_is_new(fixture: &dyn Fixture) {
    let store = fixture.store();
    for round in 1..=5 {
        let body = format!("[{round}]");
        let answers = join_all((0..8).map(|_| store.define(define("a", body.clone())))).await;
        let answers: Vec<_> = answers.into_iter().map(Result::unwrap).collect();
        let new = Defined::New { version: round };
        assert_eq!(answers.iter().filter(|a| **a == new).count(), 1, "{answers:?}");
        assert!(answers.iter().all(|a| a.version() == round), "{answers:?}");
    }
    assert_eq!(versions(&*store, "a", 0, 10).await, [1, 2, 3, 4, 5]);
}

pub async fn concurrent_definitions_are_all_kept(fixture: &dyn Fixture) {
    let store = fixture.store();
    let bodies: Vec<String> = (0..8).map(|n| format!("[{n}]")).collect();
    let given = bodies.iter().map(|body| store.define(define("a", body.clone())));
    let mut told = BTreeSet::new();
    for (body, answer) in bodies.iter().zip(join_all(given).await) {
        let version = answer.unwrap().version();
        assert!(told.insert(version), "{version} twice");
        let found = store.definition("agent", "a", Some(version)).await.unwrap();
        assert_eq!(found.unwrap().body, *body);
    }
    assert_eq!(versions(&*store, "a", 0, 10).await, (1..=8).collect::<Vec<_>>());
}

/// The order of bytes, whatever the database's language.
const ORDERED: [&str; 9] = ["A", "B", "_", "a", "a b", "a-b", "aB", "b", "\u{e9}"];

pub async fn definitions_come_in_pages_by_name(fixture: &dyn Fixture) {
    let store = fixture.store();
    for name in ORDERED.iter().rev() {
        store.define(define(name, "[1]")).await.unwrap();
        store.define(define(name, "[2]")).await.unwrap();
    }
    store.withdraw("agent", "aB").await.unwrap();
    let mut flow = define("a flow", "[1]");
    flow.kind = "flow".to_owned();
    store.define(flow).await.unwrap();
    assert_eq!(names(&*store, None, 100).await, ORDERED);
    assert_eq!(names(&*store, None, 2).await, ORDERED[..2]);
    assert_eq!(names(&*store, Some("B"), 4).await, ORDERED[2..6]);
    assert_eq!(names(&*store, Some("a a"), 1).await, ["a b"]);
    assert_eq!(names(&*store, Some("\u{e9}"), 4).await, [""; 0]);
    for found in store.definitions("agent", None, 100).await.unwrap() {
        assert_eq!(found, newest(&*store, &found.name).await);
        assert_eq!(found.version, 2);
    }
}

pub async fn versions_come_in_pages_in_order(fixture: &dyn Fixture) {
    let store = fixture.store();
    for n in 1..=12 {
        store.define(define("a", format!("[{n}]"))).await.unwrap();
    }
    store.define(define("b", "[1]")).await.unwrap();
    assert_eq!(versions(&*store, "a", 0, 100).await, (1..=12).collect::<Vec<_>>());
    assert_eq!(versions(&*store, "a", 8, 3).await, [9, 10, 11]);
    assert_eq!(versions(&*store, "a", 12, 3).await, [0; 0]);
    assert_eq!(versions(&*store, "a", u64::MAX, 3).await, [0; 0]);
    assert_eq!(versions(&*store, "c", 0, 3).await, [0; 0]);
}

pub async fn a_changed_body_is_corrupt_and_hides_nothing(fixture: &dyn Fixture) {
    let store = fixture.store();
    for name in ["a", "b", "c"] {
        for body in ["{\"n\":1}", "{\"n\":2}", "{\"n\":3}"] {
            store.define(define(name, body)).await.unwrap();
        }
    }
    fixture.spoil("a", 3).await;
    fixture.spoil("b", 2).await;
    refused(store.definition("agent", "a", None).await, "corrupt");
    refused(store.definition("agent", "a", Some(3)).await, "corrupt");
    refused(store.definition("agent", "b", Some(2)).await, "corrupt");
    assert_eq!(newest(&*store, "b").await.version, 3);
    // A page is as long as it can be.
    assert_eq!(names(&*store, None, 2).await, ["b", "c"]);
    assert_eq!(names(&*store, None, 1).await, ["b"]);
    assert_eq!(versions(&*store, "b", 0, 2).await, [1, 3]);
    assert_eq!(versions(&*store, "b", 1, 1).await, [3]);
    assert_eq!(versions(&*store, "a", 0, 10).await, [1, 2]);
    // The next version is after it, and whole.
    let defined = store.define(define("a", "{\"n\":4}")).await.unwrap();
    assert_eq!(defined, Defined::New { version: 4 });
    assert_eq!(newest(&*store, "a").await.version, 4);
}
