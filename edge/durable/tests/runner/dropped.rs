//! Nodes that drop, ignore or choose between calls: no step is committed over a call that is not over (D143), nothing is made
//! of a call that never left, and nothing spins.

use std::sync::Arc;

use futures_util::future::{Either, select};
use iop_durable::graph::{Directive, Graph, NoEffect, Node};
use iop_durable::record::{ActivityState, AttemptClass, Effect, Status, WaitingKind};
use iop_durable::runner::{Ctx, Resume, Start};

use crate::support::*;

fn one(name: &str, node: impl Node<Trail, NoEffect>) -> Arc<Graph<Trail>> {
    shared(
        graph(name)
            .recovery_attempts(2)
            .node("only", node)
            .terminal("only"),
    )
}

/// A call that stands before the door.
async fn held_call(ctx: &Ctx, name: &str, effect: Effect, log: &Log, door: &Door) -> Answer {
    ctx.activity(name)
        .effect(effect)
        .run("in", |call| {
            log.add(format!("{} {}", call.idempotency_key, call.attempt));
            door.answers("out")
        })
        .await?;
    Ok((Trail::new(), Directive::end()))
}

#[tokio::test(start_paused = true)]
async fn a_call_dropped_before_it_left_was_never_made() {
    for effect in [Effect::Unsafe, Effect::Idempotent, Effect::ReadOnly] {
        let (room, log) = (Room::new(), Log::new());
        let calls = log.clone();
        let graph = one("early", move |ctx: Ctx, trail: Trail| {
            let calls = calls.clone();
            async move {
                {
                    let call = call(&ctx, "c", effect, &calls);
                    tokio::pin!(call);
                    // Polled once: the intent is asked for, and taken back before it was committed.
                    if effect != Effect::ReadOnly {
                        assert!(futures_util::poll!(&mut call).is_pending());
                    }
                }
                Ok((pushed(trail, "went on"), Directive::end()))
            }
        });
        let done = within(room.runner(&graph).start(Start::new(Trail::new())))
            .await
            .unwrap();
        assert_eq!((done.status, log.len()), (Status::Succeeded, 0), "{effect}");
        assert_eq!(room.activities(&done.run).await, [], "{effect}: no trace of it");
        room.sound(&done.run).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_taken_back_may_be_made_later() {
    let (room, log) = (Room::new(), Log::new());
    let calls = log.clone();
    let graph = one("later", move |ctx: Ctx, trail: Trail| {
        let calls = calls.clone();
        async move {
            {
                let call = call(&ctx, "c", Effect::Unsafe, &calls);
                tokio::pin!(call);
                assert!(futures_util::poll!(&mut call).is_pending());
            }
            let out = call(&ctx, "c", Effect::Unsafe, &calls).await?;
            Ok((pushed(trail, out), Directive::end()))
        }
    });
    let done = within(room.runner(&graph).start(Start::new(Trail::new())))
        .await
        .unwrap();
    assert_eq!(
        (done.status, log.all()),
        (Status::Succeeded, vec!["c".to_owned()])
    );
    let record = room.activity(&done.run, "c").await;
    assert_eq!(record.attempts.len(), 1);
    room.sound(&done.run).await;
}

#[tokio::test(start_paused = true)]
async fn an_unsafe_call_dropped_on_its_way_is_ambiguous_whatever_the_node_says() {
    for outcome in ["ok", "error", "panic", "suspend"] {
        let (room, log, door) = (Room::new(), Log::new(), Door::new());
        let (calls, gone) = (log.clone(), door.clone());
        let graph = one("dropped", move |ctx: Ctx, trail: Trail| {
            let (calls, door) = (calls.clone(), gone.clone());
            async move {
                if trail.is_empty() {
                    let call = held_call(&ctx, "c", Effect::Unsafe, &calls, &door);
                    let left = door.reached(1);
                    // The call is dropped as soon as it is under way.
                    match select(Box::pin(call), Box::pin(left)).await {
                        Either::Left(_) => panic!("the door is shut"),
                        Either::Right(_) => {}
                    }
                }
                match outcome {
                    "ok" => Ok((trail, Directive::end())),
                    "suspend" => Ok((trail, Directive::suspend("held"))),
                    "error" => Err(broken().into()),
                    _ => panic!("after it"),
                }
            }
        });
        let runner = room.runner(&graph);
        let done = within(runner.start(Start::new(Trail::new()))).await.unwrap();
        assert_eq!(done.status, Status::Ambiguous, "{outcome}");
        assert_eq!(
            waits_for(&done),
            [(WaitingKind::Reconciliation, "c".to_owned())],
            "{outcome}"
        );
        let record = room.activity(&done.run, "c").await;
        assert_eq!(
            (record.state, record.attempts[0].class),
            (ActivityState::Unknown, AttemptClass::Abandoned)
        );
        assert!(
            room.steps(&done.run).await.is_empty(),
            "{outcome}: no step is over"
        );
        refused(
            runner.resume(&done.token, Resume::new()).await,
            "effect_ambiguous",
        );
        assert!(room.work(&runner).await.is_none());
        assert_eq!(log.len(), 1, "{outcome}");
        room.sound(&done.run).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_idempotent_call_dropped_on_its_way_is_made_again_under_its_key() {
    let (room, log, door) = (Room::new(), Log::new(), Door::new());
    let (calls, gone) = (log.clone(), door.clone());
    let graph = one("again", move |ctx: Ctx, trail: Trail| {
        let (calls, door) = (calls.clone(), gone.clone());
        async move {
            let first = calls.len() == 0;
            let call = held_call(&ctx, "c", Effect::Idempotent, &calls, &door);
            if first {
                let _ = select(Box::pin(call), Box::pin(door.reached(1))).await;
                door.open();
            } else {
                call.await?;
            }
            Ok((trail, Directive::end()))
        }
    });
    let done = within(
        room.runner(&graph)
            .start(Start::new(Trail::new()).run(run_id("r"))),
    )
    .await
    .unwrap();
    assert_eq!(done.status, Status::Succeeded);
    assert_eq!(log.all(), ["r/only/1/c 1", "r/only/1/c 2"]);
    let record = room.activity(&done.run, "c").await;
    let told: Vec<_> = record.attempts.iter().map(|a| (a.class, a.recovery)).collect();
    assert_eq!(
        told,
        [(AttemptClass::Abandoned, false), (AttemptClass::Completed, true)]
    );
    room.sound(&done.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_node_that_never_comes_back_to_its_call_does_not_spin_and_does_not_pass() {
    for effect in [Effect::Idempotent, Effect::ReadOnly] {
        let (room, log, door) = (Room::new(), Log::new(), Door::new());
        let (calls, gone) = (log.clone(), door.clone());
        let graph = one("ignored", move |ctx: Ctx, trail: Trail| {
            let (calls, door) = (calls.clone(), gone.clone());
            async move {
                if calls.len() == 0 {
                    let call = held_call(&ctx, "c", effect, &calls, &door);
                    let left = door.reached(1);
                    let _ = select(Box::pin(call), Box::pin(left)).await;
                }
                Ok((pushed(trail, "passed"), Directive::end()))
            }
        });
        let done = within(room.runner(&graph).start(Start::new(Trail::new())))
            .await
            .unwrap();
        room.sound(&done.run).await;
        assert_eq!(log.len(), 1);
        if effect == Effect::ReadOnly {
            // A read has no effect that anybody would have to know of.
            assert_eq!(done.status, Status::Succeeded);
            continue;
        }
        assert_eq!(
            (done.status, code(&done).as_str()),
            (Status::Failed, "activity_unresolved")
        );
        assert_eq!(done.state, Trail::new());
        let record = room.activity(&done.run, "c").await;
        assert_eq!(record.state, ActivityState::Failed);
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_drops_its_call_each_time_exhausts_the_recoveries() {
    let (room, log, door) = (Room::new(), Log::new(), Door::new());
    let (calls, gone) = (log.clone(), door.clone());
    let graph = one("stubborn", move |ctx: Ctx, trail: Trail| {
        let (calls, door) = (calls.clone(), gone.clone());
        async move {
            let so_far = u32::try_from(calls.len()).unwrap();
            let call = held_call(&ctx, "c", Effect::Idempotent, &calls, &door);
            let left = door.reached(so_far + 1);
            // Whatever the call says is ignored.
            let _ = select(Box::pin(call), Box::pin(left)).await;
            Ok((trail, Directive::end()))
        }
    });
    let done = within(room.runner(&graph).start(Start::new(Trail::new())))
        .await
        .unwrap();
    assert_eq!(log.len(), 3, "one attempt and two recoveries");
    assert_eq!(done.status, Status::Exhausted);
    let exhausted = done.outcome.as_ref().unwrap().exhausted.clone().unwrap();
    assert_eq!(
        (exhausted.budget.as_str(), exhausted.used, exhausted.limit),
        ("recovery_attempts", 2, 2)
    );
    room.sound(&done.run).await;
}

#[tokio::test(start_paused = true)]
async fn the_loser_of_a_race_holds_the_step_until_it_is_over() {
    for waits in [true, false] {
        let (room, log, door) = (Room::new(), Log::new(), Door::new());
        let (calls, gone) = (log.clone(), door.clone());
        let graph = one("race", move |ctx: Ctx, trail: Trail| {
            let (calls, door) = (calls.clone(), gone.clone());
            async move {
                let slow = Box::pin(held_call(&ctx, "slow", Effect::Idempotent, &calls, &door));
                let quick = Box::pin(async {
                    let answer = call(&ctx, "quick", Effect::Idempotent, &calls).await;
                    // The slow one is under way when the quick one wins.
                    door.reached(1).await;
                    answer
                });
                match select(slow, quick).await {
                    Either::Left(_) => panic!("the door is shut"),
                    Either::Right((answer, slow)) => {
                        answer?;
                        if waits {
                            door.open();
                            slow.await?;
                        }
                    }
                }
                Ok((trail, Directive::end()))
            }
        });
        let done = within(
            room.runner(&graph)
                .start(Start::new(Trail::new()).run(run_id("r"))),
        )
        .await
        .unwrap();
        assert_eq!(log.count("quick"), 1, "the winner is made once");
        assert_eq!((log.count("r/only/1/slow 1"), log.len()), (1, 2));
        if waits {
            assert_eq!(done.status, Status::Succeeded);
        } else {
            // The second entry is answered at once and leaves the other open again.
            assert_eq!(
                (done.status, code(&done).as_str()),
                (Status::Failed, "activity_unresolved")
            );
        }
        room.sound(&done.run).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_outlives_its_node_is_cut_off() {
    let (room, log, door) = (Room::new(), Log::new(), Door::new());
    let (calls, gone) = (log.clone(), door.clone());
    let tasks = Arc::new(tokio::sync::Mutex::new(tokio::task::JoinSet::new()));
    let others = Arc::clone(&tasks);
    let graph = one("outlives", move |ctx: Ctx, trail: Trail| {
        let (calls, door, others) = (calls.clone(), gone.clone(), Arc::clone(&others));
        async move {
            let (ctx, gone) = (ctx.clone(), door.clone());
            let outside = async move { held_call(&ctx, "c", Effect::Unsafe, &calls, &gone).await };
            others.lock().await.spawn(outside);
            door.reached(1).await;
            Ok((trail, Directive::end()))
        }
    });
    let done = within(room.runner(&graph).start(Start::new(Trail::new())))
        .await
        .unwrap();
    assert_eq!(done.status, Status::Ambiguous);
    // Its late answer changes nothing.
    let before = room.load(&done.run).await;
    door.open();
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
    assert_eq!(room.load(&done.run).await.head, before.head);
    assert_eq!(room.activity(&done.run, "c").await.state, ActivityState::Unknown);
    tasks.lock().await.abort_all();
    room.sound(&done.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_node_that_waits_for_nothing_of_the_engine_is_not_parked() {
    let (room, door) = (Room::new(), Door::new());
    let gone = door.clone();
    let graph = one("own", move |_: Ctx, trail: Trail| {
        let door = gone.clone();
        async move {
            door.pass().await;
            Ok((trail, Directive::end()))
        }
    });
    let running = running(&room.runner(&graph));
    door.reached(1).await;
    assert_eq!(room.status(&run_id("r")).await, Status::Running);
    door.open();
    assert_eq!(done(running).await.unwrap().status, Status::Succeeded);
}
