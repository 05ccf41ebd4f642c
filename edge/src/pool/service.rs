//! The pool's shell: one lock around table and queue; decisions inside, wake-ups outside.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use foldhash::HashMap;
use iop_shared::execution::Endpoint;
use iop_shared::ids::{ConnectionGeneration, ProviderKey};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::ask::{Ask, Prospects, Refused};
use super::ejection::{Told, Word};
use super::grant::{Found, Place, Want};
use super::lease::{Home, Lease};
use super::queue::{Queue, Ticket};
use super::route::Model;
use super::sessions::Live;
use super::table::Table;
use crate::config::{EjectionSettings, QueueSettings};
use crate::metrics::Metrics;
use crate::tasks;

/// A node that refused for want of room is asked again after this long, news or not.
pub(super) const REFUSAL_RETRY: Duration = Duration::from_millis(100);

pub(super) struct Waiter {
    model: Arc<Model>,
    endpoint: Endpoint,
    pinned: Option<(ProviderKey, Arc<str>)>,
    affinity: Option<u64>,
    avoid: Vec<ProviderKey>,
    allow_avoided: bool,
    /// Dropped unsent: nobody is eligible any more.
    wake: oneshot::Sender<Lease>,
}

impl Waiter {
    fn new(ask: &Ask<'_>, wake: oneshot::Sender<Lease>) -> Self {
        Self {
            model: ask.model.clone(),
            endpoint: ask.endpoint,
            pinned: ask.pinned.cloned(),
            affinity: ask.affinity,
            avoid: ask.avoid.to_vec(),
            allow_avoided: ask.allow_avoided,
            wake,
        }
    }

    /// `model`: as it is now.
    fn want<'a>(&'a self, model: &'a Model) -> Want<'a> {
        Want {
            endpoint: self.endpoint,
            candidates: &model.candidates,
            pinned: self.pinned.as_ref().map(|(p, t)| (p, t)),
            avoid: &self.avoid,
            allow_avoided: self.allow_avoided,
            affinity: self.affinity,
        }
    }

    pub(super) fn could_go(&self, provider: &ProviderKey) -> bool {
        match &self.pinned {
            Some((only, _)) => only == provider,
            None => self.model.candidates.iter().any(|c| c.provider == *provider),
        }
    }
}

pub(super) struct State {
    pub(super) table: Table<Arc<Home>>,
    pub(super) queue: Queue<Waiter>,
    pub(super) sessions: BTreeMap<ConnectionGeneration, Live>,
    /// Providers that have a gauge.
    pub(super) gauged: BTreeSet<ProviderKey>,
}

/// All providers of all live nodes, and who waits for them.
pub struct Pool {
    pub(super) state: Mutex<State>,
    pub(super) configured: HashMap<Arc<str>, Arc<Model>>,
    /// Targets that live providers advertise, as models of their own.
    pub(super) advertised: ArcSwap<HashMap<Arc<str>, Arc<Model>>>,
    max_wait: Duration,
    pub(super) metrics: Arc<Metrics>,
    /// Unix seconds of the start.
    pub(super) created: i64,
}

impl Pool {
    pub fn new(
        models: Vec<Model>,
        queue: QueueSettings,
        ejection: EjectionSettings,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        let configured = models
            .into_iter()
            .map(|m| (m.name.clone(), Arc::new(m)))
            .collect();
        Arc::new(Self {
            state: Mutex::new(State {
                table: Table::new(ejection),
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
        // Whoever asks again has seen time pass, and with it who serves.
        let fresh = (ask.since.is_some() || !ask.avoid.is_empty()).then(|| self.current(ask.model));
        let model = fresh.as_ref().unwrap_or(ask.model);
        let now = Instant::now();
        let (ticket, woken) = {
            let mut state = self.state.lock();
            let want = ask.want(model);
            // Who is in line already goes first.
            let first = ask.since.is_some() || state.queue.is_empty() || state.queue.depth(&model.name) == 0;
            if first && let Found::Granted { place, with } = state.table.grant(want, now.into_std()) {
                drop(state);
                return Ok(Lease::new(self.clone(), with, place, model, ask.endpoint));
            }
            // A replay that nobody is eligible for is over; no wait would help it.
            if !ask.avoid.is_empty() && !ask.hopes(state.table.prospects(want, now.into_std())) {
                return Err(Refused::NoProvider);
            }
            if state.table.never_serves(&model.candidates, ask.endpoint) {
                return Err(Refused::OtherEndpoint);
            }
            let (wake, woken) = oneshot::channel();
            let waiter = Waiter::new(&ask, wake);
            let name = model.name.clone();
            let ticket = match ask.since {
                Some(_) => state.queue.come_back(name, ask.who, waiter),
                None => state
                    .queue
                    .join(name, ask.who, waiter)
                    .ok_or(Refused::QueueFull)?,
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
            since: now,
        };
        // A waiter for another endpoint may stand before one that could go at once.
        self.pump();
        match tokio::time::timeout(left, woken).await {
            Ok(Ok(lease)) => return Ok(lease),
            Ok(Err(_)) => return Err(Refused::NoProvider),
            Err(_) => {}
        }
        drop(place);
        let model = self.current(ask.model);
        let serving = self.state.lock().table.any_serving(ask.want(&model));
        Err(if serving {
            Refused::QueueTimeout
        } else {
            Refused::NoProvider
        })
    }

    /// Who is eligible for this request now.
    pub fn prospects(&self, ask: &Ask<'_>) -> Prospects {
        let (model, now) = (self.current(ask.model), Instant::now().into_std());
        self.state.lock().table.prospects(ask.want(&model), now)
    }

    /// A model as it is now: who advertises a target changes while requests wait for it.
    pub(super) fn current(&self, model: &Arc<Model>) -> Arc<Model> {
        if !model.advertised {
            return model.clone();
        }
        self.advertised.load().get(&model.name).unwrap_or(model).clone()
    }

    /// A node refused for want of room although a place was free here: no attempt goes there until there is news of it,
    /// or for `REFUSAL_RETRY`.
    pub(super) fn refused(self: &Arc<Self>, place: &Place, endpoint: Endpoint) {
        self.state.lock().table.refused(place, endpoint);
        let (pool, provider) = (self.clone(), place.provider.clone());
        tasks::spawn(tasks::Kind::Session, "ask_refusing_node_again", async move {
            tokio::time::sleep(REFUSAL_RETRY).await;
            pool.state.lock().table.forget_refusal(&provider);
            pool.pump();
        });
    }

    /// A place comes back with what its attempt says of the target (G36).
    pub(super) fn release(
        self: &Arc<Self>,
        place: &Place,
        told: Told,
        endpoint: Endpoint,
        model: &Arc<Model>,
    ) {
        let failed = matches!(told.word, Word::Failure { .. });
        let rivals = failed.then(|| self.current(model));
        let rivals = rivals.as_ref().map_or(&[][..], |model| &model.candidates);
        let (again, waiting) = {
            let mut state = self.state.lock();
            let again = state.table.release(place, told, endpoint, rivals);
            (again, !state.queue.is_empty())
        };
        if waiting {
            self.pump();
        }
        // An ejection or a cool-down ends without anybody saying so.
        if let Some(again) = again {
            let pool = Arc::downgrade(self);
            tasks::spawn(tasks::Kind::Session, "offer_again", async move {
                tokio::time::sleep_until(again.into()).await;
                if let Some(pool) = pool.upgrade() {
                    pool.pump();
                }
            });
        }
    }

    pub(super) fn prove(self: &Arc<Self>, place: &Place) {
        self.state.lock().table.prove(place);
        self.pump();
    }

    /// Gives free places to who waits. Wakes outside the lock: a waiter that left drops its lease, which comes back here.
    pub(super) fn pump(self: &Arc<Self>) {
        let now = Instant::now().into_std();
        let served = {
            let mut state = self.state.lock();
            let State { table, queue, .. } = &mut *state;
            let served = queue.offer(|waiter| {
                let model = self.current(&waiter.model);
                match table.grant(waiter.want(&model), now) {
                    Found::Granted { place, with } => Some(Some((place, with))),
                    // No wait will help: it is let go without a place.
                    Found::Absent if !waiter.avoid.is_empty() => Some(None),
                    Found::Full | Found::Absent => None,
                }
            });
            self.metrics
                .queue_depth
                .set(i64::try_from(queue.len()).unwrap_or(i64::MAX));
            served
        };
        for (waiter, given) in served {
            let Some((place, home)) = given else { continue };
            let lease = Lease::new(self.clone(), home, place, &waiter.model, waiter.endpoint);
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
