//! What front-ends need of the engine: budgets that are charged afterwards, usage in every outcome, announcements, denials, a
//! digest of their own, and resumes that leave the run to the workers.

use bytes::Bytes;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::Directive;
use iop_durable::record::{DENIED, Effect, Reason, Status, WaitingKind};
use iop_durable::runner::{BudgetRefused, Ctx, Resume, Start};
use serde_json::value::to_raw_value;

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn what_was_used_already_is_charged_beyond_the_limit() {
    let room = Room::new();
    let graph = shared(
        graph("charged")
            .budget("tokens", 10)
            .node("first", |ctx: Ctx, trail: Trail| async move {
                let budget = ctx.charge("tokens", 7).unwrap();
                assert_eq!((budget.used, budget.limit), (7, 10));
                let unknown = ctx.charge("words", 1).unwrap_err();
                assert_eq!(unknown, BudgetRefused::Undeclared("words".to_owned()));
                Ok((trail, Directive::completed()))
            })
            .node("second", |ctx: Ctx, trail: Trail| async move {
                assert_eq!(ctx.charge("tokens", 7).unwrap().used, 14);
                assert!(ctx.use_budget("tokens", 1).is_err());
                Ok((trail, Directive::end()))
            })
            .edge("first", "second")
            .terminal("second"),
    );
    let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(done.status, Status::Succeeded);
    assert_eq!(done.budgets["tokens"].used, 14);
    room.sound(&done.run).await;
}

#[tokio::test(start_paused = true)]
async fn usage_stands_in_the_outcome_however_the_run_ends() {
    let room = Room::new();
    for failing in [false, true] {
        let graph = shared(
            graph("used")
                .usage(|trail: &Trail| to_raw_value(&trail.len()).map_err(|e| e.to_string()))
                .node("first", |_: Ctx, trail: Trail| async move {
                    Ok((pushed(trail, "a"), Directive::completed()))
                })
                .node("second", move |_: Ctx, trail: Trail| async move {
                    if failing {
                        return Err(Failure::new(FailureKind::ToolError, "no").into());
                    }
                    Ok((pushed(trail, "b"), Directive::end()))
                })
                .edge("first", "second")
                .terminal("second"),
        );
        let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
        let usage = done.outcome.unwrap().usage.unwrap();
        // Of the last committed state.
        assert_eq!(usage.get(), if failing { "1" } else { "2" });
    }
}

#[tokio::test(start_paused = true)]
async fn a_denial_is_told_apart_from_an_error() {
    let room = Room::new();
    for (code, reason) in [(DENIED, Reason::Denied), ("other", Reason::Error)] {
        let graph = one("denied", move |_: Ctx, _: Trail| async move {
            Err(Failure::new(FailureKind::Refused, "no").code(code).into())
        });
        let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
        assert_eq!((done.status, done.reason()), (Status::Failed, Some(reason)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_front_end_names_the_step_that_failed() {
    let room = Room::new();
    let failing = |named: bool| {
        let graph = graph("named").node("first", |_: Ctx, _: Trail| async move {
            Err(Failure::new(FailureKind::ToolError, "no").into())
        });
        let graph = graph.terminal("first");
        shared(if named {
            graph.step_name(|node, activation| format!("{node} {activation}"))
        } else {
            graph
        })
    };
    for (named, step) in [(true, "first 1"), (false, "first")] {
        let runner = room.runner(&failing(named));
        let done = runner.start(Start::new(Trail::new())).await.unwrap();
        let error = done.outcome.unwrap().error.unwrap();
        assert_eq!(error.step.as_deref(), Some(step));
    }
}

#[tokio::test(start_paused = true)]
async fn an_attempt_is_announced_with_its_intent_and_a_replay_is_not() {
    let room = Room::new();
    let graph = one("announced", |ctx: Ctx, trail: Trail| async move {
        ctx.activity("call")
            .effect(Effect::Idempotent)
            .announce(|attempt| {
                (
                    "call.started".into(),
                    Bytes::from(format!("{{\"attempt\":{attempt}}}")),
                )
            })
            .run("x", |_| async { Ok(Bytes::from_static(b"y")) })
            .await?;
        // The node is entered again behind the gate: the call answers from the journal.
        ctx.gate("ask").wait().await?;
        Ok((trail, Directive::end()))
    });
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(parked.status, Status::Waiting);
    let events = room.events(&parked.run).await;
    let announced: Vec<_> = events
        .iter()
        .filter(|event| event.name == "call.started")
        .collect();
    assert_eq!(announced.len(), 1);
    assert_eq!(&announced[0].data[..], b"{\"attempt\":1}");
    let wait = room.wait(&parked.run, "ask").await;
    deliver_to_gate(&room.aside(), &wait, "d", "yes").await.unwrap();
    let done = room.work(&runner).await.unwrap().unwrap();
    assert_eq!(done.status, Status::Succeeded);
    let events = room.events(&parked.run).await;
    assert_eq!(
        events.iter().filter(|event| event.name == "call.started").count(),
        1
    );
}

#[tokio::test(start_paused = true)]
async fn runs_are_pinned_to_the_front_ends_own_digest() {
    let made = |digest: &str| {
        let graph = graph("declared")
            .declared(digest)
            .node("only", |_: Ctx, trail: Trail| async move {
                Ok((trail, Directive::end()))
            })
            .terminal("only");
        shared(graph)
    };
    let (one, two) = (made("sha256:01"), made("sha256:02"));
    assert_eq!(one.definition().digest, "sha256:01");
    let room = Room::new();
    let done = room.runner(&one).start(Start::new(Trail::new())).await.unwrap();
    refused(room.runner(&two).result(&done.run).await, "definition_changed");
}

#[tokio::test(start_paused = true)]
async fn a_resume_may_leave_the_run_to_the_workers() {
    let (room, log) = (Room::new(), Log::new());
    let seen = log.clone();
    let graph = one("queued", move |ctx: Ctx, trail: Trail| {
        seen.add(format!("life {}", ctx.life()));
        async move {
            if ctx.life() == 1 {
                return Err(Failure::new(FailureKind::Unavailable, "later").into());
            }
            Ok((trail, Directive::end()))
        }
    });
    let runner = room.runner(&graph);
    let failed = runner.start(Start::new(Trail::new())).await.unwrap();
    let queued = runner
        .enqueue(&failed.token, Resume::new().metadata("by", "test"))
        .await
        .unwrap();
    assert_eq!((queued.status, queued.life), (Status::Queued, 2));
    assert_eq!(log.all(), ["life 1"], "nothing runs here");
    // The same token again is stale: the run has moved on.
    refused(runner.enqueue(&failed.token, Resume::new()).await, "stale_token");
    let done = room.work(&runner).await.unwrap().unwrap();
    assert_eq!(done.status, Status::Succeeded);
    assert_eq!(log.all(), ["life 1", "life 2"]);
    let events = room.events(&failed.run).await;
    let resumed: Vec<_> = events
        .iter()
        .filter(|event| event.name == "run.resumed")
        .collect();
    assert_eq!((resumed.len(), resumed[0].life), (1, 2));
    assert_eq!(room.load(&failed.run).await.head.metadata["by"], "test");
    room.sound(&failed.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_refused_enqueue_changes_nothing() {
    let room = Room::new();
    let graph = one("waits", |ctx: Ctx, trail: Trail| async move {
        ctx.gate("ask").kind(WaitingKind::Children).wait().await?;
        Ok((trail, Directive::end()))
    });
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let before = room.load(&parked.run).await.head;
    refused(runner.enqueue(&parked.token, Resume::new()).await, "run_waiting");
    assert_eq!(room.load(&parked.run).await.head, before);
    let kind = parked
        .waiting
        .as_ref()
        .and_then(iop_durable::record::Waiting::kind);
    assert_eq!(kind, Some(WaitingKind::Children));
}
