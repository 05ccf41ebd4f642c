//! Answers of the store that are lost or late, at the moments that matter to people: acceptance, pause, decision, request to
//! cancel, resolution (D25, D50, D76, D79, D146; S56, S57, S86).

use std::sync::Arc;

use bytes::Bytes;
use iop_durable::graph::{Directive, Graph};
use iop_durable::machine::wait::Verdict;
use iop_durable::record::{Effect, Scope, Status};
use iop_durable::runner::{Answer as Told, CancelOutcome, Ctx, Start};
use iop_durable::store::{Store, StoreError};

use crate::support::*;

fn lost() -> StoreError {
    StoreError::unconfirmed("lost")
}

fn away() -> StoreError {
    StoreError::unavailable("away")
}

/// A call behind an approval.
fn approved(log: &Log) -> Arc<Graph<Trail>> {
    let log = log.clone();
    one("approved", move |ctx: Ctx, trail: Trail| {
        let log = log.clone();
        async move {
            let Told::Delivered(word) = ctx.gate("g").wait().await? else {
                panic!()
            };
            let done = call(&ctx, &text(&word), Effect::Unsafe, &log).await?;
            Ok((pushed(trail, done), Directive::end()))
        }
    })
}

#[tokio::test(start_paused = true)]
async fn a_pause_that_is_not_saved_lets_nothing_happen() {
    for k in [0, 1] {
        let (room, log) = (Room::new(), Log::new());
        let graph = approved(&log);
        let runner = room.runner(&graph);
        room.spy.answer(Op::Commit, k, away());
        refused(
            runner.start(Start::new(Trail::new()).run(run_id("r"))).await,
            "store_unavailable",
        );
        assert_eq!(log.len(), 0, "commit {k}");
        assert_eq!(
            room.memory.waits(&run_id("r")).await.unwrap().len(),
            k as usize,
            "no phantom of it"
        );
        // Whoever comes next pauses it.
        let parked = room.work(&room.runner(&graph)).await.unwrap().unwrap();
        assert_eq!(parked.status, Status::Waiting);
        room.sound(&run_id("r")).await;
        let wait = room.wait(&run_id("r"), "g").await;
        deliver(&runner, &wait, "d", "go").await.unwrap();
        let done = room.work(&runner).await.unwrap().unwrap();
        assert_eq!(
            (done.status, log.all()),
            (Status::Succeeded, vec!["go".to_owned()])
        );
        room.sound(&run_id("r")).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_decision_survives_a_start_that_fails() {
    let (room, log) = (Room::new(), Log::new());
    let graph = approved(&log);
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let wait = room.wait(&parked.run, "g").await;
    deliver(&runner, &wait, "d", "go").await.unwrap();
    // Entry, then the call's intent.
    for k in [0, 1] {
        room.spy.answer(Op::Commit, k, away());
        refused(room.work(&runner).await.unwrap(), "store_unavailable");
        assert_eq!(log.len(), 0);
        let again = deliver(&runner, &wait, "d", "go").await.unwrap();
        assert!(again.replayed);
    }
    let done = room.work(&runner).await.unwrap().unwrap();
    assert_eq!(
        (done.status, log.all()),
        (Status::Succeeded, vec!["go".to_owned()])
    );
    room.sound(&parked.run).await;
}

#[tokio::test(start_paused = true)]
async fn an_acceptance_whose_answer_is_lost_is_one_acceptance() {
    for landed in [true, false] {
        for runs in [true, false] {
            let (room, log) = (Room::new(), Log::new());
            let graph = approved(&log);
            let runner = room.runner(&graph);
            if landed {
                // It is done, and its answer thrown away.
                room.spy.lose(Op::Create, 0);
            } else {
                room.spy.answer(Op::Create, 0, lost());
            }
            let start = Start::new(Trail::new()).run(run_id("r"));
            if runs {
                let parked = runner.start(start).await.unwrap();
                assert_eq!(parked.status, Status::Waiting, "landed {landed}");
            } else {
                let accepted = runner.accept(start).await.unwrap();
                assert!(!accepted.replayed);
                assert_eq!(room.work(&runner).await.unwrap().unwrap().status, Status::Waiting);
            }
            assert!(room.spy.met());
            room.sound(&run_id("r")).await;
        }
    }
    // Not to be found out: said so, and nothing runs.
    let (room, log) = (Room::new(), Log::new());
    let runner = room.runner(&approved(&log));
    room.spy.answer(Op::Create, 0, lost());
    room.spy.answer(Op::Load, 0, away());
    refused(
        runner.start(Start::new(Trail::new()).run(run_id("r"))).await,
        "journal_unavailable",
    );
}

#[tokio::test(start_paused = true)]
async fn a_decision_or_request_whose_answer_is_lost_is_one() {
    for landed in [true, false] {
        let (room, log) = (Room::new(), Log::new());
        let runner = room.runner(&approved(&log));
        let parked = runner.start(Start::new(Trail::new())).await.unwrap();
        let wait = room.wait(&parked.run, "g").await;
        let lose = |op: Op| {
            if landed {
                room.spy.lose(op, 0)
            } else {
                room.spy.answer(op, 0, lost())
            }
        };
        lose(Op::Post);
        let told = deliver(&runner, &wait, "d", "go").await.unwrap();
        assert_eq!((told.verdict, told.replayed), (Verdict::Accepted, landed));
        let ledger = room.decisions(&parked.run, &Scope::Wait(wait.id.clone())).await;
        assert_eq!(ledger.len(), 1);
        lose(Op::Post);
        let asked = runner
            .operator()
            .cancel(&parked.run, &decision("c"), "enough", None)
            .await
            .unwrap();
        assert!(matches!(
            asked.outcome,
            CancelOutcome::Requested | CancelOutcome::Done(Status::Cancelled)
        ));
        assert_eq!(room.decisions(&parked.run, &Scope::Cancel).await.len(), 1);
        let last = room.drain(&runner).await;
        assert!(last.is_none_or(|last| last.status == Status::Cancelled));
        assert_eq!(
            (room.status(&parked.run).await, log.len()),
            (Status::Cancelled, 0)
        );
        room.sound(&parked.run).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_resolution_whose_answer_is_lost_is_one() {
    for landed in [true, false] {
        let room = Room::new();
        let graph: Arc<Graph<Trail>> = one("resolved", |ctx: Ctx, trail: Trail| async move {
            let out = cut_off(&ctx, "c").await?;
            Ok((pushed(trail, text(&out)), Directive::end()))
        });
        let runner = room.runner(&graph);
        let run = runner.start(Start::new(Trail::new())).await.unwrap();
        let record = room.activity(&run.run, "c").await;
        if landed {
            room.spy.lose(Op::Commit, 0);
        } else {
            room.spy.answer(Op::Commit, 0, lost());
        }
        let word = resolution("d", &record, complete("out"));
        let resolved = runner
            .operator()
            .resolve(&run.token, &word, None, true)
            .await
            .unwrap();
        assert_eq!(
            (resolved.status, resolved.token),
            (Status::Queued, room.token(&run.run).await)
        );
        assert_eq!(room.decisions(&run.run, &Scope::Operator).await.len(), 1);
        // Away altogether: refused, unchanged, and free for the next try.
        let done = room.drain(&runner).await.unwrap();
        assert_eq!(
            (done.status, done.state),
            (Status::Succeeded, vec!["out".to_owned()])
        );
        room.sound(&run.run).await;
    }
    let room = Room::new();
    let graph: Arc<Graph<Trail>> = one("refused", |ctx: Ctx, trail: Trail| async move {
        cut_off(&ctx, "c").await?;
        Ok((trail, Directive::end()))
    });
    let runner = room.runner(&graph);
    let run = runner.start(Start::new(Trail::new())).await.unwrap();
    let record = room.activity(&run.run, "c").await;
    let word = resolution("d", &record, complete("out"));
    room.spy.answer(Op::Commit, 0, away());
    refused(
        runner.operator().resolve(&run.token, &word, None, true).await,
        "store_unavailable",
    );
    assert_eq!(room.activity(&run.run, "c").await, record);
    assert_eq!(room.load(&run.run).await.lease, None);
    runner
        .operator()
        .resolve(&run.token, &word, None, true)
        .await
        .unwrap();
    let found: Bytes = "x".into();
    let late = runner.operator();
    refused(
        late.reconcile(&run.run, &record.id, |_| async move { Some(found) })
            .await,
        "activity_conflict",
    );
    room.sound(&run.run).await;
}

#[tokio::test(start_paused = true)]
async fn an_entry_that_cannot_be_read_is_given_back() {
    for op in [Op::Journal, Op::Acquire] {
        let (room, log) = (Room::new(), Log::new());
        let graph = approved(&log);
        let runner = room.runner(&graph);
        let run = runner.accept(Start::new(Trail::new())).await.unwrap().run;
        room.spy.answer(op, 0, away());
        let token = room.token(&run).await;
        refused(
            runner.resume(&token, iop_durable::runner::Resume::new()).await,
            "store_unavailable",
        );
        let loaded = room.load(&run).await;
        assert_eq!(
            (loaded.lease, loaded.head.revision),
            (None, token.revision),
            "{op}"
        );
        assert!(loaded.inbox.quarantine.is_none(), "{op}: away is not corrupt");
        assert_eq!(room.work(&runner).await.unwrap().unwrap().status, Status::Waiting);
        room.sound(&run).await;
    }
}
