//! Ordered steps: the flow of seed 002. Each step is one activation of the graph, so a crash or a failure leaves the run at the
//! step it happened in and completed steps are not repeated (D44 to D47).

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use serde_json::value::RawValue;

use crate::graph::{Await, Directive, GraphBuilder, NoEffect, Node, NodeError, NodeResult};
use crate::patterns::data::Opaque;
use crate::patterns::{Data, State};
use crate::payload::Payload;
use crate::record::{Backoff, Effect, RetryPolicy, WaitLabels};
use crate::runner::{Call, CallError, Ctx};

/// The key of the one activity of a step made by `call`.
pub const CALL: &str = "call";

/// What a step does. Async functions `(Ctx, State) -> Result<State, NodeError>` are step functions.
///
/// The data of the returned state is what the next step gets. As a node's code, it may run again after an uncommitted step
/// (D117): effects outside go through `call` or `Ctx::activity`.
pub trait StepFn: Send + Sync + 'static {
    fn run(&self, ctx: Ctx, state: State) -> BoxFuture<'static, Result<State, NodeError>>;
}

impl<F, Fut> StepFn for F
where
    F: Fn(Ctx, State) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<State, NodeError>> + Send + 'static,
{
    fn run(&self, ctx: Ctx, state: State) -> BoxFuture<'static, Result<State, NodeError>> {
        Box::pin(self(ctx, state))
    }
}

/// When a step is tried again (D48).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Retry {
    /// As the flow says.
    #[default]
    Inherit,
    /// Never.
    None,
    Policy(RetryPolicy),
}

/// So many attempts in all, with the same pause before each but the first.
pub fn attempts(max_attempts: u32, pause: Duration) -> RetryPolicy {
    RetryPolicy {
        label: "attempts".to_owned(),
        max_attempts,
        backoff: Backoff::Fixed,
        initial: pause,
        max: pause,
        multiplier_permille: 1000,
        jitter_permille: 0,
    }
}

type Ask = Box<dyn Fn(&Ctx, &State) -> Result<Await, NodeError> + Send + Sync>;
type Accepts = Box<dyn Fn(&Data, &Payload) -> bool + Send + Sync>;

struct Waits {
    on_timeout: String,
    label: String,
    accepts: Accepts,
}

/// One step of a flow: a name, what it does, and when that is tried again (D36).
pub struct Step {
    name: String,
    node: Box<dyn Node<Data, NoEffect>>,
    retry: Retry,
    ends: bool,
    waits: Option<Waits>,
}

impl Step {
    /// A step. The name is unique within the flow (D12).
    pub fn new(name: &str, run: impl StepFn) -> Self {
        Self {
            name: name.to_owned(),
            node: Box::new(Act(run)),
            retry: Retry::Inherit,
            ends: false,
            waits: None,
        }
    }

    /// A step that waits for an event (D53): what is delivered becomes its data, and the next step goes on with it. The timer, when
    /// `ask` sets a deadline, leads to the step `on_timeout` with the data as it was. A step must follow.
    pub fn wait(
        name: &str,
        on_timeout: &str,
        ask: impl Fn(&Ctx, &State) -> Result<Await, NodeError> + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.to_owned(),
            node: Box::new(Pause(Box::new(ask))),
            retry: Retry::Inherit,
            ends: false,
            waits: Some(Waits {
                on_timeout: on_timeout.to_owned(),
                label: "any".to_owned(),
                accepts: Box::new(|_, _| true),
            }),
        }
    }

    /// Which deliveries a waiting step takes; others are recorded and change nothing (D169). Pure. The label is stored with the
    /// wait: another rule needs another label. Read after `wait` only.
    #[must_use]
    pub fn accepts(
        mut self,
        label: &str,
        accepts: impl Fn(&Data, &Payload) -> bool + Send + Sync + 'static,
    ) -> Self {
        if let Some(waits) = &mut self.waits {
            label.clone_into(&mut waits.label);
            waits.accepts = Box::new(accepts);
        }
        self
    }

    #[must_use]
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// The flow ends after this step, though others are listed behind it.
    #[must_use]
    pub fn ends(mut self) -> Self {
        self.ends = true;
        self
    }
}

/// The steps in their order, as a graph of kind `flow` whose state is the data alone: a start's state is the input, the last
/// step's data is the output (D35), shown in the outcome when it is JSON.
///
/// `retry` is for the steps that inherit it; `None` is one attempt. Names that are empty or used twice, a last step that waits and
/// everything else that is wrong is told by `compile`.
pub fn ordered_steps(
    name: &str,
    version: u64,
    retry: Option<&RetryPolicy>,
    steps: Vec<Step>,
) -> GraphBuilder<Data> {
    let mut builder = GraphBuilder::with_codec(name, version, Opaque)
        .kind("flow")
        .output(shown);
    let mut names = BTreeSet::new();
    let mut unique = Vec::with_capacity(steps.len());
    for step in steps {
        if names.insert(step.name.clone()) {
            unique.push(step);
        } else {
            // Without a route of its own: `compile` finds the name.
            builder = builder.node(&step.name, Any(step.node));
        }
    }
    let next: Vec<String> = unique.iter().skip(1).map(|step| step.name.clone()).collect();
    for (n, step) in unique.into_iter().enumerate() {
        let next = next.get(n).filter(|_| !step.ends);
        builder = builder.node(&step.name, Any(step.node));
        builder = match (step.waits, next) {
            (None, Some(next)) => builder.edge(&step.name, next),
            (None, None) => builder.terminal(&step.name),
            (Some(waits), Some(next)) => {
                let labels = WaitLabels {
                    matcher: waits.label,
                    payload: "bytes".to_owned(),
                    continuation: "data".to_owned(),
                };
                builder.wait_route(
                    &step.name,
                    labels,
                    next,
                    &waits.on_timeout,
                    waits.accepts,
                    |_, payload| Ok(Data::from(payload.bytes().clone())),
                )
            }
            // No route: `compile` says so.
            (Some(_), None) => builder,
        };
        let policy = match step.retry {
            Retry::Inherit => retry.cloned(),
            Retry::None => None,
            Retry::Policy(policy) => Some(policy),
        };
        if let Some(policy) = policy {
            builder = builder.retry(&step.name, policy);
        }
    }
    builder
}

/// The data when it is JSON, else null.
fn shown(data: &Data) -> Result<Box<RawValue>, String> {
    serde_json::from_slice(data.bytes())
        .or_else(|_| RawValue::from_string("null".to_owned()))
        .map_err(|e| e.to_string())
}

/// A step that is one call outside: the data is its input, its output the data that follows. It is an activity of the step: a
/// completed call is not dispatched again, and every attempt carries the key `<run>/<step>/<activation>/call` (D55, D57). The
/// step's retry is the call's (D24).
pub fn call<F, Fut>(implementation: &str, effect: Effect, dispatch: F) -> impl StepFn
where
    F: Fn(Call) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Bytes, CallError>> + Send + 'static,
{
    let implementation = implementation.to_owned();
    let dispatch = Arc::new(dispatch);
    move |ctx: Ctx, mut state: State| {
        let dispatch = Arc::clone(&dispatch);
        let activity = ctx.activity(CALL).implementation(&implementation).effect(effect);
        async move {
            let input = state.data().bytes().clone();
            let output = activity.run(input, |call| dispatch(call)).await?;
            state.replace(output);
            Ok(state)
        }
    }
}

struct Act<F>(F);

impl<F: StepFn> Node<Data, NoEffect> for Act<F> {
    fn run(&self, ctx: Ctx, data: Data) -> BoxFuture<'static, NodeResult<Data, NoEffect>> {
        let state = State::at(ctx.node().as_str(), data);
        let step = self.0.run(ctx, state);
        Box::pin(async move { Ok((step.await?.into_data(), Directive::completed())) })
    }
}

struct Pause(Ask);

impl Node<Data, NoEffect> for Pause {
    fn run(&self, ctx: Ctx, data: Data) -> BoxFuture<'static, NodeResult<Data, NoEffect>> {
        let state = State::at(ctx.node().as_str(), data);
        let asked = (self.0)(&ctx, &state);
        Box::pin(async move { Ok((state.into_data(), Directive::wait(asked?))) })
    }
}

/// Any of them.
struct Any(Box<dyn Node<Data, NoEffect>>);

impl Node<Data, NoEffect> for Any {
    fn run(&self, ctx: Ctx, data: Data) -> BoxFuture<'static, NodeResult<Data, NoEffect>> {
        self.0.run(ctx, data)
    }
}
