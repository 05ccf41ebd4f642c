//! Cancellation in every state of a run, by whoever holds it and by nobody (durable-api §8 "Cancel"; D15, D49, D103; S31, S39 to
//! S42). Time is the runtime's own: it stands still while anything can go on.

use std::time::Duration;

use bytes::Bytes;
use iop_durable::machine::wait::Verdict;
use iop_durable::record::{ActivityState, AttemptClass, Scope, Status, StepStatus, WaitStatus};
use iop_durable::runner::{CancelOutcome, Resume, Start};
use iop_durable::store::Store;

use crate::stage::{GRACE, Stage};
use crate::support::*;

#[tokio::test(start_paused = true)]
async fn a_run_that_nobody_holds_is_cancelled_at_once() {
    let queued = Stage::new();
    queued.runner.accept(queued.start("pure")).await.unwrap();
    assert_eq!(queued.cancel("c").await, CancelOutcome::Done(Status::Cancelled));
    queued.cancelled(&queued.result().await).await;
    assert_eq!(queued.log.len(), 0);

    for what in ["gate", "wait", "suspend", "step retry", "call retry"] {
        let stage = Stage::new();
        let parked = stage.runner.start(stage.start(what)).await.unwrap();
        assert_eq!(parked.status, Status::Waiting, "{what}");
        assert_eq!(
            stage.cancel("c").await,
            CancelOutcome::Done(Status::Cancelled),
            "{what}"
        );
        stage.cancelled(&stage.result().await).await;
        // Late answers are recorded and change nothing.
        for wait in stage.room.memory.waits(&stage.run).await.unwrap() {
            assert_eq!(wait.status, WaitStatus::Cancelled);
            for replayed in [false, true] {
                let late = deliver(&stage.runner, &wait, "d", "yes").await.unwrap();
                assert_eq!(
                    (late.verdict, late.replayed),
                    (Verdict::Canceled, replayed),
                    "{what}"
                );
            }
        }
        if what == "call retry" {
            let record = stage.room.activity(&stage.run, "c").await;
            assert_eq!(
                (record.state, record.attempts.len()),
                (ActivityState::Failed, 1),
                "no attempt is used up"
            );
            assert_eq!(record.error, Some(down()));
        }
        stage.room.sound(&stage.run).await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_may_be_repeated_is_cut_off() {
    for what in ["pure", "read_only", "idempotent"] {
        let stage = Stage::new();
        let running = stage.running(what);
        stage.door.reached(1).await;
        let asked = tokio::time::Instant::now();
        assert_eq!(stage.cancel("c").await, CancelOutcome::Requested, "{what}");
        let result = done(running).await.unwrap();
        assert!(asked.elapsed() < Duration::from_secs(1), "{what}: at once");
        stage.cancelled(&result).await;
        assert_eq!(stage.log.count("answered"), 0, "{what}");
        let steps = stage.room.steps(&stage.run).await;
        assert_eq!(steps.last().unwrap().status, StepStatus::Cancelled);
        if what == "idempotent" {
            let record = stage.room.activity(&stage.run, "c").await;
            assert_eq!(record.attempts[0].class, AttemptClass::Abandoned);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_unsafe_call_has_its_grace() {
    // Answered within it: kept as evidence.
    let stage = Stage::new();
    let running = stage.running("unsafe");
    stage.door.reached(1).await;
    assert_eq!(stage.cancel("c").await, CancelOutcome::Requested);
    tokio::time::sleep(GRACE - Duration::from_secs(1)).await;
    assert_eq!(stage.room.status(&stage.run).await, Status::Running);
    stage.door.open();
    let result = done(running).await.unwrap();
    stage.cancelled(&result).await;
    assert_eq!(stage.log.all(), ["c", "answered"], "and nothing after it");
    let record = stage.room.activity(&stage.run, "c").await;
    assert_eq!(record.state, ActivityState::Completed);
    let evidence = &result.outcome.as_ref().unwrap().evidence;
    assert_eq!(evidence.len(), 1);
    assert!(evidence[0].get().contains(record.id.as_str()));
    assert_eq!(result.state, ["unsafe"], "its answer is no step");

    // Not answered: ambiguous until it is resolved, then cancelled.
    for what in ["unsafe", "mixed"] {
        let stage = Stage::new();
        let running = stage.running(what);
        stage.door.reached(if what == "mixed" { 2 } else { 1 }).await;
        let asked = tokio::time::Instant::now();
        assert_eq!(stage.cancel("c").await, CancelOutcome::Requested);
        let result = done(running).await.unwrap();
        assert!(asked.elapsed() >= GRACE && asked.elapsed() < GRACE + Duration::from_secs(1));
        assert_eq!(result.status, Status::Ambiguous);
        assert!(stage.room.inbox(&stage.run).await.cancel.is_some());
        stage.room.sound(&stage.run).await;
        assert!(stage.room.work(&stage.runner).await.is_none());
        refused(
            stage.runner.resume(&result.token, Resume::new()).await,
            "effect_ambiguous",
        );
        let record = stage.room.activity(&stage.run, "c").await;
        let resolved = resolution("d", &record, complete("it was"));
        let operator = stage.runner.operator();
        let resolved = operator
            .resolve(&result.token, &resolved, None, true)
            .await
            .unwrap();
        assert_eq!(resolved.status, Status::Cancelled);
        stage.cancelled(&stage.result().await).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_ambiguous_run_is_cancelled_when_it_is_resolved() {
    let stage = Stage::new();
    let run = stage.runner.start(stage.start("unknown")).await.unwrap();
    assert_eq!(run.status, Status::Ambiguous);
    let events = stage.room.events(&stage.run).await.len();
    for _ in 0..3 {
        // Asked again and again: nothing is written, and whoever resolves it has the right token.
        assert_eq!(stage.cancel("c").await, CancelOutcome::Done(Status::Ambiguous));
        assert_eq!(stage.room.token(&stage.run).await, run.token);
        assert_eq!(stage.room.load(&stage.run).await.lease, None);
    }
    stage.room.sound(&stage.run).await;
    // A worker that looks finds nothing to do.
    if let Some(looked) = stage.room.work(&stage.runner).await {
        assert_eq!(looked.unwrap().status, Status::Ambiguous);
    }
    assert!(stage.room.work(&stage.runner).await.is_none());
    assert_eq!(stage.room.events(&stage.run).await.len(), events);
    let again = stage
        .runner
        .operator()
        .cancel(&stage.run, &decision("c"), "enough", None)
        .await
        .unwrap();
    assert!(again.replayed);
    let record = stage.room.activity(&stage.run, "c").await;
    let token = stage.room.token(&stage.run).await;
    let operator = stage.runner.operator();
    let found = operator.reconcile(&stage.run, &record.id, |_| async { Some(Bytes::from("x")) });
    found.await.unwrap();
    assert_ne!(stage.room.token(&stage.run).await, token);
    stage.cancelled(&stage.result().await).await;
}

#[tokio::test(start_paused = true)]
async fn a_lost_workers_run_is_cancelled_by_whoever_comes() {
    for (what, status) in [
        ("pure", Status::Cancelled),
        ("idempotent", Status::Cancelled),
        ("unsafe", Status::Ambiguous),
    ] {
        let stage = Stage::new();
        let running = stage.running(what);
        stage.door.reached(1).await;
        drop(running);
        // While its lease lives, the request is stored and nothing more.
        assert_eq!(stage.cancel("c").await, CancelOutcome::Requested, "{what}");
        assert!(stage.room.work(&stage.runner).await.is_none());
        stage.room.clock.advance(TTL);
        let result = stage
            .room
            .work(&stage.room.runner(&stage.graph))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(result.status, status, "{what}");
        stage.room.sound(&stage.run).await;
        // Nobody comes: the one who asks later ends it himself.
        let stage = Stage::new();
        let running = stage.running(what);
        stage.door.reached(1).await;
        drop(running);
        stage.room.clock.advance(TTL);
        assert_eq!(stage.cancel("c").await, CancelOutcome::Done(status), "{what}");
        stage.room.sound(&stage.run).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_is_one_decision() {
    let stage = Stage::new();
    let running = stage.running("unsafe");
    stage.door.reached(1).await;
    let operator = stage.runner.operator();
    let first = operator
        .cancel(&stage.run, &decision("c"), "enough", Some("ann"))
        .await
        .unwrap();
    assert_eq!((first.outcome, first.replayed), (CancelOutcome::Requested, false));
    let again = operator
        .cancel(&stage.run, &decision("c"), "enough", Some("bob"))
        .await
        .unwrap();
    assert_eq!((again.outcome, again.replayed), (CancelOutcome::Requested, true));
    refused(
        operator.cancel(&stage.run, &decision("c"), "other", None).await,
        "delivery_conflict",
    );
    // Another one is recorded; the first is the one that is told.
    let other = operator
        .cancel(&stage.run, &decision("e"), "me too", Some("bob"))
        .await
        .unwrap();
    assert!(!other.replayed);
    assert_eq!(stage.room.decisions(&stage.run, &Scope::Cancel).await.len(), 2);
    stage.door.open();
    let result = done(running).await.unwrap();
    stage.cancelled(&result).await;
    let again = operator
        .cancel(&stage.run, &decision("c"), "enough", None)
        .await
        .unwrap();
    assert_eq!(
        (again.outcome, again.replayed),
        (CancelOutcome::Done(Status::Cancelled), true)
    );
    refused(
        operator
            .cancel(&run_id("nobody"), &decision("c"), "x", None)
            .await,
        "run_not_found",
    );
    // A run that is over says so.
    let over = stage
        .runner
        .start(Start::new(vec!["suspend".to_owned()]).run(run_id("s")))
        .await
        .unwrap();
    let over = stage.runner.resume(
        &over.token,
        Resume::new().target(|_, _| iop_durable::runner::ResumePlan::To("on".to_owned())),
    );
    assert_eq!(over.await.unwrap().status, Status::Succeeded);
    let late = operator
        .cancel(&run_id("s"), &decision("c"), "x", None)
        .await
        .unwrap();
    assert_eq!(
        (late.outcome, late.replayed),
        (CancelOutcome::Over(Status::Succeeded), false)
    );
    stage.room.sound(&run_id("s")).await;
}
