//! What nodes tell the pool: who is live, with what, and how busy.

use std::collections::BTreeSet;
use std::sync::Arc;

use foldhash::HashMap;
use iop_shared::ids::{ConnectionGeneration, ProviderKey};
use iop_shared::wire::session::{Advertisement, ProviderLoad};

use super::lease::Home;
use super::route::{Affinity, Candidate, Liveness, Model};
use super::service::Pool;
use super::table::{Slot, Target};
use crate::link::Session;
use crate::metrics::SessionState;

/// Advertised names remembered after their node left.
const NAMES_KEPT: usize = 10_000;

/// A live session, as its node describes itself.
pub(super) struct Live {
    pub(super) session: Arc<Session>,
    pub(super) version: String,
    draining: bool,
}

impl Live {
    pub(super) fn state(&self) -> SessionState {
        if self.draining {
            SessionState::Draining
        } else {
            SessionState::Live
        }
    }
}

impl Pool {
    /// A session is live: its first advertisement came.
    pub fn session_up(self: &Arc<Self>, session: Arc<Session>, advertisement: &Advertisement) {
        let generation = session.generation;
        let live = Live {
            session,
            version: advertisement.version.clone(),
            draining: advertisement.draining,
        };
        self.state.lock().sessions.insert(generation, live);
        self.advertised(generation, advertisement);
    }

    /// A session advertised anew.
    pub fn advertised(self: &Arc<Self>, generation: ConnectionGeneration, advertisement: &Advertisement) {
        {
            let mut state = self.state.lock();
            let Some(live) = state.sessions.get_mut(&generation) else {
                return;
            };
            live.draining = advertisement.draining;
            let session = live.session.clone();
            let slots = advertisement
                .providers
                .iter()
                .map(|p| {
                    let key = ProviderKey::new(&session.node_id, &p.id);
                    let home = Home {
                        session: session.clone(),
                        provider_id: p.id.clone(),
                        adapter: Arc::from(p.adapter.as_str()),
                        stall_timeout_ms: p.response_stall_timeout_ms,
                        first_content_timeout_ms: p.first_content_timeout_ms.filter(|ms| *ms > 0),
                        replay: p.replay,
                        normalized: p
                            .normalized_targets
                            .iter()
                            .map(|t| Arc::from(t.as_str()))
                            .collect(),
                        gauge: self.metrics.provider_in_flight(&key),
                    };
                    let slot = Slot {
                        generation,
                        targets: p.targets.iter().map(|t| Target::new(t)).collect(),
                        endpoints: p.endpoints.clone(),
                        capacity: p.capacity,
                        draining: advertisement.draining,
                        in_flight: 0,
                        others: 0,
                        refused: false,
                        lowered: false,
                        with: Arc::new(home),
                    };
                    (key, slot)
                })
                .collect();
            state.table.advertise(generation, slots);
        }
        self.changed();
    }

    /// The node's own counts.
    pub fn load(self: &Arc<Self>, generation: ConnectionGeneration, loads: &[ProviderLoad]) {
        {
            let mut state = self.state.lock();
            let Some(live) = state.sessions.get(&generation) else {
                return;
            };
            let node = live.session.node_id.clone();
            for load in loads {
                state
                    .table
                    .load(generation, &ProviderKey::new(&node, &load.id), load.in_flight);
            }
        }
        self.pump();
    }

    /// A newer connection of the node took over: no new leases, its streams finish.
    pub fn session_superseded(self: &Arc<Self>, generation: ConnectionGeneration) {
        self.session_down(generation);
    }

    /// A session ended.
    pub fn session_down(self: &Arc<Self>, generation: ConnectionGeneration) {
        {
            let mut state = self.state.lock();
            state.sessions.remove(&generation);
            state.table.retire(generation);
        }
        self.changed();
    }

    /// Who is live changed: names, gauges, and perhaps somebody's turn.
    fn changed(self: &Arc<Self>) {
        {
            let mut state = self.state.lock();
            // A name once advertised stays known: whoever asks for it waits for its node's return.
            let known = self.advertised.load();
            let mut names: HashMap<Arc<str>, Vec<Candidate>> = known
                .keys()
                .take(NAMES_KEPT)
                .map(|name| (name.clone(), Vec::new()))
                .collect();
            for (key, slot) in state.table.slots() {
                for target in &slot.targets {
                    let candidate = Candidate {
                        provider: key.clone(),
                        target: target.name.clone(),
                        priority: 0,
                        weight: 1,
                    };
                    names.entry(target.name.clone()).or_default().push(candidate);
                }
            }
            let models = names
                .into_iter()
                .map(|(name, candidates)| {
                    let model = Model {
                        name: name.clone(),
                        candidates,
                        advertised: true,
                        affinity: Affinity::None,
                        liveness: Liveness::default(),
                    };
                    (name, Arc::new(model))
                })
                .collect();
            self.advertised.store(Arc::new(models));
            let live: BTreeSet<ProviderKey> = state.table.slots().map(|(key, _)| key.clone()).collect();
            for gone in state.gauged.difference(&live) {
                self.metrics.forget_provider(gone);
            }
            state.gauged = live;
            for s in SessionState::ALL {
                let n = state.sessions.values().filter(|l| l.state() == *s).count();
                self.metrics
                    .node_sessions
                    .at((*s,))
                    .set(i64::try_from(n).unwrap_or(i64::MAX));
            }
        }
        self.pump();
    }
}
