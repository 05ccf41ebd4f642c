//! The edge's side of the link, and the embedded node beside it (docs/link.md).
//!
//! `handshake` and `lines` decide (pure); `accept` answers the port, `carrier` serves one connection, `registry` knows
//! who is live and tells the pool. Which node gets a request is the pool's business, what its answer means the gate's.

mod accept;
mod body;
mod carrier;
mod embed;
mod handshake;
pub(crate) mod lines;
mod registry;
mod session;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use tokio::net::TcpListener;

pub use body::NodeBody;
pub use session::{LinkError, Session};

use crate::config::LinkSettings;
use crate::drain::Drain;
use crate::pool::Pool;
use crate::tasks::{self, Kind};
use registry::Registry;

/// All nodes of an edge process.
pub struct Links(Arc<Registry>);

impl Links {
    pub fn new(pool: Arc<Pool>) -> Self {
        Self(Registry::new(pool))
    }

    /// Takes the node inside the edge in. Needs a runtime.
    pub fn embed(&self, node: iop_node::Node) {
        embed::embed(node, &self.0);
    }

    /// Lets nodes dial in for as long as the process runs.
    pub fn listen(&self, listener: TcpListener, settings: LinkSettings, drain: Drain) {
        let registry = Arc::clone(&self.0);
        tasks::spawn(
            Kind::Service,
            "link_port",
            accept::serve(listener, settings, registry, drain),
        );
    }

    /// Serves a connection that shook hands already, until its session ends.
    #[cfg(test)]
    pub(crate) async fn carry(&self, io: tokio::io::DuplexStream, node_id: iop_shared::ids::NodeId) {
        let hello = handshake::Hello {
            node_id,
            instance: None,
        };
        let generation = self.0.next_generation();
        carrier::serve(hyper_util::rt::TokioIo::new(io), hello, generation, &self.0).await;
    }

    /// Tells linked nodes that nothing new will come and ends their sessions; call it when requests have ended.
    pub async fn drain(&self) {
        self.0.drain().await;
    }
}
