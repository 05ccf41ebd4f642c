//! The runner on the memory store: what a segment does, step by step.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{Directive, Graph, GraphBuilder, NoEffect};
use iop_durable::ids::Owner;
use iop_durable::record::{Effect, Status};
use iop_durable::runner::{Ctx, Options, Resume, Runner, Start};
use iop_durable::store::Store;
use iop_durable::store::memory::MemoryStore;
use iop_durable::time::HostClock;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct State {
    trail: Vec<String>,
}

fn runner(graph: Graph<State, NoEffect>) -> Runner<State, NoEffect> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new(Arc::new(HostClock::new())));
    let mut options = Options::new(Owner::new("test").unwrap());
    options.lease_ttl = Duration::from_secs(5);
    Runner::new(Arc::new(graph), store, options).unwrap()
}

#[tokio::test]
async fn steps_and_calls_are_recorded_once_and_the_stream_is_the_log() {
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let graph = GraphBuilder::<State>::new("basics", 1)
        .node("one", move |ctx: Ctx, mut state: State| {
            let counted = Arc::clone(&counted);
            async move {
                let out = ctx
                    .activity("charge")
                    .effect(Effect::Idempotent)
                    .run("in", |call| {
                        let counted = Arc::clone(&counted);
                        async move {
                            counted.fetch_add(1, Ordering::SeqCst);
                            Ok(Bytes::from(call.idempotency_key))
                        }
                    })
                    .await?;
                state.trail.push(String::from_utf8(out.to_vec()).unwrap());
                Ok((state, Directive::completed()))
            }
        })
        .node("two", |_: Ctx, mut state: State| async move {
            state.trail.push("two".to_owned());
            Ok((state, Directive::end()))
        })
        .edge("one", "two")
        .terminal("two")
        .compile()
        .unwrap();
    let runner = runner(graph);
    let (events, result) = runner
        .start_stream(Start::new(State::default()))
        .collect()
        .await
        .unwrap();
    assert_eq!(result.status, Status::Succeeded);
    assert_eq!(
        result.state.trail,
        [format!("{}/one/1/charge", result.run), "two".to_owned()]
    );
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    let seqs: Vec<u64> = events.iter().map(|e| e.seq).collect();
    assert_eq!(seqs, (1..=events.len() as u64).collect::<Vec<_>>());
    assert_eq!(events.iter().filter(|e| e.terminal).count(), 1);
    let names: Vec<&str> = events.iter().map(|e| e.name.as_ref()).collect();
    assert_eq!(
        names,
        [
            "run.created",
            "run.started",
            "run.step.started",
            "run.step.completed",
            "run.step.started",
            "run.step.completed",
            "run.succeeded"
        ]
    );
    // A finished run answers from the store.
    let again = runner.resume(&result.token, Resume::new()).await.unwrap();
    assert_eq!((again.status, again.state), (Status::Succeeded, result.state));
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    // accept, intent, outcome with step, end: four revisions, one checkpoint each.
    let history = runner.store().history(&result.run, None, 100).await.unwrap();
    let revisions: Vec<u64> = history.iter().map(|c| c.revision.get()).collect();
    assert_eq!(revisions, [4, 3, 2, 1]);
}

#[tokio::test]
async fn a_failed_step_is_resumed_where_it_failed_and_its_call_keeps_its_key() {
    let calls = Arc::new(parking_lot_free::Log::default());
    let log = Arc::clone(&calls);
    let graph = GraphBuilder::<State>::new("retry", 1)
        .node("charge", move |ctx: Ctx, state: State| {
            let log = Arc::clone(&log);
            async move {
                ctx.activity("charge")
                    .run("in", |call| {
                        let log = Arc::clone(&log);
                        async move {
                            if log.push(call.idempotency_key) == 1 {
                                return Err(Failure::new(FailureKind::Unavailable, "down").into());
                            }
                            Ok(Bytes::new())
                        }
                    })
                    .await?;
                Ok((state, Directive::end()))
            }
        })
        .terminal("charge")
        .compile()
        .unwrap();
    let runner = runner(graph);
    let failed = runner.start(Start::new(State::default())).await.unwrap();
    assert_eq!(failed.status, Status::Failed);
    assert!(failed.outcome.as_ref().unwrap().resumable());
    let done = runner.resume(&failed.token, Resume::new()).await.unwrap();
    assert_eq!((done.status, done.life), (Status::Succeeded, 2));
    let keys = calls.take();
    assert_eq!(keys.len(), 2);
    assert_eq!(keys[0], keys[1]);
}

mod parking_lot_free {
    use std::sync::Mutex;

    #[derive(Default)]
    pub(super) struct Log(Mutex<Vec<String>>);

    impl Log {
        pub(super) fn push(&self, text: String) -> usize {
            let mut log = self.0.lock().unwrap();
            log.push(text);
            log.len()
        }

        pub(super) fn take(&self) -> Vec<String> {
            std::mem::take(&mut self.0.lock().unwrap())
        }
    }
}

#[tokio::test]
async fn a_number_that_json_does_not_have_fails_the_step_and_saves_nothing() {
    let graph = GraphBuilder::<f64>::new("numbers", 1)
        .node("one", |_: Ctx, n: f64| async move {
            Ok((n * 1e300 * 1e300, Directive::end()))
        })
        .terminal("one")
        .compile()
        .unwrap();
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new(Arc::new(HostClock::new())));
    let runner = Runner::new(Arc::new(graph), store, Options::new(Owner::new("test").unwrap())).unwrap();
    let result = runner.start(Start::new(2.0)).await.unwrap();
    assert_eq!((result.status, result.state), (Status::Failed, 2.0));
    let refused = runner.start(Start::new(f64::INFINITY)).await.unwrap_err();
    assert_eq!(refused.code(), "invalid_request");
}
