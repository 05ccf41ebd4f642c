//! Wake-ups. A lost hint costs one poll interval and nothing else.

use tokio::sync::broadcast;

use crate::ids::RunId;

/// What happened to a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hint {
    /// It may be claimable.
    Claimable(RunId),
    /// Its inbox changed: a delivery, a decision, a request to cancel.
    Posted(RunId),
}

/// The hints of one store, for everybody in this process.
#[derive(Debug, Clone)]
pub struct Hints {
    sender: broadcast::Sender<Hint>,
}

impl Hints {
    pub fn new() -> Self {
        Self {
            sender: broadcast::channel(1024).0,
        }
    }

    /// Nobody listening is fine.
    pub fn send(&self, hint: Hint) {
        let _ = self.sender.send(hint);
    }

    /// Hints from now on; a receiver that lags is told so and polls.
    pub fn subscribe(&self) -> broadcast::Receiver<Hint> {
        self.sender.subscribe()
    }
}

impl Default for Hints {
    fn default() -> Self {
        Self::new()
    }
}
