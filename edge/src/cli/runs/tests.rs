use super::*;

fn approvals(rows: &str) -> Vec<Approval> {
    serde_json::from_str(rows).unwrap()
}

fn decide(approval: Option<&str>, decision_id: Option<&str>) -> Decide {
    Decide {
        run: String::from("run_1"),
        approval: approval.map(str::to_owned),
        reason: None,
        decision_id: decision_id.map(str::to_owned),
    }
}

const TWO: &str = r#"[
    {"id": "apr_1", "tool": "deploy", "status": "approved", "decision_id": "d1"},
    {"id": "apr_2", "tool": "charge", "status": "pending", "arguments": {"amount": 5}},
    {"id": "apr_3", "tool": "charge", "status": "pending", "arguments": {"amount": 7}}]"#;

#[test]
fn the_only_pending_approval_needs_no_name() {
    let all = approvals(TWO);
    let (one, none) = (&all[..2], &all[..1]);
    assert_eq!(pick(one, &decide(None, None)).unwrap().id, "apr_2");
    // A fresh id of the caller's own is a new decision.
    assert_eq!(pick(one, &decide(None, Some("mine"))).unwrap().id, "apr_2");
    let nothing = pick(none, &decide(None, None)).unwrap_err();
    assert!(nothing.starts_with("run_not_waiting: "), "{nothing}");
}

#[test]
fn of_several_pending_approvals_one_has_to_be_named() {
    let all = approvals(TWO);
    let why = pick(&all, &decide(None, None)).unwrap_err();
    for call in [r#"apr_2 charge {"amount": 5}"#, r#"apr_3 charge {"amount": 7}"#] {
        assert!(why.contains(call), "{why}");
    }
    assert!(!why.contains("apr_1"), "{why}");
    assert_eq!(pick(&all, &decide(Some("apr_3"), None)).unwrap().id, "apr_3");
    let stranger = pick(&all, &decide(Some("apr_9"), None)).unwrap_err();
    assert!(
        stranger.starts_with("approval_not_found: ") && stranger.contains("apr_9"),
        "{stranger}"
    );
}

/// The edge answers for what was decided before: with its first answer, or with why not.
#[test]
fn a_decided_approval_is_found_by_its_name_or_its_decision() {
    let all = approvals(TWO);
    assert_eq!(pick(&all, &decide(Some("apr_1"), None)).unwrap().id, "apr_1");
    assert_eq!(pick(&all, &decide(None, Some("d1"))).unwrap().id, "apr_1");
}

#[test]
fn edited_arguments_are_sent_as_they_were_typed() {
    let typed = r#"{"amount": 10000000000000000000.10, "a": 1, "a": 2}"#;
    let edited = object(typed).unwrap();
    let body = Decision {
        decision: "edit",
        decision_id: "d",
        arguments_digest: "sha256:0",
        reason: None,
        edited_arguments: Some(&edited),
    };
    assert_eq!(
        serde_json::to_string(&body).unwrap(),
        format!(
            r#"{{"decision":"edit","decision_id":"d","arguments_digest":"sha256:0","edited_arguments":{typed}}}"#
        )
    );
    for bad in ["[]", "\"{}\"", "{", "{} {}", ""] {
        assert!(object(bad).is_err(), "{bad}");
    }
}
