//! The loop of an agent: it reasons and acts until nothing is pending, and its turns are counted.

use std::sync::Arc;
use std::time::Duration;

use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{CompileError, Directive, GraphBuilder, NoEffect};
use iop_durable::patterns::{ACTION, REASON, TURNS, attempts, react};
use iop_durable::record::{Reason, Status};
use iop_durable::runner::{Ctx, Resume, RunError, Runner, Start};
use serde::{Deserialize, Serialize};

use crate::errors;
use crate::support::*;

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
