use std::collections::BTreeMap;

use bytes::Bytes;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::payload::Payload;
use iop_durable::record::{OutcomeError, Reason, WaitingKind, WaitingOn};
use iop_durable::testing::build;
use proptest::prelude::*;
use serde_json::json;

use super::*;

fn run() -> RunId {
    RunId::new("run_1").unwrap()
}

fn at(revision: u64) -> ResumeToken {
    ResumeToken {
        run: run(),
        revision: Revision::new(revision).unwrap(),
    }
}

fn header(text: &str) -> Option<HeaderValue> {
    Some(HeaderValue::from_str(text).unwrap())
}

fn head(status: Status, revision: u64) -> RunHead {
    let mut head = build::head(&run(), &Payload::new("{}"), build::at(1));
    head.status = status;
    head.revision = Revision::new(revision).unwrap();
    head
}

fn failed(kind: FailureKind) -> RunHead {
    let mut outcome = Outcome::new(Status::Failed, Reason::Error);
    outcome.error = Some(OutcomeError {
        failure: Failure::new(kind, "x"),
        step: None,
        attempt: 1,
    });
    let mut head = head(Status::Failed, 2);
    head.outcome = Some(outcome.encode().unwrap());
    head
}

#[test]
fn a_token_comes_from_the_body_or_from_the_etag() {
    let text = at(42).to_string();
    let table = [
        (None, None, None),
        (Some(&*text), None, Some(at(42))),
        (None, header("\"42\""), Some(at(42))),
        (None, header("W/\"42\""), Some(at(42))),
        (Some(&text), header("\"42\""), Some(at(42))),
    ];
    for (body, if_match, expected) in table {
        assert_eq!(
            token(&run(), body, if_match.as_ref()),
            Ok(expected),
            "{body:?} {if_match:?}"
        );
    }
}

#[test]
fn what_is_no_token_names_its_place() {
    let other = ResumeToken {
        run: RunId::new("run_2").unwrap(),
        ..at(42)
    };
    let (text, other) = (at(42).to_string(), other.to_string());
    let table = [
        (Some("rt_00"), None, "resume_token"),
        (Some(""), None, "resume_token"),
        (Some(&*other), None, "resume_token"),
        (Some("x"), header("\"42\""), "resume_token"),
        (None, header("42"), "If-Match"),
        (None, header("*"), "If-Match"),
        (None, header("\"\""), "If-Match"),
        (None, header("\"0\""), "If-Match"),
        (None, header("\"+1\""), "If-Match"),
        (None, header("\"42\", \"43\""), "If-Match"),
        (None, header("\"99999999999999999999\""), "If-Match"),
        (Some(&text), header("\"43\""), "If-Match"),
    ];
    for (body, if_match, param) in table {
        let problem = token(&run(), body, if_match.as_ref()).unwrap_err();
        assert_eq!(
            (problem.code, problem.param.as_deref()),
            (Code::InvalidRequest, Some(param)),
            "{body:?} {if_match:?}"
        );
    }
}

#[test]
fn an_agent_goes_on_where_it_is() {
    let ask = |overlay: Option<Value>, target: Option<Value>| Ask {
        resume_token: Some(at(1).to_string()),
        state_overlay: overlay,
        resume_target: target,
        ..Ask::default()
    };
    assert_eq!(ask(None, None).check(&run()), Ok(at(1)));
    assert_eq!(ask(None, Some(json!({"current": true}))).check(&run()), Ok(at(1)));
    let overlaid = ask(Some(json!({})), None).check(&run()).unwrap_err();
    assert_eq!(
        (overlaid.code, overlaid.param.as_deref()),
        (Code::InvalidRequest, Some("state_overlay"))
    );
    for target in [
        json!({}),
        json!({"current": false}),
        json!({"current": 1}),
        json!({"step": "reason"}),
        json!({"current": true, "step": "reason"}),
        json!("current"),
        json!(null),
    ] {
        let problem = ask(None, Some(target.clone())).check(&run()).unwrap_err();
        assert_eq!(
            (problem.code, problem.param.as_deref()),
            (Code::InvalidResumeTarget, Some("resume_target")),
            "{target}"
        );
    }
    let without = Ask {
        metadata: BTreeMap::new(),
        ..Ask::default()
    };
    let problem = without.check(&run()).unwrap_err();
    assert_eq!(
        (problem.code, problem.param.as_deref()),
        (Code::InvalidRequest, Some("resume_token"))
    );
}

#[test]
fn a_run_that_is_over_needs_no_definition() {
    let stale = Some(Decision::Stale);
    for status in Status::ALL {
        assert_eq!(without_definition(&head(*status, 3), &at(2)), stale, "{status}");
        let expected = match status {
            Status::Queued | Status::Running | Status::Waiting | Status::Ambiguous => None,
            // Without an outcome that says otherwise, a failure is for good.
            Status::Failed
            | Status::Succeeded
            | Status::Cancelled
            | Status::Exhausted
            | Status::Transferred => Some(Decision::Terminal(*status)),
        };
        assert_eq!(
            without_definition(&head(*status, 2), &at(2)),
            expected,
            "{status}"
        );
    }
    for kind in FailureKind::ALL {
        let expected = (!kind.resumable()).then_some(Decision::Terminal(Status::Failed));
        assert_eq!(without_definition(&failed(kind), &at(2)), expected, "{kind:?}");
    }
    let mut unreadable = head(Status::Failed, 2);
    unreadable.outcome = Some(Bytes::from_static(b"{"));
    assert_eq!(
        without_definition(&unreadable, &at(2)),
        Some(Decision::Terminal(Status::Failed))
    );
}

fn waiting() -> Box<Waiting> {
    Box::new(Waiting {
        reason: String::new(),
        due_at: None,
        on: vec![WaitingOn {
            kind: WaitingKind::Approval,
            id: "wait_1".to_owned(),
            node: build::node("action"),
            key: "call_1.0".to_owned(),
        }],
    })
}

#[test]
fn every_decision_has_one_word_and_at_most_one_code() {
    let mut decisions: Vec<(Decision, Option<Code>)> = vec![
        (Decision::Ready, None),
        (Decision::Stale, Some(Code::StaleToken)),
        (Decision::Waiting(waiting()), Some(Code::RunWaiting)),
        (Decision::Ambiguous(waiting()), Some(Code::EffectAmbiguous)),
        (Decision::Busy, Some(Code::RunBusy)),
        (
            Decision::DefinitionChanged("x".to_owned()),
            Some(Code::DefinitionChanged),
        ),
        (Decision::DefinitionMissing, Some(Code::DefinitionMissing)),
    ];
    for status in Status::ALL {
        let code = (*status != Status::Succeeded).then_some(Code::RunTerminal);
        decisions.push((Decision::Terminal(*status), code));
    }
    let head = head(Status::Waiting, 7);
    for (decision, code) in decisions {
        let refused = refusal(&decision, &head, &at(8));
        assert_eq!(refused.as_ref().map(|problem| problem.code), code, "{decision:?}");
        if let Some(problem) = refused {
            assert_eq!(problem.decision, Some(decision.word().as_str()));
            assert_eq!(problem.current_resume_token, Some(at(8).to_string()));
            assert_eq!(problem.run_id.as_deref(), Some("run_1"));
            assert_eq!(problem.retryable, code == Some(Code::RunBusy));
        }
    }
}

proptest! {
    #[test]
    fn a_revision_comes_back_from_its_etag(n in 1..=(i64::MAX as u64)) {
        let etag = HeaderValue::from_str(&format!("\"{n}\"")).unwrap();
        prop_assert_eq!(token(&run(), None, Some(&etag)), Ok(Some(at(n))));
        prop_assert_eq!(token(&run(), Some(&at(n).to_string()), Some(&etag)), Ok(Some(at(n))));
    }

    #[test]
    fn a_resume_target_of_any_shape_is_current_or_refused(text in "\\PC{0,20}", flag in any::<bool>()) {
        let target = json!({ text.clone(): flag });
        prop_assert_eq!(is_current(&target), text == "current" && flag);
    }
}
