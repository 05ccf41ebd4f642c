//! The harness itself: a stub that lies would make every other test worthless.

use std::time::{Duration, Instant};

use iop_tests::client::Client;
use iop_tests::provider::Stub;
use iop_tests::relay::Relay;
use iop_tests::{fixtures, openai_like, run, sdk};
use serde_json::json;

#[test]
fn the_stub_records_serves_again_and_notices_a_hang_up() {
    run(30, async {
        let stub = Stub::start(|mut ex| async move {
            if ex.path == "/hold" {
                ex.sse().await?;
                ex.gone().await;
                return Ok(());
            }
            ex.json_reply(200, &json!({"ok": true})).await
        })
        .await;
        let client = Client::new(&stub.addr);
        let mut conn = client
            .start("POST", "/a", &[("x-odd", "1")], b"{}")
            .await
            .unwrap();
        assert_eq!(conn.answer().await.unwrap().json(), json!({"ok": true}));
        conn.request("GET", "/b", &[], b"").await.unwrap();
        assert!(conn.answer().await.unwrap().complete);
        assert_eq!(
            (stub.sockets(), stub.open_sockets(), stub.received().len()),
            (1, 1, 2)
        );
        assert_eq!(
            (stub.received()[0].header("x-odd"), &stub.received()[0].body[..]),
            (Some("1"), &b"{}"[..])
        );
        let mut conn = client.start("GET", "/hold", &[], b"").await.unwrap();
        conn.head().await.unwrap();
        assert!(stub.last().hung_up.is_none());
        drop(conn);
        stub.hung_up(2, Duration::from_secs(1)).await;
        stub.idle(Duration::from_secs(1)).await;
    });
}

#[test]
fn the_client_tells_a_whole_message_from_a_cut_one() {
    run(30, async {
        let stub = Stub::start(|mut ex| async move {
            ex.sse().await?;
            ex.data("1").await?;
            if ex.path == "/cut" {
                ex.cut(false);
                return Ok(());
            }
            ex.end().await
        })
        .await;
        let client = Client::new(&stub.addr);
        for (path, complete) in [("/whole", true), ("/cut", false)] {
            let answer = client.get(path).await;
            assert_eq!(
                (answer.text().as_str(), answer.complete),
                ("data: 1\n\n", complete)
            );
        }
    });
}

#[test]
fn the_relay_goes_silent_and_comes_back() {
    run(30, async {
        let stub = Stub::start(|mut ex| async move { ex.json_reply(200, &json!(1)).await }).await;
        let relay = Relay::start(&stub.addr).await;
        let client = Client::new(&relay.addr);
        assert_eq!(client.get("/a").await.status(), 200);
        relay.black_hole();
        let mut conn = client.start("GET", "/b", &[], b"").await.unwrap();
        let silence = tokio::time::timeout(Duration::from_millis(200), conn.head()).await;
        assert!(silence.is_err(), "nothing comes through");
        assert_eq!(stub.received().len(), 1);
        let restored = Instant::now();
        relay.restore();
        assert_eq!(conn.answer().await.unwrap().status(), 200);
        assert!(restored.elapsed() < Duration::from_secs(1));
        relay.cut();
        conn.closed().await.unwrap();
    });
}

#[test]
fn the_openai_like_provider_satisfies_both_sdks() {
    run(240, async {
        let stub = openai_like::start().await;
        let control = format!("{}/control", stub.url());
        for script in ["promises.py", "promises.mjs"] {
            let seen = if script.ends_with(".py") {
                sdk::run_python(script, &[&stub.url(), openai_like::KEY, &control]).await
            } else {
                sdk::run_node(script, &[&stub.url(), openai_like::KEY, &control]).await
            };
            for (promise, value) in seen.as_object().unwrap() {
                assert!(value.get("unexpected").is_none(), "{script} {promise}: {value}");
            }
            let text = seen.to_string();
            for class in [
                "AuthenticationError",
                "NotFoundError",
                "RateLimitError",
                "InternalServerError",
                "BadRequestError",
            ] {
                assert!(text.contains(class), "{script} never saw {class}");
            }
            assert!(!text.contains("no error"), "{script}: {text}");
        }
        assert_eq!(fixtures::response_events("r", "m", &["a"]).len(), 9);
    });
}
