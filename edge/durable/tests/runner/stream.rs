//! Runs as streams: the stored events in order, one end per life, the result the truth whoever reads (D232 to D238, D243, D103).

use std::sync::Arc;
use std::time::Duration;

use iop_durable::graph::{Directive, Graph};
use iop_durable::record::{ActivityState, Effect, EventRecord, Status};
use iop_durable::runner::{Ctx, Resume, Start};
use iop_durable::store::Store;

use crate::support::*;

/// Tells of itself, suspends, and goes on.
fn talking() -> Arc<Graph<Trail>> {
    shared(
        graph("talking")
            .node("say", |ctx: Ctx, trail: Trail| async move {
                for n in 0..trail[0].parse::<u32>().unwrap() {
                    ctx.emit("talk.word", &n).unwrap();
                }
                match trail.len() {
                    1 => Ok((pushed(trail, "said"), Directive::suspend("breath"))),
                    _ => Ok((trail, Directive::completed())),
                }
            })
            .node("end", ends)
            .edge("say", "end")
            .terminal("end"),
    )
}

fn names(events: &[EventRecord]) -> Vec<&str> {
    events.iter().map(|e| e.name.as_ref()).collect()
}

#[tokio::test(start_paused = true)]
async fn what_is_streamed_is_the_log_from_its_place_to_the_end() {
    let room = Room::new();
    let runner = room.runner(&talking());
    let begin = Start::new(vec!["2".to_owned()]);
    let (first, parked) = within(runner.start_stream(begin).collect()).await.unwrap();
    assert_eq!(parked.status, Status::Waiting);
    assert_eq!(
        names(&first),
        [
            "run.created",
            "run.started",
            "run.step.started",
            "talk.word",
            "talk.word",
            "run.step.completed",
            "run.waiting"
        ]
    );
    assert!(first.iter().all(|e| !e.terminal), "parked is no end");
    let stream = runner.resume_stream(&parked.token, Resume::new()).await.unwrap();
    let (second, done) = within(stream.collect()).await.unwrap();
    assert_eq!(done.status, Status::Succeeded);
    assert_eq!(second.first().unwrap().seq, first.last().unwrap().seq + 1);
    assert_eq!(second.iter().filter(|e| e.terminal).count(), 1);
    let all: Vec<EventRecord> = first.into_iter().chain(second).collect();
    assert_eq!(all, room.events(&done.run).await);
    let end = all.last().unwrap();
    let outcome = room.load(&done.run).await.head.outcome.unwrap();
    assert_eq!(end.data, [&b"{\"outcome\":"[..], &outcome, b"}"].concat());
    assert_eq!(done.outcome.unwrap().encode().unwrap(), outcome);
    // The same run over again, from the store: nothing more to tell.
    let stream = runner.resume_stream(&done.token, Resume::new()).await.unwrap();
    let (more, again) = within(stream.collect()).await.unwrap();
    assert_eq!((more.len(), again.status), (0, Status::Succeeded));
    room.sound(&done.run).await;
}

#[tokio::test(start_paused = true)]
async fn five_thousand_events_reach_a_slow_reader() {
    let room = Room::new();
    let runner = room.runner(&talking());
    let begin = Start::new(vec!["5000".to_owned(), "at once".to_owned()]);
    let mut stream = runner.start_stream(begin);
    let run = stream.run().clone();
    // Nobody reads; the run is not held up by that.
    eventually(|| async {
        room.memory
            .load(&run)
            .await
            .is_ok_and(|l| l.head.status.is_terminal())
    })
    .await;
    let mut seen = Vec::new();
    while let Some(event) = within(stream.next()).await.unwrap() {
        if seen.len() % 700 == 0 {
            tokio::task::yield_now().await;
        }
        seen.push(event);
    }
    assert_eq!(within(stream.next()).await.unwrap(), None, "and it stays over");
    assert_eq!(seen.len(), 5007);
    assert_eq!(seen, room.events(&run).await);
    let words: Vec<u32> = seen
        .iter()
        .filter(|e| e.name == "talk.word")
        .map(|e| serde_json::from_slice(&e.data).unwrap())
        .collect();
    assert_eq!(words, (0..5000).collect::<Vec<u32>>());
    assert_eq!(
        within(stream.wait_result()).await.unwrap().status,
        Status::Succeeded
    );
    room.sound(&run).await;
}

/// Three steps, each behind the door.
fn stepping(log: &Log, door: &Door, effect: Option<Effect>) -> Arc<Graph<Trail>> {
    let (log, door) = (log.clone(), door.clone());
    shared(
        graph("stepping")
            .node("step", move |ctx: Ctx, trail: Trail| {
                let (log, door) = (log.clone(), door.clone());
                async move {
                    log.add(format!("step {}", ctx.activation()));
                    match effect {
                        None => door.pass().await,
                        Some(effect) => {
                            let call = ctx.activity("c").effect(effect).run("", |call| {
                                log.add(format!("call {}", call.attempt));
                                door.answers("")
                            });
                            call.await?;
                        }
                    }
                    let directive = match trail.len() {
                        2 => Directive::end(),
                        _ => Directive::completed(),
                    };
                    Ok((pushed(trail, "x"), directive))
                }
            })
            .edge("step", "step"),
    )
}

#[tokio::test(start_paused = true)]
async fn dropping_a_stream_leaves_the_run_to_itself() {
    let (room, log, door) = (Room::new(), Log::new(), Door::new());
    let runner = room.runner(&stepping(&log, &door, None));
    let mut stream = runner.start_stream(Start::new(Trail::new()).run(run_id("r")));
    assert_eq!(within(stream.next()).await.unwrap().unwrap().name, "run.created");
    door.reached(1).await;
    drop(stream);
    door.open();
    eventually(|| async { room.status(&run_id("r")).await == Status::Succeeded }).await;
    eventually(|| async { room.load(&run_id("r")).await.lease.is_none() }).await;
    room.sound(&run_id("r")).await;
    assert_eq!(log.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_stop_leaves_the_run_at_its_last_commit_for_whoever_comes() {
    let (room, log, door) = (Room::new(), Log::new(), Door::new());
    let graph = stepping(&log, &door, None);
    let runner = room.runner(&graph);
    let stream = runner.start_stream(Start::new(Trail::new()).run(run_id("r")));
    door.reached(1).await;
    stream.request_stop();
    let stopped = within(stream.wait_result()).await.unwrap();
    assert_eq!((stopped.status, stopped.state.len()), (Status::Queued, 0));
    room.sound(&run_id("r")).await;
    door.open();
    let done = room.work(&room.runner(&graph)).await.unwrap().unwrap();
    assert_eq!((done.status, done.life), (Status::Succeeded, 1));
    assert_eq!(log.all(), ["step 1", "step 1", "step 2", "step 3"]);
    let head = room.load(&run_id("r")).await.head;
    assert_eq!(head.recoveries, 0, "a stop is no lost worker");
    let starts = room
        .names(&run_id("r"))
        .await
        .iter()
        .filter(|n| *n == "run.step.started")
        .count();
    assert_eq!(starts, 3, "the interrupted step went on");
    room.sound(&run_id("r")).await;
}

#[tokio::test(start_paused = true)]
async fn a_stop_lets_calls_end_and_cuts_off_those_that_do_not() {
    for (effect, status) in [
        (Effect::ReadOnly, Status::Queued),
        (Effect::Idempotent, Status::Queued),
        (Effect::Unsafe, Status::Ambiguous),
    ] {
        for answers in [true, false] {
            let (room, log, door) = (Room::new(), Log::new(), Door::new());
            let graph = stepping(&log, &door, Some(effect));
            let runner = room.runner(&graph);
            let stream = runner.start_stream(Start::new(Trail::new()).run(run_id("r")));
            door.reached(1).await;
            let asked = tokio::time::Instant::now();
            stream.request_stop();
            if answers {
                tokio::time::sleep(Duration::from_secs(3)).await;
                door.open();
            }
            let stopped = within(stream.wait_result()).await.unwrap();
            let took = asked.elapsed();
            room.sound(&run_id("r")).await;
            if answers {
                assert!(took < Duration::from_secs(4), "{effect}");
                assert_eq!(stopped.status, Status::Queued, "{effect}");
                let record = room.activity(&run_id("r"), "c").await;
                assert_eq!(
                    (record.state, record.attempts.len()),
                    (ActivityState::Completed, 1),
                    "{effect}"
                );
            } else {
                assert!(
                    took >= Duration::from_secs(10) && took < Duration::from_secs(11),
                    "{effect}: {took:?}"
                );
                assert_eq!(stopped.status, status, "{effect}");
                if status == Status::Ambiguous {
                    continue;
                }
                door.open();
            }
            let done = room.drain(&room.runner(&graph)).await.unwrap();
            assert_eq!(done.status, Status::Succeeded, "{effect}");
            room.sound(&run_id("r")).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_consumer_that_has_had_enough_stops_the_segment() {
    let (room, log, door) = (Room::new(), Log::new(), Door::new());
    let graph = stepping(&log, &door, None);
    let runner = room.runner(&graph);
    let stream = runner.start_stream(Start::new(Trail::new()).run(run_id("r")));
    let stopped = within(stream.consume(|event| event.name != "run.step.started"))
        .await
        .unwrap();
    assert_eq!(stopped.status, Status::Queued);
    door.open();
    let done = room.work(&runner).await.unwrap().unwrap();
    assert_eq!(done.status, Status::Succeeded);
    // And one that reads to the end.
    let mut count = 0;
    let stream = runner.start_stream(Start::new(Trail::new()).run(run_id("s")));
    let done = within(stream.consume(|_| {
        count += 1;
        true
    }))
    .await
    .unwrap();
    assert_eq!(
        (done.status, count),
        (Status::Succeeded, room.events(&run_id("s")).await.len())
    );
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_is_refused_tells_nothing_and_says_why() {
    let (room, log, door) = (Room::new(), Log::new(), Door::new());
    door.open();
    let runner = room.runner(&stepping(&log, &door, None));
    let done = runner
        .start(Start::new(Trail::new()).run(run_id("r")))
        .await
        .unwrap();
    // The id is taken: the events of the other run are not this caller's.
    let mut stream = runner.start_stream(Start::new(vec!["other".to_owned()]).run(run_id("r")));
    assert_eq!(within(stream.next()).await.unwrap(), None);
    refused(within(stream.wait_result()).await, "idempotency_conflict");
    let stale = iop_durable::token::ResumeToken {
        run: done.run.clone(),
        revision: iop_durable::ids::Revision::FIRST,
    };
    let mut stream = runner.resume_stream(&stale, Resume::new()).await.unwrap();
    assert_eq!(within(stream.next()).await.unwrap(), None);
    refused(within(stream.wait_result()).await, "stale_token");
    let nobody = iop_durable::token::ResumeToken {
        run: run_id("nobody"),
        revision: done.token.revision,
    };
    assert_eq!(
        runner
            .resume_stream(&nobody, Resume::new())
            .await
            .err()
            .unwrap()
            .code(),
        "run_not_found"
    );
}

#[tokio::test(start_paused = true)]
async fn the_result_does_not_need_a_reader_and_a_failing_store_does_not_hide_it() {
    let (room, log, door) = (Room::new(), Log::new(), Door::new());
    door.open();
    let runner = room.runner(&stepping(&log, &door, None));
    for _ in 0..3 {
        room.spy
            .answer(Op::Events, 0, iop_durable::store::StoreError::unavailable("away"));
    }
    let mut stream = runner.start_stream(Start::new(Trail::new()).run(run_id("r")));
    let mut seen = Vec::new();
    let mut errors = 0;
    loop {
        match within(stream.next()).await {
            Ok(Some(event)) => seen.push(event),
            Ok(None) => break,
            Err(error) => {
                assert_eq!(error.code(), "store_unavailable");
                errors += 1;
            }
        }
    }
    assert_eq!((errors, &seen), (3, &room.events(&run_id("r")).await));
    assert_eq!(
        within(stream.wait_result()).await.unwrap().status,
        Status::Succeeded
    );
}

#[tokio::test(start_paused = true)]
async fn a_deleted_run_ends_its_stream() {
    let room = Room::new();
    let graph: Arc<Graph<Trail>> = shared(
        graph("gone")
            .delete_on_success()
            .node("only", ends)
            .terminal("only"),
    );
    let runner = room.runner(&graph);
    let (events, done) = within(runner.start_stream(Start::new(Trail::new())).collect())
        .await
        .unwrap();
    assert_eq!(done.status, Status::Succeeded, "the result is the truth");
    assert!(events.iter().filter(|e| e.terminal).count() <= 1);
}

#[tokio::test(start_paused = true)]
async fn host_events_are_checked_before_they_are_taken() {
    let room = Room::new();
    let mut options = Room::options();
    options.limits.max_payload = 20;
    let graph: Arc<Graph<Trail>> = one("emits", |ctx: Ctx, trail: Trail| async move {
        for name in ["run.succeeded", "run.created", "a\0b", ""] {
            assert!(ctx.emit(name, &1).is_err(), "{name:?}");
        }
        assert_eq!(
            ctx.emit("big", &"x".repeat(19)).unwrap_err().code,
            "payload_too_large"
        );
        ctx.emit("big", &"x".repeat(18)).unwrap();
        ctx.emit("own.name", &serde_json::json!({ "nul": "\0" })).unwrap();
        Ok((trail, Directive::end()))
    });
    let done = room
        .runner_with(&graph, options)
        .start(Start::new(Trail::new()))
        .await
        .unwrap();
    assert_eq!(done.status, Status::Succeeded);
    let names = room.names(&done.run).await;
    assert_eq!(
        names
            .iter()
            .filter(|n| !n.starts_with("run."))
            .collect::<Vec<_>>(),
        ["big", "own.name"]
    );
    room.sound(&done.run).await;
}
