//! One child process: its ready line, its log, its signals, and what the kernel knows about it.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::watch;

/// Lines shown of a log.
const LOG_LINES: usize = 2_000;
/// Lines kept of a log; more than any test lets a process say.
const KEPT_LINES: usize = 1_000_000;
const READY_WITHIN: Duration = Duration::from_secs(20);

/// The directory that holds the built binaries.
///
/// # Panics
/// When it cannot be told where the test executable is.
pub fn bin_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("IOP_BIN_DIR") {
        return PathBuf::from(dir);
    }
    // target/<profile>/deps/<test>-<hash>: the binaries are two levels up.
    let exe = std::env::current_exe().unwrap();
    exe.parent().and_then(Path::parent).unwrap().to_path_buf()
}

/// The path of one binary.
///
/// # Panics
/// When it has not been built.
pub fn binary(name: &str) -> PathBuf {
    let path = bin_dir().join(name);
    assert!(
        path.is_file(),
        "{} is missing: build it first (cargo build --workspace --bins) or set IOP_BIN_DIR",
        path.display()
    );
    path
}

/// A running child; killed when dropped, its log printed when the test failed.
pub struct Process {
    pub name: String,
    pub pid: u32,
    child: Child,
    log: Arc<Mutex<VecDeque<String>>>,
    out: watch::Receiver<Vec<String>>,
}

impl Process {
    /// Starts `program` in `cwd`; inherits no `IOP_*` or proxy variable from the test's own environment.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn spawn(name: &str, program: &Path, args: &[&str], env: &[(String, String)], cwd: &Path) -> Self {
        let mut command = Command::new(program);
        for (key, _) in std::env::vars_os() {
            let key_text = key.to_string_lossy().to_ascii_lowercase();
            if key_text.starts_with("iop_") || key_text.ends_with("_proxy") || key_text == "rust_log" {
                command.env_remove(&key);
            }
        }
        command
            .args(args)
            .envs(env.iter().map(|(k, v)| (k, v)))
            .current_dir(cwd)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command
            .spawn()
            .unwrap_or_else(|e| panic!("{}: {e}", program.display()));
        let pid = child.id().unwrap();
        let log = Arc::new(Mutex::new(VecDeque::new()));
        let (sender, out) = watch::channel(Vec::new());
        tokio::spawn(keep_lines(child.stderr.take().unwrap(), Arc::clone(&log), None));
        tokio::spawn(keep_lines(
            child.stdout.take().unwrap(),
            Arc::clone(&log),
            Some(sender),
        ));
        Self {
            name: name.to_owned(),
            pid,
            child,
            log,
            out,
        }
    }

    /// Waits for `<name> ready key=value …` on stdout.
    ///
    /// # Panics
    /// When the process ends or is silent.
    pub async fn ready(&mut self) -> BTreeMap<String, String> {
        match self.ready_or_ended().await {
            Some(ready) => ready,
            None => panic!("{} gave no ready line; its log:\n{}", self.name, self.log()),
        }
    }

    /// The same, for a process that may refuse to start.
    pub async fn ready_or_ended(&mut self) -> Option<BTreeMap<String, String>> {
        let prefix = format!("{} ready", self.name);
        let mut out = self.out.clone();
        let line = tokio::time::timeout(READY_WITHIN, async {
            loop {
                if let Some(line) = out.borrow_and_update().iter().find(|l| l.starts_with(&prefix)) {
                    return Some(line.clone());
                }
                if out.changed().await.is_err() {
                    return None;
                }
            }
        });
        let line = line.await.ok()??;
        let pairs = line[prefix.len()..]
            .split_ascii_whitespace()
            .filter_map(|pair| pair.split_once('='));
        Some(pairs.map(|(k, v)| (k.to_owned(), v.to_owned())).collect())
    }

    /// Everything said on stdout so far.
    pub fn stdout(&self) -> Vec<String> {
        self.out.borrow().clone()
    }

    /// The last lines of stderr and stdout.
    pub fn log(&self) -> String {
        let log = self.log.lock();
        let earlier = log.len().saturating_sub(LOG_LINES);
        log.iter().skip(earlier).map(|l| format!("{l}\n")).collect()
    }

    /// Every line of stderr and stdout that holds `needle`.
    ///
    /// # Panics
    /// When so much was said that a part of it is lost.
    pub fn lines_with(&self, needle: &str) -> Vec<String> {
        let log = self.log.lock();
        assert!(log.len() < KEPT_LINES, "the log of {} is not whole", self.name);
        log.iter().filter(|l| l.contains(needle)).cloned().collect()
    }

    /// Waits until a word, in any case, is in the log: what a process said on stderr is read beside its stdout.
    ///
    /// # Panics
    /// When it is not said in time.
    pub async fn says(&self, word: &str) {
        crate::eventually(&format!("{} says {word:?}", self.name), READY_WITHIN, || async {
            let log = self.log();
            if log.to_ascii_lowercase().contains(word) {
                Ok(())
            } else {
                Err(log)
            }
        })
        .await;
    }

    /// Sends a signal by name (`TERM`, `KILL`, `STOP`, `CONT`).
    pub fn signal(&self, signal: &str) {
        signal_pid(self.pid, signal);
    }

    /// Waits for the end of the process.
    ///
    /// # Panics
    /// When it is still running after `bound`.
    pub async fn exit(&mut self, bound: Duration) -> ExitStatus {
        match tokio::time::timeout(bound, self.child.wait()).await {
            Ok(status) => status.unwrap(),
            Err(_) => panic!(
                "{} still runs after {bound:?}; its log:\n{}",
                self.name,
                self.log()
            ),
        }
    }

    /// Whether the process has not ended yet.
    pub fn running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// `kill -9`, and waits until the kernel has taken it away.
    pub async fn kill(&mut self) {
        let _ = self.child.kill().await;
    }

    /// Resident memory in bytes.
    ///
    /// # Panics
    /// When the process is gone.
    pub fn rss_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap();
        let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
        let kib: u64 = line.split_ascii_whitespace().nth(1).unwrap().parse().unwrap();
        kib * 1024
    }

    /// Processor time used so far, in steps of 10 ms.
    ///
    /// # Panics
    /// When the process is gone.
    pub fn cpu(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap();
        // Behind the name, which may hold anything: utime and stime are the 12th and 13th, in hundredths of a second.
        let fields: Vec<u64> = stat
            .rsplit_once(')')
            .map(|(_, rest)| {
                rest.split_ascii_whitespace()
                    .map(|n| n.parse().unwrap_or(0))
                    .collect()
            })
            .unwrap_or_default();
        Duration::from_millis((fields[11] + fields[12]) * 10)
    }

    /// Local addresses on which the process listens, as the kernel prints them.
    pub fn listening(&self) -> Vec<String> {
        let inodes: HashSet<String> = std::fs::read_dir(format!("/proc/{}/fd", self.pid))
            .unwrap()
            .filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok())
            .filter_map(|link| {
                Some(
                    link.to_str()?
                        .strip_prefix("socket:[")?
                        .strip_suffix(']')?
                        .to_owned(),
                )
            })
            .collect();
        let mut found = Vec::new();
        for table in ["tcp", "tcp6"] {
            let text = std::fs::read_to_string(format!("/proc/{}/net/{table}", self.pid)).unwrap_or_default();
            for line in text.lines().skip(1) {
                let fields: Vec<&str> = line.split_ascii_whitespace().collect();
                // st 0A is TCP_LISTEN.
                if fields.len() > 9 && fields[3] == "0A" && inodes.contains(fields[9]) {
                    found.push(fields[1].to_owned());
                }
            }
        }
        found
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "---- log of {} (pid {}) ----\n{}----",
                self.name,
                self.pid,
                self.log()
            );
        }
        let _ = self.child.start_kill();
    }
}

/// Sends a signal to a process that the test started.
pub fn signal_pid(pid: u32, signal: &str) {
    let status = std::process::Command::new("sh")
        .arg("-c")
        .arg(format!("kill -{signal} {pid}"))
        .status();
    assert!(status.is_ok_and(|s| s.success()), "kill -{signal} {pid}");
}

/// A command that is expected to end by itself.
pub struct Finished {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// Runs a binary of the workspace to its end.
///
/// # Panics
/// When it cannot be started or does not end within 20 s.
pub async fn finish(name: &str, args: &[&str], env: &[(String, String)], cwd: &Path) -> Finished {
    let mut command = Command::new(binary(name));
    command
        .args(args)
        .envs(env.iter().map(|(k, v)| (k, v)))
        .current_dir(cwd)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = tokio::time::timeout(READY_WITHIN, command.output()).await;
    let Ok(output) = output else {
        panic!("{name} {args:?} did not end within {READY_WITHIN:?}")
    };
    let output = output.unwrap();
    Finished {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

async fn keep_lines(
    source: impl AsyncRead + Unpin,
    log: Arc<Mutex<VecDeque<String>>>,
    out: Option<watch::Sender<Vec<String>>>,
) {
    let mut lines = BufReader::new(source).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        {
            let mut log = log.lock();
            if log.len() == KEPT_LINES {
                log.pop_front();
            }
            log.push_back(line.clone());
        }
        if let Some(out) = &out {
            out.send_modify(|all| all.push(line));
        }
    }
}
