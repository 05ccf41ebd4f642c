//! Waits of the graph: armed with the state they follow, won by whoever commits first, every other word recorded, cancelled with
//! the run (section K, durable-api §8 "Waits").

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use iop_durable::graph::{Await, Deadline, Directive, Graph, GraphBuilder};
use iop_durable::machine::wait::Verdict;
use iop_durable::payload::Payload;
use iop_durable::record::{DeadlinePolicy, Scope, Status, StepStatus, WaitLabels, WaitStatus, WaitingKind};
use iop_durable::runner::{Ctx, Resume, RunError, Start};
use iop_durable::store::Store;

use crate::support::*;

pub(crate) const HOUR: Duration = Duration::from_secs(3600);

pub(crate) fn labels(matcher: &str) -> WaitLabels {
    WaitLabels {
        matcher: matcher.to_owned(),
        payload: "text".to_owned(),
        continuation: "v1".to_owned(),
    }
}

#[derive(Clone, Default)]
pub(crate) struct Asked {
    pub(crate) matcher: Arc<AtomicU32>,
    pub(crate) transition: Arc<AtomicU32>,
}

impl Asked {
    pub(crate) fn counts(&self) -> (u32, u32) {
        (
            self.matcher.load(Ordering::SeqCst),
            self.transition.load(Ordering::SeqCst),
        )
    }
}

pub(crate) fn spec(kind: WaitingKind, policy: DeadlinePolicy) -> Await {
    Await {
        key: key("w"),
        correlation: correlation("order 7"),
        kind,
        subject: Payload::new("which?"),
        deadline: Some(Deadline::In(HOUR)),
        deadline_policy: policy,
    }
}

/// Waits for a payload that begins with `yes`; `error` is one the transition refuses.
pub(crate) fn waiting(
    builder: GraphBuilder<Trail>,
    kind: WaitingKind,
    policy: DeadlinePolicy,
    asked: &Asked,
    log: &Log,
) -> Arc<Graph<Trail>> {
    let (log, matcher, transition, done) = (
        log.clone(),
        asked.matcher.clone(),
        asked.transition.clone(),
        log.clone(),
    );
    shared(
        builder
            .node("ask", move |_: Ctx, trail: Trail| {
                log.add("ask");
                let wait = Directive::wait(spec(kind, policy)).result("asked");
                async move { Ok((pushed(trail, "asked"), wait)) }
            })
            .node("event", move |_: Ctx, trail: Trail| {
                done.add("event");
                async move { Ok((pushed(trail, "event"), Directive::end())) }
            })
            .node("timeout", |_: Ctx, trail: Trail| async move {
                Ok((pushed(trail, "timeout"), Directive::end()))
            })
            .wait_route(
                "ask",
                labels("begins with yes"),
                "event",
                "timeout",
                move |trail: &Trail, payload| {
                    matcher.fetch_add(1, Ordering::SeqCst);
                    assert_eq!(trail, &["asked"], "the committed state");
                    payload.bytes().starts_with(b"yes") || payload.bytes().starts_with(b"error")
                },
                move |trail: Trail, payload: &Payload| {
                    transition.fetch_add(1, Ordering::SeqCst);
                    if payload.bytes().starts_with(b"error") {
                        return Err("not that".to_owned());
                    }
                    Ok(pushed(trail, text(payload.bytes())))
                },
            )
            .terminal("event")
            .terminal("timeout"),
    )
}

pub(crate) fn plain(asked: &Asked, log: &Log) -> Arc<Graph<Trail>> {
    waiting(
        graph("waiting"),
        WaitingKind::Event,
        DeadlinePolicy::FirstCommitted,
        asked,
        log,
    )
}

#[tokio::test(start_paused = true)]
async fn the_wait_and_the_state_it_follows_are_one_commit() {
    let (room, log, asked) = (Room::new(), Log::new(), Asked::default());
    let graph = plain(&asked, &log);
    let runner = room.runner(&graph);
    let before = room.memory.now().await.unwrap();
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(parked.status, Status::Waiting);
    assert_eq!(waits_for(&parked), [(WaitingKind::Event, "w".to_owned())]);
    assert_eq!(room.spy.count(Op::Commit), 1);
    let commit = room.spy.commits().remove(0);
    assert_eq!(
        (commit.waits.len(), commit.steps.len(), commit.release),
        (1, 1, true)
    );
    assert_eq!(parked.state, ["asked"]);
    let wait = room.wait(&parked.run, "w").await;
    assert_eq!((wait.status, wait.generation), (WaitStatus::Armed, 1));
    assert_eq!(wait.labels, labels("begins with yes"));
    assert_eq!(text(wait.subject.bytes()), "which?");
    let late = wait.deadline.unwrap().since(before.plus(HOUR));
    assert!(
        late < Duration::from_secs(1),
        "absolute from the moment it is armed"
    );
    assert_eq!(parked.waiting.as_ref().unwrap().due_at, wait.deadline);
    let steps = room.steps(&parked.run).await;
    assert_eq!(
        (steps[0].status, steps[0].result.as_deref()),
        (StepStatus::Done, Some("asked"))
    );
    room.sound(&parked.run).await;
    // Asked again, nothing is done again (D163).
    for _ in 0..3 {
        let token = room.token(&parked.run).await;
        refused(
            room.runner(&graph).resume(&token, Resume::new()).await,
            "run_waiting",
        );
        let now = room.memory.now().await.unwrap();
        room.memory
            .tamper(&parked.run, iop_durable::testing::Tamper::DueAt(Some(now)));
        let same = room.work(&room.runner(&graph)).await.unwrap().unwrap();
        assert_eq!(same.waiting, parked.waiting);
        assert_eq!(room.wait(&parked.run, "w").await, wait);
    }
    assert_eq!((log.all(), asked.counts()), (vec!["ask".to_owned()], (0, 0)));
    room.sound(&parked.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_delivery_decides_transforms_and_selects_in_one_commit_and_runs_nothing() {
    let (room, log, asked) = (Room::new(), Log::new(), Asked::default());
    let graph = plain(&asked, &log);
    let runner = room.runner(&graph);
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let wait = room.wait(&parked.run, "w").await;
    let run = &parked.run;
    // Labels first, then the callbacks.
    let mut wrong = delivery("d", &wait, "yes please");
    wrong.labels = Some(labels("another matcher"));
    refused(runner.deliver(run, &wait.id, &wrong).await, "delivery_conflict");
    assert_eq!(asked.counts(), (0, 0));
    // Not the one: recorded, and still armed.
    let no = deliver(&runner, &wait, "d1", "no").await.unwrap();
    assert_eq!((no.verdict, asked.counts()), (Verdict::Unmatched, (1, 0)));
    assert!(room.work(&runner).await.is_none(), "nobody is woken");
    let again = deliver(&runner, &wait, "d1", "no").await.unwrap();
    assert!(again.replayed);
    assert_eq!(asked.counts(), (1, 0), "a replay asks nobody");
    // The transition says no: nothing is recorded, the id is free.
    let before = room.load(run).await;
    let error = refused(deliver(&runner, &wait, "d2", "error").await, "invalid_request");
    assert!(matches!(error, RunError::InvalidRequest { field: "payload", .. }));
    assert_eq!(room.load(run).await.head, before.head);
    assert_eq!(room.decisions(run, &Scope::Wait(wait.id.clone())).await.len(), 1);
    room.spy.reset();
    let mut good = delivery("d2", &wait, "yes please");
    good.labels = Some(wait.labels.clone());
    let won = runner.deliver(run, &wait.id, &good).await.unwrap();
    assert_eq!((won.verdict, won.replayed), (Verdict::Accepted, false));
    assert_eq!(won.token, room.token(run).await);
    assert_eq!(room.spy.count(Op::Commit), 1);
    let commit = room.spy.commits().remove(0);
    assert_eq!((commit.waits.len(), commit.decisions.len()), (1, 1));
    let head = room.load(run).await.head;
    assert_eq!(
        (head.status, head.cursor.unwrap().as_str().to_owned()),
        (Status::Queued, "event".to_owned())
    );
    assert_eq!(log.all(), ["ask"], "no node ran");
    room.sound(run).await;
    for _ in 0..5 {
        let again = runner.deliver(run, &wait.id, &good).await.unwrap();
        assert_eq!((again.verdict, again.replayed), (Verdict::Accepted, true));
    }
    refused(
        deliver(&runner, &wait, "d2", "yes but").await,
        "delivery_conflict",
    );
    let loser = deliver(&runner, &wait, "d3", "yes too").await.unwrap();
    assert_eq!(loser.verdict, Verdict::Superseded);
    let done = room.work(&runner).await.unwrap().unwrap();
    assert_eq!(
        (done.status, done.state.join(", ")),
        (Status::Succeeded, "asked, yes please, event".to_owned())
    );
    assert_eq!(log.all(), ["ask", "event"]);
    assert_eq!(
        room.names(run).await,
        [
            "run.created",
            "run.started",
            "run.step.started",
            "run.step.completed",
            "run.waiting",
            "run.resumed",
            "run.step.started",
            "run.step.completed",
            "run.succeeded"
        ]
    );
    room.sound(run).await;
}

#[tokio::test(start_paused = true)]
async fn a_wait_of_another_definition_is_not_judged_by_this_one() {
    let (room, log, asked) = (Room::new(), Log::new(), Asked::default());
    let parked = room
        .runner(&plain(&asked, &log))
        .start(Start::new(Trail::new()))
        .await
        .unwrap();
    let wait = room.wait(&parked.run, "w").await;
    let other = Asked::default();
    let graph = waiting(
        GraphBuilder::new("waiting", 2),
        WaitingKind::Event,
        DeadlinePolicy::FirstCommitted,
        &other,
        &log,
    );
    let runner = room.runner(&graph);
    for word in ["yes", "no"] {
        refused(deliver(&runner, &wait, "d", word).await, "definition_changed");
    }
    assert_eq!(other.counts(), (0, 0));
    assert_eq!(room.wait(&parked.run, "w").await, wait);
    // The operators, which know no graph, leave it to those who do.
    let aside = room.aside();
    refused(deliver_to_gate(&aside, &wait, "d", "yes").await, "wait_not_found");
}

#[tokio::test(start_paused = true)]
async fn the_timer_is_let_in_at_its_time_and_not_before() {
    for policy in [DeadlinePolicy::FirstCommitted, DeadlinePolicy::Hard] {
        let (room, log, asked) = (Room::new(), Log::new(), Asked::default());
        let graph = waiting(graph("timer"), WaitingKind::Event, policy, &asked, &log);
        let runner = room.runner(&graph);
        let parked = runner.start(Start::new(Trail::new())).await.unwrap();
        let wait = room.wait(&parked.run, "w").await;
        room.clock.advance(HOUR - Duration::from_secs(1));
        let due = room
            .memory
            .due(room.memory.now().await.unwrap(), None, 10)
            .await
            .unwrap();
        assert_eq!((due.len(), room.work(&runner).await.is_none()), (0, true));
        room.clock.advance(Duration::from_secs(2));
        // Found by discovery, which accepts nothing.
        for _ in 0..2 {
            let due = room
                .memory
                .due(room.memory.now().await.unwrap(), None, 10)
                .await
                .unwrap();
            assert_eq!(due.len(), 1);
        }
        assert_eq!(room.wait(&parked.run, "w").await, wait);
        let late = deliver(&runner, &wait, "d", "yes").await;
        let expected = match policy {
            DeadlinePolicy::FirstCommitted => {
                assert_eq!(late.unwrap().verdict, Verdict::Accepted);
                "asked, yes, event"
            }
            DeadlinePolicy::Hard => {
                refused(late, "delivery_conflict");
                "asked, timeout"
            }
        };
        let done = room.work(&runner).await.unwrap().unwrap();
        assert_eq!(
            (done.status, done.state.join(", ").as_str()),
            (Status::Succeeded, expected)
        );
        room.sound(&parked.run).await;
        assert!(room.work(&runner).await.is_none());
    }
    // The timer first: the event loses, and is told so.
    let (room, log, asked) = (Room::new(), Log::new(), Asked::default());
    let runner = room.runner(&plain(&asked, &log));
    let parked = runner.start(Start::new(Trail::new())).await.unwrap();
    let wait = room.wait(&parked.run, "w").await;
    room.clock.advance(HOUR + Duration::from_secs(1));
    let done = room.work(&runner).await.unwrap().unwrap();
    assert_eq!(done.state, ["asked", "timeout"]);
    assert_eq!(room.wait(&parked.run, "w").await.status, WaitStatus::TimedOut);
    let late = deliver(&runner, &wait, "d", "yes").await.unwrap();
    assert_eq!((late.verdict, asked.counts()), (Verdict::Superseded, (0, 0)));
    room.sound(&parked.run).await;
}

#[tokio::test(start_paused = true)]
async fn timer_and_event_race_for_one_winner() {
    for round in 0..100 {
        let (room, log, asked) = (Room::new(), Log::new(), Asked::default());
        let graph = plain(&asked, &log);
        let runner = room.runner(&graph);
        let parked = runner.start(Start::new(Trail::new())).await.unwrap();
        let wait = room.wait(&parked.run, "w").await;
        room.clock.advance(HOUR + Duration::from_secs(1));
        let delivering = runner.clone();
        let sender = background(async move {
            for _ in 0..round % 7 {
                tokio::task::yield_now().await;
            }
            deliver(&delivering, &wait, "d", "yes").await.unwrap().verdict
        });
        let first = room.work(&runner).await;
        let verdict = done(sender).await;
        let last = match first {
            Some(Ok(result)) if result.status == Status::Succeeded => result,
            _ => room.drain(&runner).await.unwrap(),
        };
        assert_eq!(last.status, Status::Succeeded);
        let won = last.state.contains(&"event".to_owned());
        assert_eq!(verdict == Verdict::Accepted, won, "{verdict} {:?}", last.state);
        room.sound(&parked.run).await;
    }
}
