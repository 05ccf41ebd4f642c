//! Pauses inside a node: each answer to its own call, no answer lost whoever is faster, nothing taken back (D4, D76 to D89 as far
//! as the engine has them, D162 to D169, D174; S55, S65, S73).

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use iop_durable::graph::{Deadline, Directive, Graph};
use iop_durable::machine::wait::Verdict;
use iop_durable::record::{DeadlinePolicy, Effect, Scope, Status, WaitingKind};
use iop_durable::runner::{Answer as Told, Ctx, Start};
use iop_durable::store::Store;

use crate::support::*;

/// Three calls, each behind its own gate; what was decided and done, per call.
fn approvals(log: &Log) -> Arc<Graph<Trail>> {
    let log = log.clone();
    one("approvals", move |ctx: Ctx, trail: Trail| {
        let log = log.clone();
        async move {
            let calls = ["a", "b", "c"].map(|name| {
                let (ctx, log) = (ctx.clone(), log.clone());
                async move {
                    let answer = ctx.gate(name).subject(format!("call {name}")).wait().await?;
                    let Told::Delivered(word) = answer else {
                        panic!("{answer:?}")
                    };
                    if text(&word) != "approve" {
                        return Ok::<_, iop_durable::failure::Failure>(format!("{name} {}", text(&word)));
                    }
                    let done = call(&ctx, name, Effect::Unsafe, &log).await?;
                    Ok(format!("{done} done"))
                }
            });
            let told = try_join_all(calls).await?;
            Ok((told.into_iter().fold(trail, pushed), Directive::end()))
        }
    })
}

#[tokio::test(start_paused = true)]
async fn three_gates_are_answered_in_any_order_each_to_its_own_call() {
    let orders = [
        ["a", "b", "c"],
        ["a", "c", "b"],
        ["b", "a", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["c", "b", "a"],
    ];
    for order in orders {
        let (room, log) = (Room::new(), Log::new());
        let graph = approvals(&log);
        let runner = room.runner(&graph);
        let parked = runner.start(Start::new(Trail::new())).await.unwrap();
        assert_eq!(parked.status, Status::Waiting);
        let ids: std::collections::BTreeSet<String> = parked
            .waiting
            .as_ref()
            .unwrap()
            .on
            .iter()
            .map(|on| on.id.clone())
            .collect();
        assert_eq!(ids.len(), 3);
        assert!(
            parked
                .waiting
                .as_ref()
                .unwrap()
                .on
                .iter()
                .all(|on| on.kind == WaitingKind::Approval)
        );
        room.sound(&parked.run).await;
        for (n, name) in order.into_iter().enumerate() {
            let wait = room.wait(&parked.run, name).await;
            assert_eq!(
                text(wait.subject.bytes()),
                format!("call {name}"),
                "the exact call is saved"
            );
            let word = if name == "b" { "deny" } else { "approve" };
            let told = deliver(&runner, &wait, name, word).await.unwrap();
            assert_eq!(told.verdict, Verdict::Accepted);
            // A worker in between, or only at the end.
            if n != 1 {
                let result = room.work(&room.runner(&graph)).await.unwrap().unwrap();
                room.sound(&parked.run).await;
                assert_eq!(
                    result.status,
                    if n == 2 {
                        Status::Succeeded
                    } else {
                        Status::Waiting
                    }
                );
            }
        }
        let done = room.runner(&graph).result(&parked.run).await.unwrap();
        assert_eq!(done.state, ["a done", "b deny", "c done"]);
        let mut made = log.all();
        made.sort();
        assert_eq!(made, ["a", "c"], "approved calls once, the denied one never");
    }
}

#[tokio::test(start_paused = true)]
async fn a_delivery_is_answered_once_and_every_loser_is_recorded() {
    let room = Room::new();
    let mut options = Room::options();
    options.limits.max_deliveries = 3;
    let graph = one("once", |ctx: Ctx, trail: Trail| async move {
        let Told::Delivered(word) = ctx.gate("g").kind(WaitingKind::Input).wait().await? else {
            panic!()
        };
        Ok((pushed(trail, text(&word)), Directive::end()))
    });
    let runner = room.runner_with(&graph, options);
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let run = &parked.run;
    let operator = runner.operator();
    let wait = room.wait(run, "g").await;
    refused(
        operator
            .deliver_to_gate(&run_id("x"), &wait.id, &delivery("d", &wait, "yes"))
            .await,
        "run_not_found",
    );
    let other = wait_id(run, "only", 1, "h");
    refused(
        operator
            .deliver_to_gate(run, &other, &delivery("d", &wait, "yes"))
            .await,
        "wait_not_found",
    );
    let mut wrong = delivery("d", &wait, "yes");
    wrong.correlation = correlation("something else");
    refused(
        operator.deliver_to_gate(run, &wait.id, &wrong).await,
        "delivery_conflict",
    );
    for generation in [0, 2] {
        let mut wrong = delivery("d", &wait, "yes");
        wrong.generation = Some(generation);
        refused(
            operator.deliver_to_gate(run, &wait.id, &wrong).await,
            "delivery_conflict",
        );
    }
    let mut wrong = delivery("d", &wait, "yes");
    let mut labels = wait.labels.clone();
    labels.payload = "xml".to_owned();
    wrong.labels = Some(labels);
    refused(
        operator.deliver_to_gate(run, &wait.id, &wrong).await,
        "delivery_conflict",
    );
    assert_eq!(room.wait(run, "g").await, wait, "none of them left a trace");

    let first = deliver_to_gate(&operator, &wait, "d1", "yes").await.unwrap();
    assert_eq!((first.verdict, first.replayed), (Verdict::Accepted, false));
    for _ in 0..5 {
        let again = deliver_to_gate(&operator, &wait, "d1", "yes").await.unwrap();
        assert_eq!((again.verdict, again.replayed), (Verdict::Accepted, true));
    }
    refused(
        deliver_to_gate(&operator, &wait, "d1", "no").await,
        "delivery_conflict",
    );
    let late = deliver_to_gate(&operator, &wait, "d2", "no").await.unwrap();
    assert_eq!((late.verdict, late.replayed), (Verdict::Superseded, false));
    let done = room.work(&runner).await.unwrap().unwrap();
    assert_eq!(
        (done.status, done.state),
        (Status::Succeeded, vec!["yes".to_owned()])
    );
    let after = deliver_to_gate(&operator, &wait, "d3", "no").await.unwrap();
    assert_eq!(after.verdict, Verdict::Superseded);
    refused(
        deliver_to_gate(&operator, &wait, "d4", "no").await,
        "too_many_deliveries",
    );
    assert!(
        deliver_to_gate(&operator, &wait, "d2", "no")
            .await
            .unwrap()
            .replayed
    );
    let ledger = room.decisions(run, &Scope::Wait(wait.id.clone())).await;
    assert_eq!(ledger.len(), 3);
    assert!(
        room.work(&runner).await.is_none(),
        "a delivery to a run that is over wakes nobody"
    );
    room.sound(run).await;
}

#[tokio::test(start_paused = true)]
async fn a_delivery_that_is_too_large_is_refused() {
    let room = Room::new();
    let mut options = Room::options();
    options.limits.max_payload = 3;
    let graph = one("large", gated);
    let runner = room.runner_with(&graph, options.clone());
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let wait = room.wait(&parked.run, "g").await;
    refused(deliver(&runner, &wait, "d", "long").await, "payload_too_large");
    assert_eq!(room.wait(&parked.run, "g").await, wait);
    deliver(&runner, &wait, "d", "yes").await.unwrap();
    // So is what people are shown.
    let graph = one("subject", |ctx: Ctx, trail: Trail| async move {
        ctx.gate("g").subject("long").wait().await?;
        Ok((trail, Directive::end()))
    });
    let done = room
        .runner_with(&graph, options)
        .start(Start::new(Trail::new()))
        .await
        .unwrap();
    assert_eq!(
        (done.status, code(&done).as_str()),
        (Status::Failed, "payload_too_large")
    );
    assert!(room.memory.waits(&done.run).await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_gate_times_out_by_its_own_time_and_a_span_counts_from_arming() {
    for (deadline_in, policy) in [(60, DeadlinePolicy::FirstCommitted), (60, DeadlinePolicy::Hard)] {
        let room = Room::new();
        let graph = one("timeout", move |ctx: Ctx, trail: Trail| async move {
            let gate = ctx
                .gate("g")
                .deadline(Deadline::In(Duration::from_secs(deadline_in)))
                .deadline_policy(policy);
            let told = match gate.wait().await? {
                Told::TimedOut => "timed out".to_owned(),
                Told::Delivered(word) => text(&word),
            };
            Ok((pushed(trail, told), Directive::end()))
        });
        let runner = room.runner(&graph);
        let parked = runner.start(Start::new(Trail::new())).await.unwrap();
        let at = room.wait(&parked.run, "g").await.deadline.unwrap();
        assert_eq!(parked.waiting.as_ref().unwrap().due_at, Some(at));
        // Entered again halfway, by a worker that finds nothing: the span is not prolonged.
        room.clock.advance(Duration::from_secs(30));
        let now = room.memory.now().await.unwrap();
        room.memory
            .tamper(&parked.run, iop_durable::testing::Tamper::DueAt(Some(now)));
        let again = room.work(&runner).await.unwrap().unwrap();
        assert_eq!(again.waiting, parked.waiting);
        room.clock.advance(Duration::from_secs(29));
        assert!(room.work(&runner).await.is_none(), "never early");
        room.clock.advance(Duration::from_secs(2));
        // After the deadline, before the timer: a late event may still win, or not.
        let wait = room.wait(&parked.run, "g").await;
        let late = deliver(&runner, &wait, "d", "late").await;
        let expected = match policy {
            DeadlinePolicy::FirstCommitted => {
                assert_eq!(late.unwrap().verdict, Verdict::Accepted);
                "late"
            }
            DeadlinePolicy::Hard => {
                refused(late, "delivery_conflict");
                "timed out"
            }
        };
        let done = room.work(&runner).await.unwrap().unwrap();
        assert_eq!(
            (done.status, done.state),
            (Status::Succeeded, vec![expected.to_owned()])
        );
        let late = deliver(&runner, &wait, "e", "later").await;
        match policy {
            DeadlinePolicy::FirstCommitted => assert_eq!(late.unwrap().verdict, Verdict::Superseded),
            DeadlinePolicy::Hard => {
                refused(late, "delivery_conflict");
            }
        }
        room.sound(&parked.run).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_gate_asked_for_differently_is_a_conflict() {
    let room = Room::new();
    let graph = one("changed", |ctx: Ctx, trail: Trail| async move {
        // Not repeatable: what is asked for depends on the moment.
        let subject = format!("{}", ctx.now().as_millis() / 60_000);
        ctx.gate("g").subject(subject).wait().await?;
        Ok((trail, Directive::end()))
    });
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let wait = room.wait(&parked.run, "g").await;
    room.clock.advance(Duration::from_mins(5));
    deliver(&runner, &wait, "d", "yes").await.unwrap();
    let done = room.work(&runner).await.unwrap().unwrap();
    assert_eq!(
        (done.status, code(&done).as_str()),
        (Status::Failed, "activity_conflict")
    );
    room.sound(&done.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_gate_that_cannot_be_is_refused() {
    let room = Room::new();
    for (what, expected) in [
        ("key", "invalid_encoding"),
        ("correlation", "invalid_encoding"),
        ("kind", "configuration"),
        ("timer", "configuration"),
    ] {
        let graph = one("invalid", move |ctx: Ctx, trail: Trail| async move {
            let gate = match what {
                "key" => ctx.gate("a\0"),
                "correlation" => ctx.gate("g").correlation(""),
                "kind" => ctx.gate("g").kind(WaitingKind::Retry),
                _ => ctx.gate("g").kind(WaitingKind::Timer),
            };
            gate.wait().await?;
            Ok((trail, Directive::end()))
        });
        let done = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
        assert_eq!(
            (done.status, code(&done).as_str()),
            (Status::Failed, expected),
            "{what}"
        );
        assert!(room.memory.waits(&done.run).await.unwrap().is_empty());
        room.sound(&done.run).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_timer_takes_no_deliveries() {
    let room = Room::new();
    let graph = one("timer", |ctx: Ctx, trail: Trail| async move {
        let timer = ctx
            .gate("t")
            .kind(WaitingKind::Timer)
            .deadline(Deadline::In(Duration::from_secs(60)));
        assert_eq!(timer.wait().await?, Told::TimedOut);
        Ok((trail, Directive::end()))
    });
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let wait = room.wait(&parked.run, "t").await;
    refused(deliver(&runner, &wait, "d", "now").await, "wait_not_armed");
    room.clock.advance(Duration::from_secs(61));
    assert_eq!(
        room.work(&runner).await.unwrap().unwrap().status,
        Status::Succeeded
    );
}
