//! What a failure of SQLite means: who fails with it, and whether anything may have been written.

use crate::store::StoreError;

/// How a statement of a transaction failed.
#[derive(Debug)]
pub(super) enum Fail {
    /// The statement was undone and concerns its caller alone; the transaction goes on.
    Own(StoreError),
    /// The transaction is lost, for everybody in it.
    Lost(sqlx::Error),
}

impl From<StoreError> for Fail {
    fn from(error: StoreError) -> Self {
        Self::Own(error)
    }
}

/// What a statement was refused for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The head or the lease is not what the writer believed.
    Guard,
    /// Events are missing before the first one.
    Gap,
    /// A key is taken.
    Taken,
    /// Anything else that is wrong with the statement or its values.
    Other,
}

impl Refusal {
    /// Whether `transition.sql` raised it, which undoes its statement and nothing else.
    pub(super) fn is_ours(self) -> bool {
        match self {
            Self::Guard | Self::Gap => true,
            Self::Taken | Self::Other => false,
        }
    }
}

/// <https://www.sqlite.org/rescode.html>; extended codes carry the primary one in their lowest byte.
const PRIMARY: i32 = 0xff;
const ERROR: i32 = 1;
const TOOBIG: i32 = 18;
const CONSTRAINT: i32 = 19;
const MISMATCH: i32 = 20;
const RANGE: i32 = 25;
const NOTADB: i32 = 26;
const CANTOPEN: i32 = 14;

/// The result code of SQLite, when it was SQLite that failed.
fn code(error: &sqlx::Error) -> Option<i32> {
    error.as_database_error()?.code()?.parse().ok()
}

/// The refusal that this error is: of a kind that undoes its statement. After any other error SQLite may have rolled the
/// transaction back by itself.
pub(super) fn refusal(error: &sqlx::Error) -> Option<Refusal> {
    let database = error.as_database_error()?;
    if database.is_unique_violation() {
        return Some(Refusal::Taken);
    }
    match (code(error)? & PRIMARY, database.message()) {
        (CONSTRAINT, "guard") => Some(Refusal::Guard),
        (CONSTRAINT, "gap") => Some(Refusal::Gap),
        (CONSTRAINT | TOOBIG | ERROR | MISMATCH | RANGE, _) => Some(Refusal::Other),
        _ => None,
    }
}

/// Whether the connection can be used again after this error.
pub(super) fn is_usable(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Database(_))
}

/// What the caller of a refused statement is told, unless the guard tells more.
pub(super) fn refused(refusal: Refusal, error: &sqlx::Error) -> StoreError {
    match refusal {
        Refusal::Taken => StoreError::Duplicate,
        Refusal::Gap => StoreError::corrupt("not written: events are missing before these"),
        Refusal::Guard | Refusal::Other => StoreError::corrupt(format!("not written: {error}")),
    }
}

/// A read that failed. Nothing was written.
pub(super) fn read(error: sqlx::Error) -> StoreError {
    StoreError::unavailable(error)
}

/// A file that cannot be opened is for people; anything else may heal.
pub(super) fn open(path: &std::path::Path, error: sqlx::Error) -> StoreError {
    match code(&error).map(|code| code & PRIMARY) {
        Some(NOTADB | CANTOPEN) => StoreError::Open(format!("{}: {error}", path.display())),
        _ => StoreError::unavailable(error),
    }
}
