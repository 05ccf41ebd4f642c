//! Effects that may or may not have happened: who may repeat them, and who is asked about them (D136, D140, D143, D151, D152;
//! durable-api §8, "Ambiguous").

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join;
use iop_durable::graph::{Directive, Graph};
use iop_durable::record::{ActivityRecord, ActivityState, AttemptClass, Effect, Origin, Status, WaitingKind};
use iop_durable::runner::{CallError, Ctx, Reconciled, Resume, Start};

use crate::support::*;

/// A call whose first attempts are cut off, and one beside it that answers.
fn cut(effect: Effect, cuts: usize, log: &Log) -> Arc<Graph<Trail>> {
    let log = log.clone();
    shared(
        graph("cut")
            .recovery_attempts(2)
            .node("only", move |ctx: Ctx, trail: Trail| {
                let log = log.clone();
                async move {
                    let mut activity = ctx.activity("c").effect(effect);
                    if effect != Effect::Unsafe {
                        activity = activity.retry(policy(3, Duration::from_secs(60)));
                    }
                    let cut = activity.run("in", |call| {
                        let made = log.add(call.idempotency_key);
                        async move {
                            if made <= cuts {
                                return Err(CallError::Unknown);
                            }
                            Ok(Bytes::from("out"))
                        }
                    });
                    Ok((pushed(trail, text(&cut.await?)), Directive::end()))
                }
            })
            .terminal("only"),
    )
}

pub(crate) async fn ambiguous(room: &Room, log: &Log) -> (Trails, Result, ActivityRecord) {
    let runner = room.runner(&cut(Effect::Unsafe, 1, log));
    let run = runner.start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(run.status, Status::Ambiguous);
    let record = room.activity(&run.run, "c").await;
    (runner, run, record)
}

#[tokio::test(start_paused = true)]
async fn an_unsafe_call_without_an_answer_is_ambiguous_and_not_repeated() {
    let (room, log) = (Room::new(), Log::new());
    let (runner, run, record) = ambiguous(&room, &log).await;
    let waiting = run.waiting.as_ref().unwrap();
    assert_eq!(
        (waiting.on[0].kind, waiting.on[0].id.as_str()),
        (WaitingKind::Reconciliation, record.id.as_str())
    );
    assert_eq!(
        (record.state, record.attempts[0].class),
        (ActivityState::Unknown, AttemptClass::Abandoned)
    );
    assert_eq!(record.error, None, "no failure is made of it");
    for _ in 0..3 {
        refused(runner.resume(&run.token, Resume::new()).await, "effect_ambiguous");
        room.clock.advance(Duration::from_hours(24));
        assert!(room.work(&runner).await.is_none(), "no time makes it go on");
    }
    assert_eq!(log.len(), 1);
    room.sound(&run.run).await;
    assert_eq!(room.names(&run.run).await.last().unwrap(), "run.ambiguous");
}

#[tokio::test(start_paused = true)]
async fn a_call_that_may_be_repeated_is_within_its_limit_and_under_its_key() {
    for (effect, cuts, status, made) in [
        (Effect::Idempotent, 2, Status::Succeeded, 3),
        (Effect::ReadOnly, 2, Status::Succeeded, 3),
        (Effect::Idempotent, 3, Status::Exhausted, 3),
        (Effect::ReadOnly, 3, Status::Exhausted, 3),
    ] {
        let (room, log) = (Room::new(), Log::new());
        let runner = room.runner(&cut(effect, cuts, &log));
        let done = within(runner.start(Start::new(Trail::new()).run(run_id("r"))))
            .await
            .unwrap();
        assert_eq!((done.status, log.len()), (status, made), "{effect} {cuts}");
        assert!(log.all().iter().all(|k| k == "r/only/1/c"));
        if status == Status::Exhausted {
            let exhausted = done.outcome.as_ref().unwrap().exhausted.clone().unwrap();
            assert_eq!(
                (exhausted.budget.as_str(), exhausted.used, exhausted.limit),
                ("recovery_attempts", 2, 2)
            );
        }
        room.sound(&done.run).await;
    }
}

/// A run whose worker was lost while this call was under way.
async fn lost_in_flight(room: &Room, effect: Effect, log: &Log, door: &Door) -> Arc<Graph<Trail>> {
    let (calls, gone) = (log.clone(), door.clone());
    let graph = one("lost", move |ctx: Ctx, trail: Trail| {
        let (calls, door) = (calls.clone(), gone.clone());
        async move {
            let out = ctx
                .activity("c")
                .effect(effect)
                .run("in", |call| {
                    calls.add(format!("{} {}", call.attempt, call.idempotency_key));
                    door.answers("out")
                })
                .await?;
            Ok((pushed(trail, text(&out)), Directive::end()))
        }
    });
    room.lose_at(door, &graph).await;
    door.open();
    graph
}

#[tokio::test(start_paused = true)]
async fn a_lost_worker_leaves_what_its_call_allows() {
    for (effect, status, made) in [
        (Effect::ReadOnly, Status::Succeeded, 2),
        (Effect::Idempotent, Status::Succeeded, 2),
        (Effect::Unsafe, Status::Ambiguous, 1),
    ] {
        let (room, log, door) = (Room::new(), Log::new(), Door::new());
        let graph = lost_in_flight(&room, effect, &log, &door).await;
        let result = room.work(&room.runner(&graph)).await.unwrap().unwrap();
        assert_eq!((result.status, log.len()), (status, made), "{effect}");
        let record = room.activity(&result.run, "c").await;
        let told: Vec<_> = record
            .attempts
            .iter()
            .map(|a| (a.n, a.class, a.recovery))
            .collect();
        match effect {
            Effect::ReadOnly => {
                assert_eq!(told, [(1, AttemptClass::Completed, false)], "no intent, no trace")
            }
            Effect::Idempotent => {
                assert_eq!(
                    told,
                    [
                        (1, AttemptClass::Abandoned, false),
                        (2, AttemptClass::Completed, true)
                    ]
                );
                assert_eq!(log.all(), ["1 r/only/1/c", "2 r/only/1/c"]);
            }
            Effect::Unsafe => assert_eq!(told, [(1, AttemptClass::Abandoned, false)]),
        }
        room.sound(&result.run).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_outcome_that_was_committed_before_the_worker_was_lost_is_replayed() {
    let (room, log) = (Room::new(), Log::new());
    let (calls, door) = (log.clone(), Door::new());
    let gone = door.clone();
    let graph = one("committed", move |ctx: Ctx, trail: Trail| {
        let (calls, door) = (calls.clone(), gone.clone());
        async move {
            let out = call(&ctx, "c", Effect::Unsafe, &calls).await?;
            door.pass().await;
            Ok((pushed(trail, out), Directive::end()))
        }
    });
    let worker = running(&room.runner(&graph));
    door.reached(1).await;
    // The node goes on working: what it has is committed meanwhile.
    eventually(|| async { room.activity(&run_id("r"), "c").await.state == ActivityState::Completed }).await;
    room.lose(worker);
    door.open();
    let result = room.work(&room.runner(&graph)).await.unwrap().unwrap();
    assert_eq!((result.status, log.len()), (Status::Succeeded, 1));
    room.sound(&result.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_probe_finds_the_effect_or_leaves_it_unknown() {
    let (room, log) = (Room::new(), Log::new());
    let (runner, run, record) = ambiguous(&room, &log).await;
    let operator = runner.operator();
    let before = room.load(&run.run).await;
    let asked = Log::new();
    let told = asked.clone();
    let absent = operator
        .reconcile(&run.run, &record.id, move |record| async move {
            told.add(record.key.as_str());
            None
        })
        .await
        .unwrap();
    assert_eq!((absent, asked.all()), (Reconciled::Absent, vec!["c".to_owned()]));
    assert_eq!(
        room.load(&run.run).await.head,
        before.head,
        "no evidence changes nothing"
    );
    let found = operator
        .reconcile(&run.run, &record.id, |_| async { Some(Bytes::from("found")) })
        .await
        .unwrap();
    let Reconciled::Found(token) = found else {
        panic!("{found:?}")
    };
    assert_eq!(token, room.token(&run.run).await);
    let settled = room.activity(&run.run, "c").await;
    assert_eq!(
        (settled.state, settled.origin),
        (ActivityState::Completed, Some(Origin::Reconciled))
    );
    assert_eq!(settled.attempts, record.attempts);
    refused(
        operator.reconcile(&run.run, &record.id, |_| async { None }).await,
        "activity_conflict",
    );
    let other = activity_id(&run.run, "only", 1, "other");
    refused(
        operator.reconcile(&run.run, &other, |_| async { None }).await,
        "activity_not_found",
    );
    refused(
        operator.reconcile(&run_id("x"), &other, |_| async { None }).await,
        "run_not_found",
    );
    let done = room.work(&runner).await.unwrap().unwrap();
    assert_eq!(
        (done.status, done.state, log.len()),
        (Status::Succeeded, vec!["found".to_owned()], 1)
    );
    room.sound(&run.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_comes_too_late_changes_nothing() {
    let (room, log) = (Room::new(), Log::new());
    let (runner, run, record) = ambiguous(&room, &log).await;
    let (aside, token, resolved) = (
        room.aside(),
        run.token.clone(),
        resolution("d", &record, complete("first")),
    );
    let operator = runner.operator();
    let late = operator.reconcile(&run.run, &record.id, |_| async move {
        aside.resolve(&token, &resolved, None, false).await.unwrap();
        Some(Bytes::from("second"))
    });
    refused(late.await, "activity_conflict");
    let settled = room.activity(&run.run, "c").await;
    assert_eq!(text(settled.output.unwrap().bytes()), "first");
    room.sound(&run.run).await;
}

#[tokio::test(start_paused = true)]
async fn recovery_asks_a_declared_probe_by_itself() {
    for (evidence, status) in [(Some("proved"), Status::Succeeded), (None, Status::Ambiguous)] {
        let (room, log) = (Room::new(), Log::new());
        let calls = log.clone();
        let graph = one("probing", move |ctx: Ctx, trail: Trail| {
            let (calls, probes) = (calls.clone(), calls.clone());
            async move {
                let unsafe_call = ctx
                    .activity("c")
                    .reconcile(move |record| async move {
                        probes.add(format!("probe {}", record.attempts.len()));
                        tokio::task::yield_now().await;
                        evidence.map(Bytes::from)
                    })
                    .run("in", |_| {
                        calls.add("made");
                        async { Err(CallError::Unknown) }
                    });
                // A pause beside it must not park the run while the probe is asked.
                let (out, _) = join(unsafe_call, call(&ctx, "other", Effect::ReadOnly, &calls)).await;
                Ok((pushed(trail, text(&out?)), Directive::end()))
            }
        });
        let result = within(room.runner(&graph).start(Start::new(Trail::new())))
            .await
            .unwrap();
        assert_eq!(result.status, status);
        assert_eq!(
            log.all(),
            ["other", "made", "probe 1"],
            "a read does not wait for an intent"
        );
        let record = room.activity(&result.run, "c").await;
        match evidence {
            Some(_) => assert_eq!(record.origin, Some(Origin::Reconciled)),
            None => assert_eq!(record.state, ActivityState::Unknown),
        }
        room.sound(&result.run).await;
    }
}
