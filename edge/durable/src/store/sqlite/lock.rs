//! One store per file: an OS lock beside the database, held for the life of the store and gone with its process.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

use crate::store::StoreError;

/// Holds `<db>.lock`. Whoever has it knows that every earlier holder of a lease in the file is dead.
#[derive(Debug)]
pub(super) struct FileLock {
    /// Unlocked when it is closed.
    _file: File,
}

impl FileLock {
    /// # Errors
    /// `open` when another store has the file, or the lock file cannot be made; never waits.
    pub(super) fn take(database: &Path) -> Result<Self, StoreError> {
        let path = path_beside(database);
        let file = OpenOptions::new()
            .create(true)
            .read(true)
            .write(true)
            .truncate(false)
            .open(&path)
            .map_err(|e| StoreError::Open(format!("{}: cannot be opened: {e}", path.display())))?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => Err(StoreError::Open(format!(
                "{} is in use: another program holds {}",
                database.display(),
                path.display()
            ))),
            Err(TryLockError::Error(e)) => Err(StoreError::Open(format!(
                "{}: cannot be locked: {e}",
                path.display()
            ))),
        }
    }
}

fn path_beside(database: &Path) -> PathBuf {
    let mut path = database.as_os_str().to_owned();
    path.push(".lock");
    PathBuf::from(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_locked_once_until_the_lock_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let database = dir.path().join("iop.db");
        let lock = FileLock::take(&database).unwrap();
        let error = FileLock::take(&database).unwrap_err().to_string();
        assert!(
            error.contains("iop.db.lock") && error.contains("in use"),
            "{error}"
        );
        drop(lock);
        FileLock::take(&database).unwrap();
    }

    #[test]
    fn a_folder_that_does_not_exist_is_named() {
        let error = FileLock::take(Path::new("/nowhere/iop.db")).unwrap_err();
        assert_eq!(error.kind(), "open");
        assert!(error.to_string().contains("/nowhere/iop.db.lock"), "{error}");
    }
}
