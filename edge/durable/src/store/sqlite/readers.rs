//! Connections that read. They see what is durable, block nobody and are blocked by nobody.
//!
//! A read is one trip to a thread that may wait for the disk, whatever it asks and however many rows it finds: the trip costs more
//! than the statements do. A driver that makes one for each statement and each row costs several times as much.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rusqlite::Connection;
use rusqlite::types::Value;
use tokio::sync::Semaphore;

use super::args::Args;
use super::connect;
use super::fail;
use super::rows::Found;
use crate::store::StoreError;

/// Whether a run is there: true, false when it was deleted, no row when it never was. One parameter.
pub(super) const OF_RUN: &str =
    "SELECT EXISTS (SELECT 1 FROM runs WHERE run_id = f.run_id) FROM run_fences f WHERE f.run_id = ?";

/// The texts of a read about one run: whether there is such a run, and what is asked of it.
macro_rules! of_run {
    ($($rest:expr),*) => {
        &[$crate::store::sqlite::readers::OF_RUN, $($rest),*]
    };
}
pub(super) use of_run;

/// Connections at most: reads that are under way at once, on few cores.
const CONNECTIONS: usize = 4;

/// The rows of each statement of a read.
type Answers = Vec<Vec<Found>>;

/// A few connections, made when they are needed and kept.
pub(super) struct Readers {
    path: PathBuf,
    idle: Arc<Mutex<Vec<Connection>>>,
    places: Arc<Semaphore>,
}

impl Readers {
    pub(super) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            idle: Arc::new(Mutex::new(Vec::with_capacity(CONNECTIONS))),
            places: Arc::new(Semaphore::new(CONNECTIONS)),
        }
    }

    /// Waits for the reads that are under way and closes the connections. Later reads are refused.
    pub(super) async fn close(&self) {
        let all = u32::try_from(CONNECTIONS).unwrap_or(u32::MAX);
        let places = self.places.acquire_many(all).await;
        self.places.close();
        drop(places);
        let idle = std::mem::take(&mut *self.idle.lock());
        for conn in idle {
            if let Err((_, error)) = conn.close() {
                tracing::warn!(%error, "a connection was not closed in order");
            }
        }
    }

    /// Reads with a connection, on a thread that may wait. What was begun is read to its end, whoever waits for it.
    async fn with<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let place = Arc::clone(&self.places)
            .acquire_owned()
            .await
            .map_err(|_| StoreError::unavailable("the store is closed"))?;
        let (path, idle) = (self.path.clone(), Arc::clone(&self.idle));
        let reading = tokio::task::spawn_blocking(move || {
            // Given back after the connection: whoever has a place finds one.
            let _place = place;
            let kept = idle.lock().pop();
            let conn = match kept {
                Some(conn) => conn,
                None => connect::reader(&path)?,
            };
            let answer = read(&conn);
            idle.lock().push(conn);
            answer
        });
        match reading.await {
            Ok(answer) => answer.map_err(fail::read),
            Err(error) => Err(StoreError::unavailable(error)),
        }
    }

    /// The rows of one statement.
    pub(super) async fn rows(
        &self,
        sql: impl Into<Cow<'static, str>>,
        args: Args,
    ) -> Result<Vec<Found>, StoreError> {
        let sql = sql.into();
        self.with(move |conn| rows(conn, &sql, &mut args.into_values()))
            .await
    }

    /// The rows of the statements of a read about one run, made by `of_run!`.
    ///
    /// # Errors
    /// `not_found`, `deleted`.
    pub(super) async fn of_run(
        &self,
        texts: &'static [&'static str],
        args: Args,
    ) -> Result<Answers, StoreError> {
        self.with(move |conn| all(conn, texts, args))
            .await
            .and_then(there)
    }

    /// The same for several runs, each with parameters of its own; one trip for all of them.
    pub(super) async fn of_runs(
        &self,
        texts: &'static [&'static str],
        args: Vec<Args>,
    ) -> Result<Vec<Result<Answers, StoreError>>, StoreError> {
        let answers = self.with(move |conn| {
            args.into_iter()
                .map(|args| all(conn, texts, args))
                .collect::<rusqlite::Result<Vec<_>>>()
        });
        Ok(answers.await?.into_iter().map(there).collect())
    }
}

/// What is left of an answer about a run that is there.
fn there(mut answers: Answers) -> Result<Answers, StoreError> {
    if answers.is_empty() {
        return Err(StoreError::corrupt("no answer"));
    }
    match answers.remove(0).first().map(Found::is_true) {
        Some(true) => Ok(answers),
        Some(false) => Err(StoreError::Deleted),
        None => Err(StoreError::NotFound),
    }
}

fn all(conn: &Connection, texts: &[&str], args: Args) -> rusqlite::Result<Answers> {
    let mut values = args.into_values();
    texts.iter().map(|sql| rows(conn, sql, &mut values)).collect()
}

/// The rows of one statement, which takes its parameters from the front.
fn rows(
    conn: &Connection,
    sql: &str,
    values: &mut impl Iterator<Item = Value>,
) -> rusqlite::Result<Vec<Found>> {
    let mut statement = conn.prepare_cached(sql)?;
    for at in 1..=statement.parameter_count() {
        if let Some(value) = values.next() {
            statement.raw_bind_parameter(at, value)?;
        }
    }
    let columns = statement.column_count();
    let mut cursor = statement.raw_query();
    let mut found = Vec::new();
    while let Some(row) = cursor.next()? {
        found.push(Found::read(row, columns)?);
    }
    Ok(found)
}

impl std::fmt::Debug for Readers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Readers").finish_non_exhaustive()
    }
}
