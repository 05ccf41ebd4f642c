//! Cancellation in every state of a run, by whoever holds it and by nobody (durable-api §8 "Cancel"; D15, D49, D103; S31, S39 to
//! S42). Time is the runtime's own: it stands still while anything can go on.

mod support;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join;
use iop_durable::graph::{Await, Directive, Graph};
use iop_durable::ids::RunId;
use iop_durable::machine::wait::Verdict;
use iop_durable::payload::Payload;
use iop_durable::record::{
    ActivityState, AttemptClass, DeadlinePolicy, Effect, Reason, Scope, Status, StepStatus, WaitLabels,
    WaitStatus, WaitingKind,
};
use iop_durable::runner::{CallError, CancelOutcome, Ctx, Resume, Start};
use iop_durable::store::Store;
use support::*;

const GRACE: Duration = Duration::from_secs(10);

/// A graph whose node does what the trail's first word says; `door` is what its calls stand before.
fn everything(log: &Log, door: &Door) -> Arc<Graph<Trail>> {
    let (log, door) = (log.clone(), door.clone());
    let labels = WaitLabels {
        matcher: "any".to_owned(),
        payload: "text".to_owned(),
        continuation: "on".to_owned(),
    };
    let graph = graph("everything")
        .retry("do", policy(3, Duration::from_secs(60)))
        .node("do", move |ctx: Ctx, trail: Trail| {
            let (log, door) = (log.clone(), door.clone());
            async move {
                let held = |name: &'static str, effect: Effect| {
                    let (log, door) = (log.clone(), door.clone());
                    let activity = ctx.activity(name).effect(effect);
                    async move {
                        let out = activity
                            .run("in", |call| {
                                log.add(call.key.as_str());
                                let door = door.clone();
                                async move {
                                    door.pass().await;
                                    Ok(Bytes::from("out"))
                                }
                            })
                            .await?;
                        log.add("answered");
                        Ok::<_, iop_durable::runner::ActivityError>(out)
                    }
                };
                match trail[0].as_str() {
                    "pure" => {
                        door.pass().await;
                    }
                    "read_only" => {
                        held("c", Effect::ReadOnly).await?;
                    }
                    "idempotent" => {
                        held("c", Effect::Idempotent).await?;
                    }
                    "unsafe" => {
                        held("c", Effect::Unsafe).await?;
                        // Nothing more is dispatched once the run is to end.
                        call(&ctx, "next", Effect::Unsafe, &log).await?;
                    }
                    "mixed" => {
                        let (a, b) = join(held("c", Effect::Unsafe), held("d", Effect::Idempotent)).await;
                        (a?, b?);
                    }
                    "gate" => {
                        ctx.gate("g").wait().await?;
                    }
                    "wait" => {
                        let wait = Await {
                            key: key("w"),
                            correlation: correlation("o"),
                            kind: WaitingKind::Event,
                            subject: Payload::new(""),
                            deadline: None,
                            deadline_policy: DeadlinePolicy::Hard,
                        };
                        return Ok((trail, Directive::wait(wait)));
                    }
                    "suspend" => return Ok((trail, Directive::suspend("held"))),
                    "step retry" => return Err(down().into()),
                    "call retry" => {
                        let flaky = ctx.activity("c").effect(Effect::Idempotent);
                        let flaky = flaky.retry(policy(3, Duration::from_secs(60)));
                        flaky.run("in", |_| async { Err(failed(down())) }).await?;
                    }
                    "unknown" => {
                        ctx.activity("c")
                            .run("in", |_| async { Err(CallError::Unknown) })
                            .await?;
                    }
                    other => panic!("{other}"),
                }
                Ok((pushed(trail, "done"), Directive::end()))
            }
        })
        .node("on", |_: Ctx, trail: Trail| async move {
            Ok((trail, Directive::end()))
        })
        .terminal("do")
        .terminal("on")
        .wait_route("do", labels, "on", "on", |_, _| true, |trail, _| Ok(trail))
        .compile()
        .unwrap();
    Arc::new(graph)
}

struct Stage {
    room: Room,
    log: Log,
    door: Door,
    graph: Arc<Graph<Trail>>,
    runner: Trails,
    run: RunId,
}

impl Stage {
    fn new() -> Self {
        let (room, log, door) = (Room::new(), Log::new(), Door::new());
        let graph = everything(&log, &door);
        let runner = room.runner(&graph);
        Self {
            room,
            log,
            door,
            graph,
            runner,
            run: run_id("r"),
        }
    }

    fn start(&self, what: &str) -> Start<Trail> {
        Start::new(vec![what.to_owned()]).run(self.run.clone())
    }

    async fn cancel(&self, id: &str) -> CancelOutcome {
        self.runner
            .operator()
            .cancel(&self.run, &decision(id), "enough", Some("ann"))
            .await
            .unwrap()
            .outcome
    }

    /// That the run was cancelled as asked.
    async fn cancelled(&self, result: &Result) {
        assert_eq!(
            (result.status, result.reason()),
            (Status::Cancelled, Some(Reason::Cancelled))
        );
        let cancel = result.outcome.as_ref().unwrap().cancel.clone().unwrap();
        assert_eq!(
            (cancel.by.as_deref(), cancel.reason.as_str()),
            (Some("ann"), "enough")
        );
        self.room.sound(&self.run).await;
        assert!(self.room.work(&self.runner).await.is_none());
        let token = self.room.token(&self.run).await;
        refused(self.runner.resume(&token, Resume::new()).await, "run_terminal");
        assert_eq!(
            self.cancel("another").await,
            CancelOutcome::Over(Status::Cancelled)
        );
    }

    async fn result(&self) -> Result {
        self.runner.result(&self.run).await.unwrap()
    }
}

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
                let late = stage
                    .runner
                    .deliver(&stage.run, &wait.id, &delivery("d", &wait, "yes"))
                    .await
                    .unwrap();
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
        let (runner, start) = (stage.runner.clone(), stage.start(what));
        let running = background(async move { runner.start(start).await });
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
    let (runner, start) = (stage.runner.clone(), stage.start("unsafe"));
    let running = background(async move { runner.start(start).await });
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
        let (runner, start) = (stage.runner.clone(), stage.start(what));
        let running = background(async move { runner.start(start).await });
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
    assert_eq!(stage.cancel("c").await, CancelOutcome::Done(Status::Ambiguous));
    stage.room.sound(&stage.run).await;
    assert!(
        stage.room.work(&stage.runner).await.is_none(),
        "asking resolves nothing"
    );
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
        let (runner, start) = (stage.runner.clone(), stage.start(what));
        let running = background(async move { runner.start(start).await });
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
        let (runner, start) = (stage.runner.clone(), stage.start(what));
        let running = background(async move { runner.start(start).await });
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
    let (runner, start) = (stage.runner.clone(), stage.start("unsafe"));
    let running = background(async move { runner.start(start).await });
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
    assert_eq!(
        stage
            .room
            .memory
            .decisions(&stage.run, &Scope::Cancel)
            .await
            .unwrap()
            .len(),
        2
    );
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

#[tokio::test]
async fn cancel_and_success_race_for_one_end() {
    for round in 0..400 {
        let stage = Stage::new();
        let (runner, start) = (stage.runner.clone(), stage.start("idempotent"));
        stage.door.open();
        let running = background(async move { runner.start(start).await });
        let (operator, run) = (stage.runner.operator(), stage.run.clone());
        let asking = background(async move {
            for _ in 0..round % 40 {
                tokio::task::yield_now().await;
            }
            loop {
                match operator.cancel(&run, &decision("c"), "enough", Some("ann")).await {
                    Ok(cancelled) => return cancelled.outcome,
                    Err(error) => assert_eq!(error.code(), "run_not_found"),
                }
                tokio::task::yield_now().await;
            }
        });
        let result = done(running).await.unwrap();
        match done(asking).await {
            CancelOutcome::Over(Status::Succeeded) => assert_eq!(result.status, Status::Succeeded),
            CancelOutcome::Requested
            | CancelOutcome::Done(Status::Cancelled)
            | CancelOutcome::Over(Status::Cancelled) => {
                assert_eq!(
                    result.status,
                    Status::Cancelled,
                    "round {round}: what was accepted counts"
                );
            }
            other => panic!("{other:?}"),
        }
        stage.room.sound(&stage.run).await;
    }
}

#[tokio::test]
async fn a_request_accepted_before_the_end_wins_whatever_the_end_is() {
    type Node = fn(Trail) -> Answer;
    let table: [(&str, Node); 4] = [
        ("success", |trail| Ok((trail, Directive::end()))),
        ("failure", |_| Err(broken().into())),
        ("fail", |trail| Ok((trail, Directive::fail(down())))),
        ("suspension", |trail| Ok((trail, Directive::suspend("held")))),
    ];
    for (what, end) in table {
        let (room, log) = (Room::new(), Log::new());
        let calls = log.clone();
        let graph = Arc::new(
            graph("ends")
                .node("only", move |ctx: Ctx, trail: Trail| {
                    let calls = calls.clone();
                    async move {
                        call(&ctx, "c", Effect::Unsafe, &calls).await?;
                        end(trail)
                    }
                })
                .terminal("only")
                .compile()
                .unwrap(),
        );
        let runner = room.runner(&graph);
        let aside = room.aside();
        // The intent is the first commit, the end the second.
        room.spy.before(Op::Commit, 1, || async move {
            let asked = aside
                .cancel(&run_id("r"), &decision("c"), "enough", None)
                .await
                .unwrap();
            assert_eq!(asked.outcome, CancelOutcome::Requested);
            Ok(())
        });
        let result = within(runner.start(Start::new(Trail::new()).run(run_id("r"))))
            .await
            .unwrap();
        assert!(room.spy.met());
        assert_eq!(result.status, Status::Cancelled, "{what}");
        assert_eq!(log.len(), 1, "{what}");
        // What the call answered is not lost with the end that was not.
        let record = room.activity(&run_id("r"), "c").await;
        assert_eq!(
            (record.state, record.attempts.len()),
            (ActivityState::Completed, 1),
            "{what}"
        );
        assert_eq!(result.outcome.unwrap().evidence.len(), 1);
        room.sound(&run_id("r")).await;
    }
}

#[tokio::test]
async fn a_word_that_changes_nothing_loses_nothing_either() {
    type Node = fn(Trail) -> Answer;
    let table: [(&str, Node, Status); 3] = [
        (
            "success",
            |trail| Ok((trail, Directive::end())),
            Status::Succeeded,
        ),
        ("failure", |_| Err(broken().into()), Status::Failed),
        (
            "suspension",
            |trail| Ok((trail, Directive::suspend("held"))),
            Status::Waiting,
        ),
    ];
    for (what, end, status) in table {
        let (room, log) = (Room::new(), Log::new());
        let calls = log.clone();
        let graph = Arc::new(
            graph("ends")
                .node("gated", |ctx: Ctx, trail: Trail| async move {
                    ctx.gate("g").wait().await?;
                    Ok((trail, Directive::completed()))
                })
                .node("only", move |ctx: Ctx, trail: Trail| {
                    let calls = calls.clone();
                    async move {
                        call(&ctx, "c", Effect::Unsafe, &calls).await?;
                        end(trail)
                    }
                })
                .edge("gated", "only")
                .terminal("only")
                .compile()
                .unwrap(),
        );
        let runner = room.runner(&graph);
        let parked = runner.start(Start::new(Trail::new())).await.unwrap();
        let wait = room.wait(&parked.run, "g").await;
        runner
            .deliver(&parked.run, &wait.id, &delivery("d", &wait, "yes"))
            .await
            .unwrap();
        let (aside, run) = (room.aside(), parked.run.clone());
        // Entry, the gated step, the intent; then the end meets a delivery that lost.
        room.spy.before(Op::Commit, 3, || async move {
            let lost = aside
                .deliver_to_gate(&run, &wait.id, &delivery("late", &wait, "yes"))
                .await
                .unwrap();
            assert_eq!(lost.verdict, Verdict::Superseded);
            Ok(())
        });
        let result = within(room.work(&runner)).await.unwrap().unwrap();
        assert!(room.spy.met());
        assert_eq!((result.status, log.len()), (status, 1), "{what}");
        let record = room.activity(&parked.run, "c").await;
        assert_eq!(record.state, ActivityState::Completed, "{what}");
        room.sound(&parked.run).await;
        if status == Status::Waiting {
            // The next entry finds a journal that is whole.
            let again = runner.resume(&result.token, Resume::new()).await.unwrap();
            assert_eq!(again.status, Status::Waiting);
            room.sound(&parked.run).await;
        }
    }
}

#[tokio::test]
async fn a_run_of_quick_steps_hears_a_request_between_two_of_them() {
    let (room, ran) = (Room::new(), Log::new());
    let seen = ran.clone();
    let graph: Arc<Graph<Trail>> = Arc::new(
        graph("quick")
            .node("spin", move |_: Ctx, trail: Trail| {
                seen.add("step");
                async move { Ok((trail, Directive::completed())) }
            })
            .edge("spin", "spin")
            .compile()
            .unwrap(),
    );
    let runner = room.runner(&graph);
    let aside = room.aside();
    room.spy.before(Op::Commit, 10, || async move {
        aside
            .cancel(&run_id("r"), &decision("c"), "enough", None)
            .await
            .unwrap();
        Ok(())
    });
    let result = within(runner.start(Start::new(Trail::new()).run(run_id("r"))))
        .await
        .unwrap();
    assert_eq!(result.status, Status::Cancelled);
    assert!(ran.len() < 20, "{} steps", ran.len());
    room.sound(&run_id("r")).await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_cannot_be_read_for_a_moment_cuts_nothing_off() {
    let stage = Stage::new();
    let (runner, start) = (stage.runner.clone(), stage.start("unsafe"));
    let running = background(async move { runner.start(start).await });
    stage.door.reached(1).await;
    let away = iop_durable::store::StoreError::unavailable("away");
    // The request is stored; reading it fails at first.
    for _ in 0..3 {
        stage.room.spy.answer(Op::Load, 0, away.clone());
    }
    let asked = stage
        .room
        .aside()
        .cancel(&stage.run, &decision("c"), "enough", Some("ann"))
        .await
        .unwrap();
    assert_eq!(asked.outcome, CancelOutcome::Requested);
    eventually(|| async { stage.room.spy.met() }).await;
    stage.door.open();
    let result = done(running).await.unwrap();
    stage.cancelled(&result).await;
    assert_eq!(
        stage.room.activity(&stage.run, "c").await.state,
        ActivityState::Completed
    );
}

#[tokio::test(start_paused = true)]
async fn what_has_not_left_when_the_request_comes_stays() {
    let stage = Stage::new();
    let (runner, start) = (stage.runner.clone(), stage.start("unsafe"));
    let aside = stage.room.aside();
    // The request comes while the intent is being committed.
    stage.room.spy.before(Op::Commit, 0, || async move {
        aside
            .cancel(&run_id("r"), &decision("c"), "enough", Some("ann"))
            .await
            .unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
        Ok(())
    });
    let result = within(runner.start(start)).await.unwrap();
    stage.cancelled(&result).await;
    if stage.log.len() == 0 {
        let record = stage.room.activity(&stage.run, "c").await;
        assert_eq!(record.state, ActivityState::Failed);
    } else {
        panic!("it was dispatched after the request was heard");
    }
}
