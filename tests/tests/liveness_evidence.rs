//! What a node says of a stall is evidence, and only as far as it is proven: bound to its attempt, in order, of the
//! connection on which it came (004; gateway.md G31, G35, G51; docs/link.md).
//!
//! The node is the test's own, so that it can say what no good node would.

use std::collections::BTreeMap;
use std::time::Duration;

use iop_tests::client::{Answer, Conn};
use iop_tests::config::Setup;
use iop_tests::fake_node::{FakeNode, Tunnel, advertisement, provider};
use iop_tests::liveness::{
    ELIGIBILITY, EVIDENCE, Family, HEALTH_LINE, RESULTS, Rows, TRANSITIONS, assert_clean, assert_lowered,
    assert_raised, edge_rows, lines, provider as snapshot, rows, until_status,
};
use iop_tests::stack::{Shape, Stack};
use iop_tests::{eventually, fixtures, run};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
/// The first CAPABILITIES for a lowered provider is asked after 5 s.
const FIRST_ASK: Duration = Duration::from_secs(7);
/// The second one later than that: the pauses grow.
const NEXT_ASK: Duration = Duration::from_secs(30);
const SOON: Duration = Duration::from_secs(5);
const HEALTH_FIELDS: [&str; 6] = [
    "source",
    "evidence_health",
    "decision",
    "from_health",
    "to_health",
    "state_changed",
];

/// An edge and one connection of the test's node.
struct Bench {
    stack: Stack,
    node: FakeNode,
}

impl Bench {
    async fn start(providers: &[Value]) -> Self {
        let stack = Stack::start_empty(Shape::Linked, Setup::default()).await;
        let node = dial(&stack, providers).await;
        Self { stack, node }
    }

    async fn open(&self, model: &str, text: &str) -> Conn {
        self.stack
            .client()
            .open(CHAT, &fixtures::chat(model, text, false))
            .await
    }

    /// One request that the node ends as stalled; `say` makes the text of its evidence.
    async fn stall(&mut self, model: &str, say: impl FnOnce(&Tunnel) -> Option<String>) -> Answer {
        let mut conn = self.open(model, "hello").await;
        let tunnel = self.node.tunnel().await;
        let failure = say(&tunnel);
        tunnel.stalled(failure.as_deref());
        let answer = conn.answer().await.unwrap();
        assert!(
            !answer.text().contains("no progress at the provider"),
            "the node's words stay at the edge: {}",
            answer.text()
        );
        answer
    }

    /// A stall that is not replayed.
    async fn refused(&mut self, model: &str, say: impl FnOnce(&Tunnel) -> Option<String>) {
        let answer = self.stall(model, say).await;
        answer.assert_error(504, "response_stalled");
        assert_eq!(answer.header("x-iop-attempts"), Some("1"));
        assert_eq!(answer.header("x-should-retry"), Some("false"));
    }

    async fn provider(&self, id: &str) -> Value {
        snapshot(&self.stack, id).await
    }

    /// Waits until no lease of a provider is held.
    async fn released(&self, id: &str) {
        eventually("leases released", SOON, || async {
            let provider = self.provider(id).await;
            if provider["in_flight"] == 0 {
                Ok(())
            } else {
                Err(provider.to_string())
            }
        })
        .await;
    }

    /// Capacity is whole: as many attempts as there are places, and not one more.
    async fn assert_capacity(&mut self, model: &str, id: &str, places: usize) {
        let mut conns = Vec::new();
        for _ in 0..=places {
            conns.push(self.open(model, "hello").await);
        }
        let mut tunnels = Vec::new();
        for _ in 0..places {
            tunnels.push(self.node.tunnel().await);
        }
        eventually("one request waits", SOON, || async {
            let provider = self.provider(id).await;
            if provider["in_flight"] == places && provider["queued"] == 1 {
                Ok(())
            } else {
                Err(provider.to_string())
            }
        })
        .await;
        assert!(self.node.tunnels.try_recv().is_err(), "more attempts than places");
        for tunnel in tunnels {
            tunnel.complete(&fixtures::chat_answer(model, "well"));
        }
        let last = self.node.tunnel().await;
        last.complete(&fixtures::chat_answer(model, "well"));
        for mut conn in conns {
            assert_eq!(conn.answer().await.unwrap().status(), 200);
        }
        self.stack.settled(SOON).await;
    }

    /// Rows counted so far, summed over the labels that `pick` leaves out.
    async fn summed(&self, family: Family, pick: &[usize]) -> Rows {
        let mut summed = Rows::new();
        for (row, n) in family.rows(&self.stack.edge.scrape().await) {
            let labels: Vec<&str> = row.split('/').collect();
            let picked: Vec<&str> = pick.iter().map(|i| labels[*i]).collect();
            *summed.entry(picked.join("/")).or_default() += n;
        }
        summed
    }
}

async fn dial(stack: &Stack, providers: &[Value]) -> FakeNode {
    let link = stack.edge.link.clone().unwrap();
    let node = FakeNode::dial(&link, "one process", &advertisement("f1", providers)).await;
    let listed = |p: &Value| p["targets"][0].as_str().unwrap().to_owned();
    let models: Vec<String> = providers.iter().map(listed).collect();
    stack.edge.lists(&models, SOON).await;
    node
}

fn text(evidence: &Value) -> Option<String> {
    Some(evidence.to_string())
}

fn changed(mut evidence: Value, key: &str, value: Value) -> Option<String> {
    evidence[key] = value;
    text(&evidence)
}

fn without(mut evidence: Value, key: &str) -> Option<String> {
    evidence.as_object_mut().unwrap().remove(key).unwrap();
    text(&evidence)
}

#[test]
fn terminals_out_of_order_release_their_leases_once_and_only_the_newest_counts() {
    run(60, async {
        let mut bench = Bench::start(&[provider("p", &["m"], 4)]).await;
        let mut conns = BTreeMap::new();
        for name in ["three", "four", "five", "seven"] {
            conns.insert(name.to_owned(), bench.open("m", name).await);
        }
        let mut tunnels = BTreeMap::new();
        for _ in 0..4 {
            let tunnel = bench.node.tunnel().await;
            let name = tunnel.json()["messages"][0]["content"]
                .as_str()
                .unwrap()
                .to_owned();
            tunnels.insert(name, tunnel);
        }
        // Seven comes last and is newer, yet a stall never raises: that takes a CAPABILITIES answer.
        for (name, sequence, health) in [
            ("five", 5, "unavailable"),
            ("four", 4, "unavailable"),
            ("three", 3, "available"),
            ("seven", 7, "available"),
        ] {
            let tunnel = tunnels.remove(name).unwrap();
            let evidence = tunnel.evidence(health, sequence).to_string();
            tunnel.stalled(Some(&evidence));
            let answer = conns.get_mut(name).unwrap().answer().await.unwrap();
            answer.assert_error(504, "response_stalled");
            until_status(&bench.stack, "p", "unavailable", SOON).await;
            if name != "seven" {
                assert_lowered(&bench.provider("p").await, Some(5));
            }
        }
        assert_lowered(&bench.provider("p").await, None);
        bench.released("p").await;
        let stack = &bench.stack;
        let evidence = rows(&[
            ("stall/unavailable/applied", 1),
            ("stall/unavailable/rejected_stale", 1),
            ("stall/available/rejected_stale", 1),
            ("stall/available/applied", 1),
        ]);
        edge_rows(stack, EVIDENCE, &evidence).await;
        edge_rows(stack, TRANSITIONS, &rows(&[("available/unavailable", 1)])).await;
        let cycles = rows(&[
            (
                "provider_tunnel/unavailable/transport_uncommitted/no_candidate",
                2,
            ),
            ("provider_tunnel/available/transport_uncommitted/no_candidate", 2),
        ]);
        edge_rows(stack, ELIGIBILITY, &cycles).await;
        edge_rows(stack, RESULTS, &Rows::new()).await;
        let told = rows(&[
            ("stall/unavailable/applied/available/unavailable/true", 1),
            (
                "stall/unavailable/rejected_stale/unavailable/unavailable/false",
                1,
            ),
            ("stall/available/rejected_stale/unavailable/unavailable/false", 1),
            ("stall/available/applied/unavailable/unavailable/false", 1),
        ]);
        lines(&stack.edge.process, HEALTH_LINE, &HEALTH_FIELDS, &told).await;

        // A lowered provider is asked, and a newer exact answer brings all of its places back.
        let command = bench.node.command(FIRST_ASK).await;
        assert_eq!(command.name, "capabilities");
        assert_eq!(
            (&command.body["provider"], &command.body["target"]),
            (&json!("p"), &json!("m"))
        );
        let answer = command.capabilities("available", 8);
        command.answer(200, answer.to_string());
        until_status(&bench.stack, "p", "available", SOON).await;
        assert_raised(&bench.provider("p").await, Some(8));
        let transitions = rows(&[("available/unavailable", 1), ("unavailable/available", 1)]);
        edge_rows(&bench.stack, TRANSITIONS, &transitions).await;
        bench.assert_capacity("m", "p", 4).await;
    });
}

/// Waits until the evidence of stalls was decided so often, in this one way.
async fn decided(bench: &Bench, decision: &str, n: u64) {
    let expected = rows(&[(&format!("stall/{decision}"), n)]);
    eventually(decision, SOON, || async {
        let seen = bench.summed(EVIDENCE, &[0, 2]).await;
        if seen == expected {
            Ok(())
        } else {
            Err(format!("{seen:?}"))
        }
    })
    .await;
    edge_rows(&bench.stack, TRANSITIONS, &Rows::new()).await;
    edge_rows(&bench.stack, RESULTS, &Rows::new()).await;
}

#[test]
fn a_terminal_of_another_attempt_adapter_or_target_proves_nothing_and_is_not_replayed() {
    run(60, async {
        // Another provider would take a replay.
        let mut bench = Bench::start(&[provider("p", &["m"], 2), provider("q", &["m"], 2)]).await;
        let stranger = "0198a3c0-0000-7000-8000-000000000000";
        for (key, value) in [
            ("run_id", stranger),
            ("attempt_id", stranger),
            ("adapter", "another"),
            ("target", "another"),
        ] {
            bench
                .refused("m", |t| changed(t.evidence("unavailable", 5), key, json!(value)))
                .await;
        }
        decided(&bench, "rejected_binding", 4).await;
        let cycles = bench.summed(ELIGIBILITY, &[0, 2, 3]).await;
        assert_eq!(
            cycles,
            rows(&[("provider_tunnel/transport_uncommitted/no_owner", 4)])
        );
        for id in ["p", "q"] {
            bench.released(id).await;
            assert_clean(&bench.provider(id).await);
        }
        // Nothing of it was remembered: a lower number is news, and its request goes to the other one.
        let mut conn = bench.open("m", "hello").await;
        let first = bench.node.tunnel().await;
        let (lowered, evidence) = (
            first.field("provider"),
            first.evidence("unavailable", 1).to_string(),
        );
        first.stalled(Some(&evidence));
        let second = bench.node.tunnel().await;
        assert_ne!(second.field("provider"), lowered);
        second.complete(&fixtures::chat_answer("m", "well"));
        let answer = conn.answer().await.unwrap();
        assert_eq!(
            (answer.status(), answer.header("x-iop-attempts")),
            (200, Some("2"))
        );
        assert_lowered(&bench.provider(&lowered).await, Some(1));
        let results = rows(&[("provider_tunnel/unavailable/redispatched", 1)]);
        edge_rows(&bench.stack, RESULTS, &results).await;
    });
}

#[test]
fn evidence_that_is_absent_malformed_or_contradictory_lowers_nobody() {
    run(60, async {
        let mut bench = Bench::start(&[provider("p", &["m"], 2)]).await;
        let good = |t: &Tunnel| t.evidence("unavailable", 5);
        bench.refused("m", |_| None).await;
        bench.refused("m", |_| Some(String::new())).await;
        bench.refused("m", |_| Some("no JSON".to_owned())).await;
        bench.refused("m", |_| Some("{}".to_owned())).await;
        bench
            .refused("m", |t| without(good(t), "health_observation_seq"))
            .await;
        bench.refused("m", |t| without(good(t), "attempt_fence")).await;
        bench.refused("m", |t| without(good(t), "provider_health")).await;
        bench
            .refused("m", |t| changed(good(t), "health_observation_seq", json!(-1)))
            .await;
        bench
            .refused("m", |t| changed(good(t), "health_observation_seq", json!("5")))
            .await;
        bench
            .refused("m", |t| changed(good(t), "provider_health", json!("dead")))
            .await;
        bench
            .refused("m", |t| {
                changed(good(t), "liveness_classification", json!("request_stalled"))
            })
            .await;
        bench
            .refused("m", |t| changed(good(t), "failure_code", json!("provider_cut")))
            .await;
        bench
            .refused("m", |t| changed(good(t), "recovery_eligible", json!(true)))
            .await;
        let n = 13;
        decided(&bench, "rejected_ambiguous", n).await;
        let cycles = bench.summed(ELIGIBILITY, &[3]).await;
        assert_eq!(cycles.values().sum::<u64>(), n, "one row each: {cycles:?}");
        assert!(!cycles.contains_key("eligible"), "{cycles:?}");
        bench.released("p").await;
        assert_clean(&bench.provider("p").await);
        bench.assert_capacity("m", "p", 2).await;
    });
}

#[test]
fn without_a_confirmed_fence_nothing_is_replayed_and_nobody_lowered() {
    run(60, async {
        let mut bench = Bench::start(&[provider("p", &["m"], 2), provider("q", &["m"], 2)]).await;
        for fence in ["unconfirmed", "unknown"] {
            bench
                .refused("m", |t| {
                    changed(t.evidence("unavailable", 5), "attempt_fence", json!(fence))
                })
                .await;
        }
        decided(&bench, "rejected_ambiguous", 2).await;
        let cycles = rows(&[(
            "provider_tunnel/unavailable/transport_uncommitted/unconfirmed_fence",
            2,
        )]);
        edge_rows(&bench.stack, ELIGIBILITY, &cycles).await;
        for id in ["p", "q"] {
            bench.released(id).await;
            assert_clean(&bench.provider(id).await);
        }
    });
}

#[test]
fn evidence_counts_after_commit_as_well_and_is_read_from_a_stall_only() {
    run(60, async {
        let mut bench = Bench::start(&[provider("p", &["m"], 2)]).await;
        // A complete answer and another failure carry what looks like evidence: it is none.
        let mut conn = bench.open("m", "hello").await;
        let mut tunnel = bench.node.tunnel().await;
        let evidence = tunnel.evidence("unavailable", 3).to_string().replace(' ', "");
        tunnel.head(200, &[("content-type", "application/json")]);
        tunnel.data(fixtures::chat_answer("m", "well").to_string());
        tunnel.terminal(&[("iop-terminal", "complete"), ("iop-failure", &evidence)]);
        assert_eq!(conn.answer().await.unwrap().status(), 200);
        let mut conn = bench.open("m", "hello").await;
        let tunnel = bench.node.tunnel().await;
        let evidence = tunnel.evidence("unavailable", 4).to_string().replace(' ', "");
        tunnel.terminal(&[
            ("iop-terminal", "error"),
            ("iop-error-code", "provider_cut"),
            ("iop-failure", &evidence),
        ]);
        conn.answer()
            .await
            .unwrap()
            .assert_error(502, "provider_disconnected");
        edge_rows(&bench.stack, EVIDENCE, &Rows::new()).await;
        edge_rows(&bench.stack, ELIGIBILITY, &Rows::new()).await;
        assert_clean(&bench.provider("p").await);

        let client = bench.stack.client();
        let mut conn = client.open(CHAT, &fixtures::chat("m", "hello", true)).await;
        let mut tunnel = bench.node.tunnel().await;
        tunnel.head(200, &[("content-type", "text/event-stream")]);
        tunnel.data(format!("data: {}\n\n", fixtures::text_chunk("begun")));
        conn.head().await.unwrap();
        conn.until("begun").await;
        let evidence = tunnel.evidence("unavailable", 1).to_string();
        tunnel.stalled(Some(&evidence));
        let rest = String::from_utf8_lossy(&conn.body().await.unwrap()).into_owned();
        assert!(
            rest.contains("\"response_stalled\"") && !rest.contains("[DONE]"),
            "{rest}"
        );
        until_status(&bench.stack, "p", "unavailable", SOON).await;
        assert_lowered(&bench.provider("p").await, Some(1));
        edge_rows(&bench.stack, EVIDENCE, &rows(&[("stall/unavailable/applied", 1)])).await;
        let cycles = rows(&[("provider_tunnel/unavailable/stream_open/post_commit", 1)]);
        edge_rows(&bench.stack, ELIGIBILITY, &cycles).await;
        edge_rows(&bench.stack, RESULTS, &Rows::new()).await;
    });
}

#[test]
fn a_normalized_run_is_bound_as_a_tunnel_is() {
    run(60, async {
        let mut normalized = provider("p", &["m"], 2);
        normalized["normalized_targets"] = json!(["m"]);
        let mut bench = Bench::start(&[normalized]).await;
        bench
            .refused("m", |t| {
                assert_eq!(t.path, "/link/v1/runs");
                changed(t.evidence("unavailable", 5), "attempt_id", json!("another"))
            })
            .await;
        decided(&bench, "rejected_binding", 1).await;
        assert_clean(&bench.provider("p").await);
        bench.refused("m", |t| text(&t.evidence("unavailable", 2))).await;
        until_status(&bench.stack, "p", "unavailable", SOON).await;
        assert_lowered(&bench.provider("p").await, Some(2));
        let cycles = bench.summed(ELIGIBILITY, &[0, 2, 3]).await;
        let expected = rows(&[
            ("normalized/transport_uncommitted/no_owner", 1),
            ("normalized/transport_uncommitted/no_candidate", 1),
        ]);
        assert_eq!(cycles, expected);
    });
}

#[test]
fn a_stall_on_the_connection_before_says_nothing_of_the_one_after() {
    run(60, async {
        let providers = [provider("p", &["m"], 2)];
        let mut bench = Bench::start(&providers).await;
        let mut conn = bench.open("m", "hello").await;
        let tunnel = bench.node.tunnel().await;
        let newer = dial(&bench.stack, &providers).await;
        assert!(newer.generation > bench.node.generation);
        let generation = newer.generation;
        eventually("the newer connection took over", SOON, || async {
            let provider = bench.provider("p").await;
            if provider["connection_generation"] == generation {
                Ok(())
            } else {
                Err(provider.to_string())
            }
        })
        .await;
        let older = std::mem::replace(&mut bench.node, newer);
        let evidence = tunnel.evidence("unavailable", 9).to_string();
        tunnel.stalled(Some(&evidence));
        conn.answer().await.unwrap().assert_error(504, "response_stalled");
        edge_rows(
            &bench.stack,
            EVIDENCE,
            &rows(&[("stall/unavailable/rejected_stale", 1)]),
        )
        .await;
        edge_rows(&bench.stack, TRANSITIONS, &Rows::new()).await;
        assert_eq!(bench.summed(ELIGIBILITY, &[]).await.values().sum::<u64>(), 1);
        assert_clean(&bench.provider("p").await);
        drop(older);
        bench.assert_capacity("m", "p", 2).await;

        // The numbers of a connection are its own: 1 is news on the newer one.
        bench.refused("m", |t| text(&t.evidence("unavailable", 1))).await;
        until_status(&bench.stack, "p", "unavailable", SOON).await;
        assert_lowered(&bench.provider("p").await, Some(1));

        // A connection that was asked and answers too late raises nobody either.
        let command = bench.node.command(FIRST_ASK).await;
        let third = dial(&bench.stack, &providers).await;
        let generation = third.generation;
        eventually("the third connection took over", SOON, || async {
            let provider = bench.provider("p").await;
            if provider["connection_generation"] == generation {
                Ok(())
            } else {
                Err(provider.to_string())
            }
        })
        .await;
        assert_clean(&bench.provider("p").await);
        let answer = command.capabilities("available", 2);
        command.answer(200, answer.to_string());
        let second = std::mem::replace(&mut bench.node, third);
        bench.assert_capacity("m", "p", 2).await;
        assert_clean(&bench.provider("p").await);
        let applied = EVIDENCE.rows(&bench.stack.edge.scrape().await);
        assert!(!applied.contains_key("probe/available/applied"), "{applied:?}");
        edge_rows(&bench.stack, TRANSITIONS, &rows(&[("available/unavailable", 1)])).await;
        drop(second);
    });
}

#[test]
fn a_link_that_ends_without_a_terminal_is_no_stall() {
    run(60, async {
        let mut bench = Bench::start(&[provider("p", &["m"], 2)]).await;
        let mut conn = bench.open("m", "hello").await;
        let tunnel = bench.node.tunnel().await;
        let next = dial(&bench.stack, &[provider("p", &["m"], 2)]).await;
        drop(std::mem::replace(&mut bench.node, next));
        drop(tunnel);
        // Whether the new connection gets a replay is the gate's affair; here it is what it says of health.
        let answered = tokio::spawn(async move { conn.answer().await.unwrap().status() });
        if let Ok(Some(again)) = tokio::time::timeout(Duration::from_secs(2), bench.node.tunnels.recv()).await
        {
            again.complete(&fixtures::chat_answer("m", "well"));
        }
        assert!([200, 502].contains(&answered.await.unwrap()));
        edge_rows(&bench.stack, EVIDENCE, &Rows::new()).await;
        edge_rows(&bench.stack, ELIGIBILITY, &Rows::new()).await;
        edge_rows(&bench.stack, RESULTS, &Rows::new()).await;
        assert_clean(&bench.provider("p").await);
        bench.assert_capacity("m", "p", 2).await;
    });
}

/// What a node answers to CAPABILITIES, for one provider each; the lowering had the number of its place, from 1.
const NO_RECOVERY: [&str; 11] = [
    "target",
    "adapter",
    "stale",
    "older",
    "unknown",
    "unavailable",
    "garbage",
    "incomplete",
    "refused",
    "word",
    "silent",
];

#[test]
fn only_a_newer_exact_available_raises_a_lowered_provider() {
    run(90, async {
        let ids = NO_RECOVERY;
        let target = |id: &str| format!("m-{id}");
        let providers: Vec<Value> = ids.iter().map(|id| provider(id, &[&target(id)], 2)).collect();
        let mut bench = Bench::start(&providers).await;
        for (i, id) in ids.iter().enumerate() {
            let sequence = 10 + i as u64;
            bench
                .refused(&target(id), |t| text(&t.evidence("unavailable", sequence)))
                .await;
        }
        for (i, id) in ids.iter().enumerate() {
            until_status(&bench.stack, id, "unavailable", SOON).await;
            assert_lowered(&bench.provider(id).await, Some(10 + i as u64));
        }
        let lowered = ids.len() as u64;
        edge_rows(
            &bench.stack,
            EVIDENCE,
            &rows(&[("stall/unavailable/applied", lowered)]),
        )
        .await;

        // The first answers: each with one thing wrong, and one that does not come at all.
        let mut unanswered = Vec::new();
        for _ in ids {
            let command = bench.node.command(FIRST_ASK).await;
            let id = command.body["provider"].as_str().unwrap().to_owned();
            assert_eq!(
                (command.name.as_str(), &command.body["target"]),
                ("capabilities", &json!(target(&id)))
            );
            let at = 10 + ids.iter().position(|i| *i == id).unwrap() as u64;
            let mut answer = command.capabilities("available", at + 100);
            match id.as_str() {
                "target" => answer["target"] = json!("another"),
                "adapter" => answer["adapter_key"] = json!("another"),
                "stale" => answer["health_observation_seq"] = json!(at),
                "older" => answer["health_observation_seq"] = json!(1),
                "unknown" => answer["provider_status"] = json!("unknown"),
                "unavailable" => answer["provider_status"] = json!("unavailable"),
                "garbage" => answer = json!("no object"),
                "incomplete" => drop(answer.as_object_mut().unwrap().remove("health_observation_seq")),
                "refused" => {}
                "silent" => {
                    unanswered.push(command);
                    continue;
                }
                "word" => answer["provider_status"] = json!("Available"),
                other => panic!("{other} was not lowered"),
            }
            let status = if id == "refused" { 503 } else { 200 };
            command.answer(status, answer.to_string());
        }
        let seen = |of: &[(&str, u64)]| {
            let expected = rows(of);
            let bench = &bench;
            async move {
                eventually("decisions on CAPABILITIES", SOON, || async {
                    let mut seen = bench.summed(EVIDENCE, &[0, 2]).await;
                    seen.retain(|row, _| expected.contains_key(row));
                    if seen == expected {
                        Ok(())
                    } else {
                        Err(format!("{seen:?}"))
                    }
                })
                .await;
            }
        };
        seen(&[
            ("probe/rejected_binding", 2),
            ("probe/rejected_stale", 2),
            ("probe/inconclusive", 1),
            ("probe/applied", 1),
        ])
        .await;
        let probes = EVIDENCE.rows(&bench.stack.edge.scrape().await);
        assert_eq!(probes.get("probe/unavailable/applied"), Some(&1), "{probes:?}");
        assert_eq!(probes.get("probe/unknown/inconclusive"), Some(&1), "{probes:?}");
        let ambiguous = bench.summed(EVIDENCE, &[0, 2]).await["probe/rejected_ambiguous"];
        assert!(
            (3..=4).contains(&ambiguous),
            "garbage, incomplete, word; perhaps refused: {ambiguous}"
        );
        for id in ids {
            assert_lowered(&bench.provider(id).await, None);
        }
        edge_rows(
            &bench.stack,
            TRANSITIONS,
            &rows(&[("available/unavailable", lowered)]),
        )
        .await;

        // The next ones are good.
        for _ in ids {
            let command = bench.node.command(NEXT_ASK).await;
            let id = command.body["provider"].as_str().unwrap().to_owned();
            let at = 10 + ids.iter().position(|i| *i == id).unwrap() as u64;
            let answer = command.capabilities("available", at + 200);
            command.answer(200, answer.to_string());
            until_status(&bench.stack, &id, "available", SOON).await;
            assert_raised(&bench.provider(&id).await, Some(at + 200));
        }
        let transitions = rows(&[
            ("available/unavailable", lowered),
            ("unavailable/available", lowered),
        ]);
        edge_rows(&bench.stack, TRANSITIONS, &transitions).await;
        assert_eq!(unanswered.len(), 1);
        for id in ids {
            bench.assert_capacity(&target(id), id, 2).await;
        }
    });
}

#[test]
fn an_answer_about_a_target_that_is_advertised_no_more_raises_nobody() {
    run(60, async {
        let mut bench = Bench::start(&[provider("p", &["m", "n"], 2)]).await;
        bench.refused("m", |t| text(&t.evidence("unavailable", 1))).await;
        until_status(&bench.stack, "p", "unavailable", SOON).await;
        bench.node.say(&advertisement("f1", &[provider("p", &["n"], 2)]));
        eventually("the target is gone", SOON, || async {
            let provider = bench.provider("p").await;
            if provider["targets"] == json!(["n"]) {
                Ok(())
            } else {
                Err(provider.to_string())
            }
        })
        .await;
        // A new advertisement on the same connection is no evidence.
        assert_lowered(&bench.provider("p").await, Some(1));
        let command = bench.node.command(FIRST_ASK).await;
        assert_eq!(command.body["target"], "m");
        let answer = command.capabilities("available", 2);
        command.answer(200, answer.to_string());
        let expected = rows(&[
            ("stall/unavailable/applied", 1),
            ("probe/available/rejected_binding", 1),
        ]);
        edge_rows(&bench.stack, EVIDENCE, &expected).await;
        assert_lowered(&bench.provider("p").await, Some(1));
        bench
            .node
            .say(&advertisement("f1", &[provider("p", &["m", "n"], 2)]));
        let command = bench.node.command(NEXT_ASK).await;
        let answer = command.capabilities("available", 3);
        command.answer(200, answer.to_string());
        until_status(&bench.stack, "p", "available", SOON).await;
        assert_raised(&bench.provider("p").await, Some(3));
        bench.assert_capacity("n", "p", 2).await;
    });
}

#[test]
fn a_stall_that_finds_the_provider_available_is_replayed_there_with_its_one_avoidance_spent() {
    run(60, async {
        let mut bench = Bench::start(&[provider("p", &["m"], 1)]).await;
        let mut conn = bench.open("m", "hello").await;
        let first = bench.node.tunnel().await;
        let (run_id, attempt_id) = (first.field("run-id"), first.field("attempt-id"));
        let evidence = first.evidence("available", 1).to_string();
        first.stalled(Some(&evidence));
        let second = bench.node.tunnel().await;
        assert_eq!(second.field("run-id"), run_id, "the same request");
        assert_ne!(second.field("attempt-id"), attempt_id, "another attempt");
        second.complete(&fixtures::chat_answer("m", "well"));
        let answer = conn.answer().await.unwrap();
        assert_eq!(
            (answer.status(), answer.header("x-iop-attempts")),
            (200, Some("2"))
        );
        edge_rows(&bench.stack, EVIDENCE, &rows(&[("stall/available/applied", 1)])).await;
        let cycles = rows(&[("provider_tunnel/available/transport_uncommitted/eligible", 1)]);
        edge_rows(&bench.stack, ELIGIBILITY, &cycles).await;
        edge_rows(
            &bench.stack,
            RESULTS,
            &rows(&[("provider_tunnel/available/redispatched", 1)]),
        )
        .await;
        bench.assert_capacity("m", "p", 1).await;
    });
}

#[test]
fn whoever_is_proven_available_may_be_asked_again_once_nobody_else_is_left() {
    run(60, async {
        let mut bench = Bench::start(&[provider("p", &["m"], 2), provider("q", &["m"], 2)]).await;
        let mut conn = bench.open("m", "hello").await;
        let mut asked = Vec::new();
        for sequence in [1, 2] {
            let tunnel = bench.node.tunnel().await;
            asked.push(tunnel.field("provider"));
            let evidence = tunnel.evidence("available", sequence).to_string();
            tunnel.stalled(Some(&evidence));
        }
        let third = bench.node.tunnel().await;
        asked.push(third.field("provider"));
        third.complete(&fixtures::chat_answer("m", "well"));
        let answer = conn.answer().await.unwrap();
        assert_eq!(
            (answer.status(), answer.header("x-iop-attempts")),
            (200, Some("3"))
        );
        assert_ne!(asked[0], asked[1], "the other one first");
        assert_eq!(
            asked[2], asked[0],
            "never the one that stalled last, where another will do"
        );
        let cycles = rows(&[("provider_tunnel/available/transport_uncommitted/eligible", 2)]);
        edge_rows(&bench.stack, ELIGIBILITY, &cycles).await;
        edge_rows(
            &bench.stack,
            RESULTS,
            &rows(&[("provider_tunnel/available/redispatched", 2)]),
        )
        .await;
    });
}

#[test]
fn a_client_that_leaves_before_any_limit_leaves_no_row() {
    run(60, async {
        let mut bench = Bench::start(&[provider("p", &["m"], 2)]).await;
        let conn = bench.open("m", "hello").await;
        let mut tunnel = bench.node.tunnel().await;
        drop(conn);
        tunnel.given_up().await;
        edge_rows(&bench.stack, ELIGIBILITY, &Rows::new()).await;
        bench.released("p").await;
        bench.assert_capacity("m", "p", 2).await;
    });
}
