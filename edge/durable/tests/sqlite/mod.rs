//! The suite's fixture over `SqliteStore`: a file of its own, one store, clocks moved by hand.

#![allow(dead_code, reason = "each test file uses a part of it")]
#![expect(clippy::unwrap_used, reason = "tests: what goes wrong here ends the case")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use iop_durable::ids::{Revision, RunId};
use iop_durable::store::Store;
use iop_durable::store::sqlite::SqliteStore;
use iop_durable::testing::{Fixture, ManualClock, Tamper};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _, Executor as _, SqliteConnection};
use tempfile::TempDir;

pub(crate) struct SqliteFixture {
    // The first field: dropped before its file goes.
    pub(crate) store: Arc<SqliteStore>,
    pub(crate) clock: Arc<ManualClock>,
    dir: TempDir,
}

impl SqliteFixture {
    pub(crate) async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::new());
        let store = SqliteStore::open_with(&dir.path().join("iop.db"), clock.clone())
            .await
            .unwrap();
        Self {
            store: Arc::new(store),
            clock,
            dir,
        }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("iop.db")
    }

    /// Changes exactly one row.
    async fn change(&self, statement: &str) {
        let changed = connect(&self.path())
            .await
            .execute(AssertSqlSafe(statement))
            .await
            .unwrap();
        assert_eq!(changed.rows_affected(), 1, "{statement}");
    }

    async fn head(&self, run: &RunId, set: &str) {
        self.change(&format!(
            "UPDATE runs SET {set} WHERE run_id = {}",
            text(run.as_str())
        ))
        .await;
    }

    /// Flips a bit in the last byte of the one cell there is.
    async fn flip(&self, table: &str, column: &str, condition: &str) {
        let select = format!("SELECT {column} FROM {table} WHERE {condition}");
        let mut found: Vec<u8> = sqlx::query_scalar(AssertSqlSafe(select))
            .fetch_one(&mut connect(&self.path()).await)
            .await
            .unwrap();
        *found.last_mut().unwrap() ^= 1;
        let found = bytes(&found);
        self.change(&format!(
            "UPDATE {table} SET {column} = {found} WHERE {condition}"
        ))
        .await;
    }
}

/// A connection of somebody else.
pub(crate) async fn connect(path: &Path) -> SqliteConnection {
    SqliteConnectOptions::new()
        .filename(path)
        .connect()
        .await
        .unwrap()
}

/// A text in SQL, whatever is in it.
fn text(text: &str) -> String {
    format!("CAST({} AS TEXT)", bytes(text.as_bytes()))
}

fn bytes(bytes: &[u8]) -> String {
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    format!("x'{hex}'")
}

fn some<T: std::fmt::Display>(value: Option<T>) -> String {
    value.map_or_else(|| "NULL".to_owned(), |value| value.to_string())
}

impl Fixture for SqliteFixture {
    fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    fn pass(&self, span: Duration) -> BoxFuture<'_, ()> {
        self.clock.advance(span);
        Box::pin(std::future::ready(()))
    }

    fn spoil<'a>(&'a self, agent: &'a str, version: u64) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            let mut conn = connect(&self.path()).await;
            let guard: String =
                sqlx::query_scalar("SELECT sql FROM sqlite_schema WHERE name = 'definitions_are_immutable'")
                    .fetch_one(&mut conn)
                    .await
                    .unwrap();
            conn.execute("DROP TRIGGER definitions_are_immutable")
                .await
                .unwrap();
            self.change(&format!(
                "UPDATE definitions SET body = '[]' WHERE kind = 'agent' AND name = {} AND version = {version}",
                text(agent)
            ))
            .await;
            conn.execute(AssertSqlSafe(guard)).await.unwrap();
        })
    }

    fn tamper<'a>(&'a self, run: &'a RunId, tamper: Tamper) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            let of_run = format!("run_id = {}", text(run.as_str()));
            let checkpoint = |revision: Revision| format!("{of_run} AND revision = {revision}");
            match tamper {
                Tamper::HeadState => self.flip("runs", "state", &of_run).await,
                Tamper::HeadBody => self.flip("runs", "body", &of_run).await,
                Tamper::DropHeadSeal => self.head(run, "seal = NULL").await,
                Tamper::CopyHeadFrom(other) => {
                    let columns: String = sqlx::query_scalar(
                        "SELECT group_concat(name, ', ') FROM pragma_table_info('runs') WHERE name <> 'run_id'",
                    )
                    .fetch_one(&mut connect(&self.path()).await)
                    .await
                    .unwrap();
                    let other = text(other.as_str());
                    let set = format!("({columns}) = (SELECT {columns} FROM runs WHERE run_id = {other})");
                    self.head(run, &set).await;
                }
                Tamper::SchemaVersion(version) => {
                    self.head(run, &format!("schema_version = {version}")).await;
                }
                Tamper::Revision { revision, seal } => {
                    let set = format!("revision = {revision}, seal = {}", bytes(&seal));
                    self.head(run, &set).await;
                }
                Tamper::DueAt(due_at) => {
                    let due_at = some(due_at.map(|time| time.as_millis()));
                    self.head(run, &format!("due_at = {due_at}")).await;
                }
                Tamper::WaitingKind(kind) => {
                    self.head(run, &format!("waiting_kind = {}", some(kind.map(text))))
                        .await;
                }
                Tamper::Owner(owner) => {
                    self.head(run, &format!("owner = {}", some(owner.map(text))))
                        .await
                }
                Tamper::CheckpointState(revision) => {
                    self.flip("checkpoints", "state", &checkpoint(revision)).await;
                }
                Tamper::DropCheckpointSeal(revision) => {
                    let condition = checkpoint(revision);
                    self.change(&format!("UPDATE checkpoints SET seal = NULL WHERE {condition}"))
                        .await;
                }
                Tamper::ActivityOutput(id) => {
                    let condition = format!("{of_run} AND activity_id = {}", text(id.as_str()));
                    self.flip("activities", "output", &condition).await;
                }
                Tamper::WaitBody(id) => {
                    let condition = format!("{of_run} AND wait_id = {}", text(id.as_str()));
                    self.flip("waits", "body", &condition).await;
                }
                Tamper::WaitKind(id, kind) => {
                    let condition = format!("{of_run} AND wait_id = {}", text(id.as_str()));
                    let kind = some(kind.map(text));
                    self.change(&format!("UPDATE waits SET kind = {kind} WHERE {condition}"))
                        .await;
                }
                Tamper::Blob(digest) => {
                    let condition = format!("{of_run} AND digest = {}", bytes(&digest));
                    self.flip("blobs", "bytes", &condition).await;
                }
                Tamper::DropBlob(digest) => {
                    let digest = bytes(&digest);
                    self.change(&format!("DELETE FROM blobs WHERE {of_run} AND digest = {digest}"))
                        .await;
                }
            }
        })
    }
}
