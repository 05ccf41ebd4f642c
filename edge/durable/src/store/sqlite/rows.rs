//! The driver's rows, and the columns whose payloads may be in `blobs`.

use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

use crate::store::rows::Row;

impl Row for SqliteRow {
    fn number(&self, at: usize) -> Result<Option<i64>, sqlx::Error> {
        self.try_get(at)
    }

    fn text(&self, at: usize) -> Result<Option<&str>, sqlx::Error> {
        self.try_get(at)
    }

    fn bytes(&self, at: usize) -> Result<Option<&[u8]>, sqlx::Error> {
        self.try_get(at)
    }

    fn flag(&self, at: usize) -> Result<Option<bool>, sqlx::Error> {
        self.try_get(at)
    }
}

/// What SQL is spliced in for the bytes of a payload: from the row, or from `blobs`.
macro_rules! bytes_of {
    ($row:literal, $bytes:literal, $digest:literal) => {
        concat!(
            "coalesce(",
            $row,
            ".",
            $bytes,
            ", (SELECT b.bytes FROM blobs b WHERE b.run_id = ",
            $row,
            ".run_id AND b.digest = ",
            $row,
            ".",
            $digest,
            "))"
        )
    };
}
pub(super) use bytes_of;

/// The columns of an activity.
macro_rules! activity_columns {
    () => {
        $crate::store::rows::activity_columns!(
            $crate::store::sqlite::rows::bytes_of!("a", "input", "input_digest"),
            $crate::store::sqlite::rows::bytes_of!("a", "output", "output_digest")
        )
    };
}
pub(super) use activity_columns;

/// The columns of a wait.
macro_rules! wait_columns {
    () => {
        $crate::store::rows::wait_columns!(
            $crate::store::sqlite::rows::bytes_of!("w", "subject", "subject_digest"),
            $crate::store::sqlite::rows::bytes_of!("w", "delivered", "delivered_digest")
        )
    };
}
pub(super) use wait_columns;
