//! What people do to a whole database, named by the store's URL: what `iop-edge db` does beside `migrate`.

use std::path::Path;

use super::postgres::PostgresStore;
use super::sqlite::{self, SqliteStore};
use super::{Rebuilt, Store as _, StoreError};

/// Copies a SQLite database into a file that is not there yet. Allowed beside a store that has it open.
///
/// # Errors
/// `open` when there is no such database, the file is there, or the database is none of SQLite's, saying what to do;
/// `unavailable`.
pub async fn backup(url: &str, to: &Path) -> Result<(), StoreError> {
    match sqlite::path_of(url) {
        Some(path) => sqlite::backup(&path, to).await,
        None => Err(StoreError::Open(
            "only SQLite databases are copied by this; use pg_dump for PostgreSQL, which is consistent beside running edges"
                .to_owned(),
        )),
    }
}

/// Derives the indexes anew and looks at every run (D231). A SQLite database is locked for it as by a store; on PostgreSQL other
/// stores may go on.
///
/// # Errors
/// `open` when there is no such database, it is in use, or its schema is not this program's; `unavailable`.
pub async fn rebuild_index(url: &str) -> Result<Rebuilt, StoreError> {
    if let Some(path) = sqlite::path_of(url) {
        if !path.exists() {
            return Err(StoreError::Open(format!(
                "{}: there is no such file",
                path.display()
            )));
        }
        let store = SqliteStore::open(&path).await?;
        let rebuilt = store.rebuild_index().await;
        store.close().await;
        return rebuilt;
    }
    PostgresStore::connect(url).await?.rebuild_index().await
}
