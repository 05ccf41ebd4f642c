use serde_json::Value;

use super::*;

fn text(bytes: &Bytes) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn an_event_is_lines_that_give_its_bytes_back() {
    let plain = written(Some(7), "run.started", &json!({ "a": 1 }));
    assert_eq!(text(&plain), "id: 7\nevent: run.started\ndata: {\"a\":1}\n\n");
    let raw = RawValue::from_string("{\n\"a\": 1}".to_owned()).unwrap();
    let lines = written(None, "x\nid: 9", &raw);
    assert_eq!(text(&lines), "event: xid: 9\ndata: {\ndata: \"a\": 1}\n\n");
    let error = failed(&Problem::new(Code::RunCorrupt, "broken"));
    let (head, body) = text(&error).split_once("data: ").unwrap();
    assert_eq!(head, "event: error\n");
    let body: Value = serde_json::from_str(body.trim_end()).unwrap();
    assert_eq!(body["error"]["code"], "run_corrupt");
}

#[test]
fn a_stream_is_asked_for_by_its_media_type() {
    let of = |accept: &'static str| {
        wanted(&HeaderMap::from_iter([(
            header::ACCEPT,
            HeaderValue::from_static(accept),
        )]))
    };
    assert!(of("text/event-stream") && of("application/json;q=0.5, Text/Event-Stream;q=0.9"));
    assert!(!of("*/*") && !of("text/*") && !wanted(&HeaderMap::new()));
}

#[test]
fn a_stream_begins_behind_an_event_or_now() {
    let header = |id: &'static str| HeaderMap::from_iter([(LAST_EVENT_ID, HeaderValue::from_static(id))]);
    assert_eq!(From::of(&HeaderMap::new(), None).unwrap(), From::Now);
    assert_eq!(From::of(&HeaderMap::new(), Some(3)).unwrap(), From::After(3));
    assert_eq!(From::of(&header("0"), Some(3)).unwrap(), From::After(0));
    for wrong in ["", "x", "-1", "1.5"] {
        let problem = From::of(&header(wrong), None).unwrap_err();
        assert_eq!(problem.param.as_deref(), Some("Last-Event-ID"), "{wrong}");
    }
}
