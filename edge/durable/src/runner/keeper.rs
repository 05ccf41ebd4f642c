//! Keeps leases alive: one task renews everything this process holds, in one call per third of a lease. A holder's right ends
//! on its own clock too: at the last confirmed renewal's sending plus the lease's time, without asking anybody (D130).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, broadcast};
use tokio::time::Instant;

use crate::ids::{Owner, RunId};
use crate::store::{Acquired, Committed, Hint, Lease, LeaseRequest, Renewal, Store, StoreError};
use crate::tasks;
use crate::time::Timestamp;

const RELEASE_WITHIN: Duration = Duration::from_secs(5);

/// The leases this process holds.
pub(crate) struct Keeper {
    store: Arc<dyn Store>,
    owner: Owner,
    ttl: Duration,
    held: Mutex<BTreeMap<(RunId, u64), Arc<HeldState>>>,
    running: AtomicBool,
}

struct HeldState {
    lease: Lease,
    valid_until: Mutex<Instant>,
    lost: AtomicBool,
    /// The inbox's number as last heard.
    signal: AtomicU64,
    /// Whether a hint said that the inbox changed.
    poked: AtomicBool,
    /// The store's clock at a moment of ours.
    clock: Mutex<(Timestamp, Instant)>,
    /// Anything above changed.
    changed: Notify,
}

/// A lease under the keeper's care; dropping it ends the care, not the lease.
pub(crate) struct Held {
    keeper: Arc<Keeper>,
    state: Arc<HeldState>,
}

impl Keeper {
    pub(crate) fn new(store: Arc<dyn Store>, owner: Owner, ttl: Duration) -> Arc<Self> {
        Arc::new(Self {
            store,
            owner,
            ttl,
            held: Mutex::new(BTreeMap::new()),
            running: AtomicBool::new(false),
        })
    }

    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    pub(crate) fn ttl(&self) -> Duration {
        self.ttl
    }

    pub(crate) fn request(&self) -> LeaseRequest {
        LeaseRequest {
            owner: self.owner.clone(),
            ttl: self.ttl,
        }
    }

    /// Takes care of a lease of at least this keeper's time that was asked for at `asked`. How long it lasts is counted here: its
    /// end and the store's `now` may be of two clocks.
    pub(crate) fn hold(self: &Arc<Self>, acquired: &Acquired, asked: Instant) -> Held {
        let (lease, loaded) = (acquired.lease.clone(), &acquired.loaded);
        let key = (lease.run.clone(), lease.incarnation);
        let state = Arc::new(HeldState {
            lease,
            valid_until: Mutex::new(asked + self.ttl),
            lost: AtomicBool::new(false),
            signal: AtomicU64::new(loaded.inbox.signal),
            poked: AtomicBool::new(false),
            clock: Mutex::new((loaded.now, Instant::now())),
            changed: Notify::new(),
        });
        self.held.lock().insert(key, Arc::clone(&state));
        if !self.running.swap(true, Ordering::AcqRel) {
            tasks::spawn(
                "lease keeper",
                keep(Arc::downgrade(self), self.ttl, self.store.hints().subscribe()),
            );
        }
        Held {
            keeper: Arc::clone(self),
            state,
        }
    }

    /// Gives a lease back, within five seconds and whatever became of the caller (D135).
    pub(crate) async fn release(&self, held: &Held) {
        let release = self.store.release(held.lease().clone());
        match tokio::time::timeout(RELEASE_WITHIN, release).await {
            Ok(Ok(()) | Err(StoreError::LeaseLost)) => {}
            Ok(Err(error)) => tracing::warn!(%error, "a lease was not released; it will expire"),
            Err(_) => tracing::warn!("a lease was not released in time; it will expire"),
        }
    }

    /// Whether the store answered.
    async fn renew_all(&self) -> bool {
        let all: Vec<Arc<HeldState>> = self.held.lock().values().cloned().collect();
        if all.is_empty() {
            return true;
        }
        let asked = Instant::now();
        let leases = all.iter().map(|held| held.lease.clone()).collect();
        // A store that does not answer is asked again before the leases have ended.
        let Ok(Ok(renewals)) = tokio::time::timeout(self.ttl / 4, self.store.renew(leases, self.ttl)).await
        else {
            tracing::warn!(leases = all.len(), "leases could not be renewed");
            return false;
        };
        for (held, renewal) in all.iter().zip(renewals) {
            match renewal {
                Renewal::Live { signal, .. } => {
                    *held.valid_until.lock() = asked + self.ttl;
                    held.signal.fetch_max(signal, Ordering::AcqRel);
                }
                Renewal::Lost => held.lost.store(true, Ordering::Release),
            }
            held.changed.notify_one();
        }
        true
    }

    fn hint(&self, hint: &Hint) {
        let (Hint::Posted(run) | Hint::Claimable(run)) = hint;
        let held = self.held.lock();
        for (_, state) in held.range((run.clone(), 0)..=(run.clone(), u64::MAX)) {
            state.poked.store(true, Ordering::Release);
            state.changed.notify_one();
        }
    }
}

async fn keep(keeper: Weak<Keeper>, ttl: Duration, mut hints: broadcast::Receiver<Hint>) {
    let mut tick = tokio::time::interval(ttl / 3);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut listening = true;
    loop {
        let hint = tokio::select! {
            _ = tick.tick() => None,
            hint = hints.recv(), if listening => Some(hint),
        };
        let Some(keeper) = keeper.upgrade() else { return };
        match hint {
            None => {
                if !keeper.renew_all().await {
                    tick.reset_after(ttl / 12);
                }
            }
            Some(Ok(hint)) => keeper.hint(&hint),
            // What was missed is heard with the next renewal.
            Some(Err(broadcast::error::RecvError::Lagged(_))) => {}
            Some(Err(broadcast::error::RecvError::Closed)) => listening = false,
        }
    }
}

impl Held {
    pub(crate) fn lease(&self) -> &Lease {
        &self.state.lease
    }

    /// Whether the lease is surely still ours, by our own clock.
    pub(crate) fn is_live(&self) -> bool {
        !self.state.lost.load(Ordering::Acquire) && Instant::now() < *self.state.valid_until.lock()
    }

    pub(crate) fn lose(&self) {
        self.state.lost.store(true, Ordering::Release);
        self.state.changed.notify_one();
    }

    /// The store's clock, as far as it is known: its last answer plus the time since (no host clock is asked).
    pub(crate) fn now(&self) -> Timestamp {
        let (now, at) = *self.state.clock.lock();
        now.plus(at.elapsed())
    }

    /// A commit's answer: clock and inbox number.
    pub(crate) fn heard(&self, committed: &Committed) {
        *self.state.clock.lock() = (committed.now, Instant::now());
        self.state.signal.fetch_max(committed.signal, Ordering::AcqRel);
    }

    /// Whether the inbox may have changed since `seen`. Asking takes the hint away.
    pub(crate) fn has_news(&self, seen: u64) -> bool {
        self.state.poked.swap(false, Ordering::AcqRel) || self.state.signal.load(Ordering::Acquire) > seen
    }

    /// There is still something to look at.
    pub(crate) fn poke(&self) {
        self.state.poked.store(true, Ordering::Release);
    }

    /// Returns when the lease is lost or the inbox may have changed since `seen`.
    pub(crate) async fn interrupted(&self, seen: u64) {
        loop {
            let changed = self.state.changed.notified();
            let until = *self.state.valid_until.lock();
            let news =
                self.state.poked.load(Ordering::Acquire) || self.state.signal.load(Ordering::Acquire) > seen;
            if news || !self.is_live() {
                return;
            }
            let _ = tokio::time::timeout_at(until, changed).await;
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let lease = &self.state.lease;
        self.keeper
            .held
            .lock()
            .remove(&(lease.run.clone(), lease.incarnation));
    }
}
