//! The patterns: an agent's loop with its turns, and ordered steps with their state, retries and waits (D8, D34 to D57, D254).
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{
    Await, CompileError, Deadline, Directive, GraphBuilder, GraphErrors, NoEffect, NodeError,
};
use iop_durable::machine::wait::Verdict;
use iop_durable::patterns::{
    ACTION, Data, REASON, Retry, State, Step, TURNS, attempts, call, ordered_steps, react,
};
use iop_durable::payload::Payload;
use iop_durable::record::{DeadlinePolicy, Effect, Reason, RetryPolicy, Status, StepStatus, WaitingKind};
use iop_durable::runner::{CallError, Ctx, Resume, ResumePlan, RunError, RunResult, Runner, Start};
use iop_durable::store::Store;
use serde::{Deserialize, Serialize};
use support::*;

fn errors<S, E>(builder: GraphBuilder<S, E>) -> Vec<CompileError>
where
    S: Send + Sync + 'static,
    E: Send + 'static,
{
    match builder.compile() {
        Ok(_) => Vec::new(),
        Err(GraphErrors(errors)) => errors,
    }
}

// The loop of an agent.

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Chat {
    said: Vec<String>,
    pending: u32,
}

/// Reasons so that the first `tools` turns leave something pending.
fn chat(tools: u32, limit: u64) -> GraphBuilder<Chat, String> {
    react(
        "chat",
        1,
        move |ctx: Ctx, mut chat: Chat| async move {
            let turn = ctx.budget(TURNS).map_or(0, |turns| turns.used);
            chat.said.push(format!("reason {turn}"));
            chat.pending = u32::from(turn <= u64::from(tools));
            Ok((chat, Directive::completed().effect(format!("turn {turn}"))))
        },
        |_: Ctx, mut chat: Chat| async move {
            chat.said.push("action".to_owned());
            chat.pending = 0;
            Ok((chat, Directive::completed()))
        },
        |chat| chat.pending > 0,
        limit,
    )
}

async fn chats(builder: GraphBuilder<Chat, String>) -> (Room, Runner<Chat, String>) {
    let room = Room::new();
    let runner = room.runner(&Arc::new(builder.compile().unwrap()));
    (room, runner)
}

#[tokio::test]
async fn an_agent_acts_until_nothing_is_pending() {
    let (room, runner) = chats(chat(2, 8)).await;
    let done = runner.start(Start::new(Chat::default())).await.unwrap();
    assert_eq!((done.status, done.cursor.clone()), (Status::Succeeded, None));
    assert_eq!(
        done.state.said,
        ["reason 1", "action", "reason 2", "action", "reason 3"]
    );
    assert_eq!(done.effects, ["turn 1", "turn 2", "turn 3"]);
    let turns = done.budgets[TURNS];
    assert_eq!((turns.used, turns.limit), (3, 8));
    let nodes: Vec<String> = room
        .steps(&done.run)
        .await
        .iter()
        .map(|s| s.node.to_string())
        .collect();
    assert_eq!(nodes, [REASON, ACTION, REASON, ACTION, REASON]);
    room.sound(&done.run).await;
}

#[tokio::test]
async fn the_last_turn_may_end_the_run_and_one_more_is_exhausted_never_a_success() {
    let (room, runner) = chats(chat(2, 3)).await;
    let done = runner.start(Start::new(Chat::default())).await.unwrap();
    assert_eq!(done.status, Status::Succeeded);
    room.sound(&done.run).await;

    let (room, runner) = chats(chat(2, 2)).await;
    let over = runner.start(Start::new(Chat::default())).await.unwrap();
    assert_eq!(
        (over.status, over.reason()),
        (Status::Exhausted, Some(Reason::Budget))
    );
    let outcome = over.outcome.clone().unwrap();
    let exhausted = outcome.exhausted.clone().unwrap();
    assert_eq!(
        (&exhausted.budget[..], exhausted.used, exhausted.limit),
        (TURNS, 2, 2)
    );
    assert_eq!(outcome.error.unwrap().step.as_deref(), Some(REASON));
    assert_eq!(
        over.state.said,
        ["reason 1", "action", "reason 2", "action"],
        "no third turn"
    );
    assert_eq!(over.effects, ["turn 1", "turn 2"]);
    room.sound(&over.run).await;
    // An exhausted run is over for good.
    let again = runner.resume(&over.token, Resume::new()).await;
    assert!(
        matches!(
            again,
            Err(RunError::Terminal {
                status: Status::Exhausted,
                ..
            })
        ),
        "{again:?}"
    );
}

#[tokio::test]
async fn a_start_may_bring_its_own_limit_of_turns() {
    let (_room, runner) = chats(chat(2, 8)).await;
    let mut start = Start::new(Chat::default());
    start.budgets.insert(TURNS.to_owned(), 1);
    let over = runner.start(start).await.unwrap();
    assert_eq!(over.status, Status::Exhausted);
    assert_eq!(over.state.said, ["reason 1", "action"]);
}

#[tokio::test]
async fn turns_count_over_pauses_and_failures_and_only_when_they_are_committed() {
    let calls = Log::new();
    let log = calls.clone();
    let builder = react::<Chat, NoEffect>(
        "chat",
        1,
        move |_: Ctx, mut chat: Chat| {
            let n = log.add("reason");
            async move {
                if n == 2 {
                    return Err(Failure::new(FailureKind::Unavailable, "down").into());
                }
                chat.pending = 1;
                Ok((chat, Directive::completed()))
            }
        },
        |_: Ctx, chat: Chat| async move { Ok((chat, Directive::suspend("look").resume_at(REASON))) },
        |chat| chat.pending > 0,
        2,
    );
    let room = Room::new();
    let runner = room.runner(&Arc::new(builder.compile().unwrap()));
    let parked = runner.start(Start::new(Chat::default())).await.unwrap();
    assert_eq!((parked.status, parked.budgets[TURNS].used), (Status::Waiting, 1));
    let failed = runner.resume(&parked.token, Resume::new()).await.unwrap();
    assert_eq!((failed.status, failed.budgets[TURNS].used), (Status::Failed, 1));
    let parked = runner.resume(&failed.token, Resume::new()).await.unwrap();
    assert_eq!((parked.status, parked.budgets[TURNS].used), (Status::Waiting, 2));
    let over = runner.resume(&parked.token, Resume::new()).await.unwrap();
    assert_eq!(over.status, Status::Exhausted);
    assert_eq!(calls.len(), 3, "the turn after the last is not begun");
    room.sound(&over.run).await;
}

#[test]
fn what_is_wrong_with_a_loop_is_told_by_compile() {
    assert_eq!(errors(chat(1, 1)), []);
    assert_eq!(
        errors(chat(1, 0)),
        [CompileError::Zero {
            what: "max_iterations"
        }]
    );
    let twice = errors(chat(1, 1).budget(TURNS, 2));
    assert!(
        matches!(&twice[..], [CompileError::Budget { budget, .. }] if budget == TURNS),
        "{twice:?}"
    );
    // It is a builder: what a host needs besides is declared on it.
    let extended = chat(1, 1)
        .kind("agent")
        .budget("tokens", 1000)
        .retry(REASON, attempts(3, Duration::from_secs(1)));
    let graph = extended.compile().unwrap();
    assert_eq!(graph.definition().kind, "agent");
}

// Ordered steps.

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Order {
    sku: String,
    done: Vec<String>,
}

fn order() -> Data {
    Data::json(&Order {
        sku: "a-1".to_owned(),
        done: Vec::new(),
    })
    .unwrap()
}

/// Writes its own name into the order.
fn step(name: &str, log: &Log) -> Step {
    let log = log.clone();
    Step::new(name, move |_: Ctx, mut state: State| {
        log.add(state.stage());
        async move {
            let mut order: Order = state.scan()?;
            order.done.push(state.stage().to_owned());
            state.set(&order)?;
            Ok(state)
        }
    })
}

/// Fails with this kind the first `times` times.
fn failing(name: &str, log: &Log, times: usize, kind: FailureKind) -> Step {
    let log = log.clone();
    Step::new(name, move |ctx: Ctx, mut state: State| {
        let log = log.clone();
        async move {
            let seen = log.clone();
            let output = ctx
                .activity("charge")
                .effect(Effect::Idempotent)
                .run(state.data().bytes().clone(), move |call| {
                    let n = seen.add(call.idempotency_key);
                    async move {
                        if n <= times {
                            return Err(Failure::new(kind, "not this time").into());
                        }
                        Ok(call.input)
                    }
                })
                .await?;
            state.replace(output);
            Ok(state)
        }
    })
}

fn flow(retry: Option<&RetryPolicy>, steps: Vec<Step>) -> GraphBuilder<Data> {
    ordered_steps("onboard", 1, retry, steps)
}

fn flows(builder: GraphBuilder<Data>) -> (Room, Runner<Data>) {
    let room = Room::new();
    let runner = room.runner(&Arc::new(builder.compile().unwrap()));
    (room, runner)
}

fn stage(result: &RunResult<Data, NoEffect>) -> String {
    State::of(result).stage().to_owned()
}

async fn steps(room: &Room, result: &RunResult<Data, NoEffect>) -> Vec<(String, StepStatus, u32)> {
    let steps = room.steps(&result.run).await;
    steps
        .into_iter()
        .map(|step| (step.node.to_string(), step.status, step.attempts))
        .collect()
}

fn done(name: &str) -> (String, StepStatus, u32) {
    (name.to_owned(), StepStatus::Done, 1)
}

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
async fn a_failed_step_stays_the_resume_point_and_completed_ones_are_not_repeated() {
    let (log, keys) = (Log::new(), Log::new());
    let charge = failing("charge", &keys, 1, FailureKind::Unavailable);
    let (room, runner) = flows(flow(
        None,
        vec![step("reserve", &log), charge, step("confirm", &log)],
    ));
    let failed = runner.start(Start::new(order())).await.unwrap();
    assert_eq!((failed.status, &stage(&failed)[..]), (Status::Failed, "charge"));
    assert!(failed.outcome.as_ref().unwrap().resumable());
    let kept: Order = State::of(&failed).scan().unwrap();
    assert_eq!(kept.done, ["reserve"]);
    room.sound(&failed.run).await;

    // Another process resumes it.
    let again = room.runner(&Arc::new(
        flow(
            None,
            vec![
                step("reserve", &log),
                failing("charge", &keys, 1, FailureKind::Unavailable),
                step("confirm", &log),
            ],
        )
        .compile()
        .unwrap(),
    ));
    let result = again.resume(&failed.token, Resume::new()).await.unwrap();
    assert_eq!((result.status, result.life), (Status::Succeeded, 2));
    assert_eq!(log.all(), ["reserve", "confirm"]);
    let key = format!("{}/charge/2/charge", result.run);
    assert_eq!(keys.all(), [key.clone(), key], "one key for both attempts");
    let charge = ("charge".to_owned(), StepStatus::Failed, 1);
    let retried = ("charge".to_owned(), StepStatus::Done, 2);
    let all = steps(&room, &result).await;
    assert_eq!(all.first(), Some(&done("reserve")));
    assert!(all.contains(&retried) && !all.contains(&charge), "{all:?}");
    room.sound(&result.run).await;
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

#[tokio::test]
async fn a_step_inherits_the_retry_of_its_flow_or_has_its_own_or_none() {
    let pause = Duration::from_secs(60);
    let inherited = attempts(3, pause);
    // (the step's retry, failures before it succeeds) -> (attempts, how it ends)
    let cases = [
        (Retry::Inherit, 2, 3, Status::Succeeded),
        (Retry::Inherit, 3, 3, Status::Exhausted),
        (Retry::None, 1, 1, Status::Failed),
        (Retry::Policy(attempts(2, pause)), 1, 2, Status::Succeeded),
        (Retry::Policy(attempts(2, pause)), 2, 2, Status::Exhausted),
        (Retry::Policy(attempts(1, pause)), 1, 1, Status::Failed),
    ];
    for (retry, failures, tries, status) in cases {
        let (log, keys) = (Log::new(), Log::new());
        let charge = failing("charge", &keys, failures, FailureKind::RateLimited).retry(retry.clone());
        let (room, runner) = flows(flow(Some(&inherited), vec![step("plan", &log), charge]));
        let mut result = runner.start(Start::new(order())).await.unwrap();
        for attempt in 2..=tries {
            // Parked, its worker free, until the pause is over.
            assert_eq!(result.status, Status::Waiting, "{retry:?}");
            assert_eq!(result.waiting.as_ref().unwrap().kind(), Some(WaitingKind::Retry));
            assert_eq!(stage(&result), "charge");
            assert!(room.work(&runner).await.is_none(), "not before its time");
            room.clock.advance(pause + Duration::from_secs(5));
            result = room.work(&runner).await.unwrap().unwrap();
            assert_eq!(keys.len(), attempt);
        }
        assert_eq!(result.status, status, "{retry:?} after {failures}");
        assert_eq!(log.all(), ["plan"], "the step before it ran once");
        if status == Status::Exhausted {
            let exhausted = result.outcome.as_ref().unwrap().exhausted.clone().unwrap();
            assert_eq!(
                (&exhausted.budget[..], exhausted.used, exhausted.limit),
                ("retry:charge", tries as u64, tries as u64)
            );
            assert_eq!(stage(&result), "charge");
        }
        let mut distinct = keys.all();
        distinct.dedup();
        assert_eq!(distinct, [format!("{}/charge/2/charge", result.run)]);
        room.sound(&result.run).await;
    }
}

#[tokio::test]
async fn a_failure_that_is_not_retryable_is_not_retried() {
    let keys = Log::new();
    let charge = failing("charge", &keys, 1, FailureKind::Auth);
    let (_room, runner) = flows(flow(Some(&attempts(5, Duration::from_secs(1))), vec![charge]));
    let failed = runner.start(Start::new(order())).await.unwrap();
    assert_eq!((failed.status, keys.len()), (Status::Failed, 1));
    assert!(!failed.outcome.unwrap().resumable());
}

#[tokio::test]
async fn retries_stop_when_the_run_is_cancelled() {
    let keys = Log::new();
    let charge = failing("charge", &keys, 9, FailureKind::Unavailable);
    let (room, runner) = flows(flow(Some(&attempts(5, Duration::from_secs(60))), vec![charge]));
    let parked = runner.start(Start::new(order())).await.unwrap();
    let operator = runner.operator();
    operator
        .cancel(&parked.run, &decision("c-1"), "not wanted", None)
        .await
        .unwrap();
    let over = runner.result(&parked.run).await.unwrap();
    assert_eq!((over.status, keys.len()), (Status::Cancelled, 1));
    assert_eq!(stage(&over), "");
    room.sound(&over.run).await;
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
async fn a_flow_deletes_its_successes_only_when_told_to() {
    let (log, keys) = (Log::new(), Log::new());
    let charge = failing("charge", &keys, 1, FailureKind::Unavailable);
    let (room, runner) = flows(flow(None, vec![step("plan", &log), charge]).delete_on_success());
    let failed = runner.start(Start::new(order())).await.unwrap();
    assert_eq!(
        runner.result(&failed.run).await.unwrap().status,
        Status::Failed,
        "failures are kept"
    );
    let result = runner.resume(&failed.token, Resume::new()).await.unwrap();
    assert_eq!(result.status, Status::Succeeded);
    let gone = runner.result(&result.run).await;
    assert!(matches!(gone, Err(RunError::Deleted)), "{gone:?}");
    drop(room);
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

#[tokio::test]
async fn a_call_is_an_activity_of_its_step() {
    let keys = Log::new();
    let log = keys.clone();
    let upper = call("upper/1", Effect::Idempotent, move |call| {
        let n = log.add(call.idempotency_key.clone());
        async move {
            if n == 1 {
                return Err(CallError::Failed {
                    failure: Failure::new(FailureKind::Unavailable, "down"),
                    retry_after: None,
                });
            }
            Ok(Bytes::from(call.input.to_ascii_uppercase()))
        }
    });
    let (room, runner) = flows(flow(
        Some(&attempts(2, Duration::from_secs(1))),
        vec![Step::new("shout", upper)],
    ));
    let parked = runner.start(Start::new(Data::from("hello"))).await.unwrap();
    assert_eq!(parked.status, Status::Waiting);
    room.clock.advance(Duration::from_secs(5));
    let result = room.work(&runner).await.unwrap().unwrap();
    assert_eq!(
        (result.status, &result.state.bytes()[..]),
        (Status::Succeeded, &b"HELLO"[..])
    );
    let key = format!("{}/shout/1/call", result.run);
    assert_eq!(keys.all(), [key.clone(), key]);
    let activity = room.activity(&result.run, "call").await;
    assert_eq!(
        (&activity.implementation[..], activity.effect),
        ("upper/1", Effect::Idempotent)
    );
    assert_eq!(activity.attempts.len(), 2);
}

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
    let unmatched = runner
        .deliver(&parked.run, &wait.id, &delivery("d-0", &wait, ""))
        .await
        .unwrap();
    assert_eq!(unmatched.verdict, Verdict::Unmatched);
    let taken = runner
        .deliver(&parked.run, &wait.id, &delivery("d-1", &wait, &answered()))
        .await
        .unwrap();
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
    let late = runner
        .deliver(&parked.run, &wait.id, &delivery("d-1", &wait, &answered()))
        .await
        .unwrap();
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
