use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::agents::spec::AgentSpec;

fn policy(spec: &serde_json::Value) -> Result<Policy, Invalid> {
    let mut whole = json!({"model": "m", "durable": true});
    whole
        .as_object_mut()
        .unwrap()
        .extend(spec.as_object().unwrap().clone());
    let spec: AgentSpec = serde_json::from_value(whole).unwrap();
    Policy::compile(&spec)
}

fn rules(rules: &[(&str, &str)]) -> Policy {
    let rules: Vec<_> = rules
        .iter()
        .map(|(tool, when)| json!({"tool": tool, "when": when}))
        .collect();
    policy(&json!({"approval_rules": rules})).unwrap()
}

const ASK: Judgement = Judgement::Ask { why: AskWhy::Rule };
const INVALID: Judgement = Judgement::Ask {
    why: AskWhy::InvalidArguments,
};

#[test]
fn the_first_rule_that_names_the_tool_decides() {
    let policy = rules(&[
        ("deploy", "always"),
        ("read", "never"),
        ("charge", "args.amount > 10000"),
        ("*", "tool.startsWith('delete')"),
        ("late", "always"),
    ]);
    for (tool, arguments, judgement) in [
        ("deploy", "{}", ASK),
        ("deploy", "no JSON", ASK),
        ("read", "no JSON", Judgement::Free),
        ("charge", r#"{"amount":10000}"#, Judgement::Free),
        ("charge", r#"{"amount":10001}"#, ASK),
        ("charge", r#"{"amount":10000.5}"#, ASK),
        ("charge", r#"{"amount":18446744073709551615}"#, ASK),
        ("charge", r#"{"amount":1e300}"#, ASK),
        ("charge", r#"{"amount":-1}"#, Judgement::Free),
        ("delete_all", "{}", ASK),
        ("list", "{}", Judgement::Free),
        ("late", "{}", Judgement::Free),
    ] {
        assert_eq!(policy.judge(tool, arguments), judgement, "{tool} {arguments}");
    }
}

#[test]
fn the_default_is_for_tools_without_a_rule() {
    let policy = policy(&json!({
        "approvals": {"default": "has(args.force) && args.force"},
        "approval_rules": [{"tool": "read", "when": "never"}],
    }))
    .unwrap();
    assert_eq!(policy.judge("read", r#"{"force":true}"#), Judgement::Free);
    assert_eq!(policy.judge("other", r#"{"force":true}"#), ASK);
    assert_eq!(policy.judge("other", r#"{"force":false}"#), Judgement::Free);
    assert_eq!(policy.judge("other", "{}"), Judgement::Free);
}

#[test]
fn what_cannot_be_judged_is_asked_or_refused_and_never_free() {
    let when = "args.amount > 10";
    let ask = rules(&[("t", when)]);
    let refuse = policy(&json!({
        "approvals": {"on_invalid_arguments": "refuse"},
        "approval_rules": [{"tool": "t", "when": when}],
    }))
    .unwrap();
    let deep = format!("{}1{}", r#"{"a":"#.repeat(10_000), "}".repeat(10_000));
    let long = format!(r#"{{"amount":1,"pad":"{}"}}"#, "x".repeat(1 << 20));
    for arguments in [
        "",
        "[]",
        "null",
        "5",
        "\"amount\"",
        "{",
        "{}",
        r#"{"amount":"20"}"#,
        r#"{"amount":null}"#,
        r#"{"amount":[1]}"#,
        r#"{"amount":1e999}"#,
        r#"{"amount":1} x"#,
        r#"{"amount":1,"amount":99}"#,
        r#"{"amount":1,"x":{"a":1,"a":2}}"#,
        r#"{"amount":1,"x":"\ud800"}"#,
        &deep,
        &long,
    ] {
        let start: String = arguments.chars().take(40).collect();
        assert_eq!(ask.judge("t", arguments), INVALID, "{start}");
        match refuse.judge("t", arguments) {
            Judgement::Refuse { why } => assert!(!why.is_empty() && !why.contains("99"), "{why}"),
            other @ (Judgement::Free | Judgement::Ask { .. }) => panic!("{start}: {other:?}"),
        }
    }
}

#[test]
fn a_condition_that_is_none_is_named() {
    for (spec, field) in [
        (json!({"approvals": {"default": ""}}), "approvals.default"),
        (
            json!({"approvals": {"default": "sometimes"}}),
            "approvals.default",
        ),
        (
            json!({"approval_rules": [{"tool": "a", "when": "never"}, {"tool": "b", "when": "args."}]}),
            "approval_rules[1].when",
        ),
    ] {
        assert_eq!(policy(&spec).unwrap_err().field, field);
    }
}

proptest! {
    #[test]
    fn a_limit_is_exact_for_every_whole_number(amount: i64, limit: i64) {
        let policy = rules(&[("t", &format!("args.amount > {limit}"))]);
        let expected = if amount > limit { ASK } else { Judgement::Free };
        prop_assert_eq!(policy.judge("t", &json!({"amount": amount}).to_string()), expected);
    }

    #[test]
    fn numbers_beyond_the_signed_ones_are_over_a_limit(amount in (1_u64 << 63)..=u64::MAX, limit: i64) {
        let policy = rules(&[("t", &format!("args.amount > {limit}"))]);
        prop_assert_eq!(policy.judge("t", &json!({"amount": amount}).to_string()), ASK);
    }

    #[test]
    fn fractions_compare_as_they_are(amount in -1e12_f64..1e12, limit in -1_000_000_i64..1_000_000) {
        let policy = rules(&[("t", &format!("args.amount > {limit}"))]);
        let expected = if amount > limit as f64 { ASK } else { Judgement::Free };
        prop_assert_eq!(policy.judge("t", &json!({"amount": amount}).to_string()), expected);
    }

    #[test]
    fn no_text_of_a_model_is_let_through_unjudged(arguments in ".{0,64}") {
        let policy = rules(&[("t", "args.amount <= 10 || args.amount > 10")]);
        prop_assert_ne!(policy.judge("t", &arguments), Judgement::Free);
    }
}
