//! Rows that are not what was written: typed, set aside, not overwritten (D100, D112 to D115, D145; S87, S88).

use iop_durable::envelope::seal_of;
use iop_durable::ids::RunId;
use iop_durable::payload::Payload;
use iop_durable::runner::{Resume, Start};
use iop_durable::store::{Acquired, Listed, RunFilter, Store};
use iop_durable::testing::Tamper;

use crate::hooks::{Turned, hooked};
use crate::support::*;

#[tokio::test(start_paused = true)]
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
        deliver(&runner, &wait, "d", "yes").await.unwrap();
        assert_eq!(room.drain(&runner).await.unwrap().run, other.run, "{what}");
    }
}

#[tokio::test(start_paused = true)]
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
    deliver(&runner, &wait, "d", "yes").await.unwrap();
    let result = room.work(&runner).await.unwrap();
    refused(result, "run_corrupt");
    assert!(room.inbox(&parked.run).await.quarantine.is_some());
    assert_eq!(room.load(&parked.run).await.lease, None);
    assert!(room.work(&runner).await.is_none());
    assert_eq!(log.len(), 1, "no code of the host ran on it");
}

/// Whatever store it is: a runner and an operator look themselves (D114).
#[tokio::test(start_paused = true)]
async fn a_store_that_answers_with_something_else_is_not_believed() {
    type Lie = fn(&mut Acquired);
    let lies: [(&str, Lie); 4] = [
        ("another run", |a| {
            a.loaded.head.id = RunId::new("another").unwrap()
        }),
        ("another state", |a| a.loaded.state = Payload::new("\"x\"")),
        ("another head", |a| a.loaded.head.life += 1),
        ("fewer waits", |a| {
            a.loaded.head.armed_waits = 0;
            a.loaded.seal = seal_of(&a.loaded.head, &a.loaded.state).unwrap();
        }),
    ];
    for (what, lie) in lies {
        for operated in [false, true] {
            let (room, log) = (Room::new(), Log::new());
            let runner = room.runner(&hooked(&Turned::default(), &log));
            let parked = runner.start(Start::new(Trail::new())).await.unwrap();
            let wait = room.wait(&parked.run, "g").await;
            let (before, ran) = (room.load(&parked.run).await.head, log.len());
            room.spy.reset();
            room.spy.lie(lie);
            if operated {
                let cancelled = runner
                    .operator()
                    .cancel_wait(&parked.token, &wait.id, &decision("c"), "x", "y", None)
                    .await;
                refused(cancelled, "run_corrupt");
            } else {
                let moved = Resume::new().target(|_, _| iop_durable::runner::ResumePlan::To("c".to_owned()));
                refused(runner.resume(&parked.token, moved).await, "run_corrupt");
            }
            assert_eq!(room.spy.count(Op::Commit), 0, "{what}, {operated}");
            assert_eq!(
                log.len(),
                ran,
                "{what}, {operated}: no code of the host ran on it"
            );
            let stands = room.load(&parked.run).await;
            assert_eq!((stands.head, stands.lease), (before, None), "{what}, {operated}");
        }
    }
}
