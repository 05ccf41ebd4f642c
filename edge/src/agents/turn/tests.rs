//! Turns through the whole gate, with scripted providers in this process and paused time.

mod native;

use std::sync::Mutex;
use std::time::Duration;

use http::Request;
use http_body_util::Full;
use iop_durable::failure::{Failure, FailureKind};
use iop_node::Node;
use iop_shared::execution::{AttemptResult, Outcome};
use iop_shared::ids::NodeId;

use super::*;
use crate::config::settings_of;
use crate::drain::Drain;
use crate::http::auth::Keys;
use crate::http::openai;
use crate::link::Links;
use crate::metrics::{EndpointLabel, Metrics};
use crate::pool::Pool;

const SECOND: Duration = Duration::from_secs(1);

/// An edge with its embedded node.
struct Edge {
    app: Arc<App>,
    node: Node,
    _links: Arc<Links>,
}

/// Each provider: its name, keys of its own, and its script; the first is preferred.
fn edge(more: &str, providers: &[(&str, &str, &str)]) -> Edge {
    let scripted = providers.iter().map(|(id, keys, script)| {
        let toml = format!("adapter = \"scripted\"\n{keys}\nscript = {{ t = {{ {script} }} }}");
        (*id, toml)
    });
    edge_with(more, &scripted.collect::<Vec<_>>())
}

/// Each provider: its name, and the rest of its table; the first is preferred.
fn edge_with(more: &str, providers: &[(&str, String)]) -> Edge {
    let mut toml = String::from(more);
    let mut candidates = Vec::new();
    for (n, (id, table)) in providers.iter().enumerate() {
        toml += &format!("\n[[providers]]\nid = {id:?}\n{table}\n");
        candidates.push(format!("{{ provider = {id:?}, target = \"t\", priority = {n} }}"));
    }
    toml += &format!(
        "[[models]]\nname = \"m\"\ncandidates = [{}]\n",
        candidates.join(", ")
    );
    let mut settings = settings_of(&toml);
    let metrics = Arc::new(Metrics::new().unwrap());
    let pool = Pool::new(
        std::mem::take(&mut settings.models),
        settings.queue,
        settings.ejection,
        Arc::clone(&metrics),
    );
    let links = Arc::new(Links::new(Arc::clone(&pool)));
    let providers = std::mem::take(&mut settings.providers);
    let node = Node::new(NodeId::embedded(), &providers, metrics.registry()).unwrap();
    node.start();
    links.embed(node.clone());
    let keys = Keys::new(std::mem::take(&mut settings.keys));
    let app = App::new(settings, metrics, pool, keys, Drain::default());
    Edge {
        app,
        node,
        _links: links,
    }
}

fn body() -> Bytes {
    Bytes::from_static(
        br#"{"model":"m","messages":[{"role":"user","content":"a secret prompt"}],"stream":true,"stream_options":{"include_usage":true}}"#,
    )
}

/// One turn, and what was shown of it.
struct Seen {
    answer: Result<TurnAnswer, CallError>,
    deltas: Vec<Delta>,
}

impl Edge {
    async fn turn(&self) -> Seen {
        self.turn_of(None, "m").await
    }

    async fn turn_of(&self, owner: Option<&str>, model: &str) -> Seen {
        let deltas = Mutex::new(Vec::new());
        let request = TurnRequest {
            run: "run_1",
            model,
            body: body(),
            owner,
            traceparent: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        };
        let answer = turn(&self.app, request, &|delta| deltas.lock().unwrap().push(delta)).await;
        Seen {
            answer,
            deltas: deltas.into_inner().unwrap(),
        }
    }

    /// The same request of a client; its status and its attempts.
    async fn client(&self) -> (u16, u32) {
        let request = Request::post("/v1/chat/completions")
            .header("content-type", "application/json")
            .body(Full::new(body()))
            .unwrap();
        let id = RequestId::generate();
        let response = openai::handle(Arc::clone(&self.app), Endpoint::Chat, id, request).await;
        let (status, attempts) = (response.status().as_u16(), attempts(response.headers()));
        let _ = response.into_body().collect().await;
        (status, attempts)
    }

    fn requests(&self, outcome: Outcome) -> u64 {
        self.app.metrics.requests.at((EndpointLabel::Chat, outcome)).get()
    }

    fn attempts(&self, result: AttemptResult) -> u64 {
        self.app.metrics.attempts.at((result,)).get()
    }

    /// Nothing of any request is left.
    fn assert_idle(&self) {
        let metrics = &self.app.metrics;
        assert_eq!(metrics.in_flight.at((EndpointLabel::Chat,)).get(), 0);
        assert_eq!(metrics.queue_depth.get(), 0);
        assert_eq!(metrics.body_memory_bytes.get(), 0);
        assert_eq!(self.node.in_flight(), 0);
        for provider in self.app.pool.providers() {
            assert_eq!((provider.in_flight, provider.queued), (0, 0), "{}", provider.id);
        }
    }
}

impl Seen {
    fn answer(&self) -> &TurnAnswer {
        self.answer.as_ref().unwrap()
    }

    fn failure(&self) -> (&Failure, Option<Duration>) {
        match self.answer.as_ref().unwrap_err() {
            CallError::Failed { failure, retry_after } => {
                assert!(!failure.message.contains("secret prompt"), "{failure}");
                (failure, *retry_after)
            }
            CallError::Unknown => panic!("a turn has no effect that could be unknown"),
        }
    }

    /// Kind, code, and whether the run may ask again.
    fn said(&self) -> (FailureKind, &str, bool) {
        let (failure, _) = self.failure();
        (failure.kind, &failure.code, failure.retryable)
    }
}

#[tokio::test(start_paused = true)]
async fn a_text_is_read_whole_and_shown_in_pieces() {
    let edge = edge(
        "",
        &[(
            "a",
            "",
            "reply = \"one two three\", chunks = 4, chunk_delay = \"1s\"",
        )],
    );
    let seen = edge.turn().await;
    let answer = seen.answer();
    assert_eq!(answer.content.as_deref(), Some("one two three"));
    assert_eq!(answer.finish_reason.as_deref(), Some("stop"));
    assert_eq!((answer.attempts, answer.model.as_deref()), (1, Some("t")));
    assert_eq!(answer.usage.unwrap().output, 4);
    assert_eq!(seen.deltas.len(), 4);
    let shown: String = seen
        .deltas
        .iter()
        .map(|d| match d {
            Delta::Text(text) => text.as_str(),
            Delta::Refusal(_) | Delta::Reasoning(_) | Delta::Call { .. } => "?",
        })
        .collect();
    assert_eq!(shown, "one two three");
    assert_eq!(edge.requests(Outcome::Success), 1);
    edge.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn tool_calls_are_as_the_model_wrote_them() {
    let script = "tool_calls = [{ name = \"f\", arguments = '{\"n\": 1.50}' }, { name = \"g\" }]";
    let edge = edge("", &[("a", "", script)]);
    let seen = edge.turn().await;
    let calls = &seen.answer().tool_calls;
    let read: Vec<_> = calls
        .iter()
        .map(|c| (c.name.as_str(), c.arguments.as_str()))
        .collect();
    assert_eq!(read, [("f", "{\"n\": 1.50}"), ("g", "{}")]);
    assert!(calls[0].id.starts_with("call_") && calls[0].id != calls[1].id);
    assert_eq!(seen.answer().finish_reason.as_deref(), Some("tool_calls"));
    assert_eq!(seen.answer().content, None);
    let begun = seen
        .deltas
        .iter()
        .filter(|d| matches!(d, Delta::Call { name: Some(_), .. }));
    assert_eq!(begun.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn what_a_provider_answers_is_the_runs_to_retry() {
    for (status, kind, retryable) in [
        (400, FailureKind::InvalidInput, false),
        (403, FailureKind::Auth, false),
        (404, FailureKind::Configuration, false),
        (408, FailureKind::Timeout, true),
        (409, FailureKind::InvalidInput, false),
        (422, FailureKind::InvalidInput, false),
        (425, FailureKind::Unavailable, true),
        (429, FailureKind::RateLimited, true),
        (500, FailureKind::ProviderError, true),
        (501, FailureKind::ProviderError, false),
        (502, FailureKind::ProviderError, true),
        (503, FailureKind::Unavailable, true),
        (504, FailureKind::Timeout, true),
    ] {
        let script = format!("status = {status}");
        let edge = edge("", &[("a", "", script.as_str()), ("b", "", "")]);
        let seen = edge.turn().await;
        let (failure, retry_after) = seen.failure();
        assert_eq!(
            (failure.kind, failure.code.as_str(), failure.retryable),
            (kind, format!("http_{status}").as_str(), retryable),
            "{status}"
        );
        assert_eq!(
            (failure.message.as_str(), retry_after),
            ("this answer is scripted", None)
        );
        assert_eq!(
            edge.attempts(AttemptResult::Success),
            0,
            "{status}: nobody else was asked"
        );
        edge.assert_idle();
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_is_given_another_provider_where_a_run_is_told() {
    let script = "status = 429, retry_after = \"1500ms\"";
    let told = edge("", &[("a", "", script), ("b", "", "")]);
    let seen = told.turn().await;
    assert_eq!(seen.failure().1, Some(Duration::from_millis(1500)));
    let given = edge("", &[("a", "", script), ("b", "", "")]);
    assert_eq!(given.client().await, (200, 2));
}

#[tokio::test(start_paused = true)]
async fn a_refused_credential_is_said_in_the_gates_own_words() {
    let edge = edge("", &[("a", "", "status = 401"), ("b", "", "")]);
    let seen = edge.turn().await;
    assert_eq!(seen.said(), (FailureKind::Auth, "provider_error", false));
    assert_eq!(
        seen.failure().0.message,
        "The provider refused the gateway's credential."
    );
}

#[tokio::test(start_paused = true)]
async fn an_opened_keep_alive_never_hides_what_a_run_has_to_know() {
    let gate = "[gate]\nkeepalive_open_after = \"0s\"\nkeepalive_interval = \"1s\"\n";
    let script = "status = 429, retry_after = \"7s\", first_delay = \"5s\"";
    let edge = edge(gate, &[("a", "", script)]);
    let seen = edge.turn().await;
    assert_eq!(seen.said(), (FailureKind::RateLimited, "http_429", true));
    assert_eq!(seen.failure().1, Some(7 * SECOND));
}

const STALLS: &str = "response_stall_timeout = \"2s\"";

#[tokio::test(start_paused = true)]
async fn a_provider_that_gave_no_answer_is_replaced_by_another() {
    let first = "first_content_timeout = \"2s\"";
    for (keys, script, result) in [
        (
            STALLS,
            "stall = \"before_headers\"",
            AttemptResult::ResponseStalled,
        ),
        (
            STALLS,
            "stall = \"after_preamble\"",
            AttemptResult::ResponseStalled,
        ),
        (first, "first_delay = \"9s\"", AttemptResult::FirstContentTimeout),
        ("", "cut = { after_chunks = 0 }", AttemptResult::Cut),
    ] {
        let edge = edge("", &[("a", keys, script), ("b", "", "reply = \"from b\"")]);
        let seen = edge.turn().await;
        assert_eq!(seen.answer().content.as_deref(), Some("from b"), "{script}");
        assert_eq!(
            (seen.answer().attempts, edge.attempts(result)),
            (2, 1),
            "{script}"
        );
        tokio::time::sleep(60 * SECOND).await;
        edge.assert_idle();
    }
}

#[tokio::test(start_paused = true)]
async fn without_another_provider_the_run_is_told_once() {
    let first = "first_content_timeout = \"2s\"";
    for (keys, script, kind, code) in [
        (
            STALLS,
            "stall = \"after_headers\"",
            FailureKind::Timeout,
            "response_stalled",
        ),
        (
            first,
            "first_delay = \"9s\"",
            FailureKind::Timeout,
            "first_content_timeout",
        ),
        (
            "",
            "cut = { after_chunks = 0 }",
            FailureKind::Unavailable,
            "provider_disconnected",
        ),
    ] {
        let told = edge("", &[("a", keys, script)]);
        let seen = told.turn().await;
        assert_eq!(seen.said(), (kind, code, true), "{script}");
        let dispatched: u64 = AttemptResult::ALL.iter().map(|r| told.attempts(*r)).sum();
        assert_eq!(dispatched, 1, "{script}");
        tokio::time::sleep(60 * SECOND).await;
        told.assert_idle();
    }
    // A client's stall is followed by another attempt at a provider that is proven available.
    let client = edge("", &[("a", STALLS, "stall = \"after_headers\", fail_first = 1")]);
    assert_eq!(client.client().await, (200, 2));
}

#[tokio::test(start_paused = true)]
async fn a_stall_whose_provider_may_still_be_at_work_is_replayed_by_nobody() {
    let script = "stall = \"after_headers\", ignores_cancel = true";
    let edge = edge("", &[("a", STALLS, script), ("b", "", "")]);
    let seen = edge.turn().await;
    assert_eq!(seen.said(), (FailureKind::Timeout, "response_stalled", false));
    assert_eq!(edge.attempts(AttemptResult::Success), 0);
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_breaks_off_leaves_no_text_and_is_not_replayed_by_the_gate() {
    for (keys, script, want) in [
        (
            "",
            "cut = { after_chunks = 2 }",
            (FailureKind::Unavailable, "provider_disconnected", true),
        ),
        (
            STALLS,
            "stall = { after_chunks = 2 }",
            (FailureKind::Timeout, "response_stalled", false),
        ),
    ] {
        let edge = edge("", &[("a", keys, script), ("b", "", "")]);
        let seen = edge.turn().await;
        assert_eq!(seen.said(), want, "{script}");
        assert!(!seen.deltas.is_empty(), "{script}: something was shown");
        assert_eq!(edge.attempts(AttemptResult::Success), 0, "{script}");
        tokio::time::sleep(60 * SECOND).await;
        edge.assert_idle();
    }
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_is_dropped_frees_its_provider_within_a_second() {
    let scripts = [
        "first_delay = \"60s\"",
        "chunks = 20, chunk_delay = \"5s\"",
        "stall = \"after_headers\"",
    ];
    for script in scripts {
        let edge = edge("", &[("a", "", script)]);
        let left = tokio::time::timeout(8 * SECOND, edge.turn()).await;
        assert!(left.is_err(), "{script}: it ended by itself");
        tokio::time::sleep(SECOND).await;
        edge.assert_idle();
        assert_eq!(edge.requests(Outcome::ClientCancelled), 1, "{script}");
        assert_eq!(edge.attempts(AttemptResult::Cancelled), 1, "{script}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_is_no_answer_and_may_pass() {
    let queue = "[queue]\nmax_wait = \"3s\"\n";
    let edge = edge(queue, &[("a", "capacity = 1", "first_delay = \"60s\"")]);
    let (holding, seen) = tokio::join!(tokio::time::timeout(20 * SECOND, edge.turn()), async {
        tokio::time::sleep(SECOND).await;
        edge.turn().await
    });
    assert!(holding.is_err());
    assert_eq!(
        seen.said(),
        (FailureKind::Unavailable, "capacity_exhausted", true)
    );
    assert_eq!(seen.failure().1, Some(SECOND));
    assert_eq!(edge.requests(Outcome::Rejected), 1);
}

const KEYS: &str = "[auth]\nkeys = [{ name = \"ci\", secret = { env = \"IOP_KEY_CI\" }, roles = [\"inference\"], \
                    models = [\"m\"], concurrency = 1 }]\n";

#[tokio::test(start_paused = true)]
async fn an_owners_models_are_looked_at_again_at_each_turn() {
    let keys = KEYS.replace("models = [\"m\"]", "models = [\"other\"]");
    let edge = edge(&keys, &[("a", "", "")]);
    let seen = edge.turn_of(Some("ci"), "m").await;
    assert_eq!(seen.said(), (FailureKind::Auth, "permission_denied", false));
    assert_eq!(edge.requests(Outcome::ClientError), 1);
    // Its key is gone.
    let seen = edge.turn_of(Some("gone"), "m").await;
    assert_eq!(seen.said(), (FailureKind::Auth, "permission_denied", false));
    // There never was one.
    assert!(edge.turn_of(None, "m").await.answer.is_ok());
    let seen = edge.turn_of(None, "nobody-serves-this").await;
    assert_eq!(
        seen.said(),
        (FailureKind::Configuration, "model_not_found", false)
    );
    edge.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn turns_of_one_key_stand_in_line_for_its_places() {
    let edge = edge(KEYS, &[("a", "capacity = 9", "first_delay = \"4s\"")]);
    let began = Instant::now();
    let turn = || edge.turn_of(Some("ci"), "m");
    let (a, b, c) = tokio::join!(turn(), turn(), turn());
    assert!([a, b, c].iter().all(|seen| seen.answer.is_ok()));
    assert_eq!(began.elapsed().as_secs(), 12, "one after the other");
    edge.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn a_drain_does_not_refuse_the_turns_of_runs_that_go_on() {
    let edge = edge("", &[("a", "", "")]);
    edge.app.drain.start();
    assert_eq!(edge.client().await.0, 503);
    assert!(edge.turn().await.answer.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_provider_of_the_normalized_path_answers_turns_as_well() {
    let edge = edge("", &[("a", "", "normalized = true, reply = \"hello\"")]);
    let seen = edge.turn().await;
    assert_eq!(seen.answer().content.as_deref(), Some("hello"));
    assert!(seen.answer().usage.is_some());
}

/// An answer as the gate would hand it on.
fn handed(content_type: &'static str, body: &'static str) -> Response<GateBody> {
    let mut response = Response::new(GateBody::from(Bytes::from_static(body.as_bytes())));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(X_IOP_ATTEMPTS, HeaderValue::from_static("2"));
    response
}

#[tokio::test]
async fn a_provider_that_does_not_stream_is_understood() {
    let whole = r#"{"object":"chat.completion","model":"q","choices":[{"index":0,"finish_reason":"tool_calls",
        "message":{"role":"assistant","content":null,"tool_calls":[
        {"id":"c1","type":"function","function":{"name":"f","arguments":"{}"}},
        {"type":"function","function":{"name":"g","arguments":{"a": 1}}}]}}],
        "usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}"#;
    let answer = read(handed("application/json", whole), 1 << 20, &|_| {})
        .await
        .unwrap();
    assert_eq!((answer.attempts, answer.usage.unwrap().input), (2, 3));
    let calls: Vec<_> = answer
        .tool_calls
        .iter()
        .map(|c| (c.id.as_str(), c.name.as_str(), c.arguments.as_str()))
        .collect();
    assert_eq!(calls, [("c1", "f", "{}"), ("call_1", "g", "{\"a\": 1}")]);
}
