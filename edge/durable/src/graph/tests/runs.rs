//! Routes while a run goes: what the graph declares is what happens, and what breaks it fails the run with a word of its own.

use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::watch;
use tokio::time::Instant;

use super::*;
use crate::ids::{CorrelationId, DecisionId, Key, Owner};
use crate::machine::wait::{Delivery, Verdict};
use crate::record::{DeadlinePolicy, Reason, Status, StepStatus, WaitingKind};
use crate::runner::{Options, Resume, ResumePlan, RunError, RunResult, Runner, Start};
use crate::store::memory::MemoryStore;
use crate::store::{Claim, Store};
use crate::testing::ManualClock;

struct Bench {
    clock: Arc<ManualClock>,
    runner: Runner<u32>,
}

impl Bench {
    fn new(builder: Builder) -> Self {
        let clock = Arc::new(ManualClock::new());
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new(clock.clone()));
        Self::on(store, clock, builder)
    }

    fn on(store: Arc<dyn Store>, clock: Arc<ManualClock>, builder: Builder) -> Self {
        let graph = Arc::new(builder.compile().unwrap());
        let options = Options::new(Owner::new("test").unwrap());
        Self {
            clock,
            runner: Runner::new(graph, store, options).unwrap(),
        }
    }

    async fn start(&self) -> RunResult<u32, NoEffect> {
        self.runner.start(Start::new(0)).await.unwrap()
    }

    /// Claims the one run that is due within two seconds and runs it on.
    async fn go_on(&self) -> RunResult<u32, NoEffect> {
        self.clock.advance(Duration::from_secs(2));
        let inner = &self.runner.inner;
        let claim = Claim {
            lease: inner.keeper.request(),
            definitions: vec![(s("graph"), s("line"))],
            except: Vec::new(),
            limit: 1,
        };
        let mut claimed = inner.store.claim(claim).await.unwrap();
        let acquired = claimed.runs.pop().expect("a run is due");
        let (_keep, stop) = watch::channel(false);
        self.runner
            .run_claimed(acquired, Instant::now(), stop)
            .await
            .unwrap()
    }

    /// `(node, status, attempts)` of each step.
    async fn steps(&self, result: &RunResult<u32, NoEffect>) -> Vec<(String, StepStatus, u32)> {
        let steps = self.runner.store().steps(&result.run, 0, 100).await.unwrap();
        steps
            .into_iter()
            .map(|step| (s(step.node.as_str()), step.status, step.attempts))
            .collect()
    }
}

fn failure_of(result: &RunResult<u32, NoEffect>) -> (FailureKind, String, Option<String>) {
    let error = result.outcome.as_ref().and_then(|o| o.error.clone()).unwrap();
    (error.failure.kind, error.failure.code, error.step)
}

fn exhausted_of(result: &RunResult<u32, NoEffect>) -> (String, u64, u64) {
    let exhausted = result.outcome.as_ref().and_then(|o| o.exhausted.clone()).unwrap();
    (exhausted.budget, exhausted.used, exhausted.limit)
}

async fn add(_: Ctx, state: u32) -> NodeResult<u32, NoEffect> {
    Ok((state + 1, Directive::completed()))
}

fn branching(targets: &[&str], chosen: &'static str) -> Builder {
    GraphBuilder::new("line", 1)
        .node("a", add)
        .node("b", add)
        .terminal("b")
        .resume_target("b")
        .conditional_edge("a", targets, move |_| Ok(s(chosen)))
}

#[tokio::test]
async fn a_route_leads_to_its_declared_targets_and_nowhere_else() {
    let bench = Bench::new(branching(&["b", END], "b"));
    let done = bench.start().await;
    assert_eq!((done.status, done.state), (Status::Succeeded, 2));

    let bench = Bench::new(branching(&["b", END], END));
    let done = bench.start().await;
    assert_eq!((done.status, done.state), (Status::Succeeded, 1));
    assert_eq!(bench.steps(&done).await, [(s("a"), StepStatus::Done, 1)]);

    for (targets, chosen) in [
        (vec!["b"], "a"),
        (vec!["b"], END),
        (vec!["b", END], "x"),
        (vec!["b"], ""),
    ] {
        let bench = Bench::new(branching(&targets, chosen));
        let failed = bench.start().await;
        assert_eq!(
            (failed.status, failed.reason()),
            (Status::Failed, Some(Reason::Error))
        );
        let expected = (FailureKind::Internal, s("route_invalid"), Some(s("a")));
        assert_eq!(failure_of(&failed), expected, "{chosen}");
        assert_eq!(failed.state, 0, "nothing of the step is saved");
        assert_eq!(bench.steps(&failed).await, [(s("a"), StepStatus::Failed, 1)]);
    }
}

#[tokio::test]
async fn a_route_that_cannot_choose_fails_the_run_with_its_own_failure() {
    let builder = branching(&["b"], "b");
    let mut builder = builder;
    builder.edges.clear();
    let bench = Bench::new(builder.conditional_edge("a", &["b"], |_| {
        Err(Failure::new(FailureKind::Verification, "no way")
            .code("lost")
            .into())
    }));
    let failed = bench.start().await;
    assert_eq!(
        failure_of(&failed),
        (FailureKind::Verification, s("lost"), Some(s("a")))
    );
}

#[tokio::test]
async fn a_node_that_only_waits_lead_on_from_does_not_end_the_run_by_completing() {
    let builder = GraphBuilder::new("line", 1)
        .node("a", add)
        .node("b", add)
        .terminal("b");
    let bench = Bench::new(waits(builder, "a", labels(), "b", "b"));
    let failed = bench.start().await;
    assert_eq!(failed.status, Status::Failed);
    assert_eq!(
        failure_of(&failed),
        (FailureKind::Internal, s("route_invalid"), Some(s("a")))
    );
}

#[tokio::test]
async fn a_terminal_node_ends_the_run() {
    let bench = Bench::new(GraphBuilder::new("line", 1).node("a", add).terminal("a"));
    assert_eq!(bench.start().await.status, Status::Succeeded);
}

#[tokio::test]
async fn the_last_allowed_step_may_end_the_run_and_the_one_after_it_is_not_begun() {
    let calls = Arc::new(AtomicU32::new(0));
    let counted = |calls: &Arc<AtomicU32>| {
        let calls = Arc::clone(calls);
        GraphBuilder::new("line", 1)
            .node("a", add)
            .node("b", add)
            .node("c", move |_: Ctx, state: u32| {
                calls.fetch_add(1, Ordering::SeqCst);
                async move { Ok((state + 1, Directive::end())) }
            })
            .edge("a", "b")
            .edge("b", "c")
            .terminal("c")
    };
    let bench = Bench::new(counted(&calls).max_steps(3));
    let done = bench.start().await;
    assert_eq!((done.status, done.state), (Status::Succeeded, 3));
    assert_eq!(calls.swap(0, Ordering::SeqCst), 1);

    let bench = Bench::new(counted(&calls).max_steps(2));
    let over = bench.start().await;
    assert_eq!(
        (over.status, over.reason()),
        (Status::Exhausted, Some(Reason::Budget))
    );
    assert_eq!(exhausted_of(&over), (s("steps"), 2, 2));
    assert_eq!((over.state, calls.load(Ordering::SeqCst)), (2, 0));
}

/// `a` asks for itself up to twice, each time with another state; `b` is where it leads then.
fn retrying(max: u32) -> Builder {
    GraphBuilder::new("line", 1)
        .node("a", move |ctx: Ctx, state: u32| async move {
            assert_eq!(state, 0, "each attempt has the state the node was entered with");
            Ok((state + 10 * ctx.attempt(), Directive::retry(max)))
        })
        .node("b", add)
        .terminal("a")
        .terminal("b")
        .resume_target("b")
}

#[tokio::test]
async fn a_retry_leads_to_its_route_once_it_is_used_up() {
    let bench = Bench::new(retrying(3).retry_route("a", "b"));
    let done = bench.start().await;
    assert_eq!((done.status, done.state), (Status::Succeeded, 31));
    assert_eq!(
        bench.steps(&done).await,
        [(s("a"), StepStatus::Exhausted, 3), (s("b"), StepStatus::Done, 1)]
    );

    let bench = Bench::new(retrying(2));
    let over = bench.start().await;
    assert_eq!(exhausted_of(&over), (s("retry:a"), 2, 2));
    assert_eq!((over.status, over.state), (Status::Exhausted, 0));
}

fn failing(retryable: bool) -> Builder {
    GraphBuilder::new("line", 1)
        .node("a", move |_: Ctx, _: u32| async move {
            let failure = Failure::new(FailureKind::Unavailable, "down").retryable(retryable);
            Err::<(u32, Directive<NoEffect>), _>(failure.into())
        })
        .node("b", add)
        .terminal("a")
        .terminal("b")
        .resume_target("b")
        .retry("a", policy(2))
}

#[tokio::test]
async fn a_policy_that_is_used_up_leads_to_the_retry_route_too() {
    let bench = Bench::new(failing(true).retry_route("a", "b"));
    let parked = bench.start().await;
    assert_eq!(parked.status, Status::Waiting);
    let waiting = parked.waiting.unwrap();
    assert_eq!(
        (waiting.kind(), waiting.on[0].node.as_str()),
        (Some(WaitingKind::Retry), "a")
    );
    let done = bench.go_on().await;
    assert_eq!((done.status, done.state), (Status::Succeeded, 1));
    assert_eq!(
        bench.steps(&done).await,
        [(s("a"), StepStatus::Exhausted, 2), (s("b"), StepStatus::Done, 1)]
    );

    // Without a route the limit ends the run.
    let bench = Bench::new(failing(true));
    bench.start().await;
    let over = bench.go_on().await;
    assert_eq!(exhausted_of(&over), (s("retry:a"), 2, 2));

    // What is not retryable is no used-up retry: the route is not taken.
    let bench = Bench::new(failing(false).retry_route("a", "b"));
    let failed = bench.start().await;
    assert_eq!(failed.status, Status::Failed);
    assert_eq!(failure_of(&failed).2, Some(s("a")));
}

fn waiting_graph(seen: &Arc<AtomicU32>, labels: WaitLabels) -> Builder {
    let seen = Arc::clone(seen);
    GraphBuilder::new("line", 1)
        .node("a", |_: Ctx, state: u32| async move {
            let wait = Await {
                key: Key::new("order").unwrap(),
                correlation: CorrelationId::new("o-1").unwrap(),
                kind: WaitingKind::Event,
                subject: Payload::new(Bytes::from_static(b"paid?")),
                deadline: None,
                deadline_policy: DeadlinePolicy::FirstCommitted,
            };
            Ok((state + 1, Directive::wait(wait)))
        })
        .node("b", add)
        .node("c", add)
        .terminal("b")
        .terminal("c")
        .wait_route(
            "a",
            labels,
            "b",
            "c",
            move |_, _| {
                seen.fetch_add(1, Ordering::SeqCst);
                true
            },
            |state, payload| Ok(state + u32::try_from(payload.bytes().len()).unwrap()),
        )
}

#[tokio::test]
async fn the_labels_of_a_wait_route_are_compared_before_its_callbacks_are_called() {
    let seen = Arc::new(AtomicU32::new(0));
    let bench = Bench::new(waiting_graph(&seen, labels()));
    let parked = bench.start().await;
    assert_eq!((parked.status, parked.state), (Status::Waiting, 1));
    let wait = bench.runner.store().waits(&parked.run).await.unwrap().remove(0);
    assert_eq!(wait.labels, labels());
    let delivery = |id: &str, labels: Option<WaitLabels>| Delivery {
        id: DecisionId::new(id).unwrap(),
        correlation: CorrelationId::new("o-1").unwrap(),
        generation: None,
        labels,
        payload: Payload::new(Bytes::from_static(b"12345")),
        by: None,
        revision: parked.token.revision,
    };
    for change in [
        |l: &mut WaitLabels| l.matcher.push('2'),
        |l: &mut WaitLabels| l.payload.push('2'),
        |l: &mut WaitLabels| l.continuation.push('2'),
    ] {
        let mut other = labels();
        change(&mut other);
        let refused = bench
            .runner
            .deliver(&parked.run, &wait.id, &delivery("d-1", Some(other)))
            .await;
        assert!(
            matches!(refused, Err(RunError::DeliveryConflict(_))),
            "{refused:?}"
        );
    }
    // A graph with another label is another definition: it can neither take the delivery nor run the run.
    let mut relabelled = labels();
    relabelled.payload.push('2');
    let store = Arc::clone(bench.runner.store());
    let other = Bench::on(store, Arc::clone(&bench.clock), waiting_graph(&seen, relabelled));
    let refused = other
        .runner
        .deliver(&parked.run, &wait.id, &delivery("d-1", None))
        .await;
    assert!(
        matches!(refused, Err(RunError::DefinitionChanged(_))),
        "{refused:?}"
    );

    let before = seen.load(Ordering::SeqCst);
    let taken = bench
        .runner
        .deliver(&parked.run, &wait.id, &delivery("d-1", Some(labels())))
        .await
        .unwrap();
    assert_eq!(
        (taken.verdict, seen.load(Ordering::SeqCst)),
        (Verdict::Accepted, before + 1)
    );
    let done = bench.go_on().await;
    assert_eq!((done.status, done.state), (Status::Succeeded, 1 + 5 + 1));
    assert_eq!(bench.steps(&done).await.last().unwrap().0, "b");
}

#[tokio::test]
async fn a_wait_without_a_wait_route_fails_the_run() {
    let mut builder = waiting_graph(&Arc::default(), labels());
    builder.waits.clear();
    let builder = builder.conditional_edge("a", &["b", "c"], |_| Ok(s("b")));
    let bench = Bench::new(builder);
    let failed = bench.start().await;
    assert_eq!(
        failure_of(&failed),
        (FailureKind::Configuration, s("wait_route_missing"), Some(s("a")))
    );
}

fn suspending(at: Option<&'static str>) -> Builder {
    GraphBuilder::new("line", 1)
        .node("a", move |_: Ctx, state: u32| async move {
            let suspend = Directive::suspend("later");
            let suspend = match at {
                Some(at) => suspend.resume_at(at),
                None => suspend,
            };
            Ok((state + 1, suspend))
        })
        .node("b", add)
        .terminal("a")
        .terminal("b")
        .resume_target("b")
}

#[tokio::test]
async fn a_resume_goes_on_at_a_node_of_the_graph_only() {
    let bench = Bench::new(suspending(Some("b")));
    let parked = bench.start().await;
    assert_eq!((parked.status, parked.state), (Status::Waiting, 1));
    let done = bench.runner.resume(&parked.token, Resume::new()).await.unwrap();
    assert_eq!((done.status, done.state), (Status::Succeeded, 2));

    let bench = Bench::new(suspending(Some("x")));
    let failed = bench.start().await;
    assert_eq!(
        failure_of(&failed),
        (
            FailureKind::Configuration,
            s("invalid_resume_target"),
            Some(s("a"))
        )
    );
    assert_eq!(failed.state, 0, "nothing of the step is saved");

    let bench = Bench::new(suspending(None));
    let parked = bench.start().await;
    let to = |node: &'static str| Resume::new().target(move |_, _| ResumePlan::To(s(node)));
    for node in ["x", "", END] {
        let refused = bench.runner.resume(&parked.token, to(node)).await;
        assert!(
            matches!(refused, Err(RunError::InvalidResumeTarget(_))),
            "{refused:?}"
        );
    }
    let done = bench.runner.resume(&parked.token, to("b")).await.unwrap();
    assert_eq!((done.status, done.state), (Status::Succeeded, 2));
}
