//! What a node says and what the graph makes of it: retries, routes, ends, effects, budgets, limits (section P).

use iop_durable::failure::FailureKind;
use iop_durable::graph::{Directive, GraphBuilder, NodeError};
use iop_durable::record::{Status, StepStatus};
use iop_durable::runner::{Ctx, Resume, Start};

use crate::support::*;

#[tokio::test(start_paused = true)]
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
    let calm = one("calm", fine);
    let done = room.runner(&calm).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(done.status, Status::Succeeded);
}

#[tokio::test(start_paused = true)]
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

#[tokio::test(start_paused = true)]
async fn only_declared_targets_are_gone_to() {
    let room = Room::new();
    let end = ends;
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

#[tokio::test(start_paused = true)]
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

#[tokio::test(start_paused = true)]
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

#[tokio::test(start_paused = true)]
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
