//! The database goes and comes back: errors that say whether something was written, nothing lost, and then it works again.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "tests: a broken expectation ends the test with its message"
)]

mod postgres;
mod stored;

use std::sync::Arc;
use std::time::Duration;

use iop_durable::store::postgres::PostgresStore;
use iop_durable::store::{Acquired, Hint, Store, StoreError};
use iop_durable::testing::build::{LONG, advance, claim, create, lease_for, post, run};
use iop_tests::eventually;
use iop_tests::postgres::{Options, Postgres};
use postgres::PostgresFixture;
use stored::held;
use tokio::task::JoinSet;

const WITHIN: Duration = Duration::from_secs(30);

fn nothing_or_unknown<T: std::fmt::Debug>(answer: Result<T, StoreError>) {
    let kind = answer.expect_err("the database is gone").kind();
    assert!(["unavailable", "unconfirmed"].contains(&kind), "{kind}");
}

#[track_caller]
fn nothing<T: std::fmt::Debug>(answer: Result<T, StoreError>) {
    let error = answer.expect_err("the database is gone");
    assert_eq!(error.kind(), "unavailable", "{error:?}");
}

async fn works_again(store: &dyn Store, acquired: &Acquired) {
    eventually("the store works again", WITHIN, || async {
        store
            .load(&acquired.lease.run)
            .await
            .map(|_| ())
            .map_err(|error| error.to_string())
    })
    .await;
    store.commit(advance(acquired)).await.unwrap();
    store.claim(claim("again", 1)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_is_stopped_and_started_is_used_again() {
    let mut server = Postgres::with(Options {
        tcp: true,
        ..Options::default()
    })
    .await;
    let store = PostgresStore::connect(&server.url()).await.unwrap();
    let acquired = held(&store, "r", LONG).await;
    let id = acquired.lease.run.clone();
    server.stop().await;
    // The first on each connection may not know yet; after that nothing is sent.
    nothing_or_unknown(store.commit(advance(&acquired)).await);
    nothing_or_unknown(store.post(post(&id, 0)).await);
    for _ in 0..2 {
        nothing(store.commit(advance(&acquired)).await);
        nothing(store.post(post(&id, 0)).await);
        nothing(store.create(create(&run("new"), acquired.loaded.now)).await);
        nothing(store.load(&id).await);
        nothing(store.now().await);
        nothing(store.claim(claim("worker", 1)).await);
        nothing(store.acquire(&id, lease_for("worker", LONG)).await);
        nothing(store.renew(vec![acquired.lease.clone()], LONG).await);
        nothing(store.release(acquired.lease.clone()).await);
        nothing(store.delete_if_idle(&id).await);
        nothing(store.prune(&id, 1).await);
        nothing(store.rebuild_index().await);
    }
    let closed = PostgresStore::connect(&server.url()).await;
    assert_eq!(closed.err().map(|error| error.kind()), Some("unavailable"));
    server.restart().await;
    works_again(&store, &acquired).await;
    assert_eq!(store.load(&id).await.unwrap().lease, Some(acquired.lease.clone()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_connection_that_idled_through_a_restart_is_replaced_unseen() {
    let mut server = Postgres::start().await;
    let store: Arc<dyn Store> = Arc::new(PostgresStore::connect(&server.url()).await.unwrap());
    let acquired = held(&*store, "r", LONG).await;
    // Several connections of the pool are open.
    let mut loads = JoinSet::new();
    for _ in 0..32 {
        let store = store.clone();
        loads.spawn(async move { store.load(&run("r")).await.map(|_| ()) });
    }
    for answer in loads.join_all().await {
        answer.unwrap();
    }
    server.stop().await;
    server.restart().await;
    for _ in 0..32 {
        store.load(&run("r")).await.unwrap();
    }
    store.renew(vec![acquired.lease.clone()], LONG).await.unwrap();
}

/// Drives one run until a commit fails: how many were answered, and how the last one ended.
async fn drive(store: Arc<dyn Store>, mut acquired: Acquired) -> (u64, StoreError) {
    let mut answered = acquired.loaded.head.revision.get();
    loop {
        let next = advance(&acquired);
        let head = next.head.clone();
        match store.commit(next).await {
            Ok(committed) => {
                answered = committed.revision.get();
                acquired.loaded.head = head;
                acquired.loaded.head.revision = committed.revision;
                acquired.loaded.now = committed.now;
            }
            Err(error) => return (answered, error),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_answered_outlives_a_crash_and_what_was_not_is_whole_or_absent() {
    const RUNS: usize = 24;
    let mut fixture = PostgresFixture::start().await;
    let store: Arc<dyn Store> = fixture.store.clone();
    for round in 0..3 {
        let mut drivers = JoinSet::new();
        for n in 0..RUNS {
            let acquired = held(&*store, &format!("{round}-{n}"), LONG).await;
            let store = store.clone();
            drivers.spawn(async move {
                let id = acquired.lease.run.clone();
                (id, drive(store, acquired).await)
            });
        }
        fixture
            .server
            .answers(
                &format!("SELECT min(revision) > 3 FROM runs WHERE run_id LIKE '{round}-%'"),
                "t",
            )
            .await;
        fixture.server.kill().await;
        let mut ends = Vec::new();
        while let Some(end) = drivers.join_next().await {
            ends.push(end.unwrap());
        }
        fixture.server.restart().await;
        for (id, (answered, error)) in ends {
            let found = eventually("the run is loaded", WITHIN, || async {
                store.load(&id).await.map_err(|error| error.to_string())
            })
            .await;
            let found = found.head.revision.get();
            match error.kind() {
                "unconfirmed" => assert!(found == answered || found == answered + 1, "{found} {answered}"),
                "unavailable" => assert_eq!(found, answered),
                kind => panic!("{kind}"),
            }
            let events = store.events(&id, 0, 1_000_000).await.unwrap();
            assert_eq!(
                events.len() as u64,
                found,
                "one event per commit, whole or absent"
            );
            let history = store.history(&id, None, 1_000_000).await.unwrap();
            assert_eq!(history.len() as u64, found);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hints_are_heard_again_after_a_restart() {
    let mut server = Postgres::start().await;
    let teller = PostgresStore::connect(&server.url()).await.unwrap();
    let hearer = PostgresStore::connect(&server.url()).await.unwrap();
    let mut heard = hearer.hints().subscribe();
    server.stop().await;
    server.restart().await;
    let now = teller.now().await.unwrap();
    for n in 0.. {
        assert!(n < 100, "hints are not heard again");
        let id = run(&format!("r{n}"));
        if teller.create(create(&id, now)).await.is_err() {
            continue;
        }
        let hint = tokio::time::timeout(Duration::from_millis(300), heard.recv()).await;
        if let Ok(hint) = hint {
            assert!(matches!(hint.unwrap(), Hint::Claimable(_)));
            break;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_somebody_keeps_locked_fails_its_run_only() {
    let server = Postgres::start().await;
    let store: Arc<dyn Store> = Arc::new(PostgresStore::connect(&server.url()).await.unwrap());
    let (a, b) = (held(&*store, "a", LONG).await, held(&*store, "b", LONG).await);
    let url = server.url();
    let mut other = <sqlx::PgConnection as sqlx::Connection>::connect(&url)
        .await
        .unwrap();
    sqlx::raw_sql("BEGIN; SELECT 1 FROM runs WHERE run_id = 'a' FOR UPDATE")
        .execute(&mut other)
        .await
        .unwrap();
    let stuck = tokio::spawn({
        let store = store.clone();
        let commit = advance(&a);
        async move { store.commit(commit).await }
    });
    // A run beside it goes on: on the other committer, or when the batch they share is written one by one.
    store.commit(advance(&b)).await.unwrap();
    nothing(stuck.await.unwrap());
    sqlx::raw_sql("ROLLBACK").execute(&mut other).await.unwrap();
    store.commit(advance(&a)).await.unwrap();
}
