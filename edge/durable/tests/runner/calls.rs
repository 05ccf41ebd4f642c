//! Calls that are refused, conflict or panic (D141, D257, D258, D262).

use bytes::Bytes;
use futures_util::future::join_all;
use iop_durable::failure::FailureKind;
use iop_durable::graph::Directive;
use iop_durable::record::{ActivityState, Effect, Status};
use iop_durable::runner::{Ctx, Start};

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn a_recorded_call_asked_for_differently_conflicts_and_is_not_made() {
    let second = std::time::Duration::from_secs(1);
    for what in ["input", "implementation", "effect", "policy"] {
        let (room, log) = (Room::new(), Log::new());
        let calls = log.clone();
        let graph = shared(
            graph("conflict")
                .retry("only", policy(2, second))
                .node("only", move |ctx: Ctx, trail: Trail| {
                    let calls = calls.clone();
                    async move {
                        let changed = |of: &str| ctx.attempt() == 2 && of == what;
                        let effect = if changed("effect") {
                            Effect::ReadOnly
                        } else {
                            Effect::Idempotent
                        };
                        let attempts = if changed("policy") { 3 } else { 2 };
                        let label = if changed("implementation") { "2" } else { "1" };
                        let input = if changed("input") { "other" } else { "in" };
                        ctx.activity("c")
                            .effect(effect)
                            .implementation(label)
                            .retry(policy(attempts, second))
                            .run(input, |_| {
                                calls.add("made");
                                async { Ok(Bytes::new()) }
                            })
                            .await?;
                        match ctx.attempt() {
                            1 => Err(down().into()),
                            _ => Ok((trail, Directive::end())),
                        }
                    }
                })
                .terminal("only"),
        );
        let runner = room.runner(&graph);
        runner.start(Start::new(Trail::new())).await.unwrap();
        room.clock.advance(second * 2);
        let done = room.drain(&runner).await.unwrap();
        assert_eq!(
            (done.status, code(&done).as_str()),
            (Status::Failed, "activity_conflict"),
            "{what}"
        );
        assert_eq!(log.len(), 1, "{what}");
        assert_eq!(
            room.activity(&done.run, "c").await.state,
            ActivityState::Completed,
            "{what}: it stays"
        );
        room.sound(&done.run).await;
    }
}

#[tokio::test(start_paused = true)]
async fn one_key_called_twice_at_once_is_one_call_and_one_conflict() {
    let (room, log) = (Room::new(), Log::new());
    let calls = log.clone();
    let graph = one("twice", move |ctx: Ctx, trail: Trail| {
        let calls = calls.clone();
        async move {
            let both = join_all((0..2).map(|_| call(&ctx, "same", Effect::Unsafe, &calls))).await;
            let codes: Vec<String> = both
                .into_iter()
                .map(|answer| answer.map_or_else(|failure| failure.code, |out| format!("ok {out}")))
                .collect();
            Ok((codes.into_iter().fold(trail, pushed), Directive::end()))
        }
    });
    let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(done.status, Status::Succeeded);
    assert_eq!(done.state, ["ok same", "activity_conflict"]);
    assert_eq!(log.len(), 1);
    room.sound(&done.run).await;
}

#[tokio::test(start_paused = true)]
async fn sizes_are_refused_before_dispatch_and_after_it_typed() {
    let (room, log) = (Room::new(), Log::new());
    let mut options = Room::options();
    options.limits.max_payload = 10;
    options.limits.max_state = 100;
    let calls = log.clone();
    let graph = one("sizes", move |ctx: Ctx, trail: Trail| {
        let calls = calls.clone();
        async move {
            let size: usize = trail[1].parse().unwrap();
            let (input, output) = match trail[0].as_str() {
                "input" => (size, 0),
                "output" => (0, size),
                _ => (0, 0),
            };
            if trail[0] == "state" {
                return Ok((pushed(trail, "x".repeat(size)), Directive::end()));
            }
            ctx.activity("c")
                .effect(Effect::Idempotent)
                .retry(policy(5, std::time::Duration::from_secs(1)))
                .run(vec![0u8; input], |_| {
                    calls.add("made");
                    async move { Ok(Bytes::from(vec![0u8; output])) }
                })
                .await?;
            Ok((trail, Directive::end()))
        }
    });
    let runner = room.runner_with(&graph, options);
    let with = |what: &str, size: usize| Start::new(vec![what.to_owned(), size.to_string()]);
    for (what, size, made) in [("input", 10, 1), ("output", 10, 1), ("state", 83, 0)] {
        let before = log.len();
        let done = runner.start(with(what, size)).await.unwrap();
        assert_eq!(
            (done.status, log.len() - before),
            (Status::Succeeded, made),
            "{what}"
        );
    }
    for (what, size, kind, records, made) in [
        ("input", 11, FailureKind::InvalidInput, 0, 0),
        ("output", 11, FailureKind::ToolError, 1, 1),
        ("state", 84, FailureKind::InvalidInput, 0, 0),
    ] {
        let before = log.len();
        let done = runner.start(with(what, size)).await.unwrap();
        assert_eq!(
            (done.status, code(&done).as_str()),
            (Status::Failed, "payload_too_large"),
            "{what}"
        );
        let failure = done.outcome.as_ref().unwrap().error.clone().unwrap().failure;
        assert_eq!((failure.kind, failure.retryable), (kind, false), "{what}");
        assert_eq!(log.len() - before, made, "{what}");
        assert_eq!(room.activities(&done.run).await.len(), records, "{what}");
        assert_eq!(done.state.len(), 2, "{what}");
        room.sound(&done.run).await;
    }
    // A run that begins too large does not begin.
    let big = Start::new(vec!["x".repeat(200)]).run(run_id("big"));
    refused(runner.start(big.clone()).await, "payload_too_large");
    refused(runner.accept(big).await, "payload_too_large");
    refused(runner.result(&run_id("big")).await, "run_not_found");
}

#[tokio::test(start_paused = true)]
async fn a_key_that_is_no_key_is_refused_and_nothing_is_dispatched() {
    let (room, log) = (Room::new(), Log::new());
    let calls = log.clone();
    let graph = one("keys", move |ctx: Ctx, trail: Trail| {
        let calls = calls.clone();
        async move {
            call(&ctx, &trail[0], Effect::Idempotent, &calls).await?;
            Ok((trail, Directive::end()))
        }
    });
    let runner = room.runner(&graph);
    for bad in ["a\0b".to_owned(), String::new(), "k".repeat(257)] {
        let done = runner.start(Start::new(vec![bad])).await.unwrap();
        assert_eq!(
            (done.status, code(&done).as_str()),
            (Status::Failed, "invalid_encoding")
        );
        assert_eq!(room.activities(&done.run).await.len(), 0);
        room.sound(&done.run).await;
    }
    let shared_prefix = "k".repeat(255);
    for good in [
        "\u{fffd}".to_owned(),
        "k".repeat(256),
        format!("{shared_prefix}a"),
        format!("{shared_prefix}b"),
    ] {
        let done = runner.start(Start::new(vec![good])).await.unwrap();
        assert_eq!(done.status, Status::Succeeded);
    }
    assert_eq!(log.len(), 4);
    // A label is text too.
    let labelled = one("labels", |ctx: Ctx, trail: Trail| async move {
        ctx.activity("c")
            .implementation("a\0")
            .run("", |_| async { panic!("dispatched") })
            .await?;
        Ok((trail, Directive::end()))
    });
    let done = room
        .runner(&labelled)
        .start(Start::new(Trail::new()))
        .await
        .unwrap();
    assert_eq!(done.status, Status::Failed);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_panics_fails_the_step_and_an_unsafe_one_stays_unknown() {
    for (effect, status, state) in [
        (Effect::ReadOnly, Status::Failed, None),
        (Effect::Idempotent, Status::Failed, Some(ActivityState::Failed)),
        (Effect::Unsafe, Status::Ambiguous, Some(ActivityState::Unknown)),
    ] {
        let room = Room::new();
        let graph = one("panics", move |ctx: Ctx, trail: Trail| async move {
            ctx.activity("c")
                .effect(effect)
                .run("", |_| async {
                    tokio::task::yield_now().await;
                    panic!("in the middle of it")
                })
                .await?;
            Ok((trail, Directive::end()))
        });
        let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
        assert_eq!(done.status, status, "{effect}");
        let found = room.activities(&done.run).await.first().map(|a| a.state);
        assert_eq!(found, state, "{effect}");
        room.sound(&done.run).await;
        if status == Status::Failed {
            assert_eq!(code(&done), "panic");
        }
    }
}
