use std::sync::atomic::{AtomicU32, Ordering};

use iop_durable::machine::wait::Verdict;
use iop_durable::record::{Status, WaitStatus};
use iop_durable::store::Store as _;

use super::*;
use crate::runs::gates::bench::{ABOUT, Bench, EVENT, INPUT, STAYS};

fn event(id: &str, about: &str, payload: &str) -> Deliver {
    let payload = RawValue::from_string(payload.to_owned()).unwrap();
    Deliver::new(id, about, payload).unwrap()
}

async fn deliver(bench: &Bench, deliver: &Deliver) -> Result<Told, Problem> {
    let loaded = bench.load("run_1").await;
    let wait = bench.gate(&loaded, EVENT).await;
    let word = Word {
        id: deliver.id.clone(),
        correlation: Some(deliver.correlation.clone()),
        payload: Bytes::copy_from_slice(deliver.payload.get().as_bytes()),
    };
    let earlier = gates::earlier(&bench.operator, &wait, &deliver.id).await?;
    let addressed = Addressed {
        loaded,
        wait,
        earlier,
    };
    delivered(gates::tell(&bench.operator, addressed, word, "ada").await)
}

/// S65, S68: one effect, replays, a conflict; a late one is recorded.
#[tokio::test]
async fn a_delivery_has_one_verdict_for_ever() {
    let bench = Bench::new();
    bench.begin("run_1", &[EVENT]).await;
    for replayed in [false, true, true, true, true] {
        let told = deliver(&bench, &event("e-1", ABOUT, "1")).await.unwrap();
        assert_eq!((told.verdict, told.replayed), (Verdict::Accepted, replayed));
    }
    let changed = deliver(&bench, &event("e-1", ABOUT, "2")).await.unwrap_err();
    assert_eq!(
        (changed.code, changed.param.as_deref()),
        (Code::DeliveryConflict, Some("delivery_id"))
    );
    let other = deliver(&bench, &event("e-2", "order/8", "1")).await.unwrap_err();
    assert_eq!(other.code, Code::DeliveryConflict);
    for replayed in [false, true] {
        let told = deliver(&bench, &event("e-3", ABOUT, "1")).await.unwrap();
        assert_eq!((told.verdict, told.replayed), (Verdict::Superseded, replayed));
    }
}

#[tokio::test]
async fn a_late_delivery_revives_nothing() {
    let bench = Bench::new();
    let loaded = bench.begin("run_1", &[EVENT]).await;
    let id = gates::decision_id("cancel_id", "c-1").unwrap();
    bench
        .operator
        .cancel(&loaded.head.id, &id, "enough", None)
        .await
        .unwrap();
    for replayed in [false, true] {
        let told = deliver(&bench, &event("e-1", ABOUT, "1")).await.unwrap();
        assert_eq!(
            (told.verdict, told.replayed, told.status),
            (Verdict::Canceled, replayed, Status::Cancelled)
        );
    }
}

#[test]
fn what_is_wrong_with_a_delivery_or_a_cancellation_is_named() {
    let payload = || RawValue::from_string("1".to_owned()).unwrap();
    for (id, about, param) in [
        ("", "a", "delivery_id"),
        ("a\0", "a", "delivery_id"),
        ("a", "", "correlation_id"),
    ] {
        let problem = Deliver::new(id, about, payload()).unwrap_err();
        assert_eq!(
            (problem.code, problem.param.as_deref()),
            (Code::InvalidEncoding, Some(param))
        );
    }
    let give_up = |id: &str, reason: &str, evidence: &str| {
        let problem = GiveUp::new(id, reason.to_owned(), evidence.to_owned()).unwrap_err();
        (problem.code, problem.param.unwrap())
    };
    assert_eq!(give_up("", "r", "e"), (Code::InvalidEncoding, "cancel_id".into()));
    assert_eq!(give_up("c", " ", "e"), (Code::InvalidRequest, "reason".into()));
    assert_eq!(give_up("c", "r", ""), (Code::InvalidRequest, "evidence".into()));
}

#[tokio::test]
async fn an_event_is_for_exactly_one_wait() {
    let bench = Bench::new();
    let first = bench.begin("run_1", &[EVENT]).await;
    let second = bench.begin("run_2", &[EVENT]).await;
    let (first, second) = (bench.gate(&first, EVENT).await, bench.gate(&second, EVENT).await);
    let none = the_one::<()>(Vec::new()).unwrap_err();
    assert_eq!(
        (none.code, none.retryable, none.retry_after.is_some()),
        (Code::WaitNotArmed, true, true)
    );
    assert_eq!(the_one(vec![((), first.clone())]).unwrap(), ((), first.clone()));
    let many = the_one(vec![((), first.clone()), ((), second.clone())]).unwrap_err();
    assert_eq!(many.code, Code::AmbiguousCorrelation);
    let named = json!([
        { "run_id": "run_1", "wait_id": first.id.as_str() },
        { "run_id": "run_2", "wait_id": second.id.as_str() },
    ]);
    assert_eq!(many.more, [("waits", named)]);
}

#[tokio::test]
async fn decisions_are_no_deliveries_and_prompts_are_an_operators() {
    let bench = Bench::new();
    let loaded = bench.begin("run_1", &[STAYS, INPUT, EVENT]).await;
    let mut wait = bench.gate(&loaded, EVENT).await;
    for kind in WaitingKind::ALL {
        wait.kind = *kind;
        let (anybodys, operators) = match kind {
            WaitingKind::Event => (true, true),
            WaitingKind::Input => (false, true),
            WaitingKind::Approval
            | WaitingKind::Timer
            | WaitingKind::Retry
            | WaitingKind::Children
            | WaitingKind::Reconciliation
            | WaitingKind::Resume
            | WaitingKind::Handoff => (false, false),
        };
        assert_eq!(
            (takes_events(&wait, false), takes_events(&wait, true)),
            (anybodys, operators),
            "{kind}"
        );
        assert_eq!(is_outside(&wait), *kind != WaitingKind::Approval);
    }
}

#[tokio::test]
async fn without_a_token_the_current_one_is_used_until_it_holds() {
    let bench = Bench::new();
    let loaded = bench.begin("run_1", &[EVENT]).await;
    let run = &loaded.head.id;
    let current = loaded.head.token();
    let stale = || RunError::StaleToken {
        current: current.clone(),
    };
    let tried = AtomicU32::new(0);
    let third = with_token(&bench.operator, run, None, |token| {
        let n = tried.fetch_add(1, Ordering::SeqCst);
        let answer = if n < 2 { Err(stale()) } else { Ok(token) };
        async move { answer }
    });
    assert_eq!(third.await.unwrap(), current);
    let always = with_token(&bench.operator, run, None, |_| async { Err::<(), _>(stale()) });
    assert_eq!(always.await.unwrap_err().code, Code::StaleToken);
    let tried = AtomicU32::new(0);
    let given = with_token(&bench.operator, run, Some(current.clone()), |_| {
        tried.fetch_add(1, Ordering::SeqCst);
        async { Err::<(), _>(stale()) }
    });
    let problem = given.await.unwrap_err();
    assert_eq!(
        (problem.code, problem.current_resume_token),
        (Code::StaleToken, Some(current.to_string()))
    );
    assert_eq!(tried.into_inner(), 1);
}

#[tokio::test]
async fn a_wait_is_cancelled_with_its_run_once() {
    let bench = Bench::new();
    let loaded = bench.begin("run_1", &[EVENT]).await;
    let wait = bench.gate(&loaded, EVENT).await;
    let give_up = GiveUp::new("c-1", "nobody answers".to_owned(), "ticket 7".to_owned()).unwrap();
    let cancel = async |give_up: &GiveUp| {
        with_token(&bench.operator, &loaded.head.id, None, |token| {
            let (operator, wait) = (&bench.operator, &wait.id);
            async move {
                operator
                    .cancel_wait(
                        &token,
                        wait,
                        &give_up.id,
                        &give_up.reason,
                        &give_up.evidence,
                        Some("ada"),
                    )
                    .await
            }
        })
        .await
    };
    let first = cancel(&give_up).await.unwrap();
    assert_eq!((first.status, first.replayed), (Status::Cancelled, false));
    assert!(cancel(&give_up).await.unwrap().replayed);
    let other = GiveUp::new("c-1", "another".to_owned(), "ticket 7".to_owned()).unwrap();
    assert_eq!(cancel(&other).await.unwrap_err().code, Code::DeliveryConflict);
    let stored = bench
        .store
        .wait(&loaded.head.id, &wait.id)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(stored.status, WaitStatus::Cancelled);
}
