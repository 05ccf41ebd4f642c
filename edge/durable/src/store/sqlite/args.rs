//! Parameters of statements that read.

use sqlx::Arguments as _;
use sqlx::error::BoxDynError;
use sqlx::sqlite::SqliteArguments;

use crate::store::StoreError;

/// Parameters, in the order of their places.
#[derive(Default)]
pub(super) struct Args {
    values: SqliteArguments,
    failed: Option<BoxDynError>,
}

impl Args {
    pub(super) fn put<'t, T>(&mut self, value: T) -> &mut Self
    where
        T: sqlx::Encode<'t, sqlx::Sqlite> + sqlx::Type<sqlx::Sqlite>,
    {
        if let Err(error) = self.values.add(value) {
            self.failed.get_or_insert(error);
        }
        self
    }

    /// # Errors
    /// `corrupt` when a value was not encoded; the driver fails with none of those that are put here.
    pub(super) fn finish(self) -> Result<SqliteArguments, StoreError> {
        match self.failed {
            None => Ok(self.values),
            Some(error) => Err(StoreError::corrupt(format!("a parameter: {error}"))),
        }
    }
}

/// `args![a, b]`: parameters for one text.
macro_rules! args {
    ($($value:expr),* $(,)?) => {{
        let mut args = $crate::store::sqlite::args::Args::default();
        args$(.put($value))*;
        args
    }};
}
pub(super) use args;
