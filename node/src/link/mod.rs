//! Links to edges: dialed, upgraded, then served as HTTP/2 with the roles turned (docs/link.md).
//!
//! `backoff` and `refusal` decide (pure); `activity`, `dial`, `session` and `tls` move bytes. A link ends alone: the
//! others, and the node's places, are not its business.

mod activity;
mod backoff;
mod dial;
mod refusal;
mod session;
mod tls;

use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::config::EdgeSettings;
use crate::metrics::LinkState;
use crate::service::Node;
use crate::tasks::{self, Kind};
use dial::Dialer;

/// An edge whose TLS files were read.
pub struct PreparedEdge {
    settings: EdgeSettings,
    tls: Option<tls::Connector>,
}

/// Reads what the edges' TLS settings name.
///
/// # Errors
/// The first edge whose files do not fit, by its place in the file.
pub fn prepare(edges: Vec<EdgeSettings>) -> Result<Vec<PreparedEdge>, String> {
    edges
        .into_iter()
        .enumerate()
        .map(|(i, settings)| {
            let tls = match &settings.tls {
                None => None,
                Some(files) => {
                    let connector = tls::Connector::new(files, &settings.host);
                    Some(connector.map_err(|e| format!("edges[{i}].tls: {e}"))?)
                }
            };
            Ok(PreparedEdge { settings, tls })
        })
        .collect()
}

/// One dialer per edge, for as long as the process lives.
pub struct Links {
    close: watch::Sender<bool>,
    dialers: Vec<JoinHandle<()>>,
}

impl Links {
    /// Begins dialing every edge.
    pub fn start(node: &Node, edges: Vec<PreparedEdge>) -> Self {
        let close = watch::Sender::new(false);
        // Random per start: an edge tells a restarted node from a second one by it.
        let instance = uuid::Uuid::now_v7().simple().to_string();
        node.metrics()
            .links
            .at((LinkState::Down,))
            .set(i64::try_from(edges.len()).unwrap_or(i64::MAX));
        let dialers = edges
            .into_iter()
            .map(|edge| {
                let dialer = Dialer::new(
                    node.clone(),
                    edge.settings,
                    edge.tls,
                    instance.clone(),
                    close.subscribe(),
                );
                tasks::spawn(Kind::Session, "link", dialer.run())
            })
            .collect();
        Self { close, dialers }
    }

    /// Says goodbye on every link (GOAWAY) and waits for their ends, no longer than `bound`.
    pub async fn close(self, bound: Duration) {
        self.close.send_replace(true);
        let all = futures_util::future::join_all(self.dialers);
        if tokio::time::timeout(bound, all).await.is_err() {
            tracing::warn!("links did not end in time; they are cut");
        }
    }
}
