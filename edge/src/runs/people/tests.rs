use std::cell::Cell;
use std::sync::Mutex;
use std::time::Duration;

use iop_durable::ids::RunId;
use iop_durable::record::{Status, WaitStatus};
use iop_durable::store::Store as _;
use iop_durable::testing::Fault;
use serde_json::json;

use super::inputs::{answer, answered};
use super::*;
use crate::agents::journal::{approval_id, arguments_digest};
use crate::runs::gates::bench::{ARGUMENTS, Bench, EXPIRES, INPUT, PATIENCE, STAYS, approval_subject};

fn raw(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).unwrap()
}

fn word(id: &str, decision: ApprovalDecision) -> Decide {
    let edited = (decision == ApprovalDecision::Edit).then(|| raw(r#"{"region":"us"}"#));
    Decide::new(id, decision, arguments_digest(ARGUMENTS), None, edited.as_deref()).unwrap()
}

#[test]
fn a_decision_is_checked_by_itself_and_names_its_field() {
    use ApprovalDecision::{Approve, Deny, Edit};
    let edited = |text: &str| {
        let raw = raw(text);
        let decide = Decide::new("d", Edit, String::new(), None, Some(&raw));
        decide
            .map(|decide| decide.answer.edited_arguments)
            .map_err(|problem| problem.param)
    };
    assert_eq!(edited(r#"{"a": 1.0 }"#), Ok(Some(r#"{"a": 1.0 }"#.to_owned())));
    assert_eq!(edited(r#""{\"a\": 1.0}""#), Ok(Some(r#"{"a": 1.0}"#.to_owned())));
    for other in ["[]", "1", "null", "true"] {
        assert_eq!(edited(other), Err(Some("edited_arguments".into())), "{other}");
    }
    let object = raw("{}");
    for (decision, given) in [(Edit, None), (Approve, Some(&*object)), (Deny, Some(&*object))] {
        let problem = Decide::new("d", decision, String::new(), None, given).unwrap_err();
        assert_eq!(
            (problem.code, problem.param.as_deref()),
            (Code::InvalidRequest, Some("edited_arguments"))
        );
    }
    for (id, reason, code, param) in [
        ("", None, Code::InvalidEncoding, "decision_id"),
        ("a\0b", None, Code::InvalidEncoding, "decision_id"),
        (
            "d",
            Some("x".repeat(16 * 1024 + 1)),
            Code::InvalidRequest,
            "reason",
        ),
    ] {
        let problem = Decide::new(id, Deny, String::new(), reason, None).unwrap_err();
        assert_eq!((problem.code, problem.param.as_deref()), (code, Some(param)));
    }
}

/// Every combination of what holds, against the order of the rules said once more.
#[test]
fn the_first_rule_that_does_not_hold_is_the_answer() {
    let named = vec!["ada".to_owned()];
    let anybody = Vec::new();
    let subject = approval_subject(EXPIRES);
    let standings = [
        Standing::Open,
        Standing::Decided,
        Standing::Expired,
        Standing::Withdrawn,
    ];
    let mut seen = std::collections::BTreeSet::new();
    for decision in ApprovalDecision::ALL {
        for standing in standings {
            for bits in 0..32_u32 {
                let bit = |n: u32| bits & (1 << n) != 0;
                let (restricted, is_ada, same, available, valid) = (bit(0), bit(1), bit(2), bit(3), bit(4));
                let checked = Mutex::new(None);
                let check = |arguments: &str| {
                    *checked.lock().unwrap() = Some(arguments.to_owned());
                    if valid {
                        Ok(())
                    } else {
                        Err("/region: too long".to_owned())
                    }
                };
                let terms = Terms {
                    deciders: if restricted { &named } else { &anybody },
                    available,
                    check: &check,
                };
                let mut answer = word("d", *decision).answer;
                if !same {
                    answer.arguments_digest = arguments_digest("{}");
                }
                let by = if is_ada { "ada" } else { "bob" };
                let open = standing == Standing::Open;
                let lets_pass = *decision != ApprovalDecision::Deny;
                let expected = if restricted && !is_ada {
                    Some(Code::DeciderNotAllowed)
                } else if !same {
                    Some(Code::ApprovalMismatch)
                } else if standing == Standing::Expired {
                    Some(Code::ApprovalExpired)
                } else if open && lets_pass && !available {
                    Some(Code::ToolUnavailable)
                } else if open && lets_pass && !valid {
                    Some(Code::SchemaViolation)
                } else {
                    None
                };
                let admitted = admit(&subject, &answer, standing, by, &terms);
                assert_eq!(
                    admitted.err().map(|problem| problem.code),
                    expected,
                    "{decision} {standing:?} {bits:05b}"
                );
                seen.insert(expected);
                let looked_at = match decision {
                    ApprovalDecision::Approve => Some(ARGUMENTS.to_owned()),
                    ApprovalDecision::Edit => Some(r#"{"region":"us"}"#.to_owned()),
                    ApprovalDecision::Deny => None,
                };
                let checks = open && lets_pass && matches!(expected, None | Some(Code::SchemaViolation));
                assert_eq!(checked.into_inner().unwrap(), looked_at.filter(|_| checks));
            }
        }
    }
    assert_eq!(seen.len(), 6);
}

fn told(verdict: Verdict, standing: Standing, status: Status, wait: WaitRecord) -> Told {
    Told {
        verdict,
        replayed: false,
        token: iop_durable::token::ResumeToken {
            run: wait.run.clone(),
            revision: iop_durable::ids::Revision::FIRST,
        },
        wait,
        standing,
        status,
        now: iop_durable::time::Timestamp::MIN,
    }
}

#[tokio::test]
async fn only_the_winner_is_a_success() {
    let bench = Bench::new();
    let loaded = bench.begin("run_1", &[STAYS]).await;
    let wait = bench.gate(&loaded, STAYS).await;
    for verdict in Verdict::ALL {
        for standing in [
            Standing::Open,
            Standing::Decided,
            Standing::Expired,
            Standing::Withdrawn,
        ] {
            for status in Status::ALL {
                let of = |map: fn(Result<Told, NotTold>) -> Result<Told, Problem>| {
                    let told = told(*verdict, standing, *status, wait.clone());
                    map(Ok(told)).err().map(|problem| problem.code)
                };
                let over = if status.is_terminal() {
                    Code::RunTerminal
                } else {
                    Code::RunNotWaiting
                };
                let (approval, input) = match verdict {
                    Verdict::Accepted => (None, None),
                    Verdict::Superseded if standing == Standing::Expired => {
                        (Some(Code::ApprovalExpired), Some(Code::RunNotWaiting))
                    }
                    Verdict::Superseded | Verdict::Unmatched => {
                        (Some(Code::ApprovalAlreadyDecided), Some(Code::RunNotWaiting))
                    }
                    Verdict::Canceled => (Some(over), Some(over)),
                };
                assert_eq!(
                    (of(decided), of(answered)),
                    (approval, input),
                    "{verdict} {standing:?} {status}"
                );
            }
        }
    }
    let refused = |not: NotTold| {
        (
            decided(Err(not.clone())).unwrap_err().code,
            answered(Err(not)).unwrap_err().code,
        )
    };
    assert_eq!(
        refused(NotTold::OtherContent),
        (Code::ApprovalAlreadyDecided, Code::DeliveryConflict)
    );
    assert_eq!(
        refused(NotTold::Expired),
        (Code::ApprovalExpired, Code::RunNotWaiting)
    );
    let busy = Problem::new(Code::RunBusy, "x");
    assert_eq!(refused(busy.into()), (Code::RunBusy, Code::RunBusy));
}

async fn say(bench: &Bench, run: &str, key: &str, decision: &Decide) -> Result<Told, Problem> {
    let loaded = bench.load(run).await;
    let wait = bench.gate(&loaded, key).await;
    let earlier = gates::earlier(&bench.operator, &wait, &decision.id).await?;
    let addressed = Addressed {
        loaded,
        wait,
        earlier,
    };
    decide(&bench.operator, addressed, decision, "ada").await
}

fn code<T: std::fmt::Debug>(result: Result<T, Problem>) -> Code {
    result.unwrap_err().code
}

#[tokio::test]
async fn the_same_decision_is_answered_again_and_every_other_one_is_too_late() {
    let bench = Bench::new();
    bench.begin("run_1", &[STAYS]).await;
    let approve = word("d-1", ApprovalDecision::Approve);
    let first = say(&bench, "run_1", STAYS, &approve).await.unwrap();
    assert_eq!(
        (first.verdict, first.replayed, first.wait.status),
        (Verdict::Accepted, false, WaitStatus::Delivered)
    );
    let again = say(&bench, "run_1", STAYS, &approve).await.unwrap();
    assert!(again.replayed);
    assert_eq!((again.wait, again.token), (first.wait, first.token));
    let other = say(&bench, "run_1", STAYS, &word("d-1", ApprovalDecision::Deny)).await;
    assert_eq!(code(other), Code::ApprovalAlreadyDecided);
    // A loser stays one, however often it asks.
    for _ in 0..2 {
        let late = say(&bench, "run_1", STAYS, &word("d-2", ApprovalDecision::Deny)).await;
        assert_eq!(code(late), Code::ApprovalAlreadyDecided);
    }
    let loaded = bench.load("run_1").await;
    let wait = bench.gate(&loaded, STAYS).await;
    let payload = wait.settled.unwrap().payload.unwrap();
    let answer: ApprovalAnswer = serde_json::from_slice(payload.bytes()).unwrap();
    assert_eq!(answer.decision, ApprovalDecision::Approve);
}

#[tokio::test]
async fn of_fifty_decisions_at_once_one_wins() {
    let bench = Bench::new();
    bench.begin("run_1", &[STAYS]).await;
    let words: Vec<Decide> = (0..50)
        .map(|n| word(&format!("d-{n}"), ApprovalDecision::ALL[n % 3]))
        .collect();
    let said = words.iter().map(|word| say(&bench, "run_1", STAYS, word));
    let answers = futures_util::future::join_all(said).await;
    let winners: Vec<_> = answers.iter().filter_map(|answer| answer.as_ref().ok()).collect();
    assert_eq!(winners.len(), 1);
    assert!(!winners[0].replayed);
    for loser in answers.iter().filter_map(|answer| answer.as_ref().err()) {
        assert_eq!(loser.code, Code::ApprovalAlreadyDecided);
    }
}

#[tokio::test]
async fn a_decision_after_its_time_is_too_late_whether_the_timer_was_there_or_not() {
    let bench = Bench::new();
    bench.begin("run_1", &[EXPIRES]).await;
    bench.clock.advance(PATIENCE + Duration::from_secs(1));
    let approve = word("d-1", ApprovalDecision::Approve);
    assert_eq!(
        code(say(&bench, "run_1", EXPIRES, &approve).await),
        Code::ApprovalExpired
    );
    let loaded = bench.load("run_1").await;
    let wait = bench.gate(&loaded, EXPIRES).await;
    assert_eq!(
        (wait.status, Standing::of(&wait, loaded.now)),
        (WaitStatus::Armed, Standing::Expired)
    );
    let acquired = bench
        .store
        .acquire(
            &loaded.head.id,
            iop_durable::testing::build::lease_for("w", PATIENCE),
        )
        .await;
    let (_keep, stop) = tokio::sync::watch::channel(false);
    bench
        .runner
        .run_claimed(acquired.unwrap(), tokio::time::Instant::now(), stop)
        .await
        .unwrap();
    let loaded = bench.load("run_1").await;
    let wait = bench.gate(&loaded, EXPIRES).await;
    assert_eq!(
        (wait.status, Standing::of(&wait, loaded.now)),
        (WaitStatus::TimedOut, Standing::Expired)
    );
    assert_eq!(
        code(say(&bench, "run_1", EXPIRES, &approve).await),
        Code::ApprovalExpired
    );
}

#[tokio::test]
async fn an_approval_ends_with_its_run() {
    let bench = Bench::new();
    let loaded = bench.begin("run_1", &[STAYS]).await;
    let id = gates::decision_id("cancel_id", "c-1").unwrap();
    bench
        .operator
        .cancel(&loaded.head.id, &id, "enough", None)
        .await
        .unwrap();
    let late = say(&bench, "run_1", STAYS, &word("d-1", ApprovalDecision::Approve)).await;
    assert_eq!(code(late), Code::RunTerminal);
}

/// S56, S86: whatever becomes of the acknowledgement, the decision is made once and its sender hears so.
#[tokio::test(start_paused = true)]
async fn a_lost_acknowledgement_is_no_lost_decision() {
    for fault in [Fault::DoneUnconfirmed, Fault::LostUnconfirmed, Fault::Refused] {
        let bench = Bench::new();
        bench.begin("run_1", &[STAYS]).await;
        bench.store.fail(1, fault);
        let approve = word("d-1", ApprovalDecision::Approve);
        let first = say(&bench, "run_1", STAYS, &approve).await;
        if fault == Fault::Refused {
            // Nothing was written, and the sender is told to ask again.
            assert_eq!(code(first), Code::StoreUnavailable);
        } else {
            assert_eq!(first.unwrap().verdict, Verdict::Accepted);
        }
        let again = say(&bench, "run_1", STAYS, &approve).await.unwrap();
        assert_eq!(
            (again.verdict, again.replayed),
            (Verdict::Accepted, fault != Fault::Refused)
        );
        let other = say(&bench, "run_1", STAYS, &word("d-2", ApprovalDecision::Deny)).await;
        assert_eq!(code(other), Code::ApprovalAlreadyDecided);
    }
}

#[tokio::test]
async fn an_id_leads_to_a_gate_of_its_kind_in_its_run_or_nowhere() {
    let bench = Bench::new();
    let first = bench.begin("run_1", &[STAYS, INPUT]).await;
    let second = bench.begin("run_2", &[STAYS]).await;
    let (own, others) = (bench.gate(&first, STAYS).await, bench.gate(&second, STAYS).await);
    let prompt = bench.gate(&first, INPUT).await;
    let found = approval(&bench.operator, &first, &approval_id(&own.id))
        .await
        .unwrap();
    assert_eq!(found, (own.clone(), approval_subject(STAYS)));
    for id in [
        approval_id(&others.id),
        approval_id(&prompt.id),
        own.id.to_string(),
        "apr_".to_owned(),
        String::new(),
    ] {
        let problem = approval(&bench.operator, &first, &id).await.unwrap_err();
        assert_eq!(
            (problem.code, problem.run_id.as_deref()),
            (Code::ApprovalNotFound, Some("run_1")),
            "{id}"
        );
    }
    assert_eq!(
        input(&bench.operator, &first, prompt.id.as_str()).await.unwrap(),
        prompt
    );
    for id in [own.id.as_str(), others.id.as_str(), "x", ""] {
        assert_eq!(
            code(input(&bench.operator, &first, id).await),
            Code::InputNotFound,
            "{id}"
        );
    }
}

#[tokio::test]
async fn an_input_is_answered_once() {
    let bench = Bench::new();
    bench.begin("run_1", &[INPUT]).await;
    let say = async |id: &str, value: &str| {
        let loaded = bench.load("run_1").await;
        let wait = bench.gate(&loaded, INPUT).await;
        let id = gates::decision_id("decision_id", id).unwrap();
        let addressed = Addressed {
            earlier: gates::earlier(&bench.operator, &wait, &id).await?,
            loaded,
            wait,
        };
        answer(&bench.operator, addressed, id, &raw(value), "ada").await
    };
    assert!(!say("i-1", "\"eu\"").await.unwrap().replayed);
    assert!(say("i-1", "\"eu\"").await.unwrap().replayed);
    assert_eq!(code(say("i-1", "\"us\"").await), Code::DeliveryConflict);
    assert_eq!(code(say("i-2", "\"eu\"").await), Code::RunNotWaiting);
    let loaded = bench.load("run_1").await;
    let wait = bench.gate(&loaded, INPUT).await;
    let payload = wait.settled.unwrap().payload.unwrap();
    assert_eq!(&payload.bytes()[..], b"\"eu\"");
}

#[tokio::test]
async fn an_answer_is_held_to_the_schema_of_its_prompt() {
    let bench = Bench::new();
    let loaded = bench.begin("run_1", &[INPUT]).await;
    let mut wait = bench.gate(&loaded, INPUT).await;
    fits(&wait, "value", &raw("\"eu\"")).unwrap();
    for value in ["\"europe\"", "7", "null", "{}"] {
        let problem = fits(&wait, "value", &raw(value)).unwrap_err();
        assert_eq!(
            (problem.code, problem.param.as_deref()),
            (Code::SchemaViolation, Some("value")),
            "{value}"
        );
        assert!(!problem.message.contains("europe"));
    }
    let deep = format!("{}1{}", "[".repeat(200), "]".repeat(200));
    assert_eq!(code(fits(&wait, "value", &raw(&deep))), Code::InvalidRequest);
    let without = json!({ "prompt": "?", "call_id": "call_3" });
    let broken = json!({ "prompt": "?", "call_id": "call_3", "schema": { "type": 7 } });
    for subject in [without, broken] {
        wait.subject = iop_durable::payload::Payload::new(subject.to_string());
        fits(&wait, "value", &raw("7")).unwrap();
    }
}

#[tokio::test]
async fn a_word_is_known_again_by_its_sender_and_its_id() {
    let bench = Bench::new();
    bench.begin("run_1", &[STAYS]).await;
    say(&bench, "run_1", STAYS, &word("d-1", ApprovalDecision::Approve))
        .await
        .unwrap();
    let loaded = bench.load("run_1").await;
    let wait = bench.gate(&loaded, STAYS).await;
    let known = Cell::new(0);
    for (id, by) in [("d-1", "ada"), ("d-1", "bob"), ("d-2", "ada")] {
        let id = gates::decision_id("decision_id", id).unwrap();
        let earlier = gates::earlier(&bench.operator, &wait, &id).await.unwrap();
        if gates::said_by(earlier.as_ref(), by) {
            known.set(known.get() + 1);
            assert_eq!((id.as_str(), by), ("d-1", "ada"));
        }
    }
    assert_eq!(known.get(), 1);
    assert_eq!(loaded.head.id, RunId::new("run_1").unwrap());
}
