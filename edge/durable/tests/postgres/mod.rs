//! The suite's fixture over `PostgresStore`: a server of its own, one store.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use iop_durable::ids::{Revision, RunId};
use iop_durable::store::Store;
use iop_durable::store::postgres::PostgresStore;
use iop_durable::testing::{Fixture, Tamper};
use iop_tests::postgres::Postgres;

pub(crate) struct PostgresFixture {
    // The first field: closed before its server goes.
    pub(crate) store: Arc<PostgresStore>,
    pub(crate) server: Postgres,
}

impl PostgresFixture {
    pub(crate) async fn start() -> Self {
        let server = Postgres::start().await;
        let store = Arc::new(PostgresStore::connect(&server.url()).await.unwrap());
        Self { store, server }
    }

    /// Changes exactly one row.
    fn change(&self, statement: &str) {
        let changed = self.server.sql(&format!(
            "WITH changed AS ({statement} RETURNING 1) SELECT count(*) FROM changed"
        ));
        assert_eq!(changed.as_deref(), Ok("1"), "{statement}");
    }

    fn head(&self, run: &RunId, set: &str) {
        self.change(&format!(
            "UPDATE runs SET {set} WHERE run_id = {}",
            text(run.as_str())
        ));
    }

    fn checkpoint(&self, run: &RunId, revision: Revision, set: &str) {
        self.change(&format!(
            "UPDATE checkpoints SET {set} WHERE run_id = {} AND revision = {revision}",
            text(run.as_str())
        ));
    }
}

/// A text in SQL, whatever is in it.
pub(crate) fn text(text: &str) -> String {
    format!("convert_from({}, 'UTF8')", bytes(text.as_bytes()))
}

fn bytes(bytes: &[u8]) -> String {
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    format!("'\\x{hex}'::bytea")
}

fn flip(column: &str) -> String {
    format!(
        "{column} = set_byte({column}, length({column}) - 1, get_byte({column}, length({column}) - 1) # 1)"
    )
}

fn some<T: std::fmt::Display>(value: Option<T>) -> String {
    value.map_or_else(|| "NULL".to_owned(), |value| value.to_string())
}

impl Fixture for PostgresFixture {
    fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    fn pass(&self, span: Duration) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let until = self.store.now().await.unwrap().plus(span);
            while self.store.now().await.unwrap() < until {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
    }

    fn spoil<'a>(&'a self, agent: &'a str, version: u64) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            let guarded = |word: &str| {
                let sql = format!("ALTER TABLE definitions {word} TRIGGER definitions_are_immutable");
                self.server.sql(&sql).unwrap();
            };
            guarded("DISABLE");
            self.change(&format!(
                "UPDATE definitions SET body = '[]' WHERE kind = 'agent' AND name = {} AND version = {version}",
                text(agent)
            ));
            guarded("ENABLE");
        })
    }

    fn tamper<'a>(&'a self, run: &'a RunId, tamper: Tamper) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            let id = text(run.as_str());
            match tamper {
                Tamper::HeadState => self.head(run, &flip("state")),
                Tamper::HeadBody => self.head(run, &flip("body")),
                Tamper::DropHeadSeal => self.head(run, "seal = NULL"),
                Tamper::CopyHeadFrom(other) => {
                    let columns = self
                        .server
                        .sql(
                            "SELECT string_agg(column_name, ', ') FROM information_schema.columns \
                             WHERE table_name = 'runs' AND column_name <> 'run_id'",
                        )
                        .unwrap();
                    self.head(
                        run,
                        &format!(
                            "({columns}) = (SELECT {columns} FROM runs WHERE run_id = {})",
                            text(other.as_str())
                        ),
                    );
                }
                Tamper::SchemaVersion(version) => self.head(run, &format!("schema_version = {version}")),
                Tamper::Revision { revision, seal } => {
                    self.head(run, &format!("revision = {revision}, seal = {}", bytes(&seal)));
                }
                Tamper::DueAt(due_at) => {
                    self.head(run, &format!("due_at = {}", some(due_at.map(|t| t.as_millis()))));
                }
                Tamper::WaitingKind(kind) => {
                    self.head(run, &format!("waiting_kind = {}", some(kind.map(text))));
                }
                Tamper::Owner(owner) => {
                    self.head(run, &format!("owner = {}", some(owner.map(text))));
                }
                Tamper::CheckpointState(revision) => self.checkpoint(run, revision, &flip("state")),
                Tamper::DropCheckpointSeal(revision) => self.checkpoint(run, revision, "seal = NULL"),
                Tamper::ActivityOutput(activity) => self.change(&format!(
                    "UPDATE activities SET {} WHERE run_id = {id} AND activity_id = '{activity}'",
                    flip("output")
                )),
                Tamper::WaitBody(wait) => self.change(&format!(
                    "UPDATE waits SET {} WHERE run_id = {id} AND wait_id = '{wait}'",
                    flip("body")
                )),
                Tamper::WaitKind(wait, kind) => self.change(&format!(
                    "UPDATE waits SET kind = {} WHERE run_id = {id} AND wait_id = '{wait}'",
                    some(kind.map(text))
                )),
                Tamper::Blob(digest) => self.change(&format!(
                    "UPDATE blobs SET {} WHERE run_id = {id} AND digest = {}",
                    flip("bytes"),
                    bytes(&digest)
                )),
                Tamper::DropBlob(digest) => self.change(&format!(
                    "DELETE FROM blobs WHERE run_id = {id} AND digest = {}",
                    bytes(&digest)
                )),
            }
        })
    }
}
