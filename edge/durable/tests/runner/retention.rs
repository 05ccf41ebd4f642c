//! Retention: old checkpoints go, successes may, failures stay; cleaning up changes no result (D134, D226, D228; S94).

use std::sync::Arc;
use std::time::Duration;

use iop_durable::graph::{Directive, Graph};
use iop_durable::record::Status;
use iop_durable::runner::{Ctx, Resume, Runner, Start};
use iop_durable::store::{Store, StoreError};

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn retention_keeps_the_newest_and_deletes_successes_only() {
    let room = Room::new();
    let build = |fails: bool| -> Arc<Graph<Trail>> {
        let mut builder = graph("kept").keep_checkpoints(3);
        if !fails {
            builder = builder.delete_on_success();
        }
        shared(
            builder
                .node("loop", move |_: Ctx, trail: Trail| async move {
                    let directive = match (trail.len(), fails) {
                        (9, true) => Directive::fail(broken()),
                        (9, false) => Directive::end(),
                        (4, _) => Directive::suspend("held"),
                        (_, _) => Directive::completed(),
                    };
                    Ok((pushed(trail, "x"), directive))
                })
                .edge("loop", "loop"),
        )
    };
    for fails in [true, false] {
        let runner = room.runner(&build(fails));
        let parked = runner.start(Start::new(Trail::new())).await.unwrap();
        let kept = room.memory.history(&parked.run, None, 100).await.unwrap();
        assert_eq!(kept.iter().filter(|c| !c.pruned).count(), 3);
        assert_eq!(kept.len() as u64, parked.token.revision.get());
        let gone = room
            .memory
            .checkpoint(&parked.run, iop_durable::ids::Revision::FIRST)
            .await;
        assert!(
            matches!(gone, Err(StoreError::CheckpointUnavailable)),
            "never the latest instead"
        );
        let done = runner.resume(&parked.token, Resume::new()).await.unwrap();
        assert_eq!(done.state.len(), 10);
        if fails {
            assert_eq!(done.status, Status::Failed);
            room.sound(&done.run).await;
        } else {
            assert_eq!(done.status, Status::Succeeded);
            refused(runner.result(&done.run).await, "run_deleted");
            refused(runner.resume(&done.token, Resume::new()).await, "run_deleted");
            refused(
                runner.start(Start::new(Trail::new()).run(done.run.clone())).await,
                "run_deleted",
            );
            let late = runner
                .operator()
                .cancel(&done.run, &decision("c"), "x", None)
                .await;
            refused(late, "run_deleted");
        }
    }
    // Cleaning up may fail without changing what is told.
    let runner = room.runner(&build(false));
    let away = || StoreError::unavailable("away");
    room.spy.answer(Op::Prune, 0, away());
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(parked.status, Status::Waiting);
    room.spy.answer(Op::Delete, 0, away());
    let done = runner.resume(&parked.token, Resume::new()).await.unwrap();
    assert_eq!(done.status, Status::Succeeded);
    assert!(room.spy.met());
    assert_eq!(runner.result(&done.run).await.unwrap().status, Status::Succeeded);
}

/// Who follows a run elsewhere has some time to read its end.
#[tokio::test(start_paused = true)]
async fn a_success_that_is_deleted_may_linger() {
    let room = Room::new();
    let graph: Arc<Graph<Trail>> = shared(graph("kept").delete_on_success().node("do", ends).terminal("do"));
    let mut options = Room::options();
    options.linger = Duration::from_secs(4);
    let runner = room.runner_with(&graph, options.clone());
    let done = runner.start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(done.status, Status::Succeeded);
    tokio::time::sleep(Duration::from_millis(3_999)).await;
    assert_eq!(room.names(&done.run).await.last().unwrap(), "run.succeeded");
    tokio::time::sleep(Duration::from_millis(2)).await;
    refused(runner.result(&done.run).await, "run_deleted");

    options.linger = Duration::MAX;
    let store: Arc<dyn Store> = room.memory.clone();
    let refused = Runner::new(graph, store, options).err().unwrap();
    assert!(refused.to_string().starts_with("linger:"), "{refused}");
}

#[tokio::test(start_paused = true)]
async fn old_checkpoints_go_while_the_run_works_and_an_error_of_that_is_told() {
    let (room, log) = (Room::new(), Log::new());
    let seen = log.clone();
    let graph: Arc<Graph<Trail>> = shared(
        graph("long")
            .keep_checkpoints(2)
            .node("loop", move |_: Ctx, trail: Trail| {
                seen.add("step");
                async move {
                    let directive = match trail.len() {
                        19 => Directive::end(),
                        _ => Directive::completed(),
                    };
                    Ok((pushed(trail, "x"), directive))
                }
            })
            .edge("loop", "loop"),
    );
    let runner = room.runner(&graph);
    // Not the first time: something is pruned, and the next time fails.
    room.spy.answer(Op::Prune, 1, away_from_store());
    refused(
        runner.start(Start::new(Trail::new()).run(run_id("r"))).await,
        "store_unavailable",
    );
    let loaded = room.load(&run_id("r")).await;
    assert_eq!((loaded.head.status, loaded.lease), (Status::Running, None));
    let kept = room.memory.history(&run_id("r"), None, 100).await.unwrap();
    assert!(kept.iter().any(|c| c.pruned) && log.len() < 20);
    let done = room.work(&runner).await.unwrap().unwrap();
    assert_eq!((done.status, log.len()), (Status::Succeeded, 20), "no step twice");
    let kept = room.memory.history(&run_id("r"), None, 100).await.unwrap();
    assert_eq!(kept.iter().filter(|c| !c.pruned).count(), 2);
    room.sound(&run_id("r")).await;
}

fn away_from_store() -> StoreError {
    StoreError::unavailable("away")
}
