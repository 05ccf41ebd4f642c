use iop_shared::config::Period;
use iop_shared::execution::RuntimeEventKind;
use iop_shared::wire::event::RunEvent;

use super::testing::facts;
use super::*;

fn script(toml: &str) -> Script {
    toml::from_str(toml).unwrap()
}

fn plan(script: &Script, body: &str) -> Vec<Step> {
    tunnel(Api::Chat, script, body.as_bytes(), &facts(0)).into()
}

fn normalized(script: &Script, attempt: u32) -> Vec<Step> {
    let messages = [Message {
        role: "user".into(),
        content: "hello".into(),
    }];
    run(script, &messages, &facts(attempt)).into()
}

fn text(steps: &[Step]) -> String {
    let mut all = Vec::new();
    for step in steps {
        if let Step::Data(data) = step {
            all.extend_from_slice(&data.bytes);
        }
    }
    String::from_utf8(all).unwrap()
}

const STREAM: &str = r#"{"stream":true}"#;

#[test]
fn a_reply_is_cut_at_characters_into_equal_pieces() {
    assert_eq!(pieces("abcdef", 4), ["a", "bc", "d", "ef"]);
    assert_eq!(pieces("añ🌍", 3), ["a", "ñ", "🌍"]);
    assert_eq!(pieces("ab", 20), ["a", "b"]);
    assert_eq!(pieces("", 20), [""]);
    assert_eq!(pieces("abc", 0), ["abc"]);
}

#[test]
fn stalls_and_cuts_stand_where_the_script_says() {
    let kinds = |steps: &[Step]| {
        let kind = |s: &Step| match s {
            Step::Wait(_) => 'w',
            Step::Head(_) => 'h',
            Step::Data(_) => 'd',
            Step::Stall => 's',
            Step::Fail(_) => 'c',
        };
        steps.iter().map(kind).collect::<String>()
    };
    for (toml, streamed, whole) in [
        ("", "hd", "hd"),
        ("first_delay = \"1s\"", "whd", "whd"),
        ("stall = \"before_headers\"", "s", "s"),
        ("stall = \"after_headers\"", "hs", "hs"),
        ("stall = \"after_preamble\"", "hds", "hs"),
        ("stall = { after_chunks = 3 }", "hds", "hds"),
        ("cut = { after_chunks = 0 }", "hdc", "hc"),
        ("cut = { after_chunks = 99 }", "hdc", "hdc"),
        (
            "cut = { after_chunks = 2 }\nstall = { after_chunks = 1 }",
            "hds",
            "hds",
        ),
        (
            "reply = \"abc\"\nchunks = 3\nchunk_delay = \"1s\"",
            "hdwdwd",
            "whd",
        ),
    ] {
        assert_eq!(kinds(&plan(&script(toml), STREAM)), streamed, "{toml}");
        assert_eq!(kinds(&plan(&script(toml), "{}")), whole, "{toml}");
        assert_eq!(kinds(&normalized(&script(toml), 0)), streamed, "{toml}");
    }
}

#[test]
fn exactly_the_chunks_before_a_fault_are_sent() {
    let s = script("reply = \"abcdef\"\nchunks = 6\ncut = { after_chunks = 3 }");
    let said = text(&plan(&s, STREAM));
    assert_eq!(said.matches("\"content\":\"a\"").count(), 1);
    assert!(
        said.contains("\"content\":\"c\"") && !said.contains("\"content\":\"d\""),
        "{said}"
    );
    assert!(!said.contains("[DONE]"));
}

#[test]
fn the_first_attempts_fail_and_the_next_do_not() {
    let s = script("status = 503\nretry_after = \"1500ms\"\nfail_first = 1");
    let Step::Head(head) = &tunnel(Api::Chat, &s, b"{}", &facts(0))[0] else {
        panic!("no head")
    };
    assert_eq!(
        (head.status.as_u16(), &head.headers["retry-after"]),
        (503, &HeaderValue::from(2))
    );
    assert_eq!(head.headers["retry-after-ms"], "1500");
    let Step::Head(head) = &tunnel(Api::Chat, &s, b"{}", &facts(1))[0] else {
        panic!("no head")
    };
    assert_eq!(head.status, 200);
}

#[test]
fn the_length_told_is_the_length_sent() {
    for body in ["{}", "no json"] {
        let steps = plan(&Script::default(), body);
        let Step::Head(head) = &steps[0] else {
            panic!("no head")
        };
        assert_eq!(
            head.headers[headers::CONTENT_LENGTH],
            text(&steps).len().to_string()
        );
    }
}

#[test]
fn a_tool_result_ends_the_calls() {
    let s = Script {
        tool_calls: vec![toml::from_str("name = \"f\"").unwrap()],
        chunk_delay: Period::secs(0),
        ..Script::default()
    };
    assert!(text(&plan(&s, r#"{"messages":[{"role":"user"}]}"#)).contains("\"tool_calls\""));
    assert!(!text(&plan(&s, r#"{"messages":[{"role":"user"},{"role":"tool"}]}"#)).contains("\"tool_calls\""));
    let items = br#"{"input":[{"type":"function_call_output","output":"1"}]}"#;
    let steps: Vec<_> = tunnel(Api::Responses, &s, items, &facts(0)).into();
    assert!(!text(&steps).contains("function_call"));
    let steps: Vec<_> = tunnel(Api::Responses, &s, br#"{"input":"hi"}"#, &facts(0)).into();
    assert!(text(&steps).contains("function_call"));
}

#[test]
fn a_reply_may_hold_what_the_tool_said() {
    let s = script("reply = \"It said {tool_result}.\"\ntool_calls = [{ name = \"f\" }]\nchunks = 1");
    for (said, then) in [
        (
            r#""content":"done: {tool_result}""#,
            "It said done: {tool_result}.",
        ),
        (r#""content":[{"type":"text","text":"parts"}]"#, "It said ."),
    ] {
        let body = format!(r#"{{"messages":[{{"role":"user"}},{{"role":"tool",{said}}}]}}"#);
        assert!(text(&plan(&s, &body)).contains(then), "{body}");
    }
    let items = br#"{"input":[{"type":"function_call_output","output":"7"}]}"#;
    let steps: Vec<_> = tunnel(Api::Responses, &s, items, &facts(0)).into();
    assert!(text(&steps).contains("It said 7."));
    let before = r#"{"messages":[{"role":"tool","content":"7"},{"role":"user"}]}"#;
    assert!(text(&plan(&s, before)).contains("\"tool_calls\""));
}

#[test]
fn a_run_tells_its_text_and_usage_line_by_line_and_no_terminal() {
    let steps = normalized(&script("reply = \"abc\"\nchunks = 3"), 0);
    let Step::Head(head) = &steps[0] else {
        panic!("no head")
    };
    assert_eq!(
        (head.status.as_u16(), &head.headers[CONTENT_TYPE]),
        (200, &HeaderValue::from_static("application/jsonl"))
    );
    assert!(!head.headers.contains_key(headers::CONTENT_LENGTH));
    let events: Vec<RunEvent> = text(&steps)
        .lines()
        .map(|l| RunEvent::parse(l.as_bytes()).unwrap())
        .collect();
    let mut want = vec![RunEvent::new(RuntimeEventKind::Start)];
    want.extend(["a", "b", "c"].map(RunEvent::delta));
    want.push(RunEvent::usage(Usage {
        input: 2,
        output: 3,
        ..Usage::default()
    }));
    assert_eq!(events, want);
}

#[test]
fn what_leaves_together_says_what_its_strongest_part_says() {
    let dispositions = |toml: &str| -> Vec<Disposition> {
        let pieces = normalized(&script(toml), 0);
        let pieces = pieces.iter().filter_map(|s| match s {
            Step::Data(piece) => Some(piece.disposition),
            Step::Wait(_) | Step::Head(_) | Step::Stall | Step::Fail(_) => None,
        });
        pieces.collect()
    };
    assert_eq!(dispositions("stall = \"after_preamble\""), [Disposition::Start]);
    assert_eq!(
        dispositions("stall = { after_chunks = 1 }"),
        [Disposition::Progress]
    );
    // An empty delta is no progress; the usage behind it is.
    assert_eq!(
        dispositions("reply = \"\"\nstall = { after_chunks = 1 }"),
        [Disposition::Start]
    );
    assert_eq!(dispositions("reply = \"\""), [Disposition::Progress]);
    assert_eq!(
        dispositions("reply = \"ab\"\nchunks = 2\nchunk_delay = \"1s\""),
        [Disposition::Progress; 2]
    );
}

#[test]
fn a_run_that_is_refused_is_answered_as_a_tunnel_is_on_its_first_attempts() {
    let s = script("status = 503\nfirst_delay = \"1s\"\nfail_first = 1");
    let steps = normalized(&s, 0);
    let head = steps.iter().find_map(|s| match s {
        Step::Head(head) => Some(head.status.as_u16()),
        Step::Wait(_) | Step::Data(_) | Step::Stall | Step::Fail(_) => None,
    });
    assert_eq!(head, Some(503));
    assert!(normalized(&s, 1).iter().any(|s| matches!(s, Step::Head(_))));
}

#[test]
fn a_conversation_costs_the_same_tokens_whichever_way_it_takes() {
    let s = script("reply = \"abc\"\nchunks = 3");
    let told: Vec<RunEvent> = text(&normalized(&s, 0))
        .lines()
        .map(|l| RunEvent::parse(l.as_bytes()).unwrap())
        .collect();
    let usage = told.iter().find_map(|e| e.usage);
    for (api, body) in [
        (Api::Chat, r#"{"messages":[{"role":"user","content":"hello"}]}"#),
        (Api::Responses, r#"{"input":"hello"}"#),
    ] {
        let steps: Vec<_> = tunnel(api, &s, body.as_bytes(), &facts(0)).into();
        let whole = text(&steps);
        assert_eq!(
            iop_shared::openai::usage::usage_from_body(whole.as_bytes()),
            usage
        );
    }
}
