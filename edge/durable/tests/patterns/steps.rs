//! Steps in their order: what each gets, where the run stands between them, how they are named.

use std::time::Duration;

use bytes::Bytes;
use iop_durable::failure::FailureKind;
use iop_durable::graph::CompileError;
use iop_durable::patterns::{Data, Retry, State, Step, attempts};
use iop_durable::record::{RetryPolicy, Status};
use iop_durable::runner::{Ctx, Start};
use iop_durable::store::Store;

use crate::errors;
use crate::flow::*;
use crate::support::Log;

#[tokio::test]
async fn steps_run_in_order_and_each_one_gets_what_the_one_before_left() {
    let log = Log::new();
    let (room, runner) = flows(flow(
        None,
        vec![step("plan", &log), step("make", &log), step("tell", &log)],
    ));
    assert_eq!(runner.graph().definition().kind, "flow");
    let result = runner.start(Start::new(order())).await.unwrap();
    assert_eq!(
        (result.status, stage(&result)),
        (Status::Succeeded, String::new())
    );
    let last: Order = State::of(&result).scan().unwrap();
    assert_eq!(last.done, ["plan", "make", "tell"]);
    assert_eq!(log.all(), ["plan", "make", "tell"]);
    let output = result.outcome.as_ref().unwrap().output.as_ref().unwrap();
    assert_eq!(
        output.get().as_bytes(),
        &result.state.bytes()[..],
        "the output is the last data"
    );
    assert_eq!(
        steps(&room, &result).await,
        [done("plan"), done("make"), done("tell")]
    );
    room.sound(&result.run).await;
}

/// At every checkpoint the stage names the step that comes next, and the data is what the steps before it made of the input.
#[tokio::test]
async fn the_stage_is_the_cursor_of_every_checkpoint() {
    let log = Log::new();
    let (room, runner) = flows(flow(None, vec![step("plan", &log), step("make", &log)]));
    let result = runner.start(Start::new(order())).await.unwrap();
    let mut history = room.memory.history(&result.run, None, 100).await.unwrap();
    history.reverse();
    let mut seen = Vec::new();
    for row in history {
        let checkpoint = room.memory.checkpoint(&result.run, row.revision).await.unwrap();
        let state = checkpoint.state.unwrap();
        let order: Order = Data::from(state.bytes().clone()).scan().unwrap();
        let cursor = checkpoint
            .cursor
            .map_or_else(String::new, |node| node.to_string());
        seen.push((cursor, order.done.join(" ")));
    }
    let expected = [("plan", ""), ("make", "plan"), ("", "plan make")];
    assert_eq!(seen, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
}

#[tokio::test]
async fn a_lost_worker_leaves_the_flow_at_its_step() {
    let log = Log::new();
    let (room, runner) = flows(flow(None, vec![step("plan", &log), step("make", &log)]));
    let accepted = runner.accept(Start::new(order())).await.unwrap();
    room.lose_worker(&accepted.run).await;
    let result = room.drain(&runner).await.unwrap();
    assert_eq!(result.status, Status::Succeeded);
    assert_eq!(log.all(), ["plan", "make"]);
}

#[test]
fn names_are_unique_and_not_empty() {
    let log = Log::new();
    let twice = vec![step("a", &log), step("b", &log), step("a", &log)];
    assert_eq!(
        errors(flow(None, twice)),
        [CompileError::DuplicateNode { node: "a".to_owned() }]
    );
    let thrice = vec![step("a", &log), step("a", &log), step("a", &log)];
    let duplicate = CompileError::DuplicateNode { node: "a".to_owned() };
    assert_eq!(errors(flow(None, thrice)), [duplicate.clone(), duplicate]);
    let empty = errors(flow(None, vec![step("a", &log), step("", &log)]));
    assert!(
        matches!(&empty[..], [CompileError::Name { what, .. }, ..] if what == "node \"\""),
        "{empty:?}"
    );
    assert_eq!(errors(flow(None, Vec::new())), [CompileError::Empty]);
    let policy = RetryPolicy {
        max_attempts: 0,
        ..attempts(1, Duration::ZERO)
    };
    let retried = vec![step("a", &log), step("b", &log).retry(Retry::Policy(policy))];
    let wrong = errors(flow(None, retried));
    assert!(
        matches!(&wrong[..], [CompileError::Retry { node, .. }] if node == "b"),
        "{wrong:?}"
    );
}

#[tokio::test]
async fn a_flow_may_have_one_step() {
    let log = Log::new();
    let (room, runner) = flows(flow(None, vec![step("only", &log)]));
    let result = runner.start(Start::new(order())).await.unwrap();
    assert_eq!((result.status, log.len()), (Status::Succeeded, 1));
    room.sound(&result.run).await;
}

#[tokio::test]
async fn data_is_opaque() {
    let bytes = Bytes::from_static(b"\0\xff{not json\xfe");
    let same = Step::new("same", |_: Ctx, state: State| async move { Ok(state) });
    let (room, runner) = flows(flow(None, vec![same]));
    let result = runner.start(Start::new(Data::from(bytes.clone()))).await.unwrap();
    assert_eq!(result.state.bytes(), &bytes);
    assert_eq!(
        room.load(&result.run).await.state.bytes(),
        &bytes,
        "stored byte by byte"
    );
    // What is not JSON is not shown, and no failure.
    assert!(result.outcome.unwrap().output.is_none());
}

#[tokio::test]
async fn data_of_another_type_fails_the_step() {
    let log = Log::new();
    let (_room, runner) = flows(flow(None, vec![step("plan", &log)]));
    let failed = runner.start(Start::new(Data::from("[]"))).await.unwrap();
    let error = failed.outcome.unwrap().error.unwrap();
    assert_eq!(
        (error.failure.kind, error.step.as_deref()),
        (FailureKind::InvalidInput, Some("plan"))
    );
}
