//! Stores that fail under a running edge (durable-scenarios §8): a disk that is full, and a database whose answers get lost after it
//! has done what it was told.

use std::time::Duration;

use iop_tests::client::Answer;
use iop_tests::db_proxy::DbProxy;
use iop_tests::full_disk::Disk;
use iop_tests::llm::Say;
use iop_tests::process::finish;
use iop_tests::runs::agents::{GUARDED, WORKER, all};
use iop_tests::runs::{Api, Db, Options, World, encode};
use iop_tests::{eventually, run};
use serde_json::{Value, json};

/// Asks until the store can be reached. A request that says who it is may be repeated.
async fn until_answered(what: &str, ask: impl AsyncFn() -> Answer) -> Answer {
    eventually(what, Duration::from_secs(30), || async {
        let answer = ask().await;
        if answer.status() == 503 {
            answer.assert_error(503, "store_unavailable");
            return Err(answer.text());
        }
        Ok(answer)
    })
    .await
}

async fn refused_commits(world: &World) -> f64 {
    let page = world.edges[0].scrape().await;
    page.sum("iop_edge_checkpoint_errors_total", &[])
}

/// Waits until a worker was refused what it wanted to store.
async fn is_refused(world: &World, before: f64) {
    eventually("a commit is refused", Duration::from_secs(20), || async {
        let now = refused_commits(world).await;
        if now > before {
            Ok(())
        } else {
            Err(format!("{now} refused"))
        }
    })
    .await;
}

/// Every checkpoint of a run can be read with its digest: none was torn.
async fn checkpoints_are_whole(api: &Api, run: &str) {
    for item in api.all(&format!("/runs/{run}/history")).await {
        let (revision, digest) = (
            item["revision"].as_str().unwrap(),
            item["digest"].as_str().unwrap(),
        );
        let path = format!("/runs/{run}/history/{revision}?digest={}", encode(digest));
        let answer = api.get(&path).await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
    }
}

/// S93: a disk that is full while a turn, a decision and a tool's answer are saved, and while the edge starts.
#[test]
fn a_full_disk_loses_nothing_and_repeats_nothing() {
    run(120, async {
        let disk = Disk::with_room();
        let options = Options {
            // Longer than the disk is full: what a worker could not store it still has.
            lease_ttl: Duration::from_secs(30),
            env: disk.env(),
            ..Options::default()
        };
        let mut world = World::with(Db::Sqlite, options, all).await;
        let api = world.api();
        let plan = vec![Say::call("c1", "deploy", "{}"), Say::text("deployed")];
        world.stubs.llm.plays("full", plan);
        let asked = world.stubs.llm.asked.clone();
        asked.close();
        let run = api.run(GUARDED, "full").await;
        asked.reached(1).await;

        // A turn.
        let before = refused_commits(&world).await;
        disk.fill();
        asked.open();
        is_refused(&world, before).await;
        let refused = api
            .post("/runs", &json!({"agent": WORKER, "input": "no room"}))
            .await;
        refused.assert_error(503, "store_unavailable");
        assert!(refused.header("retry-after").is_some());
        let seen = api.seen_run(&run).await;
        assert_eq!(
            (&seen["status"], &seen["waiting_on"]),
            (&json!("running"), &json!([]))
        );
        disk.empty();
        let on = api.waits_on(&run, "approval", 1).await;

        // A decision.
        disk.fill();
        let refused = api.decide(&run, &on[0], "approve", "d1").await;
        refused.assert_error(503, "store_unavailable");
        assert_eq!(api.seen_run(&run).await["status"], "waiting");
        assert!(world.stubs.tools.calls("/deploy").is_empty());
        disk.empty();

        // What a tool answered.
        let received = world.stubs.tools.received("/deploy");
        received.close();
        let decided = until_answered("the decision is taken", async || {
            api.decide(&run, &on[0], "approve", "d1").await
        });
        assert_eq!(decided.await.status(), 200);
        received.reached(1).await;
        let before = refused_commits(&world).await;
        disk.fill();
        received.open();
        is_refused(&world, before).await;
        disk.empty();
        let seen = api.succeeded(&run).await;
        assert_eq!(seen["outcome"]["output"], "deployed");
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
        assert_eq!(world.stubs.llm.requests_of("full").len(), 2);
        checkpoints_are_whole(&api, &run).await;

        // A start.
        asked.close();
        let run = api.run(WORKER, "killed").await;
        asked.reached(1).await;
        disk.fill();
        world.kill(0).await;
        let dir = world.dir.path().join("edge-0");
        let file = dir.join("edge.toml");
        let args = ["--config", file.to_str().unwrap()];
        let refused = finish("iop-edge", &args, &disk.env(), &dir).await;
        assert_eq!(refused.code, Some(1), "{}", refused.stderr);
        assert!(refused.stderr.contains("iop.db"), "{}", refused.stderr);
        disk.empty();
        world.restart(0).await;
        asked.open();
        world.api().succeeded(&run).await;
        checkpoints_are_whole(&world.api(), &run).await;
        world.holds().await;
    });
}

/// One run from its acceptance over a pause and a decision to its end, its client being one that asks again.
async fn whole_run(world: &World, name: &str) -> Value {
    let api = world.api();
    let plan = vec![
        Say::calls(&[("c1", "deploy", "{}"), ("c2", "reserve", "{}")]),
        Say::text("deployed"),
    ];
    world.stubs.llm.plays(name, plan);
    let body = json!({"agent": GUARDED, "input": name, "run_id": name});
    let made = until_answered("the run is accepted", async || {
        api.create_with(&body, &[("idempotency-key", name)]).await
    });
    let made = made.await;
    assert!([200, 202].contains(&made.status()), "{}", made.text());
    let on = api.waits_on(name, "approval", 1).await;
    let decided = until_answered("the decision is taken", async || {
        api.decide(name, &on[0], "approve", "d1").await
    });
    let decided = decided.await;
    assert_eq!(decided.status(), 200, "{}", decided.text());
    api.succeeded(name).await
}

/// How many answers of statements with this text a run has, each lost in a run of its own.
async fn lose_each(world: &World, proxy: &DbProxy, of: &'static str) -> u64 {
    let api = world.api();
    for n in 0.. {
        let calls = world.stubs.tools.calls("/deploy").len();
        let name = format!("{}-{n}", of.split(' ').next_back().unwrap());
        proxy.lose(of, n);
        let seen = whole_run(world, &name).await;
        if !proxy.lost() {
            return n;
        }
        assert_eq!(seen["outcome"]["output"], "deployed", "{seen}");
        assert_eq!(world.stubs.tools.calls("/deploy").len(), calls + 1, "{name}");
        assert_eq!(world.stubs.llm.requests_of(&name).len(), 2, "{name}");
        let approvals = api.all(&format!("/runs/{name}/approvals")).await;
        assert_eq!(approvals.len(), 1, "{name}: {approvals:?}");
    }
    unreachable!("runs have ends");
}

/// S86: whichever answer of the database is lost after the write, of a creation, a pause, a decision or an end: the run goes on at once,
/// as if it had come; nobody is told of a conflict with himself, and nothing happens twice.
#[test]
fn an_answer_lost_after_the_write_is_nobodys_loss() {
    run(180, async {
        let options = Options {
            // Longer than anybody waits here: who lost his lease over it would be late.
            lease_ttl: Duration::from_secs(300),
            ..Options::default()
        };
        let (world, proxy) = World::behind_proxy(options, all).await;
        let commits = lose_each(&world, &proxy, "INSERT INTO checkpoints").await;
        let posts = lose_each(&world, &proxy, "signal = t.signal + 1, cancel").await;
        assert!(commits >= 6 && posts >= 1, "{commits} commits, {posts} posts");
        world.holds().await;
    });
}

/// S86: a lease whose holder does not know of it costs its time, and no more.
#[test]
fn a_lease_given_unheard_is_given_again() {
    run(120, async {
        let (world, proxy) = World::behind_proxy(Options::default(), all).await;
        let leases = lose_each(&world, &proxy, "INSERT INTO run_leases AS t").await;
        assert!(leases >= 1, "{leases} leases");
        world.holds().await;
    });
}
