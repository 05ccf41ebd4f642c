//! The node in the edge's own process: a session like any other, without a connection that could be lost.

use std::sync::Arc;

use super::registry::Registry;
use super::session::Session;
use crate::tasks::{self, Kind};

/// Registers the node and follows its advertisement. It tells no load: every request it has came through the pool.
pub(super) fn embed(node: iop_node::Node, registry: &Arc<Registry>) {
    let mut news = node.subscribe();
    let session = Arc::new(Session::embedded(node, registry.next_generation()));
    let generation = session.generation;
    let first = Arc::clone(&news.borrow_and_update());
    let seat = registry.up(&session, None, &first);
    let registry = Arc::clone(registry);
    tasks::spawn(Kind::Service, "embedded_node", async move {
        let _seat = seat;
        while news.changed().await.is_ok() {
            let advertisement = Arc::clone(&news.borrow_and_update());
            registry.pool().advertised(generation, &advertisement);
        }
    });
}
