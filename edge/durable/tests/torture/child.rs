//! A process that plays everybody around one run, on a durable store, until the run is over or a fault ends it; and how a test
//! starts itself as one.

use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use iop_durable::ids::RunId;
use iop_durable::store::Store;
use iop_durable::store::postgres::PostgresStore;
use iop_durable::store::sqlite::SqliteStore;
use iop_durable::testing::fault::Op;
use iop_durable::testing::{Fault, FaultStore};
use serde::{Deserialize, Serialize};

use super::driver::{Driver, Mode, is_passing};
use super::graph::everything;
use super::ledger::{FileLedger, Ledger};
use super::recorder::Recorder;
use super::world::World;

/// Where runs are stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Database {
    Sqlite(PathBuf),
    Postgres(String),
}

impl Database {
    pub async fn open(&self) -> Arc<dyn Store> {
        match self {
            Self::Sqlite(path) => Arc::new(SqliteStore::open(path).await.unwrap()),
            Self::Postgres(url) => Arc::new(PostgresStore::connect(url).await.unwrap()),
        }
    }
}

/// Which operations are numbered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Counted {
    /// All but renewals, which come by the clock.
    Steady,
    Renewals,
}

/// What the child is to do. Everything it needs stands here: it is started with nothing else.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Task {
    pub database: Database,
    /// Names the run and its definition, so that nobody else claims it.
    pub run: String,
    pub ledger: PathBuf,
    pub resumes: bool,
    pub ttl_ms: u64,
    /// The longest a service works before its effect, and again after it.
    pub pace_ms: u64,
    pub counted: Counted,
    /// The operation, from 1, and the word of the fault it meets.
    pub fault: Option<(u64, String)>,
}

const TASK: &str = "IOP_TORTURE_TASK";

/// Does the task this process was started with; false when it was not.
pub fn is_child() -> bool {
    let Ok(text) = std::env::var(TASK) else {
        return false;
    };
    let task: Task = serde_json::from_str(&text).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(run_to_end(&task));
    true
}

async fn run_to_end(task: &Task) {
    let ledger: Arc<dyn Ledger> = Arc::new(FileLedger::new(&task.ledger));
    let database = task.database.open().await;
    let recorded: Arc<dyn Store> = Arc::new(Recorder::new(Arc::clone(&database), Arc::clone(&ledger)));
    let counts: fn(Op) -> bool = match task.counted {
        Counted::Steady => |op| op != Op::Renew,
        Counted::Renewals => |op| op == Op::Renew,
    };
    let faulty = FaultStore::counting(recorded, counts);
    if let Some((k, word)) = &task.fault {
        faulty.fail(*k, Fault::parse(word).unwrap());
    }
    let store: Arc<dyn Store> = Arc::new(faulty);
    let pace_ms = task.pace_ms;
    let world = World::new(ledger, database).with_pace(move || {
        let ms = if pace_ms == 0 { 0 } else { fastrand::u64(..pace_ms) };
        Duration::from_millis(ms)
    });
    let (world, graph) = (Arc::new(world), Arc::new(everything(&task.run)));
    let run = RunId::new(&task.run).unwrap();
    let ttl = Duration::from_millis(task.ttl_ms);
    let mode = if task.resumes { Mode::Resumes } else { Mode::Claims };
    for _ in 0..20 {
        match Driver::new(&graph, &store, &world, &run, mode, ttl).drive().await {
            Ok(()) => return,
            // A slow machine loses a lease now and then.
            Err(error) => assert!(is_passing(&error), "{error:?}"),
        }
    }
    panic!("the run does not end");
}

/// A process of this test's own executable; killed when it is dropped.
pub struct Running {
    child: Option<Child>,
    log: PathBuf,
}

impl Running {
    /// Starts one with this setting and nothing else of the test's environment. What it says goes to `log`.
    pub fn start(setting: (&str, &str), log: &Path) -> Self {
        let out = std::fs::File::create(log).unwrap();
        // This very program, also when its file was replaced meanwhile.
        let child = Command::new("/proc/self/exe")
            .env_clear()
            .env(setting.0, setting.1)
            .stdin(Stdio::null())
            .stdout(out.try_clone().unwrap())
            .stderr(out)
            .spawn()
            .unwrap();
        Self {
            child: Some(child),
            log: log.to_owned(),
        }
    }

    pub fn child(task: &Task) -> Self {
        let log = task.ledger.join(format!("{}.log", task.run));
        Self::start((TASK, &serde_json::to_string(task).unwrap()), &log)
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.as_mut().unwrap().try_wait().unwrap()
    }

    pub fn wait(mut self) -> ExitStatus {
        self.child.take().unwrap().wait().unwrap()
    }

    /// SIGKILL; true when it had not ended by itself.
    pub fn kill(mut self) -> bool {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap().signal() == Some(9)
    }

    pub fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// How a child with a fault ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Its run is over; the fault was not reached.
    Over,
    /// The fault ended it.
    Aborted,
}

/// Runs one child to its end.
pub fn run_child(task: &Task) -> Ended {
    let child = Running::child(task);
    let log = child.log.clone();
    let status = child.wait();
    match (status.success(), status.signal()) {
        (true, _) => Ended::Over,
        // SIGABRT.
        (false, Some(6)) if task.fault.is_some() => Ended::Aborted,
        (false, _) => panic!("{task:?}: {status}: {}", std::fs::read_to_string(log).unwrap()),
    }
}
