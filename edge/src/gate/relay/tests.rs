use proptest::prelude::*;

use super::*;

const ROLE: &str = r#"data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;
const TEXT: &str = r#"data: {"choices":[{"delta":{"content":"hi"},"finish_reason":null}]}"#;
const STOP: &str = r#"data: {"choices":[{"delta":{},"finish_reason":"stop"}]}"#;
const USAGE: &str = r#"data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}"#;
const DONE_LINE: &str = "data: [DONE]";

fn chat() -> Relay {
    Relay::new(Dialect::Chat, 1, true, 1 << 18)
}

fn bytes(events: &[&str]) -> Vec<u8> {
    events
        .iter()
        .flat_map(|e| format!("{e}\n\n").into_bytes())
        .collect()
}

fn feed(relay: &mut Relay, input: &[u8]) -> Step {
    relay.feed(&Bytes::copy_from_slice(input))
}

fn out(relay: &mut Relay) -> Vec<u8> {
    std::iter::from_fn(|| relay.next_out()).flatten().collect()
}

#[test]
fn nothing_leaves_before_content_and_everything_held_leaves_with_it() {
    let mut r = chat();
    assert_eq!(feed(&mut r, &bytes(&[": ping", ROLE])), Step::Hold);
    assert_eq!(feed(&mut r, &bytes(&[TEXT])), Step::Forward);
    assert_eq!(out(&mut r), bytes(&[": ping", ROLE, TEXT]));
}

#[test]
fn the_message_ends_at_its_terminator_and_what_follows_is_dropped() {
    let mut r = chat();
    let step = feed(&mut r, &bytes(&[ROLE, TEXT, STOP, DONE_LINE, "data: late"]));
    assert_eq!(step, Step::End(TerminalKind::Done));
    assert_eq!(out(&mut r), bytes(&[ROLE, TEXT, STOP, DONE_LINE]));
    assert_eq!(feed(&mut r, &bytes(&[TEXT])), Step::Hold);
    assert!(out(&mut r).is_empty());
    assert_eq!(r.terminal(), Some(TerminalKind::Done));
}

#[test]
fn a_usage_chunk_nobody_asked_for_is_counted_and_taken_out() {
    for hide in [true, false] {
        let mut r = Relay::new(Dialect::Chat, 1, hide, 1 << 18);
        feed(&mut r, &bytes(&[TEXT, STOP, USAGE, DONE_LINE]));
        let want = if hide {
            bytes(&[TEXT, STOP, DONE_LINE])
        } else {
            bytes(&[TEXT, STOP, USAGE, DONE_LINE])
        };
        assert_eq!(out(&mut r), want);
        assert_eq!(r.usage().map(|u| (u.input, u.output)), Some((3, 4)));
    }
}

#[test]
fn streams_that_are_no_answer_are_refused() {
    for (input, want) in [
        (bytes(&[DONE_LINE]), Refusal::Empty),
        (bytes(&[ROLE, DONE_LINE]), Refusal::Empty),
        (bytes(&["data: <html>"]), Refusal::Malformed),
    ] {
        assert_eq!(feed(&mut chat(), &input), Step::Fail(want));
    }
    let mut r = chat();
    assert!(matches!(
        feed(&mut r, &bytes(&[r#"data: {"error":{"message":"m","code":429}}"#])),
        Step::Fail(Refusal::InBand(_))
    ));
    let mut r = chat();
    assert_eq!(feed(&mut r, &bytes(&[ROLE])), Step::Hold);
    assert_eq!(r.finish(true), Err(Refusal::Empty));
}

#[test]
fn a_missing_terminator_is_supplied_only_after_a_finish() {
    let mut r = chat();
    feed(&mut r, &bytes(&[TEXT, STOP]));
    assert_eq!(r.finish(true), Ok(Closing::Complete));
    assert_eq!(out(&mut r), bytes(&[TEXT, STOP, DONE_LINE]));

    let mut r = chat();
    feed(&mut r, &bytes(&[TEXT]));
    feed(&mut r, b"data: {\"choi");
    assert_eq!(r.finish(true), Ok(Closing::ErrorEvent));
    // Half an event never leaves.
    assert_eq!(out(&mut r), bytes(&[TEXT]));
}

#[test]
fn an_event_too_large_to_withhold_leaves_in_pieces_and_cannot_be_closed() {
    let mut r = chat();
    feed(&mut r, &bytes(&[TEXT]));
    out(&mut r);
    assert_eq!(feed(&mut r, b"data: {\"x\":\""), Step::Forward);
    assert!(out(&mut r).is_empty() && r.between_events());
    let large = vec![b'x'; TAIL_MAX];
    feed(&mut r, &large);
    assert_eq!(out(&mut r).len(), TAIL_MAX + 12);
    assert!(!r.between_events());
    assert_eq!(r.finish(false), Ok(Closing::Abort));
}

#[test]
fn a_preamble_over_the_hold_commits() {
    let mut r = Relay::new(Dialect::Chat, 1, true, 64);
    assert_eq!(feed(&mut r, &bytes(&[ROLE])), Step::Forward);
    assert_eq!(out(&mut r), bytes(&[ROLE]));
}

#[test]
fn a_responses_stream_knows_its_id_and_its_next_number() {
    let event = |kind: &str, n: u64, more: &str| {
        format!("event: {kind}\ndata: {{\"type\":\"{kind}\",\"sequence_number\":{n}{more}}}")
    };
    let mut r = Relay::new(Dialect::Responses, 1, false, 1 << 18);
    let created = event(
        "response.created",
        0,
        r#","response":{"id":"resp_1","model":"m"}"#,
    );
    assert_eq!(feed(&mut r, &bytes(&[&created])), Step::Hold);
    let delta = event("response.output_text.delta", 1, r#","delta":"a""#);
    assert_eq!(feed(&mut r, &bytes(&[&delta, ": comment"])), Step::Forward);
    assert_eq!(
        (r.response_id(), r.model(), r.next_sequence()),
        (Some("resp_1"), Some("m"), 2)
    );
    assert_eq!(r.finish(true), Ok(Closing::ErrorEvent));
    let mut r = Relay::new(Dialect::Responses, 1, false, 1 << 18);
    let completed = event(
        "response.completed",
        0,
        r#","response":{"id":"resp_2","usage":{"input_tokens":1}}"#,
    );
    assert_eq!(
        feed(&mut r, &bytes(&[&completed])),
        Step::End(TerminalKind::Completed)
    );
    assert_eq!(
        (r.response_id(), r.usage().map(|u| u.input)),
        (Some("resp_2"), Some(1))
    );
}

fn event() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec![
        ROLE,
        TEXT,
        TEXT,
        STOP,
        USAGE,
        ": c",
        "event: x\nid: 1",
        r#"data: {"choices":[{"delta":{"content":"漢"}}]}"#,
    ])
}

proptest! {
    /// However the bytes arrive, the same bytes leave: the input without hidden usage, up to the terminator.
    #[test]
    fn what_leaves_does_not_depend_on_how_it_arrives(
        events in prop::collection::vec(event(), 0..12),
        done in any::<bool>(),
        size in 1_usize..40,
    ) {
        let mut events = events;
        events.insert(0, TEXT);
        if done {
            events.push(DONE_LINE);
        }
        let want: Vec<&str> = events.iter().copied().filter(|e| *e != USAGE).collect();
        let mut r = chat();
        let mut got = Vec::new();
        for chunk in bytes(&events).chunks(size) {
            match feed(&mut r, chunk) {
                Step::Hold => {}
                Step::Forward | Step::End(_) => got.extend(out(&mut r)),
                Step::Fail(f) => return Err(TestCaseError::fail(format!("{f:?}"))),
            }
        }
        prop_assert_eq!(got, bytes(&want));
        prop_assert_eq!(r.terminal().is_some(), done);
    }

    #[test]
    fn arbitrary_bytes_neither_panic_nor_leave_before_commit(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..8)) {
        let mut r = chat();
        for chunk in chunks {
            if matches!(feed(&mut r, &chunk), Step::Fail(_)) {
                break;
            }
        }
        let _ = r.finish(true);
    }
}

#[test]
fn a_providers_own_error_after_commit_is_the_end_of_a_chat_stream() {
    let mut r = chat();
    let error = r#"data: {"error":{"message":"m"}}"#;
    assert_eq!(
        feed(&mut r, &bytes(&[TEXT, error, TEXT])),
        Step::End(TerminalKind::Failed)
    );
    assert_eq!(out(&mut r), bytes(&[TEXT, error]));
    assert!(r.failed_in_band());
}

#[test]
fn a_terminator_is_supplied_only_when_every_choice_has_finished() {
    let stop =
        |i: u32| format!(r#"data: {{"choices":[{{"index":{i},"delta":{{}},"finish_reason":"stop"}}]}}"#);
    for (finished, want) in [(1, Closing::ErrorEvent), (2, Closing::Complete)] {
        let mut r = Relay::new(Dialect::Chat, 2, true, 1 << 18);
        feed(&mut r, &bytes(&[TEXT]));
        for i in 0..finished {
            feed(&mut r, &bytes(&[&stop(i)]));
        }
        assert_eq!(r.finish(false), Ok(want));
    }
}

#[test]
fn a_responses_error_event_is_kept_for_the_last_words() {
    let mut r = Relay::new(Dialect::Responses, 1, false, 1 << 18);
    let delta = r#"data: {"type":"response.output_text.delta","sequence_number":0,"delta":"a"}"#;
    let error = r#"data: {"type":"error","sequence_number":1,"code":"rate_limit_exceeded","message":"m"}"#;
    assert_eq!(feed(&mut r, &bytes(&[delta, error])), Step::Forward);
    assert!(r.error().is_some() && r.failed_in_band());
    assert_eq!((r.finish(true), r.next_sequence()), (Ok(Closing::ErrorEvent), 2));
}

#[test]
fn a_preamble_committed_by_its_size_still_tells_the_id() {
    let mut r = Relay::new(Dialect::Responses, 1, false, 64);
    let padding = "x".repeat(100);
    let created = format!(
        r#"data: {{"type":"response.created","sequence_number":0,"response":{{"id":"resp_1","instructions":"{padding}"}}}}"#
    );
    let whole = bytes(&[&created]);
    assert_eq!(feed(&mut r, &whole[..80]), Step::Forward);
    assert_eq!(feed(&mut r, &whole[80..]), Step::Forward);
    assert_eq!((r.response_id(), r.next_sequence()), (Some("resp_1"), 1));
}

/// The number that an event after these events would carry, and whether it can follow.
fn next_after(events: &[&str]) -> u64 {
    let mut r = Relay::new(Dialect::Responses, 1, false, 1 << 18);
    for event in events {
        feed(&mut r, &bytes(&[event]));
    }
    assert_eq!(r.finish(false), Ok(Closing::ErrorEvent));
    r.next_sequence()
}

#[test]
fn what_is_said_last_carries_the_number_after_the_providers_last() {
    let delta = |more: &str| format!(r#"data: {{"type":"response.output_text.delta","delta":"a"{more}}}"#);
    let numbered = |n: u64| delta(&format!(r#","sequence_number":{n}"#));
    let ping = r#"data: {"type":"keepalive"}"#;
    let some = [
        delta(""),
        numbered(0),
        numbered(1),
        numbered(2),
        numbered(5),
        numbered(u64::MAX),
    ];
    let [bare, zero, one, two, five, largest] = some.each_ref().map(String::as_str);
    for (events, next) in [
        (vec![zero, one, two], 3),
        (vec![one, two], 3),
        // What has no number takes none.
        (vec![zero, ping, one, ping], 2),
        (vec![ping, ping, zero], 1),
        (vec![ping, one, bare, bare], 2),
        (vec![zero, ": comment", "event: ping", one], 2),
        // Gaps stay gaps.
        (vec![zero, two, five], 6),
        (vec![two, ping, five, ping, ping], 6),
        // A stream without numbers is counted for.
        (vec![bare], 1),
        (vec![bare, ping, bare], 3),
        // The largest number has none after it.
        (vec![largest], u64::MAX),
    ] {
        assert_eq!(next_after(&events), next, "{events:?}");
    }
}

#[test]
fn a_number_is_found_wherever_it_stands_and_never_in_a_text() {
    let event = |members: &str| format!(r#"data: {{"type":"response.output_text.delta",{members}}}"#);
    let start = event(r#""delta":"a","sequence_number":3"#);
    for (members, next) in [
        (r#""sequence_number":7,"delta":"a""#, 8),
        (r#""delta":"a" , "sequence_number" : 7 "#, 8),
        ("\ndata: \"sequence_number\":\t7,\ndata: \"delta\":\"a\"", 8),
        (r#""delta":"\"sequence_number\":9","sequence_number":7"#, 8),
        (r#""delta":"sequence_number","sequence_number":7"#, 8),
        (
            r#""delta":"a","item":{"sequence_number":"9"},"sequence_number":7"#,
            8,
        ),
        (r#""delta":"\"sequence_number\":9""#, 4),
        (r#""delta":"sequence_number: 9""#, 4),
        (r#""delta":"sequence_number""#, 4),
        (r#""delta":"a","sequence_number":null"#, 4),
        (r#""delta":"a","sequence_number":"9""#, 4),
        (r#""delta":"a","sequence_number":-9"#, 4),
    ] {
        assert_eq!(next_after(&[&start, &event(members)]), next, "{members}");
    }
}
