//! Attempts of a step: by the node's word and by its policy, counted before they begin, parked between (D67, D148, D248, D250).

use std::sync::Arc;
use std::time::Duration;

use iop_durable::failure::Failure;
use iop_durable::graph::{Directive, Graph};
use iop_durable::record::{Reason, Status, StepStatus, WaitingKind};
use iop_durable::runner::{Ctx, Resume, Start};
use iop_durable::store::Store;

use crate::support::*;

const MINUTE: Duration = Duration::from_secs(60);

#[tokio::test(start_paused = true)]
async fn retries_are_counted_before_each_attempt_and_exhaust_the_run() {
    let (room, seen) = (Room::new(), Log::new());
    let (log, memory) = (seen.clone(), room.memory.clone());
    let graph = shared(
        graph("retry")
            .budget("calls", 10)
            .node("again", move |ctx: Ctx, trail: Trail| {
                let (log, memory) = (log.clone(), memory.clone());
                async move {
                    ctx.use_budget("calls", 1)?;
                    let stored = memory.load(ctx.run()).await.unwrap().head.attempt;
                    log.add(format!(
                        "{} of stored {stored}, {} before",
                        ctx.attempt(),
                        trail.len()
                    ));
                    Ok((pushed(trail, "tried"), Directive::retry(3)))
                }
            })
            .terminal("again"),
    );
    let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(
        seen.all(),
        [
            "1 of stored 1, 0 before",
            "2 of stored 2, 0 before",
            "3 of stored 3, 0 before"
        ],
        "each attempt has the state the step was entered with"
    );
    assert_eq!(
        (done.status, done.reason()),
        (Status::Exhausted, Some(Reason::Budget))
    );
    let exhausted = done.outcome.as_ref().unwrap().exhausted.clone().unwrap();
    assert_eq!(
        (exhausted.budget.as_str(), exhausted.used, exhausted.limit),
        ("retry:again", 3, 3)
    );
    assert_eq!(done.state, Trail::new(), "no attempt was committed");
    assert_eq!(done.budgets["calls"].used, 0, "nor what it drew");
    let steps = room.steps(&done.run).await;
    assert_eq!(steps.len(), 1);
    assert_eq!((steps[0].status, steps[0].attempts), (StepStatus::Exhausted, 3));
    room.sound(&done.run).await;
    refused(
        room.runner(&graph).resume(&done.token, Resume::new()).await,
        "run_terminal",
    );
}

#[tokio::test(start_paused = true)]
async fn one_attempt_is_no_budget_that_runs_out() {
    let room = Room::new();
    for max in [0, 1] {
        let graph = shared(
            graph("once")
                .node("once", move |_: Ctx, trail: Trail| async move {
                    Ok((trail, Directive::retry(max)))
                })
                .terminal("once"),
        );
        let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
        assert_eq!(
            (done.status, done.reason()),
            (Status::Failed, Some(Reason::Error))
        );
        room.sound(&done.run).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_retry_route_takes_over_with_the_last_attempts_state() {
    let room = Room::new();
    let graph = shared(
        graph("fallback")
            .budget("calls", 10)
            .node("again", |ctx: Ctx, trail: Trail| async move {
                ctx.use_budget("calls", 1)?;
                Ok((
                    pushed(trail, format!("attempt {}", ctx.attempt())),
                    Directive::retry(2),
                ))
            })
            .node("other", |ctx: Ctx, trail: Trail| async move {
                assert_eq!((ctx.activation(), ctx.attempt()), (2, 1));
                Ok((pushed(trail, "other"), Directive::end()))
            })
            .terminal("again")
            .terminal("other")
            .retry_route("again", "other"),
    );
    let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(done.status, Status::Succeeded);
    assert_eq!(done.state, ["attempt 2", "other"]);
    assert_eq!(done.budgets["calls"].used, 1, "what the committed attempt drew");
    let steps = room.steps(&done.run).await;
    let told: Vec<_> = steps
        .iter()
        .map(|s| (s.node.as_str(), s.status, s.attempts))
        .collect();
    assert_eq!(
        told,
        [
            ("again", StepStatus::Exhausted, 2),
            ("other", StepStatus::Done, 1)
        ]
    );
    room.sound(&done.run).await;
}

fn failing(error: Failure, attempts: u32, log: &Log) -> Arc<Graph<Trail>> {
    let log = log.clone();
    shared(
        graph("failing")
            .retry("fails", policy(attempts, MINUTE))
            .node("fails", move |ctx: Ctx, trail: Trail| {
                log.add(format!("attempt {}", ctx.attempt()));
                let error = error.clone();
                async move {
                    let _ = &trail;
                    Err(error.into())
                }
            })
            .node("saved", |_: Ctx, trail: Trail| async move {
                Ok((pushed(trail, "saved"), Directive::end()))
            })
            .terminal("fails")
            .terminal("saved")
            .resume_target("saved"),
    )
}

#[tokio::test(start_paused = true)]
async fn a_step_retry_parks_until_its_time_and_no_earlier() {
    let (room, log) = (Room::new(), Log::new());
    let graph = failing(down(), 3, &log);
    let mut last = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    for attempt in 2..=3 {
        assert_eq!(last.status, Status::Waiting);
        assert_eq!(waits_for(&last), [(WaitingKind::Retry, String::new())]);
        let loaded = room.load(&last.run).await;
        assert_eq!(
            (loaded.head.attempt, loaded.lease),
            (attempt, None),
            "counted and let go"
        );
        room.sound(&last.run).await;
        // Early: by the timer, by hand, after a restart.
        room.clock.advance(MINUTE - Duration::from_secs(1));
        let fresh = room.runner(&graph);
        assert!(room.work(&fresh).await.is_none());
        refused(fresh.resume(&last.token, Resume::new()).await, "run_waiting");
        assert_eq!(log.len() as u32, attempt - 1);
        room.clock
            .advance(Duration::from_secs(1) + Duration::from_millis(100));
        last = room.work(&fresh).await.unwrap().unwrap();
        assert_eq!(log.len() as u32, attempt);
    }
    assert_eq!(last.status, Status::Exhausted);
    let outcome = last.outcome.as_ref().unwrap();
    let exhausted = outcome.exhausted.as_ref().unwrap();
    assert_eq!(
        (exhausted.budget.as_str(), exhausted.used, exhausted.limit),
        ("retry:fails", 3, 3)
    );
    assert_eq!(
        outcome.error.as_ref().unwrap().failure,
        down(),
        "the last word is kept"
    );
    room.sound(&last.run).await;
    assert_eq!(
        room.names(&last.run)
            .await
            .iter()
            .filter(|n| *n == "run.step.started")
            .count(),
        3,
        "each attempt is told"
    );
}

#[tokio::test(start_paused = true)]
async fn what_is_not_retryable_or_has_one_attempt_fails() {
    let (room, log) = (Room::new(), Log::new());
    let once = room
        .runner(&failing(down(), 1, &log))
        .start(Start::new(Trail::new()))
        .await
        .unwrap();
    assert_eq!(
        (once.status, once.reason()),
        (Status::Failed, Some(Reason::Error))
    );
    assert!(once.outcome.as_ref().unwrap().exhausted.is_none());
    let hard = room
        .runner(&failing(broken(), 5, &log))
        .start(Start::new(Trail::new()))
        .await
        .unwrap();
    assert_eq!(
        (hard.status, code(&hard).as_str()),
        (Status::Failed, "tool_error")
    );
    assert_eq!(log.all(), ["attempt 1", "attempt 1"]);
    room.sound(&once.run).await;
    room.sound(&hard.run).await;
}

#[tokio::test(start_paused = true)]
async fn an_exhausted_step_policy_takes_the_retry_route() {
    let (room, log) = (Room::new(), Log::new());
    let seen = log.clone();
    let graph = shared(
        graph("rerouted")
            .retry("fails", policy(2, MINUTE))
            .retry_route("fails", "saved")
            .node("fails", move |_: Ctx, _: Trail| {
                seen.add("tried");
                async { Err(down().into()) }
            })
            .node("saved", |_: Ctx, trail: Trail| async move {
                Ok((pushed(trail, "saved"), Directive::end()))
            })
            .terminal("fails")
            .terminal("saved"),
    );
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(vec!["start".to_owned()])).await.unwrap();
    room.clock.advance(MINUTE * 2);
    let done = room.drain(&runner).await.unwrap();
    assert_eq!((done.status, log.len()), (Status::Succeeded, 2));
    assert_eq!(done.state, ["start", "saved"], "a failed attempt leaves no state");
    let steps = room.steps(&parked.run).await;
    assert_eq!(steps[0].status, StepStatus::Exhausted);
    assert_eq!(steps[0].error, Some(down()));
    room.sound(&parked.run).await;
}
