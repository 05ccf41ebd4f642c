//! Limits: steps of a segment, named budgets (D251 to D253).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use iop_durable::graph::{Directive, Graph};
use iop_durable::record::{Exhausted, Reason, Status, StepStatus};
use iop_durable::runner::{BudgetRefused, Ctx, Resume, Start};

use crate::support::*;

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

#[tokio::test(start_paused = true)]
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

#[tokio::test(start_paused = true)]
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

#[tokio::test(start_paused = true)]
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

/// A step that says itself that a limit ran out leaves what it returned and drew.
#[tokio::test(start_paused = true)]
async fn a_step_may_end_its_run_exhausted_and_is_committed() {
    let room = Room::new();
    let graph: Arc<Graph<Trail>> = shared(
        graph("spending")
            .budget("tokens", 100)
            .budget("coins", 5)
            .usage(|trail: &Trail| serde_json::value::to_raw_value(&trail.len()).map_err(|e| e.to_string()))
            .node("ask", |ctx: Ctx, trail: Trail| async move {
                ctx.charge("coins", 2)?;
                let tokens = ctx.charge("tokens", 130)?;
                let exhausted = Exhausted {
                    budget: "tokens".to_owned(),
                    used: tokens.used,
                    limit: tokens.limit,
                    decimals: 0,
                };
                Ok((pushed(trail, "asked"), Directive::exhaust(exhausted)))
            })
            .terminal("ask"),
    );
    let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(
        (done.status, done.reason()),
        (Status::Exhausted, Some(Reason::Budget))
    );
    assert_eq!(done.state, ["asked"]);
    assert_eq!(
        (done.budgets["tokens"].used, done.budgets["coins"].used),
        (130, 2)
    );
    let outcome = done.outcome.as_ref().unwrap();
    assert_eq!(outcome.usage.as_ref().unwrap().get(), "1");
    let exhausted = outcome.exhausted.clone().unwrap();
    assert_eq!(
        (exhausted.budget.as_str(), exhausted.used, exhausted.limit),
        ("tokens", 130, 100)
    );
    assert_eq!(outcome.error.as_ref().unwrap().failure.code, "budget_exhausted");
    let steps = room.steps(&done.run).await;
    assert_eq!((steps.len(), steps[0].status), (1, StepStatus::Exhausted));
    room.sound(&done.run).await;
}
