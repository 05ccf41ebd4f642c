use http_body_util::BodyExt;
use iop_shared::execution::FailureCode;
use iop_shared::ids::{AttemptId, NodeId, ProviderId, RunId};
use iop_shared::openai::event::sequence_number;
use iop_shared::openai::event::{Dialect, EventKind, TerminalKind, classify, response_id, scan_committed};
use iop_shared::openai::sse::SseScanner;
use iop_shared::openai::usage::usage_from_body;
use iop_shared::wire::tunnel::TunnelHead;
use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::gate::relay::{Relay, Step};
use crate::gate::source::{Pulled, Source};

const ID: uuid::Uuid = uuid::Uuid::from_u128(7);
const USAGE: Usage = Usage {
    input: 3,
    output: 2,
    cached: 1,
    reasoning: 1,
};

fn renderer(endpoint: Endpoint, stream: bool) -> Renderer {
    Renderer::new(endpoint, stream, true, "t", ID, 9)
}

const FORMS: [(Endpoint, bool); 4] = [
    (Endpoint::Chat, true),
    (Endpoint::Chat, false),
    (Endpoint::Responses, true),
    (Endpoint::Responses, false),
];

fn dialect(endpoint: Endpoint) -> Dialect {
    if endpoint == Endpoint::Responses {
        Dialect::Responses
    } else {
        Dialect::Chat
    }
}

fn kind(kind: RuntimeEventKind) -> RunEvent {
    RunEvent::new(kind)
}

fn complete(usage: Option<Usage>) -> RunEvent {
    RunEvent {
        usage,
        ..kind(RuntimeEventKind::Complete)
    }
}

fn lines(events: &[RunEvent]) -> Vec<u8> {
    events.iter().flat_map(|e| e.to_line().into_bytes()).collect()
}

/// A run that says this and ends well.
fn run(texts: &[&str]) -> Vec<u8> {
    let mut events = vec![kind(RuntimeEventKind::Start)];
    events.extend(texts.iter().map(|t| RunEvent::delta(*t)));
    events.push(RunEvent::usage(USAGE));
    events.push(kind(RuntimeEventKind::Complete));
    lines(&events)
}

/// Name and data of every event of a stream.
fn events(bytes: &[u8]) -> Vec<(Option<Vec<u8>>, String)> {
    let (mut scanner, mut pos, mut all) = (SseScanner::new(), 0, Vec::new());
    while let Some(event) = scanner.next_event(bytes, &mut pos) {
        let data = String::from_utf8(event.data.unwrap().into_owned()).unwrap();
        all.push((event.name.map(|n| n.into_owned()), data));
    }
    assert!(!scanner.finish());
    all
}

/// What a client makes of an answer: text, finish, usage.
#[derive(Debug, PartialEq)]
struct Made {
    text: String,
    finish: String,
    usage: Option<Usage>,
}

fn made(endpoint: Endpoint, stream: bool, bytes: &[u8]) -> Made {
    let text_of = |v: &Value, at: &str| v.pointer(at).and_then(Value::as_str).map(str::to_owned);
    let responses = endpoint == Endpoint::Responses;
    let (delta, whole, finish) = if responses {
        ("/delta", "/output/0/content/0/text", "/status")
    } else {
        (
            "/choices/0/delta/content",
            "/choices/0/message/content",
            "/choices/0/finish_reason",
        )
    };
    if !stream {
        let body: Value = serde_json::from_slice(bytes).unwrap();
        return Made {
            text: text_of(&body, whole).unwrap(),
            finish: text_of(&body, finish).unwrap(),
            usage: usage_from_body(bytes),
        };
    }
    let mut all = Made {
        text: String::new(),
        finish: String::new(),
        usage: None,
    };
    for (name, data) in events(bytes) {
        let facts = scan_committed(dialect(endpoint), name.as_deref(), data.as_bytes());
        all.usage = facts.usage.or(all.usage);
        let Ok(event) = data.parse::<Value>() else {
            continue;
        };
        all.text += &text_of(&event, delta).unwrap_or_default();
        let finished = if responses {
            event.get("response").and_then(|r| text_of(r, finish))
        } else {
            text_of(&event, finish)
        };
        all.finish = finished.unwrap_or(all.finish);
    }
    all
}

#[test]
fn a_chat_stream_is_a_native_one_and_each_delta_leaves_at_once() {
    let mut r = renderer(Endpoint::Chat, true);
    assert_eq!(r.head().status, 200);
    assert_eq!(
        r.head().headers[header::CONTENT_TYPE],
        "text/event-stream; charset=utf-8"
    );
    let kinds = |bytes: &[u8]| -> Vec<EventKind> {
        let all = events(bytes);
        all.iter()
            .map(|(n, d)| classify(Dialect::Chat, n.as_deref(), d.as_bytes()))
            .collect()
    };
    let mut feed = |event: RunEvent| kinds(&r.feed(event.to_line().as_bytes()));
    assert_eq!(feed(kind(RuntimeEventKind::Start)), [EventKind::Preamble]);
    assert_eq!(feed(RunEvent::delta("he")), [EventKind::Content]);
    assert_eq!(feed(RunEvent::delta("llo")), [EventKind::Content]);
    assert_eq!(feed(RunEvent::usage(USAGE)), []);
    assert_eq!(
        feed(complete(None)),
        [
            EventKind::Finish,
            EventKind::UsageOnly,
            EventKind::Terminal(TerminalKind::Done)
        ]
    );
    assert_eq!(feed(RunEvent::delta("late")), []);
    assert!(r.failure().is_none());
}

#[test]
fn a_chat_stream_tells_usage_only_where_it_was_asked_for() {
    let mut r = Renderer::new(Endpoint::Chat, true, false, "t", ID, 9);
    let out = r.feed(&run(&["a"]));
    assert_eq!(made(Endpoint::Chat, true, &out).usage, None);
    assert!(!String::from_utf8(out.to_vec()).unwrap().contains("usage"));
}

#[test]
fn a_responses_stream_is_numbered_has_one_id_and_each_delta_leaves_at_once() {
    let mut r = renderer(Endpoint::Responses, true);
    let mut all = r.feed(&lines(&[kind(RuntimeEventKind::Start)])).to_vec();
    let first = events(&all);
    assert_eq!(first.len(), 2);
    let mut seen = Vec::new();
    for text in ["he", "llo"] {
        let out = r.feed(&lines(&[RunEvent::delta(text)]));
        let kinds: Vec<EventKind> = events(&out)
            .iter()
            .map(|(n, d)| classify(Dialect::Responses, n.as_deref(), d.as_bytes()))
            .collect();
        assert_eq!(kinds.last(), Some(&EventKind::Content));
        seen.push(kinds.len());
        all.extend_from_slice(&out);
    }
    // The item and its part are added before the first.
    assert_eq!(seen, [3, 1]);
    all.extend_from_slice(&r.feed(&lines(&[complete(Some(USAGE))])));
    let read = events(&all);
    let names: Vec<_> = read
        .iter()
        .map(|(n, _)| std::str::from_utf8(n.as_deref().unwrap()).unwrap())
        .collect();
    assert_eq!(names[..2], ["response.created", "response.in_progress"]);
    assert_eq!(names.last(), Some(&"response.completed"));
    let id = format!("resp_{}", ID.simple());
    for (n, (_, data)) in read.iter().enumerate() {
        assert_eq!(sequence_number(data.as_bytes()), Some(n as u64));
        if data.contains("\"response\":{") {
            assert_eq!(response_id(data.as_bytes()).id.as_deref(), Some(id.as_str()));
        }
    }
    assert_eq!(
        made(Endpoint::Responses, true, &all),
        Made {
            text: "hello".into(),
            finish: "completed".into(),
            usage: Some(USAGE)
        }
    );
}

#[test]
fn a_whole_answer_leaves_at_its_end_as_one_body() {
    for (endpoint, finish) in [(Endpoint::Chat, "stop"), (Endpoint::Responses, "completed")] {
        let mut r = renderer(endpoint, false);
        assert_eq!(r.head().headers[header::CONTENT_TYPE], "application/json");
        let all = run(&["he", "llo"]);
        let end = all.len() - 1;
        assert!(r.feed(&all[..end]).is_empty());
        let body = r.feed(&all[end..]);
        assert_eq!(
            made(endpoint, false, &body),
            Made {
                text: "hello".into(),
                finish: finish.into(),
                usage: Some(USAGE)
            }
        );
    }
}

#[test]
fn the_gate_reads_a_rendered_stream_to_its_end() {
    for (endpoint, want) in [
        (Endpoint::Chat, TerminalKind::Done),
        (Endpoint::Responses, TerminalKind::Completed),
    ] {
        let mut r = renderer(endpoint, true);
        let mut relay = Relay::new(dialect(endpoint), 1, false, 1 << 18);
        let begun = r.feed(&lines(&[kind(RuntimeEventKind::Start)]));
        assert_eq!(relay.feed(&begun), Step::Hold);
        let said = r.feed(&lines(&[RunEvent::delta("a")]));
        assert_eq!(relay.feed(&said), Step::Forward);
        let ended = r.feed(&lines(&[complete(Some(USAGE))]));
        assert_eq!(relay.feed(&ended), Step::End(want));
        assert_eq!(relay.usage(), Some(USAGE));
        let left: Vec<u8> = std::iter::from_fn(|| relay.next_out()).flatten().collect();
        assert_eq!(left, [begun, said, ended].concat());
    }
}

#[test]
fn a_run_without_a_start_or_without_text_is_an_answer_all_the_same() {
    for (endpoint, stream) in FORMS {
        for (said, texts) in [("", vec![]), ("", vec![""]), ("a", vec!["a"])] {
            let mut events: Vec<RunEvent> = texts.iter().map(|t| RunEvent::delta(*t)).collect();
            events.push(complete(Some(USAGE)));
            let out = renderer(endpoint, stream).feed(&lines(&events));
            let made = made(endpoint, stream, &out);
            assert_eq!((made.text.as_str(), made.usage), (said, Some(USAGE)));
        }
    }
}

#[test]
fn a_message_is_said_as_deltas_are() {
    for (endpoint, stream) in FORMS {
        let message = RunEvent {
            message: "ello".into(),
            ..kind(RuntimeEventKind::Message)
        };
        let events = [RunEvent::delta("h"), message, complete(None)];
        let out = renderer(endpoint, stream).feed(&lines(&events));
        assert_eq!(made(endpoint, stream, &out).text, "hello");
    }
}

#[test]
fn a_run_that_failed_gets_no_end() {
    let failed = RunEvent::terminal(&iop_shared::wire::terminal::Terminal::error(
        FailureCode::ProviderCut,
        "cut",
    ));
    for (endpoint, stream) in FORMS {
        for end in [failed.clone(), kind(RuntimeEventKind::Cancelled)] {
            let mut r = renderer(endpoint, stream);
            let begun = r.feed(&lines(&[kind(RuntimeEventKind::Start), RunEvent::delta("a")]));
            assert_eq!(begun.is_empty(), !stream);
            let rest = r.feed(&lines(&[end, RunEvent::delta("late"), complete(None)]));
            assert!(rest.is_empty() && r.failure().is_none());
        }
    }
}

#[test]
fn strangers_are_skipped_and_malformed_lines_fail_what_was_said_before_stands() {
    for (endpoint, stream) in FORMS {
        let mut r = renderer(endpoint, stream);
        let odd =
            b"{\"type\":\"thought\",\"delta\":\"x\"}\n\n{\"type\":\"delta\",\"delta\":\"a\",\"more\":1}\r\n";
        let mut all = r.feed(odd).to_vec();
        all.extend_from_slice(&r.feed(&lines(&[complete(None)])));
        assert_eq!(made(endpoint, stream, &all).text, "a");
        assert!(r.failure().is_none());

        for bad in ["{", "null", "<html>", "{\"delta\":\"x\"}", "\u{0}"] {
            let mut r = renderer(endpoint, stream);
            let mut said = run(&["a"]);
            said.truncate(said.len() - lines(&[complete(None)]).len());
            let want = renderer(endpoint, stream).feed(&said);
            said.extend_from_slice(bad.as_bytes());
            said.extend_from_slice(b"\n");
            said.extend_from_slice(&lines(&[RunEvent::delta("late"), complete(None)]));
            assert_eq!(r.feed(&said), want, "{bad}");
            assert_eq!(r.failure().unwrap().code, FailureCode::ProviderCut, "{bad}");
            assert!(r.feed(&run(&["late"])).is_empty());
        }
    }
}

#[test]
fn what_has_to_be_kept_is_bounded() {
    let mut r = renderer(Endpoint::Chat, true);
    assert!(r.feed(&vec![b'x'; (1 << 20) + 1]).is_empty());
    assert!(r.failure().is_some());
    let piece = lines(&[RunEvent::delta("x".repeat(1 << 19))]);
    for (endpoint, stream) in FORMS {
        let mut r = renderer(endpoint, stream);
        for _ in 0..TEXT_MAX >> 19 {
            r.feed(&piece);
        }
        assert!(r.failure().is_none());
        r.feed(&piece);
        // A chat stream keeps nothing of what it has sent.
        let keeps_nothing = (endpoint, stream) == (Endpoint::Chat, true);
        assert_eq!(r.failure().is_none(), keeps_nothing, "{endpoint} {stream}");
        assert_eq!(r.text.is_empty(), keeps_nothing);
    }
}

fn event() -> impl Strategy<Value = Vec<u8>> {
    let text = prop_oneof![".{0,8}", "\\PC{0,6}", "[\\r\\n\"\\\\{}]{1,4}"];
    prop_oneof![
        Just(lines(&[kind(RuntimeEventKind::Start)])),
        text.clone().prop_map(|t| lines(&[RunEvent::delta(t)])),
        text.prop_map(|t| lines(&[RunEvent {
            message: t,
            ..kind(RuntimeEventKind::Message)
        }])),
        (0_u64..9).prop_map(|input| lines(&[RunEvent::usage(Usage { input, ..USAGE })])),
        Just(b"{\"type\":\"thought\"}\n".to_vec()),
        Just(b"\r\n".to_vec()),
    ]
}

/// How a run ends: well, badly, not at all, in rubbish.
fn end() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        4 => Just(lines(&[complete(Some(USAGE)), RunEvent::delta("late")])),
        1 => Just(lines(&[kind(RuntimeEventKind::Error), RunEvent::delta("late")])),
        1 => Just(Vec::new()),
        1 => Just(b"rubbish\n{\"type\":\"complete\"}\n".to_vec()),
    ]
}

proptest! {
    #[test]
    fn any_split_gives_the_same_bytes(
        events in prop::collection::vec(event(), 0..8),
        end in end(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        form in prop::sample::select(FORMS.to_vec()),
    ) {
        let all = [events.concat(), end].concat();
        let mut at_once = renderer(form.0, form.1);
        let want = at_once.feed(&all);
        let mut at: Vec<usize> = cuts.iter().map(|c| c.index(all.len() + 1)).collect();
        at.extend([0, all.len()]);
        at.sort_unstable();
        let mut r = renderer(form.0, form.1);
        let got: Vec<u8> = at.windows(2).flat_map(|w| r.feed(&all[w[0]..w[1]])).collect();
        prop_assert_eq!(&got, &want);
        prop_assert_eq!(r.failure(), at_once.failure());
        let mut r = renderer(form.0, form.1);
        let single: Vec<u8> = all.iter().flat_map(|b| r.feed(std::slice::from_ref(b))).collect();
        prop_assert_eq!(&single, &want);
    }

    #[test]
    fn arbitrary_bytes_never_panic_and_make_no_answer(
        data in prop::collection::vec(any::<u8>(), 0..80),
        form in prop::sample::select(FORMS.to_vec()),
    ) {
        prop_assert!(renderer(form.0, form.1).feed(&data).is_empty());
    }

    #[test]
    fn what_was_said_is_what_is_read(
        texts in prop::collection::vec("\\PC{0,8}|[\\r\\n\"\\\\]{0,3}", 0..8),
        form in prop::sample::select(FORMS.to_vec()),
    ) {
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let out = renderer(form.0, form.1).feed(&run(&texts));
        let made = made(form.0, form.1, &out);
        prop_assert_eq!(made.text, texts.concat());
        prop_assert_eq!(made.usage, Some(USAGE));
    }
}

/// The embedded node with the same script on both paths.
fn node(script: &str) -> iop_node::Node {
    #[derive(serde::Deserialize)]
    struct File {
        providers: Vec<iop_shared::config::ProviderConfig>,
    }
    struct Nobody;
    impl iop_node::config::Resolver for Nobody {
        fn env(&self, _: &str) -> Option<String> {
            None
        }
        fn file(&self, _: &std::path::Path) -> std::io::Result<String> {
            Err(std::io::ErrorKind::NotFound.into())
        }
    }
    let toml = format!(
        "[[providers]]\nid = \"s\"\nadapter = \"scripted\"\n\
         script = {{ t = {{ {script} }}, n = {{ {script}, normalized = true }} }}\n"
    );
    let (file, source) = iop_shared::config::Source::parse::<File>("t.toml", &toml).unwrap();
    let all = iop_node::ProviderSettings::resolve_all(file.providers, &source, &Nobody).unwrap();
    iop_node::Node::new(NodeId::new("n1").unwrap(), &all, &prometheus::Registry::new()).unwrap()
}

#[tokio::test]
async fn a_script_is_the_same_answer_by_a_tunnel_and_by_a_run() {
    for script in [
        "reply = \"héllo wörld\", chunks = 5",
        "reply = \"\"",
        "chunks = 1",
    ] {
        let node = node(script);
        for (endpoint, stream) in FORMS {
            let body = if endpoint == Endpoint::Responses {
                format!(
                    r#"{{"model":"m","stream":{stream},"instructions":"be kind","input":[{{"role":"user",
                        "content":[{{"type":"input_text","text":"hi"}}]}}]}}"#
                )
            } else {
                format!(
                    r#"{{"model":"m","stream":{stream},"stream_options":{{"include_usage":true}},
                        "messages":[{{"role":"system","content":"be kind"}},{{"role":"user","content":"hi"}}]}}"#
                )
            };
            let (run_id, attempt_id) = (RunId(ID), AttemptId(ID));
            let provider = ProviderId::new("s").unwrap();
            let request =
                run_request(endpoint, body.as_bytes(), run_id, attempt_id, &provider, "n", 0).unwrap();
            let lines = node
                .run(request)
                .await
                .into_body()
                .collect()
                .await
                .unwrap()
                .to_bytes();
            let mut r = renderer(endpoint, stream);
            let rendered = r.feed(&lines);
            let head = TunnelHead {
                endpoint,
                run_id,
                attempt_id,
                provider,
                target: "t".into(),
                response_stall_timeout_ms: 0,
                method: http::Method::POST,
                path: None,
                accept_encoding: None,
            };
            let sent = iop_shared::openai::request::SplicedBody::whole(Bytes::from(body));
            let answer = node.tunnel(head, HeaderMap::new(), sent).await;
            assert_eq!(answer.status(), r.head().status);
            assert_eq!(
                answer.headers()[header::CONTENT_TYPE],
                r.head().headers[header::CONTENT_TYPE]
            );
            let native = answer.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(
                made(endpoint, stream, &rendered),
                made(endpoint, stream, &native),
                "{script} {endpoint} {stream}"
            );
            if stream {
                // Event for event the same, but for ids and times.
                let shape = |bytes: &[u8]| -> Vec<(Option<Vec<u8>>, EventKind)> {
                    let all = events(bytes);
                    all.into_iter()
                        .map(|(n, d)| {
                            let kind = classify(dialect(endpoint), n.as_deref(), d.as_bytes());
                            (n, kind)
                        })
                        .collect()
                };
                // An empty piece is a chunk of a tunnel and no delta of a run.
                if !script.contains("\"\"") {
                    assert_eq!(shape(&rendered), shape(&native), "{script} {endpoint}");
                }
            }
        }
    }
}

/// A node's answer over one connection, written by hand; it never ends.
async fn unfinished(lines: &[u8]) -> (crate::link::NodeBody, tokio::io::DuplexStream) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (near, mut far) = tokio::io::duplex(1 << 16);
    let io = hyper_util::rt::TokioIo::new(near);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
    crate::tasks::spawn(crate::tasks::Kind::Session, "test_node", async move {
        // It ends with the test.
        let _ = connection.await;
    });
    let ask = http::Request::new(iop_shared::openai::request::SplicedBody::default());
    let head = format!(
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n",
        lines.len()
    );
    let answering = async {
        // A request without a body is there whole or not at all.
        assert!(far.read(&mut [0; 4096]).await.unwrap() > 0);
        far.write_all(&[head.as_bytes(), lines, b"\r\n"].concat())
            .await
            .unwrap();
    };
    let (response, ()) = tokio::join!(sender.send_request(ask), answering);
    (crate::link::NodeBody::from(response.unwrap().into_body()), far)
}

#[tokio::test]
async fn a_run_that_cannot_be_read_fails_at_once_though_its_node_goes_on() {
    let said = lines(&[kind(RuntimeEventKind::Start), RunEvent::delta("a")]);
    let (body, _far) = unfinished(&[&said[..], b"rubbish\n"].concat()).await;
    let mut source = Source::rendered(body, renderer(Endpoint::Chat, true));
    let Pulled::Data(data) = source.pull().await else {
        panic!("no data")
    };
    assert_eq!(data, renderer(Endpoint::Chat, true).feed(&said));
    let failed = tokio::time::timeout(std::time::Duration::from_secs(20), source.pull()).await;
    let Ok(Pulled::Failed(error)) = failed else {
        panic!("{failed:?}")
    };
    assert_eq!(error.code, FailureCode::ProviderCut);
    assert!(matches!(source.pull().await, Pulled::Complete));
}
