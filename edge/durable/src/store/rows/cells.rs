//! Single columns: what a driver has to give, and what is made of it.

use bytes::Bytes;

use crate::envelope::PayloadColumns;
use crate::ids::RunId;
use crate::payload::Digest;
use crate::store::StoreError;
use crate::time::Timestamp;

/// A row as a driver has it: columns by position from 0, `None` for NULL, `corrupt` for one that is of another kind.
pub(in crate::store) trait Row {
    fn number(&self, at: usize) -> Result<Option<i64>, StoreError>;
    fn text(&self, at: usize) -> Result<Option<&str>, StoreError>;
    fn bytes(&self, at: usize) -> Result<Option<&[u8]>, StoreError>;
    fn flag(&self, at: usize) -> Result<Option<bool>, StoreError>;
}

/// What a column is read as.
pub(in crate::store) trait Cell<'r>: Sized {
    /// `None` for NULL.
    fn of(row: &'r dyn Row, at: usize) -> Result<Option<Self>, StoreError>;
}

impl<'r> Cell<'r> for i64 {
    fn of(row: &'r dyn Row, at: usize) -> Result<Option<Self>, StoreError> {
        row.number(at)
    }
}

impl<'r> Cell<'r> for bool {
    fn of(row: &'r dyn Row, at: usize) -> Result<Option<Self>, StoreError> {
        row.flag(at)
    }
}

impl<'r> Cell<'r> for &'r str {
    fn of(row: &'r dyn Row, at: usize) -> Result<Option<Self>, StoreError> {
        row.text(at)
    }
}

impl<'r> Cell<'r> for String {
    fn of(row: &'r dyn Row, at: usize) -> Result<Option<Self>, StoreError> {
        Ok(row.text(at)?.map(str::to_owned))
    }
}

impl<'r> Cell<'r> for &'r [u8] {
    fn of(row: &'r dyn Row, at: usize) -> Result<Option<Self>, StoreError> {
        row.bytes(at)
    }
}

impl<'r> Cell<'r> for Bytes {
    fn of(row: &'r dyn Row, at: usize) -> Result<Option<Self>, StoreError> {
        Ok(row.bytes(at)?.map(Bytes::copy_from_slice))
    }
}

/// A column that may be NULL.
impl<'r, T: Cell<'r>> Cell<'r> for Option<T> {
    fn of(row: &'r dyn Row, at: usize) -> Result<Option<Self>, StoreError> {
        T::of(row, at).map(Some)
    }
}

/// Reads one row from left to right.
pub(in crate::store) struct Cells<'r> {
    row: &'r dyn Row,
    next: usize,
}

impl<'r> Cells<'r> {
    pub(in crate::store) fn new(row: &'r dyn Row) -> Self {
        Self { row, next: 0 }
    }

    /// # Errors
    /// `corrupt` when the column cannot hold what it should.
    pub(in crate::store) fn get<T: Cell<'r>>(&mut self) -> Result<T, StoreError> {
        let at = self.next;
        self.next += 1;
        T::of(self.row, at)?.ok_or_else(|| StoreError::corrupt(format!("column {at}: is missing")))
    }

    pub(super) fn some_digest(&mut self, what: &str) -> Result<Option<Digest>, StoreError> {
        self.get::<Option<&[u8]>>()?
            .map(|bytes| {
                Digest::try_from(bytes).map_err(|_| StoreError::corrupt(format!("{what}: is no digest")))
            })
            .transpose()
    }

    pub(super) fn digest(&mut self, what: &str) -> Result<Digest, StoreError> {
        self.some_digest(what)?
            .ok_or_else(|| StoreError::corrupt(format!("{what}: is missing")))
    }

    /// The bytes may come from the row or from `blobs`.
    pub(super) fn payload(&mut self, what: &str) -> Result<PayloadColumns, StoreError> {
        Ok(PayloadColumns {
            inline: self.get()?,
            digest: self.digest(what)?,
        })
    }

    pub(super) fn some_payload(&mut self, what: &str) -> Result<Option<PayloadColumns>, StoreError> {
        let inline = self.get()?;
        match (inline, self.some_digest(what)?) {
            (inline, Some(digest)) => Ok(Some(PayloadColumns { inline, digest })),
            (None, None) => Ok(None),
            (Some(_), None) => Err(StoreError::corrupt(format!("{what}: the digest is missing"))),
        }
    }

    pub(in crate::store) fn count(&mut self) -> Result<u64, StoreError> {
        unsigned(self.get()?)
    }

    pub(in crate::store) fn time(&mut self) -> Result<Timestamp, StoreError> {
        time(self.get()?)
    }

    pub(in crate::store) fn run(&mut self) -> Result<RunId, StoreError> {
        RunId::new(self.get()?).map_err(|error| StoreError::corrupt(error.to_string()))
    }
}

pub(in crate::store) fn time(ms: i64) -> Result<Timestamp, StoreError> {
    Timestamp::from_millis(ms).map_err(|error| StoreError::corrupt(error.to_string()))
}

pub(in crate::store) fn unsigned(n: i64) -> Result<u64, StoreError> {
    u64::try_from(n).map_err(|_| StoreError::corrupt("a number is negative"))
}

/// A number as its column has it; one that is too large for the column is larger than any that is stored.
pub(in crate::store) fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// Reads every row, or tells what is wrong with the first that cannot be read.
pub(in crate::store) fn all<R: Row, T>(
    rows: &[R],
    read: impl Fn(&dyn Row) -> Result<T, StoreError>,
) -> Result<Vec<T>, StoreError> {
    rows.iter().map(|row| read(row)).collect()
}
