//! Statements and their parameters. Several statements sent as one text cost one call of the driver, and its cache knows the text.
//!
//! SQLite binds parameters per statement; the driver deals them out in sequence over the statements of a text.

use bytes::Bytes;
use sqlx::Arguments as _;
use sqlx::error::BoxDynError;
use sqlx::sqlite::SqliteArguments;

use crate::envelope::PayloadColumns;
use crate::payload::Digest;
use crate::store::StoreError;

/// Texts with more statements are seldom twice the same; they are not kept prepared.
const COMMON: usize = 10;

/// Statements within a savepoint, and their parameters.
pub(super) struct Script {
    sql: String,
    args: Args,
    statements: usize,
}

impl Script {
    /// Takes back what a script has written, after one of its statements failed.
    pub(super) const UNDO: &'static str = "ROLLBACK TO script; RELEASE script";

    pub(super) fn new() -> Self {
        Self {
            sql: "SAVEPOINT script".to_owned(),
            args: Args::default(),
            statements: 0,
        }
    }

    /// Adds one statement; its parameters are put next.
    pub(super) fn statement(&mut self, sql: &str) -> &mut Args {
        self.sql.push_str("; ");
        self.sql.push_str(sql);
        self.statements += 1;
        &mut self.args
    }

    pub(super) fn is_common(&self) -> bool {
        self.statements <= COMMON
    }

    /// The text and its parameters.
    pub(super) fn finish(mut self) -> Result<(String, SqliteArguments), StoreError> {
        self.sql.push_str("; RELEASE script");
        Ok((self.sql, self.args.finish()?))
    }
}

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

    pub(super) fn bytes(&mut self, bytes: Bytes) -> &mut Self {
        self.put(Vec::from(bytes))
    }

    pub(super) fn some_bytes(&mut self, bytes: Option<Bytes>) -> &mut Self {
        self.put(bytes.map(Vec::from))
    }

    pub(super) fn digest(&mut self, digest: &Digest) -> &mut Self {
        self.put(digest.as_slice())
    }

    pub(super) fn some_digest(&mut self, digest: Option<&Digest>) -> &mut Self {
        self.put(digest.map(Digest::as_slice))
    }

    /// The two columns of a payload.
    pub(super) fn payload(&mut self, payload: PayloadColumns) -> &mut Self {
        self.some_bytes(payload.inline).digest(&payload.digest)
    }

    /// The two columns of a payload that need not be there.
    pub(super) fn some_payload(&mut self, payload: Option<PayloadColumns>) -> &mut Self {
        match payload {
            Some(payload) => self.payload(payload),
            None => self.nulls(2),
        }
    }

    pub(super) fn nulls(&mut self, columns: usize) -> &mut Self {
        for _ in 0..columns {
            self.put(None::<i64>);
        }
        self
    }

    /// # Errors
    /// `corrupt` when a value was not encoded; the driver fails with none of those that are put here.
    pub(super) fn finish(self) -> Result<SqliteArguments, StoreError> {
        match self.failed {
            None => Ok(self.values),
            Some(error) => Err(StoreError::corrupt(format!("not written: {error}"))),
        }
    }
}

/// `args![a, b]`: parameters for one statement.
macro_rules! args {
    ($($value:expr),* $(,)?) => {{
        let mut args = $crate::store::sqlite::script::Args::default();
        args$(.put($value))*;
        args
    }};
}
pub(super) use args;
