//! Typed effects: in order, once, in the outcome of the life that ends the run (D105, D256).

use std::sync::Arc;

use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{Directive, Graph, GraphBuilder};
use iop_durable::record::Status;
use iop_durable::runner::{Ctx, Resume, Start};
use serde::{Deserialize, Serialize};

use crate::support::*;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Note {
    Mail { to: u32 },
    Bell,
}

fn mail(to: u32) -> Note {
    Note::Mail { to }
}

fn noting() -> Arc<Graph<Trail, Note>> {
    shared(
        GraphBuilder::<Trail, Note>::new("noting", 1)
            .node("a", |_: Ctx, trail: Trail| async move {
                Ok((trail, Directive::completed().effect(mail(1)).effect(Note::Bell)))
            })
            .node("b", |ctx: Ctx, trail: Trail| async move {
                let directive = match ctx.attempt() {
                    1 => Directive::retry(2).effect(mail(99)),
                    _ => Directive::suspend("later").resume_at("c").effect(mail(2)),
                };
                Ok((trail, directive))
            })
            .node("c", |ctx: Ctx, trail: Trail| async move {
                // The first life of this step fails after it has told.
                let directive = match ctx.life() {
                    1 => Directive::fail(Failure::new(FailureKind::Unavailable, "down")),
                    _ => Directive::end(),
                };
                Ok((trail, directive.effect(mail(3))))
            })
            .edge("a", "b")
            .terminal("b")
            .terminal("c")
            .resume_target("c"),
    )
}

#[tokio::test(start_paused = true)]
async fn effects_come_in_order_and_once() {
    let room = Room::new();
    let graph = noting();
    let parked = room.runner(&graph).start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(parked.status, Status::Waiting);
    assert_eq!(parked.effects, [], "told when the run is over");
    let failed = room
        .runner(&graph)
        .resume(&parked.token, Resume::new())
        .await
        .unwrap();
    assert_eq!(failed.status, Status::Failed);
    let all = [mail(1), Note::Bell, mail(2), mail(3)];
    assert_eq!(failed.effects, all);
    room.sound(&failed.run).await;
    // The step that failed is done again: what it tells is told once.
    let done = room
        .runner(&graph)
        .resume(&failed.token, Resume::new())
        .await
        .unwrap();
    assert_eq!((done.status, done.life), (Status::Succeeded, 2));
    assert_eq!(done.effects, all);
    let texts: Vec<String> = done
        .outcome
        .unwrap()
        .effects
        .iter()
        .map(|e| e.get().to_owned())
        .collect();
    assert_eq!(
        texts,
        [
            r#"{"mail":{"to":1}}"#,
            r#""bell""#,
            r#"{"mail":{"to":2}}"#,
            r#"{"mail":{"to":3}}"#
        ]
    );
    let stored: usize = room.steps(&done.run).await.iter().map(|s| s.effects.len()).sum();
    assert_eq!(stored, 4);
    room.sound(&done.run).await;
    // The same from the store.
    assert_eq!(room.runner(&graph).result(&done.run).await.unwrap().effects, all);
}

#[tokio::test(start_paused = true)]
async fn a_long_run_loses_none_of_them() {
    let room = Room::new();
    let graph = shared(
        GraphBuilder::<u32, u32>::new("long", 1)
            .node("count", |_: Ctx, n: u32| async move {
                let directive = if n == 1200 {
                    Directive::end()
                } else {
                    Directive::completed()
                };
                Ok((n + 1, directive.effect(n)))
            })
            .edge("count", "count"),
    );
    let done = room.runner(&graph).start(Start::new(0)).await.unwrap();
    assert_eq!(done.effects, (0..=1200).collect::<Vec<u32>>());
}
