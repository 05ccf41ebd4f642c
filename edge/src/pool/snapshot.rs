//! What the admin API and `/v1/models` show of the pool (G3, G84).

use std::sync::Arc;
use std::time::Instant;

use iop_shared::execution::{Endpoint, ProviderHealth};
use iop_shared::ids::{ConnectionGeneration, NodeId, ProviderKey};
use serde::Serialize;
use utoipa::ToSchema;

use super::grant::Want;
use super::lease::Home;
use super::route::Model;
use super::service::Pool;
use super::sessions::Live;
use super::table::Slot;

/// One entry of `/v1/models`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedModel {
    pub id: Arc<str>,
    /// Unix seconds.
    pub created: i64,
    pub owned_by: &'static str,
}

/// One entry of `/api/v1/nodes`.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct NodeSnapshot {
    #[schema(value_type = String)]
    pub id: NodeId,
    #[schema(value_type = u64)]
    pub connection_generation: ConnectionGeneration,
    #[schema(value_type = String)]
    pub state: crate::metrics::SessionState,
    pub version: String,
    /// RFC 3339.
    pub connected_at: String,
    pub embedded: bool,
}

/// One entry of `/api/v1/providers`.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ProviderSnapshot {
    #[schema(value_type = String)]
    pub id: ProviderKey,
    #[schema(value_type = String)]
    pub node_id: NodeId,
    #[schema(value_type = u64)]
    pub connection_generation: ConnectionGeneration,
    #[schema(value_type = String)]
    pub adapter: Arc<str>,
    #[schema(value_type = Vec<String>)]
    pub targets: Vec<Arc<str>>,
    /// `available`, `draining`, or `unavailable` while the overlay lowers it.
    pub status: &'static str,
    #[schema(value_type = String)]
    pub health: ProviderHealth,
    pub capacity: u32,
    pub effective_capacity: u32,
    pub in_flight: u32,
    /// Requests waiting that could go here.
    pub queued: usize,
    pub overlay: Option<OverlaySnapshot>,
    /// RFC 3339; the latest of its targets.
    pub ejected_until: Option<String>,
}

/// The runtime health overlay of a provider (004); absent until something lowers it.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct OverlaySnapshot {
    #[schema(value_type = String)]
    pub health: ProviderHealth,
    pub sequence: u64,
}

impl Pool {
    /// `/v1/models` (G3): configured names with a live candidate, and what live providers advertise.
    pub fn listed(&self) -> Vec<ListedModel> {
        let state = self.state.lock();
        let configured = self
            .configured
            .values()
            .filter(|m| state.table.any_live(&m.candidates));
        let advertised = self.advertised.load();
        let mut names: Vec<Arc<str>> = configured.map(|m| m.name.clone()).collect();
        let elsewhere = advertised
            .values()
            .filter(|m| !m.candidates.is_empty() && !self.configured.contains_key(&m.name));
        names.extend(elsewhere.map(|m| m.name.clone()));
        drop(state);
        names.sort_unstable();
        names
            .into_iter()
            .map(|id| ListedModel {
                id,
                created: self.created,
                owned_by: "iop",
            })
            .collect()
    }

    /// A model that `allowed` lets through and somebody serves at this endpoint now: the first by name.
    pub fn serving(&self, endpoint: Endpoint, allowed: impl Fn(&str) -> bool) -> Option<Arc<Model>> {
        let listed = self.listed();
        let models = listed
            .iter()
            .filter(|m| allowed(&m.id))
            .filter_map(|m| self.resolve(&m.id));
        let state = self.state.lock();
        let mut serving = models.filter(|m| state.table.any_serving(Want::of(&m.candidates, endpoint)));
        serving.next()
    }

    /// `/api/v1/nodes`.
    pub fn nodes(&self) -> Vec<NodeSnapshot> {
        let state = self.state.lock();
        let node = |(generation, live): (&ConnectionGeneration, &Live)| NodeSnapshot {
            id: live.session.node_id.clone(),
            connection_generation: *generation,
            state: live.state(),
            version: live.version.clone(),
            connected_at: live.session.connected_at.to_string(),
            embedded: live.session.embedded,
        };
        state.sessions.iter().map(node).collect()
    }

    /// `/api/v1/providers`.
    pub fn providers(&self) -> Vec<ProviderSnapshot> {
        let now = tokio::time::Instant::now().into_std();
        let state = self.state.lock();
        let provider = |(key, slot): (&ProviderKey, &Slot<Arc<Home>>)| ProviderSnapshot {
            id: key.clone(),
            node_id: slot.with.session.node_id.clone(),
            connection_generation: slot.generation,
            adapter: slot.with.adapter.clone(),
            targets: slot.targets.iter().map(|t| t.name.clone()).collect(),
            status: match (slot.lowered, slot.draining) {
                (true, _) => "unavailable",
                (false, true) => "draining",
                (false, false) => "available",
            },
            health: if slot.lowered {
                ProviderHealth::Unavailable
            } else {
                ProviderHealth::Available
            },
            capacity: slot.capacity,
            effective_capacity: if slot.lowered || slot.draining {
                0
            } else {
                slot.capacity
            },
            in_flight: state.table.in_flight(key),
            queued: state.queue.waiting().filter(|w| w.could_go(key)).count(),
            overlay: state
                .table
                .shown(slot.generation, key)
                .map(|(health, sequence)| OverlaySnapshot { health, sequence }),
            ejected_until: ejected_until(slot, now),
        };
        state.table.slots().map(provider).collect()
    }
}

fn ejected_until<S>(slot: &Slot<S>, now: Instant) -> Option<String> {
    let ends = slot.targets.iter().filter_map(|t| t.ejection.ejected_until(now));
    let left = ends.max()?.saturating_duration_since(now);
    let end = jiff::Timestamp::now().checked_add(left).ok()?;
    Some(end.to_string())
}
