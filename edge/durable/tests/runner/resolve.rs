//! What an operator decides about an unknown effect, what the decision must say, and that it is one (D153 to D159).

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{Directive, Graph};
use iop_durable::machine::activity::{Action, Resolution};
use iop_durable::record::{ActivityRecord, ActivityState, Effect, Origin, Scope, Status, WaitingKind};
use iop_durable::runner::{CallError, Ctx, Resume, RunError, Start};
use iop_durable::store::Store;
use iop_durable::token::ResumeToken;

use crate::support::*;
use crate::unknown::ambiguous;

#[tokio::test(start_paused = true)]
async fn every_rule_of_a_resolution_is_checked_and_nothing_changes_when_one_fails() {
    let (room, log) = (Room::new(), Log::new());
    let (runner, run, record) = ambiguous(&room, &log).await;
    let operator = runner.operator();
    let good = resolution("d", &record, complete("by hand"));
    let change = |change: fn(&mut Resolution)| {
        let mut changed = good.clone();
        change(&mut changed);
        changed
    };
    let before = room.load(&run.run).await;
    let table: [(&str, Resolution, &str); 9] = [
        ("input", change(|r| r.input_digest = [7; 32]), "activity_conflict"),
        (
            "implementation",
            change(|r| r.implementation = "2".to_owned()),
            "activity_conflict",
        ),
        ("attempt", change(|r| r.attempt = 2), "activity_conflict"),
        ("attempt", change(|r| r.attempt = 0), "activity_conflict"),
        (
            "reason",
            change(|r| r.reason = " ".to_owned()),
            "activity_conflict",
        ),
        (
            "evidence",
            change(|r| r.evidence = String::new()),
            "activity_conflict",
        ),
        (
            "unsafe retry",
            change(|r| r.action = Action::Retry),
            "activity_conflict",
        ),
        (
            "id",
            change(|r| r.id = activity_id(&run_id("other"), "only", 1, "c")),
            "activity_not_found",
        ),
        (
            "key",
            change(|r| r.id = activity_id(&run_id("other"), "only", 1, "d")),
            "activity_not_found",
        ),
    ];
    for (what, resolution, code) in table {
        refused(operator.resolve(&run.token, &resolution, None, false).await, code);
        let after = room.load(&run.run).await;
        assert_eq!((after.head, after.lease), (before.head.clone(), None), "{what}");
        assert_eq!(room.activity(&run.run, "c").await, record, "{what}");
    }
    for revision in [run.token.revision.get() - 1, run.token.revision.get() + 1] {
        let stale = ResumeToken {
            run: run.run.clone(),
            revision: iop_durable::ids::Revision::new(revision).unwrap(),
        };
        let error = refused(operator.resolve(&stale, &good, None, false).await, "stale_token");
        let RunError::StaleToken { current } = error else {
            unreachable!()
        };
        assert_eq!(current, run.token);
    }
    let nobody = ResumeToken {
        run: run_id("nobody"),
        revision: run.token.revision,
    };
    refused(
        operator.resolve(&nobody, &good, None, false).await,
        "run_not_found",
    );
    assert_eq!(room.decisions(&run.run, &Scope::Operator).await, []);
    assert_eq!(log.len(), 1, "no dispatcher was called");
}

#[tokio::test(start_paused = true)]
async fn a_resolution_is_recorded_with_its_provenance_and_replayed() {
    let (room, log) = (Room::new(), Log::new());
    let (runner, run, record) = ambiguous(&room, &log).await;
    let operator = runner.operator();
    let good = resolution("d", &record, complete("by hand"));
    let resolved = operator
        .resolve(&run.token, &good, Some("ann"), false)
        .await
        .unwrap();
    assert_eq!((resolved.status, resolved.replayed), (Status::Waiting, false));
    assert_eq!(resolved.token, room.token(&run.run).await);
    let loaded = room.load(&run.run).await;
    assert_eq!(
        loaded.head.waiting.as_ref().unwrap().kind(),
        Some(WaitingKind::Resume)
    );
    room.sound(&run.run).await;
    let settled = room.activity(&run.run, "c").await;
    assert_eq!(
        (settled.state, settled.origin),
        (ActivityState::Completed, Some(Origin::Manual))
    );
    assert_eq!(settled.attempts, record.attempts, "the attempt stays what it was");
    assert_eq!(settled.decision, Some(decision("d")));
    let ledger = room.decisions(&run.run, &Scope::Operator).await;
    let body: serde_json::Value = serde_json::from_slice(&ledger[0].body).unwrap();
    for (member, value) in [
        ("action", "complete"),
        ("reason", "looked it up"),
        ("evidence", "ticket 7"),
        ("by", "ann"),
        ("revision", &run.token.revision.to_string()),
        ("activity_id", record.id.as_str()),
    ] {
        assert_eq!(body[member], value, "{member}");
    }
    assert_eq!(body["attempt"], 1);
    assert!(body["incarnation"].as_u64().unwrap() > record.attempts[0].incarnation);
    // The same word again, with whichever token; another word under this id.
    for token in [&run.token, &resolved.token] {
        let again = operator.resolve(token, &good, Some("bob"), true).await.unwrap();
        assert_eq!(
            (again.replayed, again.status, &again.token),
            (true, Status::Waiting, &resolved.token)
        );
    }
    for other in [complete("other"), Action::Fail { error: broken() }] {
        let other = Resolution {
            action: other,
            ..good.clone()
        };
        refused(
            operator.resolve(&resolved.token, &other, None, false).await,
            "activity_conflict",
        );
    }
    // Settled is settled, for a new decision too.
    let late = resolution("e", &settled, complete("x"));
    refused(
        operator.resolve(&resolved.token, &late, None, false).await,
        "activity_conflict",
    );
    assert_eq!(room.load(&run.run).await.head, loaded.head);
    let done = runner.resume(&resolved.token, Resume::new()).await.unwrap();
    assert_eq!(
        (done.status, done.state),
        (Status::Succeeded, vec!["by hand".to_owned()])
    );
    assert_eq!(log.len(), 1, "nothing was dispatched");
    // Over: the decision is still answered, a new one is not taken.
    assert!(
        operator
            .resolve(&run.token, &good, None, false)
            .await
            .unwrap()
            .replayed
    );
    refused(
        operator.resolve(&done.token, &late, None, false).await,
        "run_terminal",
    );
    room.sound(&run.run).await;
}

#[tokio::test(start_paused = true)]
async fn a_resolution_may_go_on_at_once_or_fail_the_call() {
    let (room, log) = (Room::new(), Log::new());
    let (runner, run, record) = ambiguous(&room, &log).await;
    let good = resolution("d", &record, complete("by hand"));
    let resolved = runner
        .operator()
        .resolve(&run.token, &good, None, true)
        .await
        .unwrap();
    assert_eq!(resolved.status, Status::Queued);
    let done = room.work(&runner).await.unwrap().unwrap();
    assert_eq!((done.status, log.len()), (Status::Succeeded, 1));
    room.sound(&run.run).await;

    let (room, log) = (Room::new(), Log::new());
    let (runner, run, record) = ambiguous(&room, &log).await;
    let error = Failure::new(FailureKind::Unavailable, "it never arrived");
    let fail = resolution("d", &record, Action::Fail { error: error.clone() });
    runner
        .operator()
        .resolve(&run.token, &fail, None, true)
        .await
        .unwrap();
    let mut result = room.work(&runner).await.unwrap().unwrap();
    assert_eq!(result.status, Status::Failed);
    assert_eq!(
        result.outcome.as_ref().unwrap().error.as_ref().unwrap().failure,
        error
    );
    // Definitive: another life does not make it again.
    result = runner.resume(&result.token, Resume::new()).await.unwrap();
    assert_eq!((result.status, result.life, log.len()), (Status::Failed, 2, 1));
    room.sound(&run.run).await;
}

/// An idempotent call that was cut off with its lease: unknown, and nobody has repeated it yet.
async fn unknown_idempotent(room: &Room, log: &Log) -> (Arc<Graph<Trail>>, ResumeToken) {
    let (calls, door) = (log.clone(), Door::new());
    let gone = door.clone();
    let graph = one("keyed", move |ctx: Ctx, trail: Trail| {
        let (calls, door) = (calls.clone(), gone.clone());
        async move {
            let out = ctx
                .activity("c")
                .effect(Effect::Idempotent)
                .retry(policy(2, Duration::from_secs(60)))
                .run("in", |call| {
                    calls.add(format!("{}", call.attempt));
                    door.answers("out")
                })
                .await?;
            Ok((pushed(trail, text(&out)), Directive::end()))
        }
    });
    room.lose_at(&door, &graph).await;
    door.open();
    (graph, room.token(&run_id("r")).await)
}

#[tokio::test(start_paused = true)]
async fn a_retry_by_hand_is_prepared_not_made_and_stays_within_the_limit() {
    let (room, log) = (Room::new(), Log::new());
    let (graph, token) = unknown_idempotent(&room, &log).await;
    let runner = room.runner(&graph);
    let record = room.activity(&run_id("r"), "c").await;
    let before = room.memory.now().await.unwrap();
    let retry = resolution("d", &record, Action::Retry);
    let resolved = runner
        .operator()
        .resolve(&token, &retry, None, false)
        .await
        .unwrap();
    assert_eq!(resolved.status, Status::Waiting);
    let prepared = room.activity(&run_id("r"), "c").await;
    assert_eq!(
        (prepared.state, prepared.attempts.len()),
        (ActivityState::Prepared, 1)
    );
    assert_eq!(
        prepared.not_before.as_ref().unwrap().at,
        before.plus(Duration::from_secs(60))
    );
    assert!(room.work(&runner).await.is_none());
    refused(runner.resume(&resolved.token, Resume::new()).await, "run_waiting");
    assert_eq!(log.len(), 1);
    room.sound(&run_id("r")).await;
    room.clock.advance(Duration::from_secs(61));
    let done = room.work(&runner).await.unwrap().unwrap();
    assert_eq!(
        (done.status, log.all()),
        (Status::Succeeded, vec!["1".to_owned(), "2".to_owned()])
    );
    room.sound(&run_id("r")).await;
}

#[tokio::test(start_paused = true)]
async fn two_unknown_effects_are_resolved_one_by_one() {
    let (room, log) = (Room::new(), Log::new());
    let calls = log.clone();
    let graph = one("two", move |ctx: Ctx, trail: Trail| {
        let calls = calls.clone();
        async move {
            let cut = |name: &'static str| {
                calls.add(name);
                ctx.activity(name)
                    .run(name, |_| async { Err(CallError::Unknown) })
            };
            let (a, b) = join(cut("a"), cut("b")).await;
            Ok((pushed(pushed(trail, text(&a?)), text(&b?)), Directive::end()))
        }
    });
    let runner = room.runner(&graph);
    let run = runner.start(Start::new(Trail::new())).await.unwrap();
    assert_eq!(run.waiting.as_ref().unwrap().on.len(), 2);
    let operator = runner.operator();
    let a = room.activity(&run.run, "a").await;
    let first = operator
        .resolve(&run.token, &resolution("d1", &a, complete("A")), None, true)
        .await
        .unwrap();
    assert_eq!(first.status, Status::Ambiguous, "one is still open");
    room.sound(&run.run).await;
    // The old token is of a revision that is over.
    let b = room.activity(&run.run, "b").await;
    refused(
        operator
            .resolve(&run.token, &resolution("d2", &b, complete("B")), None, true)
            .await,
        "stale_token",
    );
    let second = operator
        .resolve(&first.token, &resolution("d2", &b, complete("B")), None, true)
        .await
        .unwrap();
    assert_eq!(second.status, Status::Queued);
    let done = room.work(&runner).await.unwrap().unwrap();
    assert_eq!(
        (done.status, done.state),
        (Status::Succeeded, vec!["A".to_owned(), "B".to_owned()])
    );
    room.sound(&run.run).await;
}

#[tokio::test(start_paused = true)]
async fn many_operators_decide_once() {
    for _ in 0..20 {
        let (room, log) = (Room::new(), Log::new());
        let (runner, run, record) = ambiguous(&room, &log).await;
        let mut tasks = tokio::task::JoinSet::new();
        for n in 0..6 {
            let (operator, token) = (runner.operator(), run.token.clone());
            // Three say one thing under one id, three another under another.
            let (id, output) = if n % 2 == 0 { ("even", "0") } else { ("odd", "1") };
            let resolution = resolution(id, &record, complete(output));
            tasks.spawn(async move { operator.resolve(&token, &resolution, None, false).await });
        }
        let answers = tasks.join_all().await;
        let fresh = answers
            .iter()
            .filter(|a| a.as_ref().is_ok_and(|r| !r.replayed))
            .count();
        assert_eq!(fresh, 1, "{answers:?}");
        for answer in &answers {
            if let Err(error) = answer {
                assert!(
                    matches!(error.code(), "stale_token" | "run_busy" | "activity_conflict"),
                    "{error}"
                );
            }
        }
        assert_eq!(room.decisions(&run.run, &Scope::Operator).await.len(), 1);
        room.sound(&run.run).await;
    }
}

/// The host's own event of a settled effect is committed with it, once, and before the end of its run.
#[tokio::test(start_paused = true)]
async fn a_settled_effect_is_told_with_its_outcome() {
    let tell = |record: &ActivityRecord| {
        let data = format!("{{\"state\":\"{}\"}}", record.state);
        (record.state != ActivityState::Prepared).then(|| ("call.over".into(), data.into()))
    };
    for cancelled in [false, true] {
        let (room, log) = (Room::new(), Log::new());
        let (runner, run, record) = ambiguous(&room, &log).await;
        if cancelled {
            let operator = runner.operator();
            operator
                .cancel(&run.run, &decision("c"), "x", None)
                .await
                .unwrap();
        }
        let operator = runner.operator().telling(tell);
        let word = resolution("d", &record, complete("out"));
        let token = room.token(&run.run).await;
        for _ in 0..2 {
            operator.resolve(&token, &word, None, true).await.unwrap();
        }
        room.drain(&runner).await;
        let names = room.names(&run.run).await;
        let told = names.iter().filter(|name| *name == "call.over").count();
        assert_eq!(told, 1, "{names:?}");
        let end = if cancelled {
            "run.cancelled"
        } else {
            "run.succeeded"
        };
        assert_eq!(names.last().unwrap(), end);
        room.sound(&run.run).await;
    }
    let (room, log) = (Room::new(), Log::new());
    let (runner, run, record) = ambiguous(&room, &log).await;
    let operator = runner.operator().telling(tell);
    let found = operator.reconcile(&run.run, &record.id, |_| async { Some("found".into()) });
    found.await.unwrap();
    let last = room.events(&run.run).await.pop().unwrap();
    assert_eq!(
        (last.name.as_ref(), last.data.as_ref()),
        ("call.over", &b"{\"state\":\"completed\"}"[..])
    );
}
