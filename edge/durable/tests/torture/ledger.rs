//! What reached the outside world, kept outside of any run: calls and effects by idempotency key, in order. In memory for tests
//! in one process; in a file per run, appended and synced under a lock, for tests whose processes are killed.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::path::PathBuf;

use iop_durable::ids::RunId;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// One thing that happened outside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Line {
    /// A request arrived.
    Call {
        key: String,
        effect: String,
        attempt: u32,
        input: String,
        /// Of the process that sent it.
        pid: u32,
        /// Whether the store had this attempt as running when the request was sent; `None` when it did not answer. Not looked up
        /// for reads.
        intent: Option<bool>,
        /// The incarnation of that attempt.
        incarnation: Option<u64>,
        /// Keys of this step's calls that the store had as completed at that moment; `None` when it did not answer.
        completed: Option<Vec<String>>,
    },
    /// A request had its effect, with this answer.
    Apply { key: String, answer: String },
    /// A request was answered with a failure and had no effect.
    Fail { key: String },
    /// The store has this revision, written under this incarnation; `None`: by somebody without a lease.
    Commit { revision: u64, incarnation: Option<u64> },
}

/// Where lines are kept.
pub trait Ledger: Send + Sync {
    /// Adds what `decide` makes of the lines of this run so far, with nobody between.
    fn with(&self, run: &RunId, decide: &mut dyn FnMut(&[Line]) -> Vec<Line>);

    fn lines(&self, run: &RunId) -> Vec<Line> {
        let mut all = Vec::new();
        self.with(run, &mut |lines| {
            all = lines.to_vec();
            Vec::new()
        });
        all
    }

    fn add(&self, run: &RunId, line: &Line) {
        self.with(run, &mut |_| vec![line.clone()]);
    }
}

/// In memory.
#[derive(Debug, Default)]
pub struct MemoryLedger {
    runs: Mutex<BTreeMap<RunId, Vec<Line>>>,
}

impl Ledger for MemoryLedger {
    fn with(&self, run: &RunId, decide: &mut dyn FnMut(&[Line]) -> Vec<Line>) {
        let mut runs = self.runs.lock();
        let lines = runs.entry(run.clone()).or_default();
        let new = decide(lines);
        lines.extend(new);
    }
}

/// A folder with one file per run, for several processes.
#[derive(Debug, Clone)]
pub struct FileLedger {
    folder: PathBuf,
}

impl FileLedger {
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
        }
    }

    fn open(&self, run: &RunId) -> File {
        OpenOptions::new()
            .create(true)
            .read(true)
            .append(true)
            .open(self.folder.join(run.as_str()))
            .unwrap()
    }
}

impl Ledger for FileLedger {
    fn with(&self, run: &RunId, decide: &mut dyn FnMut(&[Line]) -> Vec<Line>) {
        let mut file = self.open(run);
        file.lock().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        // A process that was killed may have left the beginning of a line.
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        if whole < text.len() {
            text.truncate(whole);
            file.set_len(whole as u64).unwrap();
        }
        let lines: Vec<Line> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let mut new = String::new();
        for line in decide(&lines) {
            new.push_str(&serde_json::to_string(&line).unwrap());
            new.push('\n');
        }
        if !new.is_empty() {
            file.write_all(new.as_bytes()).unwrap();
            file.sync_data().unwrap();
        }
    }
}
