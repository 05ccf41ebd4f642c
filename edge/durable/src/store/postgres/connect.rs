//! Connections: how they are set up, how long anything may take, and what is done with one that was lost.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgRow};
use sqlx::{ConnectOptions as _, Connection as _, Executor as _};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

use super::fail;
use super::sql::Sql;
use crate::store::{StoreError, migrate};

/// How long making a connection may take, or waiting for one.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// How long the server may take over one statement; then its connection is given up as lost. Above `lock_timeout`.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// A connection that was idle for longer is asked whether it still lives before anything is sent on it.
const TRUSTED_FOR: Duration = Duration::from_secs(1);
/// How often a statement is sent that is undone for another transaction's sake.
pub(super) const ATTEMPTS: u32 = 5;
/// Connections for everything but commits.
const POOL: usize = 8;

/// Every statement here reaches its rows by key, in the order it is written in. The planner is held to that: it would else
/// choose for the table that it saw first, and plan every call of a statement with arrays anew.
const SESSION: [(&str, &str); 7] = [
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("enable_memoize", "off"),
    ("jit", "off"),
    // A row that somebody else has locked for this long makes its caller fail, and nobody else.
    ("lock_timeout", "5s"),
];

/// Said once per connection. Rows are locked and read again as they are: that is READ COMMITTED. A commit that the disk does
/// not have may be lost by a crash, and a fence that is lost is given out twice: a server that is set to answer earlier is not
/// followed in that.
const SETUP: &str = "SET default_transaction_isolation TO 'read committed'; \
     SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'";

/// The same for what need not last.
const SETUP_RELAXED: &str = "SET synchronous_commit TO off";

/// What a URL says, and the session's settings.
///
/// # Errors
/// `open` for a URL that cannot be read.
pub(super) fn options(url: &str) -> Result<PgConnectOptions, StoreError> {
    let options: PgConnectOptions = url
        .parse()
        .map_err(|error| StoreError::Open(format!("the store's URL cannot be read: {error}")))?;
    Ok(options
        .application_name("iop-durable")
        .statement_cache_capacity(256)
        .options(SESSION)
        .disable_statement_logging())
}

/// A connection of its own.
async fn connect(options: &PgConnectOptions, setup: &'static str) -> Result<PgConnection, sqlx::Error> {
    bounded(CONNECT_WITHIN, async {
        let mut conn = options.connect().await?;
        conn.execute(setup).await?;
        Ok(conn)
    })
    .await
}

/// Checks what is at the other end, and creates the tables of an empty database.
///
/// # Errors
/// `open`, `unavailable`.
pub(super) async fn open(options: &PgConnectOptions) -> Result<(), StoreError> {
    const OLDEST: u32 = 140_000;
    let mut conn = connect(options, SETUP).await.map_err(refused)?;
    match conn.server_version_num() {
        Some(version) if version >= OLDEST => {}
        found => {
            let found = found.map_or_else(|| "unknown".to_owned(), |v| (v / 10_000).to_string());
            return Err(StoreError::Open(format!(
                "the database is PostgreSQL {found}, at least 14 is needed"
            )));
        }
    }
    let encoding: String = sqlx::query_scalar("SELECT current_setting('server_encoding')")
        .fetch_one(&mut conn)
        .await
        .map_err(fail::read)?;
    if encoding != "UTF8" {
        return Err(StoreError::Open(format!(
            "the database has encoding {encoding}, it needs UTF8: ids are kept as they are"
        )));
    }
    bounded(ANSWER_WITHIN, async {
        Ok(migrate::prepare(&mut conn, &migrate::postgres()).await)
    })
    .await
    .map_err(fail::read)??;
    conn.close().await.map_err(fail::read)
}

/// A refusal that waiting does not heal is for people.
fn refused(error: sqlx::Error) -> StoreError {
    if matches!(error, sqlx::Error::Configuration(_) | sqlx::Error::Tls(_)) {
        return StoreError::Open(error.to_string());
    }
    let code = error.as_database_error().and_then(|why| why.code());
    match code.as_deref() {
        // No such user, password or database; no right to it; a server that does not know the session's settings.
        Some("28000" | "28P01" | "3D000" | "42501" | "42704") => {
            StoreError::Open(format!("the database refuses the connection: {error}"))
        }
        _ => StoreError::unavailable(error),
    }
}

async fn bounded<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    match tokio::time::timeout(limit, work).await {
        Ok(answer) => answer,
        Err(_) => Err(sqlx::Error::Io(std::io::Error::new(
            std::io::ErrorKind::TimedOut,
            format!("no answer within {limit:?}"),
        ))),
    }
}

/// Where connections lead to, and how often one was found lost or could not be made: the others are asked then before they are
/// used again.
#[derive(Clone)]
pub(super) struct Server {
    pub(super) options: PgConnectOptions,
    lost: Arc<AtomicU64>,
}

impl Server {
    pub(super) fn new(options: PgConnectOptions) -> Self {
        Self {
            options,
            lost: Arc::default(),
        }
    }
}

/// A connection and when it last answered.
struct Used {
    conn: PgConnection,
    at: Instant,
    /// `Server::lost` by then.
    lost: u64,
}

/// A place for one connection, made when it is needed and again when it was lost.
pub(super) struct Line {
    server: Server,
    setup: &'static str,
    used: Option<Used>,
}

impl Line {
    pub(super) fn new(server: Server) -> Self {
        Self {
            server,
            setup: SETUP,
            used: None,
        }
    }

    /// One whose transactions need not be on disk when they are answered.
    pub(super) fn relaxed(server: Server) -> Self {
        Self {
            setup: SETUP_RELAXED,
            ..Self::new(server)
        }
    }

    /// A connection that answered within the last second, or answers at this moment.
    ///
    /// # Errors
    /// `unavailable`: nothing was sent.
    pub(super) async fn ready(&mut self) -> Result<&mut PgConnection, StoreError> {
        self.ready_within(TRUSTED_FOR).await
    }

    async fn ready_within(&mut self, trusted: Duration) -> Result<&mut PgConnection, StoreError> {
        let lost = self.server.lost.load(Ordering::Acquire);
        let mut found = self.used.take();
        if let Some(used) = &mut found
            && (used.at.elapsed() >= trusted || used.lost != lost)
        {
            if bounded(CONNECT_WITHIN, used.conn.ping()).await.is_ok() {
                used.lost = lost;
            } else {
                found = None;
                self.server.lost.fetch_add(1, Ordering::AcqRel);
            }
        }
        let used = match found {
            Some(used) => used,
            None => match connect(&self.server.options, self.setup).await {
                Ok(conn) => Used {
                    conn,
                    at: Instant::now(),
                    lost,
                },
                Err(error) => {
                    self.server.lost.fetch_add(1, Ordering::AcqRel);
                    return Err(StoreError::unavailable(error));
                }
            },
        };
        Ok(&mut self.used.insert(used).conn)
    }

    /// Runs a statement on it; a connection that is lost over it is dropped.
    pub(super) async fn rows(&mut self, sql: Sql) -> Result<Vec<PgRow>, sqlx::Error> {
        let Some(used) = &mut self.used else {
            return Err(sqlx::Error::WorkerCrashed);
        };
        let answer = bounded(ANSWER_WITHIN, sql.rows(&mut used.conn)).await;
        self.after(answer)
    }

    /// Notes how a use ended.
    fn after<T>(&mut self, answer: Result<T, sqlx::Error>) -> Result<T, sqlx::Error> {
        if answer.as_ref().is_err_and(|e| fail::fault(e).is_of_connection()) {
            self.used = None;
            self.server.lost.fetch_add(1, Ordering::AcqRel);
        } else if let Some(used) = &mut self.used {
            used.at = Instant::now();
        }
        answer
    }
}

/// The connections for everything but commits. A caller that gives up takes its connection with it.
pub(super) struct Pool {
    server: Server,
    places: Semaphore,
    /// Of the places that are free; the one used last is the last.
    free: Mutex<Vec<Line>>,
}

impl Pool {
    pub(super) fn new(server: Server) -> Self {
        Self {
            server,
            places: Semaphore::new(POOL),
            free: Mutex::new(Vec::new()),
        }
    }

    async fn place(&self) -> Result<(SemaphorePermit<'_>, Line), StoreError> {
        match tokio::time::timeout(CONNECT_WITHIN, self.places.acquire()).await {
            Ok(Ok(permit)) => {
                let free = self.free.lock().pop();
                Ok((permit, free.unwrap_or_else(|| Line::new(self.server.clone()))))
            }
            Ok(Err(closed)) => Err(StoreError::unavailable(closed)),
            Err(_) => Err(StoreError::unavailable("every connection is in use")),
        }
    }

    fn put_back(&self, line: Line) {
        self.free.lock().push(line);
    }

    /// Reads. What was asked on a connection that turns out to be lost is asked once more on a new one.
    pub(super) async fn read(&self, sql: impl Fn() -> Sql + Send) -> Result<Vec<PgRow>, StoreError> {
        let (_permit, mut line) = self.place().await?;
        line.ready().await?;
        let mut answer = line.rows(sql()).await;
        if answer.as_ref().is_err_and(|e| fail::fault(e).is_of_connection()) {
            line.ready().await?;
            answer = line.rows(sql()).await;
        }
        self.put_back(line);
        answer.map_err(fail::read)
    }

    /// Writes. What was undone for another transaction's sake is done again.
    ///
    /// # Errors
    /// `unavailable` when nothing was sent, `unconfirmed` when the connection was lost over it.
    pub(super) async fn write(&self, sql: impl Fn() -> Sql + Send) -> Result<Vec<PgRow>, StoreError> {
        let (_permit, mut line) = self.place().await?;
        let mut left = ATTEMPTS;
        let answer = loop {
            left -= 1;
            line.ready_within(Duration::ZERO).await?;
            match line.rows(sql()).await {
                Err(error) if left > 0 && fail::fault(&error).is_worth_another() => {}
                answer => break answer,
            }
        };
        self.put_back(line);
        answer.map_err(fail::write)
    }

    /// The same with several statements.
    pub(super) async fn transaction<T>(
        &self,
        work: impl for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, sqlx::Error>> + Send,
    ) -> Result<T, StoreError> {
        let (_permit, mut line) = self.place().await?;
        let mut left = ATTEMPTS;
        let answer = loop {
            left -= 1;
            let conn = line.ready_within(Duration::ZERO).await?;
            let answer = bounded(ANSWER_WITHIN, work(conn)).await;
            // A transaction that was left open is rolled back with the next message: its locks must not wait for that.
            let closed = bounded(CONNECT_WITHIN, conn.ping()).await;
            if closed.is_err() {
                line.used = None;
            }
            match line.after(answer) {
                Err(error) if left > 0 && fail::fault(&error).is_worth_another() => {}
                answer => break answer,
            }
        };
        self.put_back(line);
        answer.map_err(fail::write)
    }
}
