//! Pauses inside a node: each answer to its own call, no answer lost whoever is faster, nothing taken back (D4, D76 to D89 as far
//! as the engine has them, D162 to D169, D174; S55, S65, S73).

mod support;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join, join_all, try_join_all};
use iop_durable::graph::{Deadline, Directive, Graph, NoEffect, Node, NodeError};
use iop_durable::machine::wait::Verdict;
use iop_durable::record::{DeadlinePolicy, Effect, Scope, Status, WaitStatus, WaitingKind};
use iop_durable::runner::{Answer as Told, Ctx, Resume, Start};
use iop_durable::store::Store;
use support::*;

fn one(name: &str, node: impl Node<Trail, NoEffect>) -> Arc<Graph<Trail>> {
    Arc::new(graph(name).node("only", node).terminal("only").compile().unwrap())
}

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

#[tokio::test]
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
            let told = runner
                .deliver(&parked.run, &wait.id, &delivery(name, &wait, word))
                .await
                .unwrap();
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

#[tokio::test]
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

    let first = operator
        .deliver_to_gate(run, &wait.id, &delivery("d1", &wait, "yes"))
        .await
        .unwrap();
    assert_eq!((first.verdict, first.replayed), (Verdict::Accepted, false));
    for _ in 0..5 {
        let again = operator
            .deliver_to_gate(run, &wait.id, &delivery("d1", &wait, "yes"))
            .await
            .unwrap();
        assert_eq!((again.verdict, again.replayed), (Verdict::Accepted, true));
    }
    refused(
        operator
            .deliver_to_gate(run, &wait.id, &delivery("d1", &wait, "no"))
            .await,
        "delivery_conflict",
    );
    let late = operator
        .deliver_to_gate(run, &wait.id, &delivery("d2", &wait, "no"))
        .await
        .unwrap();
    assert_eq!((late.verdict, late.replayed), (Verdict::Superseded, false));
    let done = room.work(&runner).await.unwrap().unwrap();
    assert_eq!(
        (done.status, done.state),
        (Status::Succeeded, vec!["yes".to_owned()])
    );
    let after = operator
        .deliver_to_gate(run, &wait.id, &delivery("d3", &wait, "no"))
        .await
        .unwrap();
    assert_eq!(after.verdict, Verdict::Superseded);
    refused(
        operator
            .deliver_to_gate(run, &wait.id, &delivery("d4", &wait, "no"))
            .await,
        "too_many_deliveries",
    );
    assert!(
        operator
            .deliver_to_gate(run, &wait.id, &delivery("d2", &wait, "no"))
            .await
            .unwrap()
            .replayed
    );
    let ledger = room
        .memory
        .decisions(run, &Scope::Wait(wait.id.clone()))
        .await
        .unwrap();
    assert_eq!(ledger.len(), 3);
    assert!(
        room.work(&runner).await.is_none(),
        "a delivery to a run that is over wakes nobody"
    );
    room.sound(run).await;
}

#[tokio::test]
async fn a_delivery_that_is_too_large_is_refused() {
    let room = Room::new();
    let mut options = Room::options();
    options.limits.max_payload = 3;
    let graph = one("large", |ctx: Ctx, trail: Trail| async move {
        ctx.gate("g").wait().await?;
        Ok((trail, Directive::end()))
    });
    let runner = room.runner_with(&graph, options.clone());
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let wait = room.wait(&parked.run, "g").await;
    refused(
        runner
            .deliver(&parked.run, &wait.id, &delivery("d", &wait, "long"))
            .await,
        "payload_too_large",
    );
    assert_eq!(room.wait(&parked.run, "g").await, wait);
    runner
        .deliver(&parked.run, &wait.id, &delivery("d", &wait, "yes"))
        .await
        .unwrap();
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

#[tokio::test]
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
            let slow = ctx.activity("slow").run("", |_| {
                let door = door.clone();
                async move {
                    door.pass().await;
                    Ok(bytes::Bytes::new())
                }
            });
            let (told, slow) = join(gated, slow).await;
            slow?;
            assert_eq!(told?, Told::Delivered("yes".into()));
            Ok((pushed(trail, "both"), Directive::end()))
        }
    });
    let runner = room.runner(&graph);
    let starting = runner.clone();
    let running = background(async move { starting.start(Start::new(Trail::new()).run(run_id("r"))).await });
    door.reached(1).await;
    // Listed and decidable while the run works.
    assert_eq!(room.status(&run_id("r")).await, Status::Running);
    let wait = room.wait(&run_id("r"), "g").await;
    assert_eq!(wait.status, WaitStatus::Armed);
    // The slow call ends only after the answer has arrived.
    runner
        .deliver(&run_id("r"), &wait.id, &delivery("d", &wait, "yes"))
        .await
        .unwrap();
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
        let starting = runner.clone();
        let running =
            background(async move { starting.start(Start::new(Trail::new()).run(run_id("r"))).await });
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
                    let told = delivering
                        .deliver(&run_id("r"), &wait.id, &delivery("d", wait, "yes"))
                        .await;
                    return told.unwrap().verdict;
                }
                tokio::task::yield_now().await;
            }
        });
        let first = done(running).await.unwrap();
        assert_eq!(done(sender).await, Verdict::Accepted);
        let status = match first.status {
            Status::Succeeded => Status::Succeeded,
            // Parked before the answer: then it is due.
            _ => room.drain(&runner).await.expect("an answered run is due").status,
        };
        assert_eq!(status, Status::Succeeded, "round {round}");
        assert_eq!(log.len(), 3, "round {round}: each call once");
        room.sound(&run).await;
    }
}

#[tokio::test]
async fn no_answer_is_lost_between_arming_and_parking() {
    race(1500).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_answer_is_lost_on_many_threads() {
    race(1500).await;
}

#[tokio::test]
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
        aside
            .deliver_to_gate(&run_id("r"), &wait.id, &delivery("d", &wait, "yes"))
            .await
            .unwrap();
        Ok(())
    });
    let done = within(runner.start(Start::new(Trail::new()).run(run_id("r"))))
        .await
        .unwrap();
    assert!(room.spy.met());
    assert_eq!(done.status, Status::Succeeded);
    room.sound(&done.run).await;
}

#[tokio::test]
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
        let late = runner
            .deliver(&parked.run, &wait.id, &delivery("d", &wait, "late"))
            .await;
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
        let late = runner
            .deliver(&parked.run, &wait.id, &delivery("e", &wait, "later"))
            .await;
        match policy {
            DeadlinePolicy::FirstCommitted => assert_eq!(late.unwrap().verdict, Verdict::Superseded),
            DeadlinePolicy::Hard => {
                refused(late, "delivery_conflict");
            }
        }
        room.sound(&parked.run).await;
    }
}

#[tokio::test]
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
    runner
        .deliver(&parked.run, &wait.id, &delivery("d", &wait, "yes"))
        .await
        .unwrap();
    let done = room.work(&runner).await.unwrap().unwrap();
    assert_eq!(
        (done.status, code(&done).as_str()),
        (Status::Failed, "activity_conflict")
    );
    room.sound(&done.run).await;
}

#[tokio::test]
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

#[tokio::test]
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
    refused(
        runner
            .deliver(&parked.run, &wait.id, &delivery("d", &wait, "now"))
            .await,
        "wait_not_armed",
    );
    room.clock.advance(Duration::from_secs(61));
    assert_eq!(
        room.work(&runner).await.unwrap().unwrap().status,
        Status::Succeeded
    );
}

#[tokio::test]
async fn an_answer_does_not_shorten_the_pause_of_its_step() {
    let (room, log) = (Room::new(), Log::new());
    let seen = log.clone();
    let graph = Arc::new(
        graph("paused")
            .retry("only", policy(3, Duration::from_secs(60)))
            .node("only", move |ctx: Ctx, trail: Trail| {
                seen.add(format!("attempt {}", ctx.attempt()));
                async move {
                    if ctx.attempt() == 1 {
                        let gate = ctx.gate("g").wait();
                        tokio::pin!(gate);
                        assert!(futures_util::poll!(&mut gate).is_pending());
                        return Err(down().into());
                    }
                    assert_eq!(ctx.gate("g").wait().await?, Told::Delivered("yes".into()));
                    Ok((trail, Directive::end()))
                }
            })
            .terminal("only")
            .compile()
            .unwrap(),
    );
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(waits_for(&parked)[0].0, WaitingKind::Retry);
    let wait = room.wait(&parked.run, "g").await;
    runner
        .deliver(&parked.run, &wait.id, &delivery("d", &wait, "yes"))
        .await
        .unwrap();
    if let Some(result) = room.work(&runner).await {
        assert_eq!(result.unwrap().status, Status::Waiting);
    }
    assert_eq!(log.len(), 1, "not before its time");
    room.sound(&parked.run).await;
    room.clock.advance(Duration::from_secs(61));
    let done = room.drain(&runner).await.unwrap();
    assert_eq!((done.status, log.len()), (Status::Succeeded, 2));
    room.sound(&parked.run).await;
}

#[tokio::test]
async fn a_resolved_run_waits_for_its_resume_whatever_is_answered_meanwhile() {
    let room = Room::new();
    let graph = one("both", |ctx: Ctx, trail: Trail| async move {
        let cut = ctx
            .activity("c")
            .run("", |_| async { Err(iop_durable::runner::CallError::Unknown) });
        let (out, told) = join(cut, ctx.gate("g").wait()).await;
        out?;
        assert_eq!(told?, Told::Delivered("yes".into()));
        Ok((trail, Directive::end()))
    });
    let runner = room.runner(&graph);
    let run = runner.start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(run.status, Status::Ambiguous);
    assert_eq!(run.waiting.as_ref().unwrap().on.len(), 2);
    let (record, wait) = (room.activity(&run.run, "c").await, room.wait(&run.run, "g").await);
    let operator = runner.operator();
    let resolved = operator
        .resolve(&run.token, &resolution("d", &record, complete("")), None, false)
        .await
        .unwrap();
    assert_eq!(resolved.status, Status::Waiting);
    room.sound(&run.run).await;
    operator
        .deliver_to_gate(&run.run, &wait.id, &delivery("w", &wait, "yes"))
        .await
        .unwrap();
    if let Some(result) = room.work(&runner).await {
        assert_eq!(result.unwrap().status, Status::Waiting);
    }
    room.sound(&run.run).await;
    let token = room.token(&run.run).await;
    let done = runner.resume(&token, Resume::new()).await.unwrap();
    assert_eq!(done.status, Status::Succeeded);
    room.sound(&run.run).await;
}

#[tokio::test]
async fn a_gate_answered_while_the_run_is_ambiguous_is_kept() {
    let room = Room::new();
    let graph = one("kept", |ctx: Ctx, trail: Trail| async move {
        let cut = ctx
            .activity("c")
            .run("", |_| async { Err(iop_durable::runner::CallError::Unknown) });
        let (out, told) = join(cut, ctx.gate("g").wait()).await;
        out?;
        assert_eq!(told?, Told::Delivered("yes".into()));
        Ok((trail, Directive::end()))
    });
    let runner = room.runner(&graph);
    let run = runner.start(Start::new(Trail::new())).await.unwrap();
    let (record, wait) = (room.activity(&run.run, "c").await, room.wait(&run.run, "g").await);
    runner
        .deliver(&run.run, &wait.id, &delivery("w", &wait, "yes"))
        .await
        .unwrap();
    if let Some(result) = room.work(&runner).await {
        assert_eq!(result.unwrap().status, Status::Ambiguous);
    }
    assert!(room.work(&runner).await.is_none(), "and it does not spin");
    room.sound(&run.run).await;
    let token = room.token(&run.run).await;
    runner
        .operator()
        .resolve(&token, &resolution("d", &record, complete("")), None, true)
        .await
        .unwrap();
    assert_eq!(room.drain(&runner).await.unwrap().status, Status::Succeeded);
    room.sound(&run.run).await;
}

#[tokio::test]
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
            let (runner, run, wait) = (runner.clone(), parked.run.clone(), wait.clone());
            async move {
                let id = format!("d{}", n / 2);
                runner
                    .deliver(&run, &wait.id, &delivery(&id, &wait, &id))
                    .await
                    .unwrap()
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

#[tokio::test]
async fn what_stands_behind_a_resolved_call_does_not_wait_for_a_gate() {
    for reconciled in [true, false] {
        let (room, log) = (Room::new(), Log::new());
        let calls = log.clone();
        let graph = one("behind", move |ctx: Ctx, trail: Trail| {
            let calls = calls.clone();
            async move {
                let chain = async {
                    let cut = ctx.activity("c");
                    cut.run("", |_| async { Err(iop_durable::runner::CallError::Unknown) })
                        .await?;
                    call(&ctx, "next", Effect::Idempotent, &calls)
                        .await
                        .map_err(NodeError::from)
                };
                let (next, told) = join(chain, ctx.gate("g").wait()).await;
                assert_eq!(told?, Told::Delivered("yes".into()));
                Ok((pushed(trail, next?), Directive::end()))
            }
        });
        let runner = room.runner(&graph);
        let run = runner.start(Start::new(Trail::new())).await.unwrap();
        assert_eq!(run.status, Status::Ambiguous);
        let record = room.activity(&run.run, "c").await;
        let operator = runner.operator();
        if reconciled {
            let found = operator.reconcile(&run.run, &record.id, |_| async { Some("".into()) });
            found.await.unwrap();
        } else {
            let word = resolution("d", &record, complete(""));
            operator.resolve(&run.token, &word, None, true).await.unwrap();
        }
        let parked = room.work(&runner).await.unwrap().unwrap();
        assert_eq!(
            (parked.status, log.all()),
            (Status::Waiting, vec!["next".to_owned()])
        );
        let wait = room.wait(&run.run, "g").await;
        runner
            .deliver(&run.run, &wait.id, &delivery("d", &wait, "yes"))
            .await
            .unwrap();
        let done = room.work(&runner).await.unwrap().unwrap();
        assert_eq!((done.status, log.len()), (Status::Succeeded, 1));
        room.sound(&run.run).await;
    }
}

#[tokio::test]
async fn an_answer_that_was_taken_stays_taken_when_the_run_is_cancelled() {
    // Parked: between the request and the end, by the one who asks.
    let room = Room::new();
    let graph = one("taken", |ctx: Ctx, trail: Trail| async move {
        ctx.gate("g").wait().await?;
        Ok((trail, Directive::end()))
    });
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let wait = room.wait(&parked.run, "g").await;
    let (aside, run, gate) = (room.aside(), parked.run.clone(), wait.clone());
    room.spy.before(Op::Commit, 0, || async move {
        let told = aside
            .deliver_to_gate(&run, &gate.id, &delivery("d", &gate, "yes"))
            .await
            .unwrap();
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
        let told = aside
            .deliver_to_gate(&run_id("r"), &gate.id, &delivery("d", &gate, "yes"))
            .await
            .unwrap();
        assert_eq!(told.verdict, Verdict::Accepted);
        Ok(())
    });
    let result = within(runner.start(start)).await.unwrap();
    assert!(room.spy.met());
    let status = match result.status {
        Status::Cancelled => Status::Cancelled,
        _ => {
            room.clock.advance(Duration::from_secs(1));
            room.drain(&runner).await.unwrap().status
        }
    };
    assert_eq!(status, Status::Cancelled);
    assert_eq!(room.wait(&run_id("r"), "g").await.status, WaitStatus::Delivered);
    room.sound(&run_id("r")).await;
}
