use iop_durable::payload::Payload;
use iop_durable::record::Status;
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
fn a_run_ends_with_its_stream_only_where_there_is_one() {
    let (cancel, go_on) = (OnDisconnect::Cancel, OnDisconnect::Continue);
    for (said, streams, is) in [
        (None, false, Ok(go_on)),
        (None, true, Ok(go_on)),
        (Some(go_on), false, Ok(go_on)),
        (Some(cancel), true, Ok(cancel)),
        (Some(cancel), false, Err(())),
    ] {
        assert_eq!(
            on_disconnect(said, streams).map_err(|_| ()),
            is,
            "{said:?} {streams}"
        );
    }
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

fn head(status: Status, event_seq: u64) -> RunHead {
    let run = RunId::new("r").unwrap();
    let mut head = iop_durable::testing::build::head(&run, &Payload::new("{}"), Timestamp::MIN);
    (head.status, head.event_seq) = (status, event_seq);
    head
}

#[test]
fn a_stream_of_a_run_that_is_over_tells_its_end_and_one_that_is_not_goes_on() {
    for status in Status::ALL {
        let head = head(*status, 7);
        let now = if status.is_terminal() { 6 } else { 7 };
        assert_eq!(From::Now.start(&head), (now, false), "{status}");
        for seq in 0..=7 {
            assert_eq!(From::After(seq).start(&head), (seq, false), "{status}");
        }
        assert_eq!(From::After(8).start(&head), (now, true), "{status}");
        assert_eq!(From::After(u64::MAX).start(&head), (now, true), "{status}");
    }
}
