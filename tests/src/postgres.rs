//! A PostgreSQL of the test's own, from the server that is installed.
//!
//! `initdb` runs once per build folder and server version; every server starts on a copy of what it made, so that a start costs
//! a fraction of a second. The data lies in a temporary folder and goes with the server.

use std::fs::{File, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::eventually;
use crate::process::{Process, bin_dir};

/// How long a server may take to start or to stop.
const WITHIN: Duration = Duration::from_secs(30);
const USER: &str = "iop";
const DATABASE: &str = "postgres";

/// What a server is asked for. The default: reached by its socket only, and a crash of the machine may lose what it wrote.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Also listens on a free port of the loopback address; `url` then names it.
    pub tcp: bool,
    /// Waits for the disk on every commit.
    pub fsync: bool,
    /// Further settings, `name=value`.
    pub settings: Vec<String>,
}

/// A running server, or one that was stopped or killed and can be started again on the same data.
pub struct Postgres {
    options: Options,
    port: u16,
    process: Option<Process>,
    // The last field: removed after the server has gone.
    dir: TempDir,
}

impl Postgres {
    /// With the default options.
    ///
    /// # Panics
    /// When PostgreSQL is not installed or does not start.
    pub async fn start() -> Self {
        Self::with(Options::default()).await
    }

    /// # Panics
    /// When PostgreSQL is not installed or does not start.
    pub async fn with(options: Options) -> Self {
        let template = template();
        let dir = tempfile::Builder::new().prefix("iop-pg-").tempdir().unwrap();
        copy(&template, &dir.path().join("data"));
        give_to_nobody(dir.path());
        let port = if options.tcp { free_port() } else { 5432 };
        let mut postgres = Self {
            options,
            port,
            process: None,
            dir,
        };
        postgres.restart().await;
        postgres
    }

    /// Starts a server that was stopped or killed, on its data, at the same address.
    ///
    /// # Panics
    /// When it still runs or does not start.
    pub async fn restart(&mut self) {
        assert!(self.process.is_none(), "the server still runs");
        let place = self.socket_dir();
        let mut args: Vec<String> = vec!["-D".to_owned(), format!("{place}/data"), "-k".to_owned(), place];
        let mut settings = vec![
            format!("port={}", self.port),
            format!(
                "listen_addresses={}",
                if self.options.tcp { "127.0.0.1" } else { "" }
            ),
            format!("fsync={}", if self.options.fsync { "on" } else { "off" }),
        ];
        settings.extend(self.options.settings.iter().cloned());
        for setting in settings {
            args.extend(["-c".to_owned(), setting]);
        }
        let server = program("postgres");
        let mut command = unprivileged();
        command.push(server.to_str().unwrap().to_owned());
        command.extend(args);
        let args: Vec<&str> = command[1..].iter().map(String::as_str).collect();
        let process = Process::spawn(
            "postgres",
            &program_in_path(&command[0]),
            &args,
            &[],
            Path::new("/"),
        );
        let process = self.process.insert(process);
        let (log, pid) = (|| process.log(), process.pid);
        let started = Instant::now();
        while !log().contains("database system is ready to accept connections") {
            assert!(
                started.elapsed() < WITHIN && alive(pid),
                "PostgreSQL does not start; its log:\n{}",
                log()
            );
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Where the socket is.
    fn socket_dir(&self) -> String {
        self.dir.path().to_str().unwrap().to_owned()
    }

    /// For clients: by port when the server was asked to listen on one, else by socket.
    pub fn url(&self) -> String {
        self.url_of(DATABASE)
    }

    /// The same for another database of the server.
    pub fn url_of(&self, database: &str) -> String {
        if self.options.tcp {
            format!("postgres://{USER}@127.0.0.1:{}/{database}", self.port)
        } else {
            format!(
                "postgres://{USER}@localhost/{database}?host={}",
                self.socket_dir()
            )
        }
    }

    /// The port, when the server was asked to listen on one.
    pub fn port(&self) -> Option<u16> {
        self.options.tcp.then_some(self.port)
    }

    /// Runs SQL with `psql` and gives what it prints, without headers.
    ///
    /// # Errors
    /// What `psql` complains about.
    ///
    /// # Panics
    /// When `psql` is not installed.
    pub fn sql(&self, sql: &str) -> Result<String, String> {
        let mut psql = Command::new("psql");
        psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", &self.url()]);
        let output = pipe(&mut psql, sql);
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    /// Waits until the server answers `sql` with `expected`.
    ///
    /// # Panics
    /// When it does not within half a minute.
    pub async fn answers(&self, sql: &str, expected: &str) {
        eventually(sql, WITHIN, || async {
            match self.sql(sql) {
                Ok(answer) if answer == expected => Ok(()),
                Ok(answer) => Err(answer),
                Err(error) => Err(error),
            }
        })
        .await;
    }

    /// The log of the running server.
    pub fn log(&self) -> String {
        self.process.as_ref().map(Process::log).unwrap_or_default()
    }

    /// An orderly end that waits for nobody: sessions are told and cut.
    ///
    /// # Panics
    /// When the server does not run or does not stop.
    pub async fn stop(&mut self) {
        self.end("INT").await;
    }

    /// The end a crash would be: nothing is told to anybody, the next start recovers.
    ///
    /// # Panics
    /// When the server does not run or does not stop.
    pub async fn kill(&mut self) {
        let process = self.process.as_ref().expect("the server runs");
        // Stopped first, so that it starts no other processes while those it has are killed.
        process.signal("STOP");
        for pid in children(process.pid) {
            let _ = Command::new("kill")
                .args(["-KILL", &pid.to_string()])
                .stderr(Stdio::null())
                .status();
        }
        self.end("KILL").await;
    }

    async fn end(&mut self, signal: &str) {
        let mut process = self.process.take().expect("the server runs");
        let children = children(process.pid);
        process.signal(signal);
        process.exit(WITHIN).await;
        eventually("the processes of PostgreSQL end", WITHIN, || async {
            match children.iter().find(|pid| alive(**pid)) {
                None => Ok(()),
                Some(pid) => Err(format!("{pid} is there")),
            }
        })
        .await;
    }
}

impl Drop for Postgres {
    /// Ends the server at once, in the way that leaves no shared memory behind.
    fn drop(&mut self) {
        let Some(mut process) = self.process.take() else {
            return;
        };
        let _ = Command::new("kill")
            .args(["-QUIT", &process.pid.to_string()])
            .status();
        let started = Instant::now();
        while process.running() && started.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// A program of the newest installed server.
fn program(name: &str) -> PathBuf {
    const MISSING: &str = "PostgreSQL is needed and not installed (Debian: apt-get install postgresql): \
                           no server under /usr/lib/postgresql and none in PATH";
    let mut versions: Vec<(u32, PathBuf)> = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let folder = entry.ok()?.path();
            let version = folder.file_name()?.to_str()?.parse().ok()?;
            let program = folder.join("bin").join(name);
            program.is_file().then_some((version, program))
        })
        .collect();
    versions.sort();
    versions
        .pop()
        .map(|(_, program)| program)
        .or_else(|| in_path(name))
        .expect(MISSING)
}

fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

fn program_in_path(name: &str) -> PathBuf {
    in_path(name).unwrap_or_else(|| panic!("{name} is not installed"))
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|m| m.uid() == 0)
}

/// What to put before a command: PostgreSQL refuses to run as root.
fn unprivileged() -> Vec<String> {
    if is_root() {
        ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
            .map(str::to_owned)
            .to_vec()
    } else {
        vec!["env".to_owned()]
    }
}

fn give_to_nobody(dir: &Path) {
    if is_root() {
        ran(Command::new("chown").arg("-R").arg("nobody:nogroup").arg(dir));
    }
}

/// A data folder as `initdb` leaves it. The first caller makes it, the others wait for that.
fn template() -> PathBuf {
    let initdb = program("initdb");
    let version = ran(Command::new(&initdb).arg("--version"));
    let version: String = String::from_utf8_lossy(&version.stdout)
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || c == '.' {
                c
            } else {
                '-'
            }
        })
        .collect();
    let home = bin_dir().join("postgres");
    std::fs::create_dir_all(&home).unwrap();
    let lock = File::create(home.join("lock")).unwrap();
    lock.lock().unwrap();
    let template = home.join(version.trim_matches('-'));
    if !template.join("PG_VERSION").is_file() {
        // Made where any user may write, then copied beside the lock and renamed: a template is whole or not there.
        let dir = tempfile::tempdir().unwrap();
        give_to_nobody(dir.path());
        let data = dir.path().join("data");
        let prefix = unprivileged();
        ran(Command::new(&prefix[0])
            .args(&prefix[1..])
            .arg(initdb)
            .arg("-D")
            .arg(&data)
            .args([
                "-U",
                USER,
                "--auth=trust",
                "--no-sync",
                "--locale=C.UTF-8",
                "--encoding=UTF8",
            ])
            .current_dir("/"));
        let unfinished = home.join("unfinished");
        let _ = std::fs::remove_dir_all(&unfinished);
        copy(&data, &unfinished);
        std::fs::rename(&unfinished, &template).unwrap();
    }
    template
}

fn copy(from: &Path, to: &Path) {
    ran(Command::new("cp")
        .args(["-R", "--reflink=auto"])
        .arg(from)
        .arg(to));
    std::fs::set_permissions(to, Permissions::from_mode(0o700)).unwrap();
}

/// A port that nobody has just now.
fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

fn ran(command: &mut Command) -> Output {
    let output = command
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Runs a command with text on its input.
fn pipe(command: &mut Command, text: &str) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// Whether a process exists and is no zombie.
fn alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')))
}

/// The processes that this one started and that still run.
fn children(pid: u32) -> Vec<u32> {
    std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))
        .unwrap_or_default()
        .split_ascii_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect()
}
