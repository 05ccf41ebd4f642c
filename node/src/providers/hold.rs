//! What the node holds of a provider while an attempt runs, seen from outside, so that a fence is an observation and no
//! guess (004, close-grace fence).

use hyper_util::client::legacy::connect::{CaptureConnection, Connected};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Lives inside of what is held, a connection or a place in an engine, and is dropped with it.
pub(crate) struct Holding(DropGuard);

/// Tells when its `Holding` was dropped.
#[derive(Debug, Clone)]
pub(crate) struct Held(CancellationToken);

impl Holding {
    pub(crate) fn new() -> Self {
        Self(CancellationToken::new().drop_guard())
    }

    pub(crate) fn held(&self) -> Held {
        Held(self.0.token().clone())
    }
}

/// The hold of one attempt.
#[derive(Debug, Default)]
pub(crate) enum Hold {
    /// Nothing was taken yet.
    #[default]
    Nothing,
    /// A connection was asked for; which one is known when there is one.
    Asked(CaptureConnection),
    On(Held),
}

impl Hold {
    /// Resolves when the node holds nothing of the provider any more. To be asked after the call or body was dropped:
    /// one that never got a connection gets none then.
    pub(crate) async fn ended(self) {
        let held = match self {
            Hold::Nothing => return,
            Hold::On(held) => Some(held),
            Hold::Asked(capture) => match &*capture.connection_metadata() {
                None => return,
                Some(connected) => of(connected),
            },
        };
        match held {
            Some(held) => held.0.cancelled().await,
            // A connection that cannot be watched is never seen to end.
            None => std::future::pending().await,
        }
    }
}

fn of(connected: &Connected) -> Option<Held> {
    let mut extras = http::Extensions::new();
    connected.get_extras(&mut extras);
    extras.remove()
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_hold_ends_with_what_is_held_and_nothing_held_has_ended() {
        assert!(Hold::Nothing.ended().now_or_never().is_some());
        let holding = Holding::new();
        let mut ended = Box::pin(Hold::On(holding.held()).ended());
        assert!(ended.as_mut().now_or_never().is_none());
        drop(holding);
        assert!(ended.now_or_never().is_some());
    }

    #[test]
    fn a_connection_asked_for_and_never_made_holds_nothing() {
        let capture = hyper_util::client::legacy::connect::capture_connection(&mut http::Request::new(()));
        assert!(Hold::Asked(capture).ended().now_or_never().is_some());
    }
}
