//! Runs that a run started are asked to end before it has ended by a cancellation or its deadline, whoever ends it and whoever dies
//! on the way (S82).

use std::sync::Arc;
use std::time::Duration;

use iop_durable::graph::{Deadline, Directive, Graph};
use iop_durable::ids::RunId;
use iop_durable::record::{Effect, Lineage, Reason, Scope, Status, WaitingKind};
use iop_durable::runner::{CallError, CancelOutcome, Ctx, Runner, Start};
use iop_durable::store::{Store, StoreError};

use crate::support::*;

/// Waits, or calls something whose effect nobody knows of.
fn family() -> Arc<Graph<Trail>> {
    one("family", |ctx: Ctx, trail: Trail| async move {
        match trail[0].as_str() {
            "waits" => {
                ctx.gate("g").kind(WaitingKind::Children).wait().await?;
            }
            "unknown" => {
                ctx.activity("c")
                    .run("in", |_| async { Err(CallError::Unknown) })
                    .await?;
            }
            other => panic!("{other}"),
        }
        Ok((trail, Directive::end()))
    })
}

fn start(id: &str, what: &str, parent: Option<&str>) -> Start<Trail> {
    let mut start = Start::new(vec![what.to_owned()]).run(run_id(id));
    start.parent = parent.map(|parent| Lineage {
        parent: Some(run_id(parent)),
        root: run_id("root"),
        origin: None,
    });
    start
}

async fn cancel(runner: &Trails, id: &str) -> CancelOutcome {
    let operator = runner.operator();
    let cancelled = operator
        .cancel(&run_id(id), &decision("c"), "enough", Some("ann"))
        .await;
    cancelled.unwrap().outcome
}

async fn statuses(room: &Room, runs: &[&str]) -> Vec<Status> {
    let mut all = Vec::new();
    for run in runs {
        all.push(room.status(&run_id(run)).await);
    }
    all
}

/// `root` waits for `a` and `b`, `a` for `a1`; `done` is over, `apart` is nobody's.
async fn planted(room: &Room) -> Trails {
    let runner = room.runner(&family());
    for (id, what, parent) in [
        ("root", "waits", None),
        ("a", "waits", Some("root")),
        ("b", "unknown", Some("root")),
        ("a1", "waits", Some("a")),
        ("apart", "waits", None),
        ("done", "waits", Some("root")),
    ] {
        runner.start(start(id, what, parent)).await.unwrap();
    }
    cancel(&runner, "done").await;
    runner
}

const ALL: [&str; 6] = ["root", "a", "a1", "b", "done", "apart"];
const AFTER: [Status; 6] = [
    Status::Cancelled,
    Status::Cancelled,
    Status::Cancelled,
    // Asking resolves no effect.
    Status::Ambiguous,
    Status::Cancelled,
    Status::Waiting,
];

#[tokio::test(start_paused = true)]
async fn a_cancelled_run_takes_its_children_along() {
    let room = Room::new();
    let runner = planted(&room).await;
    assert_eq!(
        cancel(&runner, "root").await,
        CancelOutcome::Done(Status::Cancelled)
    );
    assert_eq!(statuses(&room, &ALL).await, AFTER);
    for run in ["a", "a1"] {
        let outcome = runner.result(&run_id(run)).await.unwrap().outcome.unwrap();
        let cancel = outcome.cancel.unwrap();
        assert_eq!(outcome.reason, Reason::Cancelled);
        assert_eq!(
            (cancel.by.as_deref(), cancel.reason.as_str()),
            (Some("ann"), "The run that started it was cancelled.")
        );
    }
    // What is not known stays, and ends as soon as it is known.
    let record = room.activity(&run_id("b"), "c").await;
    let word = resolution("d", &record, complete("out"));
    let token = room.token(&run_id("b")).await;
    runner
        .operator()
        .resolve(&token, &word, None, true)
        .await
        .unwrap();
    assert_eq!(room.status(&run_id("b")).await, Status::Cancelled);
    let asked = room.decisions(&run_id("a1"), &Scope::Cancel).await;
    assert_eq!(asked.len(), 1, "asked once");
    for run in ALL {
        room.sound(&run_id(run)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_deadline_takes_the_children_along() {
    let room = Room::new();
    let runner = room.runner(&family());
    let mut root = start("root", "waits", None);
    root.deadline = Some(Deadline::In(Duration::from_secs(5)));
    runner.start(root).await.unwrap();
    runner.start(start("a", "waits", Some("root"))).await.unwrap();
    assert!(room.work(&runner).await.is_none());
    room.clock.advance(Duration::from_secs(6));
    room.drain(&runner).await;
    assert_eq!(statuses(&room, &["root", "a"]).await, [Status::Cancelled; 2]);
    let outcome = runner.result(&run_id("root")).await.unwrap().outcome.unwrap();
    assert_eq!(outcome.reason, Reason::Deadline);
}

/// The k-th operation of a cancellation fails, for every k: what was promised is done by whoever comes next, and no run has ended
/// whose children were not asked.
#[tokio::test(start_paused = true)]
async fn no_failure_on_the_way_leaves_a_child_behind() {
    for op in [
        Op::Load,
        Op::Decision,
        Op::Post,
        Op::List,
        Op::Acquire,
        Op::Journal,
        Op::Commit,
    ] {
        for k in 0.. {
            let room = Room::new();
            let runner = planted(&room).await;
            room.spy.answer(op, k, StoreError::unavailable("away"));
            let operator = runner.operator();
            let asked = operator
                .cancel(&run_id("root"), &decision("c"), "enough", None)
                .await;
            let met = room.spy.met();
            if room.status(&run_id("root")).await == Status::Cancelled {
                for run in ["a", "a1", "b"] {
                    let cancel = room.inbox(&run_id(run)).await.cancel;
                    assert!(cancel.is_some(), "{op} {k}: {run} was not asked");
                }
            }
            // Another host does what is left.
            let store: Arc<dyn Store> = room.memory.clone();
            let other = Runner::new(family(), store, Room::options()).unwrap();
            if asked.is_err() {
                // Nothing was promised.
                cancel(&other, "root").await;
            }
            room.clock.advance(TTL);
            room.drain(&other).await;
            assert_eq!(statuses(&room, &ALL).await, AFTER, "{op} {k}");
            if !met {
                assert!(k > 0, "{op} is never asked for");
                break;
            }
        }
    }
}

/// A child may come into being while its parent is being cancelled: its start was on the way.
#[tokio::test(start_paused = true)]
async fn a_child_that_comes_late_does_not_begin() {
    let room = Room::new();
    let log = Log::new();
    let seen = log.clone();
    let graph = one("family", move |ctx: Ctx, trail: Trail| {
        let log = seen.clone();
        async move {
            call(&ctx, &trail[0], Effect::Unsafe, &log).await?;
            ctx.gate("g").wait().await?;
            Ok((trail, Directive::end()))
        }
    });
    let runner = room.runner(&graph);
    for id in ["root", "other"] {
        let mut parent = start(id, id, None);
        parent.deadline = (id == "other").then_some(Deadline::In(Duration::from_secs(5)));
        runner.start(parent).await.unwrap();
    }
    cancel(&runner, "root").await;
    room.clock.advance(Duration::from_secs(6));
    for (id, parent) in [("late", "root"), ("later", "other"), ("orphan", "nobody")] {
        runner.accept(start(id, id, Some(parent))).await.unwrap();
    }
    room.drain(&runner).await;
    assert_eq!(
        statuses(&room, &["late", "later", "orphan"]).await,
        [Status::Cancelled, Status::Cancelled, Status::Waiting]
    );
    assert_eq!(log.all(), ["root", "other", "orphan"]);
    let id: RunId = run_id("late");
    assert_eq!(room.memory.steps(&id, 0, 10).await.unwrap().len(), 1);
    room.sound(&id).await;
}
