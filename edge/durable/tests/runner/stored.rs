//! What a runner makes of its store: keys, lost workers, lost answers, a lease that is gone (D50, D128, D140, D146; S32,
//! S86).

use std::sync::Arc;

use iop_durable::graph::{Directive, Graph};
use iop_durable::record::{ActivityState, Effect, Reason, Status};
use iop_durable::runner::{Ctx, Resume, Start};
use iop_durable::store::{IdempotencyKey, Store, StoreError};

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn an_id_or_key_makes_one_run() {
    let room = Room::new();
    let (log, door) = (Log::new(), Door::new());
    door.open();
    let seen = log.clone();
    let graph: Arc<Graph<Trail>> = one("keyed", move |_: Ctx, trail: Trail| {
        seen.add("ran");
        async move { Ok((trail, Directive::end())) }
    });
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
    // The id alone: the same run asked for again, or another one (D59).
    let again = Start::new(Trail::new()).run(first.run.clone());
    let same = runner.start(again.clone()).await.unwrap();
    assert_eq!(
        (same.status, same.token),
        (Status::Succeeded, first.token.clone())
    );
    assert!(runner.accept(again).await.unwrap().replayed);
    let other = Start::new(vec!["other".to_owned()]).run(first.run.clone());
    refused(runner.start(other.clone()).await, "idempotency_conflict");
    refused(runner.accept(other).await, "idempotency_conflict");
    // Of another owner it is another run.
    let mut theirs = Start::new(Trail::new()).run(first.run.clone());
    theirs.owner = Some("somebody".to_owned());
    refused(runner.accept(theirs.clone()).await, "idempotency_conflict");
    theirs.run = None;
    let accepted = runner.accept(theirs.clone()).await.unwrap();
    let owner = room.load(&accepted.run).await.head.owner;
    assert_eq!(owner.as_deref(), Some("somebody"));
    for bad in ["a\0b", "", &"o".repeat(257)] {
        theirs.owner = Some(bad.to_owned());
        refused(runner.accept(theirs.clone()).await, "invalid_encoding");
    }
    for bad in ["a\0b", ""] {
        refused(runner.accept(with(bad, 1)).await, "invalid_encoding");
    }
    assert_eq!(log.len(), 1);
    // A stream of a replay is the result of the run that was made before.
    let (events, replayed) = within(runner.start_stream(with("k", 1)).collect()).await.unwrap();
    assert_eq!((events.len(), &replayed.run), (0, &first.run));
}

#[tokio::test(start_paused = true)]
async fn lost_workers_exhaust_the_run_and_not_before() {
    let (room, log) = (Room::new(), Log::new());
    let seen = log.clone();
    let graph: Arc<Graph<Trail>> = shared(
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
            .terminal("second"),
    );
    let run = run_id("r");
    let worker = running(&room.runner(&graph));
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

#[tokio::test(start_paused = true)]
async fn workers_lost_before_they_did_anything_count_too() {
    let room = Room::new();
    let graph: Arc<Graph<Trail>> = shared(
        graph("lost")
            .recovery_attempts(2)
            .node("only", ends)
            .terminal("only"),
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

fn simple(log: &Log) -> Arc<Graph<Trail>> {
    let log = log.clone();
    shared(
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
            .terminal("two"),
    )
}

#[tokio::test(start_paused = true)]
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

#[tokio::test(start_paused = true)]
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

#[tokio::test(start_paused = true)]
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

#[tokio::test(start_paused = true)]
async fn a_worker_whose_lease_is_gone_writes_and_dispatches_nothing_more() {
    let (room, log, door) = (Room::new(), Log::new(), Door::new());
    let (calls, gone) = (log.clone(), door.clone());
    let graph: Arc<Graph<Trail>> = one("fenced", move |ctx: Ctx, trail: Trail| {
        let (calls, door) = (calls.clone(), gone.clone());
        async move {
            calls.add("entered");
            door.pass().await;
            let out = call(&ctx, "c", Effect::Idempotent, &calls).await?;
            Ok((pushed(trail, out), Directive::end()))
        }
    });
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
