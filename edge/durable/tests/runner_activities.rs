//! The activity boundary: what is committed when, replays, conflicts, sizes (section J, D258 to D262).

mod support;

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::{join, join_all, try_join_all};
use iop_durable::failure::FailureKind;
use iop_durable::graph::{Directive, Graph, GraphBuilder};
use iop_durable::record::{ActivityState, AttemptClass, Effect, Origin, Status};
use iop_durable::runner::{CallError, Ctx, Start, idempotency_key};
use iop_durable::store::Store;
use support::*;

fn one(
    name: &str,
    node: impl iop_durable::graph::Node<Trail, iop_durable::graph::NoEffect>,
) -> Arc<Graph<Trail>> {
    Arc::new(graph(name).node("only", node).terminal("only").compile().unwrap())
}

/// What each commit carried: steps, and activities with their state.
fn carried(room: &Room) -> Vec<(usize, Vec<String>)> {
    room.spy
        .commits()
        .iter()
        .map(|c| {
            let calls = c
                .activities
                .iter()
                .map(|a| format!("{} {}", a.key.as_str(), a.state));
            (c.steps.len(), calls.collect())
        })
        .collect()
}

#[tokio::test]
async fn intents_of_parallel_calls_are_one_commit_and_outcomes_go_with_the_step() {
    let (room, log) = (Room::new(), Log::new());
    let (calls, memory) = (log.clone(), room.memory.clone());
    let graph = one("parallel", move |ctx: Ctx, trail: Trail| {
        let (calls, memory) = (calls.clone(), memory.clone());
        async move {
            let all = (0..3).map(|n| {
                let (calls, memory, run) = (calls.clone(), memory.clone(), ctx.run().clone());
                ctx.activity(&format!("c{n}"))
                    .effect(if n == 0 {
                        Effect::Unsafe
                    } else {
                        Effect::Idempotent
                    })
                    .run("in", move |call| {
                        let (calls, memory, run) = (calls.clone(), memory.clone(), run.clone());
                        async move {
                            // The intent of this very attempt is committed.
                            let stored = memory.activity(&run, &call.activity).await.unwrap().unwrap();
                            assert_eq!(stored.state, ActivityState::Running);
                            assert_eq!(stored.attempts.last().unwrap().n, call.attempt);
                            assert_eq!(stored.input.bytes(), &call.input);
                            calls.add(call.idempotency_key);
                            Ok(Bytes::from("out"))
                        }
                    })
            });
            try_join_all(all).await?;
            Ok((trail, Directive::end()))
        }
    });
    let done = room
        .runner(&graph)
        .start(Start::new(Trail::new()).run(run_id("a/b")))
        .await
        .unwrap();
    assert_eq!(done.status, Status::Succeeded);
    let mut commits = carried(&room);
    for (_, calls) in &mut commits {
        calls.sort();
    }
    let of = |state: &str| (0..3).map(|n| format!("c{n} {state}")).collect::<Vec<_>>();
    assert_eq!(commits, [(0, of("running")), (1, of("completed"))]);
    assert_eq!(done.token.revision.get(), 3, "accepted, intents, the rest");
    let mut keys = log.all();
    keys.sort();
    assert_eq!(keys, ["a%2Fb/only/1/c0", "a%2Fb/only/1/c1", "a%2Fb/only/1/c2"]);
    assert_eq!(keys[0], idempotency_key(&done.run, &node("only"), 1, &key("c0")));
    let record = room.activity(&done.run, "c1").await;
    assert_eq!((record.origin, record.attempts.len()), (Some(Origin::Live), 1));
    room.sound(&done.run).await;
}

#[tokio::test]
async fn an_outcome_travels_with_the_next_intent() {
    let (room, log) = (Room::new(), Log::new());
    let calls = log.clone();
    let graph = one("sequence", move |ctx: Ctx, mut trail: Trail| {
        let calls = calls.clone();
        async move {
            for name in ["a", "b", "c"] {
                trail.push(call(&ctx, name, Effect::Idempotent, &calls).await?);
            }
            Ok((trail, Directive::end()))
        }
    });
    let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(done.state, ["a", "b", "c"]);
    let mut commits = carried(&room);
    for (_, calls) in &mut commits {
        calls.sort();
    }
    let text = |of: &[&str]| of.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
    assert_eq!(
        commits,
        [
            (0, text(&["a running"])),
            (0, text(&["a completed", "b running"])),
            (0, text(&["b completed", "c running"])),
            (1, text(&["c completed"])),
        ]
    );
    room.sound(&done.run).await;
}

#[tokio::test]
async fn a_read_has_no_intent_and_is_recorded_with_the_step() {
    let (room, log) = (Room::new(), Log::new());
    let calls = log.clone();
    let graph = one("read", move |ctx: Ctx, trail: Trail| {
        let calls = calls.clone();
        async move {
            let read = |name: &'static str| {
                ctx.activity(name).effect(Effect::ReadOnly).run("in", |call| {
                    calls.add(call.key.as_str());
                    async {
                        tokio::task::yield_now().await;
                        Ok(Bytes::from("out"))
                    }
                })
            };
            let (a, b) = join(read("a"), read("b")).await;
            Ok((pushed(pushed(trail, text(&a?)), text(&b?)), Directive::end()))
        }
    });
    let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(done.token.revision.get(), 2, "accepted, and the rest");
    assert_eq!(room.spy.count(Op::Commit), 1);
    let record = room.activity(&done.run, "a").await;
    assert_eq!(
        (record.state, record.attempts[0].class),
        (ActivityState::Completed, AttemptClass::Completed)
    );
    room.sound(&done.run).await;
}

#[tokio::test]
async fn what_completed_is_answered_from_the_journal() {
    let (room, log) = (Room::new(), Log::new());
    let calls = log.clone();
    let graph = Arc::new(
        graph("replay")
            .retry("only", policy(2, std::time::Duration::from_secs(1)))
            .node("only", move |ctx: Ctx, mut trail: Trail| {
                let calls = calls.clone();
                async move {
                    for (name, effect) in [
                        ("read", Effect::ReadOnly),
                        ("once", Effect::Unsafe),
                        ("key", Effect::Idempotent),
                    ] {
                        trail.push(call(&ctx, name, effect, &calls).await?);
                        // Asked for again within the same entry.
                        trail.push(call(&ctx, name, effect, &calls).await?);
                    }
                    match ctx.attempt() {
                        1 => Err(down().into()),
                        _ => Ok((trail, Directive::end())),
                    }
                }
            })
            .terminal("only")
            .compile()
            .unwrap(),
    );
    let parked = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(parked.status, Status::Waiting);
    room.clock.advance(std::time::Duration::from_secs(2));
    let done = room.work(&room.runner(&graph)).await.unwrap().unwrap();
    assert_eq!(done.status, Status::Succeeded);
    assert_eq!(done.state, ["read", "read", "once", "once", "key", "key"]);
    assert_eq!(log.all(), ["read", "once", "key"], "each was dispatched once");
    for record in room.activities(&done.run).await {
        assert_eq!((record.origin, record.attempts.len()), (Some(Origin::Live), 1));
    }
    room.sound(&done.run).await;
}

#[tokio::test]
async fn a_loop_makes_new_intentions() {
    let (room, log) = (Room::new(), Log::new());
    let calls = log.clone();
    let graph: Arc<Graph<Trail>> = Arc::new(
        graph("loop")
            .node("turn", move |ctx: Ctx, trail: Trail| {
                let calls = calls.clone();
                async move {
                    let key = ctx
                        .activity("same")
                        .effect(Effect::Idempotent)
                        .run("same", |call| {
                            calls.add(call.idempotency_key.clone());
                            async move { Ok(Bytes::from(call.idempotency_key)) }
                        })
                        .await?;
                    let over = trail.len() == 2;
                    let directive = if over {
                        Directive::end()
                    } else {
                        Directive::completed()
                    };
                    Ok((pushed(trail, text(&key)), directive))
                }
            })
            .edge("turn", "turn")
            .compile()
            .unwrap(),
    );
    let done = room
        .runner(&graph)
        .start(Start::new(Trail::new()).run(run_id("r")))
        .await
        .unwrap();
    let expected = ["r/turn/1/same", "r/turn/2/same", "r/turn/3/same"];
    assert_eq!(done.state, expected);
    assert_eq!(log.all(), expected);
}

#[tokio::test]
async fn a_recorded_call_asked_for_differently_conflicts_and_is_not_made() {
    let second = std::time::Duration::from_secs(1);
    for what in ["input", "implementation", "effect", "policy"] {
        let (room, log) = (Room::new(), Log::new());
        let calls = log.clone();
        let graph = Arc::new(
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
                .terminal("only")
                .compile()
                .unwrap(),
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

#[tokio::test]
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

#[tokio::test]
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

#[tokio::test]
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

#[tokio::test]
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

#[tokio::test]
async fn bytes_and_json_come_back_as_they_were() {
    let room = Room::new();
    let bytes: Vec<u8> = (0..=255).chain([0, 0xff, 0xc3, 0x28]).collect();
    let expected = bytes.clone();
    let graph = one("bytes", move |ctx: Ctx, trail: Trail| {
        let bytes = bytes.clone();
        async move {
            let out = ctx
                .activity("raw")
                .effect(Effect::ReadOnly)
                .run(bytes.clone(), |call| async { Ok(call.input) });
            assert_eq!(out.await?, bytes);
            let n: u64 = ctx
                .activity("json")
                .effect(Effect::ReadOnly)
                .run_json(&41u64, |call| async move {
                    let n: u64 = serde_json::from_slice(&call.input).unwrap();
                    Ok::<u64, CallError>(n + 1)
                })
                .await?;
            Ok((pushed(trail, n.to_string()), Directive::end()))
        }
    });
    let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(
        (done.status, done.state),
        (Status::Succeeded, vec!["42".to_owned()])
    );
    let record = room.activity(&done.run, "raw").await;
    assert_eq!(record.output.unwrap().bytes(), &Bytes::from(expected));
    // State that is bytes, with everything in it.
    let odd = Bytes::from_static(b"\x00\xff {\"a\": 1e400, \"b\": \"\\ud800\"}");
    let raw = GraphBuilder::<Bytes>::with_codec("raw", 1, iop_durable::graph::Raw)
        .node("only", |_: Ctx, state: Bytes| async move {
            Ok((state, Directive::end()))
        })
        .terminal("only")
        .compile()
        .unwrap();
    let done = room
        .runner(&Arc::new(raw))
        .start(Start::new(odd.clone()))
        .await
        .unwrap();
    assert_eq!(done.state, odd);
    assert_eq!(room.load(&done.run).await.state.bytes(), &odd);
}
