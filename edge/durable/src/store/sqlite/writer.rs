//! The one writer. It takes what is queued, at most `BATCH` jobs, writes them in one transaction, and answers when that is
//! durable: the disk is waited for once per batch, and no job waits for others to come (durable-api §9).
//!
//! A job that is refused fails alone: its statement undid itself, or its savepoint did. When SQLite gives up the transaction,
//! nothing of the batch was written and everybody in it is told so. When the commit fails, nobody knows.

use std::collections::VecDeque;
use std::path::PathBuf;

use futures_util::TryStreamExt as _;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, Either, Executor as _, SqlSafeStr};
use tokio::sync::{mpsc, oneshot};

use super::clock::Clocks;
use super::connect;
use super::fail::{self, Fail, Refusal};
use super::lock::FileLock;
use super::script::{Args, Script};
use crate::store::{Hint, Hints, StoreError};
use crate::time::Timestamp;

/// Most jobs in one transaction.
const BATCH: usize = 256;

/// Jobs that may wait for the writer; further callers wait for a place.
const QUEUE: usize = 1024;

/// One change of the database. It asks what it needs and then writes with one statement or one script, so that a refusal
/// leaves no trace.
pub(super) trait Work: Send + 'static {
    type Answer: Send + 'static;

    fn run(self, tx: &mut Tx<'_>) -> impl Future<Output = Result<Self::Answer, Fail>> + Send;
}

/// A transaction in progress.
pub(super) struct Tx<'c> {
    conn: &'c mut SqliteConnection,
    clocks: &'c Clocks,
    hints: &'c mut Vec<Hint>,
}

impl Tx<'_> {
    pub(super) fn clocks(&self) -> &Clocks {
        self.clocks
    }

    pub(super) fn wall(&self) -> Timestamp {
        self.clocks.wall()
    }

    /// The clock of leases.
    pub(super) fn now(&self) -> i64 {
        self.clocks.lease().as_millis()
    }

    /// Said when the transaction is durable.
    pub(super) fn hint(&mut self, hint: Hint) {
        self.hints.push(hint);
    }

    /// The first row of a statement that reads, or that writes and can be refused by nothing but a lost transaction.
    pub(super) async fn row(&mut self, sql: impl SqlSafeStr, args: Args) -> Result<Option<SqliteRow>, Fail> {
        self.conn
            .fetch_optional(sqlx::query_with(sql, args.finish()?))
            .await
            .map_err(Fail::Lost)
    }

    /// Every row of such a statement.
    pub(super) async fn rows(&mut self, sql: impl SqlSafeStr, args: Args) -> Result<Vec<SqliteRow>, Fail> {
        self.conn
            .fetch_all(sqlx::query_with(sql, args.finish()?))
            .await
            .map_err(Fail::Lost)
    }

    /// The first row of one statement that is atomic by itself. A refusal is an answer.
    pub(super) async fn statement(
        &mut self,
        sql: impl SqlSafeStr,
        args: Args,
    ) -> Result<Result<Option<SqliteRow>, (Refusal, sqlx::Error)>, Fail> {
        let query = sqlx::query_with(sql, args.finish()?);
        let error = match self.conn.fetch_optional(query).await {
            Ok(row) => return Ok(Ok(row)),
            Err(error) => error,
        };
        match fail::refusal(&error) {
            Some(refusal) if refusal.is_ours() => Ok(Err((refusal, error))),
            // A constraint undoes its statement, but one that somebody else has put there may undo the transaction.
            Some(refusal) if !is_outside(self.conn).await => Ok(Err((refusal, error))),
            Some(_) | None => Err(Fail::Lost(error)),
        }
    }

    /// All rows of all statements of a script, which stands in a savepoint. A refusal is an answer; the script is undone then.
    pub(super) async fn script(
        &mut self,
        script: Script,
    ) -> Result<Result<Vec<SqliteRow>, (Refusal, sqlx::Error)>, Fail> {
        let persistent = script.is_common();
        let (sql, args) = script.finish()?;
        let query = sqlx::query_with(AssertSqlSafe(sql), args).persistent(persistent);
        let answer: Result<Vec<_>, _> = self
            .conn
            .fetch_many(query)
            .try_filter_map(|item| async {
                Ok(match item {
                    Either::Left(_) => None,
                    Either::Right(row) => Some(row),
                })
            })
            .try_collect()
            .await;
        let error = match answer {
            Ok(rows) => return Ok(Ok(rows)),
            Err(error) => error,
        };
        let Some(refusal) = fail::refusal(&error) else {
            return Err(Fail::Lost(error));
        };
        self.conn.execute(Script::UNDO).await.map_err(Fail::Lost)?;
        Ok(Err((refusal, error)))
    }
}

/// Told to a job's caller: `None` when what it was promised is durable.
type Settle = Box<dyn FnOnce(Option<StoreError>) + Send>;

/// A job whose answer is kept until it is durable.
trait Job: Send {
    fn run<'a>(self: Box<Self>, tx: &'a mut Tx<'_>) -> BoxFuture<'a, (Settle, Option<sqlx::Error>)>;
    fn refuse(self: Box<Self>, error: StoreError);
}

struct Waiting<W: Work> {
    work: W,
    reply: oneshot::Sender<Result<W::Answer, StoreError>>,
}

impl<W: Work> Job for Waiting<W> {
    fn run<'a>(self: Box<Self>, tx: &'a mut Tx<'_>) -> BoxFuture<'a, (Settle, Option<sqlx::Error>)> {
        Box::pin(async move {
            let Self { work, reply } = *self;
            let (answer, lost) = match work.run(tx).await {
                Ok(answer) => (Ok(answer), None),
                Err(Fail::Own(error)) => (Err(error), None),
                Err(Fail::Lost(error)) => (Err(gone()), Some(error)),
            };
            let settle: Settle = Box::new(move |failed| {
                // A caller that has left needs no answer.
                let _ = reply.send(match failed {
                    None => answer,
                    Some(error) => Err(error),
                });
            });
            (settle, lost)
        })
    }

    fn refuse(self: Box<Self>, error: StoreError) {
        let _ = self.reply.send(Err(error));
    }
}

fn gone() -> StoreError {
    StoreError::unavailable("the store is closed")
}

/// The way to the writer. When it is closed or dropped, the writer finishes what is queued and closes the file.
pub(super) struct Writer {
    /// None when it is closed.
    jobs: Mutex<Option<mpsc::Sender<Box<dyn Job>>>>,
}

impl Writer {
    /// Starts the writer on the current runtime. The handle ends when the file is closed and the lock is free.
    pub(super) fn start(
        path: PathBuf,
        conn: SqliteConnection,
        lock: FileLock,
        clocks: Clocks,
        hints: Hints,
    ) -> (Self, tokio::task::JoinHandle<()>) {
        let (jobs, queue) = mpsc::channel(QUEUE);
        let state = State {
            path,
            conn: Some(conn),
            clocks,
            hints,
        };
        let task = crate::tasks::spawn("sqlite-writer", state.serve(queue, lock));
        let jobs = Mutex::new(Some(jobs));
        (Self { jobs }, task)
    }

    /// Takes no further jobs.
    pub(super) fn close(&self) {
        self.jobs.lock().take();
    }

    /// Queues a change and waits until it is durable.
    pub(super) async fn write<W: Work>(&self, work: W) -> Result<W::Answer, StoreError> {
        let jobs = self.jobs.lock().clone().ok_or_else(gone)?;
        let (reply, answer) = oneshot::channel();
        let job = Box::new(Waiting { work, reply });
        jobs.send(job).await.map_err(|_| gone())?;
        drop(jobs);
        answer
            .await
            .unwrap_or_else(|_| Err(StoreError::unconfirmed("the writer has ended")))
    }
}

struct State {
    path: PathBuf,
    /// None after it was lost.
    conn: Option<SqliteConnection>,
    clocks: Clocks,
    hints: Hints,
}

impl State {
    async fn serve(mut self, mut queue: mpsc::Receiver<Box<dyn Job>>, lock: FileLock) {
        let mut batch = Vec::with_capacity(BATCH);
        while queue.recv_many(&mut batch, BATCH).await > 0 {
            let mut jobs: VecDeque<_> = batch.drain(..).collect();
            while !jobs.is_empty() {
                self.transaction(&mut jobs).await;
            }
        }
        if let Some(conn) = self.conn.take()
            && let Err(error) = conn.close().await
        {
            tracing::warn!(%error, "the database was not closed in order");
        }
        drop(lock);
    }

    /// One transaction over these jobs, or over as many as SQLite bears with. Takes at least one away.
    async fn transaction(&mut self, jobs: &mut VecDeque<Box<dyn Job>>) {
        let mut conn = match self.begin().await {
            Ok(conn) => conn,
            Err(error) => {
                let error = StoreError::unavailable(error);
                for job in jobs.drain(..) {
                    job.refuse(error.clone());
                }
                return;
            }
        };
        let mut hints = Vec::new();
        let mut done = Vec::with_capacity(jobs.len());
        let mut lost = None;
        while let Some(job) = jobs.pop_front() {
            let mut tx = Tx {
                conn: &mut conn,
                clocks: &self.clocks,
                hints: &mut hints,
            };
            let (settle, error) = job.run(&mut tx).await;
            done.push(settle);
            if error.is_some() {
                lost = error;
                break;
            }
        }
        let failed = match lost {
            Some(error) => {
                self.abandon(conn, fail::is_usable(&error)).await;
                Some(StoreError::unavailable(error))
            }
            None => match conn.execute("COMMIT").await {
                Ok(_) => {
                    self.conn = Some(conn);
                    None
                }
                Err(error) => {
                    self.abandon(conn, fail::is_usable(&error)).await;
                    Some(StoreError::unconfirmed(error))
                }
            },
        };
        if let Some(error) = &failed {
            tracing::warn!(jobs = done.len(), %error, "a transaction failed");
        } else {
            for hint in hints {
                self.hints.send(hint);
            }
        }
        for settle in done {
            settle(failed.clone());
        }
    }

    /// The write connection, in a transaction that has the write lock.
    async fn begin(&mut self) -> Result<SqliteConnection, sqlx::Error> {
        let mut conn = match self.conn.take() {
            Some(conn) => conn,
            None => {
                let mut conn = connect::writer(&self.path).connect().await?;
                connect::equip(&mut conn).await?;
                conn
            }
        };
        match conn.execute("BEGIN IMMEDIATE").await {
            Ok(_) => Ok(conn),
            Err(error) => {
                self.abandon(conn, fail::is_usable(&error)).await;
                Err(error)
            }
        }
    }

    /// Ends a failed transaction. The connection is kept when it is sound and certainly outside of one.
    async fn abandon(&mut self, mut conn: SqliteConnection, usable: bool) {
        // SQLite may have rolled back by itself; then this one fails and says so.
        if usable && (conn.execute("ROLLBACK").await.is_ok() || is_outside(&mut conn).await) {
            self.conn = Some(conn);
        }
    }
}

/// Whether the connection is in no transaction: beginning one is an error otherwise.
async fn is_outside(conn: &mut SqliteConnection) -> bool {
    conn.execute("BEGIN").await.is_ok() && conn.execute("ROLLBACK").await.is_ok()
}
