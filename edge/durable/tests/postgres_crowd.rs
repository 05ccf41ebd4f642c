//! Many callers at once on a few hundred runs: they wait for each other, and never in a circle.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "tests: a broken expectation ends the test with its message"
)]

mod postgres;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use iop_durable::record::{CancelRequest, Scope, Status};
use iop_durable::store::postgres::PostgresStore;
use iop_durable::store::{Acquired, Authority, Created, Store, StoreError};
use iop_durable::testing::build::{
    LONG, advance, advance_loaded, claim, create, decision, decision_id, ended, idempotency, lease_for, post,
    run,
};
use postgres::PostgresFixture;
use tokio::task::JoinSet;

const RUNS: u64 = 200;
const WORKERS: u64 = 16;
const STEPS: u64 = 150;

/// What a worker was told, counted by kind.
type Told = BTreeMap<&'static str, u64>;

fn count<T>(told: &mut Told, answer: &Result<T, StoreError>) {
    let kind = answer.as_ref().map_or_else(StoreError::kind, |_| "done");
    *told.entry(kind).or_default() += 1;
    if let Err(error) = answer {
        let expected = [
            "conflict",
            "lease_lost",
            "busy",
            "not_found",
            "deleted",
            "duplicate",
            "not_idle",
        ];
        assert!(expected.contains(&error.kind()), "{error}");
    }
}

async fn work(store: Arc<dyn Store>, n: u64) -> Told {
    // The same numbers every time.
    let mut dice = fastrand::Rng::with_seed(n);
    let mut told = Told::new();
    let mut mine: Vec<Acquired> = Vec::new();
    for step in 0..STEPS {
        let id = run(&format!("r{}", dice.u64(..RUNS)));
        match dice.u64(..10) {
            0 => {
                let now = store.now().await.unwrap();
                let mut creation = create(&id, now);
                creation.idempotency = Some(idempotency("crowd", &format!("k{}", dice.u64(..RUNS)), 1));
                let answer = store.create(creation).await;
                if let Ok(Created::New { .. }) = answer {
                    *told.entry("made").or_default() += 1;
                }
                count(&mut told, &answer);
            }
            1 | 2 => {
                let claimed = store.claim(claim(&format!("w{n}"), 5)).await;
                count(&mut told, &claimed);
                mine.extend(claimed.unwrap().runs);
            }
            3 => {
                let answer = store
                    .acquire(&id, lease_for(&format!("w{n}"), Duration::from_millis(30)))
                    .await;
                count(&mut told, &answer);
                mine.extend(answer);
            }
            4 => {
                let leases = mine.iter().map(|a| a.lease.clone()).collect();
                count(&mut told, &store.renew(leases, LONG).await);
            }
            5 | 6 => {
                let Ok(loaded) = store.load(&id).await else {
                    continue;
                };
                let mut posted = post(&id, loaded.inbox.signal);
                posted.cancel = Some(CancelRequest {
                    id: decision_id("stop"),
                    reason: "crowd".to_owned(),
                    by: None,
                    requested_at: loaded.now,
                });
                posted.decisions = vec![decision(&id, Scope::Cancel, &format!("c{n}-{step}"), loaded.now)];
                count(&mut told, &store.post(posted).await);
            }
            7 => {
                let Ok(loaded) = store.load(&id).await else {
                    continue;
                };
                let mut commit = advance_loaded(&loaded, Authority::Idle);
                if loaded.head.status.is_terminal() {
                    continue;
                }
                commit.decisions = vec![decision(
                    &id,
                    Scope::Operator,
                    &format!("o{n}-{step}"),
                    loaded.now,
                )];
                count(&mut told, &store.commit(commit).await);
            }
            8 => count(&mut told, &store.delete_if_idle(&id).await),
            _ => {
                // Everything that is held moves on at once, some of it to its end.
                let mut commits = JoinSet::new();
                for mut acquired in mine.drain(..) {
                    let over = dice.u64(..3) == 0;
                    let store = store.clone();
                    commits.spawn(async move {
                        if acquired.loaded.head.status.is_terminal() {
                            return (store.release(acquired.lease.clone()).await, None);
                        }
                        let next = advance(&acquired);
                        let next = if over {
                            ended(next, Status::Cancelled)
                        } else {
                            next
                        };
                        let head = next.head.clone();
                        match store.commit(next).await {
                            Ok(committed) => {
                                acquired.loaded.head = head;
                                acquired.loaded.head.revision = committed.revision;
                                acquired.loaded.now = committed.now;
                                (Ok(()), (!over).then_some(acquired))
                            }
                            Err(error) => (Err(error), None),
                        }
                    });
                }
                while let Some(done) = commits.join_next().await {
                    let (answer, left) = done.unwrap();
                    count(&mut told, &answer);
                    mine.extend(left);
                }
            }
        }
    }
    told
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_on_a_few_hundred_runs_never_deadlocks() {
    let fixture = PostgresFixture::start().await;
    let second = PostgresStore::connect(&fixture.server.url()).await.unwrap();
    let stores: [Arc<dyn Store>; 2] = [fixture.store.clone(), Arc::new(second)];
    let mut workers = JoinSet::new();
    for n in 0..WORKERS {
        let store = stores[usize::from(n % 2 == 0)].clone();
        workers.spawn(work(store, n));
    }
    let mut told = Told::new();
    for each in workers.join_all().await {
        for (kind, n) in each {
            *told.entry(kind).or_default() += n;
        }
    }
    for kind in ["done", "made", "conflict", "busy"] {
        assert!(
            told.contains_key(kind),
            "the crowd was not crowded enough: {told:?}"
        );
    }
    let deadlocks = fixture.server.sql("SELECT sum(deadlocks) FROM pg_stat_database");
    assert_eq!(deadlocks.as_deref(), Ok("0"), "{}", fixture.server.log());
    assert!(
        !fixture.server.log().contains("deadlock"),
        "{}",
        fixture.server.log()
    );
    // What is left is whole: revisions and events without gaps, the index as the heads say.
    let gaps = "SELECT count(*) FROM (SELECT run_id, max(revision) - count(*) AS gaps FROM checkpoints GROUP BY run_id \
                UNION ALL SELECT run_id, max(seq) - count(*) FROM events GROUP BY run_id) AS g WHERE gaps <> 0";
    assert_eq!(fixture.server.sql(gaps).as_deref(), Ok("0"));
    let orphans = "SELECT count(*) FROM (SELECT run_id FROM checkpoints UNION SELECT run_id FROM events \
                   UNION SELECT run_id FROM decisions UNION SELECT run_id FROM run_leases) AS o \
                   WHERE run_id NOT IN (SELECT run_id FROM runs)";
    assert_eq!(fixture.server.sql(orphans).as_deref(), Ok("0"));
    let rebuilt = fixture.store.rebuild_index().await.unwrap();
    assert_eq!(rebuilt.quarantined, 0);
}
