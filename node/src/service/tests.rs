//! The node called in-process, as the edge with an embedded node does.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use iop_shared::execution::{AttemptResult, Endpoint, FailureCode};
use iop_shared::wire::headers;
use iop_shared::wire::session::SessionLine;

use crate::config::Resolver;
use crate::testing::{Stub, node, node_with, openai, request, tunnel, tunnel_with, whole};

#[tokio::test]
async fn a_tunnel_carries_the_answer_as_it_is_and_ends_with_its_terminal() {
    struct Key;
    impl Resolver for Key {
        fn env(&self, _: &str) -> Option<String> {
            Some(String::from("sk-own"))
        }
        fn file(&self, _: &std::path::Path) -> std::io::Result<String> {
            Err(std::io::ErrorKind::NotFound.into())
        }
    }
    let stub = Stub::start().await;
    let own = "api_key = { env = \"K\" }\nheaders = { x-org = \"o\" }";
    let node = node_with(&openai("p", &stub.url, own), &Key);
    let mut ask = tunnel("p", "", "{\"a\":1.0}");
    for (n, v) in [
        ("authorization", "Bearer client"),
        ("x-org", "c"),
        ("accept-encoding", "br"),
        ("x-kept", "1"),
    ] {
        ask.headers_mut().insert(n, v.parse().unwrap());
    }
    let answer = whole(node.handle(ask).await).await;
    assert_eq!(
        (answer.status, answer.code(), &answer.data[..]),
        (200, "complete", &b"{\"ok\":true}"[..])
    );
    assert_eq!(answer.headers[headers::ORIGIN], "provider");
    assert_eq!(answer.headers[headers::CONTENT_LENGTH], "11");
    assert!(!answer.headers.contains_key("content-length") && !answer.headers.contains_key("set-cookie"));
    assert!(!answer.headers.contains_key("connection"));
    assert_eq!(answer.headers.get_all("x-multi").iter().count(), 2);
    let (head, body) = stub.last();
    let head = head.to_ascii_lowercase();
    assert!(
        head.starts_with("post /v1/chat/completions http/1.1\r\n"),
        "{head}"
    );
    for line in [
        "authorization: bearer sk-own",
        "x-org: o",
        "accept-encoding: identity",
        "x-kept: 1",
        "content-length: 9",
    ] {
        assert_eq!(head.lines().filter(|l| *l == line).count(), 1, "{line} in {head}");
    }
    assert!(
        !head.contains("iop-") && !head.contains("bearer client"),
        "{head}"
    );
    assert_eq!(body, b"{\"a\":1.0}");
    assert_eq!(node.in_flight(), 0);
    assert_eq!(
        node.metrics()
            .attempts
            .at((Endpoint::Chat, AttemptResult::Success))
            .get(),
        1
    );
}

#[tokio::test]
async fn every_refusal_and_failure_has_its_own_code() {
    let stub = Stub::start().await;
    // Bound and dropped: nothing listens there any more.
    let closed = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let node = node(&format!(
        "{}{}",
        openai("p", &stub.url, "endpoints = [\"chat\", \"responses\"]"),
        openai("closed", &format!("http://{closed}/v1"), "")
    ));
    let responses = |path: &'static str| {
        move |h: &mut iop_shared::wire::tunnel::TunnelHead| {
            h.endpoint = Endpoint::Responses;
            h.path = Some(path.into());
        }
    };
    for (name, ask, want) in [
        ("missing", tunnel("x", "", ""), "provider_missing"),
        (
            "target",
            tunnel_with("p", "", "", |h| h.target = "z".into()),
            "target_missing",
        ),
        (
            "endpoint",
            tunnel_with("p", "", "", |h| h.endpoint = Endpoint::Audio),
            "provider_unavailable",
        ),
        (
            "negative",
            tunnel_with("p", "", "", |h| h.response_stall_timeout_ms = -1),
            "invalid_request",
        ),
        (
            "overflow",
            tunnel_with("p", "", "", |h| h.response_stall_timeout_ms = i64::MAX),
            "invalid_request",
        ),
        (
            "escape",
            tunnel_with("p", "", "", responses("responses/%2e%2e/cancel")),
            "invalid_request",
        ),
        ("refused", tunnel("closed", "", "{}"), "connect_failed"),
        ("eof", tunnel("p", "cut-before-head", "{}"), "provider_cut"),
        ("reset", tunnel("p", "reset-before-head", "{}"), "provider_cut"),
        ("no http", tunnel("p", "no-http", "{}"), "provider_cut"),
        ("head", tunnel("p", "big-head", "{}"), "provider_cut"),
    ] {
        let answer = whole(node.handle(ask).await).await;
        assert_eq!((answer.status, answer.code()), (200, want), "{name}");
        assert_eq!(answer.headers[headers::ORIGIN], "node", "{name}");
        assert!(answer.data.is_empty(), "{name}");
        let said = format!("{:?}", answer.terminal);
        assert!(!said.contains("http://"), "{said}");
    }
    let mut bare = tunnel("p", "", "");
    bare.headers_mut().remove(headers::RUN_ID);
    assert_eq!(whole(node.handle(bare).await).await.code(), "invalid_request");
    assert_eq!(node.in_flight(), 0);
    assert_eq!(node.metrics().refusals.at((FailureCode::TargetMissing,)).get(), 1);
    assert_eq!(
        node.metrics()
            .attempts
            .at((Endpoint::Chat, AttemptResult::ConnectError))
            .get(),
        1
    );
}

#[tokio::test]
async fn answers_that_break_off_or_lie_end_with_a_typed_cut_and_redirects_are_heads() {
    let stub = Stub::start().await;
    let node = node(&openai("p", &stub.url, ""));
    for (what, data, want) in [
        ("cut-stream", "data: begun\n\n", "provider_cut"),
        ("short", "half", "provider_cut"),
        ("stream", "data: a\n\ndata: b\n\n", "complete"),
    ] {
        let answer = whole(node.handle(tunnel("p", what, "{}")).await).await;
        assert_eq!(
            (answer.code(), &answer.data[..]),
            (want, data.as_bytes()),
            "{what}"
        );
        assert_eq!(answer.headers[headers::ORIGIN], "provider");
    }
    let answer = whole(node.handle(tunnel("p", "redirect", "{}")).await).await;
    assert_eq!((answer.status, answer.code()), (302, "complete"));
    assert_eq!(
        stub.last().0.lines().next(),
        Some("POST /v1/chat/completions HTTP/1.1")
    );
}

#[tokio::test]
async fn stored_response_verbs_keep_method_path_and_query() {
    let stub = Stub::start().await;
    let node = node(&openai("p", &stub.url, ""));
    let ask = tunnel_with("p", "", "", |h| {
        h.endpoint = Endpoint::Responses;
        h.method = http::Method::GET;
        h.path = Some("responses/resp_1/input_items?limit=2&after=%20".into());
    });
    assert_eq!(whole(node.handle(ask).await).await.code(), "complete");
    let head = stub.last().0;
    assert!(
        head.starts_with("GET /v1/responses/resp_1/input_items?limit=2&after=%20 HTTP/1.1\r\n"),
        "{head}"
    );
    assert!(!head.to_ascii_lowercase().contains("content-length"), "{head}");
}

#[tokio::test]
async fn capacity_is_refused_at_once_and_a_dropped_body_or_future_gives_the_place_back() {
    let stub = Stub::start().await;
    let node = node(&openai("p", &stub.url, "capacity = 2"));
    let streaming = node.handle(tunnel("p", "endless", "{}")).await;
    let mut hanging = Box::pin(node.handle(tunnel("p", "hang", "{}")));
    tokio::select! {
        _ = &mut hanging => panic!("answered"),
        () = stub.arrived(2) => {}
    }
    assert_eq!(
        whole(node.handle(tunnel("p", "", "{}")).await).await.code(),
        "capacity"
    );
    assert_eq!(node.loads()[0].in_flight, 2);
    drop(hanging);
    stub.hung_up(1, Duration::from_secs(1)).await;
    let mut body = streaming.into_body();
    assert!(body.frame().await.unwrap().unwrap().is_data());
    drop(body);
    stub.hung_up(2, Duration::from_secs(1)).await;
    node.drained().await;
    assert_eq!(
        node.metrics()
            .attempts
            .at((Endpoint::Chat, AttemptResult::Cancelled))
            .get(),
        2
    );
    assert_eq!(node.metrics().in_flight.get(), 0);
}

#[tokio::test]
async fn a_drain_refuses_new_tunnels_and_waits_for_the_others() {
    let stub = Stub::start().await;
    let node = node(&openai("p", &stub.url, ""));
    let ads = node.subscribe();
    let streaming = node.handle(tunnel("p", "endless", "{}")).await;
    node.set_draining(true);
    assert!(ads.borrow().draining);
    assert_eq!(
        whole(node.handle(tunnel("p", "", "{}")).await).await.code(),
        "draining"
    );
    let mut drained = Box::pin(node.drained());
    assert!(futures_util::poll!(&mut drained).is_pending());
    drop(streaming);
    drained.await;
}

#[tokio::test]
async fn targets_are_asked_from_the_provider_and_advertised() {
    let stub = Stub::start().await;
    let toml = format!(
        "[[providers]]\nid = \"p\"\nadapter = \"openai\"\nbase_url = {:?}\n",
        stub.url
    );
    let node = node(&toml);
    let mut ads = node.subscribe();
    assert!(ads.borrow().providers[0].targets.is_empty());
    node.start();
    let ad = ads
        .wait_for(|a| !a.providers[0].targets.is_empty())
        .await
        .unwrap()
        .clone();
    assert_eq!(ad.providers[0].targets, ["m", "n"]);
}

#[tokio::test]
async fn only_listed_commands_are_answered_and_observations_are_numbered() {
    let stub = Stub::start().await;
    let node = node(&format!(
        "{}[[providers]]\nid = \"s\"\nadapter = \"scripted\"\nscript = {{ a = {{}}, b = {{ probe = \"missing\" }}, c = {{ probe = \"refuse\" }} }}\n",
        openai("p", &stub.url, "")
    ));
    let ask = async |name: &str, body: &str| {
        let answer = node
            .handle(request(
                "POST",
                &format!("/link/v1/commands/{name}"),
                body.to_owned(),
            ))
            .await;
        let answer = whole(answer).await;
        (answer.status, String::from_utf8(answer.data.to_vec()).unwrap())
    };
    // The list comes before the provider: an unknown command says nothing about providers.
    assert_eq!(ask("shell", "{\"provider\":\"nobody\"}").await.0, 404);
    assert!(ask("shell", "").await.1.contains("unknown_command"));
    assert_eq!(
        ask("capabilities", "{\"provider\":\"nobody\",\"target\":\"m\"}")
            .await
            .0,
        404
    );
    assert_eq!(ask("capabilities", "{\"provider\":\"p\"}").await.0, 400);
    assert_eq!(
        ask("capabilities", "{\"provider\":\"p\",\"target\":\"m\",\"x\":1}")
            .await
            .0,
        400
    );
    for (seq, (provider, target, status)) in [
        ("p", "m", "available"),
        ("p", "z", "unavailable"),
        ("s", "b", "unavailable"),
        ("s", "c", "unknown"),
    ]
    .into_iter()
    .enumerate()
    {
        let (code, body) = ask(
            "capabilities",
            &format!("{{\"provider\":{provider:?},\"target\":{target:?}}}"),
        )
        .await;
        assert_eq!(code, 200);
        let seq = seq + 1;
        assert_eq!(
            body,
            format!(
                "{{\"adapter_key\":{provider:?},\"target\":{target:?},\"provider_status\":{status:?},\"health_observation_seq\":{seq}}}"
            )
        );
    }
    let (code, body) = ask("transport_status", "{\"provider\":\"p\"}").await;
    assert_eq!(
        (code, body.as_str()),
        (
            200,
            r#"{"adapter_key":"p","in_flight":0,"capacity":32,"draining":false}"#
        )
    );
    assert_eq!(
        ask("ollama_api", "{\"provider\":\"p\",\"path\":\"/api/tags\"}")
            .await
            .0,
        400
    );
    for (method, path) in [
        ("GET", "/link/v1/commands/capabilities"),
        ("GET", "/link/v1/runs"),
        ("GET", "/"),
    ] {
        assert_eq!(
            whole(node.handle(request(method, path, "")).await).await.status,
            404,
            "{path}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn the_session_tells_the_node_then_its_changes_then_its_load() {
    let node = node(
        "[[providers]]\nid = \"s\"\nadapter = \"scripted\"\nscript = { m = { stall = \"after_headers\" } }\n",
    );
    let mut lines = node
        .handle(request("GET", "/link/v1/session", ""))
        .await
        .into_body();
    let mut next = async || {
        let data: Bytes = lines.frame().await.unwrap().unwrap().into_data().unwrap();
        assert!(data.ends_with(b"\n"));
        SessionLine::parse(data.trim_ascii_end()).unwrap()
    };
    let SessionLine::Advertisement(first) = next().await else {
        panic!("no advertisement")
    };
    assert_eq!((first.node_id.as_str(), first.draining), ("n1", false));
    assert_eq!(first.providers[0].targets, ["m"]);
    let held: Vec<_> =
        futures_util::future::join_all((0..3).map(|_| node.handle(tunnel("s", "", "{\"stream\":true}"))))
            .await;
    let begun = tokio::time::Instant::now();
    let SessionLine::Load(load) = next().await else {
        panic!("no load")
    };
    assert_eq!((load.load[0].in_flight, begun.elapsed().as_secs()), (3, 1));
    drop(held);
    node.set_draining(true);
    let SessionLine::Advertisement(ad) = next().await else {
        panic!("no advertisement")
    };
    assert!(ad.draining && begun.elapsed().as_secs() == 1);
    let SessionLine::Load(load) = next().await else {
        panic!("no load")
    };
    assert_eq!((load.load[0].in_flight, begun.elapsed().as_secs()), (0, 2));
}

#[tokio::test(start_paused = true)]
async fn a_scripted_engine_that_ignores_a_cancel_stays_busy_for_its_time() {
    let node = node(
        "[[providers]]\nid = \"s\"\nadapter = \"scripted\"\ncapacity = 1\n\
         script = { m = { first_delay = \"8s\", ignores_cancel = true } }\n",
    );
    let begun = tokio::time::Instant::now();
    {
        let mut first = Box::pin(node.handle(tunnel("s", "", "{}")));
        assert!(futures_util::poll!(&mut first).is_pending());
    }
    // The node's own place is free at once; the engine is not.
    assert_eq!(node.in_flight(), 0);
    let answer = whole(node.handle(tunnel("s", "", "{}")).await).await;
    assert_eq!((answer.code(), begun.elapsed().as_secs()), ("complete", 16));
}
