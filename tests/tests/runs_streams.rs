//! Streams of runs over edges that come and go, and edges that are told to stop (durable-scenarios §4, §10; durable-api §8 "Events").

use std::time::Duration;

use iop_tests::llm::{self, Say};
use iop_tests::run;
use iop_tests::runs::agents::{GUARDED, WORKER, all};
use iop_tests::runs::{Db, Event, Options, Sse, TERMINAL, World};
use serde_json::{Value, json};

/// The numbers of what is stored.
fn numbers(events: &[Event]) -> Vec<u64> {
    events.iter().filter_map(|e| e.id).collect()
}

/// The text of the pieces.
fn text(events: &[Event]) -> String {
    let deltas = events.iter().filter(|e| e.name == "run.turn.delta");
    deltas.filter_map(|e| e.body["data"]["text"].as_str()).collect()
}

/// A stream that broke off with its edge goes on at another one, behind the last event that was read: nothing twice, nothing left out.
#[test]
fn a_stream_goes_on_at_another_edge_where_it_broke_off() {
    run(120, async {
        let mut world = World::start(Db::Postgres, all).await;
        world.stubs.tools.honour_keys("/charge");
        world.stubs.llm.plays(
            "pay",
            vec![
                Say::call("c1", "reserve", "{}"),
                Say::call("c2", "charge", "{\"amount\":1}"),
                Say::text("paid"),
            ],
        );
        let charge = world.stubs.tools.received("/charge");
        charge.close();
        let run = world.api().run(WORKER, "pay").await;
        charge.reached(1).await;
        world.add_edge().await;
        let mut streams = [
            world.api_of(0).stream(&run, Some(0)).await,
            world.api_of(1).stream(&run, Some(0)).await,
        ];
        let mut read: Vec<Vec<Event>> = Vec::new();
        for stream in &mut streams {
            let mut seen = stream.until("run.tool.completed").await;
            seen.extend(stream.until("run.tool.started").await);
            read.push(seen);
        }
        assert_eq!(numbers(&read[0]), numbers(&read[1]));
        let [here, there] = streams;
        drop(here);
        world.kill(0).await;
        charge.reached(2).await;
        charge.open();

        let last = *numbers(&read[0]).last().unwrap();
        let mut again = world.api_of(1).stream(&run, Some(last)).await;
        let mut stays = there;
        for (mut seen, rest) in read.into_iter().zip([again.rest().await, stays.rest().await]) {
            seen.extend(rest);
            let ids = numbers(&seen);
            assert_eq!(ids, (1..=ids.len() as u64).collect::<Vec<_>>());
            let ends = seen.iter().filter(|e| e.body["data"]["outcome"].is_object());
            assert_eq!(ends.count(), 1);
            assert_eq!(seen.last().unwrap().name, "run.succeeded");
            let stored = world.api_of(1).events(&run).await;
            let told: Vec<&Value> = seen.iter().filter(|e| e.id.is_some()).map(|e| &e.body).collect();
            assert_eq!(told, stored.iter().collect::<Vec<_>>());
        }
        world.holds().await;
    });
}

/// The pieces of a turn come while the model still speaks, where its run is at work; elsewhere the turn comes as a whole.
#[test]
fn the_pieces_of_a_turn_come_while_the_model_speaks() {
    run(60, async {
        let mut world = World::start(Db::Postgres, all).await;
        let words = "one two three four five six";
        world.stubs.llm.plays("talk", vec![Say::text(words)]);
        world.stubs.llm.halfway.close();
        let run = world.api().run(WORKER, "talk").await;
        world.stubs.llm.halfway.reached(1).await;
        world.add_edge().await;
        let mut here = world.api_of(0).stream(&run, Some(0)).await;
        let mut there = world.api_of(1).stream(&run, Some(0)).await;
        assert_eq!(here.next().await.unwrap().name, "run.snapshot");
        assert_eq!(there.next().await.unwrap().name, "run.snapshot");
        there.until("run.step.started").await;
        // Who comes into the middle of a turn hears what is said from then on.
        here.until("run.step.started").await;
        world.stubs.llm.halfway.open();
        let (seen, rest) = (here.rest().await, there.rest().await);
        assert!(
            words.ends_with(&text(&seen)) && !text(&seen).is_empty(),
            "{seen:?}"
        );
        assert_eq!(text(&rest), "");
        assert_eq!(numbers(&seen), numbers(&rest));

        world.stubs.llm.plays("again", vec![Say::text(words)]);
        world.kill(1).await;
        world.edges.truncate(1);
        world.stubs.llm.asked.close();
        let run = world.api().run(WORKER, "again").await;
        world.stubs.llm.asked.reached(1).await;
        let mut stream = world.api().stream(&run, Some(0)).await;
        let mut seen = stream.until("run.step.started").await;
        world.stubs.llm.halfway.close();
        world.stubs.llm.asked.open();
        world.stubs.llm.halfway.reached(1).await;
        // The model has said half of it and waits.
        while text(&seen).split_whitespace().count() < 3 {
            seen.push(stream.next().await.unwrap());
        }
        assert_eq!(text(&seen).trim_end(), "one two three");
        assert!(seen.iter().all(|e| e.name != "run.turn.completed"));
        world.stubs.llm.halfway.open();
        seen.extend(stream.rest().await);
        assert_eq!(text(&seen), words);
        let turns = seen.iter().filter(|e| e.name == "run.turn.completed").count();
        assert_eq!((turns, seen.last().unwrap().name.as_str()), (1, "run.succeeded"));
        world.holds().await;
    });
}

/// S44: a reader that comes back for events which are not kept any more is told so, and gets the run as it is and what there is.
#[test]
fn a_reader_of_events_that_are_gone_is_told_of_the_gap() {
    run(60, async {
        let world = World::start(Db::Postgres, all).await;
        world.stubs.llm.plays(
            "ship",
            vec![Say::call("c1", "deploy", "{}"), Say::text("shipped")],
        );
        let api = world.api();
        let run = api.run(GUARDED, "ship").await;
        api.waits_on(&run, "approval", 1).await;
        world.holds().await;
        let before = api.events(&run).await.len() as u64;
        let postgres = world.postgres.as_ref().unwrap();
        let pruned = format!("DELETE FROM events WHERE run_id = '{run}' AND seq <= 3");
        postgres.sql(&pruned).unwrap();
        for after in [0, 1, 2] {
            let mut stream = api.stream(&run, Some(after)).await;
            let snapshot = stream.next().await.unwrap();
            assert_eq!(snapshot.name, "run.snapshot");
            assert_eq!(snapshot.body["data"]["gap"], true, "{after}: {snapshot:?}");
            assert_eq!(snapshot.body["data"]["run"]["status"], "waiting");
            assert_eq!(stream.next().await.unwrap().id, Some(4));
        }
        let mut stream = api.stream(&run, Some(3)).await;
        let snapshot = stream.next().await.unwrap();
        assert_eq!(snapshot.body["data"].get("gap"), None, "{snapshot:?}");
        api.approve(&run).await;
        let rest = stream.rest().await;
        let ids = numbers(&rest);
        assert_eq!(ids, (4..4 + ids.len() as u64).collect::<Vec<_>>());
        assert!(ids.len() as u64 > before - 3);
        assert_eq!(rest.last().unwrap().name, "run.succeeded");
    });
}

/// An edge that is told to stop does so in time, whatever is open: streams and waits end, what it was doing goes on elsewhere or
/// after its next start, and what was answered in time is not done again.
#[test]
fn a_drain_ends_in_time_and_its_runs_go_on() {
    run(180, async {
        for db in Db::BOTH {
            let options = Options::default().line("runs", "cancel_grace = \"4s\"");
            let mut world = World::with(db, options, all).await;
            world.stubs.tools.honour_keys("/charge");
            for (input, tool, arguments) in [
                ("pays", "charge", "{\"amount\":1}"),
                ("ships", "deploy", "{}"),
                ("moves", "launch", "{\"n\":1}"),
            ] {
                world
                    .stubs
                    .llm
                    .plays(input, vec![Say::call("c1", tool, arguments), Say::text("done")]);
            }
            world
                .stubs
                .llm
                .plays("asks", vec![Say::call("c1", "deploy", "{}"), Say::text("done")]);
            let tools = &world.stubs.tools;
            let (charge, deploy) = (tools.received("/charge"), tools.applied("/deploy"));
            let launch = world.stubs.mcp.applied("launch");
            let api = world.api();
            let asks = api.run(GUARDED, "asks").await;
            let on = api.waits_on(&asks, "approval", 1).await;
            charge.close();
            let pays = api.run(WORKER, "pays").await;
            charge.reached(1).await;
            deploy.close();
            let ships = api.run(WORKER, "ships").await;
            deploy.reached(1).await;
            launch.close();
            let moves = api.run(WORKER, "moves").await;
            launch.reached(1).await;
            world.stubs.llm.asked.close();
            let thinks = api.run(WORKER, "thinks").await;
            world.stubs.llm.asked.reached(1).await;

            let mut streams = Vec::new();
            for run in [&asks, &pays, &ships, &moves, &thinks] {
                let mut stream = api.stream(run, None).await;
                assert_eq!(stream.next().await.unwrap().name, "run.snapshot");
                streams.push(stream);
            }
            let body = json!({"agent": WORKER, "input": "is made"}).to_string();
            let sse = [("accept", "text/event-stream")];
            let conn = api.client.start("POST", "/api/v1/runs", &sse, body.as_bytes());
            let mut made = Sse::of(conn.await.unwrap()).await;
            made.until("run.step.started").await;
            world.stubs.llm.asked.reached(2).await;
            let path = format!("/api/v1/runs/{thinks}/wait?timeout=10m");
            let mut wait = api.client.start("GET", &path, &[], b"").await.unwrap();
            let body = json!({"agent": WORKER, "input": "is waited for"}).to_string();
            let path = "/api/v1/runs?wait=10m";
            let mut create = api
                .client
                .start("POST", path, &[], body.as_bytes())
                .await
                .unwrap();
            world.stubs.llm.asked.reached(3).await;
            if db == Db::Postgres {
                world.add_edge().await;
            }

            world.edges[0].process.signal("TERM");
            let mut runs = Vec::new();
            for stream in streams.iter_mut().chain([&mut made]) {
                let rest = stream.rest().await;
                assert!(stream.complete(), "a stream was cut");
                let ended = |e: &Event| TERMINAL.iter().any(|s| e.name.strip_prefix("run.") == Some(*s));
                assert!(!rest.iter().any(ended), "{rest:?}");
            }
            for (conn, expected) in [(&mut wait, 200), (&mut create, 202)] {
                let answer = conn.answer().await.unwrap();
                assert_eq!(answer.status(), expected, "{}", answer.text());
                let status = answer.json()["status"].as_str().unwrap().to_owned();
                assert!(["queued", "running"].contains(&status.as_str()), "{status}");
                runs.push(answer.json()["id"].as_str().unwrap().to_owned());
            }
            // Answered while the edge waits for what it cannot take back.
            deploy.open();
            let ended = world.edges[0].process.exit(Duration::from_secs(20)).await;
            assert!(ended.success(), "{ended}");
            world.stubs.llm.asked.open();
            charge.open();
            launch.open();
            let api = match db {
                Db::Sqlite => {
                    world.restart(0).await;
                    world.api()
                }
                Db::Postgres => world.api_of(1),
            };
            for run in runs.iter().chain([&pays, &ships, &thinks]) {
                api.succeeded(run).await;
            }
            let seen = api.until(&moves, &["ambiguous"]).await;
            assert_eq!(seen["waiting_on"][0]["tool"], "launch", "{seen}");
            assert_eq!(api.decide(&asks, &on[0], "approve", "d1").await.status(), 200);
            api.succeeded(&asks).await;
            let location = made.head.header("location").unwrap();
            api.succeeded(location.rsplit('/').next().unwrap()).await;

            let tools = &world.stubs.tools;
            assert_eq!((tools.calls("/charge").len(), tools.effects("/charge")), (2, 1));
            let told = llm::told(&world.stubs.llm.requests_of("ships")[1]);
            assert_eq!(told["c1"], "{\"ok\":true}");
            // Once for the run that was under way, once for the one that was approved.
            assert_eq!(tools.calls("/deploy").len(), 2);
            assert_eq!(world.stubs.mcp.calls("launch").len(), 1);
            world.holds().await;
        }
    });
}
