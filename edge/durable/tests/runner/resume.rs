//! Resuming: the token, overlays, targets, metadata, budgets, and what two resumes do to each other (D91 to D104).

use std::sync::Arc;

use iop_durable::graph::{Directive, Graph};
use iop_durable::record::{Status, WaitingKind};
use iop_durable::runner::{Ctx, Resume, ResumeDecision, ResumePlan, RunError, Runner, Start};
use iop_durable::token::ResumeToken;

use crate::support::*;

/// `wait_user` suspends once; `router` goes where the trail says.
fn conversation(log: &Log) -> Arc<Graph<Trail>> {
    let (wait, route, output) = (log.clone(), log.clone(), log.clone());
    shared(
        graph("conversation")
            .budget("tokens", 100)
            .node("wait_user", move |_: Ctx, trail: Trail| {
                wait.add("wait_user");
                async move {
                    if trail.iter().any(|t| t == "asked") {
                        Ok((trail, Directive::completed()))
                    } else {
                        Ok((pushed(trail, "asked"), Directive::suspend("input please")))
                    }
                }
            })
            .node("router", move |ctx: Ctx, trail: Trail| {
                route.add(format!(
                    "router {}",
                    ctx.metadata().get("who").cloned().unwrap_or_default()
                ));
                async move { Ok((trail, Directive::completed())) }
            })
            .node("output", move |_: Ctx, trail: Trail| {
                output.add("output");
                async move { Ok((pushed(trail, "shown"), Directive::end())) }
            })
            .edge("wait_user", "output")
            .edge("router", "output")
            .terminal("output")
            .resume_target("router"),
    )
}

#[tokio::test(start_paused = true)]
async fn a_suspension_is_stored_with_its_place_and_resumed_there() {
    let (room, log) = (Room::new(), Log::new());
    let graph = conversation(&log);
    let parked = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(parked.status, Status::Waiting);
    assert_eq!(waits_for(&parked), [(WaitingKind::Resume, String::new())]);
    let head = room.load(&parked.run).await.head;
    assert_eq!(head.waiting.as_ref().unwrap().reason, "input please");
    assert_eq!(head.cursor.unwrap().as_str(), "wait_user");
    assert_eq!(parked.state, ["asked"]);
    room.sound(&parked.run).await;
    // A worker finds nothing to do about it.
    assert!(room.work(&room.runner(&graph)).await.is_none());
    // Another process goes on.
    let done = room
        .runner(&graph)
        .resume(&parked.token, Resume::new())
        .await
        .unwrap();
    assert_eq!((done.status, done.life), (Status::Succeeded, 1));
    assert_eq!(done.state, ["asked", "shown"]);
    assert_eq!(log.all(), ["wait_user", "wait_user", "output"]);
    room.sound(&parked.run).await;
    assert_eq!(
        room.names(&parked.run).await,
        [
            "run.created",
            "run.started",
            "run.step.started",
            "run.step.completed",
            "run.waiting",
            "run.resumed",
            "run.step.started",
            "run.step.completed",
            "run.step.started",
            "run.step.completed",
            "run.succeeded"
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn an_overlay_with_a_target_moves_the_run_before_anything_runs() {
    let (room, log) = (Room::new(), Log::new());
    let runner = room.runner(&conversation(&log));
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let resume = Resume::new()
        .overlay(|trail: Trail| Ok(pushed(trail, "route x")))
        .metadata("who", "ann")
        .budget_used("tokens", 40)
        .target(|trail: &Trail, current| {
            // After the overlay, with the pointer that was saved.
            assert_eq!(trail, &["asked", "route x"]);
            assert_eq!(current.as_str(), "wait_user");
            ResumePlan::To("router".to_owned())
        });
    let done = runner.resume(&parked.token, resume).await.unwrap();
    assert_eq!(done.status, Status::Succeeded);
    assert_eq!(done.state, ["asked", "route x", "shown"]);
    assert_eq!(done.budgets["tokens"].used, 40);
    assert_eq!(log.all(), ["wait_user", "router ann", "output"]);
    let head = room.load(&done.run).await.head;
    assert_eq!(head.metadata["who"], "ann");
    room.sound(&done.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_target_is_looked_up_before_anything_is_applied() {
    let (room, log) = (Room::new(), Log::new());
    let runner = room.runner(&conversation(&log));
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let before = room.load(&parked.run).await;
    for name in ["nowhere", "", "Router"] {
        let resume = Resume::new()
            .overlay(|trail: Trail| Ok(pushed(trail, "lost")))
            .metadata("who", "bob")
            .budget_used("tokens", 1)
            .target(move |_, _| ResumePlan::To(name.to_owned()));
        refused(
            runner.resume(&parked.token, resume).await,
            "invalid_resume_target",
        );
    }
    let too_much = Resume::new().metadata("who", "bob").budget_used("tokens", 101);
    refused(runner.resume(&parked.token, too_much).await, "budget_invalid");
    let undeclared = Resume::new().metadata("who", "bob").budget_used("calls", 1);
    refused(runner.resume(&parked.token, undeclared).await, "budget_invalid");
    let bad = Resume::new()
        .metadata("who", "bob")
        .overlay(|_: Trail| Err("not a patch".to_owned()));
    let error = refused(runner.resume(&parked.token, bad).await, "invalid_request");
    assert!(
        matches!(
            error,
            RunError::InvalidRequest {
                field: "state_overlay",
                ..
            }
        ),
        "{error}"
    );
    let mut options = Room::options();
    options.limits.max_state = 64;
    let small = room.runner_with(&conversation(&log), options);
    let big = Resume::new().overlay(|trail: Trail| Ok(pushed(trail, "x".repeat(100))));
    refused(small.resume(&parked.token, big).await, "payload_too_large");
    // Nothing of all that was applied, and nobody is left holding the run.
    let after = room.load(&parked.run).await;
    assert_eq!((after.head, after.lease), (before.head, None));
    assert_eq!(log.all(), ["wait_user"]);
    // The same token still works.
    let limit = Resume::new().budget_used("tokens", 100);
    assert_eq!(
        runner.resume(&parked.token, limit).await.unwrap().status,
        Status::Succeeded
    );
}

#[tokio::test(start_paused = true)]
async fn a_stale_token_is_answered_with_the_current_one() {
    let (room, log) = (Room::new(), Log::new());
    let runner = room.runner(&conversation(&log));
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    for revision in [1, parked.token.revision.get() + 1] {
        let stale = ResumeToken {
            run: parked.run.clone(),
            revision: iop_durable::ids::Revision::new(revision).unwrap(),
        };
        let evaluated = runner.evaluate_resume(&stale).await.unwrap();
        assert_eq!(evaluated.decision, ResumeDecision::Stale);
        assert_eq!(evaluated.current, parked.token);
        let error = refused(runner.resume(&stale, Resume::new()).await, "stale_token");
        let RunError::StaleToken { current } = error else {
            unreachable!()
        };
        assert_eq!(current, parked.token);
        assert_eq!(log.len(), 1, "nothing ran");
    }
    let unknown = ResumeToken {
        run: run_id("nobody"),
        revision: parked.token.revision,
    };
    refused(runner.evaluate_resume(&unknown).await, "run_not_found");
    refused(runner.resume(&unknown, Resume::new()).await, "run_not_found");
    let current = runner.evaluate_resume(&parked.token).await.unwrap().current;
    assert_eq!(
        runner.resume(&current, Resume::new()).await.unwrap().status,
        Status::Succeeded
    );
}

#[tokio::test(start_paused = true)]
async fn a_success_is_answered_from_the_store_and_a_failure_keeps_its_outcome() {
    let (room, log) = (Room::new(), Log::new());
    let graph = conversation(&log);
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let done = runner.resume(&parked.token, Resume::new()).await.unwrap();
    let ran = log.len();
    room.spy.reset();
    let resume = Resume::new()
        .metadata("x", "y")
        .overlay(|_: Trail| panic!("nothing is merged into a run that is over"))
        .target(|_, _| panic!("and it is not moved"));
    let again = room.runner(&graph).resume(&done.token, resume).await.unwrap();
    assert_eq!(again.status, Status::Succeeded);
    assert_eq!(
        again.outcome.unwrap().encode().unwrap(),
        done.outcome.unwrap().encode().unwrap()
    );
    assert_eq!((again.state, again.token), (done.state, done.token));
    assert_eq!(log.len(), ran);
    assert_eq!((room.spy.count(Op::Commit), room.spy.count(Op::Acquire)), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn of_many_resumes_at_once_one_runs() {
    for round in 0..50 {
        let (room, log) = (Room::new(), Log::new());
        let graph = conversation(&log);
        let parked = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        for n in 0..8 {
            let (runner, token) = (room.runner(&graph), parked.token.clone());
            tasks.spawn(async move {
                for _ in 0..(round + n) % 5 {
                    tokio::task::yield_now().await;
                }
                runner.resume(&token, Resume::new()).await
            });
        }
        let mut won = 0;
        for answer in tasks.join_all().await {
            match answer {
                Ok(done) => {
                    assert_eq!(done.status, Status::Succeeded);
                    won += 1;
                }
                Err(error) => assert!(matches!(error.code(), "run_busy" | "stale_token"), "{error}"),
            }
        }
        assert_eq!(won, 1);
        assert_eq!(log.all(), ["wait_user", "wait_user", "output"]);
        room.sound(&parked.run).await;
    }
}

#[tokio::test(start_paused = true)]
async fn between_loading_and_acquiring_somebody_else_may_have_been_there() {
    let (room, log) = (Room::new(), Log::new());
    let graph = conversation(&log);
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let (other, token) = (room.runner(&graph), parked.token.clone());
    room.spy.before(Op::Acquire, 0, || async move {
        other.resume(&token, Resume::new()).await.unwrap();
        Ok(())
    });
    let error = refused(runner.resume(&parked.token, Resume::new()).await, "stale_token");
    let RunError::StaleToken { current } = error else {
        unreachable!()
    };
    assert_eq!(current, room.token(&parked.run).await);
    assert_eq!(log.all(), ["wait_user", "wait_user", "output"]);
    room.sound(&parked.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_run_of_another_version_is_told_apart_and_left_alone() {
    let (room, log) = (Room::new(), Log::new());
    let runner = room.runner(&conversation(&log));
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let before = room.load(&parked.run).await;
    let other = iop_durable::graph::GraphBuilder::<Trail>::new("conversation", 2)
        .node("wait_user", ends)
        .terminal("wait_user")
        .compile()
        .unwrap();
    // The same version with another shape is another definition too.
    let same = graph("conversation")
        .node("wait_user", ends)
        .terminal("wait_user")
        .compile()
        .unwrap();
    for graph in [other, same] {
        let other: Runner<Trail> = room.runner(&Arc::new(graph));
        let said = other.evaluate_resume(&parked.token).await.unwrap().decision;
        assert!(matches!(said, ResumeDecision::DefinitionChanged(_)));
        refused(
            other.resume(&parked.token, Resume::new()).await,
            "definition_changed",
        );
        refused(other.result(&parked.run).await, "definition_changed");
        let loaded = room.load(&parked.run).await;
        assert_eq!((loaded.head, loaded.lease), (before.head.clone(), None));
    }
    let done = runner.resume(&parked.token, Resume::new()).await.unwrap();
    assert_eq!(done.status, Status::Succeeded);
}
