//! What a failure of SQLite means: who fails with it, and whether anything may have been written.

use std::path::Path;

use rusqlite::ErrorCode;
use rusqlite::ffi::{SQLITE_CONSTRAINT_PRIMARYKEY, SQLITE_CONSTRAINT_UNIQUE};

use crate::store::StoreError;

/// How a job failed.
#[derive(Debug)]
pub(super) enum Fail {
    /// It is refused, or the caller's mistake.
    Own(StoreError),
    /// A statement failed.
    Driver(rusqlite::Error),
}

impl From<StoreError> for Fail {
    fn from(error: StoreError) -> Self {
        Self::Own(error)
    }
}

impl From<rusqlite::Error> for Fail {
    fn from(error: rusqlite::Error) -> Self {
        Self::Driver(error)
    }
}

/// What the caller of this statement is told, when the statement or its values are at fault. `None` for the failures of disks,
/// memory and locks, after which SQLite may have rolled the transaction back by itself.
pub(super) fn refused(error: &rusqlite::Error) -> Option<StoreError> {
    let rusqlite::Error::SqliteFailure(cause, _) = error else {
        // Of a value, not of the database.
        return Some(StoreError::corrupt(error.to_string()));
    };
    match (cause.code, cause.extended_code) {
        (ErrorCode::ConstraintViolation, SQLITE_CONSTRAINT_UNIQUE | SQLITE_CONSTRAINT_PRIMARYKEY) => {
            Some(StoreError::Duplicate)
        }
        (
            ErrorCode::ConstraintViolation
            | ErrorCode::TooBig
            | ErrorCode::TypeMismatch
            | ErrorCode::ParameterOutOfRange
            | ErrorCode::Unknown,
            _,
        ) => Some(StoreError::corrupt(format!("not written: {error}"))),
        _ => None,
    }
}

/// A read that failed. Nothing was written.
pub(super) fn read(error: rusqlite::Error) -> StoreError {
    StoreError::unavailable(error)
}

/// A file that cannot be opened is for people; anything else may heal.
pub(super) fn open(path: &Path, error: sqlx::Error) -> StoreError {
    /// `SQLITE_CANTOPEN`, `SQLITE_NOTADB`.
    const FOR_PEOPLE: [i32; 2] = [14, 26];
    let code = error
        .as_database_error()
        .and_then(|error| error.code()?.parse::<i32>().ok());
    // An extended code carries the primary one in its lowest byte.
    if code.is_some_and(|code| FOR_PEOPLE.contains(&(code & 0xff))) {
        StoreError::Open(format!("{}: {error}", path.display()))
    } else {
        StoreError::unavailable(error)
    }
}
