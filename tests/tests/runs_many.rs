//! Very many runs that wait cost nothing but their place in the store.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use iop_tests::llm::Say;
use iop_tests::runs::agents::{GUARDED, all};
use iop_tests::runs::{Db, Options, World};
use iop_tests::{eventually, run};

const WAITING: usize = 10_000;
const AT_ONCE: usize = 50;
const INPUT: &str = "ship";

#[test]
fn ten_thousand_waiting_runs_cost_no_worker_and_start_in_seconds() {
    run(400, async {
        let options = Options {
            lease_ttl: Duration::from_secs(30),
            poll_interval: Duration::from_secs(1),
            workers: 64,
            ..Options::default()
        }
        .line("telemetry", "log = \"warn\"");
        let mut world = World::with(Db::Sqlite, options, all).await;
        let turns = vec![Say::call("c1", "deploy", r#"{"region":"eu"}"#), Say::text("done")];
        world.stubs.llm.plays(INPUT, turns);
        let api = world.api();
        let some = || async {
            for _ in 0..WAITING / AT_ONCE {
                api.run(GUARDED, INPUT).await;
            }
        };
        join_all((0..AT_ONCE).map(|_| some())).await;
        eventually("all of them wait", Duration::from_secs(200), || async {
            let page = world.edges[0].scrape().await;
            let waiting = page.sum("iop_edge_approvals_pending", &[]);
            if waiting >= WAITING as f64 {
                Ok(())
            } else {
                Err(format!("{waiting}"))
            }
        })
        .await;

        world.kill(0).await;
        let began = Instant::now();
        world.restart(0).await;
        let started = began.elapsed();
        assert!(started < Duration::from_secs(10), "started in {started:?}");
        let edge = &world.edges[0];
        eventually("they are counted again", Duration::from_secs(30), || async {
            let page = edge.scrape().await;
            let (waiting, busy) = (
                page.sum("iop_edge_runs", &[("status", "waiting")]),
                page.sum("iop_edge_run_workers_busy", &[]),
            );
            if waiting >= WAITING as f64 && busy == 0.0 {
                Ok(())
            } else {
                Err(format!("{waiting} waiting, {busy} workers busy"))
            }
        })
        .await;
        // An idle process polls once a second and counts every few seconds; 10,000 places in the store change nothing of that.
        let rest = Duration::from_secs(10);
        let before = edge.process.cpu();
        tokio::time::sleep(rest).await;
        let used = edge.process.cpu() - before;
        assert!(used < rest / 20, "{used:?} of processor time in {rest:?} at rest");

        let api = world.api();
        let pending = api.seen("/approvals?limit=1").await["data"][0].clone();
        let run = pending["run_id"].as_str().unwrap();
        assert_eq!(api.decide(run, &pending, "approve", "d1").await.status(), 200);
        world.stubs.tools.called("/deploy", 1).await;
        api.succeeded(run).await;
    });
}
