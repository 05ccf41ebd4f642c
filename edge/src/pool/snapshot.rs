//! What the admin API and `/v1/models` show of the pool (G3, G84).

use std::sync::Arc;

use iop_shared::ids::{ConnectionGeneration, NodeId, ProviderKey};
use serde::Serialize;

/// One entry of `/v1/models`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedModel {
    pub id: Arc<str>,
    /// Unix seconds.
    pub created: i64,
    pub owned_by: &'static str,
}

/// One entry of `/api/v1/nodes`.
#[derive(Debug, Clone, Serialize)]
pub struct NodeSnapshot {
    pub id: NodeId,
    pub connection_generation: ConnectionGeneration,
    pub state: crate::metrics::SessionState,
    pub version: String,
    /// RFC 3339.
    pub connected_at: String,
    pub embedded: bool,
}

/// One entry of `/api/v1/providers`.
#[derive(Debug, Clone, Serialize)]
pub struct ProviderSnapshot {
    pub id: ProviderKey,
    pub node_id: NodeId,
    pub connection_generation: ConnectionGeneration,
    pub adapter: Arc<str>,
    pub targets: Vec<Arc<str>>,
    pub status: &'static str,
    pub health: iop_shared::execution::ProviderHealth,
    pub capacity: u32,
    pub effective_capacity: u32,
    pub in_flight: u32,
    /// Requests waiting that could go here.
    pub queued: usize,
    pub overlay: Option<OverlaySnapshot>,
    /// RFC 3339.
    pub ejected_until: Option<String>,
}

/// The runtime health overlay of a provider (004); absent while nothing lowered it.
#[derive(Debug, Clone, Serialize)]
pub struct OverlaySnapshot {
    pub health: iop_shared::execution::ProviderHealth,
    pub sequence: u64,
}
