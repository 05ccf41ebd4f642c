use iop_durable::ids::RunId;
use iop_durable::testing::build;

use super::*;
use crate::runs::problem::Code;

fn record() -> ActivityRecord {
    build::activity(&RunId::new("run_1").unwrap(), 2, "call_1.0")
}

fn raw(text: &str) -> Option<Box<RawValue>> {
    Some(RawValue::from_string(text.to_owned()).unwrap())
}

fn resolve(action: ResolveAction, output: Option<&str>) -> Resolve {
    Resolve {
        action,
        decision_id: "d-1".to_owned(),
        input_digest: record().input.digest_text(),
        attempt: 1,
        reason: "the service has it".to_owned(),
        evidence: "ticket 7".to_owned(),
        output: output.and_then(raw),
        resume: false,
    }
}

fn output_of(resolution: &Resolution) -> Option<String> {
    match &resolution.action {
        Action::Complete { output } => Some(String::from_utf8_lossy(output.bytes()).into_owned()),
        Action::Fail { .. } | Action::Retry => None,
    }
}

#[test]
fn an_output_is_what_the_model_is_told() {
    for (sent, told) in [
        (r#""deployed \"eu\"""#, "deployed \"eu\""),
        (r#""""#, ""),
        (r#"{"id" : 1.0}"#, r#"{"id" : 1.0}"#),
        ("[1]", "[1]"),
        ("null", "null"),
        ("12.50", "12.50"),
    ] {
        let resolution = resolve(ResolveAction::Complete, Some(sent))
            .of(&record())
            .unwrap();
        assert_eq!(output_of(&resolution).as_deref(), Some(told), "{sent}");
    }
}

#[test]
fn a_resolution_is_about_the_activity_as_it_was_seen() {
    let record = record();
    let resolution = resolve(ResolveAction::Retry, None).of(&record).unwrap();
    assert_eq!(resolution.id, record.id);
    assert_eq!(resolution.input_digest, *record.input.digest());
    assert_eq!(resolution.implementation, record.implementation);
    assert_eq!((resolution.attempt, resolution.action), (1, Action::Retry));
    let failed = resolve(ResolveAction::Fail, None).of(&record).unwrap();
    let Action::Fail { error } = failed.action else {
        panic!("another action");
    };
    assert_eq!(
        (error.kind, &*error.code, error.retryable),
        (FailureKind::ToolError, FAILED, false)
    );
    assert_eq!(error.message, "the service has it");
}

#[test]
fn what_is_wrong_with_a_resolution_is_named() {
    type Change = fn(&mut Resolve);
    let table: [(Change, Code, &str); 13] = [
        (
            |r| r.action = ResolveAction::Complete,
            Code::InvalidRequest,
            "output",
        ),
        (|r| r.output = raw("null"), Code::InvalidRequest, "output"),
        (
            |r| {
                r.action = ResolveAction::Retry;
                r.output = raw("null");
            },
            Code::InvalidRequest,
            "output",
        ),
        (|r| r.decision_id.clear(), Code::InvalidEncoding, "decision_id"),
        (
            |r| r.decision_id = "a\0".to_owned(),
            Code::InvalidEncoding,
            "decision_id",
        ),
        (
            |r| r.decision_id = "x".repeat(257),
            Code::InvalidEncoding,
            "decision_id",
        ),
        (|r| r.reason = " ".to_owned(), Code::InvalidRequest, "reason"),
        (
            |r| r.reason = "x".repeat((16 << 10) + 1),
            Code::InvalidRequest,
            "reason",
        ),
        (|r| r.evidence.clear(), Code::InvalidRequest, "evidence"),
        (|r| r.input_digest.clear(), Code::InvalidRequest, "input_digest"),
        (
            |r| r.input_digest = "sha256:00".to_owned(),
            Code::InvalidRequest,
            "input_digest",
        ),
        (
            |r| r.input_digest = r.input_digest.replace("sha256", "sha512"),
            Code::InvalidRequest,
            "input_digest",
        ),
        (|r| r.input_digest.push('0'), Code::InvalidRequest, "input_digest"),
    ];
    for (n, (change, code, param)) in table.into_iter().enumerate() {
        let mut resolve = resolve(ResolveAction::Fail, None);
        change(&mut resolve);
        let problem = resolve.of(&record()).unwrap_err();
        assert_eq!(
            (problem.code, problem.param.as_deref()),
            (code, Some(param)),
            "{n}"
        );
    }
}
