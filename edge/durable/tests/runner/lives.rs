//! Lives of a run, what its outcome shows, and what is checked where (durable-api §8 "Lives and ends", "Who retries"; D22, D64,
//! D92 to D94, D100, D101, D236, D262).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{Directive, Graph, GraphBuilder, Raw};
use iop_durable::ids::Owner;
use iop_durable::record::{ActivityState, AttemptClass, Effect, Status};
use iop_durable::runner::{Ctx, Resume, ResumePlan, RunError, Start};
use iop_durable::store::{LeaseRequest, Store};

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn the_kind_of_a_failure_says_whether_there_is_another_life() {
    for kind in FailureKind::ALL {
        let (room, log) = (Room::new(), Log::new());
        let seen = log.clone();
        let graph = one("kinds", move |ctx: Ctx, trail: Trail| {
            seen.add(format!("life {} attempt {}", ctx.life(), ctx.attempt()));
            async move {
                if ctx.life() < 3 {
                    return Err(Failure::new(kind, "as it says").code("own_code").into());
                }
                Ok((trail, Directive::end()))
            }
        });
        let runner = room.runner(&graph);
        let mut result = runner.start(Start::new(Trail::new())).await.unwrap();
        assert_eq!(
            (result.status, code(&result).as_str()),
            (Status::Failed, "own_code"),
            "{kind:?}"
        );
        let resumable = result.outcome.as_ref().unwrap().resumable();
        assert_eq!(resumable, kind.resumable(), "{kind:?}");
        if !resumable {
            let stored = room.load(&result.run).await.head.outcome.unwrap();
            let error = refused(runner.resume(&result.token, Resume::new()).await, "run_terminal");
            let RunError::Terminal { status, outcome } = error else {
                unreachable!()
            };
            assert_eq!(
                (status, outcome),
                (Status::Failed, stored),
                "{kind:?}: as it was committed"
            );
            assert_eq!(log.len(), 1, "{kind:?}");
            continue;
        }
        for life in 2..=3 {
            assert!(room.work(&runner).await.is_none(), "{kind:?}: never by itself");
            result = runner.resume(&result.token, Resume::new()).await.unwrap();
            assert_eq!(result.life, life, "{kind:?}");
            room.sound(&result.run).await;
        }
        assert_eq!(result.status, Status::Succeeded, "{kind:?}");
        assert_eq!(
            log.all(),
            ["life 1 attempt 1", "life 2 attempt 2", "life 3 attempt 3"],
            "{kind:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn another_life_reuses_what_completed() {
    let (room, log) = (Room::new(), Log::new());
    let calls = log.clone();
    let graph = shared(
        graph("reuse")
            .node("paid", {
                let calls = calls.clone();
                move |ctx: Ctx, trail: Trail| {
                    let calls = calls.clone();
                    async move {
                        Ok((
                            pushed(trail, call(&ctx, "pay", Effect::Unsafe, &calls).await?),
                            Directive::completed(),
                        ))
                    }
                }
            })
            .node("flaky", move |ctx: Ctx, trail: Trail| {
                let calls = calls.clone();
                async move {
                    call(&ctx, "write", Effect::Unsafe, &calls).await?;
                    let made = ctx.activity("send").run("", |_| {
                        let made = calls.add("send");
                        async move {
                            if made < 4 {
                                Err(failed(down()))
                            } else {
                                Ok(Bytes::new())
                            }
                        }
                    });
                    made.await?;
                    Ok((trail, Directive::end()))
                }
            })
            .edge("paid", "flaky")
            .terminal("flaky"),
    );
    let runner = room.runner(&graph);
    let failed = runner.start(Start::new(Trail::new())).await.unwrap();
    assert_eq!((failed.status, failed.state.len()), (Status::Failed, 1));
    let done = room
        .runner(&graph)
        .resume(&failed.token, Resume::new())
        .await
        .unwrap();
    assert_eq!((done.status, done.life), (Status::Succeeded, 2));
    assert_eq!(log.all(), ["pay", "write", "send", "send"]);
    let record = room.activity(&done.run, "send").await;
    let numbers: Vec<u32> = record.attempts.iter().map(|a| a.n).collect();
    assert_eq!((record.state, numbers), (ActivityState::Completed, vec![1, 2]));
    room.sound(&done.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_repeat_after_a_lost_worker_is_no_retry() {
    let (room, log, door) = (Room::new(), Log::new(), Door::new());
    let (calls, gone) = (log.clone(), door.clone());
    let graph = one("counts", move |ctx: Ctx, trail: Trail| {
        let (calls, door) = (calls.clone(), gone.clone());
        async move {
            ctx.activity("c")
                .effect(Effect::Idempotent)
                .retry(policy(2, Duration::from_secs(1)))
                .run("", |call| {
                    calls.add(format!("{}", call.attempt));
                    let door = door.clone();
                    async move {
                        match call.attempt {
                            1 => door.pass().await,
                            2 => return Err(failed(down())),
                            _ => {}
                        }
                        Ok(Bytes::new())
                    }
                })
                .await?;
            Ok((trail, Directive::end()))
        }
    });
    room.lose_at(&door, &graph).await;
    // The recovery fails retryably: the policy has paid for one attempt of two.
    let parked = room.work(&room.runner(&graph)).await.unwrap().unwrap();
    assert_eq!(parked.status, Status::Waiting);
    room.sound(&parked.run).await;
    room.clock.advance(Duration::from_secs(2));
    let done = room.work(&room.runner(&graph)).await.unwrap().unwrap();
    assert_eq!(
        (done.status, log.all()),
        (
            Status::Succeeded,
            vec!["1".to_owned(), "2".to_owned(), "3".to_owned()]
        )
    );
    let record = room.activity(&done.run, "c").await;
    let told: Vec<_> = record.attempts.iter().map(|a| (a.class, a.recovery)).collect();
    assert_eq!(
        told,
        [
            (AttemptClass::Abandoned, false),
            (AttemptClass::Failed, true),
            (AttemptClass::Completed, false)
        ]
    );
    room.sound(&done.run).await;
}

#[tokio::test(start_paused = true)]
async fn the_outcome_shows_what_the_graph_says() {
    let room = Room::new();
    let end = |_: Ctx, trail: Trail| async move { Ok((pushed(trail, "last"), Directive::end())) };
    let shown = shared(
        graph("shown")
            .output(|trail| serde_json::value::to_raw_value(trail).map_err(|e| e.to_string()))
            .node("only", end)
            .terminal("only"),
    );
    let done = room.runner(&shown).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(done.outcome.unwrap().output.unwrap().get(), r#"["last"]"#);
    let hidden = one("hidden", end);
    let done = room
        .runner(&hidden)
        .start(Start::new(Trail::new()))
        .await
        .unwrap();
    assert!(done.outcome.unwrap().output.is_none());
    // What cannot be shown fails the run, and nothing of the calls before is lost.
    let log = Log::new();
    let calls = log.clone();
    let broken = shared(
        graph("unshown")
            .output(|_| Err("no".to_owned()))
            .node("only", move |ctx: Ctx, trail: Trail| {
                let calls = calls.clone();
                async move {
                    call(&ctx, "c", Effect::Unsafe, &calls).await?;
                    Ok((trail, Directive::end()))
                }
            })
            .terminal("only"),
    );
    let done = room
        .runner(&broken)
        .start(Start::new(Trail::new()))
        .await
        .unwrap();
    assert_eq!(done.status, Status::Failed);
    assert_eq!(
        room.activity(&done.run, "c").await.state,
        ActivityState::Completed
    );
    room.sound(&done.run).await;
}

fn suspending() -> Arc<Graph<Trail>> {
    shared(
        graph("suspending")
            .invariant(|trail: &Trail| {
                if trail.iter().any(|t| t == "bad") {
                    Err("bad".to_owned())
                } else {
                    Ok(())
                }
            })
            .node("only", |_: Ctx, trail: Trail| async move {
                Ok((trail, Directive::suspend("held")))
            })
            .terminal("only"),
    )
}

#[tokio::test(start_paused = true)]
async fn the_invariant_is_checked_in_the_loop_and_not_by_the_resume() {
    let room = Room::new();
    let runner = room.runner(&suspending());
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let resume = Resume::new().overlay(|trail: Trail| Ok(pushed(trail, "bad")));
    let failed = runner.resume(&parked.token, resume).await.unwrap();
    assert_eq!(
        (failed.status, code(&failed).as_str()),
        (Status::Failed, "invariant_violated")
    );
    assert_eq!(failed.state, ["bad"], "the overlay was committed with the resume");
    room.sound(&failed.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_resume_as_a_stream_is_refused_like_any_other() {
    let room = Room::new();
    let runner = room.runner(&suspending());
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    type Making = fn() -> Resume<Trail>;
    let table: [(Making, &str); 4] = [
        (
            || Resume::new().target(|_, _| ResumePlan::To("x".to_owned())),
            "invalid_resume_target",
        ),
        (|| Resume::new().budget_used("x", 1), "budget_invalid"),
        (
            || Resume::new().overlay(|_| Err("no".to_owned())),
            "invalid_request",
        ),
        (|| Resume::new().overlay(|_| panic!("no")), "invalid_request"),
    ];
    for (resume, code) in table {
        refused(runner.resume(&parked.token, resume()).await, code);
        let stream = runner.resume_stream(&parked.token, resume()).await.unwrap();
        refused(within(stream.wait_result()).await, code);
        assert_eq!(
            room.load(&parked.run).await.lease,
            None,
            "nobody is left holding it"
        );
    }
    let panics = Resume::new().target(|_, _| panic!("no"));
    refused(runner.resume(&parked.token, panics).await, "invalid_request");
    assert_eq!(room.token(&parked.run).await, parked.token);
    let (events, again) = runner
        .resume_stream(&parked.token, Resume::new())
        .await
        .unwrap()
        .collect()
        .await
        .unwrap();
    assert_eq!((again.status, events.len()), (Status::Waiting, 4));
}

#[tokio::test(start_paused = true)]
async fn a_pointer_that_leads_nowhere_is_corrupt() {
    for cursor in [Some("nowhere"), None] {
        let room = Room::new();
        let runner = room.runner(&suspending());
        let parked = runner.start(Start::new(Trail::new())).await.unwrap();
        let request = LeaseRequest {
            owner: Owner::new("x").unwrap(),
            ttl: TTL,
        };
        let acquired = room.memory.acquire(&parked.run, request).await.unwrap();
        let mut commit = iop_durable::testing::build::advance(&acquired);
        commit.head = acquired.loaded.head.clone();
        commit.head.event_seq += 1;
        commit.head.cursor = cursor.map(node);
        commit.state = acquired.loaded.state.clone();
        commit.release = true;
        room.memory.commit(commit).await.unwrap();
        let token = room.token(&parked.run).await;
        refused(runner.resume(&token, Resume::new()).await, "run_corrupt");
        let loaded = room.load(&parked.run).await;
        assert_eq!((loaded.lease, loaded.inbox.quarantine.is_some()), (None, true));
        assert_eq!(loaded.head.revision, token.revision, "nothing is written over it");
    }
}

#[tokio::test(start_paused = true)]
async fn the_largest_state_comes_back_and_one_byte_more_is_refused() {
    let room = Room::new();
    let limit = 64 << 20;
    let graph = shared(
        GraphBuilder::<Bytes>::with_codec("large", 1, Raw)
            .node("only", |_: Ctx, state: Bytes| async move {
                let directive = if state.len() == 1 {
                    Directive::end()
                } else {
                    Directive::suspend("held")
                };
                Ok((state, directive))
            })
            .terminal("only"),
    );
    let runner = room.runner(&graph);
    let largest = Bytes::from(vec![0xff; limit]);
    let parked = runner.start(Start::new(largest.clone())).await.unwrap();
    assert_eq!(parked.state, largest);
    let more = Resume::new().overlay(move |state: Bytes| Ok(Bytes::from(vec![0; state.len() + 1])));
    refused(runner.resume(&parked.token, more).await, "payload_too_large");
    refused(
        runner.start(Start::new(Bytes::from(vec![0; limit + 1]))).await,
        "payload_too_large",
    );
    let small = Resume::new().overlay(|_| Ok(Bytes::from_static(b"x")));
    assert_eq!(
        runner.resume(&parked.token, small).await.unwrap().status,
        Status::Succeeded
    );
}
