//! What stands between an edge and its PostgreSQL and reads along: it loses the answer to a write that the server has carried out,
//! by the cut of the connection, as a network or a failover would.
//!
//! Statements are found by their text (Parse) and followed by name (Bind). An answer is complete with `ReadyForQuery` outside a
//! transaction: only then is the write committed
//! (<https://www.postgresql.org/docs/current/protocol-flow.html>).

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

/// The code in the place of a version with which a client asks for TLS.
const SSL_REQUEST: u32 = 80_877_103;

/// Which answers are lost.
#[derive(Debug)]
struct Plan {
    /// Part of the statement's text.
    of: &'static str,
    /// How many of them are still answered.
    spare: u64,
    lost: bool,
}

/// A proxy in front of one server.
pub struct DbProxy {
    pub addr: String,
    plan: Arc<Mutex<Option<Plan>>>,
    accept: tokio::task::JoinHandle<()>,
}

impl DbProxy {
    /// Forwards every connection to the server at `target`.
    ///
    /// # Panics
    /// When loopback is not there.
    pub async fn start(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let plan = Arc::default();
        let accept = tokio::spawn({
            let (plan, target) = (Arc::clone(&plan), target.to_owned());
            async move {
                while let Ok((client, _)) = listener.accept().await {
                    let (plan, target) = (Arc::clone(&plan), target.clone());
                    // A connection that breaks is one that is over.
                    tokio::spawn(async move {
                        let _ = pass(client, &target, plan).await;
                    });
                }
            }
        });
        Self { addr, plan, accept }
    }

    /// From here on, after `spare` statements with `of` in their text, the answer to the next one is lost: once.
    pub fn lose(&self, of: &'static str, spare: u64) {
        *self.plan.lock() = Some(Plan {
            of,
            spare,
            lost: false,
        });
    }

    /// Whether the answer was lost; nothing is lost any more afterwards.
    pub fn lost(&self) -> bool {
        self.plan.lock().take().is_some_and(|plan| plan.lost)
    }
}

impl Drop for DbProxy {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

/// What is known of one connection.
#[derive(Default)]
struct Session {
    /// The texts of prepared statements by name.
    statements: BTreeMap<Vec<u8>, Vec<u8>>,
    losing: bool,
}

async fn pass(mut client: TcpStream, target: &str, plan: Arc<Mutex<Option<Plan>>>) -> io::Result<()> {
    let startup = loop {
        let length = client.read_u32().await?;
        let mut rest = vec![0; (length as usize).saturating_sub(4)];
        client.read_exact(&mut rest).await?;
        if rest.first_chunk().map(|code| u32::from_be_bytes(*code)) != Some(SSL_REQUEST) {
            break [&length.to_be_bytes()[..], &rest].concat();
        }
        client.write_all(b"N").await?;
    };
    let mut server = TcpStream::connect(target).await?;
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    server.write_all(&startup).await?;
    let session = Mutex::new(Session::default());
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        over = statements(from_client, to_server, &session, &plan) => over,
        over = answers(from_server, to_client, &session) => over,
    }
}

/// One message: its kind, and all of its bytes.
async fn message(from: &mut OwnedReadHalf) -> io::Result<(u8, Vec<u8>)> {
    let kind = from.read_u8().await?;
    let length = from.read_u32().await?;
    let mut bytes = vec![kind];
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.resize(1 + length as usize, 0);
    from.read_exact(&mut bytes[5..]).await?;
    Ok((kind, bytes))
}

async fn statements(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    session: &Mutex<Session>,
    plan: &Mutex<Option<Plan>>,
) -> io::Result<()> {
    loop {
        let (kind, bytes) = message(&mut from).await?;
        let mut texts = bytes[5..].split(|byte| *byte == 0);
        match kind {
            b'P' => {
                if let (Some(name), Some(text)) = (texts.next(), texts.next()) {
                    session.lock().statements.insert(name.to_vec(), text.to_vec());
                }
            }
            b'B' => {
                let mut session = session.lock();
                let text = texts.nth(1).and_then(|name| session.statements.get(name));
                let losing = text.is_some_and(|text| chosen(&mut plan.lock(), text));
                session.losing |= losing;
            }
            _ => {}
        }
        to.write_all(&bytes).await?;
    }
}

/// Whether the answer to this statement is the one that is lost.
fn chosen(plan: &mut Option<Plan>, text: &[u8]) -> bool {
    let Some(plan) = plan else { return false };
    let of = plan.of.as_bytes();
    if plan.lost || !text.windows(of.len()).any(|part| part == of) {
        return false;
    }
    plan.lost = plan.spare == 0;
    plan.spare = plan.spare.saturating_sub(1);
    plan.lost
}

async fn answers(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    session: &Mutex<Session>,
) -> io::Result<()> {
    let mut held = Vec::new();
    loop {
        let (kind, bytes) = message(&mut from).await?;
        held.extend_from_slice(&bytes);
        if session.lock().losing {
            match (kind, bytes.last()) {
                // Done outside a transaction: the client will never know.
                (b'Z', Some(b'I')) => return Ok(()),
                (b'Z', _) => {}
                _ => continue,
            }
        }
        to.write_all(&held).await?;
        held.clear();
    }
}
