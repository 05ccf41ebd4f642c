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
    assert_eq!(approval(one, &decide(None, None)).unwrap().id, "apr_2");
    // A fresh id of the caller's own is a new decision.
    assert_eq!(approval(one, &decide(None, Some("mine"))).unwrap().id, "apr_2");
    let nothing = approval(none, &decide(None, None)).unwrap_err();
    assert!(nothing.starts_with("run_not_waiting: "), "{nothing}");
}

#[test]
fn of_several_pending_approvals_one_has_to_be_named() {
    let all = approvals(TWO);
    let why = approval(&all, &decide(None, None)).unwrap_err();
    for call in [r#"apr_2 charge {"amount": 5}"#, r#"apr_3 charge {"amount": 7}"#] {
        assert!(why.contains(call), "{why}");
    }
    assert!(!why.contains("apr_1"), "{why}");
    assert_eq!(approval(&all, &decide(Some("apr_3"), None)).unwrap().id, "apr_3");
    let stranger = approval(&all, &decide(Some("apr_9"), None)).unwrap_err();
    assert!(
        stranger.starts_with("approval_not_found: ") && stranger.contains("apr_9"),
        "{stranger}"
    );
}

/// The edge answers for what was decided before: with its first answer, or with why not.
#[test]
fn a_decided_approval_is_found_by_its_name_or_its_decision() {
    let all = approvals(TWO);
    assert_eq!(approval(&all, &decide(Some("apr_1"), None)).unwrap().id, "apr_1");
    assert_eq!(approval(&all, &decide(None, Some("d1"))).unwrap().id, "apr_1");
}

fn asking(questions: &str) -> Run {
    serde_json::from_str(&format!(r#"{{"id": "run_1", "waiting_on": [{questions}]}}"#)).unwrap()
}

#[test]
fn the_only_question_needs_no_name_and_one_with_an_answer_is_left_to_the_edge() {
    const ONE: &str =
        r#"{"kind": "approval", "id": "apr_1"}, {"kind": "input", "id": "wait_1", "prompt": "Which?"}"#;
    let one = asking(ONE);
    let (id, asked) = input(&one, None).unwrap();
    assert_eq!((id, asked.unwrap().prompt.as_deref()), ("wait_1", Some("Which?")));
    let (id, asked) = input(&one, Some("wait_9")).unwrap();
    assert_eq!((id, asked.is_none()), ("wait_9", true));
    let nothing = input(&asking(""), None).err().unwrap();
    assert!(nothing.starts_with("run_not_waiting: "), "{nothing}");
    let two = asking(&format!(
        r#"{ONE}, {{"kind": "input", "id": "wait_2", "prompt": "Why?"}}"#
    ));
    let why = input(&two, None).err().unwrap();
    for question in ["2 questions", "wait_1 Which?", "wait_2 Why?"] {
        assert!(why.contains(question), "{why}");
    }
}

#[test]
fn a_call_of_unknown_effect_is_found_alone_by_its_name_or_by_a_decision_about_it() {
    const CALLS: &str = r#"[
        {"id": "act_1", "tool": "deploy", "state": "completed", "attempt": 3,
         "decisions": [{"decision_id": "r1", "action": "retry", "attempt": 2}]},
        {"id": "act_2", "tool": "charge", "state": "unknown", "attempt": 1, "input": {"amount": 5}},
        {"id": "act_3", "tool": "charge", "state": "unknown", "attempt": 1, "input": {"amount": 7}}]"#;
    let all: Vec<Activity> = serde_json::from_str(CALLS).unwrap();
    assert_eq!(effect(&all[..2], "run_1", None, Some("new")).unwrap().id, "act_2");
    assert_eq!(effect(&all, "run_1", Some("act_1"), None).unwrap().id, "act_1");
    // What was said of an attempt is said of it again, whatever was tried since.
    let decided = effect(&all, "run_1", None, Some("r1")).unwrap();
    assert_eq!((&*decided.id, decided.attempt_of(Some("r1"))), ("act_1", 2));
    assert_eq!((decided.attempt_of(None), decided.attempt_of(Some("r2"))), (3, 3));

    let why = effect(&all, "run_1", None, None).unwrap_err();
    for call in [
        "2 calls",
        r#"act_2 charge {"amount": 5}"#,
        r#"act_3 charge {"amount": 7}"#,
    ] {
        assert!(why.contains(call), "{why}");
    }
    let stranger = effect(&all, "run_1", Some("act_9"), None).unwrap_err();
    assert!(stranger.starts_with("activity_not_found: "), "{stranger}");
    let nothing = effect(&all[..1], "run_1", None, None).unwrap_err();
    assert!(nothing.starts_with("run_not_waiting: "), "{nothing}");
}
