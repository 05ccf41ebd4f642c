//! A worker's right to its run: kept while it works, given up by its own clock, and nothing is done without it (D123 to D136;
//! S21, S26). The runtime's time stands still while anything can go on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use iop_durable::graph::{Directive, Graph};
use iop_durable::record::{Effect, Reason, Status};
use iop_durable::runner::{Ctx, RunError, Runner, Start};
use iop_durable::store::{Store, StoreError};

use crate::support::*;

/// A step whose first call takes so long, and a second one after it.
fn slow(span: Duration, log: &Log) -> Arc<Graph<Trail>> {
    let log = log.clone();
    one("slow", move |ctx: Ctx, trail: Trail| {
        let log = log.clone();
        async move {
            ctx.activity("slow")
                .effect(Effect::Idempotent)
                .run("", |_| {
                    log.add("slow");
                    async move {
                        tokio::time::sleep(span).await;
                        Ok(Bytes::new())
                    }
                })
                .await?;
            call(&ctx, "after", Effect::Idempotent, &log).await?;
            Ok((trail, Directive::end()))
        }
    })
}

#[tokio::test(start_paused = true)]
async fn a_step_may_take_much_longer_than_a_lease() {
    let (room, log) = (Room::new(), Log::new());
    let done = room
        .runner(&slow(TTL * 10, &log))
        .start(Start::new(Trail::new()))
        .await
        .unwrap();
    assert_eq!(
        (done.status, log.all()),
        (Status::Succeeded, vec!["slow".to_owned(), "after".to_owned()])
    );
    assert!(room.spy.count(Op::Renew) >= 30);
    room.sound(&done.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_head_says_under_which_lease_it_was_written() {
    let (room, log) = (Room::new(), Log::new());
    let runner = room.runner(&slow(Duration::ZERO, &log));
    let run = runner.accept(Start::new(Trail::new())).await.unwrap().run;
    assert_eq!(room.load(&run).await.head.incarnation, 0);
    // One that wrote nothing.
    room.lose_worker(&run).await;
    assert_eq!(room.load(&run).await.head.incarnation, 0);
    room.drain(&runner).await;
    let head = room.load(&run).await.head;
    assert_eq!((head.status, head.incarnation), (Status::Succeeded, 2));
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_hangs_or_fails_is_tried_again_in_time() {
    let (room, log) = (Room::new(), Log::new());
    let runner = room.runner(&slow(TTL * 3, &log));
    room.spy.before(Op::Renew, 1, std::future::pending);
    room.spy.answer(Op::Renew, 0, StoreError::unavailable("away"));
    let done = runner.start(Start::new(Trail::new())).await.unwrap();
    assert!(room.spy.met());
    assert_eq!((done.status, log.len()), (Status::Succeeded, 2));
}

#[tokio::test(start_paused = true)]
async fn without_renewals_the_right_ends_by_the_workers_own_clock() {
    let (room, log) = (Room::new(), Log::new());
    let runner = room.runner(&slow(TTL * 3, &log));
    // Nothing is heard of the store from here on, as far as leases go.
    for _ in 0..20 {
        room.spy.answer(Op::Renew, 0, StoreError::unavailable("away"));
    }
    let began = tokio::time::Instant::now();
    let lost = runner.start(Start::new(Trail::new()).run(run_id("r"))).await;
    refused(lost, "lease_lost");
    let took = began.elapsed();
    assert!(took >= TTL && took < TTL + Duration::from_secs(1), "{took:?}");
    assert_eq!(log.all(), ["slow"], "nothing is dispatched after it");
    let head = room.load(&run_id("r")).await.head;
    assert_eq!(
        (head.status, head.revision.get()),
        (Status::Running, 2),
        "nothing is written after the intent"
    );
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_was_lost_is_noticed_with_the_next_renewal() {
    let (room, log) = (Room::new(), Log::new());
    let runner = room.runner(&slow(TTL * 3, &log));
    let running = running(&runner);
    eventually(|| async { log.len() == 1 }).await;
    // The store's clock has moved on: there the lease has expired.
    room.clock.advance(TTL);
    let began = tokio::time::Instant::now();
    refused(done(running).await, "lease_lost");
    assert!(began.elapsed() < TTL / 2);
    assert_eq!(log.all(), ["slow"]);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_lost_its_lease_between_intent_and_dispatch_dispatches_nothing() {
    let (room, log) = (Room::new(), Log::new());
    let runner = room.runner(&slow(Duration::from_secs(1), &log));
    // The intent's commit is answered only after the lease has ended by the worker's clock.
    room.spy
        .after(Op::Commit, 0, || tokio::time::sleep(TTL + Duration::from_secs(1)));
    for _ in 0..20 {
        room.spy.answer(Op::Renew, 0, StoreError::unavailable("away"));
    }
    let lost = runner.start(Start::new(Trail::new()).run(run_id("r"))).await;
    refused(lost, "lease_lost");
    assert_eq!(log.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn giving_a_run_back_takes_no_longer_than_five_seconds() {
    let (room, log) = (Room::new(), Log::new());
    let runner = room.runner(&slow(Duration::from_secs(1), &log));
    room.spy.answer(Op::Commit, 0, StoreError::unavailable("away"));
    room.spy.before(Op::Release, 0, std::future::pending);
    let began = tokio::time::Instant::now();
    refused(
        runner.start(Start::new(Trail::new()).run(run_id("r"))).await,
        "store_unavailable",
    );
    assert_eq!(began.elapsed(), Duration::from_secs(5));
}

#[tokio::test(start_paused = true)]
async fn what_cannot_work_is_refused_at_the_start() {
    let room = Room::new();
    let graph = slow(Duration::ZERO, &Log::new());
    type Change = fn(&mut iop_durable::runner::Options);
    let table: [Change; 6] = [
        |o| o.lease_ttl = Duration::from_micros(999),
        |o| o.lease_ttl = Duration::MAX,
        |o| o.cancel_grace = Duration::MAX,
        |o| o.limits.max_state = 0,
        |o| o.limits.max_payload = 0,
        |o| o.limits.max_deliveries = 0,
    ];
    for change in table {
        let mut options = Room::options();
        change(&mut options);
        let store: Arc<dyn Store> = room.spy.clone();
        let made = Runner::new(Arc::clone(&graph), store, options);
        assert!(matches!(made.err(), Some(RunError::InvalidRequest { .. })));
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_to_cancel_beats_the_last_recovery() {
    let room = Room::new();
    let entered = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&entered);
    let graph: Arc<Graph<Trail>> = shared(
        graph("given up")
            .recovery_attempts(0)
            .node("only", move |_: Ctx, _: Trail| {
                seen.store(true, Ordering::SeqCst);
                std::future::pending::<Answer>()
            })
            .terminal("only"),
    );
    let worker = running(&room.runner(&graph));
    eventually(|| async { entered.load(Ordering::SeqCst) }).await;
    room.lose(worker);
    let aside = room.aside();
    room.spy.before(Op::Commit, 0, || async move {
        aside
            .cancel(&run_id("r"), &decision("c"), "enough", None)
            .await
            .unwrap();
        Ok(())
    });
    let result = room.work(&room.runner(&graph)).await.unwrap().unwrap();
    assert_eq!(
        (result.status, result.reason()),
        (Status::Cancelled, Some(Reason::Cancelled))
    );
    room.sound(&run_id("r")).await;
}

#[tokio::test(start_paused = true)]
async fn operators_of_a_runner_keep_their_leases_together() {
    let room = Room::new();
    let graph: Arc<Graph<Trail>> = one("many", |_: Ctx, trail: Trail| async move {
        Ok((trail, Directive::suspend("held")))
    });
    let runner = room.runner(&graph);
    for _ in 0..50 {
        let run = runner.accept(Start::new(Trail::new())).await.unwrap().run;
        let cancelled = runner
            .operator()
            .cancel(&run, &decision("c"), "enough", None)
            .await
            .unwrap();
        assert_eq!(
            cancelled.outcome,
            iop_durable::runner::CancelOutcome::Done(Status::Cancelled)
        );
        tokio::task::yield_now().await;
    }
    assert!(
        room.spy.count(Op::Renew) <= 1,
        "{} renewals",
        room.spy.count(Op::Renew)
    );
}
