//! What a durable step costs, beside a floor measured in the same run: one bare one-row commit of the same database.
//!
//! ```sh
//! cargo run --release -p iop-durable --example bench -- sqlite --dir /var/tmp
//! cargo run --release -p iop-durable --example bench -- postgres            # starts a server of its own, fsync on
//! cargo run --release -p iop-durable --example bench -- memory              # the engine alone
//! ```
//!
//! Floors and steps alternate, so that a disk that changes its mind meets both. Payloads are 256 bytes; the call of an effect
//! step answers at once. CPU is this process's, without the database server's.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{Directive, Graph, GraphBuilder, NodeError};
use iop_durable::ids::Owner;
use iop_durable::record::{Effect, Status};
use iop_durable::runner::{Ctx, Options, Resume, Runner, Start};
use iop_durable::store::Store;
use iop_durable::store::memory::MemoryStore;
use iop_durable::store::postgres::PostgresStore;
use iop_durable::store::sqlite::SqliteStore;
use iop_durable::time::HostClock;
use serde::{Deserialize, Serialize};
use sqlx::Connection as _;

type Fallible<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const PAYLOAD: usize = 256;
const ROUNDS: usize = 5;
const STEPS: u64 = 200;
const CONCURRENT: u64 = 32;

#[derive(Clone, Serialize, Deserialize)]
struct State {
    left: u64,
    payload: String,
}

fn state(left: u64) -> State {
    State {
        left,
        payload: "x".repeat(PAYLOAD),
    }
}

/// When each step began, in one run.
#[derive(Default)]
struct Marks(std::sync::Mutex<Vec<Instant>>);

impl Marks {
    fn mark(&self) {
        if let Ok(mut marks) = self.0.lock() {
            marks.push(Instant::now());
        }
    }

    fn take(&self) -> Vec<Duration> {
        let marks = self
            .0
            .lock()
            .map(|mut marks| std::mem::take(&mut *marks))
            .unwrap_or_default();
        marks
            .windows(2)
            .filter_map(|pair| Some(pair.get(1)?.duration_since(*pair.first()?)))
            .collect()
    }
}

fn again(state: &State) -> Result<String, NodeError> {
    Ok(if state.left == 0 { "end" } else { "step" }.to_owned())
}

/// One node, entered again until nothing is left; with or without a call.
fn stepping(name: &str, effect: Option<Effect>, marks: &Arc<Marks>) -> Fallible<Graph<State>> {
    let marks = Arc::clone(marks);
    Ok(GraphBuilder::<State>::new(name, 1)
        .node("step", move |ctx: Ctx, mut state: State| {
            marks.mark();
            async move {
                state.left -= 1;
                if let Some(effect) = effect {
                    let input = state.payload.clone();
                    ctx.activity("call")
                        .effect(effect)
                        .run(input, |call| async move { Ok(call.input) })
                        .await?;
                }
                Ok((state, Directive::completed()))
            }
        })
        .node("end", |_: Ctx, state: State| async move {
            Ok((state, Directive::end()))
        })
        .conditional_edge("step", &["step", "end"], again)
        .terminal("end")
        .max_steps(1_000_000)
        .compile()?)
}

/// One node with calls one after another, interrupted behind the last one in its first life.
fn replaying(calls: u32) -> Fallible<Graph<State>> {
    Ok(GraphBuilder::<State>::new("replay", 1)
        .node("calls", move |ctx: Ctx, state: State| async move {
            for n in 0..calls {
                let input = state.payload.clone();
                let call = ctx.activity(&format!("call-{n}")).effect(Effect::Idempotent);
                call.run(input, |call| async move { Ok(call.input) }).await?;
            }
            if ctx.life() == 1 {
                return Err(Failure::new(FailureKind::Unavailable, "interrupted").into());
            }
            Ok((state, Directive::end()))
        })
        .terminal("calls")
        .compile()?)
}

enum Database {
    Memory,
    Sqlite(PathBuf),
    Postgres(String),
}

/// A bare connection for floors.
enum Floor {
    Memory,
    Sqlite(Box<sqlx::SqliteConnection>),
    Postgres(Box<sqlx::PgConnection>),
}

impl Floor {
    async fn open(database: &Database) -> Fallible<Self> {
        Ok(match database {
            Database::Memory => Self::Memory,
            Database::Sqlite(dir) => {
                let options = sqlx::sqlite::SqliteConnectOptions::new()
                    .filename(dir.join("floor.db"))
                    .create_if_missing(true)
                    .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)
                    .synchronous(sqlx::sqlite::SqliteSynchronous::Full);
                let mut connection = sqlx::SqliteConnection::connect_with(&options).await?;
                let create = "CREATE TABLE floor (n INTEGER PRIMARY KEY, payload BLOB)";
                sqlx::query(create).execute(&mut connection).await?;
                Self::Sqlite(Box::new(connection))
            }
            Database::Postgres(url) => {
                let mut connection = sqlx::PgConnection::connect(url).await?;
                let create = "CREATE TABLE floor (n BIGSERIAL PRIMARY KEY, payload BYTEA)";
                sqlx::query(create).execute(&mut connection).await?;
                Self::Postgres(Box::new(connection))
            }
        })
    }

    /// So many commits of one row each, one after another.
    async fn measure(&mut self, commits: u32) -> Fallible<Vec<Duration>> {
        let payload = vec![7u8; PAYLOAD];
        let mut spans = Vec::new();
        for _ in 0..commits {
            let start = Instant::now();
            match self {
                Self::Memory => {}
                Self::Sqlite(connection) => {
                    let insert = sqlx::query("INSERT INTO floor (payload) VALUES (?)").bind(&payload);
                    insert.execute(&mut **connection).await?;
                }
                Self::Postgres(connection) => {
                    let insert = sqlx::query("INSERT INTO floor (payload) VALUES ($1)").bind(&payload);
                    insert.execute(&mut **connection).await?;
                }
            }
            spans.push(start.elapsed());
        }
        Ok(spans)
    }
}

async fn open(database: &Database) -> Fallible<Arc<dyn Store>> {
    Ok(match database {
        Database::Memory => Arc::new(MemoryStore::new(Arc::new(HostClock::new()))),
        Database::Sqlite(dir) => Arc::new(SqliteStore::open(&dir.join("bench.db")).await?),
        Database::Postgres(url) => Arc::new(PostgresStore::connect(url).await?),
    })
}

fn runner(graph: Graph<State>, store: &Arc<dyn Store>) -> Fallible<Runner<State>> {
    Ok(Runner::new(
        Arc::new(graph),
        Arc::clone(store),
        Options::new(Owner::new("bench")?),
    )?)
}

fn p50(spans: &mut [Duration]) -> Duration {
    spans.sort_unstable();
    spans.get(spans.len() / 2).copied().unwrap_or_default()
}

fn ms(span: Duration) -> f64 {
    span.as_secs_f64() * 1e3
}

/// CPU time of this process so far, in the kernel's ticks of 10 ms.
fn cpu() -> Fallible<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let after = stat.rsplit(") ").next().ok_or("stat")?;
    let fields: Vec<&str> = after.split(' ').collect();
    let user = fields.get(11).ok_or("utime")?.parse::<u64>()?;
    let system = fields.get(12).ok_or("stime")?.parse::<u64>()?;
    Ok(Duration::from_millis((user + system) * 10))
}

fn files(dir: &Path) -> Fallible<u64> {
    let mut total = 0;
    for file in std::fs::read_dir(dir)? {
        let file = file?;
        if file.file_name().to_string_lossy().starts_with("bench.db") {
            total += file.metadata()?.len();
        }
    }
    Ok(total)
}

/// Bytes the database has on disk.
async fn stored(database: &Database) -> Fallible<u64> {
    match database {
        Database::Memory => Ok(0),
        Database::Sqlite(dir) => {
            let options = sqlx::sqlite::SqliteConnectOptions::new().filename(dir.join("bench.db"));
            let mut connection = sqlx::SqliteConnection::connect_with(&options).await?;
            sqlx::query("PRAGMA wal_checkpoint(TRUNCATE)")
                .execute(&mut connection)
                .await?;
            connection.close().await?;
            files(dir)
        }
        Database::Postgres(url) => {
            let mut connection = sqlx::PgConnection::connect(url).await?;
            sqlx::query("VACUUM FULL").execute(&mut connection).await?;
            let size = sqlx::query_scalar("SELECT pg_database_size(current_database())");
            let bytes: i64 = size.fetch_one(&mut connection).await?;
            Ok(u64::try_from(bytes)?)
        }
    }
}

async fn one(runner: &Runner<State>, steps: u64) -> Fallible<()> {
    let result = runner.start(Start::new(state(steps))).await?;
    if result.status == Status::Succeeded {
        Ok(())
    } else {
        Err(format!("the run ended {}", result.status).into())
    }
}

/// Steps a second over all runs, and CPU per step.
async fn many(runner: &Runner<State>, steps: u64) -> Fallible<(f64, Duration)> {
    let (start, before) = (Instant::now(), cpu()?);
    let runs = (0..CONCURRENT).map(|_| {
        let runner = runner.clone();
        async move { one(&runner, steps).await }
    });
    let mut set = tokio::task::JoinSet::new();
    runs.for_each(|run| {
        set.spawn(run);
    });
    while let Some(done) = set.join_next().await {
        done??;
    }
    // The step that ends a run counts too.
    let total = CONCURRENT * (steps + 1);
    let rate = total as f64 / start.elapsed().as_secs_f64();
    Ok((rate, cpu()?.saturating_sub(before) / u32::try_from(total)?))
}

async fn measure(database: &Database) -> Fallible<()> {
    let store = open(database).await?;
    let marks = Arc::new(Marks::default());
    let pure = runner(stepping("pure", None, &marks)?, &store)?;
    let effect = runner(stepping("effect", Some(Effect::Idempotent), &marks)?, &store)?;
    let mut floor = Floor::open(database).await?;
    one(&pure, 20).await?;
    one(&effect, 20).await?;
    floor.measure(50).await?;
    marks.take();

    let (mut floors, mut pures, mut effects) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        floors.extend(floor.measure(200).await?);
        one(&pure, STEPS).await?;
        pures.extend(marks.take());
        floors.extend(floor.measure(200).await?);
        one(&effect, STEPS).await?;
        effects.extend(marks.take());
    }
    let rate = floors.len() as f64 / floors.iter().sum::<Duration>().as_secs_f64().max(1e-9);
    let (floor_p50, pure_p50, effect_p50) =
        (ms(p50(&mut floors)), ms(p50(&mut pures)), ms(p50(&mut effects)));
    println!("floor, a one-row commit   p50 {floor_p50:.3} ms, {rate:.0}/s");
    println!(
        "pure step                 p50 {pure_p50:.3} ms, aim {:.3} ms",
        1.3 * floor_p50 + 0.3
    );
    println!(
        "step with one effect      p50 {effect_p50:.3} ms, aim {:.3} ms",
        2.4 * floor_p50 + 0.5
    );

    for _ in 0..3 {
        let (rate, cpu) = many(&pure, 200).await?;
        marks.take();
        println!(
            "{CONCURRENT} runs at once           {rate:.0} steps/s, {} us of CPU a step",
            cpu.as_micros()
        );
    }
    println!(
        "                          aim {:.0} steps/s, 150 us",
        (4.0 * rate).min(6000.0)
    );

    let replay = runner(replaying(100)?, &store)?;
    let mut replays = Vec::new();
    for _ in 0..9 {
        let failed = replay.start(Start::new(state(0))).await?;
        let start = Instant::now();
        let done = replay.resume(&failed.token, Resume::new()).await?;
        replays.push(start.elapsed());
        if done.status != Status::Succeeded {
            return Err("the replay did not succeed".into());
        }
    }
    let replay_p50 = ms(p50(&mut replays));
    println!("resume over 100 calls     p50 {replay_p50:.2} ms with its two commits, aim 15 ms");

    let sized = runner(stepping("sized", Some(Effect::Idempotent), &marks)?, &store)?;
    let mut grown = Vec::new();
    let mut last = stored(database).await?;
    for steps in [100, 200] {
        for _ in 0..10 {
            one(&sized, steps).await?;
        }
        let size = stored(database).await?;
        grown.push(size.saturating_sub(last) / 10);
        last = size;
    }
    if let [hundred, two_hundred] = grown[..]
        && hundred > 0
    {
        let (few, many) = (hundred / 1024, two_hundred / 1024);
        let ratio = two_hundred as f64 / hundred as f64;
        println!("stored for 100 steps      {few} KiB, for 200 {many} KiB: {ratio:.2}x, aim 2.2x");
    }
    Ok(())
}

const USAGE: &str = "usage: bench sqlite [--dir DIR] | postgres | memory\n\
    The figures stand beside the aims of durable-api section 7. Build with --release to compare them.";

/// What to measure; a database of SQLite in this directory or the system's.
fn arguments(args: &[String]) -> Option<(&str, PathBuf)> {
    match args {
        [which] if ["sqlite", "postgres", "memory"].contains(&which.as_str()) => {
            Some((which, std::env::temp_dir()))
        }
        [which, flag, dir] if which == "sqlite" && flag == "--dir" => Some((which, PathBuf::from(dir))),
        _ => None,
    }
}

async fn run(which: &str, dir: &Path) -> Fallible<()> {
    match which {
        "memory" => measure(&Database::Memory).await,
        "sqlite" => {
            let place = tempfile::tempdir_in(dir).map_err(|error| {
                format!("no directory can be made in {}: {}", dir.display(), error.kind())
            })?;
            measure(&Database::Sqlite(place.path().to_owned())).await
        }
        _ => {
            let options = iop_tests::postgres::Options {
                fsync: true,
                ..Default::default()
            };
            let mut server = iop_tests::postgres::Postgres::with(options).await;
            let mut terminated = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
            let database = Database::Postgres(server.url());
            let done = tokio::select! {
                done = measure(&database) => done,
                _ = terminated.recv() => Err("terminated".into()),
                _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
            };
            server.stop().await;
            done
        }
    }
}

fn main() -> std::process::ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some((which, dir)) = arguments(&args) else {
        eprintln!("{USAGE}");
        return std::process::ExitCode::from(2);
    };
    let which = which.to_owned();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    // A task of the runtime's workers, as the runs of a host are: a thread outside of them is woken by another for each answer.
    let measured = runtime.map_err(Into::into).and_then(|runtime| {
        let task = runtime.spawn(async move { run(&which, &dir).await });
        runtime.block_on(task)?
    });
    match measured {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
