//! Steps that fail: where the run stays, what is made again, and how often.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::patterns::{Data, Retry, State, Step, attempts, call};
use iop_durable::record::{Effect, Status, StepStatus, WaitingKind};
use iop_durable::runner::{CallError, Ctx, Resume, RunError, Start};

use crate::flow::*;
use crate::support::{Log, decision};

/// Fails with this kind the first `times` times.
fn failing(name: &str, log: &Log, times: usize, kind: FailureKind) -> Step {
    let log = log.clone();
    Step::new(name, move |ctx: Ctx, mut state: State| {
        let log = log.clone();
        async move {
            let seen = log.clone();
            let output = ctx
                .activity("charge")
                .effect(Effect::Idempotent)
                .run(state.data().bytes().clone(), move |call| {
                    let n = seen.add(call.idempotency_key);
                    async move {
                        if n <= times {
                            return Err(Failure::new(kind, "not this time").into());
                        }
                        Ok(call.input)
                    }
                })
                .await?;
            state.replace(output);
            Ok(state)
        }
    })
}

#[tokio::test]
async fn a_failed_step_stays_the_resume_point_and_completed_ones_are_not_repeated() {
    let (log, keys) = (Log::new(), Log::new());
    let charge = failing("charge", &keys, 1, FailureKind::Unavailable);
    let (room, runner) = flows(flow(
        None,
        vec![step("reserve", &log), charge, step("confirm", &log)],
    ));
    let failed = runner.start(Start::new(order())).await.unwrap();
    assert_eq!((failed.status, &stage(&failed)[..]), (Status::Failed, "charge"));
    assert!(failed.outcome.as_ref().unwrap().resumable());
    let kept: Order = State::of(&failed).scan().unwrap();
    assert_eq!(kept.done, ["reserve"]);
    room.sound(&failed.run).await;

    // Another process resumes it.
    let again = room.runner(&Arc::new(
        flow(
            None,
            vec![
                step("reserve", &log),
                failing("charge", &keys, 1, FailureKind::Unavailable),
                step("confirm", &log),
            ],
        )
        .compile()
        .unwrap(),
    ));
    let result = again.resume(&failed.token, Resume::new()).await.unwrap();
    assert_eq!((result.status, result.life), (Status::Succeeded, 2));
    assert_eq!(log.all(), ["reserve", "confirm"]);
    let key = format!("{}/charge/2/charge", result.run);
    assert_eq!(keys.all(), [key.clone(), key], "one key for both attempts");
    let charge = ("charge".to_owned(), StepStatus::Failed, 1);
    let retried = ("charge".to_owned(), StepStatus::Done, 2);
    let all = steps(&room, &result).await;
    assert_eq!(all.first(), Some(&done("reserve")));
    assert!(all.contains(&retried) && !all.contains(&charge), "{all:?}");
    room.sound(&result.run).await;
}

#[tokio::test]
async fn a_step_inherits_the_retry_of_its_flow_or_has_its_own_or_none() {
    let pause = Duration::from_secs(60);
    let inherited = attempts(3, pause);
    // (the step's retry, failures before it succeeds) -> (attempts, how it ends)
    let cases = [
        (Retry::Inherit, 2, 3, Status::Succeeded),
        (Retry::Inherit, 3, 3, Status::Exhausted),
        (Retry::None, 1, 1, Status::Failed),
        (Retry::Policy(attempts(2, pause)), 1, 2, Status::Succeeded),
        (Retry::Policy(attempts(2, pause)), 2, 2, Status::Exhausted),
        (Retry::Policy(attempts(1, pause)), 1, 1, Status::Failed),
    ];
    for (retry, failures, tries, status) in cases {
        let (log, keys) = (Log::new(), Log::new());
        let charge = failing("charge", &keys, failures, FailureKind::RateLimited).retry(retry.clone());
        let (room, runner) = flows(flow(Some(&inherited), vec![step("plan", &log), charge]));
        let mut result = runner.start(Start::new(order())).await.unwrap();
        for attempt in 2..=tries {
            // Parked, its worker free, until the pause is over.
            assert_eq!(result.status, Status::Waiting, "{retry:?}");
            assert_eq!(result.waiting.as_ref().unwrap().kind(), Some(WaitingKind::Retry));
            assert_eq!(stage(&result), "charge");
            assert!(room.work(&runner).await.is_none(), "not before its time");
            room.clock.advance(pause + Duration::from_secs(5));
            result = room.work(&runner).await.unwrap().unwrap();
            assert_eq!(keys.len(), attempt);
        }
        assert_eq!(result.status, status, "{retry:?} after {failures}");
        assert_eq!(log.all(), ["plan"], "the step before it ran once");
        if status == Status::Exhausted {
            let exhausted = result.outcome.as_ref().unwrap().exhausted.clone().unwrap();
            assert_eq!(
                (&exhausted.budget[..], exhausted.used, exhausted.limit),
                ("retry:charge", tries as u64, tries as u64)
            );
            assert_eq!(stage(&result), "charge");
        }
        let mut distinct = keys.all();
        distinct.dedup();
        assert_eq!(distinct, [format!("{}/charge/2/charge", result.run)]);
        room.sound(&result.run).await;
    }
}

#[tokio::test]
async fn a_failure_that_is_not_retryable_is_not_retried() {
    let keys = Log::new();
    let charge = failing("charge", &keys, 1, FailureKind::Auth);
    let (_room, runner) = flows(flow(Some(&attempts(5, Duration::from_secs(1))), vec![charge]));
    let failed = runner.start(Start::new(order())).await.unwrap();
    assert_eq!((failed.status, keys.len()), (Status::Failed, 1));
    assert!(!failed.outcome.unwrap().resumable());
}

#[tokio::test]
async fn retries_stop_when_the_run_is_cancelled() {
    let keys = Log::new();
    let charge = failing("charge", &keys, 9, FailureKind::Unavailable);
    let (room, runner) = flows(flow(Some(&attempts(5, Duration::from_secs(60))), vec![charge]));
    let parked = runner.start(Start::new(order())).await.unwrap();
    let operator = runner.operator();
    operator
        .cancel(&parked.run, &decision("c-1"), "not wanted", None)
        .await
        .unwrap();
    let over = runner.result(&parked.run).await.unwrap();
    assert_eq!((over.status, keys.len()), (Status::Cancelled, 1));
    assert_eq!(stage(&over), "");
    room.sound(&over.run).await;
}

#[tokio::test]
async fn a_flow_deletes_its_successes_only_when_told_to() {
    let (log, keys) = (Log::new(), Log::new());
    let charge = failing("charge", &keys, 1, FailureKind::Unavailable);
    let (room, runner) = flows(flow(None, vec![step("plan", &log), charge]).delete_on_success());
    let failed = runner.start(Start::new(order())).await.unwrap();
    assert_eq!(
        runner.result(&failed.run).await.unwrap().status,
        Status::Failed,
        "failures are kept"
    );
    let result = runner.resume(&failed.token, Resume::new()).await.unwrap();
    assert_eq!(result.status, Status::Succeeded);
    let gone = runner.result(&result.run).await;
    assert!(matches!(gone, Err(RunError::Deleted)), "{gone:?}");
    drop(room);
}

#[tokio::test]
async fn a_call_is_an_activity_of_its_step() {
    let keys = Log::new();
    let log = keys.clone();
    let upper = call("upper/1", Effect::Idempotent, move |call| {
        let n = log.add(call.idempotency_key.clone());
        async move {
            if n == 1 {
                return Err(CallError::Failed {
                    failure: Failure::new(FailureKind::Unavailable, "down"),
                    retry_after: None,
                });
            }
            Ok(Bytes::from(call.input.to_ascii_uppercase()))
        }
    });
    let (room, runner) = flows(flow(
        Some(&attempts(2, Duration::from_secs(1))),
        vec![Step::new("shout", upper)],
    ));
    let parked = runner.start(Start::new(Data::from("hello"))).await.unwrap();
    assert_eq!(parked.status, Status::Waiting);
    room.clock.advance(Duration::from_secs(5));
    let result = room.work(&runner).await.unwrap().unwrap();
    assert_eq!(
        (result.status, &result.state.bytes()[..]),
        (Status::Succeeded, &b"HELLO"[..])
    );
    let key = format!("{}/shout/1/call", result.run);
    assert_eq!(keys.all(), [key.clone(), key]);
    let activity = room.activity(&result.run, "call").await;
    assert_eq!(
        (&activity.implementation[..], activity.effect),
        ("upper/1", Effect::Idempotent)
    );
    assert_eq!(activity.attempts.len(), 2);
}
