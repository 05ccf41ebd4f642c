//! Connections that read. They see what is durable, block nobody and are blocked by nobody.

use std::path::Path;

use futures_util::TryStreamExt as _;
use parking_lot::Mutex;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteRow};
use sqlx::{ConnectOptions as _, Connection as _, Either, Executor as _, Row as _, SqlSafeStr};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::args::Args;
use super::connect;
use super::fail;
use crate::store::StoreError;

/// Whether a run is there: true, false when it was deleted, no row when it never was. One parameter.
macro_rules! of_run {
    ($($rest:expr),*) => {
        concat!(
            "SELECT EXISTS (SELECT 1 FROM runs WHERE run_id = f.run_id) FROM run_fences f WHERE f.run_id = ?"
            $(, "; ", $rest)*
        )
    };
}
pub(super) use of_run;

/// Connections at most. Each has a thread, and there are few cores to read on.
const CONNECTIONS: usize = 4;

/// A few connections, made when they are needed and kept.
pub(super) struct Readers {
    options: SqliteConnectOptions,
    idle: Mutex<Vec<SqliteConnection>>,
    places: Semaphore,
}

impl Readers {
    pub(super) fn new(path: &Path) -> Self {
        Self {
            options: connect::reader(path),
            idle: Mutex::new(Vec::with_capacity(CONNECTIONS)),
            places: Semaphore::new(CONNECTIONS),
        }
    }

    /// A connection, when one is free.
    pub(super) async fn get(&self) -> Result<Reader<'_>, StoreError> {
        let place = self
            .places
            .acquire()
            .await
            .map_err(|_| StoreError::unavailable("the store is closed"))?;
        let idle = self.idle.lock().pop();
        let conn = match idle {
            Some(conn) => conn,
            None => self.options.connect().await.map_err(fail::read)?,
        };
        Ok(Reader {
            readers: self,
            conn: Some(conn),
            _place: place,
        })
    }

    /// Waits for the reads that are under way and closes the connections. Later reads are refused.
    pub(super) async fn close(&self) {
        let all = u32::try_from(CONNECTIONS).unwrap_or(u32::MAX);
        let places = self.places.acquire_many(all).await;
        self.places.close();
        drop(places);
        let idle = std::mem::take(&mut *self.idle.lock());
        for conn in idle {
            if let Err(error) = conn.close().await {
                tracing::warn!(%error, "a connection was not closed in order");
            }
        }
    }
}

impl std::fmt::Debug for Readers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Readers").finish_non_exhaustive()
    }
}

/// A connection on loan.
pub(super) struct Reader<'r> {
    readers: &'r Readers,
    /// None when it failed in a way that it does not survive.
    conn: Option<SqliteConnection>,
    _place: SemaphorePermit<'r>,
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        if let Some(conn) = self.conn.take() {
            self.readers.idle.lock().push(conn);
        }
    }
}

impl Reader<'_> {
    /// The rows of each statement of a text.
    pub(super) async fn all(
        &mut self,
        sql: impl SqlSafeStr,
        args: Args,
    ) -> Result<Vec<Vec<SqliteRow>>, StoreError> {
        let args = args.finish()?;
        let conn = self
            .conn
            .as_mut()
            .ok_or_else(|| StoreError::unavailable("the connection is lost"))?;
        let mut answer = conn.fetch_many(sqlx::query_with(sql, args));
        let mut statements = Vec::new();
        let mut rows = Vec::new();
        let error = loop {
            match answer.try_next().await {
                Ok(Some(Either::Right(row))) => rows.push(row),
                Ok(Some(Either::Left(_))) => statements.push(std::mem::take(&mut rows)),
                Ok(None) => return Ok(statements),
                Err(error) => break error,
            }
        };
        drop(answer);
        if !fail::is_usable(&error) {
            self.conn = None;
        }
        Err(fail::read(error))
    }

    /// The rows of one statement.
    pub(super) async fn rows(
        &mut self,
        sql: impl SqlSafeStr,
        args: Args,
    ) -> Result<Vec<SqliteRow>, StoreError> {
        Ok(self.all(sql, args).await?.pop().unwrap_or_default())
    }

    /// The rows of the statements of a text about one run, made by `of_run!`.
    ///
    /// # Errors
    /// `not_found`, `deleted`.
    pub(super) async fn of_run(
        &mut self,
        sql: impl SqlSafeStr,
        args: Args,
    ) -> Result<Vec<Vec<SqliteRow>>, StoreError> {
        let mut answer = self.all(sql, args).await?;
        if answer.is_empty() {
            return Err(StoreError::corrupt("no answer"));
        }
        let found = answer.remove(0);
        match found.first().map(|row| row.try_get(0)) {
            Some(Ok(true)) => Ok(answer),
            Some(Ok(false)) => Err(StoreError::Deleted),
            Some(Err(error)) => Err(fail::read(error)),
            None => Err(StoreError::NotFound),
        }
    }
}
