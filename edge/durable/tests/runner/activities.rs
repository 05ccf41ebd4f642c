//! The activity boundary: what is committed when, and what is answered from the journal (D138 to D142).

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::{join, try_join_all};
use iop_durable::graph::{Directive, Graph, GraphBuilder};
use iop_durable::record::{ActivityState, AttemptClass, Effect, Origin, Status};
use iop_durable::runner::{CallError, Ctx, Start, idempotency_key};
use iop_durable::store::Store;

use crate::support::*;

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

#[tokio::test(start_paused = true)]
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
    assert_eq!(keys[0], idempotency_key(&done.run, "only", 1, &key("c0")));
    let record = room.activity(&done.run, "c1").await;
    assert_eq!((record.origin, record.attempts.len()), (Some(Origin::Live), 1));
    room.sound(&done.run).await;
}

#[tokio::test(start_paused = true)]
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

#[tokio::test(start_paused = true)]
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

#[tokio::test(start_paused = true)]
async fn what_completed_is_answered_from_the_journal() {
    let (room, log) = (Room::new(), Log::new());
    let calls = log.clone();
    let graph = shared(
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
            .terminal("only"),
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

#[tokio::test(start_paused = true)]
async fn a_loop_makes_new_intentions() {
    let (room, log) = (Room::new(), Log::new());
    let calls = log.clone();
    let graph: Arc<Graph<Trail>> = shared(
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
            .edge("turn", "turn"),
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

#[tokio::test(start_paused = true)]
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
    let raw = shared(
        GraphBuilder::<Bytes>::with_codec("raw", 1, iop_durable::graph::Raw)
            .node("only", |_: Ctx, state: Bytes| async move {
                Ok((state, Directive::end()))
            })
            .terminal("only"),
    );
    let done = room.runner(&raw).start(Start::new(odd.clone())).await.unwrap();
    assert_eq!(done.state, odd);
    assert_eq!(room.load(&done.run).await.state.bytes(), &odd);
}
