//! A reader of event streams.

use serde_json::Value;

use crate::client::{Conn, Head};

/// One event of a stream.
#[derive(Debug, Clone)]
pub struct Event {
    pub id: Option<u64>,
    pub name: String,
    /// The whole object behind `data:`.
    pub body: Value,
}

/// An open stream.
pub struct Sse {
    pub head: Head,
    conn: Conn,
    text: String,
}

impl Sse {
    /// Reads the head of an answer.
    ///
    /// # Panics
    /// When there is none.
    pub async fn of(mut conn: Conn) -> Self {
        let head = conn.head().await.unwrap();
        Self {
            head,
            conn,
            text: String::new(),
        }
    }

    /// The next event; `None` when the stream was closed. Comments are passed over.
    ///
    /// # Panics
    /// After half a minute of silence.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            while let Some((block, rest)) = self.text.split_once("\n\n") {
                let event = parse(block);
                self.text = rest.to_owned();
                if event.is_some() {
                    return event;
                }
            }
            let piece = self.conn.piece().await.unwrap()?;
            self.text.push_str(std::str::from_utf8(&piece).unwrap());
        }
    }

    /// Reads up to and including the first event of this name.
    ///
    /// # Panics
    /// When the stream is closed before.
    pub async fn until(&mut self, name: &str) -> Vec<Event> {
        let mut seen: Vec<Event> = Vec::new();
        while seen.last().is_none_or(|e| e.name != name) {
            match self.next().await {
                Some(event) => seen.push(event),
                None => panic!("the stream ended before {name}: {seen:?}"),
            }
        }
        seen
    }

    /// Whether the stream ended as its framing says, and was not cut.
    pub fn complete(&self) -> bool {
        self.conn.complete()
    }

    /// Reads to the end of the stream.
    pub async fn rest(&mut self) -> Vec<Event> {
        let mut seen = Vec::new();
        while let Some(event) = self.next().await {
            seen.push(event);
        }
        seen
    }
}

fn parse(block: &str) -> Option<Event> {
    let field = |name: &str| {
        let line = block.lines().find_map(|l| l.strip_prefix(name))?;
        Some(line.strip_prefix(' ').unwrap_or(line))
    };
    let data = field("data:")?;
    Some(Event {
        id: field("id:").map(|id| id.parse().unwrap()),
        name: field("event:").unwrap_or_default().to_owned(),
        body: serde_json::from_str(data).unwrap(),
    })
}
