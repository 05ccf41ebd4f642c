//! Hosts: what they claim, what they leave alone, and how they stop.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use iop_durable::graph::{Directive, Graph, GraphBuilder};
use iop_durable::host::{Host, HostOptions, Library, Registry};
use iop_durable::ids::{Owner, RunId};
use iop_durable::record::{DefinitionRef, Effect, Status};
use iop_durable::runner::{Ctx, Drive, Options, Runner, Start};
use iop_durable::store::Store;
use iop_durable::store::memory::MemoryStore;
use iop_durable::testing::ManualClock;
use iop_durable::time::HostClock;
use tokio::sync::Semaphore;

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new(Arc::new(HostClock::new())))
}

fn runner(graph: Graph<u32>, store: &Arc<dyn Store>) -> Runner<u32> {
    let options = Options::new(Owner::new("test").unwrap());
    Runner::new(Arc::new(graph), Arc::clone(store), options).unwrap()
}

/// Version `version` of a graph of one step that adds the version to the state.
fn adding(version: u64) -> Graph<u32> {
    let added = u32::try_from(version).unwrap();
    GraphBuilder::<u32>::new("adding", version)
        .node("add", move |_: Ctx, n: u32| async move {
            Ok((n + added, Directive::end()))
        })
        .terminal("add")
        .compile()
        .unwrap()
}

fn host(store: &Arc<dyn Store>, registry: &Registry, workers: u32) -> Host {
    let mut options = HostOptions::new(Owner::new("host").unwrap());
    options.workers = workers;
    options.poll_interval = Duration::from_millis(20);
    Host::start(Arc::clone(store), registry.clone(), options)
}

async fn ends(store: &Arc<dyn Store>, run: &RunId) -> Status {
    iop_tests::eventually("the run ends", Duration::from_secs(10), || async {
        match store.load(run).await.unwrap().head.status {
            status if status.is_terminal() => Ok(status),
            status => Err(status.to_string()),
        }
    })
    .await
}

#[tokio::test]
async fn versions_run_side_by_side_and_one_that_nobody_knows_holds_nobody_up() {
    let store = memory();
    let (first, second, third) = (
        runner(adding(1), &store),
        runner(adding(2), &store),
        runner(adding(3), &store),
    );
    // Older than everything else, and more than there are workers.
    let mut unknown = Vec::new();
    for _ in 0..10 {
        unknown.push(third.accept(Start::new(0)).await.unwrap().run);
    }
    let one = first.accept(Start::new(10)).await.unwrap().run;
    let two = second.accept(Start::new(10)).await.unwrap().run;
    let registry = Registry::default();
    registry.add(first.clone());
    registry.add(second.clone());
    let host = host(&store, &registry, 2);
    assert_eq!(ends(&store, &one).await, Status::Succeeded);
    assert_eq!(ends(&store, &two).await, Status::Succeeded);
    assert_eq!(first.result(&one).await.unwrap().state, 11);
    assert_eq!(second.result(&two).await.unwrap().state, 12);
    for run in &unknown {
        assert_eq!(store.load(run).await.unwrap().head.status, Status::Queued);
    }
    // Known from here on, they are run.
    registry.add(third);
    for run in &unknown {
        assert_eq!(ends(&store, run).await, Status::Succeeded);
    }
    assert!(host.stop(Duration::from_secs(5)).await);
}

#[tokio::test]
async fn a_stop_lets_calls_finish_gives_every_run_back_and_another_host_ends_them() {
    let store = memory();
    let (begun, go, calls) = (
        Arc::new(Semaphore::new(0)),
        Arc::new(Semaphore::new(0)),
        Arc::new(AtomicU32::new(0)),
    );
    let (begins, goes, counted) = (Arc::clone(&begun), Arc::clone(&go), Arc::clone(&calls));
    let graph = GraphBuilder::<u32>::new("calling", 1)
        .node("call", move |ctx: Ctx, n: u32| {
            let (begins, goes, counted) = (Arc::clone(&begins), Arc::clone(&goes), Arc::clone(&counted));
            async move {
                ctx.activity("call")
                    .effect(Effect::Unsafe)
                    .run(Bytes::new(), |_| {
                        let (begins, goes, counted) =
                            (Arc::clone(&begins), Arc::clone(&goes), Arc::clone(&counted));
                        async move {
                            counted.fetch_add(1, Ordering::SeqCst);
                            begins.add_permits(1);
                            goes.acquire().await.unwrap().forget();
                            Ok(Bytes::new())
                        }
                    })
                    .await?;
                Ok((n, Directive::end()))
            }
        })
        .terminal("call")
        .compile()
        .unwrap();
    let runner = runner(graph, &store);
    let registry = Registry::default();
    registry.add(runner.clone());
    let mut runs = Vec::new();
    for _ in 0..3 {
        runs.push(runner.accept(Start::new(0)).await.unwrap().run);
    }
    let first = host(&store, &registry, 2);
    begun.acquire_many(2).await.unwrap().forget();
    let (stopped, ()) = tokio::join!(first.stop(Duration::from_secs(10)), async { go.add_permits(3) });
    assert!(stopped);
    for run in &runs {
        let loaded = store.load(run).await.unwrap();
        assert_eq!(loaded.lease, None);
        assert!(!loaded.head.status.is_terminal() || loaded.head.status == Status::Succeeded);
    }
    let second = host(&store, &registry, 2);
    for run in &runs {
        assert_eq!(ends(&store, run).await, Status::Succeeded);
    }
    assert_eq!(calls.load(Ordering::SeqCst), 3, "no call was made twice");
    assert!(second.stop(Duration::from_secs(5)).await);
}

#[tokio::test]
async fn a_wall_clock_that_jumps_takes_no_lease_away() {
    let clock = Arc::new(ManualClock::new());
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new(Arc::clone(&clock) as _));
    let runner = runner(adding(1), &store);
    for step in [3_600_000, -7_200_000] {
        clock.step_wall(step);
        let result = runner.start(Start::new(1)).await.unwrap();
        assert_eq!((result.status, result.state), (Status::Succeeded, 2));
    }
}

/// Definitions made when they are asked for.
struct Shelf {
    store: Arc<dyn Store>,
    asked: AtomicU32,
}

impl Library for Shelf {
    fn definitions(&self) -> Vec<(String, String)> {
        vec![("graph".to_owned(), "adding".to_owned())]
    }

    fn lease_ttl(&self) -> Duration {
        Duration::from_secs(30)
    }

    fn find(&self, definition: &DefinitionRef) -> BoxFuture<'_, Option<Arc<dyn Drive>>> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let version = definition.version;
        Box::pin(async move {
            (version < 3).then(|| Arc::new(runner(adding(version), &self.store)) as Arc<dyn Drive>)
        })
    }
}

#[tokio::test]
async fn a_library_is_asked_for_the_definition_of_each_claimed_run() {
    let store = memory();
    let shelf = Arc::new(Shelf {
        store: Arc::clone(&store),
        asked: AtomicU32::new(0),
    });
    let runs = [1, 2].map(|version| (version, runner(adding(version), &store)));
    let mut made = Vec::new();
    for (version, runner) in &runs {
        made.push((*version, runner.accept(Start::new(10)).await.unwrap().run));
    }
    let unknown = runner(adding(3), &store)
        .accept(Start::new(10))
        .await
        .unwrap()
        .run;
    let host = host(&store, &Registry::of(Arc::clone(&shelf) as Arc<dyn Library>), 2);
    for (version, run) in &made {
        assert_eq!(ends(&store, run).await, Status::Succeeded, "version {version}");
    }
    iop_tests::eventually("the unknown one was met", Duration::from_secs(10), || async {
        match shelf.asked.load(Ordering::SeqCst) {
            0..=2 => Err("not yet".to_owned()),
            _ => Ok(()),
        }
    })
    .await;
    assert_eq!(store.load(&unknown).await.unwrap().head.status, Status::Queued);
    assert!(host.stop(Duration::from_secs(5)).await);
}
