//! One graph with everything: pure steps, a model turn whose answer is recorded before its tools run, three calls at once, an
//! approval before an unsafe call, a wait of the graph, a call that fails twice and is tried again, and a last call that fails
//! with its run, which is resumed.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join3;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{Await, Directive, Graph, GraphBuilder, NodeError, NodeResult};
use iop_durable::ids::{CorrelationId, Key};
use iop_durable::payload::Payload;
use iop_durable::record::{Backoff, DeadlinePolicy, Effect, RetryPolicy, WaitLabels, WaitingKind};
use iop_durable::runner::{ActivityError, Answer, Ctx};
use serde::{Deserialize, Serialize};

use super::world::World;

/// What a run carries from node to node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The nodes and deliveries that were committed, in order.
    pub trail: Vec<String>,
    /// What the services answered, by key.
    pub answers: BTreeMap<String, String>,
}

/// The nodes of `everything` in order, with the delivery between them.
pub const TRAIL: [&str; 7] = ["plan", "turn", "approve", "signal", "go", "settle", "finish"];
/// The typed effects of a whole run, in order.
pub const EFFECTS: [&str; 2] = ["turned", "finished"];
/// The calls whose answers a whole run has, each by its last try.
pub const CALLS: [&str; 7] = [
    "model", "reserve", "charge", "lookup", "deploy", "flaky", "notify",
];
/// What an operator says of an unsafe call that was never carried out; the node then makes another one, under another key.
pub const NOT_APPLIED: &str = "not_applied";
/// How often the flaky call fails; its policy tries it again.
pub const FAILURES: usize = 2;
/// What the event of the graph must say.
pub const GO: &str = "go";

/// A short pause between attempts, without jitter.
pub fn policy(max_attempts: u32) -> RetryPolicy {
    RetryPolicy {
        label: "again".to_owned(),
        max_attempts,
        backoff: Backoff::Exponential,
        initial: Duration::from_millis(5),
        max: Duration::from_millis(20),
        multiplier_permille: 2000,
        jitter_permille: 0,
    }
}

pub fn labels() -> WaitLabels {
    WaitLabels {
        matcher: "go".to_owned(),
        payload: "text".to_owned(),
        continuation: "settle-or-late".to_owned(),
    }
}

pub fn world(ctx: &Ctx) -> Arc<World> {
    Arc::clone(&ctx.binding::<Arc<World>>().unwrap())
}

/// One call of an effect that may be repeated, or of none.
pub fn call(
    ctx: &Ctx,
    key: &str,
    effect: Effect,
    input: &str,
) -> impl Future<Output = Result<Bytes, ActivityError>> + Send + use<> {
    let (ctx, key, input, world) = (ctx.clone(), key.to_owned(), input.to_owned(), world(ctx));
    async move {
        ctx.activity(&key)
            .effect(effect)
            .run(input, |call| {
                let world = Arc::clone(&world);
                async move { world.serve(&call, effect).await }
            })
            .await
    }
}

/// An unsafe call, made again under the next key when somebody made sure that it was never carried out.
pub fn call_once(
    ctx: &Ctx,
    key: &str,
    input: &str,
) -> impl Future<Output = Result<Bytes, ActivityError>> + Send + use<> {
    let (ctx, key, input) = (ctx.clone(), key.to_owned(), input.to_owned());
    async move {
        let mut n = 1;
        loop {
            match call(&ctx, &format!("{key}.{n}"), Effect::Unsafe, &input).await {
                Err(e) if e.failure.code == NOT_APPLIED => n += 1,
                answer => return answer,
            }
        }
    }
}

fn text(bytes: &Bytes) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

async fn turn(ctx: Ctx, mut state: State) -> NodeResult<State, String> {
    let answer = text(&call(&ctx, "model", Effect::ReadOnly, "ask").await?);
    ctx.use_budget("turns", 1)?;
    let (reserve, charge, lookup) = join3(
        call(&ctx, "reserve", Effect::Idempotent, &answer),
        call_once(&ctx, "charge", &answer),
        call(&ctx, "lookup", Effect::ReadOnly, &answer),
    )
    .await;
    state.trail.push("turn".to_owned());
    state.answers.insert("model".to_owned(), answer);
    for (key, answer) in [("reserve", reserve?), ("charge", charge?), ("lookup", lookup?)] {
        state.answers.insert(key.to_owned(), text(&answer));
    }
    Ok((state, Directive::completed().effect("turned".to_owned())))
}

async fn approve(ctx: Ctx, mut state: State) -> NodeResult<State, String> {
    let answer = ctx.gate("approval").subject("deploy?").wait().await?;
    if answer != Answer::Delivered(Bytes::from_static(b"yes")) {
        return Err(NodeError::Failed(Failure::new(
            FailureKind::Refused,
            format!("{answer:?}"),
        )));
    }
    let deployed = call_once(&ctx, "deploy", "eu").await?;
    state.trail.push("approve".to_owned());
    state.answers.insert("deploy".to_owned(), text(&deployed));
    Ok((state, Directive::completed()))
}

async fn signal(ctx: Ctx, mut state: State) -> NodeResult<State, String> {
    state.trail.push("signal".to_owned());
    let wait = Await {
        key: Key::new("signal").unwrap(),
        correlation: CorrelationId::new(&format!("signal of {}", ctx.run())).unwrap(),
        kind: WaitingKind::Event,
        subject: Payload::new("when may it go?"),
        deadline: None,
        deadline_policy: DeadlinePolicy::FirstCommitted,
    };
    Ok((state, Directive::wait(wait)))
}

async fn settle(ctx: Ctx, mut state: State) -> NodeResult<State, String> {
    let world = world(&ctx);
    let flaky = ctx
        .activity("flaky")
        .effect(Effect::Idempotent)
        .retry(policy(5))
        .run("again", |call| {
            let world = Arc::clone(&world);
            async move { world.serve_failing(&call, Effect::Idempotent, FAILURES).await }
        })
        .await?;
    state.trail.push("settle".to_owned());
    state.answers.insert("flaky".to_owned(), text(&flaky));
    Ok((state, Directive::completed()))
}

/// Fails once, which ends the run's first life; the second one goes on here.
async fn finish(ctx: Ctx, mut state: State) -> NodeResult<State, String> {
    let world = world(&ctx);
    let notified = ctx
        .activity("notify")
        .effect(Effect::Idempotent)
        .run("done", |call| {
            let world = Arc::clone(&world);
            async move { world.serve_failing(&call, Effect::Idempotent, 1).await }
        })
        .await?;
    state.trail.push("finish".to_owned());
    state.answers.insert("notify".to_owned(), text(&notified));
    Ok((state, Directive::end().effect("finished".to_owned())))
}

/// The graph. Runs of one name are claimed by workers of that name only.
pub fn everything(name: &str) -> Graph<State, String> {
    GraphBuilder::<State, String>::new(name, 1)
        .node("plan", |_: Ctx, mut state: State| async move {
            state.trail.push("plan".to_owned());
            Ok((state, Directive::completed()))
        })
        .node("turn", turn)
        .node("approve", approve)
        .node("signal", signal)
        .node("settle", settle)
        .node("finish", finish)
        .node("late", |_: Ctx, state: State| async move {
            Ok((state, Directive::end()))
        })
        .edge("plan", "turn")
        .edge("turn", "approve")
        .edge("approve", "signal")
        .edge("settle", "finish")
        .wait_route(
            "signal",
            labels(),
            "settle",
            "late",
            |_, payload| payload.bytes() == GO.as_bytes(),
            |mut state, payload| {
                state.trail.push(text(payload.bytes()));
                Ok(state)
            },
        )
        .terminal("finish")
        .terminal("late")
        .budget("turns", 3)
        .recovery_attempts(1000)
        .output(|state| serde_json::value::to_raw_value(state).map_err(|e| e.to_string()))
        .compile()
        .unwrap()
}
