//! Waits that end otherwise: cancelled, left, never armed, asked too early, answered without an acknowledgement (D168, D173, D174).

use iop_durable::graph::{Deadline, Directive};
use iop_durable::machine::wait::Verdict;
use iop_durable::payload::Payload;
use iop_durable::record::{DeadlinePolicy, Reason, Scope, Status, StepStatus, WaitStatus, WaitingKind};
use iop_durable::runner::{Ctx, Resume, ResumePlan, Start};
use iop_durable::store::Store;

use crate::support::*;
use crate::waits::{Asked, HOUR, labels, plain, spec};

/// A node that waits for an event.
async fn asks(_: Ctx, trail: Trail) -> Answer {
    let wait = spec(WaitingKind::Event, DeadlinePolicy::Hard);
    Ok((trail, Directive::wait(wait)))
}

#[tokio::test(start_paused = true)]
async fn a_wait_is_cancelled_with_its_run() {
    let (room, log, asked) = (Room::new(), Log::new(), Asked::default());
    let runner = room.runner(&plain(&asked, &log));
    let operator = runner.operator();
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let (run, wait) = (&parked.run, room.wait(&parked.run, "w").await);
    let cancel = decision("c");
    let stale = iop_durable::token::ResumeToken {
        run: run.clone(),
        revision: iop_durable::ids::Revision::FIRST,
    };
    refused(
        operator
            .cancel_wait(&stale, &wait.id, &cancel, "why", "proof", None)
            .await,
        "stale_token",
    );
    let other = wait_id(run, "ask", 1, "other");
    refused(
        operator
            .cancel_wait(&parked.token, &other, &cancel, "why", "proof", None)
            .await,
        "wait_not_found",
    );
    let cancelled = operator
        .cancel_wait(&parked.token, &wait.id, &cancel, "why", "proof", Some("ann"))
        .await
        .unwrap();
    assert_eq!((cancelled.status, cancelled.replayed), (Status::Cancelled, false));
    assert_eq!(cancelled.token, room.token(run).await);
    let result = runner.result(run).await.unwrap();
    assert_eq!(
        (result.reason(), &result.state),
        (Some(Reason::WaitCancelled), &parked.state)
    );
    let by = result.outcome.unwrap().cancel.unwrap();
    assert_eq!((by.by.as_deref(), by.reason.as_str()), (Some("ann"), "why"));
    assert_eq!(room.wait(run, "w").await.status, WaitStatus::Cancelled);
    assert_eq!(
        room.steps(run).await.len(),
        1,
        "the step that asked was over before"
    );
    room.sound(run).await;
    let again = operator
        .cancel_wait(&parked.token, &wait.id, &cancel, "why", "proof", Some("bob"))
        .await
        .unwrap();
    assert_eq!((again.replayed, again.status), (true, Status::Cancelled));
    refused(
        operator
            .cancel_wait(&parked.token, &wait.id, &cancel, "other", "proof", None)
            .await,
        "delivery_conflict",
    );
    refused(
        operator
            .cancel_wait(&cancelled.token, &wait.id, &decision("c2"), "why", "proof", None)
            .await,
        "delivery_conflict",
    );
    // Events that come late are recorded, once, and revive nothing.
    for replayed in [false, true] {
        let late = deliver(&runner, &wait, "d", "yes").await.unwrap();
        assert_eq!((late.verdict, late.replayed), (Verdict::Canceled, replayed));
    }
    // Deliveries and cancellations share their ids.
    refused(deliver(&runner, &wait, "c", "yes").await, "delivery_conflict");
    assert!(room.work(&runner).await.is_none());
    refused(
        runner.resume(&cancelled.token, Resume::new()).await,
        "run_terminal",
    );
    assert_eq!((log.all(), asked.counts()), (vec!["ask".to_owned()], (0, 0)));
    room.sound(run).await;
}

#[tokio::test(start_paused = true)]
async fn a_winner_is_never_overwritten_by_a_cancellation() {
    let (room, log, asked) = (Room::new(), Log::new(), Asked::default());
    let runner = room.runner(&plain(&asked, &log));
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let wait = room.wait(&parked.run, "w").await;
    let won = deliver(&runner, &wait, "d", "yes").await.unwrap();
    refused(
        runner
            .operator()
            .cancel_wait(&won.token, &wait.id, &decision("c"), "why", "proof", None)
            .await,
        "delivery_conflict",
    );
    // A gate's delivery moves no revision: it may come between reading and holding.
    let gated = one("gated", |ctx: Ctx, trail: Trail| async move {
        ctx.gate("g").wait().await?;
        Ok((pushed(trail, "answered"), Directive::end()))
    });
    let runner = room.runner(&gated);
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let wait = room.wait(&parked.run, "g").await;
    let (aside, gate) = (room.aside(), wait.clone());
    room.spy.before(Op::Acquire, 0, || async move {
        let told = deliver_to_gate(&aside, &gate, "d", "yes").await.unwrap();
        assert_eq!(told.verdict, Verdict::Accepted);
        Ok(())
    });
    let late = runner.operator();
    let late = late
        .cancel_wait(&parked.token, &wait.id, &decision("c"), "why", "proof", None)
        .await;
    refused(late, "delivery_conflict");
    assert_eq!(room.wait(&parked.run, "g").await.status, WaitStatus::Delivered);
    let done = room.drain(&runner).await.unwrap();
    assert_eq!(
        (done.status, done.state),
        (Status::Succeeded, vec!["answered".to_owned()])
    );
    room.sound(&parked.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_gate_can_be_cancelled_and_its_run_with_it() {
    let room = Room::new();
    let graph = one("gate", gated);
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let wait = room.wait(&parked.run, "g").await;
    let operator = runner.operator();
    let cancelled = operator
        .cancel_wait(&parked.token, &wait.id, &decision("c"), "why", "proof", None)
        .await
        .unwrap();
    assert_eq!(cancelled.status, Status::Cancelled);
    let steps = room.steps(&parked.run).await;
    assert_eq!(
        (steps.len(), steps[0].status),
        (1, StepStatus::Cancelled),
        "the step that waited is cancelled"
    );
    let late = deliver(&runner, &wait, "d", "yes").await.unwrap();
    assert_eq!(late.verdict, Verdict::Canceled);
    room.sound(&parked.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_cannot_be_armed_fails_the_run_and_loses_nothing() {
    let table = [
        (WaitingKind::Retry, Some(HOUR), "configuration"),
        (WaitingKind::Timer, None, "configuration"),
    ];
    for (kind, deadline, expected) in table {
        let (room, log) = (Room::new(), Log::new());
        let calls = log.clone();
        let graph = shared(
            graph("bad wait")
                .node("ask", move |ctx: Ctx, trail: Trail| {
                    let calls = calls.clone();
                    async move {
                        call(&ctx, "c", iop_durable::record::Effect::Unsafe, &calls).await?;
                        let mut wait = spec(kind, DeadlinePolicy::Hard);
                        wait.deadline = deadline.map(Deadline::In);
                        Ok((trail, Directive::wait(wait)))
                    }
                })
                .node("on", ends)
                .terminal("on")
                .wait_route(
                    "ask",
                    labels("any"),
                    "on",
                    "on",
                    |_, _| true,
                    |trail, _| Ok(trail),
                ),
        );
        let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
        assert_eq!((done.status, code(&done).as_str()), (Status::Failed, expected));
        assert_eq!(room.activity(&done.run, "c").await.state.as_str(), "completed");
        room.sound(&done.run).await;
    }
    // A node without a route for it.
    let room = Room::new();
    let graph = shared(graph("no route").node("ask", asks).terminal("ask"));
    let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(
        (done.status, code(&done).as_str()),
        (Status::Failed, "wait_route_missing")
    );
}

#[tokio::test(start_paused = true)]
async fn a_callback_that_panics_records_nothing() {
    for what in ["matcher", "transition"] {
        let room = Room::new();
        let graph = shared(
            graph("panics")
                .node("ask", asks)
                .node("on", ends)
                .terminal("on")
                .wait_route(
                    "ask",
                    labels("any"),
                    "on",
                    "on",
                    move |_, payload| {
                        assert!(what != "matcher" || payload.bytes() != "bad", "no answer");
                        true
                    },
                    move |trail, payload| {
                        assert!(payload.bytes() != "bad", "no answer");
                        Ok(trail)
                    },
                ),
        );
        let runner = room.runner(&graph);
        let parked = runner.start(Start::new(Trail::new())).await.unwrap();
        let wait = room.wait(&parked.run, "w").await;
        let bad = delivery("d", &wait, "bad");
        refused(
            runner.deliver(&parked.run, &wait.id, &bad).await,
            "invalid_request",
        );
        assert_eq!(room.wait(&parked.run, "w").await, wait, "{what}");
        let ledger = room.decisions(&parked.run, &Scope::Wait(wait.id.clone())).await;
        assert_eq!(ledger, [], "{what}: the id is free");
        let good = delivery("d", &wait, "good");
        let told = runner.deliver(&parked.run, &wait.id, &good).await.unwrap();
        assert_eq!(told.verdict, Verdict::Accepted, "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_move_withdraws_the_wait_it_leaves() {
    let (room, log, asked) = (Room::new(), Log::new(), Asked::default());
    let runner = room.runner(&plain(&asked, &log));
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let wait = room.wait(&parked.run, "w").await;
    let moves = Resume::new().target(|_, _| ResumePlan::To("timeout".to_owned()));
    let done = runner.resume(&parked.token, moves).await.unwrap();
    assert_eq!(
        (done.status, done.state),
        (Status::Succeeded, vec!["asked".to_owned(), "timeout".to_owned()])
    );
    assert_eq!(room.wait(&parked.run, "w").await.status, WaitStatus::Cancelled);
    let late = deliver(&runner, &wait, "d", "yes").await.unwrap();
    assert_eq!(late.verdict, Verdict::Canceled);
    room.sound(&parked.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_delivery_before_its_wait_is_told_to_come_again() {
    let (room, log, asked) = (Room::new(), Log::new(), Asked::default());
    let runner = room.runner(&plain(&asked, &log));
    let run = run_id("r");
    runner
        .accept(Start::new(Trail::new()).run(run.clone()))
        .await
        .unwrap();
    let id = wait_id(&run, "ask", 1, "w");
    let early = iop_durable::machine::wait::Delivery {
        id: decision("d"),
        correlation: correlation("order 7"),
        generation: None,
        labels: None,
        payload: Payload::new("yes"),
        by: None,
        revision: iop_durable::ids::Revision::FIRST,
    };
    assert_eq!(room.memory.armed(&correlation("order 7"), 10).await.unwrap(), []);
    let error = runner.deliver(&run, &id, &early).await.unwrap_err();
    assert_eq!(error.code(), "wait_not_found");
    room.work(&runner).await.unwrap().unwrap();
    let armed = room.memory.armed(&correlation("order 7"), 10).await.unwrap();
    assert_eq!(armed.len(), 1);
    assert_eq!(armed[0].id, id);
    assert_eq!(
        runner.deliver(&run, &id, &early).await.unwrap().verdict,
        Verdict::Accepted
    );
    assert_eq!(room.drain(&runner).await.unwrap().status, Status::Succeeded);
}

#[tokio::test(start_paused = true)]
async fn a_lost_answer_of_a_delivery_is_found_again() {
    for error in ["unconfirmed", "unavailable"] {
        for done_before in [true, false] {
            let (room, log, asked) = (Room::new(), Log::new(), Asked::default());
            let runner = room.runner(&plain(&asked, &log));
            let parked = runner.start(Start::new(Trail::new())).await.unwrap();
            let wait = room.wait(&parked.run, "w").await;
            let (other, run, w) = (
                room.runner(&plain(&asked, &log)),
                parked.run.clone(),
                wait.clone(),
            );
            let store = room.memory.clone();
            let unconfirmed = error == "unconfirmed";
            room.spy.before(Op::Commit, 0, move || async move {
                if done_before {
                    // The same delivery, by way of the store itself.
                    let _ = store.load(&run).await;
                    deliver(&other, &w, "d", "yes").await.unwrap();
                }
                Err(match unconfirmed {
                    true => iop_durable::store::StoreError::unconfirmed("lost"),
                    false => iop_durable::store::StoreError::unavailable("away"),
                })
            });
            let told = Box::pin(within(deliver(&runner, &wait, "d", "yes"))).await;
            if error == "unavailable" {
                refused(told, "store_unavailable");
                let again = deliver(&runner, &wait, "d", "yes").await.unwrap();
                assert_eq!((again.verdict, again.replayed), (Verdict::Accepted, done_before));
            } else {
                let told = told.unwrap();
                assert_eq!((told.verdict, told.replayed), (Verdict::Accepted, done_before));
            }
            assert_eq!(room.drain(&runner).await.unwrap().status, Status::Succeeded);
            room.sound(&parked.run).await;
        }
    }
}
