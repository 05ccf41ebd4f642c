//! Hints: at once for this process, soon for the others on the same database.
//!
//! Nothing is notified inside a transaction that writes runs: that would let one such transaction commit at a time. Hints are
//! gathered for a moment and sent from a connection of their own, which need not wait for the disk.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use tokio::sync::mpsc;

use super::connect::{Line, Server};
use super::sql::Sql;
use crate::ids::RunId;
use crate::store::{Hint, Hints};

const CHANNEL: &str = "iop_durable";
/// For how long hints are gathered.
const GATHERED_FOR: Duration = Duration::from_millis(10);
/// The most hints of one moment; those above it are found by polling.
const GATHERED_MAX: usize = 1024;
/// PostgreSQL takes less than 8000 bytes.
const PAYLOAD_MAX: usize = 7900;
/// How long making that connection may take.
const LISTEN_WITHIN: Duration = Duration::from_secs(5);
/// Between two attempts to listen again.
const LISTEN_AGAIN: Duration = Duration::from_millis(500);

/// The hints of one moment, as they are sent.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Message {
    /// The store that sends it, and need not hear it.
    from: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    claimable: Vec<RunId>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    posted: Vec<RunId>,
}

/// Gives hints to everybody.
#[derive(Clone)]
pub(super) struct Notifier {
    hints: Hints,
    others: mpsc::UnboundedSender<Hint>,
}

impl Notifier {
    /// With the end that `tell_others` reads.
    pub(super) fn new(hints: Hints) -> (Self, mpsc::UnboundedReceiver<Hint>) {
        let (others, gathered) = mpsc::unbounded_channel();
        (Self { hints, others }, gathered)
    }

    pub(super) fn send(&self, hint: Hint) {
        let _ = self.others.send(hint.clone());
        self.hints.send(hint);
    }

    /// After a write.
    pub(super) fn done(&self, run: &RunId, posted: bool, claimable: bool) {
        if posted {
            self.send(Hint::Posted(run.clone()));
        }
        if claimable {
            self.send(Hint::Claimable(run.clone()));
        }
    }
}

/// Sends hints to the other stores until there is nobody left to give any. What cannot be sent is dropped.
pub(super) async fn tell_others(server: Server, from: String, mut gathered: mpsc::UnboundedReceiver<Hint>) {
    let mut line = Line::relaxed(server);
    let mut hints = Vec::new();
    while gathered.recv_many(&mut hints, GATHERED_MAX).await > 0 {
        tokio::time::sleep(GATHERED_FOR).await;
        while let Ok(hint) = gathered.try_recv() {
            if hints.len() < GATHERED_MAX {
                hints.push(hint);
            }
        }
        let payloads = payloads(&from, hints.drain(..));
        if line.ready().await.is_err() {
            continue;
        }
        let mut sql = Sql::new("SELECT pg_notify('iop_durable', c) FROM unnest(");
        sql.array("text", payloads.iter().map(String::as_str))
            .push(") AS c");
        if let Err(error) = line.rows(sql).await {
            tracing::debug!(%error, "hints were not sent");
        }
    }
}

/// The texts of these hints: one per run and kind, as few and as short as they must be.
fn payloads(from: &str, hints: impl Iterator<Item = Hint>) -> Vec<String> {
    let (mut claimable, mut posted) = (BTreeSet::new(), BTreeSet::new());
    for hint in hints {
        match hint {
            Hint::Claimable(run) => claimable.insert(run),
            Hint::Posted(run) => posted.insert(run),
        };
    }
    let all = claimable
        .into_iter()
        .map(Hint::Claimable)
        .chain(posted.into_iter().map(Hint::Posted));
    let mut payloads = Vec::new();
    let mut message = Message::default();
    let mut bytes = 0;
    for hint in all {
        let (Hint::Claimable(run) | Hint::Posted(run)) = &hint;
        // As JSON, with quotes and a comma; the rest of the message is far below 200 bytes.
        let size = serde_json::to_string(run).map_or(0, |text| text.len()) + 1;
        if bytes + size > PAYLOAD_MAX - 200 {
            payloads.extend(encode(from, &mut message));
            bytes = 0;
        }
        bytes += size;
        match hint {
            Hint::Claimable(run) => message.claimable.push(run),
            Hint::Posted(run) => message.posted.push(run),
        }
    }
    payloads.extend(encode(from, &mut message));
    payloads
}

fn encode(from: &str, message: &mut Message) -> Option<String> {
    let mut message = std::mem::take(message);
    if message.claimable.is_empty() && message.posted.is_empty() {
        return None;
    }
    from.clone_into(&mut message.from);
    serde_json::to_string(&message).ok()
}

/// Hears the hints of other stores, for ever. After a lost connection it listens again; what was missed is found by polling.
pub(super) async fn hear(options: PgConnectOptions, own: String, hints: Hints) {
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(LISTEN_WITHIN)
        .max_lifetime(None)
        .idle_timeout(None)
        .connect_lazy_with(options);
    loop {
        if let Err(error) = listen(&pool, &own, &hints).await {
            tracing::debug!(%error, "hints of other stores are not heard");
        }
        tokio::time::sleep(LISTEN_AGAIN).await;
    }
}

async fn listen(pool: &sqlx::PgPool, own: &str, hints: &Hints) -> Result<(), sqlx::Error> {
    let mut listener = PgListener::connect_with(pool).await?;
    listener.listen(CHANNEL).await?;
    loop {
        // `None`: the connection was lost and made again.
        let Some(notification) = listener.try_recv().await? else {
            continue;
        };
        // What is no message of ours is nobody's.
        let Ok(message) = serde_json::from_str::<Message>(notification.payload()) else {
            continue;
        };
        if message.from == own {
            continue;
        }
        for run in message.claimable {
            hints.send(Hint::Claimable(run));
        }
        for run in message.posted {
            hints.send(Hint::Posted(run));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(id: &str) -> RunId {
        RunId::new(id).unwrap()
    }

    #[test]
    fn hints_are_told_once_each_in_payloads_the_database_takes() {
        let long = "\u{1}".repeat(250);
        let hints = (0..200).flat_map(|n| {
            let run = run(&format!("{long}{n}"));
            [
                Hint::Claimable(run.clone()),
                Hint::Posted(run.clone()),
                Hint::Claimable(run),
            ]
        });
        let payloads = payloads("me", hints);
        let mut heard = Vec::new();
        for payload in &payloads {
            assert!(payload.len() < 8000, "{}", payload.len());
            let message: Message = serde_json::from_str(payload).unwrap();
            assert_eq!(message.from, "me");
            heard.extend(message.claimable.into_iter().map(Hint::Claimable));
            heard.extend(message.posted.into_iter().map(Hint::Posted));
        }
        assert_eq!(heard.len(), 400);
        for n in 0..200 {
            let run = run(&format!("{long}{n}"));
            assert!(heard.contains(&Hint::Claimable(run.clone())));
            assert!(heard.contains(&Hint::Posted(run)));
        }
        assert!(super::payloads("me", std::iter::empty()).is_empty());
    }
}
