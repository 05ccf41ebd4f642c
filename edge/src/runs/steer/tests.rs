use serde_json::value::RawValue;

use super::effects::ResolveAction;
use super::*;
use crate::runs::gates::bench::{Bench, UNKNOWN};

#[test]
fn a_cancellation_is_settled_when_its_run_is_over_or_it_was_answered_before() {
    for status in Status::ALL {
        for replayed in [false, true] {
            for (outcome, settled) in [
                (CancelOutcome::Requested, replayed),
                (CancelOutcome::Done(*status), replayed || status.is_terminal()),
                (CancelOutcome::Over(*status), true),
            ] {
                assert_eq!(
                    is_settled(Cancelled { outcome, replayed }),
                    settled,
                    "{outcome:?} {replayed}"
                );
            }
        }
    }
}

#[test]
fn a_cancellation_names_what_is_wrong_with_it() {
    let wrong = |id: &str, reason: String| Cancel::new(id, reason).unwrap_err();
    assert_eq!(wrong("", String::new()).param.as_deref(), Some("cancel_id"));
    assert_eq!(
        wrong("c", "x".repeat(16 * 1024 + 1)).param.as_deref(),
        Some("reason")
    );
    assert_eq!(Cancel::new("c", String::new()).unwrap().reason, "");
}

#[tokio::test]
async fn an_unknown_effect_is_settled_by_one_decision() {
    let bench = Bench::new();
    let loaded = bench.begin("run_1", &[UNKNOWN]).await;
    assert_eq!(loaded.head.status, Status::Ambiguous);
    let run = &loaded.head.id;
    let records = bench.operator.store().activities(run, None, 10).await.unwrap();
    let record = call(bench.operator.store(), run, records[0].id.as_str())
        .await
        .unwrap();
    let missing = call(bench.operator.store(), run, "act_x").await.unwrap_err();
    assert_eq!(missing.code, Code::ActivityNotFound);
    let resolve = |attempt: u32, reason: &str| Resolve {
        action: ResolveAction::Complete,
        decision_id: "d-1".to_owned(),
        input_digest: record.input.digest_text(),
        attempt,
        reason: reason.to_owned(),
        evidence: "ticket 7".to_owned(),
        output: Some(RawValue::from_string("\"deployed\"".to_owned()).unwrap()),
        resume: true,
    };
    let say = async |resolve: Resolve| {
        let resolution = resolve.of(&record).unwrap();
        let (operator, resolution) = (&bench.operator, &resolution);
        with_token(operator, run, None, |token| async move {
            operator
                .resolve(&token, resolution, Some("ada"), resolve.resume)
                .await
        })
        .await
    };
    assert_eq!(
        say(resolve(2, "it is there")).await.unwrap_err().code,
        Code::ActivityConflict
    );
    let first = say(resolve(1, "it is there")).await.unwrap();
    assert_eq!((first.status, first.replayed), (Status::Queued, false));
    assert!(say(resolve(1, "it is there")).await.unwrap().replayed);
    assert_eq!(
        say(resolve(1, "it is not")).await.unwrap_err().code,
        Code::ActivityConflict
    );
    let record = call(bench.operator.store(), run, record.id.as_str())
        .await
        .unwrap();
    assert_eq!(
        (record.origin, record.output.as_ref().map(|o| &o.bytes()[..])),
        (Some(Origin::Manual), Some(&b"deployed"[..]))
    );
}
