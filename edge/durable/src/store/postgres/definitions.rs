//! Definitions and their names. The row of a name is locked before its versions are looked at: of two who write one, the second
//! sees what the first has written.

use sqlx::postgres::PgConnection;
use sqlx::{Connection as _, Row as _};

use super::connect::Pool;
use super::sql::{NOW, Sql};
use crate::store::rows::{self, all, signed, unsigned};
use crate::store::{Define, Defined, Definition, StoreError, check};

/// # Errors
/// `corrupt` when it is none.
pub(super) async fn define(pool: &Pool, define: &Define) -> Result<Defined, StoreError> {
    check::define(define)?;
    let body = std::str::from_utf8(&define.body)
        .map_err(|error| StoreError::corrupt(format!("not written: {error}")))?;
    let own = (define.clone(), body.to_owned());
    let (version, new) = pool
        .transaction(move |conn| {
            let (define, body) = own.clone();
            Box::pin(define_on(conn, define, body))
        })
        .await?;
    let version = unsigned(version)?;
    Ok(if new {
        Defined::New { version }
    } else {
        Defined::Same { version }
    })
}

/// The version, and whether it is new.
async fn define_on(
    conn: &mut PgConnection,
    define: Define,
    body: String,
) -> Result<(i64, bool), sqlx::Error> {
    let mut tx = conn.begin().await?;
    sqlx::query(
        "INSERT INTO definition_names (kind, name, origin, withdrawn) VALUES ($1, $2, $3, false) \
         ON CONFLICT (kind, name) DO UPDATE SET origin = EXCLUDED.origin, withdrawn = false",
    )
    .bind(&define.kind)
    .bind(&define.name)
    .bind(define.origin.as_str())
    .execute(&mut *tx)
    .await?;
    // A statement of its own: it sees what was written while the lock was waited for.
    let newest = sqlx::query(
        "SELECT version, digest FROM definitions WHERE kind = $1 AND name = $2 ORDER BY version DESC LIMIT 1",
    )
    .bind(&define.kind)
    .bind(&define.name)
    .fetch_optional(&mut *tx)
    .await?;
    let newest: Option<(i64, String)> = newest
        .map(|row| Ok::<_, sqlx::Error>((row.try_get(0)?, row.try_get(1)?)))
        .transpose()?;
    let (version, new) = match newest {
        Some((version, digest)) if digest == define.digest => (version, false),
        Some((version, _)) => (version + 1, true),
        None => (1, true),
    };
    if new {
        sqlx::query(sqlx::AssertSqlSafe(format!(
            "INSERT INTO definitions (kind, name, version, digest, body, created_at) \
             VALUES ($1, $2, $3, $4, $5::json, {NOW})"
        )))
        .bind(&define.kind)
        .bind(&define.name)
        .bind(version)
        .bind(&define.digest)
        .bind(&body)
        .execute(&mut *tx)
        .await?;
    }
    tx.commit().await?;
    Ok((version, new))
}

/// # Errors
/// `corrupt` when the body does not have its digest.
pub(super) async fn definition(
    pool: &Pool,
    kind: &str,
    name: &str,
    version: Option<u64>,
) -> Result<Option<Definition>, StoreError> {
    let rows = pool
        .read(|| {
            let mut sql = versions_of(kind, name);
            if let Some(version) = version {
                sql.push(" AND d.version = ").bind(signed(version));
            }
            sql.push(" ORDER BY d.version DESC LIMIT 1");
            sql
        })
        .await?;
    let Some(row) = rows.first() else {
        return Ok(None);
    };
    rows::definition(row)?.verified().map(Some)
}

/// The versions of a name, with what the name says.
fn versions_of(kind: &str, name: &str) -> Sql {
    let mut sql = Sql::new(concat!(
        "SELECT ",
        rows::definition_columns!("d.body::text"),
        " FROM definition_names n JOIN definitions d ON d.kind = n.kind AND d.name = n.name WHERE n.kind = "
    ));
    sql.bind(kind).push(" AND n.name = ").bind(name);
    sql
}

pub(super) async fn definitions(
    pool: &Pool,
    kind: &str,
    after: Option<String>,
    limit: u32,
) -> Result<Vec<Definition>, StoreError> {
    let mut after = after.unwrap_or_default();
    let mut whole = Vec::new();
    loop {
        let missing = limit as usize - whole.len();
        let found = pool
            .read(|| {
                let mut sql = Sql::new(concat!(
                    "SELECT ",
                    rows::definition_columns!("d.body::text"),
                    " FROM definition_names n CROSS JOIN LATERAL (SELECT * FROM definitions v \
                     WHERE v.kind = n.kind AND v.name = n.name ORDER BY v.version DESC LIMIT 1) AS d WHERE n.kind = "
                ));
                sql.bind(kind)
                    .push(" AND n.name > ")
                    .bind(&*after)
                    .push(" ORDER BY n.name LIMIT ")
                    .bind(signed(missing as u64));
                sql
            })
            .await?;
        let page = all(&found, rows::definition)?;
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
    pool: &Pool,
    kind: &str,
    name: &str,
    mut after: u64,
    limit: u32,
) -> Result<Vec<Definition>, StoreError> {
    let mut whole = Vec::new();
    loop {
        let missing = limit as usize - whole.len();
        let found = pool
            .read(|| {
                let mut sql = versions_of(kind, name);
                sql.push(" AND d.version > ")
                    .bind(signed(after))
                    .push(" ORDER BY d.version LIMIT ")
                    .bind(signed(missing as u64));
                sql
            })
            .await?;
        let page = all(&found, rows::definition)?;
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

pub(super) async fn withdraw(pool: &Pool, kind: &str, name: &str) -> Result<bool, StoreError> {
    let withdrawn = pool
        .write(|| {
            let mut sql = Sql::new("UPDATE definition_names SET withdrawn = true WHERE kind = ");
            sql.bind(kind).push(" AND name = ").bind(name);
            sql.push(" AND NOT withdrawn RETURNING 1");
            sql
        })
        .await?;
    Ok(!withdrawn.is_empty())
}
