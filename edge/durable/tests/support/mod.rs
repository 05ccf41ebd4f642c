//! What the runner's tests share: a memory store with a clock that is moved by hand, a store around it that is looked at and
//! can be interfered with, and short words for what the tests do again and again.
#![allow(
    dead_code,
    unused_imports,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests: every file uses another part of it, and a broken expectation ends the test with its message"
)]

mod room;
mod spy;

use std::fmt::Debug;
use std::future::Future;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{Directive, Graph, GraphBuilder, NoEffect, Node, NodeResult};
use iop_durable::ids::{
    ActivityId, CorrelationId, DecisionId, Key, NodeName, Owner, Revision, RunId, WaitId,
};
use iop_durable::machine::activity::{Action, Resolution};
use iop_durable::machine::wait::Delivery;
use iop_durable::payload::Payload;
use iop_durable::record::{
    ActivityRecord, Backoff, Effect, EventRecord, Inbox, Outcome, RetryPolicy, Status, StepRecord,
    WaitRecord, WaitingKind,
};
use iop_durable::runner::{
    ActivityError, CallError, Ctx, DeliverOutcome, Limits, Operator, Options, RunError, RunResult, Runner,
    Start,
};
use iop_durable::store::memory::MemoryStore;
use iop_durable::store::{LeaseRequest, Loaded, Store};
use iop_durable::testing::ManualClock;
use iop_durable::time::Timestamp;
use iop_durable::token::ResumeToken;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

pub(crate) use room::Room;
pub(crate) use spy::{Op, Spy};

/// The state of most tests: what happened, in order.
pub(crate) type Trail = Vec<String>;
pub(crate) type Answer = NodeResult<Trail, NoEffect>;
pub(crate) type Trails = Runner<Trail, NoEffect>;
pub(crate) type Result = RunResult<Trail, NoEffect>;

/// A run under way in the background.
pub(crate) type Running = tokio::task::JoinSet<std::result::Result<Result, RunError>>;

/// How long a lease lives here.
pub(crate) const TTL: Duration = Duration::from_secs(30);

/// A graph of trails.
pub(crate) fn graph(name: &str) -> GraphBuilder<Trail> {
    GraphBuilder::new(name, 1)
}

/// A compiled graph, shared.
pub(crate) fn shared<S, E>(builder: GraphBuilder<S, E>) -> Arc<Graph<S, E>>
where
    S: Send + Sync + 'static,
    E: Send + 'static,
{
    Arc::new(builder.compile().unwrap())
}

/// A graph of this one node.
pub(crate) fn one(name: &str, node: impl Node<Trail, NoEffect>) -> Arc<Graph<Trail>> {
    shared(graph(name).node("only", node).terminal("only"))
}

/// A node that ends the run.
pub(crate) async fn ends(_: Ctx, trail: Trail) -> Answer {
    Ok((trail, Directive::end()))
}

/// A node that ends the run once its gate is answered.
pub(crate) async fn gated(ctx: Ctx, trail: Trail) -> Answer {
    ctx.gate("g").wait().await?;
    Ok((trail, Directive::end()))
}

/// Counts calls and keeps what each was told.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// How many there are with this one.
    pub(crate) fn add(&self, text: impl Into<String>) -> usize {
        let mut log = self.0.lock().unwrap();
        log.push(text.into());
        log.len()
    }

    pub(crate) fn all(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    pub(crate) fn count(&self, text: &str) -> usize {
        self.0.lock().unwrap().iter().filter(|t| *t == text).count()
    }
}

/// A door that stays open once it was opened, and tells when somebody stands before it.
#[derive(Clone, Default)]
pub(crate) struct Door(Arc<(AtomicU32, Notify, std::sync::atomic::AtomicBool, Notify)>);

impl Door {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn open(&self) {
        self.0.2.store(true, Ordering::SeqCst);
        self.0.3.notify_waiters();
    }

    /// Says that it came here and waits until the door is open.
    pub(crate) async fn pass(&self) {
        self.0.0.fetch_add(1, Ordering::SeqCst);
        self.0.1.notify_waiters();
        loop {
            let opened = self.0.3.notified();
            tokio::pin!(opened);
            opened.as_mut().enable();
            if self.0.2.load(Ordering::SeqCst) {
                return;
            }
            opened.await;
        }
    }

    /// What a call answers once the door is open.
    pub(crate) fn answers(
        &self,
        output: &'static str,
    ) -> impl Future<Output = std::result::Result<Bytes, CallError>> + Send + use<> {
        let door = self.clone();
        async move {
            door.pass().await;
            Ok(Bytes::from(output))
        }
    }

    /// Returns when so many have come.
    pub(crate) async fn reached(&self, count: u32) {
        let come = async {
            loop {
                let came = self.0.1.notified();
                tokio::pin!(came);
                came.as_mut().enable();
                if self.0.0.load(Ordering::SeqCst) >= count {
                    return;
                }
                came.await;
            }
        };
        within(come).await;
    }
}

/// The answer, or a failed test after a minute of the runtime's time.
#[track_caller]
pub(crate) fn within<T>(future: impl Future<Output = T>) -> impl Future<Output = T> {
    let place = std::panic::Location::caller();
    async move {
        match tokio::time::timeout(Duration::from_secs(60), future).await {
            Ok(value) => value,
            Err(_) => panic!("nothing happened within a minute, at {place}"),
        }
    }
}

/// Tries until it holds, for at most a minute of the runtime's time.
pub(crate) async fn eventually<Fut: Future<Output = bool>>(mut holds: impl FnMut() -> Fut) {
    within(async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// Starts a task in the tests.
pub(crate) fn background<T: Send + 'static>(
    task: impl Future<Output = T> + Send + 'static,
) -> tokio::task::JoinSet<T> {
    let mut set = tokio::task::JoinSet::new();
    set.spawn(task);
    set
}

/// Starts a run in the background.
pub(crate) fn started(runner: &Trails, start: Start<Trail>) -> Running {
    let runner = runner.clone();
    background(async move { runner.start(start).await })
}

/// Starts the run `r` with nothing done yet, in the background.
pub(crate) fn running(runner: &Trails) -> Running {
    started(runner, Start::new(Trail::new()).run(run_id("r")))
}

/// What such a task came to.
pub(crate) async fn done<T: Send + 'static>(mut task: tokio::task::JoinSet<T>) -> T {
    within(task.join_next()).await.unwrap().unwrap()
}

pub(crate) fn run_id(text: &str) -> RunId {
    RunId::new(text).unwrap()
}

pub(crate) fn decision(text: &str) -> DecisionId {
    DecisionId::new(text).unwrap()
}

pub(crate) fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}

pub(crate) fn node(text: &str) -> NodeName {
    NodeName::new(text).unwrap()
}

pub(crate) fn wait_id(run: &RunId, at: &str, activation: u64, name: &str) -> WaitId {
    WaitId::derive(run, &node(at), activation, &key(name), 1)
}

pub(crate) fn activity_id(run: &RunId, at: &str, activation: u64, name: &str) -> ActivityId {
    ActivityId::derive(run, &node(at), activation, &key(name))
}

/// A delivery to this wait.
pub(crate) fn delivery(id: &str, wait: &WaitRecord, payload: &str) -> Delivery {
    Delivery {
        id: decision(id),
        correlation: wait.correlation.clone(),
        generation: None,
        labels: None,
        payload: Payload::new(payload.to_owned()),
        by: Some("tester".to_owned()),
        revision: Revision::FIRST,
    }
}

/// Delivers this to the wait.
pub(crate) async fn deliver<S, E>(
    runner: &Runner<S, E>,
    wait: &WaitRecord,
    id: &str,
    payload: &str,
) -> std::result::Result<DeliverOutcome, RunError>
where
    S: Send + Sync + 'static,
    E: Serialize + DeserializeOwned + Send + Sync + 'static,
{
    let delivery = delivery(id, wait, payload);
    runner.deliver(&wait.run, &wait.id, &delivery).await
}

/// Delivers this to the gate.
pub(crate) async fn deliver_to_gate(
    operator: &Operator,
    gate: &WaitRecord,
    id: &str,
    payload: &str,
) -> std::result::Result<DeliverOutcome, RunError> {
    let delivery = delivery(id, gate, payload);
    operator.deliver_to_gate(&gate.run, &gate.id, &delivery).await
}

pub(crate) fn correlation(text: &str) -> CorrelationId {
    CorrelationId::new(text).unwrap()
}

/// A decision about this activity as it stands.
pub(crate) fn resolution(id: &str, activity: &ActivityRecord, action: Action) -> Resolution {
    Resolution {
        id: activity.id.clone(),
        action,
        decision: decision(id),
        input_digest: *activity.input.digest(),
        implementation: activity.implementation.clone(),
        attempt: activity.attempts.last().map_or(0, |a| a.n),
        reason: "looked it up".to_owned(),
        evidence: "ticket 7".to_owned(),
    }
}

pub(crate) fn complete(output: &str) -> Action {
    Action::Complete {
        output: Payload::new(output.to_owned()),
    }
}

/// So many attempts with a fixed pause and no jitter.
pub(crate) fn policy(max_attempts: u32, pause: Duration) -> RetryPolicy {
    RetryPolicy {
        label: "fixed".to_owned(),
        max_attempts,
        backoff: Backoff::Fixed,
        initial: pause,
        max: pause,
        multiplier_permille: 1000,
        jitter_permille: 0,
    }
}

pub(crate) fn down() -> Failure {
    Failure::new(FailureKind::Unavailable, "down")
}

pub(crate) fn broken() -> Failure {
    Failure::new(FailureKind::ToolError, "broken")
}

pub(crate) fn failed(failure: Failure) -> CallError {
    CallError::from(failure)
}

/// A call that answers its own key and is counted.
pub(crate) async fn call(
    ctx: &Ctx,
    name: &str,
    effect: Effect,
    log: &Log,
) -> std::result::Result<String, Failure> {
    let answered = ctx
        .activity(name)
        .effect(effect)
        .run(name.to_owned(), |call| {
            log.add(call.key.as_str());
            async move { Ok(Bytes::from(call.key.as_str().to_owned())) }
        })
        .await;
    match answered {
        Ok(bytes) => Ok(text(&bytes)),
        Err(e) => Err(e.failure),
    }
}

/// A call of which nobody knows what came of it.
pub(crate) async fn cut_off(ctx: &Ctx, name: &str) -> std::result::Result<Bytes, ActivityError> {
    let activity = ctx.activity(name);
    activity.run("", |_| async { Err(CallError::Unknown) }).await
}

pub(crate) fn text(bytes: &Bytes) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

pub(crate) fn pushed(mut trail: Trail, text: impl Into<String>) -> Trail {
    trail.push(text.into());
    trail
}

/// The error of an operation, by its code.
#[track_caller]
pub(crate) fn refused<T: Debug>(answer: std::result::Result<T, RunError>, code: &str) -> RunError {
    match answer {
        Ok(done) => panic!("expected {code}, but it was done: {done:?}"),
        Err(error) => {
            assert_eq!(error.code(), code, "{error}");
            error
        }
    }
}

/// What the run waits for, as `(kind, key)`.
pub(crate) fn waits_for(result: &Result) -> Vec<(WaitingKind, String)> {
    let waiting = result.waiting.as_ref().expect("it waits");
    waiting.on.iter().map(|on| (on.kind, on.key.clone())).collect()
}

/// The code of the failure a run ended with.
#[track_caller]
pub(crate) fn code<S, E>(result: &RunResult<S, E>) -> String {
    let outcome = result.outcome.as_ref().expect("it is over");
    outcome
        .error
        .as_ref()
        .expect("with an error")
        .failure
        .code
        .clone()
}

pub(crate) fn later(room: &Room, span: Duration) -> Timestamp {
    use iop_durable::time::Clock as _;
    room.clock.wall().plus(span)
}
