//! The database file: its settings, its schema, and the write connection's own objects.

use std::path::{Path, PathBuf};
use std::time::Duration;

use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteSynchronous};
use sqlx::{ConnectOptions as _, Connection as _, Executor as _};

use super::fail;
use super::lock::FileLock;
use crate::store::{StoreError, migrate as schema};

/// How long a connection waits for another one's lock. Within a store nothing waits: there is one writer, and readers of a
/// write-ahead log block nobody.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// Prepared texts per connection. A transition is one text; more of them come from the rows a few transitions have besides.
const STATEMENTS: usize = 256;

/// The log is copied into the database when it has this many pages of 4 KiB: often enough to stay small, seldom enough not to
/// show in the commits.
const CHECKPOINT_PAGES: &str = "4000";

/// The path of a `sqlite:` URL, relative to the working directory unless it begins with a slash. Nothing else is read from it.
pub(crate) fn path_of(url: &str) -> Option<PathBuf> {
    let rest = url.strip_prefix("sqlite:")?;
    let rest = rest.strip_prefix("//").unwrap_or(rest);
    let path = rest.split_once('?').map_or(rest, |(path, _)| path);
    Some(PathBuf::from(path))
}

/// The path from the root: it means the same file for as long as the process lives, and no name has a meaning of its own to SQLite.
pub(super) fn absolute(path: &Path) -> Result<PathBuf, StoreError> {
    std::path::absolute(path).map_err(|error| StoreError::Open(format!("{}: {error}", path.display())))
}

/// What every connection has.
fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .foreign_keys(false)
        .busy_timeout(BUSY_TIMEOUT)
        .statement_cache_capacity(STATEMENTS)
        .disable_statement_logging()
}

/// A connection that writes.
pub(super) fn writer(path: &Path) -> SqliteConnectOptions {
    options(path)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .pragma("wal_autocheckpoint", CHECKPOINT_PAGES)
        // What a savepoint may have to undo stays out of the file system.
        .pragma("temp_store", "memory")
        // In KiB when negative: the pages that running runs share.
        .pragma("cache_size", "-32768")
}

/// A connection that cannot write.
pub(super) fn reader(path: &Path) -> SqliteConnectOptions {
    options(path)
        .pragma("query_only", "true")
        .pragma("cache_size", "-8192")
}

/// Gives a write connection what lives in it alone: the statement that writes a transition.
pub(super) async fn equip(conn: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    conn.execute(include_str!("transition.sql")).await.map(|_| ())
}

/// Opens the file, or makes it, and brings it to a state in which a store can begin: the schema of this program, and no lease.
/// Every lease found was a dead process's, which the lock proves; the fences stay, so none of its handles is ever good again.
///
/// # Errors
/// `open` for a file that is no database of ours; `unavailable`.
pub(super) async fn open(path: &Path) -> Result<SqliteConnection, StoreError> {
    let failed = |error| fail::open(path, error);
    let mut conn = writer(path)
        .create_if_missing(true)
        .connect()
        .await
        .map_err(failed)?;
    schema::prepare(&mut conn, &schema::sqlite()).await?;
    conn.execute("DELETE FROM run_leases").await.map_err(failed)?;
    equip(&mut conn).await.map_err(failed)?;
    Ok(conn)
}

/// Applies the missing steps to a file that no store has open.
///
/// # Errors
/// `open` when the file is in use or newer; `unavailable`.
pub(crate) async fn migrate(path: &Path) -> Result<(), StoreError> {
    let path = &absolute(path)?;
    let _lock = FileLock::take(path)?;
    let failed = |error| fail::open(path, error);
    let mut conn = writer(path)
        .create_if_missing(true)
        .connect()
        .await
        .map_err(failed)?;
    schema::apply(&mut conn, &schema::sqlite()).await?;
    conn.close().await.map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_a_path() {
        for (url, path) in [
            ("sqlite://iop.db", Some("iop.db")),
            ("sqlite:///var/lib/iop.db", Some("/var/lib/iop.db")),
            ("sqlite:iop.db", Some("iop.db")),
            ("sqlite://iop.db?mode=rwc", Some("iop.db")),
            ("postgres://host/iop", None),
        ] {
            assert_eq!(path_of(url).as_deref(), path.map(Path::new), "{url}");
        }
    }
}
