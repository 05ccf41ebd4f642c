//! The pool's shell: one lock around table and queue; decisions inside, wake-ups outside.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use foldhash::HashMap;
use iop_shared::execution::{Endpoint, ProviderHealth};
use iop_shared::ids::{ConnectionGeneration, NodeId, ProviderKey};
use iop_shared::wire::session::{Advertisement, ProviderLoad};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::lease::{Home, Lease};
use super::queue::{Queue, Ticket};
use super::route::{Affinity, Candidate, Liveness, Model};
use super::snapshot::{ListedModel, NodeSnapshot, ProviderSnapshot};
use super::table::{Found, Slot, Table, Want};
use crate::config::{Priority, QueueSettings};
use crate::link::Session;
use crate::metrics::{Metrics, SessionState};
use crate::tasks;

/// A node that refused for want of room is asked again after this long, news or not.
const REFUSAL_RETRY: Duration = Duration::from_millis(100);

/// Advertised names remembered after their node left.
const NAMES_KEPT: usize = 10_000;

/// What one attempt asks for.
pub struct Ask<'a> {
    pub model: &'a Arc<Model>,
    pub endpoint: Endpoint,
    /// State of this request lives there only.
    pub pinned: Option<&'a (ProviderKey, Arc<str>)>,
    /// It was served before, and the node refused for want of room: when it first asked. It goes to the head of the line,
    /// and its longest wait counts from then.
    pub since: Option<Instant>,
    pub who: &'a Who,
    /// Requests of one value go to one provider while it is not fuller than the others (G30); `None`: the least loaded.
    pub affinity: Option<u64>,
    /// 004 `AvoidProviderID`: tried already, not to be taken again.
    pub avoid: &'a [ProviderKey],
    /// 004 `AllowAvoidedProviderFallback`: the last of `avoid` may be taken when no other is eligible.
    pub allow_avoided: bool,
}

impl<'a> Ask<'a> {
    /// The first ask of a request that prefers nothing.
    pub fn first(model: &'a Arc<Model>, endpoint: Endpoint, who: &'a Who) -> Self {
        Self {
            model,
            endpoint,
            pinned: None,
            since: None,
            who,
            affinity: None,
            avoid: &[],
            allow_avoided: false,
        }
    }
}

/// Whose request it is: fairness between keys inside a class (G33).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Who {
    /// The key's name; empty where no keys are configured.
    pub key: Arc<str>,
    pub priority: Priority,
}

impl Who {
    /// The gateway's own requests, and everybody's where no keys are configured.
    pub fn nobody() -> Self {
        Self {
            key: Arc::from(""),
            priority: Priority::Normal,
        }
    }
}

/// Who could take a request again, full or not (G55).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prospects {
    /// A provider that was not tried yet.
    pub other: bool,
    /// The last one that was tried.
    pub same: bool,
}

/// Why there is no lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// Too many wait already.
    QueueFull,
    /// All providers stayed full for the longest wait.
    QueueTimeout,
    /// No provider came for the longest wait.
    NoProvider,
    /// Whoever serves the model serves other endpoints only.
    OtherEndpoint,
}

struct Waiter {
    model: Arc<Model>,
    endpoint: Endpoint,
    pinned: Option<(ProviderKey, Arc<str>)>,
    affinity: Option<u64>,
    wake: oneshot::Sender<Lease>,
}

fn want<'a>(
    model: &'a Model,
    endpoint: Endpoint,
    pinned: Option<&'a (ProviderKey, Arc<str>)>,
    affinity: Option<u64>,
) -> Want<'a> {
    Want {
        endpoint,
        candidates: &model.candidates,
        pinned: pinned.map(|(p, t)| (p, t)),
        exclude: &[],
        affinity,
    }
}

struct Live {
    session: Arc<Session>,
    version: String,
    draining: bool,
}

struct State {
    table: Table<Arc<Home>>,
    queue: Queue<Waiter>,
    sessions: BTreeMap<ConnectionGeneration, Live>,
    /// Providers that have a gauge.
    gauged: BTreeSet<ProviderKey>,
}

/// All providers of all live nodes, and who waits for them.
pub struct Pool {
    state: Mutex<State>,
    configured: HashMap<Arc<str>, Arc<Model>>,
    /// Targets that live providers advertise, as models of their own.
    advertised: ArcSwap<HashMap<Arc<str>, Arc<Model>>>,
    max_wait: Duration,
    metrics: Arc<Metrics>,
    /// Unix seconds of the start.
    created: i64,
}

impl Pool {
    pub fn new(models: Vec<Model>, queue: QueueSettings, metrics: Arc<Metrics>) -> Arc<Self> {
        let configured = models
            .into_iter()
            .map(|m| (m.name.clone(), Arc::new(m)))
            .collect();
        Arc::new(Self {
            state: Mutex::new(State {
                table: Table::new(),
                queue: Queue::new(queue.max_depth),
                sessions: BTreeMap::new(),
                gauged: BTreeSet::new(),
            }),
            configured,
            advertised: ArcSwap::default(),
            max_wait: queue.max_wait,
            metrics,
            created: jiff::Timestamp::now().as_second(),
        })
    }

    /// The model of a public name: configured, or advertised now (gateway.md §13, Listing).
    pub fn resolve(&self, name: &str) -> Option<Arc<Model>> {
        self.configured
            .get(name)
            .cloned()
            .or_else(|| self.advertised.load().get(name).cloned())
    }

    /// Takes a lease, waiting in line where every provider is full or absent. Dropping the future leaves the line.
    ///
    /// # Errors
    /// As `Refused` says.
    pub async fn acquire(self: &Arc<Self>, ask: Ask<'_>) -> Result<Lease, Refused> {
        let (ticket, woken) = {
            let mut state = self.state.lock();
            // Who is in line already goes first.
            if ask.since.is_some() || state.queue.is_empty() || state.queue.depth(&ask.model.name) == 0 {
                let found = state.table.grant(want(ask.model, ask.endpoint, ask.pinned, ask.affinity));
                if let Found::Granted {
                    provider,
                    target,
                    generation,
                    with,
                } = found
                {
                    drop(state);
                    return Ok(Lease::new(
                        self.clone(),
                        with,
                        (provider, target),
                        generation,
                        ask.model,
                    ));
                }
            }
            if state.table.never_serves(&ask.model.candidates, ask.endpoint) {
                return Err(Refused::OtherEndpoint);
            }
            let (wake, woken) = oneshot::channel();
            let waiter = Waiter {
                model: ask.model.clone(),
                endpoint: ask.endpoint,
                pinned: ask.pinned.cloned(),
                affinity: ask.affinity,
                wake,
            };
            let name = ask.model.name.clone();
            let ticket = match ask.since {
                Some(_) => state.queue.come_back(name, waiter),
                None => state.queue.join(name, waiter).ok_or(Refused::QueueFull)?,
            };
            self.metrics
                .queue_depth
                .set(i64::try_from(state.queue.len()).unwrap_or(i64::MAX));
            (ticket, woken)
        };
        let left = ask.since.map_or(self.max_wait, |since| {
            self.max_wait.saturating_sub(since.elapsed())
        });
        let place = InLine {
            pool: self,
            ticket,
            since: Instant::now(),
        };
        // A waiter for another endpoint may stand before one that could go at once.
        self.pump();
        if let Ok(Ok(lease)) = tokio::time::timeout(left, woken).await {
            return Ok(lease);
        }
        drop(place);
        let state = self.state.lock();
        let serving = match ask.pinned {
            Some((provider, target)) => {
                let only = Candidate {
                    provider: provider.clone(),
                    target: target.clone(),
                    priority: 0,
                    weight: 1,
                };
                state.table.any_serving(&[only], ask.endpoint)
            }
            None => state
                .table
                .any_serving(&self.current(ask.model).candidates, ask.endpoint),
        };
        Err(if serving {
            Refused::QueueTimeout
        } else {
            Refused::NoProvider
        })
    }

    /// Who could take this request now or soon.
    pub fn prospects(&self, ask: &Ask<'_>) -> Prospects {
        let _ = ask;
        Prospects {
            other: false,
            same: false,
        }
    }

    /// A model as it is now: who advertises a target changes while requests wait for it.
    fn current(&self, model: &Arc<Model>) -> Arc<Model> {
        if !model.advertised {
            return model.clone();
        }
        self.advertised.load().get(&model.name).unwrap_or(model).clone()
    }

    /// A node refused for want of room although a place was free here: no attempt goes there until there is news of it,
    /// or for `REFUSAL_RETRY`.
    pub(super) fn refused(self: &Arc<Self>, generation: ConnectionGeneration, provider: &ProviderKey) {
        self.state.lock().table.refused(generation, provider);
        let (pool, provider) = (self.clone(), provider.clone());
        tasks::spawn(tasks::Kind::Session, "ask_refusing_node_again", async move {
            tokio::time::sleep(REFUSAL_RETRY).await;
            pool.state.lock().table.forget_refusal(&provider);
            pool.pump();
        });
    }

    pub(super) fn release(self: &Arc<Self>, generation: ConnectionGeneration, provider: &ProviderKey) {
        let waiting = {
            let mut state = self.state.lock();
            state.table.release(generation, provider);
            !state.queue.is_empty()
        };
        if waiting {
            self.pump();
        }
    }

    /// Gives free places to who waits. Wakes outside the lock: a waiter that left drops its lease, which comes back here.
    fn pump(self: &Arc<Self>) {
        let served = {
            let mut state = self.state.lock();
            let State { table, queue, .. } = &mut *state;
            let served = queue.offer(|waiter| {
                match table.grant(want(
                    &self.current(&waiter.model),
                    waiter.endpoint,
                    waiter.pinned.as_ref(),
                    waiter.affinity,
                )) {
                    Found::Granted {
                        provider,
                        target,
                        generation,
                        with,
                    } => Some((provider, target, generation, with)),
                    Found::Full | Found::Absent => None,
                }
            });
            self.metrics
                .queue_depth
                .set(i64::try_from(queue.len()).unwrap_or(i64::MAX));
            served
        };
        for (waiter, (provider, target, generation, home)) in served {
            let lease = Lease::new(self.clone(), home, (provider, target), generation, &waiter.model);
            // Refused: the waiter left; its lease is dropped and released here.
            let _ = waiter.wake.send(lease);
        }
    }

    fn leave(&self, ticket: Ticket) {
        let mut state = self.state.lock();
        state.queue.leave(ticket);
        self.metrics
            .queue_depth
            .set(i64::try_from(state.queue.len()).unwrap_or(i64::MAX));
    }

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
                        first_content_timeout_ms: p.first_content_timeout_ms,
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
                        targets: p.targets.iter().map(|t| Arc::from(t.as_str())).collect(),
                        endpoints: p.endpoints.clone(),
                        capacity: p.capacity,
                        draining: advertisement.draining,
                        in_flight: 0,
                        others: 0,
                        refused: false,
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
                        target: target.clone(),
                        priority: 0,
                        weight: 1,
                    };
                    names.entry(target.clone()).or_default().push(candidate);
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
                let n = state.sessions.values().filter(|l| session_state(l) == *s).count();
                self.metrics
                    .node_sessions
                    .at((*s,))
                    .set(i64::try_from(n).unwrap_or(i64::MAX));
            }
        }
        self.pump();
    }

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
        let mut serving = models.filter(|m| state.table.any_serving(&m.candidates, endpoint));
        serving.next()
    }

    /// `/api/v1/nodes`.
    pub fn nodes(&self) -> Vec<NodeSnapshot> {
        let state = self.state.lock();
        let node = |(generation, live): (&ConnectionGeneration, &Live)| NodeSnapshot {
            id: live.session.node_id.clone(),
            connection_generation: *generation,
            state: session_state(live),
            version: live.version.clone(),
            connected_at: live.session.connected_at.to_string(),
            embedded: live.session.embedded,
        };
        state.sessions.iter().map(node).collect()
    }

    /// `/api/v1/providers`.
    pub fn providers(&self) -> Vec<ProviderSnapshot> {
        let state = self.state.lock();
        let could_go = |w: &Waiter, key: &ProviderKey| match &w.pinned {
            Some((provider, _)) => provider == key,
            None => w.model.candidates.iter().any(|c| c.provider == *key),
        };
        let provider = |(key, slot): (&ProviderKey, &Slot<Arc<Home>>)| ProviderSnapshot {
            id: key.clone(),
            node_id: node_id(&slot.with),
            connection_generation: slot.generation,
            adapter: slot.with.adapter.clone(),
            targets: slot.targets.clone(),
            status: if slot.draining { "draining" } else { "available" },
            health: ProviderHealth::Available,
            capacity: slot.capacity,
            effective_capacity: if slot.draining { 0 } else { slot.capacity },
            in_flight: state.table.in_flight(key),
            queued: state.queue.waiting().filter(|w| could_go(w, key)).count(),
            overlay: None,
            ejected_until: None,
        };
        state.table.slots().map(provider).collect()
    }
}

fn node_id(home: &Home) -> NodeId {
    home.session.node_id.clone()
}

fn session_state(live: &Live) -> SessionState {
    if live.draining {
        SessionState::Draining
    } else {
        SessionState::Live
    }
}

/// A place in line, given up on drop; its wait is measured however it ends.
struct InLine<'a> {
    pool: &'a Arc<Pool>,
    ticket: Ticket,
    since: Instant,
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        self.pool.leave(self.ticket);
        self.pool.metrics.observe_wait(self.since.elapsed());
    }
}
