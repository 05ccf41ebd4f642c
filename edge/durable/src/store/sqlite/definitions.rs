//! Definitions and their names.

use rusqlite::params;

use super::args::args;
use super::fail::Fail;
use super::read::Reads;
use super::writer::{Tx, Work};
use crate::store::rows::{self, all, signed, unsigned};
use crate::store::{Define, Defined, Definition, StoreError, check};

/// A body to be the newest version of its name, checked.
pub(super) struct Defining {
    define: Define,
    body: String,
}

impl Defining {
    /// # Errors
    /// `corrupt` when it is none.
    pub(super) fn new(define: Define) -> Result<Self, StoreError> {
        check::define(&define)?;
        let body = std::str::from_utf8(&define.body)
            .map_err(|error| StoreError::corrupt(format!("not written: {error}")))?
            .to_owned();
        Ok(Self { define, body })
    }
}

impl Work for Defining {
    type Answer = Defined;

    fn run(self, tx: &mut Tx<'_>) -> Result<Defined, Fail> {
        let Self { define, body } = self;
        tx.execute(
            "INSERT INTO definition_names (kind, name, origin, withdrawn) VALUES (?, ?, ?, 0) \
             ON CONFLICT (kind, name) DO UPDATE SET origin = excluded.origin, withdrawn = 0",
            params![define.kind, define.name, define.origin.as_str()],
        )?;
        let newest = tx.row(
            "SELECT version, digest FROM definitions WHERE kind = ? AND name = ? ORDER BY version DESC LIMIT 1",
            params![define.kind, define.name],
            |row| Ok((row.get::<_, i64>(0)?, row.get::<_, String>(1)?)),
        )?;
        let newest = match newest {
            Some((version, digest)) if digest == define.digest => {
                return Ok(Defined::Same {
                    version: unsigned(version)?,
                });
            }
            Some((version, _)) => unsigned(version)?,
            None => 0,
        };
        let version = newest + 1;
        tx.execute(
            "INSERT INTO definitions (kind, name, version, digest, body, created_at) VALUES (?, ?, ?, ?, ?, ?)",
            params![
                define.kind,
                define.name,
                signed(version),
                define.digest,
                body,
                tx.wall().as_millis(),
            ],
        )?;
        Ok(Defined::New { version })
    }
}

/// Withdraws a name.
pub(super) struct Withdraw {
    pub(super) kind: String,
    pub(super) name: String,
}

impl Work for Withdraw {
    type Answer = bool;

    fn run(self, tx: &mut Tx<'_>) -> Result<bool, Fail> {
        let sql = "UPDATE definition_names SET withdrawn = 1 WHERE kind = ? AND name = ? AND withdrawn = 0";
        Ok(tx.execute(sql, params![self.kind, self.name])? > 0)
    }
}

/// The versions of a name, with what the name says.
macro_rules! versions {
    ($rest:literal) => {
        concat!(
            "SELECT ",
            rows::definition_columns!("d.body"),
            " FROM definition_names n JOIN definitions d ON d.kind = n.kind AND d.name = n.name \
             WHERE n.kind = ? AND n.name = ?",
            $rest
        )
    };
}

impl Reads {
    pub(super) async fn definition(
        &self,
        kind: &str,
        name: &str,
        version: Option<u64>,
    ) -> Result<Option<Definition>, StoreError> {
        const NEWEST: &str = versions!(" ORDER BY d.version DESC LIMIT 1");
        const EXACTLY: &str = versions!(" AND d.version = ?");
        let found = match version {
            None => self.readers.rows(NEWEST, args![kind, name]).await?,
            Some(version) => {
                self.readers
                    .rows(EXACTLY, args![kind, name, signed(version)])
                    .await?
            }
        };
        let Some(row) = found.first() else {
            return Ok(None);
        };
        rows::definition(row)?.verified().map(Some)
    }

    pub(super) async fn definitions(
        &self,
        kind: &str,
        after: Option<String>,
        limit: u32,
    ) -> Result<Vec<Definition>, StoreError> {
        const SQL: &str = concat!(
            "SELECT ",
            rows::definition_columns!("d.body"),
            " FROM definition_names n CROSS JOIN definitions d ON d.kind = n.kind AND d.name = n.name \
             AND d.version = (SELECT max(v.version) FROM definitions v WHERE v.kind = n.kind AND v.name = n.name) \
             WHERE n.kind = ? AND n.name > ? ORDER BY n.name LIMIT ?"
        );
        let mut after = after.unwrap_or_default();
        let mut whole = Vec::new();
        loop {
            let missing = limit as usize - whole.len();
            let args = args![kind, &*after, signed(missing as u64)];
            let page = all(&self.readers.rows(SQL, args).await?, rows::definition)?;
            let ended = page.len() < missing;
            if let Some(last) = page.last() {
                after.clone_from(&last.name);
            }
            whole.extend(
                page.into_iter()
                    .filter_map(|definition| definition.verified().ok()),
            );
            if ended || whole.len() >= limit as usize {
                return Ok(whole);
            }
        }
    }

    pub(super) async fn versions(
        &self,
        kind: &str,
        name: &str,
        mut after: u64,
        limit: u32,
    ) -> Result<Vec<Definition>, StoreError> {
        const SQL: &str = versions!(" AND d.version > ? ORDER BY d.version LIMIT ?");
        let mut whole = Vec::new();
        loop {
            let missing = limit as usize - whole.len();
            let args = args![kind, name, signed(after), signed(missing as u64)];
            let page = all(&self.readers.rows(SQL, args).await?, rows::definition)?;
            let ended = page.len() < missing;
            if let Some(last) = page.last() {
                after = last.version;
            }
            whole.extend(
                page.into_iter()
                    .filter_map(|definition| definition.verified().ok()),
            );
            if ended || whole.len() >= limit as usize {
                return Ok(whole);
            }
        }
    }
}
