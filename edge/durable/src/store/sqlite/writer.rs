//! The one writer, a thread with a connection of its own. It takes what is queued, at most `BATCH` jobs, writes them in one
//! transaction, and answers when that is durable: the disk is waited for once per batch, and no job waits for others to come
//! (durable-api §9).
//!
//! Each job stands in a savepoint: one that is refused or fails is undone and fails alone. When SQLite gives up the transaction,
//! nothing of the batch was written and everybody in it is told so. When the commit fails, nobody knows, but for a full disk.
//!
//! The reads go through sqlx, this does not: a driver that hands each statement to a thread costs two switches of threads per
//! statement, which is more than the statement does.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rusqlite::{Connection, ErrorCode, OptionalExtension as _, Params, Row};
use tokio::sync::{mpsc, oneshot};

use super::checkpoint::Checkpoints;
use super::clock::Clocks;
use super::connect;
use super::fail::{self, Fail};
use super::lock::FileLock;
use crate::store::{Hint, Hints, StoreError};
use crate::time::Timestamp;

/// Most jobs in one transaction.
const BATCH: usize = 256;

/// Jobs that may wait for the writer; further callers wait for a place.
const QUEUE: usize = 1024;

/// One change of the database.
pub(super) trait Work: Send + 'static {
    type Answer: Send + 'static;

    /// Writes, or says why not; what was written before an error is undone.
    fn run(self, tx: &mut Tx<'_>) -> Result<Self::Answer, Fail>;
}

/// A transaction in progress.
pub(super) struct Tx<'c> {
    conn: &'c Connection,
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

    /// How many rows a statement wrote.
    pub(super) fn execute(&self, sql: &str, params: impl Params) -> rusqlite::Result<usize> {
        self.conn.prepare_cached(sql)?.execute(params)
    }

    /// The first row.
    pub(super) fn row<T>(
        &self,
        sql: &str,
        params: impl Params,
        read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<Option<T>> {
        self.conn.prepare_cached(sql)?.query_row(params, read).optional()
    }

    /// Every row.
    pub(super) fn rows<T>(
        &self,
        sql: &str,
        params: impl Params,
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<Vec<T>> {
        self.conn.prepare_cached(sql)?.query_map(params, read)?.collect()
    }
}

/// Told to a job's caller: `None` when what it was promised is durable.
type Settle = Box<dyn FnOnce(Option<StoreError>) + Send>;

/// A job whose answer is kept until it is durable.
trait Job: Send {
    fn run(self: Box<Self>, tx: &mut Tx<'_>) -> (Settle, Option<rusqlite::Error>);
    fn refuse(self: Box<Self>, error: StoreError);
}

struct Waiting<W: Work> {
    work: W,
    reply: oneshot::Sender<Result<W::Answer, StoreError>>,
}

impl<W: Work> Job for Waiting<W> {
    fn run(self: Box<Self>, tx: &mut Tx<'_>) -> (Settle, Option<rusqlite::Error>) {
        let Self { work, reply } = *self;
        let (answer, lost) = match in_savepoint(work, tx) {
            Ok(answer) => (Ok(answer), None),
            Err(Fail::Own(error)) => (Err(error), None),
            Err(Fail::Driver(error)) => (Err(gone()), Some(error)),
        };
        let settle: Settle = Box::new(move |failed| {
            // A caller that has left needs no answer.
            let _ = reply.send(match failed {
                None => answer,
                Some(error) => Err(error),
            });
        });
        (settle, lost)
    }

    fn refuse(self: Box<Self>, error: StoreError) {
        let _ = self.reply.send(Err(error));
    }
}

/// Runs a job so that its failure leaves no trace.
///
/// # Errors
/// `Fail::Driver` when the transaction is lost, or not certain to be whole.
fn in_savepoint<W: Work>(work: W, tx: &mut Tx<'_>) -> Result<W::Answer, Fail> {
    tx.execute("SAVEPOINT job", [])?;
    let error = match work.run(tx) {
        Ok(answer) => {
            tx.execute("RELEASE job", [])?;
            return Ok(answer);
        }
        Err(error) => error,
    };
    let own = match error {
        Fail::Own(own) => own,
        // SQLite may have rolled back by itself; then there is no savepoint to go back to.
        Fail::Driver(error) => match fail::refused(&error) {
            Some(own) if !tx.conn.is_autocommit() => own,
            Some(_) | None => return Err(Fail::Driver(error)),
        },
    };
    tx.execute("ROLLBACK TO job", [])?;
    tx.execute("RELEASE job", [])?;
    Err(Fail::Own(own))
}

fn gone() -> StoreError {
    StoreError::unavailable("the store is closed")
}

/// The way to the writer. When it is closed or dropped, the writer finishes what is queued and closes the file.
pub(super) struct Writer {
    /// None when it is closed.
    jobs: Mutex<Option<mpsc::Sender<Box<dyn Job>>>>,
    /// Transactions so far that may have changed a row.
    changes: Arc<AtomicU64>,
}

impl Writer {
    /// Starts the writer, whose connection is ready. The receiver hears when the file is closed and the lock is free.
    ///
    /// # Errors
    /// `unavailable`.
    pub(super) fn start(
        path: PathBuf,
        conn: Connection,
        lock: FileLock,
        clocks: Clocks,
        hints: Hints,
    ) -> Result<(Self, oneshot::Receiver<()>), StoreError> {
        let (jobs, queue) = mpsc::channel(QUEUE);
        let (ended, end) = oneshot::channel();
        let changes = Arc::new(AtomicU64::new(0));
        let state = State {
            checkpoints: Checkpoints::start(path.clone()).map_err(StoreError::unavailable)?,
            path,
            conn: Some(conn),
            clocks,
            hints,
            changes: Arc::clone(&changes),
        };
        std::thread::Builder::new()
            .name("sqlite-writer".to_owned())
            .spawn(move || {
                state.serve(queue);
                drop(lock);
                let _ = ended.send(());
            })
            .map_err(StoreError::unavailable)?;
        let jobs = Mutex::new(Some(jobs));
        Ok((Self { jobs, changes }, end))
    }

    /// Takes no further jobs.
    pub(super) fn close(&self) {
        self.jobs.lock().take();
    }

    /// A number that has grown when anything has changed since it was read before.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
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
    conn: Option<Connection>,
    checkpoints: Checkpoints,
    clocks: Clocks,
    hints: Hints,
    changes: Arc<AtomicU64>,
}

impl State {
    fn serve(mut self, mut queue: mpsc::Receiver<Box<dyn Job>>) {
        let mut batch = Vec::with_capacity(BATCH);
        while queue.blocking_recv_many(&mut batch, BATCH) > 0 {
            let mut jobs: VecDeque<_> = batch.drain(..).collect();
            while !jobs.is_empty() {
                self.transaction(&mut jobs);
            }
        }
        // Whoever closes the file last copies the log.
        drop(self.checkpoints);
        if let Some(conn) = self.conn.take()
            && let Err((_, error)) = conn.close()
        {
            tracing::warn!(%error, "the database was not closed in order");
        }
    }

    /// One transaction over these jobs, or over as many as SQLite bears with. Takes at least one away.
    fn transaction(&mut self, jobs: &mut VecDeque<Box<dyn Job>>) {
        let conn = match self.begin() {
            Ok(conn) => conn,
            Err(error) => {
                tracing::warn!(jobs = jobs.len(), %error, "no transaction");
                let error = StoreError::unavailable(error);
                for job in jobs.drain(..) {
                    job.refuse(error.clone());
                }
                return;
            }
        };
        let before = conn.total_changes();
        let mut hints = Vec::new();
        let mut done = Vec::with_capacity(jobs.len());
        let mut lost = None;
        let mut tx = Tx {
            conn: &conn,
            clocks: &self.clocks,
            hints: &mut hints,
        };
        while let Some(job) = jobs.pop_front() {
            let (settle, error) = job.run(&mut tx);
            done.push(settle);
            if error.is_some() {
                lost = error;
                break;
            }
        }
        let failed = match lost {
            Some(error) => Some(StoreError::unavailable(error)),
            None => execute(&conn, "COMMIT").err().map(uncommitted),
        };
        // Before anybody is told: who was told finds it counted.
        if conn.total_changes() != before {
            self.changes.fetch_add(1, Ordering::Release);
        }
        self.keep(conn);
        match &failed {
            Some(error) => tracing::warn!(jobs = done.len(), %error, "a transaction failed"),
            None => hints.into_iter().for_each(|hint| self.hints.send(hint)),
        }
        let committed = failed.is_none();
        for settle in done {
            settle(failed.clone());
        }
        if let Some(conn) = self.conn.as_ref().filter(|_| committed) {
            self.checkpoints.after_commit(conn);
        }
    }

    /// The write connection, in a transaction that has the write lock.
    fn begin(&mut self) -> rusqlite::Result<Connection> {
        let conn = match self.conn.take() {
            Some(conn) => conn,
            None => connect::writer(&self.path)?,
        };
        let begun = execute(&conn, "BEGIN IMMEDIATE");
        match begun {
            Ok(()) => Ok(conn),
            Err(error) => {
                self.keep(conn);
                Err(error)
            }
        }
    }

    /// Keeps the connection for the next transaction, outside of one; a connection that cannot leave its own is given up.
    fn keep(&mut self, conn: Connection) {
        if conn.is_autocommit() || (execute(&conn, "ROLLBACK").is_ok() && conn.is_autocommit()) {
            self.conn = Some(conn);
        }
    }
}

/// What a `COMMIT` that failed says. With `SQLITE_POWERSAFE_OVERWRITE`, which is SQLite's default, the frame that commits is the last
/// one written to the log: where there was no room for it, nothing was committed.
fn uncommitted(error: rusqlite::Error) -> StoreError {
    if error.sqlite_error_code() == Some(ErrorCode::DiskFull) {
        StoreError::unavailable(error)
    } else {
        StoreError::unconfirmed(error)
    }
}

fn execute(conn: &Connection, sql: &str) -> rusqlite::Result<()> {
    conn.prepare_cached(sql)?.execute([]).map(|_| ())
}
