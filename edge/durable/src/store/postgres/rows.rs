//! The driver's rows, and what is read with joins: payloads may be in `blobs`.

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use crate::store::StoreError;
use crate::store::rows::{Row, activity_columns, wait_columns};

/// One that cannot be read as what it should be is damaged.
fn read<'r, T>(row: &'r PgRow, at: usize) -> Result<Option<T>, StoreError>
where
    T: sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    row.try_get(at)
        .map_err(|error| StoreError::corrupt(error.to_string()))
}

impl Row for PgRow {
    fn number(&self, at: usize) -> Result<Option<i64>, StoreError> {
        read(self, at)
    }

    fn text(&self, at: usize) -> Result<Option<&str>, StoreError> {
        read(self, at)
    }

    fn bytes(&self, at: usize) -> Result<Option<&[u8]>, StoreError> {
        read(self, at)
    }

    fn flag(&self, at: usize) -> Result<Option<bool>, StoreError> {
        read(self, at)
    }
}

/// Activities `a` with their bytes, from the row or from `blobs`.
pub(super) const ACTIVITIES: &str = concat!(
    "SELECT ",
    activity_columns!("COALESCE(a.input, i.bytes)", "COALESCE(a.output, o.bytes)"),
    " FROM activities a \
     LEFT JOIN blobs i ON a.input IS NULL AND i.run_id = a.run_id AND i.digest = a.input_digest \
     LEFT JOIN blobs o ON a.output IS NULL AND o.run_id = a.run_id AND o.digest = a.output_digest "
);

/// Waits `w` with their bytes, from the row or from `blobs`.
pub(super) const WAITS: &str = concat!(
    "SELECT ",
    wait_columns!("COALESCE(w.subject, s.bytes)", "COALESCE(w.delivered, d.bytes)"),
    " FROM waits w \
     LEFT JOIN blobs s ON w.subject IS NULL AND s.run_id = w.run_id AND s.digest = w.subject_digest \
     LEFT JOIN blobs d ON w.delivered IS NULL AND d.run_id = w.run_id AND d.digest = w.delivered_digest "
);
