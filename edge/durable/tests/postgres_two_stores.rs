//! Two stores on one database: what one does the other sees, and neither does it twice.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "tests: a broken expectation ends the test with its message"
)]

mod postgres;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use iop_durable::record::Status;
use iop_durable::store::postgres::PostgresStore;
use iop_durable::store::{Hint, Store, StoreError};
use iop_durable::testing::build::{LONG, advance, claim, create, ended, lease_for, post, run};
use iop_tests::within;
use postgres::PostgresFixture;
use tokio::task::JoinSet;

const WITHIN: Duration = Duration::from_secs(20);

async fn second(fixture: &PostgresFixture) -> Arc<dyn Store> {
    Arc::new(PostgresStore::connect(&fixture.server.url()).await.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_stores_open_one_empty_database_at_once() {
    let server = iop_tests::postgres::Postgres::start().await;
    let (url, other) = (server.url(), server.url());
    let (a, b) = tokio::join!(PostgresStore::connect(&url), PostgresStore::connect(&other));
    let (a, b) = (a.unwrap(), b.unwrap());
    let now = a.now().await.unwrap();
    a.create(create(&run("r"), now)).await.unwrap();
    b.load(&run("r")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_of_many_workers_on_two_stores_never_overlap() {
    const RUNS: usize = 300;
    let fixture = PostgresFixture::start().await;
    let stores: [Arc<dyn Store>; 2] = [fixture.store.clone(), second(&fixture).await];
    let now = stores[0].now().await.unwrap();
    let mut made = JoinSet::new();
    for n in 0..RUNS {
        let store = stores[n % 2].clone();
        made.spawn(async move { store.create(create(&run(&format!("r{n}")), now)).await.unwrap() });
    }
    made.join_all().await;
    let mut workers = JoinSet::new();
    for n in 0..8 {
        let store = stores[n % 2].clone();
        workers.spawn(async move {
            let mut mine = Vec::new();
            loop {
                let claimed = store.claim(claim(&format!("w{n}"), 7)).await.unwrap();
                assert!(claimed.quarantined.is_empty());
                if claimed.runs.is_empty() {
                    return mine;
                }
                for acquired in claimed.runs {
                    mine.push(acquired.lease.run.clone());
                    store
                        .commit(ended(advance(&acquired), Status::Succeeded))
                        .await
                        .unwrap();
                }
            }
        });
    }
    let all: Vec<_> = workers.join_all().await.into_iter().flatten().collect();
    // A claim may find nothing while others hold the rest for a moment: what is left over is claimed now.
    let rest = stores[0].claim(claim("last", 1000)).await.unwrap().runs;
    let once: BTreeSet<_> = all
        .iter()
        .cloned()
        .chain(rest.iter().map(|a| a.lease.run.clone()))
        .collect();
    assert_eq!(all.len() + rest.len(), RUNS, "each run was claimed once");
    assert_eq!(once.len(), RUNS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_stores_one_acquires_and_one_commits() {
    let fixture = PostgresFixture::start().await;
    let stores: [Arc<dyn Store>; 2] = [fixture.store.clone(), second(&fixture).await];
    let now = stores[0].now().await.unwrap();
    for n in 0..50 {
        let id = run(&format!("r{n}"));
        stores[0].create(create(&id, now)).await.unwrap();
        let (a, b) = tokio::join!(
            stores[0].acquire(&id, lease_for("a", LONG)),
            stores[1].acquire(&id, lease_for("b", LONG)),
        );
        let (winner, loser) = match (a, b) {
            (Ok(winner), Err(loser)) | (Err(loser), Ok(winner)) => (winner, loser),
            (a, b) => panic!("{a:?} {b:?}"),
        };
        assert_eq!(loser.kind(), "busy");
        let (a, b) = tokio::join!(
            stores[0].commit(advance(&winner)),
            stores[1].commit(advance(&winner)),
        );
        let (committed, refused) = match (a, b) {
            (Ok(committed), Err(refused)) | (Err(refused), Ok(committed)) => (committed, refused),
            (a, b) => panic!("{a:?} {b:?}"),
        };
        assert_eq!(committed.revision, winner.loaded.head.revision.next().unwrap());
        assert!(matches!(refused, StoreError::Conflict(_)), "{refused:?}");
    }
}

#[tokio::test]
async fn a_hint_of_one_store_reaches_the_other_and_only_once_each() {
    let fixture = PostgresFixture::start().await;
    let other = second(&fixture).await;
    let mut heard = other.hints().subscribe();
    let mut own = fixture.store.hints().subscribe();
    let now = fixture.store.now().await.unwrap();
    // The other store may not listen yet.
    let mut n = 0;
    let listening = loop {
        n += 1;
        let id = run(&format!("first{n}"));
        fixture.store.create(create(&id, now)).await.unwrap();
        if let Ok(hint) = tokio::time::timeout(Duration::from_millis(300), heard.recv()).await {
            break hint.unwrap();
        }
        assert!(n < 50, "hints are never heard");
    };
    assert!(matches!(listening, Hint::Claimable(_)));
    let id = run("r");
    let acquired = {
        fixture.store.create(create(&id, now)).await.unwrap();
        fixture
            .store
            .acquire(&id, lease_for("worker", LONG))
            .await
            .unwrap()
    };
    // A step of a run that is held is nobody's hint.
    fixture.store.commit(advance(&acquired)).await.unwrap();
    fixture.store.post(post(&id, 0)).await.unwrap();
    let mut of_run = Vec::new();
    within("the other store hears of the post", WITHIN, async {
        loop {
            let hint = heard.recv().await.unwrap();
            let (Hint::Claimable(about) | Hint::Posted(about)) = &hint;
            if *about == id {
                of_run.push(hint.clone());
            }
            if hint == Hint::Posted(id.clone()) {
                break;
            }
        }
    })
    .await;
    assert_eq!(of_run, [Hint::Claimable(id.clone()), Hint::Posted(id.clone())]);
    // The store that made them has each once: its own notifications are not heard again.
    let last = run("last");
    fixture.store.create(create(&last, now)).await.unwrap();
    within("the other store hears of the last", WITHIN, async {
        while heard.recv().await.unwrap() != Hint::Claimable(last.clone()) {}
    })
    .await;
    let mut mine = Vec::new();
    while let Ok(hint) = own.try_recv() {
        let (Hint::Claimable(about) | Hint::Posted(about)) = &hint;
        if *about == id {
            mine.push(hint);
        }
    }
    assert_eq!(mine, [Hint::Claimable(id.clone()), Hint::Posted(id)]);
}
