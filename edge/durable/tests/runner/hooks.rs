//! Snapshot hooks, metadata, trace context, and runs of another definition (D116, D118, D242).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use iop_durable::graph::{Directive, Graph, GraphBuilder, SnapshotHook};
use iop_durable::record::{Effect, Lineage, Status};
use iop_durable::runner::{Ctx, Resume, Start};

use crate::support::*;

#[derive(Clone, Default)]
pub(crate) struct Turned {
    pub(crate) saved: Arc<AtomicU32>,
    pub(crate) loaded: Arc<AtomicU32>,
}

impl SnapshotHook for Turned {
    fn label(&self) -> &'static str {
        "turned"
    }

    fn before_save(&self, state: Bytes) -> std::result::Result<Bytes, String> {
        self.saved.fetch_add(1, Ordering::SeqCst);
        Ok(state.iter().map(|b| !b).collect())
    }

    fn after_load(&self, state: Bytes) -> std::result::Result<Bytes, String> {
        self.loaded.fetch_add(1, Ordering::SeqCst);
        Ok(state.iter().map(|b| !b).collect())
    }
}

pub(crate) fn hooked(hook: &Turned, log: &Log) -> Arc<Graph<Trail>> {
    let log = log.clone();
    shared(
        graph("hooked")
            .snapshot_hook(hook.clone())
            .budget("tokens", 10)
            .node("a", move |ctx: Ctx, trail: Trail| {
                let log = log.clone();
                async move {
                    call(&ctx, "c", Effect::Idempotent, &log).await?;
                    ctx.gate("g").wait().await?;
                    Ok((pushed(trail, "a"), Directive::completed()))
                }
            })
            .node("b", |_: Ctx, trail: Trail| async move {
                Ok((pushed(trail, "b"), Directive::suspend("held").resume_at("c")))
            })
            .node("c", |_: Ctx, trail: Trail| async move {
                Ok((pushed(trail, "c"), Directive::end()))
            })
            .edge("a", "b")
            .terminal("b")
            .terminal("c")
            .resume_target("c"),
    )
}

#[tokio::test(start_paused = true)]
async fn a_hook_is_applied_once_per_saved_state() {
    let (room, log, hook) = (Room::new(), Log::new(), Turned::default());
    let graph = hooked(&hook, &log);
    let runner = room.runner(&graph);
    let saved = || hook.saved.load(Ordering::SeqCst);
    let parked = runner.start(Start::new(vec!["secret".to_owned()])).await.unwrap();
    assert_eq!(
        saved(),
        1,
        "the first state; intent, outcome and gate are not states"
    );
    let stored = room.load(&parked.run).await.state;
    assert!(
        !stored.bytes().windows(6).any(|w| w == b"secret"),
        "what is stored went through it"
    );
    // Operators and deliveries need no codec.
    let wait = room.wait(&parked.run, "g").await;
    let before = (saved(), hook.loaded.load(Ordering::SeqCst));
    deliver_to_gate(&room.aside(), &wait, "d", "yes").await.unwrap();
    assert_eq!((saved(), hook.loaded.load(Ordering::SeqCst)), before);
    let held = room.work(&runner).await.unwrap().unwrap();
    assert_eq!(held.status, Status::Waiting);
    assert_eq!(saved(), 3, "two steps");
    // Metadata alone uses what is stored as it is.
    let state = room.load(&parked.run).await.head.state_digest;
    let resume = Resume::new().metadata("k", "v").budget_used("tokens", 3);
    let done = runner.resume(&held.token, resume).await.unwrap();
    assert_eq!((done.status, saved()), (Status::Succeeded, 4));
    let resumed = room
        .spy
        .commits()
        .into_iter()
        .find(|c| c.head.metadata.contains_key("k"))
        .unwrap();
    assert_eq!(resumed.head.state_digest, state, "not encoded anew");
    assert_eq!(done.state, ["secret", "a", "b", "c"]);
    room.sound(&done.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_hook_or_codec_that_fails_loses_nothing() {
    struct Breaks(Arc<AtomicU32>);
    impl SnapshotHook for Breaks {
        fn label(&self) -> &'static str {
            "breaks"
        }
        fn before_save(&self, state: Bytes) -> std::result::Result<Bytes, String> {
            match self.0.load(Ordering::SeqCst) {
                1 => Err("no key".to_owned()),
                3 => panic!("no key"),
                _ => Ok(state),
            }
        }
        fn after_load(&self, state: Bytes) -> std::result::Result<Bytes, String> {
            match self.0.load(Ordering::SeqCst) {
                2 => Err("no key".to_owned()),
                _ => Ok(state),
            }
        }
    }
    let build = |mode: &Arc<AtomicU32>| -> Arc<Graph<Trail>> {
        let (hook, mode) = (Breaks(Arc::clone(mode)), Arc::clone(mode));
        shared(
            graph("breaks")
                .snapshot_hook(hook)
                .node("only", move |_: Ctx, trail: Trail| {
                    let mode = Arc::clone(&mode);
                    async move {
                        if trail[0] != "0" {
                            mode.store(trail[0].parse().unwrap(), Ordering::SeqCst);
                        }
                        Ok((pushed(trail, "saved"), Directive::suspend("held")))
                    }
                })
                .terminal("only"),
        )
    };
    let room = Room::new();
    for what in ["1", "3"] {
        let mode = Arc::new(AtomicU32::new(0));
        let runner = room.runner(&build(&mode));
        let run = iop_durable::ids::RunId::random();
        let failed = runner
            .start(Start::new(vec![what.to_owned()]).run(run.clone()))
            .await
            .unwrap();
        assert_eq!(failed.status, Status::Failed, "{what}");
        mode.store(0, Ordering::SeqCst);
        assert_eq!(failed.state.len(), 1, "{what}: nothing of the step is saved");
        room.sound(&run).await;
    }
    // One that cannot read what is stored behind a sound seal is of another definition: the run stays as it is, unheld.
    let mode = Arc::new(AtomicU32::new(0));
    let runner = room.runner(&build(&mode));
    let parked = runner.start(Start::new(vec!["0".to_owned()])).await.unwrap();
    let before = room.load(&parked.run).await;
    mode.store(2, Ordering::SeqCst);
    refused(
        runner.resume(&parked.token, Resume::new()).await,
        "definition_changed",
    );
    let after = room.load(&parked.run).await;
    assert_eq!(after.lease, None);
    assert_eq!(after.inbox.quarantine, None);
    assert_eq!(after.head.cursor, before.head.cursor);
    mode.store(0, Ordering::SeqCst);
    let token = room.token(&parked.run).await;
    assert_eq!(
        runner.resume(&token, Resume::new()).await.unwrap().status,
        Status::Waiting
    );
}

#[tokio::test(start_paused = true)]
async fn metadata_trace_context_and_lineage_stay_with_the_run() {
    let room = Room::new();
    let graph: Arc<Graph<Trail>> = one("traced", |ctx: Ctx, trail: Trail| async move {
        let told = format!("{:?} {:?}", ctx.traceparent(), ctx.metadata());
        let directive = if trail.is_empty() {
            Directive::suspend("held")
        } else {
            Directive::end()
        };
        Ok((pushed(trail, told), directive))
    });
    let mut start = Start::new(Trail::new());
    start.traceparent = Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".to_owned());
    start.metadata.insert("session_id".to_owned(), "7".to_owned());
    start.parent = Some(Lineage {
        parent: Some(run_id("parent")),
        root: run_id("root"),
        origin: Some("step".to_owned()),
    });
    let parked = room.runner(&graph).start(start.clone()).await.unwrap();
    let resume = Resume::new().metadata("more", "8");
    let done = room.runner(&graph).resume(&parked.token, resume).await.unwrap();
    assert!(done.state[0].starts_with("Some(\"00-4bf92f3577b34da6a3ce929d0e0e4736"));
    assert!(done.state[1].contains("\"more\": \"8\"") && done.state[1].contains("session_id"));
    let head = room.load(&done.run).await.head;
    assert_eq!(
        (head.traceparent, Some(head.lineage)),
        (start.traceparent, start.parent)
    );
}

#[tokio::test(start_paused = true)]
async fn a_claimed_run_of_another_version_is_given_back_untouched() {
    let (room, log) = (Room::new(), Log::new());
    let runner = room.runner(&hooked(&Turned::default(), &log));
    let run = runner.accept(Start::new(Trail::new())).await.unwrap().run;
    let before = room.load(&run).await;
    let other: Arc<Graph<Trail>> = shared(GraphBuilder::new("hooked", 2).node("a", ends).terminal("a"));
    refused(
        room.work(&room.runner(&other)).await.unwrap(),
        "definition_changed",
    );
    let after = room.load(&run).await;
    assert_eq!(
        (after.head, after.lease, after.inbox),
        (before.head, None, before.inbox)
    );
    assert_eq!(room.work(&runner).await.unwrap().unwrap().status, Status::Waiting);
}
