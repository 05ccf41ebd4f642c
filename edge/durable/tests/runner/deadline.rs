//! Deadlines of runs: a cancellation that nobody asks for (D15, D41, D261).

use std::sync::Arc;
use std::time::Duration;

use iop_durable::graph::{Deadline, Directive, Graph};
use iop_durable::record::{ActivityState, Effect, Reason, Status};
use iop_durable::runner::{Ctx, Resume, Start};
use iop_durable::store::Store;
use iop_durable::time::Timestamp;

use crate::support::*;

const LIMIT: Duration = Duration::from_secs(120);

fn holding(log: &Log, door: &Door) -> Arc<Graph<Trail>> {
    let (log, door) = (log.clone(), door.clone());
    shared(
        graph("holding")
            .retry("only", policy(9, Duration::from_secs(3600)))
            .node("only", move |ctx: Ctx, trail: Trail| {
                let (log, door) = (log.clone(), door.clone());
                async move {
                    log.add("entered");
                    match trail[0].as_str() {
                        "pure" => door.pass().await,
                        "gate" => {
                            ctx.gate("g").wait().await?;
                        }
                        "retry" => return Err(down().into()),
                        "suspend" => return Ok((trail, Directive::suspend("held"))),
                        "unknown" => {
                            cut_off(&ctx, "c").await?;
                        }
                        what => {
                            let effect = Effect::parse(what).unwrap();
                            let held = ctx.activity("c").effect(effect).run("", |_| door.answers("out"));
                            held.await?;
                        }
                    }
                    Ok((pushed(trail, "done"), Directive::end()))
                }
            })
            .terminal("only"),
    )
}

fn start(what: &str) -> Start<Trail> {
    let mut start = Start::new(vec![what.to_owned()]).run(run_id("r"));
    start.deadline = Some(Deadline::In(LIMIT));
    start
}

async fn over(room: &Room, result: &Result) {
    assert_eq!(
        (result.status, result.reason()),
        (Status::Cancelled, Some(Reason::Deadline))
    );
    assert_eq!(result.state.len(), 1);
    room.sound(&result.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_running_run_is_over_at_its_deadline() {
    for what in ["pure", "read_only", "idempotent"] {
        let (room, log, door) = (Room::new(), Log::new(), Door::new());
        let runner = room.runner(&holding(&log, &door));
        let began = tokio::time::Instant::now();
        let result = runner.start(start(what)).await.unwrap();
        let took = began.elapsed();
        assert!(
            took >= LIMIT && took < LIMIT + Duration::from_secs(1),
            "{what}: {took:?}"
        );
        over(&room, &result).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_unsafe_call_has_its_grace_then_too() {
    let (room, log, door) = (Room::new(), Log::new(), Door::new());
    let runner = room.runner(&holding(&log, &door));
    let running = started(&runner, start("unsafe"));
    door.reached(1).await;
    tokio::time::sleep(LIMIT + Duration::from_secs(5)).await;
    assert_eq!(room.status(&run_id("r")).await, Status::Running);
    door.open();
    let result = done(running).await.unwrap();
    over(&room, &result).await;
    assert_eq!(
        room.activity(&result.run, "c").await.state,
        ActivityState::Completed
    );
    assert_eq!(result.outcome.unwrap().evidence.len(), 1);

    let (room, log, door) = (Room::new(), Log::new(), Door::new());
    let runner = room.runner(&holding(&log, &door));
    let running = started(&runner, start("unsafe"));
    let result = done_after(running, LIMIT + Duration::from_secs(11)).await;
    assert_eq!(result.status, Status::Ambiguous);
    room.sound(&result.run).await;
    // The store's clock is by hand here: it has passed the deadline too.
    room.clock.advance(LIMIT * 2);
    assert!(room.work(&runner).await.is_none(), "no time resolves it");
    let record = room.activity(&result.run, "c").await;
    let word = resolution("d", &record, complete("out"));
    let resolved = runner
        .operator()
        .resolve(&result.token, &word, None, true)
        .await
        .unwrap();
    assert!(!resolved.status.is_terminal() || resolved.status == Status::Cancelled);
    if let Some(last) = room.work(&runner).await {
        last.unwrap();
    }
    over(&room, &runner.result(&result.run).await.unwrap()).await;
}

async fn done_after(
    task: tokio::task::JoinSet<std::result::Result<Result, iop_durable::runner::RunError>>,
    span: Duration,
) -> Result {
    let mut task = task;
    tokio::time::timeout(span + Duration::from_secs(60), task.join_next())
        .await
        .unwrap()
        .unwrap()
        .unwrap()
        .unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_parked_run_is_over_at_its_deadline() {
    for what in ["gate", "retry", "suspend"] {
        let (room, log, door) = (Room::new(), Log::new(), Door::new());
        let graph = holding(&log, &door);
        let runner = room.runner(&graph);
        let parked = runner.start(start(what)).await.unwrap();
        assert_eq!(parked.status, Status::Waiting, "{what}");
        room.clock.advance(LIMIT - Duration::from_secs(1));
        assert!(room.work(&runner).await.is_none(), "{what}");
        room.clock.advance(Duration::from_secs(2));
        let result = room.work(&room.runner(&graph)).await.unwrap().unwrap();
        over(&room, &result).await;
        assert_eq!(log.len(), 1, "{what}: nothing is entered after it");
        refused(runner.resume(&result.token, Resume::new()).await, "run_terminal");
        assert!(room.work(&runner).await.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn an_ambiguous_run_outlives_its_deadline_until_it_is_resolved() {
    for resume in [true, false] {
        let (room, log, door) = (Room::new(), Log::new(), Door::new());
        let runner = room.runner(&holding(&log, &door));
        let run = runner.start(start("unknown")).await.unwrap();
        assert_eq!(run.status, Status::Ambiguous);
        room.clock.advance(LIMIT * 2);
        assert!(room.work(&runner).await.is_none());
        assert_eq!(room.status(&run.run).await, Status::Ambiguous);
        let record = room.activity(&run.run, "c").await;
        let word = resolution("d", &record, complete("out"));
        runner
            .operator()
            .resolve(&run.token, &word, None, resume)
            .await
            .unwrap();
        let last = room.drain(&runner).await;
        assert!(last.is_none_or(|last| last.status == Status::Cancelled));
        over(&room, &runner.result(&run.run).await.unwrap()).await;
        assert_eq!(log.len(), 1, "nothing is entered after it");
    }
}

#[tokio::test(start_paused = true)]
async fn a_deadline_in_the_past_runs_nothing() {
    let (room, log, door) = (Room::new(), Log::new(), Door::new());
    let runner = room.runner(&holding(&log, &door));
    let mut begun = start("pure");
    begun.deadline = Some(Deadline::At(Timestamp::MIN));
    let result = runner.start(begun).await.unwrap();
    over(&room, &result).await;
    let mut queued = start("pure").run(run_id("q"));
    queued.deadline = Some(Deadline::In(LIMIT));
    runner.accept(queued).await.unwrap();
    room.clock.advance(LIMIT);
    let result = room.work(&runner).await.unwrap().unwrap();
    over(&room, &result).await;
    assert_eq!(log.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_deadline_at_the_end_of_time_is_kept_as_it_is() {
    let (room, log, door) = (Room::new(), Log::new(), Door::new());
    door.open();
    let runner = room.runner(&holding(&log, &door));
    for deadline in [Deadline::At(Timestamp::MAX), Deadline::In(Duration::MAX)] {
        let mut begun = start("pure").run(iop_durable::ids::RunId::random());
        begun.deadline = Some(deadline);
        let result = runner.start(begun).await.unwrap();
        assert_eq!(result.status, Status::Succeeded);
        assert_eq!(room.load(&result.run).await.head.deadline, Some(Timestamp::MAX));
    }
}

#[tokio::test(start_paused = true)]
async fn a_rebuilt_index_knows_the_deadline() {
    for what in ["gate", "retry", "suspend"] {
        let (room, log, door) = (Room::new(), Log::new(), Door::new());
        let runner = room.runner(&holding(&log, &door));
        let parked = runner.start(start(what)).await.unwrap();
        room.memory
            .tamper(&parked.run, iop_durable::testing::Tamper::DueAt(None));
        room.memory.rebuild_index().await.unwrap();
        assert!(room.work(&runner).await.is_none(), "{what}");
        room.clock.advance(LIMIT + Duration::from_secs(1));
        let result = room.work(&runner).await.unwrap().unwrap();
        over(&room, &result).await;
    }
}
