//! Pauses beside other things that hold a step: retries, unknown effects, resumes (D83, D148, D159).

use std::time::Duration;

use futures_util::TryFutureExt as _;
use futures_util::future::{join, try_join};
use iop_durable::graph::{Directive, NodeError};
use iop_durable::machine::wait::Verdict;
use iop_durable::record::{Effect, Status, WaitStatus, WaitingKind};
use iop_durable::runner::{Answer as Told, Ctx, Resume, Start};
use iop_durable::store::Store;

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn an_answer_does_not_shorten_the_pause_of_its_step() {
    let (room, log) = (Room::new(), Log::new());
    let seen = log.clone();
    let graph = shared(
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
            .terminal("only"),
    );
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(waits_for(&parked)[0].0, WaitingKind::Retry);
    let wait = room.wait(&parked.run, "g").await;
    deliver(&runner, &wait, "d", "yes").await.unwrap();
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

/// A call whose answer is unknown, beside a gate that is told yes.
async fn cut_beside_a_gate(ctx: Ctx, trail: Trail) -> Answer {
    let (out, told) = join(cut_off(&ctx, "c"), ctx.gate("g").wait()).await;
    out?;
    assert_eq!(told?, Told::Delivered("yes".into()));
    Ok((trail, Directive::end()))
}

#[tokio::test(start_paused = true)]
async fn a_resolved_run_waits_for_its_resume_whatever_is_answered_meanwhile() {
    let room = Room::new();
    let graph = one("both", cut_beside_a_gate);
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
    deliver_to_gate(&operator, &wait, "w", "yes").await.unwrap();
    if let Some(result) = room.work(&runner).await {
        assert_eq!(result.unwrap().status, Status::Waiting);
    }
    room.sound(&run.run).await;
    let token = room.token(&run.run).await;
    let done = runner.resume(&token, Resume::new()).await.unwrap();
    assert_eq!(done.status, Status::Succeeded);
    room.sound(&run.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_gate_answered_while_the_run_is_ambiguous_is_kept() {
    let room = Room::new();
    let graph = one("kept", cut_beside_a_gate);
    let runner = room.runner(&graph);
    let run = runner.start(Start::new(Trail::new())).await.unwrap();
    let (record, wait) = (room.activity(&run.run, "c").await, room.wait(&run.run, "g").await);
    deliver(&runner, &wait, "w", "yes").await.unwrap();
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

#[tokio::test(start_paused = true)]
async fn what_stands_behind_a_resolved_call_does_not_wait_for_a_gate() {
    for reconciled in [true, false] {
        let (room, log) = (Room::new(), Log::new());
        let calls = log.clone();
        let graph = one("behind", move |ctx: Ctx, trail: Trail| {
            let calls = calls.clone();
            async move {
                let chain = async {
                    cut_off(&ctx, "c").await?;
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
        deliver(&runner, &wait, "d", "yes").await.unwrap();
        let done = room.work(&runner).await.unwrap().unwrap();
        assert_eq!((done.status, log.len()), (Status::Succeeded, 1));
        room.sound(&run.run).await;
    }
}

#[tokio::test(start_paused = true)]
async fn another_life_asks_again_for_what_was_not_answered() {
    for answered in [true, false] {
        let room = Room::new();
        let graph = one("again", move |ctx: Ctx, trail: Trail| async move {
            let call = async {
                if answered {
                    // Not before both are answered.
                    ctx.gate("first").wait().await?;
                }
                let out = ctx.activity("c").run("", |call| async move {
                    if call.attempt == 1 {
                        return Err(failed(down()));
                    }
                    Ok("out".into())
                });
                out.await.map_err(NodeError::from)
            };
            let gate = ctx.gate("g").subject("which").wait();
            let (told, _) = try_join(gate.map_err(NodeError::from), call).await?;
            Ok((pushed(trail, format!("{told:?}")), Directive::end()))
        });
        let runner = room.runner(&graph);
        let mut run = runner.start(Start::new(Trail::new())).await.unwrap();
        if answered {
            for name in ["g", "first"] {
                let wait = room.wait(&run.run, name).await;
                deliver(&runner, &wait, name, "yes").await.unwrap();
            }
            run = room.drain(&runner).await.unwrap();
        }
        assert_eq!(run.status, Status::Failed);
        room.sound(&run.run).await;
        let life = runner.resume(&run.token, Resume::new()).await.unwrap();
        let yes = format!("{:?}", Told::Delivered("yes".into()));
        if answered {
            // What was decided is not asked again.
            assert_eq!((life.status, life.state), (Status::Succeeded, vec![yes]));
            room.sound(&run.run).await;
            continue;
        }
        assert_eq!(life.status, Status::Waiting);
        room.sound(&run.run).await;
        let mut waits = room.memory.waits(&run.run).await.unwrap();
        waits.sort_by_key(|wait| wait.generation);
        let told: Vec<_> = waits.iter().map(|w| (w.generation, w.status)).collect();
        assert_eq!(told, [(1, WaitStatus::Cancelled), (2, WaitStatus::Armed)]);
        // The old one's answer is too late, the new one's counts.
        let late = deliver(&runner, &waits[0], "d", "no").await.unwrap();
        assert_eq!(late.verdict, Verdict::Canceled);
        let mut stale = delivery("e", &waits[1], "yes");
        stale.generation = Some(1);
        refused(
            runner.deliver(&run.run, &waits[1].id, &stale).await,
            "delivery_conflict",
        );
        deliver(&runner, &waits[1], "f", "yes").await.unwrap();
        let done = room.drain(&runner).await.unwrap();
        assert_eq!(
            (done.status, done.life, done.state),
            (Status::Succeeded, 2, vec![yes])
        );
        room.sound(&run.run).await;
    }
}
