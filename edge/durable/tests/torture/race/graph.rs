//! A graph in which everything can race: two calls at once, a gate and a wait with deadlines, a call that is tried again.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join;
use iop_durable::graph::{Await, Deadline, Directive, Graph, GraphBuilder, NodeResult};
use iop_durable::ids::{CorrelationId, Key};
use iop_durable::payload::Payload;
use iop_durable::record::{DeadlinePolicy, Effect, WaitingKind};
use iop_durable::runner::{Answer, Ctx};

use super::super::graph::{State, call, call_once, labels, policy, world};

/// How long the gate and the wait are open.
const PATIENCE: Duration = Duration::from_secs(3);
/// What the wait does not take.
pub const UNWANTED: &str = "not yet";

async fn work(ctx: Ctx, mut state: State) -> NodeResult<State, String> {
    let (put, send) = join(
        call(&ctx, "put", Effect::Idempotent, "in"),
        call_once(&ctx, "send", "in"),
    )
    .await;
    put?;
    send?;
    state.trail.push("work".to_owned());
    Ok((state, Directive::completed()))
}

async fn ask(ctx: Ctx, mut state: State) -> NodeResult<State, String> {
    let gate = ctx.gate("ask");
    let gate = match ctx.metadata().get("patient") {
        // No timer comes to the help of a wake-up that is lost.
        Some(_) => gate,
        None => gate.deadline(Deadline::In(PATIENCE)),
    };
    let answer = gate.wait().await?;
    state.trail.push(match answer {
        Answer::Delivered(bytes) => format!("asked: {}", String::from_utf8_lossy(&bytes)),
        Answer::TimedOut => "asked in vain".to_owned(),
    });
    Ok((state, Directive::completed()))
}

async fn hear(ctx: Ctx, mut state: State) -> NodeResult<State, String> {
    state.trail.push("hear".to_owned());
    let wait = Await {
        key: Key::new("hear").unwrap(),
        correlation: CorrelationId::new(&format!("news of {}", ctx.run())).unwrap(),
        kind: WaitingKind::Event,
        subject: Payload::new(""),
        deadline: Some(Deadline::In(PATIENCE)),
        deadline_policy: DeadlinePolicy::FirstCommitted,
    };
    Ok((state, Directive::wait(wait)))
}

async fn after(ctx: Ctx, mut state: State) -> NodeResult<State, String> {
    let world = world(&ctx);
    ctx.activity("flaky")
        .effect(Effect::Idempotent)
        .retry(policy(3))
        .run("in", |call| {
            let world = Arc::clone(&world);
            async move { world.serve_failing(&call, Effect::Idempotent, 1).await }
        })
        .await?;
    state.trail.push("after".to_owned());
    Ok((state, Directive::end()))
}

pub fn race() -> Graph<State, String> {
    GraphBuilder::<State, String>::new("race", 1)
        .node("work", work)
        .node("ask", ask)
        .node("hear", hear)
        .node("missed", |_: Ctx, mut state: State| async move {
            state.trail.push("missed".to_owned());
            Ok((state, Directive::completed()))
        })
        .node("after", after)
        .edge("work", "ask")
        .edge("ask", "hear")
        .edge("missed", "after")
        .wait_route(
            "hear",
            labels(),
            "after",
            "missed",
            |_, payload| payload.bytes() != UNWANTED.as_bytes(),
            |mut state, payload| {
                let text = String::from_utf8_lossy(payload.bytes());
                state.trail.push(format!("heard: {text}"));
                Ok(state)
            },
        )
        .terminal("after")
        .recovery_attempts(1000)
        .compile()
        .unwrap()
}
