//! What a node says and what the graph makes of it: retries, routes, ends, effects, budgets, limits (section P).

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{Directive, Graph, GraphBuilder, NodeError};
use iop_durable::record::{Reason, Status, StepStatus, WaitingKind};
use iop_durable::runner::{BudgetRefused, Ctx, Resume, Start};
use iop_durable::store::Store;
use support::*;

const MINUTE: Duration = Duration::from_secs(60);

fn shared<S, E>(builder: GraphBuilder<S, E>) -> Arc<Graph<S, E>>
where
    S: Send + Sync + 'static,
    E: Send + 'static,
{
    Arc::new(builder.compile().unwrap())
}

#[tokio::test]
async fn retries_are_counted_before_each_attempt_and_exhaust_the_run() {
    let (room, seen) = (Room::new(), Log::new());
    let (log, memory) = (seen.clone(), room.memory.clone());
    let graph = shared(
        graph("retry")
            .budget("calls", 10)
            .node("again", move |ctx: Ctx, trail: Trail| {
                let (log, memory) = (log.clone(), memory.clone());
                async move {
                    ctx.use_budget("calls", 1)?;
                    let stored = memory.load(ctx.run()).await.unwrap().head.attempt;
                    log.add(format!(
                        "{} of stored {stored}, {} before",
                        ctx.attempt(),
                        trail.len()
                    ));
                    Ok((pushed(trail, "tried"), Directive::retry(3)))
                }
            })
            .terminal("again"),
    );
    let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(
        seen.all(),
        [
            "1 of stored 1, 0 before",
            "2 of stored 2, 0 before",
            "3 of stored 3, 0 before"
        ],
        "each attempt has the state the step was entered with"
    );
    assert_eq!(
        (done.status, done.reason()),
        (Status::Exhausted, Some(Reason::Budget))
    );
    let exhausted = done.outcome.as_ref().unwrap().exhausted.clone().unwrap();
    assert_eq!(
        (exhausted.budget.as_str(), exhausted.used, exhausted.limit),
        ("retry:again", 3, 3)
    );
    assert_eq!(done.state, Trail::new(), "no attempt was committed");
    assert_eq!(done.budgets["calls"].used, 0, "nor what it drew");
    let steps = room.steps(&done.run).await;
    assert_eq!(steps.len(), 1);
    assert_eq!((steps[0].status, steps[0].attempts), (StepStatus::Exhausted, 3));
    room.sound(&done.run).await;
    refused(
        room.runner(&graph).resume(&done.token, Resume::new()).await,
        "run_terminal",
    );
}

#[tokio::test]
async fn one_attempt_is_no_budget_that_runs_out() {
    let room = Room::new();
    for max in [0, 1] {
        let graph = shared(
            graph("once")
                .node("once", move |_: Ctx, trail: Trail| async move {
                    Ok((trail, Directive::retry(max)))
                })
                .terminal("once"),
        );
        let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
        assert_eq!(
            (done.status, done.reason()),
            (Status::Failed, Some(Reason::Error))
        );
        room.sound(&done.run).await;
    }
}

#[tokio::test]
async fn a_retry_route_takes_over_with_the_last_attempts_state() {
    let room = Room::new();
    let graph = shared(
        graph("fallback")
            .budget("calls", 10)
            .node("again", |ctx: Ctx, trail: Trail| async move {
                ctx.use_budget("calls", 1)?;
                Ok((
                    pushed(trail, format!("attempt {}", ctx.attempt())),
                    Directive::retry(2),
                ))
            })
            .node("other", |ctx: Ctx, trail: Trail| async move {
                assert_eq!((ctx.activation(), ctx.attempt()), (2, 1));
                Ok((pushed(trail, "other"), Directive::end()))
            })
            .terminal("again")
            .terminal("other")
            .retry_route("again", "other"),
    );
    let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(done.status, Status::Succeeded);
    assert_eq!(done.state, ["attempt 2", "other"]);
    assert_eq!(done.budgets["calls"].used, 1, "what the committed attempt drew");
    let steps = room.steps(&done.run).await;
    let told: Vec<_> = steps
        .iter()
        .map(|s| (s.node.as_str(), s.status, s.attempts))
        .collect();
    assert_eq!(
        told,
        [
            ("again", StepStatus::Exhausted, 2),
            ("other", StepStatus::Done, 1)
        ]
    );
    room.sound(&done.run).await;
}

fn failing(error: Failure, attempts: u32, log: &Log) -> Arc<Graph<Trail>> {
    let log = log.clone();
    shared(
        graph("failing")
            .retry("fails", policy(attempts, MINUTE))
            .node("fails", move |ctx: Ctx, trail: Trail| {
                log.add(format!("attempt {}", ctx.attempt()));
                let error = error.clone();
                async move {
                    let _ = &trail;
                    Err(error.into())
                }
            })
            .node("saved", |_: Ctx, trail: Trail| async move {
                Ok((pushed(trail, "saved"), Directive::end()))
            })
            .terminal("fails")
            .terminal("saved")
            .resume_target("saved"),
    )
}

#[tokio::test]
async fn a_step_retry_parks_until_its_time_and_no_earlier() {
    let (room, log) = (Room::new(), Log::new());
    let graph = failing(down(), 3, &log);
    let mut last = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    for attempt in 2..=3 {
        assert_eq!(last.status, Status::Waiting);
        assert_eq!(waits_for(&last), [(WaitingKind::Retry, String::new())]);
        let loaded = room.load(&last.run).await;
        assert_eq!(
            (loaded.head.attempt, loaded.lease),
            (attempt, None),
            "counted and let go"
        );
        room.sound(&last.run).await;
        // Early: by the timer, by hand, after a restart.
        room.clock.advance(MINUTE - Duration::from_secs(1));
        let fresh = room.runner(&graph);
        assert!(room.work(&fresh).await.is_none());
        refused(fresh.resume(&last.token, Resume::new()).await, "run_waiting");
        assert_eq!(log.len() as u32, attempt - 1);
        room.clock
            .advance(Duration::from_secs(1) + Duration::from_millis(100));
        last = room.work(&fresh).await.unwrap().unwrap();
        assert_eq!(log.len() as u32, attempt);
    }
    assert_eq!(last.status, Status::Exhausted);
    let outcome = last.outcome.as_ref().unwrap();
    let exhausted = outcome.exhausted.as_ref().unwrap();
    assert_eq!(
        (exhausted.budget.as_str(), exhausted.used, exhausted.limit),
        ("retry:fails", 3, 3)
    );
    assert_eq!(
        outcome.error.as_ref().unwrap().failure,
        down(),
        "the last word is kept"
    );
    room.sound(&last.run).await;
    assert_eq!(
        room.names(&last.run)
            .await
            .iter()
            .filter(|n| *n == "run.step.started")
            .count(),
        3,
        "each attempt is told"
    );
}

#[tokio::test]
async fn what_is_not_retryable_or_has_one_attempt_fails() {
    let (room, log) = (Room::new(), Log::new());
    let once = room
        .runner(&failing(down(), 1, &log))
        .start(Start::new(Trail::new()))
        .await
        .unwrap();
    assert_eq!(
        (once.status, once.reason()),
        (Status::Failed, Some(Reason::Error))
    );
    assert!(once.outcome.as_ref().unwrap().exhausted.is_none());
    let hard = room
        .runner(&failing(broken(), 5, &log))
        .start(Start::new(Trail::new()))
        .await
        .unwrap();
    assert_eq!(
        (hard.status, code(&hard).as_str()),
        (Status::Failed, "tool_error")
    );
    assert_eq!(log.all(), ["attempt 1", "attempt 1"]);
    room.sound(&once.run).await;
    room.sound(&hard.run).await;
}

#[tokio::test]
async fn an_exhausted_step_policy_takes_the_retry_route() {
    let (room, log) = (Room::new(), Log::new());
    let seen = log.clone();
    let graph = shared(
        graph("rerouted")
            .retry("fails", policy(2, MINUTE))
            .retry_route("fails", "saved")
            .node("fails", move |_: Ctx, _: Trail| {
                seen.add("tried");
                async { Err(down().into()) }
            })
            .node("saved", |_: Ctx, trail: Trail| async move {
                Ok((pushed(trail, "saved"), Directive::end()))
            })
            .terminal("fails")
            .terminal("saved"),
    );
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(vec!["start".to_owned()])).await.unwrap();
    room.clock.advance(MINUTE * 2);
    let done = room.drain(&runner).await.unwrap();
    assert_eq!((done.status, log.len()), (Status::Succeeded, 2));
    assert_eq!(done.state, ["start", "saved"], "a failed attempt leaves no state");
    let steps = room.steps(&parked.run).await;
    assert_eq!(steps[0].status, StepStatus::Exhausted);
    assert_eq!(steps[0].error, Some(down()));
    room.sound(&parked.run).await;
}

#[tokio::test]
async fn a_panic_anywhere_in_the_hosts_code_fails_the_run_and_nothing_else() {
    type Build = fn(GraphBuilder<Trail>) -> GraphBuilder<Trail>;
    let fine = |_: Ctx, trail: Trail| async move { Ok((pushed(trail, "ran"), Directive::completed())) };
    let table: [(&str, Build, bool); 5] = [
        ("reducer", |b| b.reducer(|_, _| panic!("reducer")), true),
        ("invariant", |b| b.invariant(|_| panic!("invariant")), true),
        ("output", |b| b.output(|_| panic!("output")), true),
        (
            "sync",
            |b| {
                b.node("last", |_: Ctx, _: Trail| -> std::future::Ready<Answer> {
                    panic!("before there is a future")
                })
                .edge("only", "last")
            },
            false,
        ),
        (
            "async",
            |b| {
                b.node("last", |_: Ctx, _: Trail| async move {
                    tokio::task::yield_now().await;
                    panic!("inside");
                })
                .edge("only", "last")
            },
            false,
        ),
    ];
    let room = Room::new();
    for (what, build, first) in table {
        let mut builder = build(graph(what).node("only", fine));
        builder = builder.terminal(if first { "only" } else { "last" });
        let done = room
            .runner(&shared(builder))
            .start(Start::new(Trail::new()))
            .await
            .unwrap();
        assert_eq!(done.status, Status::Failed, "{what}");
        let error = done.outcome.as_ref().unwrap().error.clone().unwrap();
        assert_eq!(error.failure.kind, FailureKind::Internal, "{what}");
        assert_eq!(
            done.state.len(),
            usize::from(!first),
            "{what}: nothing of the step is saved"
        );
        if what != "output" {
            assert_eq!(error.failure.code, "panic", "{what}");
        }
        room.sound(&done.run).await;
    }
    let routed = shared(
        graph("route")
            .node("only", fine)
            .conditional_edge("only", &["only"], |_| panic!("route")),
    );
    let done = room
        .runner(&routed)
        .start(Start::new(Trail::new()))
        .await
        .unwrap();
    assert_eq!((done.status, code(&done).as_str()), (Status::Failed, "panic"));
    // The process lives.
    let calm = shared(graph("calm").node("only", fine).terminal("only"));
    let done = room.runner(&calm).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(done.status, Status::Succeeded);
}

#[tokio::test]
async fn the_reducer_merges_and_the_invariant_is_asked_after_every_step() {
    let room = Room::new();
    let graph = shared(
        graph("merge")
            .reducer(|base: &Trail, update: Trail| {
                let mut all = base.clone();
                all.extend(update);
                all
            })
            .invariant(|trail: &Trail| {
                if trail.len() > 3 {
                    return Err("more than three".to_owned());
                }
                Ok(())
            })
            .node("add", |_: Ctx, _: Trail| async move {
                Ok((vec!["x".to_owned()], Directive::completed()))
            })
            .edge("add", "add"),
    );
    let done = room
        .runner(&graph)
        .start(Start::new(vec!["a".to_owned()]))
        .await
        .unwrap();
    assert_eq!(done.status, Status::Failed);
    let error = done.outcome.as_ref().unwrap().error.clone().unwrap();
    assert_eq!(
        (error.failure.kind, error.failure.code.as_str()),
        (FailureKind::Verification, "invariant_violated")
    );
    assert_eq!(done.state, ["a", "x", "x"], "the violating step saved nothing");
    room.sound(&done.run).await;
}

#[tokio::test]
async fn only_declared_targets_are_gone_to() {
    let room = Room::new();
    let end = |_: Ctx, trail: Trail| async move { Ok((trail, Directive::end())) };
    let choose = |_: Ctx, trail: Trail| async move { Ok((pushed(trail, "chose"), Directive::completed())) };
    for (chosen, status) in [
        ("b", Status::Succeeded),
        ("c", Status::Failed),
        ("a", Status::Failed),
        ("", Status::Failed),
    ] {
        let graph = shared(
            graph("routes")
                .node("a", choose)
                .node("b", end)
                .node("c", end)
                .conditional_edge("a", &["b"], move |_| Ok(chosen.to_owned()))
                .terminal("b")
                .terminal("c")
                .resume_target("c"),
        );
        let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
        assert_eq!(done.status, status, "{chosen}");
        if status == Status::Failed {
            assert_eq!(code(&done), "route_invalid");
            assert_eq!(done.state, Trail::new());
        }
        room.sound(&done.run).await;
    }
    let graph = shared(
        graph("routes")
            .node("a", choose)
            .node("b", end)
            .conditional_edge("a", &["b"], |_| Err(NodeError::Failed(broken())))
            .terminal("b"),
    );
    let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(
        (done.status, code(&done).as_str()),
        (Status::Failed, "tool_error")
    );
}

fn counting(steps: u64, ran: &Arc<AtomicU32>) -> Arc<Graph<Trail>> {
    let ran = Arc::clone(ran);
    shared(
        graph("counting")
            .max_steps(steps)
            .node("count", move |_: Ctx, trail: Trail| {
                ran.fetch_add(1, Ordering::SeqCst);
                async move {
                    let directive = match trail.first().map(String::as_str) {
                        Some("pause") if trail.len() == 2 => Directive::suspend("halfway"),
                        Some(_) | None if trail.len() == 4 => Directive::end(),
                        Some(_) | None => Directive::completed(),
                    };
                    Ok((pushed(trail, "x"), directive))
                }
            })
            .edge("count", "count"),
    )
}

#[tokio::test]
async fn the_last_allowed_step_may_succeed_and_the_next_is_not_run() {
    let room = Room::new();
    // From one word to five: four steps.
    for (limit, status, calls) in [
        (4, Status::Succeeded, 4),
        (3, Status::Exhausted, 3),
        (1, Status::Exhausted, 1),
    ] {
        let ran = Arc::new(AtomicU32::new(0));
        let graph = counting(limit, &ran);
        let done = room
            .runner(&graph)
            .start(Start::new(vec!["go".to_owned()]))
            .await
            .unwrap();
        assert_eq!(
            (done.status, ran.load(Ordering::SeqCst)),
            (status, calls),
            "limit {limit}"
        );
        if status == Status::Exhausted {
            let exhausted = done.outcome.as_ref().unwrap().exhausted.clone().unwrap();
            assert_eq!(
                (exhausted.budget.as_str(), exhausted.used, exhausted.limit),
                ("steps", limit, limit)
            );
        }
        room.sound(&done.run).await;
    }
    // Counted per segment: a suspension begins anew.
    let ran = Arc::new(AtomicU32::new(0));
    let graph = counting(2, &ran);
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(vec!["pause".to_owned()])).await.unwrap();
    assert_eq!(parked.status, Status::Waiting);
    let done = runner.resume(&parked.token, Resume::new()).await.unwrap();
    assert_eq!((done.status, ran.load(Ordering::SeqCst)), (Status::Succeeded, 4));
}

fn drawing() -> Arc<Graph<Trail>> {
    shared(
        graph("drawing")
            .budget("tokens", 100)
            .node("draw", |ctx: Ctx, trail: Trail| async move {
                let amount: u64 = trail.last().unwrap().parse().unwrap();
                let name = if amount == 7 { "coins" } else { "tokens" };
                ctx.use_budget(name, amount)?;
                assert_eq!(ctx.budget("coins"), None);
                Ok((trail, Directive::suspend("drawn")))
            })
            .terminal("draw"),
    )
}

#[tokio::test]
async fn budgets_last_over_resumes_and_are_never_overdrawn() {
    let room = Room::new();
    let runner = room.runner(&drawing());
    let next = |amount: u64| Resume::new().overlay(move |trail: Trail| Ok(pushed(trail, amount.to_string())));
    let mut result = runner.start(Start::new(vec!["60".to_owned()])).await.unwrap();
    assert_eq!(result.budgets["tokens"].used, 60);
    result = room
        .runner(&drawing())
        .resume(&result.token, next(40))
        .await
        .unwrap();
    assert_eq!(
        (result.status, result.budgets["tokens"].used),
        (Status::Waiting, 100)
    );
    result = runner.resume(&result.token, next(1)).await.unwrap();
    assert_eq!(result.status, Status::Exhausted);
    let exhausted = result.outcome.as_ref().unwrap().exhausted.clone().unwrap();
    assert_eq!(
        (exhausted.budget.as_str(), exhausted.used, exhausted.limit),
        ("tokens", 100, 100)
    );
    assert_eq!(result.budgets["tokens"].used, 100, "a refusal draws nothing");
    room.sound(&result.run).await;

    let huge = runner
        .start(Start::new(vec![u64::MAX.to_string()]))
        .await
        .unwrap();
    assert_eq!((huge.status, huge.budgets["tokens"].used), (Status::Exhausted, 0));
    let unknown = runner.start(Start::new(vec!["7".to_owned()])).await.unwrap();
    assert_eq!(
        (unknown.status, code(&unknown).as_str()),
        (Status::Failed, "budget_invalid")
    );

    // Limits of one run, and one for a budget nobody declared.
    let mut start = Start::new(vec!["60".to_owned()]).run(run_id("small"));
    start.budgets = BTreeMap::from([("tokens".to_owned(), 59)]);
    assert_eq!(runner.start(start).await.unwrap().status, Status::Exhausted);
    let mut start = Start::new(vec!["60".to_owned()]).run(run_id("none"));
    start.budgets = BTreeMap::from([("coins".to_owned(), 59)]);
    refused(runner.start(start.clone()).await, "budget_invalid");
    refused(runner.accept(start).await, "budget_invalid");
    refused(runner.result(&run_id("none")).await, "run_not_found");
}

#[tokio::test]
async fn a_refused_draw_can_be_handled_and_changes_nothing() {
    let room = Room::new();
    let graph = shared(
        graph("handled")
            .budget("tokens", 10)
            .node("draw", |ctx: Ctx, trail: Trail| async move {
                ctx.use_budget("tokens", 10)?;
                let refused = ctx.use_budget("tokens", 1).unwrap_err();
                assert!(matches!(refused, BudgetRefused::Exhausted(ref e) if e.used == 10 && e.limit == 10));
                let refused = ctx.use_budget("Tokens", 1).unwrap_err();
                assert_eq!(refused, BudgetRefused::Undeclared("Tokens".to_owned()));
                assert_eq!(ctx.budget("tokens").unwrap().used, 10);
                Ok((trail, Directive::end()))
            })
            .terminal("draw"),
    );
    let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(
        (done.status, done.budgets["tokens"].used),
        (Status::Succeeded, 10)
    );
}

#[tokio::test]
async fn a_suspension_may_name_where_it_goes_on() {
    let room = Room::new();
    for (target, status) in [
        ("b", Status::Waiting),
        ("nowhere", Status::Failed),
        ("", Status::Failed),
    ] {
        let graph = shared(
            graph("resume at")
                .node("a", move |_: Ctx, trail: Trail| async move {
                    Ok((pushed(trail, "a"), Directive::suspend("to b").resume_at(target)))
                })
                .node("b", |_: Ctx, trail: Trail| async move {
                    Ok((pushed(trail, "b"), Directive::end()))
                })
                .terminal("a")
                .terminal("b")
                .resume_target("b"),
        );
        let parked = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
        assert_eq!(parked.status, status, "{target}");
        room.sound(&parked.run).await;
        if status == Status::Failed {
            assert_eq!(code(&parked), "invalid_resume_target");
            continue;
        }
        let head = room.load(&parked.run).await.head;
        assert_eq!(head.cursor.unwrap().as_str(), "b", "saved with the pause");
        assert_eq!(head.waiting.unwrap().on[0].node.as_str(), "b");
        let done = room
            .runner(&graph)
            .resume(&parked.token, Resume::new())
            .await
            .unwrap();
        assert_eq!(
            (done.status, done.state),
            (Status::Succeeded, vec!["a".to_owned(), "b".to_owned()])
        );
        room.sound(&parked.run).await;
    }
}

#[tokio::test]
async fn a_failing_node_keeps_its_state_and_its_words() {
    let room = Room::new();
    let graph = shared(
        graph("fails")
            .node("a", |_: Ctx, trail: Trail| async move {
                Ok((
                    pushed(trail, "half"),
                    Directive::fail(broken()).result("half of it"),
                ))
            })
            .terminal("a"),
    );
    let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(
        (done.status, done.state),
        (Status::Failed, vec!["half".to_owned()])
    );
    let outcome = done.outcome.unwrap();
    assert!(!outcome.resumable());
    let error = outcome.error.unwrap();
    assert_eq!(
        (error.failure, error.step.as_deref(), error.attempt),
        (broken(), Some("a"), 1)
    );
    let steps = room.steps(&done.run).await;
    assert_eq!(
        (steps[0].status, steps[0].error.clone()),
        (StepStatus::Failed, Some(broken()))
    );
    assert_eq!(steps[0].result.as_deref(), Some("half of it"));
    room.sound(&done.run).await;
}

#[tokio::test]
async fn a_node_knows_where_it_is_and_bindings_stay_in_the_process() {
    struct Pool(&'static str);
    let room = Room::new();
    let graph = shared(
        graph("context")
            .node("a", |ctx: Ctx, trail: Trail| async move {
                let pool = ctx.binding::<Pool>().unwrap();
                assert!(ctx.binding::<u8>().is_none());
                let place = format!(
                    "{} {} {} {}",
                    ctx.node(),
                    ctx.activation(),
                    ctx.attempt(),
                    ctx.life()
                );
                Ok((
                    pushed(trail, format!("{place} {} {}", pool.0, ctx.metadata()["who"])),
                    Directive::end(),
                ))
            })
            .terminal("a"),
    );
    let mut options = Room::options();
    options.bindings = iop_durable::runner::Bindings::default().with(Pool("secret pool"));
    let mut start = Start::new(Trail::new());
    start.metadata.insert("who".to_owned(), "ann".to_owned());
    let done = room.runner_with(&graph, options).start(start).await.unwrap();
    assert_eq!(done.state, ["a 1 1 1 secret pool ann"]);
}
