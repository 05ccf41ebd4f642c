//! Who is connected: generations, the live session of each node id, and what the pool is told of them.
//!
//! The newest handshake of a node id wins. Everything is keyed by generation, so that the late end of an older
//! connection changes nothing for the newer one (link.md, Identity).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use http::{Method, Request, Uri};
use iop_shared::ids::{ConnectionGeneration, NodeId};
use iop_shared::openai::request::SplicedBody;
use iop_shared::wire::DRAIN_PATH;
use iop_shared::wire::session::Advertisement;
use parking_lot::Mutex;
use tokio_util::task::TaskTracker;

use super::handshake::{self, Hello, Refusal};
use super::session::Session;
use crate::pool::Pool;

/// How long an older session may take to answer before a rival takes its place.
pub(super) const RIVAL_PING: Duration = Duration::from_secs(2);
/// How long a node may take to hear that the edge drains.
const DRAIN_CALL: Duration = Duration::from_secs(2);

/// The sessions of one edge process.
pub(super) struct Registry {
    pool: Arc<Pool>,
    accepted: AtomicU64,
    live: Mutex<BTreeMap<NodeId, Live>>,
    connections: TaskTracker,
}

struct Live {
    session: Arc<Session>,
    instance: Option<Box<str>>,
}

/// A live session's place; given up on drop.
pub(super) struct Seat {
    registry: Arc<Registry>,
    session: Arc<Session>,
}

impl Registry {
    pub(super) fn new(pool: Arc<Pool>) -> Arc<Self> {
        let connections = TaskTracker::new();
        // Nothing but the number of those under way decides when waiting for them ends.
        connections.close();
        Arc::new(Self {
            pool,
            accepted: AtomicU64::new(0),
            live: Mutex::default(),
            connections,
        })
    }

    pub(super) fn next_generation(&self) -> ConnectionGeneration {
        ConnectionGeneration(self.accepted.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Decides whether a greeted node may come in, pinging a living rival first.
    ///
    /// # Errors
    /// `Duplicate` when another instance of the id is connected and answers.
    pub(super) async fn admit(&self, hello: &Hello) -> Result<ConnectionGeneration, Refusal> {
        let rival = {
            let live = self.live.lock();
            live.get(&hello.node_id)
                .filter(|old| handshake::is_rival(old.instance.as_deref(), hello.instance.as_deref()))
                .map(|old| Arc::clone(&old.session))
        };
        match rival {
            Some(old) if old.answers_within(RIVAL_PING).await => Err(Refusal::Duplicate),
            Some(_) | None => Ok(self.next_generation()),
        }
    }

    /// A session's first advertisement came. `None`: a newer one of the same node is live already.
    pub(super) fn up(
        self: &Arc<Self>,
        session: &Arc<Session>,
        instance: Option<Box<str>>,
        advertisement: &Advertisement,
    ) -> Option<Seat> {
        let old = {
            let mut live = self.live.lock();
            if live
                .get(&session.node_id)
                .is_some_and(|l| l.session.generation > session.generation)
            {
                return None;
            }
            live.insert(
                session.node_id.clone(),
                Live {
                    session: Arc::clone(session),
                    instance,
                },
            )
        };
        let seat = Seat {
            registry: Arc::clone(self),
            session: Arc::clone(session),
        };
        // First the new one, so that a node that reconnects is never absent in between.
        self.pool.session_up(Arc::clone(session), advertisement);
        if let Some(old) = old {
            self.pool.session_superseded(old.session.generation);
            old.session.end();
        }
        Some(seat)
    }

    pub(super) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Connections under way, for `drain` to wait for.
    pub(super) fn connections(&self) -> &TaskTracker {
        &self.connections
    }

    /// Tells every linked node that nothing new will come, then ends their sessions. Streams that still run finish.
    pub(super) async fn drain(&self) {
        let linked: Vec<Arc<Session>> = {
            let live = self.live.lock();
            live.values()
                .map(|l| &l.session)
                .filter(|s| !s.embedded)
                .cloned()
                .collect()
        };
        join_all(linked.iter().map(|session| tell_drain(session))).await;
        for session in linked {
            session.end();
        }
        self.connections.wait().await;
    }
}

async fn tell_drain(session: &Session) {
    let mut request = Request::new(SplicedBody::default());
    *request.method_mut() = Method::POST;
    *request.uri_mut() = Uri::from_static(DRAIN_PATH);
    let told = tokio::time::timeout(DRAIN_CALL, session.call(request)).await;
    if !matches!(told, Ok(Ok(_))) {
        tracing::info!(node = %session.node_id, connection_generation = session.generation.0, "a node did not hear of the drain");
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let (node_id, generation) = (&self.session.node_id, self.session.generation);
        {
            let mut live = self.registry.live.lock();
            if live
                .get(node_id)
                .is_some_and(|l| l.session.generation == generation)
            {
                live.remove(node_id);
            }
        }
        self.session.end();
        self.registry.pool.session_down(generation);
    }
}
