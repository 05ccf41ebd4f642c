//! Pauses beside other things that hold a step: retries, unknown effects, resumes (D83, D148, D159).

use crate::support::*;
use futures_util::future::join;
use iop_durable::graph::{Directive, NodeError};
use iop_durable::record::{Effect, Status, WaitingKind};
use iop_durable::runner::{Answer as Told, Ctx, Resume, Start};
use std::sync::Arc;
use std::time::Duration;

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
