//! The database file: its settings, its schema, and the write connection's own objects.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::OpenFlags;
use rusqlite::config::DbConfig;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteSynchronous};
use sqlx::{ConnectOptions as _, Connection as _, Executor as _};

use super::lock::FileLock;
use super::{checkpoint, fail};
use crate::store::{StoreError, migrate as schema};

/// How long a connection waits for another one's lock. Within a store nothing waits: there is one writer, and readers of a
/// write-ahead log block nobody.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// Prepared statements of a connection: all that the writer has, and more than a reader needs.
const STATEMENTS: usize = 64;

/// The path of a `sqlite:` URL, relative to the working directory unless it begins with a slash. Nothing else is read from it.
pub fn path_of(url: &str) -> Option<PathBuf> {
    let rest = url.strip_prefix("sqlite:")?;
    let rest = rest.strip_prefix("//").unwrap_or(rest);
    let path = rest.split_once('?').map_or(rest, |(path, _)| path);
    Some(PathBuf::from(path))
}

/// The path from the root: it means the same file for as long as the process lives, and no name has a meaning of its own to SQLite.
pub(super) fn absolute(path: &Path) -> Result<PathBuf, StoreError> {
    std::path::absolute(path).map_err(|error| StoreError::Open(format!("{}: {error}", path.display())))
}

/// What every connection of the schema's keeper has.
pub(super) fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .foreign_keys(false)
        .busy_timeout(BUSY_TIMEOUT)
        .disable_statement_logging()
}

/// A connection that writes transitions. The file is there.
pub(super) fn writer(path: &Path) -> rusqlite::Result<rusqlite::Connection> {
    let conn = attached(path)?;
    conn.pragma_update(None, "journal_mode", "wal")?;
    conn.pragma_update(None, "synchronous", "full")?;
    checkpoint::watch(&conn);
    // What a savepoint may have to undo stays out of the file system.
    conn.pragma_update(None, "temp_store", "memory")?;
    // In KiB when negative. What the commits of running runs touch fits in; a larger cache costs more than it saves, because
    // SQLite goes through its whole hash table at the end of a transaction that has split pages.
    conn.pragma_update(None, "cache_size", -4_096)?;
    Ok(conn)
}

/// A connection that changes the schema.
fn migrator(path: &Path) -> SqliteConnectOptions {
    options(path)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
}

/// A connection that copies the log. The file is there.
pub(super) fn copier(path: &Path) -> rusqlite::Result<rusqlite::Connection> {
    let conn = attached(path)?;
    conn.pragma_update(None, "synchronous", "full")?;
    Ok(conn)
}

/// A connection that cannot write. The file is there.
pub(super) fn reader(path: &Path) -> rusqlite::Result<rusqlite::Connection> {
    let conn = attached(path)?;
    conn.pragma_update(None, "query_only", "true")?;
    Ok(conn)
}

/// A connection to a file that is there. One thread uses it at a time, and a path is a path.
fn attached(path: &Path) -> rusqlite::Result<rusqlite::Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = rusqlite::Connection::open_with_flags(path, flags)?;
    conn.busy_timeout(BUSY_TIMEOUT)?;
    conn.set_prepared_statement_cache_capacity(STATEMENTS);
    // A plan does not hang on what is bound to it; otherwise a statement is prepared anew for each new value.
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
    Ok(conn)
}

/// Opens the file, or makes it, and brings it to a state in which a store can begin: the schema of this program, and no lease.
/// Every lease found was a dead process's, which the lock proves; the fences stay, so none of its handles is ever good again.
///
/// # Errors
/// `open` for a file that is no database of ours; `unavailable`.
pub(super) async fn open(path: &Path) -> Result<rusqlite::Connection, StoreError> {
    let failed = |error| fail::open(path, error);
    let mut conn: SqliteConnection = migrator(path).connect().await.map_err(failed)?;
    schema::prepare(&mut conn, &schema::sqlite()).await?;
    conn.execute("DELETE FROM run_leases").await.map_err(failed)?;
    // The other one is there before this one goes: the last to leave would tidy up for nothing.
    let writer = writer(path).map_err(StoreError::unavailable)?;
    conn.close().await.map_err(failed)?;
    Ok(writer)
}

/// Applies the missing steps to a file that no store has open.
///
/// # Errors
/// `open` when the file is in use or newer; `unavailable`.
pub(crate) async fn migrate(path: &Path) -> Result<(), StoreError> {
    let path = &absolute(path)?;
    let _lock = FileLock::take(path)?;
    let failed = |error| fail::open(path, error);
    let mut conn = migrator(path).connect().await.map_err(failed)?;
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
