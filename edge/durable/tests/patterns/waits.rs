//! Steps that wait for a word from outside.

use std::time::Duration;

use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{Await, CompileError, Deadline, GraphBuilder, NodeError};
use iop_durable::machine::wait::Verdict;
use iop_durable::patterns::{Data, State, Step};
use iop_durable::payload::Payload;
use iop_durable::record::{DeadlinePolicy, Status, WaitingKind};
use iop_durable::runner::{Resume, ResumePlan, RunError, Start};

use crate::errors;
use crate::flow::*;
use crate::support::{Log, correlation, deliver, key};

/// `ask` waits for a word; on time-out the flow goes to `late`, which ends it.
fn asking(log: &Log, deadline: Option<Duration>) -> GraphBuilder<Data> {
    let ask = Step::wait("ask", "late", move |ctx, state| {
        Ok(Await {
            key: key("word"),
            correlation: correlation(&format!("word of {}", ctx.run())),
            kind: WaitingKind::Event,
            subject: Payload::new(state.data().bytes().clone()),
            deadline: deadline.map(Deadline::In),
            deadline_policy: DeadlinePolicy::FirstCommitted,
        })
    })
    .accepts("not empty", |_, payload| !payload.bytes().is_empty());
    flow(
        None,
        vec![
            step("plan", log),
            ask,
            step("make", log).ends(),
            step("late", log),
        ],
    )
}

fn answered() -> String {
    r#"{"sku":"b-2","done":["answered"]}"#.to_owned()
}

#[tokio::test]
async fn a_waiting_step_hands_what_is_delivered_to_the_next_one() {
    let log = Log::new();
    let (room, runner) = flows(asking(&log, None));
    let parked = runner.start(Start::new(order())).await.unwrap();
    assert_eq!((parked.status, &stage(&parked)[..]), (Status::Waiting, "ask"));
    assert_eq!(parked.waiting.as_ref().unwrap().kind(), Some(WaitingKind::Event));
    // A plain resume is no answer.
    let refused = runner.resume(&parked.token, Resume::new()).await;
    assert!(matches!(refused, Err(RunError::Waiting(_))), "{refused:?}");

    let wait = room.wait(&parked.run, "word").await;
    assert_eq!(wait.subject.bytes(), parked.state.bytes());
    let unmatched = deliver(&runner, &wait, "d-0", "").await.unwrap();
    assert_eq!(unmatched.verdict, Verdict::Unmatched);
    let taken = deliver(&runner, &wait, "d-1", &answered()).await.unwrap();
    assert_eq!(taken.verdict, Verdict::Accepted);
    let moved = runner.result(&parked.run).await.unwrap();
    assert_eq!((moved.status, &stage(&moved)[..]), (Status::Queued, "make"));
    assert_eq!(moved.state.bytes(), answered().as_bytes());
    let result = room.drain(&runner).await.unwrap();
    let order: Order = State::of(&result).scan().unwrap();
    assert_eq!(
        (result.status, order.done),
        (Status::Succeeded, vec!["answered".to_owned(), "make".to_owned()])
    );
    assert_eq!(log.all(), ["plan", "make"]);
    assert_eq!(
        steps(&room, &result).await,
        [done("plan"), done("ask"), done("make")]
    );
    room.sound(&result.run).await;
}

#[tokio::test]
async fn a_waiting_step_that_times_out_leads_elsewhere_with_the_data_as_it_was() {
    let log = Log::new();
    let (room, runner) = flows(asking(&log, Some(Duration::from_secs(60))));
    let parked = runner.start(Start::new(order())).await.unwrap();
    assert!(room.work(&runner).await.is_none(), "not before its time");
    room.clock.advance(Duration::from_secs(65));
    let result = room.drain(&runner).await.unwrap();
    let order: Order = State::of(&result).scan().unwrap();
    assert_eq!(
        (result.status, order.done),
        (Status::Succeeded, vec!["plan".to_owned(), "late".to_owned()])
    );
    assert_eq!(log.all(), ["plan", "late"]);
    let wait = room.wait(&parked.run, "word").await;
    let late = deliver(&runner, &wait, "d-1", &answered()).await.unwrap();
    assert_eq!(late.verdict, Verdict::Superseded);
    room.sound(&result.run).await;
}

#[tokio::test]
async fn a_resume_to_another_step_moves_the_stage_with_it() {
    let log = Log::new();
    let (room, runner) = flows(asking(&log, None));
    let parked = runner.start(Start::new(order())).await.unwrap();
    let to_make = Resume::new().target(|_: &Data, _| ResumePlan::To("make".to_owned()));
    let result = runner.resume(&parked.token, to_make).await.unwrap();
    let order: Order = State::of(&result).scan().unwrap();
    assert_eq!(
        (result.status, order.done),
        (Status::Succeeded, vec!["plan".to_owned(), "make".to_owned()])
    );
    room.sound(&result.run).await;
}

#[test]
fn a_step_that_waits_needs_steps_to_lead_to() {
    let log = Log::new();
    let ask = |on_timeout: &str| {
        Step::wait("ask", on_timeout, |_, _| {
            Err(NodeError::from(Failure::new(
                FailureKind::Internal,
                "never asked",
            )))
        })
    };
    let last = errors(flow(None, vec![step("plan", &log), ask("plan")]));
    assert_eq!(
        last,
        [CompileError::NoRoute {
            node: "ask".to_owned()
        }]
    );
    let nowhere = errors(flow(None, vec![ask("x"), step("plan", &log)]));
    assert!(
        matches!(&nowhere[..], [CompileError::UnknownTarget { node, target, .. }, ..] if node == "ask" && target == "x"),
        "{nowhere:?}"
    );
    let dead = errors(flow(None, vec![step("plan", &log).ends(), step("never", &log)]));
    assert_eq!(
        dead,
        [CompileError::Unreachable {
            node: "never".to_owned()
        }]
    );
}
