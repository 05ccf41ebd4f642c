//! Requests to cancel against everything else that may come first, and against a store that is away.

use std::sync::Arc;
use std::time::Duration;

use iop_durable::graph::{Directive, Graph};
use iop_durable::machine::wait::Verdict;
use iop_durable::record::{ActivityState, Effect, Status};
use iop_durable::runner::{CancelOutcome, Ctx, Resume, Start};

use crate::stage::Stage;
use crate::support::*;

#[tokio::test(start_paused = true)]
async fn cancel_and_success_race_for_one_end() {
    for round in 0..400 {
        let stage = Stage::new();
        let (runner, start) = (stage.runner.clone(), stage.start("idempotent"));
        stage.door.open();
        let running = background(async move { runner.start(start).await });
        let (operator, run) = (stage.runner.operator(), stage.run.clone());
        let asking = background(async move {
            for _ in 0..round % 40 {
                tokio::task::yield_now().await;
            }
            loop {
                match operator.cancel(&run, &decision("c"), "enough", Some("ann")).await {
                    Ok(cancelled) => return cancelled.outcome,
                    Err(error) => assert_eq!(error.code(), "run_not_found"),
                }
                tokio::task::yield_now().await;
            }
        });
        let result = done(running).await.unwrap();
        match done(asking).await {
            CancelOutcome::Over(Status::Succeeded) => assert_eq!(result.status, Status::Succeeded),
            CancelOutcome::Requested
            | CancelOutcome::Done(Status::Cancelled)
            | CancelOutcome::Over(Status::Cancelled) => {
                assert_eq!(
                    result.status,
                    Status::Cancelled,
                    "round {round}: what was accepted counts"
                );
            }
            other @ (CancelOutcome::Done(_) | CancelOutcome::Over(_)) => panic!("{other:?}"),
        }
        stage.room.sound(&stage.run).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_accepted_before_the_end_wins_whatever_the_end_is() {
    type Node = fn(Trail) -> Answer;
    let table: [(&str, Node); 4] = [
        ("success", |trail| Ok((trail, Directive::end()))),
        ("failure", |_| Err(broken().into())),
        ("fail", |trail| Ok((trail, Directive::fail(down())))),
        ("suspension", |trail| Ok((trail, Directive::suspend("held")))),
    ];
    for (what, end) in table {
        let (room, log) = (Room::new(), Log::new());
        let calls = log.clone();
        let graph = one("ends", move |ctx: Ctx, trail: Trail| {
            let calls = calls.clone();
            async move {
                call(&ctx, "c", Effect::Unsafe, &calls).await?;
                end(trail)
            }
        });
        let runner = room.runner(&graph);
        let aside = room.aside();
        // The intent is the first commit, the end the second.
        room.spy.before(Op::Commit, 1, || async move {
            let asked = aside
                .cancel(&run_id("r"), &decision("c"), "enough", None)
                .await
                .unwrap();
            assert_eq!(asked.outcome, CancelOutcome::Requested);
            Ok(())
        });
        let result = within(runner.start(Start::new(Trail::new()).run(run_id("r"))))
            .await
            .unwrap();
        assert!(room.spy.met());
        assert_eq!(result.status, Status::Cancelled, "{what}");
        assert_eq!(log.len(), 1, "{what}");
        // What the call answered is not lost with the end that was not.
        let record = room.activity(&run_id("r"), "c").await;
        assert_eq!(
            (record.state, record.attempts.len()),
            (ActivityState::Completed, 1),
            "{what}"
        );
        assert_eq!(result.outcome.unwrap().evidence.len(), 1);
        room.sound(&run_id("r")).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_word_that_changes_nothing_loses_nothing_either() {
    type Node = fn(Trail) -> Answer;
    let table: [(&str, Node, Status); 3] = [
        (
            "success",
            |trail| Ok((trail, Directive::end())),
            Status::Succeeded,
        ),
        ("failure", |_| Err(broken().into()), Status::Failed),
        (
            "suspension",
            |trail| Ok((trail, Directive::suspend("held"))),
            Status::Waiting,
        ),
    ];
    for (what, end, status) in table {
        let (room, log) = (Room::new(), Log::new());
        let calls = log.clone();
        let graph = shared(
            graph("ends")
                .node("gated", |ctx: Ctx, trail: Trail| async move {
                    ctx.gate("g").wait().await?;
                    Ok((trail, Directive::completed()))
                })
                .node("only", move |ctx: Ctx, trail: Trail| {
                    let calls = calls.clone();
                    async move {
                        call(&ctx, "c", Effect::Unsafe, &calls).await?;
                        end(trail)
                    }
                })
                .edge("gated", "only")
                .terminal("only"),
        );
        let runner = room.runner(&graph);
        let parked = runner.start(Start::new(Trail::new())).await.unwrap();
        let wait = room.wait(&parked.run, "g").await;
        deliver(&runner, &wait, "d", "yes").await.unwrap();
        let aside = room.aside();
        // Entry, the gated step, the intent; then the end meets a delivery that lost.
        room.spy.before(Op::Commit, 3, || async move {
            let lost = deliver_to_gate(&aside, &wait, "late", "yes").await.unwrap();
            assert_eq!(lost.verdict, Verdict::Superseded);
            Ok(())
        });
        let result = within(room.work(&runner)).await.unwrap().unwrap();
        assert!(room.spy.met());
        assert_eq!((result.status, log.len()), (status, 1), "{what}");
        let record = room.activity(&parked.run, "c").await;
        assert_eq!(record.state, ActivityState::Completed, "{what}");
        room.sound(&parked.run).await;
        if status == Status::Waiting {
            // The next entry finds a journal that is whole.
            let again = runner.resume(&result.token, Resume::new()).await.unwrap();
            assert_eq!(again.status, Status::Waiting);
            room.sound(&parked.run).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_run_of_quick_steps_hears_a_request_between_two_of_them() {
    let (room, ran) = (Room::new(), Log::new());
    let seen = ran.clone();
    let graph: Arc<Graph<Trail>> = shared(
        graph("quick")
            .node("spin", move |_: Ctx, trail: Trail| {
                seen.add("step");
                async move { Ok((trail, Directive::completed())) }
            })
            .edge("spin", "spin"),
    );
    let runner = room.runner(&graph);
    let aside = room.aside();
    room.spy.before(Op::Commit, 10, || async move {
        aside
            .cancel(&run_id("r"), &decision("c"), "enough", None)
            .await
            .unwrap();
        Ok(())
    });
    let result = within(runner.start(Start::new(Trail::new()).run(run_id("r"))))
        .await
        .unwrap();
    assert_eq!(result.status, Status::Cancelled);
    assert!(ran.len() < 20, "{} steps", ran.len());
    room.sound(&run_id("r")).await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_cannot_be_read_for_a_moment_cuts_nothing_off() {
    let stage = Stage::new();
    let running = stage.running("unsafe");
    stage.door.reached(1).await;
    let away = iop_durable::store::StoreError::unavailable("away");
    // The request is stored; reading it fails at first.
    for _ in 0..3 {
        stage.room.spy.answer(Op::Load, 0, away.clone());
    }
    let asked = stage
        .room
        .aside()
        .cancel(&stage.run, &decision("c"), "enough", Some("ann"))
        .await
        .unwrap();
    assert_eq!(asked.outcome, CancelOutcome::Requested);
    eventually(|| async { stage.room.spy.met() }).await;
    stage.door.open();
    let result = done(running).await.unwrap();
    stage.cancelled(&result).await;
    assert_eq!(
        stage.room.activity(&stage.run, "c").await.state,
        ActivityState::Completed
    );
}

#[tokio::test(start_paused = true)]
async fn what_has_not_left_when_the_request_comes_stays() {
    let stage = Stage::new();
    let (runner, start) = (stage.runner.clone(), stage.start("unsafe"));
    let aside = stage.room.aside();
    // The request comes while the intent is being committed.
    stage.room.spy.before(Op::Commit, 0, || async move {
        aside
            .cancel(&run_id("r"), &decision("c"), "enough", Some("ann"))
            .await
            .unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
        Ok(())
    });
    let result = within(runner.start(start)).await.unwrap();
    stage.cancelled(&result).await;
    if stage.log.len() == 0 {
        let record = stage.room.activity(&stage.run, "c").await;
        assert_eq!(record.state, ActivityState::Failed);
    } else {
        panic!("it was dispatched after the request was heard");
    }
}
