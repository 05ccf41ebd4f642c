//! A copy of the database that a store may be using meanwhile: one read transaction, written out without free pages.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use sqlx::{ConnectOptions as _, Connection as _};

use super::{connect, fail};
use crate::store::StoreError;

/// Copies the database into a file that is not there yet. The file has its name once it is whole and on the disk; before that it
/// is called `….partial`.
///
/// # Errors
/// `open` when the copy's name is taken, nothing can be written there, or there is no database; `unavailable`.
pub(crate) async fn backup(database: &Path, to: &Path) -> Result<(), StoreError> {
    let (database, to) = (&connect::absolute(database)?, &connect::absolute(to)?);
    if to.exists() {
        return Err(taken(to, "is there already"));
    }
    let partial = Partial::create(database, to)?;
    let path = partial
        .0
        .to_str()
        .ok_or_else(|| taken(to, "is no name in UTF-8"))?;
    let failed = |error| fail::open(database, error);
    let mut conn = connect::options(database).connect().await.map_err(failed)?;
    let copied = sqlx::query("VACUUM INTO ?").bind(path).execute(&mut conn).await;
    conn.close().await.map_err(failed)?;
    copied.map_err(failed)?;
    partial.finish(to).map_err(|error| taken(to, &error.to_string()))
}

fn taken(to: &Path, why: &str) -> StoreError {
    StoreError::Open(format!("{}: {why}", to.display()))
}

/// The copy while it is made; removed unless it is finished. Two copies to one name do not meet in it.
struct Partial(PathBuf);

impl Partial {
    /// An empty file that as many people may read as the database.
    fn create(database: &Path, to: &Path) -> Result<Self, StoreError> {
        let permissions = std::fs::metadata(database)
            .map_err(|error| taken(database, &error.to_string()))?
            .permissions();
        let mut path = to.as_os_str().to_owned();
        path.push(".partial");
        let path = PathBuf::from(path);
        let made = OpenOptions::new().create_new(true).write(true).open(&path);
        let file = made.map_err(|error| {
            if error.kind() == io::ErrorKind::AlreadyExists {
                taken(
                    &path,
                    "is there already: another copy is being made, or one was broken off and can be removed",
                )
            } else {
                taken(&path, &error.to_string())
            }
        })?;
        let partial = Self(path);
        file.set_permissions(permissions)
            .map_err(|error| taken(&partial.0, &error.to_string()))?;
        Ok(partial)
    }

    /// SQLite does not wait for the disk here.
    fn finish(self, to: &Path) -> io::Result<()> {
        File::open(&self.0)?.sync_all()?;
        std::fs::rename(&self.0, to)?;
        match to.parent() {
            Some(folder) => File::open(folder)?.sync_all(),
            None => Ok(()),
        }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // Renamed by now when all went well.
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    async fn rows(path: &Path) -> Vec<(String, i64)> {
        let mut conn = connect::options(path).connect().await.unwrap();
        sqlx::query_as("SELECT name, length(digest) FROM definitions ORDER BY name")
            .fetch_all(&mut conn)
            .await
            .unwrap()
    }

    /// A database with one definition, held by a store.
    async fn database(dir: &Path) -> (PathBuf, super::super::SqliteStore) {
        let path = dir.join("iop.db");
        let store = super::super::SqliteStore::open(&path).await.unwrap();
        let mut conn = connect::options(&path).connect().await.unwrap();
        let digest = "0".repeat(64);
        sqlx::query(
            "INSERT INTO definitions (kind, name, version, digest, body, created_at) VALUES ('agent', 'a', 1, ?, '{}', 1)",
        )
        .bind(digest)
        .execute(&mut conn)
        .await
        .unwrap();
        (path, store)
    }

    #[tokio::test]
    async fn a_copy_is_made_beside_a_store_and_has_what_was_committed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, store) = database(dir.path()).await;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let copy = dir.path().join("copy.db");
        backup(&path, &copy).await.unwrap();
        assert_eq!(rows(&copy).await, [("a".to_owned(), 64)]);
        assert_eq!(
            std::fs::metadata(&copy).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let partial = dir.path().join("copy.db.partial");
        assert!(!partial.exists());
        // A store can be opened on it.
        super::super::SqliteStore::open(&copy)
            .await
            .unwrap()
            .close()
            .await;

        let before = std::fs::read(&copy).unwrap();
        let error = backup(&path, &copy).await.unwrap_err();
        assert!(error.to_string().contains("copy.db: is there already"), "{error}");
        assert_eq!(std::fs::read(&copy).unwrap(), before);
        store.close().await;
    }

    #[tokio::test]
    async fn what_cannot_be_copied_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let (path, store) = database(dir.path()).await;
        store.close().await;
        let copy = dir.path().join("copy.db");

        let error = backup(&dir.path().join("gone.db"), &copy).await.unwrap_err();
        assert!(
            error.kind() == "open" && error.to_string().contains("gone.db"),
            "{error}"
        );
        assert!(!dir.path().join("gone.db").exists());

        let text = dir.path().join("text.db");
        std::fs::write(
            &text,
            "no database at all, but long enough to have a header".repeat(9),
        )
        .unwrap();
        let error = backup(&text, &copy).await.unwrap_err();
        assert!(
            error.kind() == "open" && error.to_string().contains("text.db"),
            "{error}"
        );

        let nowhere = dir.path().join("nowhere/copy.db");
        let error = backup(&path, &nowhere).await.unwrap_err();
        assert!(error.to_string().contains("nowhere/copy.db"), "{error}");

        let partial = dir.path().join("copy.db.partial");
        assert!(!copy.exists() && !partial.exists());
        std::fs::write(&partial, "another's").unwrap();
        let error = backup(&path, &copy).await.unwrap_err();
        assert!(error.to_string().contains("copy.db.partial"), "{error}");
        assert_eq!(std::fs::read(&partial).unwrap(), b"another's");
    }
}
