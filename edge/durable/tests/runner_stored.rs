//! What a runner makes of its store: hooks, metadata, trace context, retention, other definitions, corrupt rows, lost workers,
//! lost answers (D50, D100, D112 to D118, D134, D140, D146, D226, D242; S32, S86, S87, S94).

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use iop_durable::graph::{Directive, Graph, GraphBuilder, SnapshotHook};
use iop_durable::record::{ActivityState, Effect, Lineage, Reason, Status};
use iop_durable::runner::{Ctx, Resume, Start};
use iop_durable::store::{IdempotencyKey, Listed, RunFilter, Store, StoreError};
use iop_durable::testing::Tamper;
use support::*;

#[derive(Clone, Default)]
struct Turned {
    saved: Arc<AtomicU32>,
    loaded: Arc<AtomicU32>,
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

fn hooked(hook: &Turned, log: &Log) -> Arc<Graph<Trail>> {
    let log = log.clone();
    let graph = graph("hooked")
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
        .resume_target("c")
        .compile()
        .unwrap();
    Arc::new(graph)
}

#[tokio::test]
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
    room.aside()
        .deliver_to_gate(&parked.run, &wait.id, &delivery("d", &wait, "yes"))
        .await
        .unwrap();
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

#[tokio::test]
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
        Arc::new(
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
                .terminal("only")
                .compile()
                .unwrap(),
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
    // One that cannot read what is stored: the run is set aside, not lost, and nobody is left holding it.
    let mode = Arc::new(AtomicU32::new(0));
    let runner = room.runner(&build(&mode));
    let parked = runner.start(Start::new(vec!["0".to_owned()])).await.unwrap();
    let before = room.load(&parked.run).await;
    mode.store(2, Ordering::SeqCst);
    refused(runner.resume(&parked.token, Resume::new()).await, "run_corrupt");
    let after = room.load(&parked.run).await;
    assert_eq!(after.lease, None);
    assert!(after.inbox.quarantine.is_some());
    assert_eq!(after.head.cursor, before.head.cursor);
    mode.store(0, Ordering::SeqCst);
    room.memory.rebuild_index().await.unwrap();
    let token = room.token(&parked.run).await;
    assert_eq!(
        runner.resume(&token, Resume::new()).await.unwrap().status,
        Status::Waiting
    );
}

#[tokio::test]
async fn metadata_trace_context_and_lineage_stay_with_the_run() {
    let room = Room::new();
    let graph: Arc<Graph<Trail>> = Arc::new(
        graph("traced")
            .node("only", |ctx: Ctx, trail: Trail| async move {
                let told = format!("{:?} {:?}", ctx.traceparent(), ctx.metadata());
                let directive = if trail.is_empty() {
                    Directive::suspend("held")
                } else {
                    Directive::end()
                };
                Ok((pushed(trail, told), directive))
            })
            .terminal("only")
            .compile()
            .unwrap(),
    );
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

#[tokio::test]
async fn retention_keeps_the_newest_and_deletes_successes_only() {
    let room = Room::new();
    let build = |fails: bool| -> Arc<Graph<Trail>> {
        let mut builder = graph("kept").keep_checkpoints(3);
        if !fails {
            builder = builder.delete_on_success();
        }
        Arc::new(
            builder
                .node("loop", move |_: Ctx, trail: Trail| async move {
                    let directive = match (trail.len(), fails) {
                        (9, true) => Directive::fail(broken()),
                        (9, false) => Directive::end(),
                        (4, _) => Directive::suspend("held"),
                        (_, _) => Directive::completed(),
                    };
                    Ok((pushed(trail, "x"), directive))
                })
                .edge("loop", "loop")
                .compile()
                .unwrap(),
        )
    };
    for fails in [true, false] {
        let runner = room.runner(&build(fails));
        let parked = runner.start(Start::new(Trail::new())).await.unwrap();
        let kept = room.memory.history(&parked.run, None, 100).await.unwrap();
        assert_eq!(kept.iter().filter(|c| !c.pruned).count(), 3);
        assert_eq!(kept.len() as u64, parked.token.revision.get());
        let gone = room
            .memory
            .checkpoint(&parked.run, iop_durable::ids::Revision::FIRST)
            .await;
        assert!(
            matches!(gone, Err(StoreError::CheckpointUnavailable)),
            "never the latest instead"
        );
        let done = runner.resume(&parked.token, Resume::new()).await.unwrap();
        assert_eq!(done.state.len(), 10);
        if fails {
            assert_eq!(done.status, Status::Failed);
            room.sound(&done.run).await;
        } else {
            assert_eq!(done.status, Status::Succeeded);
            refused(runner.result(&done.run).await, "run_deleted");
            refused(runner.resume(&done.token, Resume::new()).await, "run_deleted");
            refused(
                runner.start(Start::new(Trail::new()).run(done.run.clone())).await,
                "run_deleted",
            );
            let late = runner
                .operator()
                .cancel(&done.run, &decision("c"), "x", None)
                .await;
            refused(late, "run_deleted");
        }
    }
    // Cleaning up may fail without changing what is told.
    let runner = room.runner(&build(false));
    let away = || StoreError::unavailable("away");
    room.spy.answer(Op::Prune, 0, away());
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(parked.status, Status::Waiting);
    room.spy.answer(Op::Delete, 0, away());
    let done = runner.resume(&parked.token, Resume::new()).await.unwrap();
    assert_eq!(done.status, Status::Succeeded);
    assert!(room.spy.met());
    assert_eq!(runner.result(&done.run).await.unwrap().status, Status::Succeeded);
}

#[tokio::test]
async fn an_id_or_key_makes_one_run() {
    let room = Room::new();
    let (log, door) = (Log::new(), Door::new());
    door.open();
    let seen = log.clone();
    let graph: Arc<Graph<Trail>> = Arc::new(
        graph("keyed")
            .node("only", move |_: Ctx, trail: Trail| {
                seen.add("ran");
                async move { Ok((trail, Directive::end())) }
            })
            .terminal("only")
            .compile()
            .unwrap(),
    );
    let runner = room.runner(&graph);
    let with = |key: &str, request: u8| {
        let mut start = Start::new(Trail::new());
        start.idempotency = Some(IdempotencyKey {
            scope: "ci".to_owned(),
            key: key.to_owned(),
            request: [request; 32],
        });
        start
    };
    let first = runner.start(with("k", 1)).await.unwrap();
    let again = runner.start(with("k", 1)).await.unwrap();
    assert_eq!(
        (&again.run, again.status, log.len()),
        (&first.run, Status::Succeeded, 1)
    );
    let accepted = runner.accept(with("k", 1)).await.unwrap();
    assert!(accepted.replayed && accepted.run == first.run);
    refused(runner.start(with("k", 2)).await, "idempotency_conflict");
    refused(
        runner
            .start(Start::new(Trail::new()).run(first.run.clone()))
            .await,
        "idempotency_conflict",
    );
    for bad in ["a\0b", ""] {
        refused(runner.accept(with(bad, 1)).await, "invalid_encoding");
    }
    assert_eq!(log.len(), 1);
    // A stream of a replay is the result of the run that was made before.
    let (events, replayed) = within(runner.start_stream(with("k", 1)).collect()).await.unwrap();
    assert_eq!((events.len(), &replayed.run), (0, &first.run));
}

#[tokio::test]
async fn lost_workers_exhaust_the_run_and_not_before() {
    let (room, log) = (Room::new(), Log::new());
    let seen = log.clone();
    let graph: Arc<Graph<Trail>> = Arc::new(
        graph("lost")
            .recovery_attempts(2)
            .node("first", |_: Ctx, trail: Trail| async move {
                Ok((pushed(trail, "first"), Directive::completed()))
            })
            .node("second", move |_: Ctx, trail: Trail| {
                let made = seen.add("entered");
                async move {
                    if made <= 3 {
                        std::future::pending::<()>().await;
                    }
                    Ok((trail, Directive::end()))
                }
            })
            .edge("first", "second")
            .terminal("second")
            .compile()
            .unwrap(),
    );
    let run = run_id("r");
    let runner = room.runner(&graph);
    let worker = background(async move { runner.start(Start::new(Trail::new()).run(run_id("r"))).await });
    for losses in 1..=3u32 {
        eventually(|| async { log.len() == losses as usize }).await;
        room.clock.advance(TTL);
        if losses < 3 {
            assert_eq!(room.load(&run).await.head.recoveries, losses - 1);
            let other = room.runner(&graph);
            // A worker that is lost too: its future is dropped while the node waits.
            let work = room.work(&other);
            tokio::select! {
                _ = work => panic!("it waits for ever"),
                () = async { eventually(|| async { log.len() == losses as usize + 1 }).await } => {}
            }
        }
    }
    drop(worker);
    let result = room.work(&room.runner(&graph)).await.unwrap().unwrap();
    assert_eq!(
        (result.status, result.reason()),
        (Status::Exhausted, Some(Reason::Budget))
    );
    let exhausted = result.outcome.as_ref().unwrap().exhausted.clone().unwrap();
    assert_eq!(
        (exhausted.budget.as_str(), exhausted.used, exhausted.limit),
        ("recovery_attempts", 2, 2)
    );
    assert_eq!(log.len(), 3);
    assert_eq!(result.state, ["first"], "what was committed stays");
    refused(
        room.runner(&graph).resume(&result.token, Resume::new()).await,
        "run_terminal",
    );
    room.sound(&run).await;
}

#[tokio::test]
async fn workers_lost_before_they_did_anything_count_too() {
    let room = Room::new();
    let graph: Arc<Graph<Trail>> = Arc::new(
        graph("lost")
            .recovery_attempts(2)
            .node("only", |_: Ctx, trail: Trail| async move {
                Ok((trail, Directive::end()))
            })
            .terminal("only")
            .compile()
            .unwrap(),
    );
    let runner = room.runner(&graph);
    let run = run_id("r");
    runner
        .accept(Start::new(Trail::new()).run(run.clone()))
        .await
        .unwrap();
    // Lost between the claim and the first commit: nothing has happened, nothing is counted.
    for _ in 0..5 {
        room.lose_worker(&run).await;
    }
    assert_eq!(
        room.work(&runner).await.unwrap().unwrap().status,
        Status::Succeeded
    );
    room.sound(&run).await;
}

#[tokio::test]
async fn corrupt_rows_are_typed_set_aside_and_not_overwritten() {
    let build = |log: &Log| hooked(&Turned::default(), log);
    for what in ["state", "body", "seal", "copied", "wait"] {
        let (room, log) = (Room::new(), Log::new());
        let runner = room.runner(&build(&log));
        let parked = runner.start(Start::new(Trail::new())).await.unwrap();
        let other = runner.start(Start::new(vec!["other".to_owned()])).await.unwrap();
        let wait = room.wait(&parked.run, "g").await;
        let tamper = match what {
            "state" => Tamper::HeadState,
            "body" => Tamper::HeadBody,
            "seal" => Tamper::DropHeadSeal,
            "copied" => Tamper::CopyHeadFrom(other.run.clone()),
            _ => Tamper::WaitBody(wait.id.clone()),
        };
        room.memory.tamper(&parked.run, tamper);
        room.spy.reset();
        let moved = Resume::new().target(|_, _| iop_durable::runner::ResumePlan::To("c".to_owned()));
        refused(runner.resume(&parked.token, moved).await, "run_corrupt");
        assert_eq!(
            room.spy.count(Op::Commit),
            0,
            "{what}: nothing is written over it"
        );
        if what != "wait" {
            refused(runner.result(&parked.run).await, "run_corrupt");
            refused(runner.evaluate_resume(&parked.token).await, "run_corrupt");
            let cancel = runner
                .operator()
                .cancel(&parked.run, &decision("c"), "x", None)
                .await;
            refused(cancel, "run_corrupt");
        }
        // A worker's claim sets it aside, or the resume did.
        let now = room.memory.now().await.unwrap();
        room.memory.tamper(&parked.run, Tamper::DueAt(Some(now)));
        assert!(room.work(&runner).await.is_none(), "{what}");
        let filter = RunFilter {
            limit: 10,
            ..RunFilter::default()
        };
        let listed = room.memory.list(filter).await.unwrap();
        let corrupt = listed
            .iter()
            .filter(|l| matches!(l, Listed::Corrupt { run, .. } if *run == parked.run));
        assert_eq!((listed.len(), corrupt.count()), (2, 1), "{what}");
        // The healthy one beside it is fine.
        let wait = room.wait(&other.run, "g").await;
        runner
            .deliver(&other.run, &wait.id, &delivery("d", &wait, "yes"))
            .await
            .unwrap();
        assert_eq!(room.drain(&runner).await.unwrap().run, other.run, "{what}");
    }
}

#[tokio::test]
async fn a_journal_that_makes_no_sense_is_corrupt() {
    let (room, log) = (Room::new(), Log::new());
    let runner = room.runner(&hooked(&Turned::default(), &log));
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let acquired = room
        .memory
        .acquire(
            &parked.run,
            iop_durable::store::LeaseRequest {
                owner: iop_durable::ids::Owner::new("x").unwrap(),
                ttl: TTL,
            },
        )
        .await
        .unwrap();
    // Sealed and consistent by itself, but not written by any machine: a completed call without an attempt.
    let mut record = room.activity(&parked.run, "c").await;
    record.attempts.clear();
    let mut commit = iop_durable::testing::build::advance(&acquired);
    commit.head = acquired.loaded.head.clone();
    commit.head.event_seq += 1;
    commit.state = acquired.loaded.state.clone();
    commit.activities = vec![record];
    commit.release = true;
    room.memory.commit(commit).await.unwrap();
    let wait = room.wait(&parked.run, "g").await;
    runner
        .deliver(&parked.run, &wait.id, &delivery("d", &wait, "yes"))
        .await
        .unwrap();
    let result = room.work(&runner).await.unwrap();
    refused(result, "run_corrupt");
    assert!(room.inbox(&parked.run).await.quarantine.is_some());
    assert_eq!(room.load(&parked.run).await.lease, None);
    assert!(room.work(&runner).await.is_none());
    assert_eq!(log.len(), 1, "no code of the host ran on it");
}

#[tokio::test]
async fn a_claimed_run_of_another_version_is_given_back_untouched() {
    let (room, log) = (Room::new(), Log::new());
    let runner = room.runner(&hooked(&Turned::default(), &log));
    let run = runner.accept(Start::new(Trail::new())).await.unwrap().run;
    let before = room.load(&run).await;
    let other: Arc<Graph<Trail>> = Arc::new(
        GraphBuilder::new("hooked", 2)
            .node("a", |_: Ctx, trail: Trail| async move {
                Ok((trail, Directive::end()))
            })
            .terminal("a")
            .compile()
            .unwrap(),
    );
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

fn simple(log: &Log) -> Arc<Graph<Trail>> {
    let log = log.clone();
    Arc::new(
        graph("simple")
            .node("one", move |ctx: Ctx, trail: Trail| {
                let log = log.clone();
                async move {
                    let out = call(&ctx, "c", Effect::Unsafe, &log).await?;
                    Ok((pushed(trail, out), Directive::completed()))
                }
            })
            .node("two", |_: Ctx, trail: Trail| async move {
                Ok((pushed(trail, "two"), Directive::end()))
            })
            .edge("one", "two")
            .terminal("two")
            .compile()
            .unwrap(),
    )
}

#[tokio::test]
async fn a_save_that_fails_stops_the_run_typed_and_lets_go_of_it() {
    // Accepted under a lease; then intent, outcome with step, end.
    for (k, code, calls) in [(0, "store_unavailable", 0), (2, "store_unavailable", 1)] {
        let (room, log) = (Room::new(), Log::new());
        let graph = simple(&log);
        let runner = room.runner(&graph);
        room.spy.answer(Op::Commit, k, StoreError::unavailable("away"));
        let failed = runner.start(Start::new(Trail::new()).run(run_id("r"))).await;
        refused(failed, code);
        assert_eq!(
            log.len(),
            calls,
            "commit {k}: nothing is dispatched that is not stored"
        );
        let loaded = room.load(&run_id("r")).await;
        assert_eq!(
            (loaded.head.status, loaded.lease),
            (Status::Running, None),
            "commit {k}"
        );
        let done = room.work(&room.runner(&graph)).await.unwrap().unwrap();
        assert_eq!((done.status, log.len()), (Status::Succeeded, 1), "commit {k}");
        room.sound(&run_id("r")).await;
    }
    // An outcome exists nowhere else: it is tried again while the lease lives.
    let (room, log) = (Room::new(), Log::new());
    let runner = room.runner(&simple(&log));
    for skip in [1, 0, 0] {
        room.spy.answer(Op::Commit, skip, StoreError::unavailable("away"));
    }
    let done = runner
        .start(Start::new(Trail::new()).run(run_id("r")))
        .await
        .unwrap();
    assert_eq!(
        (done.status, log.len(), room.spy.met()),
        (Status::Succeeded, 1, true)
    );
    room.sound(&run_id("r")).await;
}

#[tokio::test]
async fn a_lost_acknowledgement_is_looked_up() {
    for landed in [true, false] {
        for k in 0..3 {
            let (room, log) = (Room::new(), Log::new());
            let runner = room.runner(&simple(&log));
            let memory = room.memory.clone();
            if landed {
                let spy = Arc::clone(&room.spy);
                // It is committed, and the answer is lost.
                room.spy.before(Op::Commit, k, move || async move {
                    let commit = spy.commits().pop().unwrap();
                    memory.commit(commit).await.unwrap();
                    Err(StoreError::unconfirmed("lost"))
                });
            } else {
                room.spy.answer(Op::Commit, k, StoreError::unconfirmed("lost"));
            }
            let done = within(runner.start(Start::new(Trail::new()).run(run_id("r"))))
                .await
                .unwrap();
            assert_eq!(
                (done.status, log.len()),
                (Status::Succeeded, 1),
                "commit {k}, landed {landed}"
            );
            assert_eq!(done.token.revision.get(), 4);
            assert!(room.spy.met());
            room.sound(&run_id("r")).await;
        }
    }
}

#[tokio::test]
async fn an_outcome_whose_commit_cannot_be_looked_up_is_not_taken_for_anothers() {
    let (room, log) = (Room::new(), Log::new());
    let runner = room.runner(&simple(&log));
    let (memory, spy) = (room.memory.clone(), Arc::clone(&room.spy));
    // The outcome lands, its answer is lost, and the store cannot be asked for a moment.
    room.spy.before(Op::Commit, 1, move || async move {
        let commit = spy.commits().pop().unwrap();
        memory.commit(commit).await.unwrap();
        spy.answer(Op::Load, 0, StoreError::unavailable("away"));
        Err(StoreError::unconfirmed("lost"))
    });
    let done = within(runner.start(Start::new(Trail::new()).run(run_id("r"))))
        .await
        .unwrap();
    assert!(room.spy.met());
    assert_eq!(
        (done.status, log.len(), done.token.revision.get()),
        (Status::Succeeded, 1, 4)
    );
    room.sound(&run_id("r")).await;
}

#[tokio::test]
async fn a_worker_whose_lease_is_gone_writes_and_dispatches_nothing_more() {
    let (room, log, door) = (Room::new(), Log::new(), Door::new());
    let (calls, gone) = (log.clone(), door.clone());
    let graph: Arc<Graph<Trail>> = Arc::new(
        graph("fenced")
            .node("only", move |ctx: Ctx, trail: Trail| {
                let (calls, door) = (calls.clone(), gone.clone());
                async move {
                    calls.add("entered");
                    door.pass().await;
                    let out = call(&ctx, "c", Effect::Idempotent, &calls).await?;
                    Ok((pushed(trail, out), Directive::end()))
                }
            })
            .terminal("only")
            .compile()
            .unwrap(),
    );
    let (old, starting) = (room.runner(&graph), run_id("r"));
    let stalled = background(async move { old.start(Start::new(Trail::new()).run(starting)).await });
    door.reached(1).await;
    room.clock.advance(TTL);
    let new = room.runner(&graph);
    let taking = Arc::new(room);
    let other = Arc::clone(&taking);
    let successor = background(async move { other.work(&new).await.unwrap().unwrap() });
    door.reached(2).await;
    door.open();
    let done_by_new = done(successor).await;
    assert_eq!(done_by_new.status, Status::Succeeded);
    refused(done(stalled).await, "lease_lost");
    assert_eq!(log.count("c"), 1, "one dispatch in all");
    taking.sound(&run_id("r")).await;
    let record = taking.activity(&run_id("r"), "c").await;
    assert_eq!(
        (record.state, record.attempts.len()),
        (ActivityState::Completed, 1)
    );
}
