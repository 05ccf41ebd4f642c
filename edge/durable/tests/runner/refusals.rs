//! What a resume is refused with, told before by `evaluate_resume`; and where refused and failed runs go on (D93, D94, D97, D236).

use std::sync::Arc;
use std::time::Duration;

use iop_durable::graph::{Await, Deadline, Directive, Graph};
use iop_durable::payload::Payload;
use iop_durable::record::{DeadlinePolicy, Effect, Status, WaitLabels, WaitingKind};
use iop_durable::runner::{CallError, Ctx, Resume, ResumeDecision, ResumePlan, RunError, Start};
use iop_durable::store::{LeaseRequest, Store};

use crate::support::*;

/// A graph whose first node does what the trail's first word says.
fn everything() -> Arc<Graph<Trail>> {
    let labels = WaitLabels {
        matcher: "any".to_owned(),
        payload: "text".to_owned(),
        continuation: "goes on".to_owned(),
    };
    shared(
        graph("everything")
            .retry("do", policy(3, Duration::from_mins(1)))
            .budget("calls", 1)
            .node("do", |ctx: Ctx, trail: Trail| async move {
                let what = trail[0].clone();
                if trail.len() > 1 {
                    return Ok((trail, Directive::end()));
                }
                let on = pushed(trail, "done");
                match what.as_str() {
                    "succeed" => Ok((on, Directive::end())),
                    "suspend" => Ok((on, Directive::suspend("held"))),
                    "wait" => {
                        let wait = Await {
                            key: key("w"),
                            correlation: correlation("order 7"),
                            kind: WaitingKind::Event,
                            subject: Payload::new("which"),
                            deadline: Some(Deadline::In(Duration::from_hours(1))),
                            deadline_policy: DeadlinePolicy::FirstCommitted,
                        };
                        Ok((on, Directive::wait(wait)))
                    }
                    "gate" => {
                        ctx.gate("g").wait().await?;
                        Ok((on, Directive::end()))
                    }
                    "step retry" => Err(down().into()),
                    "call retry" => {
                        ctx.activity("c")
                            .effect(Effect::Idempotent)
                            .retry(policy(2, Duration::from_mins(1)))
                            .run("in", |_| async { Err(failed(down())) })
                            .await?;
                        Ok((on, Directive::end()))
                    }
                    "unknown" => {
                        ctx.activity("c")
                            .run("in", |_| async { Err(CallError::Unknown) })
                            .await?;
                        Ok((on, Directive::end()))
                    }
                    "down" => Ok((on, Directive::fail(down()))),
                    "broken" => Ok((on, Directive::fail(broken()))),
                    "exhaust" => {
                        ctx.use_budget("calls", 2)?;
                        Ok((on, Directive::end()))
                    }
                    other => panic!("{other}"),
                }
            })
            .node("after", ends)
            .terminal("do")
            .terminal("after")
            .wait_route("do", labels, "after", "after", |_, _| true, |trail, _| Ok(trail)),
    )
}

async fn started(runner: &Trails, what: &str) -> Result {
    runner.start(Start::new(vec![what.to_owned()])).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn what_evaluate_resume_says_is_what_resume_does() {
    let room = Room::new();
    let runner = room.runner(&everything());
    let table = [
        ("succeed", "terminal", None),
        ("suspend", "ready", None),
        ("wait", "waiting", Some("run_waiting")),
        ("gate", "waiting", Some("run_waiting")),
        ("step retry", "waiting", Some("run_waiting")),
        ("call retry", "waiting", Some("run_waiting")),
        ("unknown", "ambiguous", Some("effect_ambiguous")),
        ("down", "ready", None),
        ("broken", "terminal", Some("run_terminal")),
        ("exhaust", "terminal", Some("run_terminal")),
    ];
    for (what, decision, error) in table {
        let parked = started(&runner, what).await;
        room.sound(&parked.run).await;
        let before = room.load(&parked.run).await.head;
        let evaluated = runner.evaluate_resume(&parked.token).await.unwrap();
        assert_eq!(evaluated.current, parked.token, "{what}");
        let told = match &evaluated.decision {
            ResumeDecision::Ready => "ready",
            ResumeDecision::Stale => "stale",
            ResumeDecision::Waiting(_) => "waiting",
            ResumeDecision::Ambiguous(_) => "ambiguous",
            ResumeDecision::Busy => "busy",
            ResumeDecision::Terminal(_) => "terminal",
            ResumeDecision::DefinitionChanged(_) => "changed",
        };
        assert_eq!(told, decision, "{what}");
        assert_eq!(
            room.load(&parked.run).await.head,
            before,
            "{what}: evaluating changes nothing"
        );
        let resumed = runner.resume(&parked.token, Resume::new()).await;
        match error {
            None => {
                resumed.unwrap();
            }
            Some(code) => {
                let error = refused(resumed, code);
                assert_eq!(
                    room.load(&parked.run).await.head,
                    before,
                    "{what}: refused, untouched"
                );
                match (error, evaluated.decision) {
                    (RunError::Waiting(a), ResumeDecision::Waiting(b))
                    | (RunError::Ambiguous(a), ResumeDecision::Ambiguous(b)) => {
                        assert_eq!(a, b, "{what}");
                        assert_eq!(Some(*a), parked.waiting, "{what}");
                    }
                    (RunError::Terminal { status, outcome }, ResumeDecision::Terminal(said)) => {
                        assert_eq!((status, said), (parked.status, parked.status), "{what}");
                        assert_eq!(Some(outcome), before.outcome, "{what}: the stored bytes");
                    }
                    (error, said) => panic!("{what}: {error:?} against {said:?}"),
                }
            }
        }
        room.sound(&parked.run).await;
    }
    // Held by somebody, whatever the status; also a failure somebody is about to resume.
    for what in ["suspend", "gate", "down"] {
        let parked = started(&runner, what).await;
        let request = LeaseRequest {
            owner: iop_durable::ids::Owner::new("other").unwrap(),
            ttl: TTL,
        };
        let other = room.memory.acquire(&parked.run, request).await.unwrap();
        let evaluated = runner.evaluate_resume(&parked.token).await.unwrap();
        assert_eq!(evaluated.decision, ResumeDecision::Busy, "{what}");
        refused(runner.resume(&parked.token, Resume::new()).await, "run_busy");
        room.memory.release(other.lease).await.unwrap();
    }
    let cancelled = started(&runner, "gate").await;
    let cancel = runner
        .operator()
        .cancel(&cancelled.run, &decision("c"), "enough", None)
        .await;
    cancel.unwrap();
    let token = room.token(&cancelled.run).await;
    let said = runner.evaluate_resume(&token).await.unwrap().decision;
    assert_eq!(said, ResumeDecision::Terminal(Status::Cancelled));
    refused(runner.resume(&token, Resume::new()).await, "run_terminal");
}

#[tokio::test(start_paused = true)]
async fn a_target_moves_what_waits_and_current_does_not() {
    let room = Room::new();
    let runner = room.runner(&everything());
    for what in ["wait", "gate", "step retry", "call retry"] {
        let parked = started(&runner, what).await;
        let before = room.load(&parked.run).await.head;
        let stays = Resume::new()
            .metadata("a", "b")
            .target(|_, _| ResumePlan::Current);
        refused(runner.resume(&parked.token, stays).await, "run_waiting");
        assert_eq!(room.load(&parked.run).await.head, before, "{what}");
        let goes = Resume::new().target(|_, _| ResumePlan::To("after".to_owned()));
        let moved = runner.resume(&parked.token, goes).await;
        if what == "call retry" {
            // Its call is not over: there is no going past it.
            refused(moved, "invalid_resume_target");
            assert_eq!(room.load(&parked.run).await.head, before, "{what}");
            continue;
        }
        assert_eq!(moved.unwrap().status, Status::Succeeded, "{what}");
        room.sound(&parked.run).await;
    }
    let unknown = started(&runner, "unknown").await;
    let goes = Resume::new().target(|_, _| ResumePlan::To("after".to_owned()));
    refused(runner.resume(&unknown.token, goes).await, "effect_ambiguous");
    // A suspended run may be told to stay where it is.
    let suspended = started(&runner, "suspend").await;
    let stays = Resume::new().target(|_, _| ResumePlan::Current);
    assert_eq!(
        runner.resume(&suspended.token, stays).await.unwrap().status,
        Status::Succeeded
    );
}

#[tokio::test(start_paused = true)]
async fn each_life_of_a_failing_run_has_one_end_and_its_own_number() {
    let room = Room::new();
    let runner = room.runner(&everything());
    let mut result = started(&runner, "down").await;
    assert_eq!(result.status, Status::Failed);
    assert!(result.outcome.as_ref().unwrap().resumable());
    assert_eq!(result.state, ["down", "done"], "a failing node's state is kept");
    result = runner.resume(&result.token, Resume::new()).await.unwrap();
    assert_eq!((result.status, result.life), (Status::Succeeded, 2));
    room.sound(&result.run).await;
    let events = room.events(&result.run).await;
    let lives: Vec<(u32, &str)> = events
        .iter()
        .filter(|e| e.terminal || e.name == "run.resumed")
        .map(|e| (e.life, e.name.as_ref()))
        .collect();
    assert_eq!(
        lives,
        [(1, "run.failed"), (2, "run.resumed"), (2, "run.succeeded")]
    );
}

#[tokio::test(start_paused = true)]
async fn a_pause_past_its_deadline_or_under_cancellation_ends_when_it_is_resumed() {
    let room = Room::new();
    let runner = room.runner(&everything());
    // A failure that could be resumed, but the run's time is over: the next life is its last.
    let mut start = Start::new(vec!["down".to_owned()]);
    start.deadline = Some(Deadline::In(Duration::from_hours(2)));
    let failed = runner.start(start).await.unwrap();
    assert_eq!(failed.status, Status::Failed);
    room.clock.advance(Duration::from_hours(3));
    let over = runner.resume(&failed.token, Resume::new()).await.unwrap();
    assert_eq!((over.status, over.life), (Status::Cancelled, 2));
    assert_eq!(over.reason().unwrap().as_str(), "deadline");
    room.sound(&failed.run).await;
    // Suspended for longer than the run may take.
    let mut start = Start::new(vec!["suspend".to_owned()]);
    start.deadline = Some(Deadline::In(Duration::from_hours(2)));
    let parked = runner.start(start).await.unwrap();
    room.clock.advance(Duration::from_hours(3));
    let over = runner.resume(&parked.token, Resume::new()).await.unwrap();
    assert_eq!((over.status, over.life), (Status::Cancelled, 1));
    room.sound(&parked.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_resolved_run_goes_on_only_when_it_is_resumed() {
    let room = Room::new();
    let runner = room.runner(&everything());
    let unknown = started(&runner, "unknown").await;
    let record = room.activity(&unknown.run, "c").await;
    let done = resolution("d1", &record, complete("42"));
    let resolved = runner
        .operator()
        .resolve(&unknown.token, &done, None, false)
        .await
        .unwrap();
    assert_eq!(resolved.status, Status::Waiting);
    assert!(room.work(&runner).await.is_none());
    let said = runner.evaluate_resume(&resolved.token).await.unwrap().decision;
    assert_eq!(said, ResumeDecision::Ready);
    let done = runner.resume(&resolved.token, Resume::new()).await.unwrap();
    assert_eq!(done.status, Status::Succeeded);
    room.sound(&unknown.run).await;
    // The step went on: it was not started a second time.
    let starts = room
        .names(&done.run)
        .await
        .iter()
        .filter(|n| *n == "run.step.started")
        .count();
    assert_eq!(starts, 1);
}
