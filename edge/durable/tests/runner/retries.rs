//! Retries of calls: parked with an absolute time, never early, never reset, exhausted by their own limit (D147 to D151, D160).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join;
use iop_durable::failure::Failure;
use iop_durable::graph::{Directive, Graph};
use iop_durable::record::{ActivityState, Backoff, Effect, RetryPolicy, Status, WaitingKind};
use iop_durable::runner::{CallError, Ctx, Resume, Start};
use iop_durable::store::{RunFilter, Store};

use crate::support::*;

const MINUTE: Duration = Duration::from_secs(60);

/// A call that fails so often with this before it answers.
fn flaky(
    fails: usize,
    error: Failure,
    hint: Option<Duration>,
    policy: RetryPolicy,
    log: &Log,
) -> Arc<Graph<Trail>> {
    let log = log.clone();
    one("flaky", move |ctx: Ctx, trail: Trail| {
        let (log, error, policy) = (log.clone(), error.clone(), policy.clone());
        async move {
            let out = ctx
                .activity("c")
                .effect(Effect::Idempotent)
                .retry(policy)
                .run("in", |call| {
                    let made = log.add(format!("{} {}", call.attempt, call.idempotency_key));
                    let error = error.clone();
                    async move {
                        if made <= fails {
                            return Err(CallError::Failed {
                                failure: error,
                                retry_after: hint,
                            });
                        }
                        Ok(Bytes::from("out"))
                    }
                })
                .await?;
            Ok((pushed(trail, text(&out)), Directive::end()))
        }
    })
}

#[tokio::test(start_paused = true)]
async fn a_retry_parks_the_run_and_keeps_its_time_over_restarts() {
    let (room, log) = (Room::new(), Log::new());
    let graph = flaky(2, down(), None, policy(4, MINUTE), &log);
    let parked = room
        .runner(&graph)
        .start(Start::new(Trail::new()).run(run_id("r")))
        .await
        .unwrap();
    assert_eq!(parked.status, Status::Waiting);
    assert_eq!(waits_for(&parked), [(WaitingKind::Retry, "c".to_owned())]);
    let record = room.activity(&parked.run, "c").await;
    assert_eq!(
        (record.state, record.attempts.len()),
        (ActivityState::Prepared, 1)
    );
    let at = record.not_before.clone().unwrap().at;
    assert_eq!(parked.waiting.as_ref().unwrap().due_at, Some(at));
    assert_eq!(
        room.load(&parked.run).await.lease,
        None,
        "no lease while it waits"
    );
    room.sound(&parked.run).await;
    // Found, not started, by discovery.
    let filter = RunFilter {
        waiting_kind: Some(WaitingKind::Retry),
        due_before: Some(at.plus(Duration::from_millis(1))),
        limit: 10,
        ..RunFilter::default()
    };
    assert_eq!(room.memory.list(filter).await.unwrap().len(), 1);
    assert_eq!(room.memory.due(at, None, 10).await.unwrap().len(), 1);
    // Five restarts within the pause: nothing is dispatched, nothing is counted, the time stays.
    for _ in 0..5 {
        room.clock.advance(Duration::from_secs(11));
        let fresh = room.runner(&graph);
        assert!(room.work(&fresh).await.is_none());
        refused(fresh.resume(&parked.token, Resume::new()).await, "run_waiting");
        let again = room.activity(&parked.run, "c").await;
        assert_eq!(again, record);
    }
    assert_eq!(log.len(), 1);
    room.clock.advance(Duration::from_secs(6));
    let second = room.work(&room.runner(&graph)).await.unwrap().unwrap();
    assert_eq!((second.status, log.len()), (Status::Waiting, 2));
    room.clock.advance(MINUTE + Duration::from_secs(1));
    let done = room.work(&room.runner(&graph)).await.unwrap().unwrap();
    assert_eq!(
        (done.status, done.state),
        (Status::Succeeded, vec!["out".to_owned()])
    );
    assert_eq!(
        log.all(),
        ["1 r/only/1/c", "2 r/only/1/c", "3 r/only/1/c"],
        "one key, attempts numbered through"
    );
    // Its step took as many, and its event says so.
    assert_eq!(room.steps(&parked.run).await[0].attempts, 3);
    let events = room.events(&parked.run).await;
    let over = events.iter().find(|event| event.name == "run.step.completed");
    let over: serde_json::Value = serde_json::from_slice(&over.unwrap().data).unwrap();
    assert_eq!(over["attempt"], 3);
    room.sound(&parked.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_read_is_retried_like_any_other_call() {
    let (room, log) = (Room::new(), Log::new());
    let calls = log.clone();
    let graph = one("read", move |ctx: Ctx, trail: Trail| {
        let calls = calls.clone();
        async move {
            let read = ctx
                .activity("c")
                .effect(Effect::ReadOnly)
                .retry(policy(3, MINUTE));
            read.run("", |call| {
                calls.add(format!("{}", call.attempt));
                async move {
                    if call.attempt < 3 {
                        return Err(failed(down()));
                    }
                    Ok(Bytes::new())
                }
            })
            .await?;
            Ok((trail, Directive::end()))
        }
    });
    let mut last = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    while last.status == Status::Waiting {
        room.sound(&last.run).await;
        assert!(room.work(&room.runner(&graph)).await.is_none());
        room.clock.advance(MINUTE * 2);
        last = room.work(&room.runner(&graph)).await.unwrap().unwrap();
    }
    assert_eq!(
        (last.status, log.all().join(" ").as_str()),
        (Status::Succeeded, "1 2 3")
    );
    room.sound(&last.run).await;
}

#[tokio::test(start_paused = true)]
async fn an_early_claim_dispatches_nothing_and_puts_the_time_right() {
    let (room, log) = (Room::new(), Log::new());
    let graph = flaky(1, down(), None, policy(2, MINUTE), &log);
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    // An index that is wrong.
    let early = room.memory.now().await.unwrap();
    room.memory
        .tamper(&parked.run, iop_durable::testing::Tamper::DueAt(Some(early)));
    let result = room.work(&runner).await.unwrap().unwrap();
    assert_eq!((result.status, log.len()), (Status::Waiting, 1));
    assert_eq!(result.waiting, parked.waiting);
    assert!(room.work(&runner).await.is_none(), "the index is right again");
    room.sound(&parked.run).await;
    room.clock.advance(MINUTE * 2);
    assert_eq!(
        room.work(&runner).await.unwrap().unwrap().status,
        Status::Succeeded
    );
}

#[tokio::test(start_paused = true)]
async fn a_hint_makes_it_later_never_earlier() {
    for (hint, waits, hinted) in [
        (Some(MINUTE * 5), MINUTE * 5, true),
        (Some(Duration::from_secs(1)), MINUTE, false),
        (None, MINUTE, false),
    ] {
        let (room, log) = (Room::new(), Log::new());
        let graph = flaky(1, down(), hint, policy(2, MINUTE), &log);
        let runner = room.runner(&graph);
        let before = room.memory.now().await.unwrap();
        let parked = runner.start(Start::new(Trail::new())).await.unwrap();
        let not_before = room.activity(&parked.run, "c").await.not_before.unwrap();
        assert_eq!(not_before.hinted, hinted);
        let late = not_before.at.since(before.plus(waits));
        assert!(
            not_before.at >= before.plus(waits) && late < Duration::from_secs(1),
            "{late:?}"
        );
        room.clock.advance(waits - Duration::from_secs(1));
        assert!(room.work(&runner).await.is_none());
        room.clock.advance(Duration::from_secs(2));
        assert_eq!(
            room.work(&runner).await.unwrap().unwrap().status,
            Status::Succeeded
        );
    }
}

#[tokio::test(start_paused = true)]
async fn jitter_is_sampled_once() {
    let (room, log) = (Room::new(), Log::new());
    let mut jittered = policy(3, MINUTE);
    jittered.backoff = Backoff::Exponential;
    jittered.multiplier_permille = 2000;
    jittered.max = MINUTE * 10;
    jittered.jitter_permille = 500;
    let graph = flaky(2, down(), None, jittered, &log);
    let before = room.memory.now().await.unwrap();
    let parked = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    let at = room.activity(&parked.run, "c").await.not_before.unwrap().at;
    assert!(at >= before.plus(MINUTE / 2) && at <= before.plus(MINUTE + Duration::from_secs(1)));
    for _ in 0..5 {
        // Opened by another worker that finds nothing to do.
        room.memory
            .tamper(&parked.run, iop_durable::testing::Tamper::DueAt(Some(before)));
        room.work(&room.runner(&graph)).await.unwrap().unwrap();
        assert_eq!(room.activity(&parked.run, "c").await.not_before.unwrap().at, at);
    }
}

#[tokio::test(start_paused = true)]
async fn the_limit_exhausts_and_what_is_not_retryable_fails_at_once() {
    let (room, log) = (Room::new(), Log::new());
    let graph = flaky(9, down(), None, policy(3, MINUTE), &log);
    let runner = room.runner(&graph);
    let mut last = runner.start(Start::new(Trail::new())).await.unwrap();
    while last.status == Status::Waiting {
        room.clock.advance(MINUTE * 2);
        last = room.work(&room.runner(&graph)).await.unwrap().unwrap();
    }
    assert_eq!((last.status, log.len()), (Status::Exhausted, 3));
    let outcome = last.outcome.as_ref().unwrap();
    let exhausted = outcome.exhausted.as_ref().unwrap();
    assert_eq!(
        (exhausted.budget.as_str(), exhausted.used, exhausted.limit),
        ("retry:only", 3, 3)
    );
    assert_eq!(outcome.error.as_ref().unwrap().failure, down());
    refused(runner.resume(&last.token, Resume::new()).await, "run_terminal");
    room.sound(&last.run).await;

    let log = Log::new();
    let done = room
        .runner(&flaky(9, broken(), None, policy(3, MINUTE), &log))
        .start(Start::new(Trail::new()))
        .await;
    let done = done.unwrap();
    assert_eq!((done.status, log.len()), (Status::Failed, 1));
    room.sound(&done.run).await;

    // One attempt is no limit that runs out; the failure can be resumed and then makes another attempt.
    let log = Log::new();
    let graph = flaky(1, down(), None, policy(1, MINUTE), &log);
    let runner = room.runner(&graph);
    let failed = runner.start(Start::new(Trail::new())).await.unwrap();
    assert_eq!((failed.status, log.len()), (Status::Failed, 1));
    let done = runner.resume(&failed.token, Resume::new()).await.unwrap();
    assert_eq!((done.status, done.life, log.len()), (Status::Succeeded, 2, 2));
    room.sound(&done.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_policy_that_cannot_be_kept_is_refused_before_anything_is_dispatched() {
    let (room, log) = (Room::new(), Log::new());
    let bad = |change: fn(&mut RetryPolicy)| {
        let mut policy = policy(2, MINUTE);
        change(&mut policy);
        policy
    };
    let table = [
        (Effect::Unsafe, policy(2, MINUTE)),
        (Effect::Idempotent, policy(0, MINUTE)),
        (Effect::Idempotent, bad(|p| p.label = String::new())),
        (Effect::Idempotent, bad(|p| p.label = "a\0".to_owned())),
        (Effect::Idempotent, bad(|p| p.jitter_permille = 1001)),
        (Effect::Idempotent, bad(|p| p.initial = MINUTE * 2)),
    ];
    for (effect, policy) in table {
        let calls = log.clone();
        let graph = one("policies", move |ctx: Ctx, trail: Trail| {
            let (calls, policy) = (calls.clone(), policy.clone());
            async move {
                ctx.activity("c")
                    .effect(effect)
                    .retry(policy)
                    .run("", |_| {
                        calls.add("made");
                        async { Ok(Bytes::new()) }
                    })
                    .await?;
                Ok((trail, Directive::end()))
            }
        });
        let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
        assert_eq!((done.status, log.len()), (Status::Failed, 0));
        assert_eq!(code(&done), "configuration");
        assert!(room.activities(&done.run).await.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_sibling_is_not_asked_again_while_one_is_retried() {
    let (room, log) = (Room::new(), Log::new());
    let calls = log.clone();
    let graph = one("siblings", move |ctx: Ctx, trail: Trail| {
        let calls = calls.clone();
        async move {
            let flaky = ctx
                .activity("flaky")
                .effect(Effect::Idempotent)
                .retry(policy(2, MINUTE))
                .run("", |call| {
                    calls.add(format!("flaky {}", call.attempt));
                    async move {
                        if call.attempt == 1 {
                            return Err(failed(down()));
                        }
                        Ok(Bytes::new())
                    }
                });
            let (a, b) = join(flaky, call(&ctx, "steady", Effect::Unsafe, &calls)).await;
            a?;
            Ok((pushed(trail, b?), Directive::end()))
        }
    });
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(waits_for(&parked), [(WaitingKind::Retry, "flaky".to_owned())]);
    assert_eq!(
        room.activity(&parked.run, "steady").await.state,
        ActivityState::Completed
    );
    room.sound(&parked.run).await;
    room.clock.advance(MINUTE * 2);
    let done = room.work(&room.runner(&graph)).await.unwrap().unwrap();
    assert_eq!(done.status, Status::Succeeded);
    assert_eq!(log.all(), ["flaky 1", "steady", "flaky 2"]);
    room.sound(&done.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_step_retry_does_not_make_a_call_again_that_failed_for_good() {
    let (room, log) = (Room::new(), Log::new());
    let calls = log.clone();
    let graph = shared(
        graph("for good")
            .retry("only", policy(3, MINUTE))
            .node("only", move |ctx: Ctx, trail: Trail| {
                let calls = calls.clone();
                async move {
                    let hard = ctx.activity("hard").run("", |_| {
                        calls.add("hard");
                        async { Err(failed(broken())) }
                    });
                    assert_eq!(hard.await.unwrap_err().failure, broken());
                    let soft = ctx.activity("soft").run("", |call| {
                        calls.add(format!("soft {}", call.attempt));
                        async move {
                            if call.attempt < 3 {
                                return Err(failed(down()));
                            }
                            Ok(Bytes::new())
                        }
                    });
                    soft.await?;
                    Ok((trail, Directive::end()))
                }
            })
            .terminal("only"),
    );
    let runner = room.runner(&graph);
    let mut last = runner.start(Start::new(Trail::new())).await.unwrap();
    while last.status == Status::Waiting {
        room.clock.advance(MINUTE * 2);
        last = room.work(&runner).await.unwrap().unwrap();
    }
    assert_eq!(last.status, Status::Succeeded);
    assert_eq!(
        log.all(),
        ["hard", "soft 1", "soft 2", "soft 3"],
        "a retryable failure is made again with its step"
    );
    room.sound(&last.run).await;
}
