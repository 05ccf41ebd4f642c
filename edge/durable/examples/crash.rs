//! A process that dies between an effect and its commit, three times over, and what the next process makes of it.
//!
//! The example starts itself as a child that works on an order in an SQLite file. The services outside are a log file that
//! outlives every process. The child is made to end right after a service has done its work and before anything of that is
//! stored: by `abort`, and by a SIGKILL from the parent. Then:
//!
//! - A completed step is not repeated.
//! - An idempotent call is repeated with the same key, and the service applies it once.
//! - An unsafe call is never repeated: the run is `ambiguous` until an operator says what happened, then it finishes.
//!
//! `cargo run -p iop-durable --example crash`

use std::error::Error;
use std::fs::OpenOptions;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::Graph;
use iop_durable::ids::{DecisionId, Owner, RunId};
use iop_durable::machine::activity::{Action, Resolution};
use iop_durable::patterns::{Data, State, Step, call, ordered_steps};
use iop_durable::payload::Payload;
use iop_durable::record::{ActivityRecord, ActivityState, AttemptClass, Effect, Origin, Status, WaitingKind};
use iop_durable::runner::{CallError, Ctx, Options, Resume, RunError, Runner, Start};
use iop_durable::store::sqlite::SqliteStore;
use iop_durable::store::{Claim, LeaseRequest, Store};
use tokio::sync::watch;
use tokio::time::Instant;

/// When a child ends.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Death {
    Never,
    /// By its own hand, once this service is done.
    Abort(String),
    /// It says that this service is done and does not go on.
    Hold(String),
}

/// The services outside: one line per call they received.
#[derive(Clone)]
struct World {
    log: PathBuf,
    death: Death,
}

impl World {
    /// A service does its work; the process may not live to hear of it.
    async fn serve(self, service: String, key: String) -> Result<Bytes, CallError> {
        let write = || {
            let mut log = OpenOptions::new().create(true).append(true).open(&self.log)?;
            log.write_all(format!("{service} {key}\n").as_bytes())?;
            log.sync_all()
        };
        write().map_err(|e| Failure::new(FailureKind::Unavailable, e.to_string()))?;
        if self.death == Death::Abort(service.clone()) {
            std::process::abort();
        }
        if self.death == Death::Hold(service.clone()) {
            println!("done {service}");
            std::future::pending::<()>().await;
        }
        Ok(Bytes::from(format!("{service} is done")))
    }

    fn keys(&self, service: &str) -> Result<Vec<String>, std::io::Error> {
        let log = std::fs::read_to_string(&self.log)?;
        let calls = log.lines().filter_map(|line| line.split_once(' '));
        Ok(calls
            .filter(|(name, _)| *name == service)
            .map(|(_, key)| key.to_owned())
            .collect())
    }

    /// How often a service was called, and how often a service that knows the keys it has seen did its work.
    fn counters(&self, service: &str) -> Result<(usize, usize), std::io::Error> {
        let mut keys = self.keys(service)?;
        let calls = keys.len();
        keys.sort();
        keys.dedup();
        Ok((calls, keys.len()))
    }
}

fn order(world: &World) -> Result<Graph<Data>, Box<dyn Error>> {
    let service = |name: &'static str, effect| {
        let world = world.clone();
        let dispatch = move |call: iop_durable::runner::Call| {
            let world = world.clone();
            world.serve(name.to_owned(), call.idempotency_key)
        };
        Step::new(name, call(&format!("{name}/1"), effect, dispatch))
    };
    let steps = vec![
        service("reserve", Effect::Idempotent),
        service("charge", Effect::Idempotent),
        service("mail", Effect::Unsafe),
        Step::new("close", |_: Ctx, mut state: State| async move {
            let last = String::from_utf8_lossy(state.data().bytes()).into_owned();
            state.replace(format!("closed, after: {last}"));
            Ok(state)
        }),
    ];
    Ok(ordered_steps("order", 1, None, steps).compile()?)
}

struct Process {
    store: Arc<SqliteStore>,
    runner: Runner<Data>,
    run: RunId,
}

impl Process {
    async fn open(dir: &Path, death: Death) -> Result<Self, Box<dyn Error>> {
        let world = World {
            log: dir.join("world.log"),
            death,
        };
        let store = Arc::new(SqliteStore::open(&dir.join("runs.db")).await?);
        let owner = Owner::new(&format!("process {}", std::process::id()))?;
        let graph = Arc::new(order(&world)?);
        Ok(Self {
            runner: Runner::new(graph, store.clone(), Options::new(owner))?,
            store,
            run: RunId::new("order-1")?,
        })
    }

    /// Accepts the order unless an earlier process did, and works until nothing is due.
    async fn work(&self) -> Result<(), Box<dyn Error>> {
        let start = Start::new(Data::from("one lamp")).run(self.run.clone());
        match self.runner.accept(start).await {
            Ok(_) | Err(RunError::Conflict) => {}
            Err(error) => return Err(error.into()),
        }
        loop {
            let asked = Instant::now();
            let claim = Claim {
                lease: LeaseRequest {
                    owner: Owner::new("worker")?,
                    ttl: Duration::from_secs(30),
                },
                definitions: vec![("flow".to_owned(), "order".to_owned())],
                except: Vec::new(),
                limit: 1,
            };
            let Some(acquired) = self.store.claim(claim).await?.runs.pop() else {
                return Ok(());
            };
            let (_keep, stop) = watch::channel(false);
            self.runner.run_claimed(acquired, asked, stop).await?;
        }
    }

    async fn activity(&self, step: &str) -> Result<ActivityRecord, Box<dyn Error>> {
        let all = self.store.activities(&self.run, None, 100).await?;
        let found = all.into_iter().find(|activity| activity.node.as_str() == step);
        Ok(found.ok_or("the step has no activity")?)
    }

    fn classes(activity: &ActivityRecord) -> Vec<AttemptClass> {
        activity.attempts.iter().map(|attempt| attempt.class).collect()
    }
}

/// Runs a child that is to die like this. The signal that ended it; `None` for an orderly end.
fn child(dir: &Path, death: &Death) -> Result<Option<i32>, Box<dyn Error>> {
    let (how, service) = match death {
        Death::Never => ("never", ""),
        Death::Abort(service) => ("abort", service.as_str()),
        Death::Hold(service) => ("hold", service.as_str()),
    };
    let mut child = Command::new(std::env::current_exe()?)
        .args(["child", &dir.to_string_lossy(), how, service])
        .stdout(Stdio::piped())
        .spawn()?;
    let out = BufReader::new(child.stdout.take().ok_or("no output")?);
    for line in out.lines() {
        if line? == format!("done {service}") {
            // SIGKILL: not even a destructor runs.
            child.kill()?;
        }
    }
    let status = child.wait()?;
    if status.signal().is_none() && !status.success() {
        return Err(format!("the child failed: {status}").into());
    }
    Ok(status.signal())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    if let [_, "child", dir, how, service] = args[..] {
        let death = match how {
            "abort" => Death::Abort(service.to_owned()),
            "hold" => Death::Hold(service.to_owned()),
            _ => Death::Never,
        };
        let process = Process::open(Path::new(dir), death).await?;
        process.work().await?;
        process.store.close().await;
        return Ok(());
    }

    let dir = tempfile::tempdir()?;
    let world = World {
        log: dir.path().join("world.log"),
        death: Death::Never,
    };
    let (abort, kill) = (Some(6), Some(9));
    let deaths = [
        (Death::Abort("charge".to_owned()), abort),
        (Death::Hold("charge".to_owned()), kill),
        (Death::Abort("mail".to_owned()), abort),
        (Death::Never, None),
    ];
    for (n, (death, signal)) in deaths.iter().enumerate() {
        assert_eq!(
            child(dir.path(), death)?,
            *signal,
            "process {n} ends as planned: {death:?}"
        );
        let process = Process::open(dir.path(), Death::Never).await?;
        let stored = process.runner.result(&process.run).await?;
        let (reserved, charged, mailed) = (
            world.counters("reserve")?,
            world.counters("charge")?,
            world.counters("mail").unwrap_or_default(),
        );
        println!(
            "process {} ended {}: the run is {} at {:?}; calls received and effects applied: reserve {reserved:?}, charge {charged:?}, mail {mailed:?}",
            n + 1,
            signal.map_or_else(|| "by itself".to_owned(), |signal| format!("by signal {signal}")),
            stored.status,
            State::of(&stored).stage(),
        );
        let expected = match n {
            0 => (Status::Running, "charge", (1, 1), (1, 1), (0, 0)),
            1 => (Status::Running, "charge", (1, 1), (2, 1), (0, 0)),
            2 => (Status::Running, "mail", (1, 1), (3, 1), (1, 1)),
            _ => (Status::Ambiguous, "mail", (1, 1), (3, 1), (1, 1)),
        };
        let stage = State::of(&stored).stage().to_owned();
        assert_eq!(
            (stored.status, stage.as_str(), reserved, charged, mailed),
            expected
        );
        process.store.close().await;
    }

    let process = Process::open(dir.path(), Death::Never).await?;
    let run = &process.run;
    assert_eq!(
        world.keys("charge")?,
        vec![format!("{run}/charge/2/call"); 3],
        "one key for every attempt"
    );
    let charge = process.activity("charge").await?;
    let classes = Process::classes(&charge);
    assert_eq!(
        classes,
        [
            AttemptClass::Abandoned,
            AttemptClass::Abandoned,
            AttemptClass::Completed
        ]
    );
    println!("charge: {} after attempts {classes:?}", charge.state);

    let mail = process.activity("mail").await?;
    assert_eq!(
        (mail.state, Process::classes(&mail)),
        (ActivityState::Unknown, vec![AttemptClass::Abandoned])
    );
    println!("mail: {}, the engine does not send it again", mail.state);
    let stored = process.runner.result(run).await?;
    let refused = process.runner.resume(&stored.token, Resume::new()).await;
    assert!(
        matches!(refused, Err(RunError::Ambiguous(_))),
        "a resume decides nothing"
    );

    // A person has looked into the mailbox.
    let resolution = Resolution {
        id: mail.id.clone(),
        action: Action::Complete {
            output: Payload::new("mail is done"),
        },
        decision: DecisionId::new("decision-1")?,
        input_digest: *mail.input.digest(),
        implementation: mail.implementation.clone(),
        attempt: mail.attempts.last().map_or(0, |attempt| attempt.n),
        reason: "the mail is in the outbox".to_owned(),
        evidence: "outbox of order-1".to_owned(),
    };
    let operator = process.runner.operator();
    let resolved = operator
        .resolve(&stored.token, &resolution, Some("operator"), false)
        .await?;
    assert_eq!(resolved.status, Status::Waiting);
    let waiting = process
        .runner
        .result(run)
        .await?
        .waiting
        .ok_or("it does not wait")?;
    assert_eq!(
        waiting.kind(),
        Some(WaitingKind::Resume),
        "resuming is an act of its own"
    );
    println!(
        "resolved by an operator: the run is {}, for its resume",
        resolved.status
    );

    let done = process.runner.resume(&resolved.token, Resume::new()).await?;
    println!(
        "resumed: the run is {}, {}",
        done.status,
        String::from_utf8_lossy(done.state.bytes())
    );
    assert_eq!(done.status, Status::Succeeded);
    assert_eq!(&done.state.bytes()[..], b"closed, after: mail is done");
    assert_eq!(world.counters("mail")?, (1, 1), "sent once");
    assert_eq!(
        world.counters("reserve")?,
        (1, 1),
        "a completed step is not repeated"
    );
    let mail = process.activity("mail").await?;
    assert_eq!(
        (mail.state, mail.origin),
        (ActivityState::Completed, Some(Origin::Manual))
    );
    assert_eq!(
        Process::classes(&mail),
        [AttemptClass::Abandoned],
        "what happened is not rewritten"
    );

    let steps = process.store.steps(run, 0, 100).await?;
    let names: Vec<&str> = steps.iter().map(|step| step.node.as_str()).collect();
    assert_eq!(names, ["reserve", "charge", "mail", "close"]);
    let events = process.store.events(run, 0, 1000).await?;
    let numbers: Vec<u64> = events.iter().map(|event| event.seq).collect();
    assert_eq!(
        numbers,
        (1..=events.len() as u64).collect::<Vec<_>>(),
        "the log has no gaps"
    );
    assert_eq!(
        events.iter().filter(|event| event.terminal).count(),
        1,
        "and one end"
    );
    process.store.close().await;
    Ok(())
}
