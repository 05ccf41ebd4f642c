//! What runs cost (durable-api §7): acceptance and the way from a decision to its tool at 100 runs at once, each beside the floor of
//! the same run, a bare commit of one row. Once with a model that takes its time, and once with one that takes none, so that nothing
//! but the machine's cores bounds how many decisions there are at once. Then 10,000 waiting runs: their start, their rest, a
//! decision among them.
//!
//! `cargo run --release -p iop-tests --example bench_runs -- sqlite|postgres [DIR]`; `IOP_BIN_DIR` says where the edge is. The
//! SQLite file lies under `DIR`, the temporary directory when it is not given.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use iop_tests::client::Client;
use iop_tests::postgres::{Options, Postgres};
use iop_tests::provider::Stub;
use iop_tests::stack::Edge;
use parking_lot::Mutex;
use serde_json::{Value, json};
use sqlx::Connection as _;
use tokio::sync::oneshot;

/// Runs at once.
const AT_ONCE: usize = 100;
/// Acceptances and decisions that are measured.
const MEASURED: usize = 2_000;
const WAITING: usize = 10_000;
const FLOORS: usize = 500;

/// Who waits for a run's tool to be called: its run id, and where the moment goes.
type Expected = Arc<Mutex<HashMap<String, oneshot::Sender<Instant>>>>;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let postgres = match args.first().map(String::as_str) {
        Some("sqlite") => false,
        Some("postgres") => true,
        _ => panic!("usage: bench_runs sqlite|postgres [DIR]"),
    };
    let dir = match args.get(1) {
        Some(dir) => tempfile::tempdir_in(dir).unwrap(),
        None => tempfile::tempdir().unwrap(),
    };
    iop_tests::run(1800, async move {
        let server = if postgres {
            Some(
                Postgres::with(Options {
                    fsync: true,
                    ..Options::default()
                })
                .await,
            )
        } else {
            None
        };
        bench(dir.path(), server.as_ref()).await;
    });
}

async fn bench(dir: &Path, server: Option<&Postgres>) {
    let expected = Expected::default();
    let tools = tools(Arc::clone(&expected)).await;
    let url = match server {
        Some(server) => server.url(),
        None => format!("sqlite://{}", dir.join("iop.db").display()),
    };
    let toml = configuration(&url, &tools.url());
    let start = |n: u32| {
        let (dir, toml) = (dir.join(format!("edge-{n}")), toml.clone());
        async move {
            std::fs::create_dir_all(&dir).unwrap();
            Edge::start(&dir, &toml, &[], None).await
        }
    };
    let mut edge = start(1).await;
    let client = edge.client();

    let before = floor(dir, server).await;
    let mut measured = Vec::new();
    for (agent, model) in [("asks", "400 ms"), ("asks-at-once", "0 ms")] {
        let (cpu, began) = (edge.process.cpu(), Instant::now());
        let cycles = cycles(&client, agent, &expected).await;
        let (cpu, took) = (edge.process.cpu() - cpu, began.elapsed());
        measured.push((model, cycles, cpu, took));
    }
    let after = floor(dir, server).await;
    let floor = (before + after) / 2;
    let name = if server.is_some() { "PostgreSQL" } else { "SQLite" };
    println!(
        "\n{name}, {AT_ONCE} runs at once, floor (one bare commit, p50) {}\n",
        ms(floor)
    );
    println!("| a turn takes | | p50 | p99 | mark for p99 | runs/s | CPU of the edge per run |");
    println!("|---|---|---|---|---|---|---|");
    for (model, cycles, cpu, took) in measured {
        let (accepted, dispatched): (Vec<_>, Vec<_>) = cycles.into_iter().unzip();
        let rate = accepted.len() as f64 / took.as_secs_f64();
        let cpu = ms(cpu / u32::try_from(accepted.len()).unwrap());
        for (what, mut times, base) in [
            ("accept", accepted, Duration::from_millis(10)),
            ("decision to dispatch", dispatched, Duration::from_millis(50)),
        ] {
            times.sort();
            let (p50, p99) = (ms(at(&times, 50)), ms(at(&times, 99)));
            let mark = ms(base + 2 * floor);
            println!("| {model} | {what} | {p50} | {p99} | {mark} | {rate:.0} | {cpu} |");
        }
    }

    let began = Instant::now();
    wait_all(&client).await;
    println!(
        "\n{WAITING} runs brought to their approval in {:.1} s",
        began.elapsed().as_secs_f64()
    );
    edge.process.kill().await;
    let began = Instant::now();
    let edge = start(2).await;
    println!("started again beside them in {}", ms(began.elapsed()));
    // What a start does is over.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let (cpu, rest) = (edge.process.cpu(), Duration::from_secs(20));
    tokio::time::sleep(rest).await;
    let used = edge.process.cpu() - cpu;
    println!(
        "at rest: {:.2} % of one core, {} MiB",
        100.0 * used.as_secs_f64() / rest.as_secs_f64(),
        edge.process.rss_bytes() >> 20
    );
    let client = edge.client();
    let page = get(&client, "/api/v1/approvals?status=pending&limit=200").await;
    let mut times = Vec::new();
    for approval in page["data"].as_array().unwrap() {
        times.push(decide(&client, &expected, approval).await);
    }
    times.sort();
    println!(
        "decision to dispatch among them: p50 {}, p99 {}",
        ms(at(&times, 50)),
        ms(at(&times, 99))
    );
}

fn configuration(store: &str, tools: &str) -> String {
    format!(
        r#"
[server]
listen = "127.0.0.1:0"
[store]
url = "{store}"
[runs]
workers = 128
[telemetry]
log = "warn"
[[providers]]
id = "p"
adapter = "scripted"
capacity = 1000
[providers.script.asks]
reply = "done"
first_delay = "400ms"
tool_calls = [{{ name = "deploy", arguments = '{{"region":"eu"}}' }}]
[providers.script.asks-at-once]
reply = "done"
tool_calls = [{{ name = "deploy", arguments = '{{"region":"eu"}}' }}]
[agents.asks]
model = "asks"
durable = true
approvals = {{ default = "always" }}
[[agents.asks.tools]]
name = "deploy"
http = {{ method = "POST", url = "{tools}/deploy" }}
[agents.asks-at-once]
model = "asks-at-once"
durable = true
approvals = {{ default = "always" }}
[[agents.asks-at-once.tools]]
name = "deploy"
http = {{ method = "POST", url = "{tools}/deploy" }}
"#
    )
}

/// The tool: says when each run called it.
async fn tools(expected: Expected) -> Stub {
    Stub::start(move |mut exchange| {
        let arrived = Instant::now();
        let key = exchange.header("idempotency-key").unwrap_or_default().to_owned();
        let run = key.split('/').next().unwrap_or_default();
        if let Some(told) = expected.lock().remove(run) {
            let _ = told.send(arrived);
        }
        async move {
            exchange
                .reply(200, &[("content-type", "application/json")], b"{}")
                .await
        }
    })
    .await
}

async fn get(client: &Client, path: &str) -> Value {
    let answer = client.get(path).await;
    assert_eq!(answer.status(), 200, "{path}: {}", answer.text());
    answer.json()
}

async fn accept(client: &Client, agent: &str) -> (String, Duration) {
    let began = Instant::now();
    let answer = client
        .post(
            "/api/v1/runs",
            &json!({ "agent": agent, "input": "x".repeat(256) }),
        )
        .await;
    let took = began.elapsed();
    assert_eq!(answer.status(), 202, "{}", answer.text());
    (answer.json()["id"].as_str().unwrap().to_owned(), took)
}

/// Runs from their acceptance over an approval to their end, one after the other per client: how long the acceptance took, and how
/// long the way from the decision to the tool.
async fn cycles(client: &Client, agent: &str, expected: &Expected) -> Vec<(Duration, Duration)> {
    let one = |n: usize| async move {
        let mut times = Vec::new();
        // Not in step with the others.
        tokio::time::sleep(Duration::from_millis(8) * u32::try_from(n).unwrap()).await;
        for _ in 0..MEASURED / AT_ONCE {
            let (run, accepted) = accept(client, agent).await;
            get(client, &format!("/api/v1/runs/{run}/wait?timeout=25s")).await;
            let approvals = get(client, &format!("/api/v1/runs/{run}/approvals")).await;
            let dispatched = decide(client, expected, &approvals["data"][0]).await;
            times.push((accepted, dispatched));
            get(client, &format!("/api/v1/runs/{run}/wait?timeout=25s")).await;
        }
        times
    };
    join_all((0..AT_ONCE).map(one)).await.concat()
}

/// From sending the decision to the call of the tool.
async fn decide(client: &Client, expected: &Expected, approval: &Value) -> Duration {
    let run = approval["run_id"].as_str().unwrap().to_owned();
    let id = approval["id"].as_str().unwrap();
    let (tell, told) = oneshot::channel();
    expected.lock().insert(run.clone(), tell);
    let body = json!({ "decision": "approve", "decision_id": format!("d-{id}"), "arguments_digest": approval["arguments_digest"] });
    let path = format!("/api/v1/runs/{run}/approvals/{id}");
    let began = Instant::now();
    let (answer, arrived) = tokio::join!(
        client.post(&path, &body),
        tokio::time::timeout(Duration::from_secs(30), told)
    );
    assert_eq!(answer.status(), 200, "{}", answer.text());
    match arrived {
        Ok(arrived) => arrived.unwrap().duration_since(began),
        Err(_) => panic!(
            "not dispatched: {}",
            get(client, &format!("/api/v1/runs/{run}")).await
        ),
    }
}

/// Brings runs to their approvals.
async fn wait_all(client: &Client) {
    let one = || async {
        for _ in 0..WAITING / AT_ONCE {
            accept(client, "asks-at-once").await;
        }
    };
    join_all((0..AT_ONCE).map(|_| one())).await;
    iop_tests::eventually("all runs wait", Duration::from_secs(600), || async {
        for status in ["queued", "running"] {
            let page = get(client, &format!("/api/v1/runs?status={status}&limit=1")).await;
            if page["data"].as_array().is_none_or(|data| !data.is_empty()) {
                return Err(format!("some are {status}"));
            }
        }
        Ok(())
    })
    .await;
}

/// The median of bare commits of one row: SQLite with `synchronous=FULL` on the same disk, PostgreSQL on one connection.
async fn floor(dir: &Path, server: Option<&Postgres>) -> Duration {
    let mut times = Vec::with_capacity(FLOORS);
    let insert = "INSERT INTO floor (payload) VALUES ($1)";
    let payload = vec![0_u8; 256];
    match server {
        Some(server) => {
            let mut conn = sqlx::PgConnection::connect(&server.url()).await.unwrap();
            let create = "CREATE TABLE IF NOT EXISTS floor (n BIGSERIAL PRIMARY KEY, payload BYTEA)";
            sqlx::query(create).execute(&mut conn).await.unwrap();
            for _ in 0..FLOORS {
                let began = Instant::now();
                sqlx::query(insert)
                    .bind(&payload)
                    .execute(&mut conn)
                    .await
                    .unwrap();
                times.push(began.elapsed());
            }
        }
        None => {
            let file: PathBuf = dir.join("floor.db");
            let options = sqlx::sqlite::SqliteConnectOptions::new()
                .filename(file)
                .create_if_missing(true)
                .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)
                .synchronous(sqlx::sqlite::SqliteSynchronous::Full);
            let mut conn = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
            let create = "CREATE TABLE IF NOT EXISTS floor (n INTEGER PRIMARY KEY, payload BLOB)";
            sqlx::query(create).execute(&mut conn).await.unwrap();
            for _ in 0..FLOORS {
                let began = Instant::now();
                sqlx::query(insert)
                    .bind(&payload)
                    .execute(&mut conn)
                    .await
                    .unwrap();
                times.push(began.elapsed());
            }
        }
    }
    times.sort();
    at(&times, 50)
}

/// The percentile of sorted times.
fn at(times: &[Duration], percent: usize) -> Duration {
    times[(times.len() * percent / 100).min(times.len() - 1)]
}

fn ms(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1000.0)
}
