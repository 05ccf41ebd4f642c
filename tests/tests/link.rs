//! The link: a node needs no open port, comes back by itself, and strangers are refused with words.

use std::time::{Duration, Instant};

use iop_tests::client::{Answer, Conn};
use iop_tests::config::{Provider, Setup};
use iop_tests::process::{Process, binary};
use iop_tests::provider::{Exchange, Stub};
use iop_tests::relay::Relay;
use iop_tests::stack::{LINK_TOKEN, Shape, Stack};
use iop_tests::{eventually, fixtures, run, within};
use serde_json::json;

const READMITTED: Duration = Duration::from_secs(5);

async fn hello(mut ex: Exchange) -> std::io::Result<()> {
    ex.json_reply(200, &fixtures::chat_answer("m", "hello")).await
}

fn setup(stub: &Stub) -> Setup {
    Setup::of(Provider::openai("up", &stub.url(), &["m"])).node("telemetry", "log = \"info\"")
}

#[test]
fn a_node_without_a_listening_port_serves_traffic() {
    run(60, async {
        let stub = Stub::start(hello).await;
        let stack = Stack::start(Shape::Linked, setup(&stub)).await;
        let answer = stack.chat("m", "hi").await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
        assert_eq!(stack.nodes[0].metrics, None);
        assert_eq!(stack.nodes[0].process.listening(), Vec::<String>::new());
        assert!(
            !stack.edge.process.listening().is_empty(),
            "the way of looking finds listeners"
        );
    });
}

#[test]
fn two_nodes_serve_one_model_and_either_may_go() {
    run(60, async {
        let stub = Stub::start(hello).await;
        let both = setup(&stub).nodes(&["n1", "n2"]).model("pub", "up", "m");
        let mut stack = Stack::start(Shape::Linked, both).await;
        let nodes = stack.edge.admin("nodes").await;
        let mut ids: Vec<_> = nodes
            .iter()
            .filter_map(|n| n["id"].as_str())
            .filter(|i| *i != "embedded")
            .collect();
        ids.sort_unstable();
        assert_eq!(ids, ["n1", "n2"]);
        let client = stack.client();
        let body = fixtures::chat("pub", "hi", false);
        let answers =
            futures_util::future::join_all((0..16).map(|_| client.post("/v1/chat/completions", &body))).await;
        assert!(
            answers.iter().all(|a| a.status() == 200),
            "{:?}",
            answers.iter().map(Answer::status).collect::<Vec<_>>()
        );
        stack.nodes[0].process.kill().await;
        eventually("only n2 is left", Duration::from_secs(5), || async {
            let live = stack.edge.admin("nodes").await;
            let live = live.iter().filter(|n| n["embedded"] == false).count();
            if live == 1 {
                Ok(())
            } else {
                Err(format!("{live} nodes"))
            }
        })
        .await;
        for _ in 0..4 {
            assert_eq!(stack.chat("pub", "hi").await.status(), 200);
        }
    });
}

#[test]
fn work_is_spread_over_the_nodes_of_a_model() {
    run(60, async {
        let (release, gate) = tokio::sync::watch::channel(false);
        let stub = Stub::start(move |mut ex| {
            let mut gate = gate.clone();
            async move {
                ex.until(async { gate.wait_for(|open| *open).await.map(|_| ()) })
                    .await
                    .ok();
                hello(ex).await
            }
        })
        .await;
        let both = Setup::of(Provider::openai("up", &stub.url(), &["m"]).capacity(2)).nodes(&["n1", "n2"]);
        let stack = Stack::start(Shape::Linked, both.model("pub", "up", "m")).await;
        let client = stack.client();
        let body = fixtures::chat("pub", "hi", false);
        let work = tokio::spawn(async move {
            futures_util::future::join_all((0..4).map(|_| client.post("/v1/chat/completions", &body))).await
        });
        stub.arrived(4).await;
        let providers = stack.edge.admin("providers").await;
        let mut loads: Vec<_> = providers
            .iter()
            .filter(|p| p["node_id"] != "embedded")
            .map(|p| p["in_flight"].clone())
            .collect();
        loads.sort_by_key(|l| l.as_u64());
        assert_eq!(loads, [json!(2), json!(2)], "{providers:?}");
        release.send_replace(true);
        assert!(work.await.unwrap().iter().all(|a| a.status() == 200));
        stack.settled(Duration::from_secs(2)).await;
    });
}

#[test]
fn a_killed_and_restarted_node_is_listed_again_within_5_s() {
    run(90, async {
        let stub = Stub::start(hello).await;
        let mut stack = Stack::start(Shape::Linked, setup(&stub)).await;
        for _ in 0..3 {
            let before = stack.edge.admin("nodes").await;
            let generation = |nodes: &[serde_json::Value]| {
                nodes
                    .iter()
                    .find(|n| n["id"] == "n1")
                    .and_then(|n| n["connection_generation"].as_u64())
            };
            let mut node = stack.nodes.remove(0);
            node.process.kill().await;
            eventually("the model is gone", READMITTED, || async {
                let models = stack.edge.models().await;
                if models.is_empty() {
                    Ok(())
                } else {
                    Err(format!("{models:?}"))
                }
            })
            .await;
            let url = stack.edge.link_url();
            let restarted = Instant::now();
            let node = stack.start_node("n1", &url).await;
            stack.nodes.push(node);
            stack.edge.lists(&["m".to_owned()], READMITTED).await;
            assert!(restarted.elapsed() <= READMITTED);
            assert!(generation(&stack.edge.admin("nodes").await) > generation(&before));
            assert_eq!(stack.chat("m", "hi").await.status(), 200);
        }
    });
}

#[test]
fn a_stopped_node_that_is_replaced_loses_to_its_replacement() {
    run(60, async {
        let stub = Stub::start(hello).await;
        let mut stack = Stack::start(Shape::Linked, setup(&stub)).await;
        // A power cycle as the edge sees it: the old socket stays open and nobody answers on it.
        let old = stack.nodes.remove(0);
        old.process.signal("STOP");
        let url = stack.edge.link_url();
        let started = Instant::now();
        let node = stack.start_node("n1", &url).await;
        stack.nodes.push(node);
        eventually("the new instance serves", READMITTED, || async {
            let answer = tokio::time::timeout(Duration::from_secs(1), stack.chat("m", "hi")).await;
            match answer {
                Ok(a) if a.status() == 200 => Ok(()),
                Ok(a) => Err(a.text()),
                Err(_) => Err("no answer".to_owned()),
            }
        })
        .await;
        assert!(started.elapsed() <= READMITTED, "{:?}", started.elapsed());
        // The late end of the old session changes nothing.
        old.process.signal("CONT");
        drop(old);
        assert_eq!(stack.chat("m", "hi").await.status(), 200);
        assert_eq!(stack.edge.models().await, ["m"]);
    });
}

#[test]
fn a_black_holed_link_is_dead_on_both_sides_within_15_s_and_readmitted_within_5_s() {
    run(120, async {
        let stub = Stub::start(|mut ex| async move {
            if ex.json()["stream"] == true {
                ex.sse().await?;
                ex.data(&fixtures::text_chunk("begun")).await?;
                ex.gone().await;
                return Ok(());
            }
            hello(ex).await
        })
        .await;
        let mut stack = Stack::start_empty(Shape::Linked, setup(&stub)).await;
        let relay = Relay::start(stack.edge.link.as_ref().unwrap()).await;
        let node = stack.start_node("n1", &format!("http://{}", relay.addr)).await;
        stack.nodes.push(node);
        stack.edge.lists(&["m".to_owned()], Duration::from_secs(10)).await;
        let mut stream = stack
            .client()
            .open("/v1/chat/completions", &fixtures::chat("m", "hi", true))
            .await;
        assert_eq!(stream.head().await.unwrap().status, 200);
        stream.until("begun").await;

        relay.black_hole();
        let silent_since = Instant::now();
        let dead_within = Duration::from_secs(15);
        eventually("the edge has given the node up", dead_within, || async {
            let live = stack.edge.admin("nodes").await;
            if live.iter().all(|n| n["embedded"] == true) {
                Ok(())
            } else {
                Err(format!("{live:?}"))
            }
        })
        .await;
        eventually(
            "both sides have closed the silent connection",
            dead_within,
            || async {
                let passage = relay.passages()[0].clone();
                match (passage.dialer_closed, passage.listener_closed) {
                    (Some(_), Some(_)) => Ok(()),
                    seen => Err(format!("node, edge: {seen:?}")),
                }
            },
        )
        .await;
        let passage = relay.passages()[0].clone();
        for closed in [passage.dialer_closed, passage.listener_closed] {
            let took = closed.unwrap().duration_since(silent_since);
            assert!(took <= dead_within, "closed after {took:?}");
        }
        // The stream was committed: one typed error, no success.
        let rest = String::from_utf8_lossy(&stream.body().await.unwrap()).into_owned();
        assert!(rest.contains("\"node_lost\""), "{rest}");
        assert!(!rest.contains("[DONE]"), "{rest}");
        // The node's side of that stream is gone too.
        stub.hung_up(0, Duration::from_secs(5)).await;
        stack.edge.quiet(Duration::from_secs(2)).await;

        // Thirty seconds of silence in all, as the promise says: this wait is the fault itself.
        tokio::time::sleep_until((silent_since + Duration::from_secs(30)).into()).await;
        relay.restore();
        let restored = Instant::now();
        stack.edge.lists(&["m".to_owned()], READMITTED).await;
        assert_eq!(stack.chat("m", "hi").await.status(), 200);
        assert!(restored.elapsed() <= READMITTED, "{:?}", restored.elapsed());
    });
}

#[test]
fn a_cut_link_is_redialed_and_its_streams_end_with_a_typed_error() {
    run(60, async {
        let stub = Stub::start(|mut ex| async move {
            if ex.json()["stream"] == true {
                ex.sse().await?;
                ex.data(&fixtures::text_chunk("begun")).await?;
                ex.gone().await;
                return Ok(());
            }
            hello(ex).await
        })
        .await;
        let mut stack = Stack::start_empty(Shape::Linked, setup(&stub)).await;
        let relay = Relay::start(stack.edge.link.as_ref().unwrap()).await;
        let node = stack.start_node("n1", &format!("http://{}", relay.addr)).await;
        stack.nodes.push(node);
        stack.edge.lists(&["m".to_owned()], Duration::from_secs(10)).await;
        let mut chat = stack
            .client()
            .open("/v1/chat/completions", &fixtures::chat("m", "hi", true))
            .await;
        chat.head().await.unwrap();
        chat.until("begun").await;
        let cut = Instant::now();
        relay.cut();
        let rest = String::from_utf8_lossy(&chat.body().await.unwrap()).into_owned();
        assert!(
            rest.contains("\"node_lost\"") && !rest.contains("[DONE]"),
            "{rest}"
        );
        assert!(
            chat.complete(),
            "the message itself ends properly after its error"
        );
        stub.hung_up(0, Duration::from_secs(2)).await;
        stack.edge.lists(&["m".to_owned()], READMITTED).await;
        assert!(cut.elapsed() <= READMITTED, "{:?}", cut.elapsed());
        assert_eq!(stack.chat("m", "hi").await.status(), 200);
        stack.edge.quiet(Duration::from_secs(2)).await;
    });
}

async fn handshake(addr: &str, headers: &[(&str, &str)]) -> Answer {
    let mut conn = Conn::open(addr).await.unwrap();
    conn.request("GET", "/link", headers, b"").await.unwrap();
    within(
        "an answer to the handshake",
        Duration::from_secs(5),
        conn.answer(),
    )
    .await
    .unwrap()
}

#[test]
fn strangers_at_the_link_are_refused_with_words() {
    run(60, async {
        let stub = Stub::start(hello).await;
        let stack = Stack::start(Shape::Linked, setup(&stub)).await;
        let link = stack.edge.link.clone().unwrap();
        let good = format!("Bearer {LINK_TOKEN}");
        let offer = |upgrade: &'static str, auth: &str, id: &str| {
            vec![
                ("connection".to_owned(), "upgrade".to_owned()),
                ("upgrade".to_owned(), upgrade.to_owned()),
                ("authorization".to_owned(), auth.to_owned()),
                ("iop-node-id".to_owned(), id.to_owned()),
                ("iop-node-instance".to_owned(), "another".to_owned()),
            ]
        };
        let send = async |headers: Vec<(String, String)>| {
            let headers: Vec<(&str, &str)> = headers.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
            handshake(&link, &headers).await
        };
        let worded = |answer: &Answer, status: u16, word: &str| {
            assert_eq!(answer.status(), status, "{}", answer.text());
            answer.error_code();
            let message = answer.json()["error"]["message"]
                .as_str()
                .unwrap_or_default()
                .to_ascii_lowercase();
            assert!(message.contains(word), "{word:?} is not in {message:?}");
        };
        worded(
            &send(offer("iop-link/1", "Bearer wrong", "x")).await,
            401,
            "token",
        );
        let answer = send(offer("iop-link/99", &good, "x")).await;
        worded(&answer, 426, "version");
        let spoken = format!("{:?} {}", answer.head.all("upgrade"), answer.text());
        assert!(
            spoken.contains("iop-link/1"),
            "the versions spoken are named: {spoken}"
        );
        worded(&send(offer("iop-link/1", &good, "bad id!")).await, 400, "id");
        worded(
            &send(offer("iop-link/1", &good, "embedded")).await,
            400,
            "reserved",
        );
        worded(
            &send(offer("iop-link/1", &good, &"x".repeat(65))).await,
            400,
            "id",
        );
        worded(&send(offer("iop-link/1", &good, "n1")).await, 409, "n1");
        let no_upgrade = handshake(&link, &[("authorization", &good), ("iop-node-id", "x")]).await;
        assert_eq!(no_upgrade.status(), 426, "{}", no_upgrade.text());
        // The refused ones changed nothing for the node that is there.
        assert_eq!(stack.chat("m", "hi").await.status(), 200);
        assert_eq!(stack.edge.models().await, ["m"]);
    });
}

#[test]
fn a_refused_node_says_why_in_its_log() {
    run(60, async {
        let stub = Stub::start(hello).await;
        let mut stack = Stack::start(Shape::Linked, setup(&stub)).await;
        let url = stack.edge.link_url();
        // Wrong token.
        let mut other = stack.setup.clone();
        other.env.push(("IOP_LINK_TOKEN".to_owned(), "wrong".to_owned()));
        let wrong = std::mem::replace(&mut stack.setup, other);
        let node = stack.start_node("n2", &url).await;
        stack.setup = wrong;
        eventually(
            "the refused node names the token",
            Duration::from_secs(5),
            || async {
                let log = node.process.log().to_ascii_lowercase();
                if log.contains("token") && log.contains("401") {
                    Ok(())
                } else {
                    Err(log)
                }
            },
        )
        .await;
        assert!(
            !node.process.log().contains("wrong\""),
            "the token itself is not logged"
        );
        // The edge says it too.
        stack.edge.process.says("token").await;
        // A second instance of a living node.
        let second = stack.start_node("n1", &url).await;
        eventually(
            "the second instance hears of the first",
            Duration::from_secs(8),
            || async {
                let log = second.process.log();
                if log.contains("409") { Ok(()) } else { Err(log) }
            },
        )
        .await;
        assert_eq!(stack.chat("m", "hi").await.status(), 200);
    });
}

#[test]
fn a_node_that_meets_another_link_version_says_so() {
    run(60, async {
        let edge = Stub::start(|mut ex| async move {
            let body = json!({"error": {"message": "this edge speaks iop-link/7 only", "type": "invalid_request_error",
                                        "param": null, "code": "link_version"}});
            let headers = [("content-type", "application/json"), ("upgrade", "iop-link/7"), ("connection", "upgrade")];
            ex.reply(426, &headers, body.to_string().as_bytes()).await
        })
        .await;
        let dir = tempfile::tempdir().unwrap();
        let toml = Setup::of(Provider::openai("up", "http://127.0.0.1:9/v1", &["m"]))
            .node_toml("n1", &format!("http://{}", edge.addr));
        std::fs::write(dir.path().join("node.toml"), toml).unwrap();
        let env = [("IOP_LINK_TOKEN".to_owned(), LINK_TOKEN.to_owned())];
        let mut node = Process::spawn(
            "iop-node",
            &binary("iop-node"),
            &["--config", "node.toml"],
            &env,
            dir.path(),
        );
        node.ready().await;
        eventually("the log names both versions", Duration::from_secs(5), || async {
            let log = node.log();
            let words = log.contains("iop-link/7") && log.to_ascii_lowercase().contains("version");
            if words { Ok(()) } else { Err(log) }
        })
        .await;
        assert_eq!(edge.last().header("upgrade"), Some("iop-link/1"));
        assert_eq!(edge.last().path, "/link");
        assert!(node.running(), "it goes on dialing");
    });
}
