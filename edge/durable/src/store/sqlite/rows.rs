//! The driver's rows, and the columns whose payloads may be in `blobs`.

use rusqlite::types::ValueRef;

use crate::store::StoreError;
use crate::store::rows::Row;

/// A row that was read.
#[derive(Debug)]
pub(super) struct Found(Vec<Column>);

#[derive(Debug)]
enum Column {
    Null,
    Integer(i64),
    Real,
    /// As it is stored: whether it is UTF-8 is asked when it is read.
    Text(Box<[u8]>),
    Blob(Box<[u8]>),
}

impl Found {
    /// # Errors
    /// The driver's.
    pub(super) fn read(row: &rusqlite::Row<'_>, columns: usize) -> rusqlite::Result<Self> {
        let read = |at| {
            Ok(match row.get_ref(at)? {
                ValueRef::Null => Column::Null,
                ValueRef::Integer(n) => Column::Integer(n),
                ValueRef::Real(_) => Column::Real,
                ValueRef::Text(text) => Column::Text(text.into()),
                ValueRef::Blob(bytes) => Column::Blob(bytes.into()),
            })
        };
        (0..columns).map(read).collect::<rusqlite::Result<_>>().map(Self)
    }

    /// Whether the first column is true.
    pub(super) fn is_true(&self) -> bool {
        matches!(self.0.first(), Some(Column::Integer(n)) if *n != 0)
    }

    /// What `of` makes of a column.
    ///
    /// # Errors
    /// `corrupt` when it is of another kind than `wanted`.
    fn as_a<'r, T>(
        &'r self,
        at: usize,
        wanted: &str,
        of: impl FnOnce(&'r Column) -> Option<T>,
    ) -> Result<Option<T>, StoreError> {
        match self.0.get(at) {
            Some(Column::Null) => Ok(None),
            Some(column) => of(column)
                .map(Some)
                .ok_or_else(|| StoreError::corrupt(format!("column {at}: is no {wanted}"))),
            None => Err(StoreError::corrupt(format!("column {at}: is missing"))),
        }
    }
}

impl Row for Found {
    fn number(&self, at: usize) -> Result<Option<i64>, StoreError> {
        self.as_a(at, "number", |column| match column {
            Column::Integer(n) => Some(*n),
            Column::Null | Column::Real | Column::Text(_) | Column::Blob(_) => None,
        })
    }

    fn text(&self, at: usize) -> Result<Option<&str>, StoreError> {
        self.as_a(at, "text", |column| match column {
            Column::Text(text) => std::str::from_utf8(text).ok(),
            Column::Null | Column::Integer(_) | Column::Real | Column::Blob(_) => None,
        })
    }

    fn bytes(&self, at: usize) -> Result<Option<&[u8]>, StoreError> {
        self.as_a(at, "sequence of bytes", |column| match column {
            Column::Text(bytes) | Column::Blob(bytes) => Some(&**bytes),
            Column::Null | Column::Integer(_) | Column::Real => None,
        })
    }

    fn flag(&self, at: usize) -> Result<Option<bool>, StoreError> {
        Ok(self.number(at)?.map(|n| n != 0))
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
