//! Answers that come at every moment: while the node works, while the run parks, while it is ended (D165 to D168; S73).

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join, join_all};
use iop_durable::graph::{Deadline, Directive, Graph};
use iop_durable::machine::wait::Verdict;
use iop_durable::record::{Effect, Status, WaitStatus};
use iop_durable::runner::{Answer as Told, Ctx, Start};
use iop_durable::store::Store;

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn an_answer_reaches_its_node_while_other_calls_run() {
    let (room, log, door) = (Room::new(), Log::new(), Door::new());
    let (calls, gone) = (log.clone(), door.clone());
    let graph = one("beside", move |ctx: Ctx, trail: Trail| {
        let (calls, door) = (calls.clone(), gone.clone());
        async move {
            let gated = async {
                let told = ctx.gate("g").wait().await?;
                calls.add("answered");
                door.open();
                Ok::<_, iop_durable::failure::Failure>(told)
            };
            let slow = ctx.activity("slow").run("", |_| door.answers(""));
            let (told, slow) = join(gated, slow).await;
            slow?;
            assert_eq!(told?, Told::Delivered("yes".into()));
            Ok((pushed(trail, "both"), Directive::end()))
        }
    });
    let runner = room.runner(&graph);
    let running = running(&runner);
    door.reached(1).await;
    // Listed and decidable while the run works.
    assert_eq!(room.status(&run_id("r")).await, Status::Running);
    let wait = room.wait(&run_id("r"), "g").await;
    assert_eq!(wait.status, WaitStatus::Armed);
    // The slow call ends only after the answer has arrived.
    deliver(&runner, &wait, "d", "yes").await.unwrap();
    let result = done(running).await.unwrap();
    assert_eq!(
        (result.status, log.all()),
        (Status::Succeeded, vec!["answered".to_owned()])
    );
    room.sound(&result.run).await;
}

/// A node that arms a gate, does something, and parks: the answer comes at every moment of it.
fn raced(log: &Log) -> Arc<Graph<Trail>> {
    let log = log.clone();
    one("raced", move |ctx: Ctx, trail: Trail| {
        let log = log.clone();
        async move {
            let (told, _) = join(ctx.gate("g").wait(), async {
                for n in 0..3 {
                    let name = format!("c{n}");
                    call(&ctx, &name, Effect::Idempotent, &log).await.unwrap();
                    tokio::task::yield_now().await;
                }
            })
            .await;
            assert_eq!(told?, Told::Delivered("yes".into()));
            Ok((trail, Directive::end()))
        }
    })
}

async fn race(pairs: u32) {
    for round in 0..pairs {
        let (room, log) = (Room::new(), Log::new());
        let graph = raced(&log);
        let (runner, run) = (room.runner(&graph), run_id("r"));
        let running = running(&runner);
        // The deliverer looks for the gate again and again, after more and more yields.
        let (store, delivering) = (room.memory.clone(), runner.clone());
        let sender = background(async move {
            for _ in 0..round % 60 {
                tokio::task::yield_now().await;
            }
            loop {
                if let Ok(waits) = store.waits(&run_id("r")).await
                    && let Some(wait) = waits.first()
                {
                    let told = deliver(&delivering, wait, "d", "yes").await;
                    return told.unwrap().verdict;
                }
                tokio::task::yield_now().await;
            }
        });
        let first = done(running).await.unwrap();
        assert_eq!(done(sender).await, Verdict::Accepted);
        let status = if first.status == Status::Succeeded {
            Status::Succeeded
        } else {
            // Parked before the answer: then it is due.
            room.drain(&runner).await.expect("an answered run is due").status
        };
        assert_eq!(status, Status::Succeeded, "round {round}");
        assert_eq!(log.len(), 3, "round {round}: each call once");
        room.sound(&run).await;
    }
}

#[tokio::test(start_paused = true)]
async fn no_answer_is_lost_between_arming_and_parking() {
    race(1500).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_answer_is_lost_on_many_threads() {
    race(1500).await;
}

#[tokio::test(start_paused = true)]
async fn an_answer_right_before_the_run_parks_is_not_slept_on() {
    let room = Room::new();
    let graph = one("parking", |ctx: Ctx, trail: Trail| async move {
        let told = ctx.gate("g").wait().await?;
        assert_eq!(told, Told::Delivered("yes".into()));
        Ok((trail, Directive::end()))
    });
    let runner = room.runner(&graph);
    let (aside, store) = (room.aside(), room.memory.clone());
    // The first commit arms, the second parks.
    room.spy.before(Op::Commit, 1, || async move {
        let wait = store.waits(&run_id("r")).await.unwrap().remove(0);
        deliver_to_gate(&aside, &wait, "d", "yes").await.unwrap();
        Ok(())
    });
    let done = within(runner.start(Start::new(Trail::new()).run(run_id("r"))))
        .await
        .unwrap();
    assert!(room.spy.met());
    assert_eq!(done.status, Status::Succeeded);
    room.sound(&done.run).await;
}

#[tokio::test(start_paused = true)]
async fn an_answer_whose_reading_failed_halfway_is_not_lost() {
    for cancels in [false, true] {
        let (room, door) = (Room::new(), Door::new());
        let gone = door.clone();
        let graph = one("halfway", move |ctx: Ctx, trail: Trail| {
            let door = gone.clone();
            async move {
                let call = ctx
                    .activity("c")
                    .effect(Effect::Idempotent)
                    .run("", |_| door.answers("out"));
                let (told, out) = join(ctx.gate("g").wait(), call).await;
                out?;
                assert_eq!(told?, Told::Delivered("yes".into()));
                Ok((trail, Directive::end()))
            }
        });
        let runner = room.runner(&graph);
        let running = running(&runner);
        door.reached(1).await;
        // The number of the inbox is read, the gates are not.
        let wait = room.wait(&run_id("r"), "g").await;
        let away = iop_durable::store::StoreError::unavailable("away");
        room.spy.answer(Op::Journal, 0, away);
        let aside = room.aside();
        deliver_to_gate(&aside, &wait, "d", "yes").await.unwrap();
        if cancels {
            let id = decision("c");
            aside.cancel(&run_id("r"), &id, "enough", None).await.unwrap();
        }
        // The call ends before the gates are looked at again, and the run would park.
        let spy = Arc::clone(&room.spy);
        within(async move {
            while !spy.met() {
                tokio::task::yield_now().await;
            }
        })
        .await;
        door.open();
        let mut status = done(running).await.unwrap().status;
        if !status.is_terminal() {
            status = room.drain(&runner).await.expect("an answered run is due").status;
        }
        let expected = if cancels {
            Status::Cancelled
        } else {
            Status::Succeeded
        };
        assert_eq!(status, expected);
        let wait = room.wait(&run_id("r"), "g").await;
        assert_eq!(
            wait.status,
            WaitStatus::Delivered,
            "what was accepted stays accepted"
        );
        room.sound(&run_id("r")).await;
    }
}

#[tokio::test(start_paused = true)]
async fn many_deliverers_at_once_have_one_winner() {
    for _ in 0..20 {
        let room = Room::new();
        let graph = one("many", |ctx: Ctx, trail: Trail| async move {
            let Told::Delivered(word) = ctx.gate("g").wait().await? else {
                panic!()
            };
            Ok((pushed(trail, text(&word)), Directive::end()))
        });
        let runner = room.runner(&graph);
        let parked = runner.start(Start::new(Trail::new())).await.unwrap();
        let wait = room.wait(&parked.run, "g").await;
        let sends = (0..8).map(|n| {
            let (runner, wait) = (runner.clone(), wait.clone());
            async move {
                let id = format!("d{}", n / 2);
                deliver(&runner, &wait, &id, &id).await.unwrap()
            }
        });
        let told = join_all(sends).await;
        let accepted: Vec<_> = told.iter().filter(|t| t.verdict == Verdict::Accepted).collect();
        assert_eq!(accepted.len(), 2, "the winner and its twin");
        assert_eq!(told.iter().filter(|t| t.replayed).count(), 4);
        let done = room.drain(&runner).await.unwrap();
        assert_eq!((done.status, done.state.len()), (Status::Succeeded, 1));
        room.sound(&parked.run).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_was_taken_stays_taken_when_the_run_is_cancelled() {
    // Parked: between the request and the end, by the one who asks.
    let room = Room::new();
    let graph = one("taken", gated);
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let wait = room.wait(&parked.run, "g").await;
    let (aside, gate) = (room.aside(), wait.clone());
    room.spy.before(Op::Commit, 0, || async move {
        let told = deliver_to_gate(&aside, &gate, "d", "yes").await.unwrap();
        assert_eq!(told.verdict, Verdict::Accepted);
        Ok(())
    });
    runner
        .operator()
        .cancel(
            &parked.run,
            &iop_durable::ids::DecisionId::new("c").unwrap(),
            "enough",
            None,
        )
        .await
        .unwrap();
    assert!(room.spy.met());
    if let Some(result) = room.work(&runner).await {
        result.unwrap();
    }
    assert_eq!(room.status(&parked.run).await, Status::Cancelled);
    assert_eq!(room.wait(&parked.run, "g").await.status, WaitStatus::Delivered);
    room.sound(&parked.run).await;

    // Running: between the worker's last look and its last word.
    let (room, door) = (Room::new(), Door::new());
    let gone = door.clone();
    let graph = one("taken", move |ctx: Ctx, trail: Trail| {
        let door = gone.clone();
        async move {
            join(ctx.gate("g").wait(), door.pass()).await.0?;
            Ok((trail, Directive::end()))
        }
    });
    let runner = room.runner(&graph);
    let mut start = Start::new(Trail::new()).run(run_id("r"));
    start.deadline = Some(Deadline::In(Duration::from_millis(50)));
    let (aside, store) = (room.aside(), room.memory.clone());
    // The first commit arms, the second ends the run at its deadline.
    room.spy.before(Op::Commit, 1, || async move {
        let gate = store.waits(&run_id("r")).await.unwrap().remove(0);
        let told = deliver_to_gate(&aside, &gate, "d", "yes").await.unwrap();
        assert_eq!(told.verdict, Verdict::Accepted);
        Ok(())
    });
    let result = within(runner.start(start)).await.unwrap();
    assert!(room.spy.met());
    let status = if result.status == Status::Cancelled {
        Status::Cancelled
    } else {
        room.clock.advance(Duration::from_secs(1));
        room.drain(&runner).await.unwrap().status
    };
    assert_eq!(status, Status::Cancelled);
    assert_eq!(room.wait(&run_id("r"), "g").await.status, WaitStatus::Delivered);
    room.sound(&run_id("r")).await;
}
