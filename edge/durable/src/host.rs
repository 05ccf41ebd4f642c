//! Workers: claim what is due, run it to its next park or end, look again. One host per process and store; it is the only
//! scheduler of its runs (D178). A hint makes it look at once, a poll backs the hint.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Semaphore, broadcast, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::ids::{Owner, RunId};
use crate::record::DefinitionRef;
use crate::runner::{Drive, RunError};
use crate::store::{Acquired, Claim, Hint, LeaseRequest, Store};
use crate::tasks;

/// How a host works.
#[derive(Debug, Clone)]
pub struct HostOptions {
    pub owner: Owner,
    /// Runs at the same time, from 1.
    pub workers: u32,
    /// How often due work is looked for without a hint.
    pub poll_interval: Duration,
}

impl HostOptions {
    /// 16 workers, a look every second. Leases last as the runners say.
    pub fn new(owner: Owner) -> Self {
        Self {
            owner,
            workers: 16,
            poll_interval: Duration::from_secs(1),
        }
    }
}

/// The definitions a host runs: several versions of one stand beside each other. A host that has more of them than it wants to
/// hold gives a `Library` instead.
#[derive(Clone, Default)]
pub struct Registry {
    drivers: Arc<RwLock<Vec<Arc<dyn Drive>>>>,
    library: Option<Arc<dyn Library>>,
}

/// Definitions that are looked up when a run of theirs is claimed.
pub trait Library: Send + Sync + 'static {
    /// `(kind, name)` of what can be looked up now; asked before each claim.
    fn definitions(&self) -> Vec<(String, String)>;
    /// How long a claim's lease lasts; at least as long as the drivers' own.
    fn lease_ttl(&self) -> Duration;
    /// What runs the runs of exactly this definition; `None`: nothing fits, and the run is left alone for a while.
    fn find(&self, definition: &DefinitionRef) -> BoxFuture<'_, Option<Arc<dyn Drive>>>;
}

impl Registry {
    /// A registry whose definitions come from here.
    pub fn of(library: Arc<dyn Library>) -> Self {
        Self {
            drivers: Arc::default(),
            library: Some(library),
        }
    }

    pub fn add(&self, driver: impl Drive) {
        self.drivers.write().push(Arc::new(driver));
    }

    fn definitions(&self) -> Vec<(String, String)> {
        let mut all: Vec<_> = self.drivers.read().iter().map(|d| d.definition()).collect();
        all.extend(self.library.iter().flat_map(|library| library.definitions()));
        all.sort();
        all.dedup();
        all
    }

    /// Long enough for every driver: each renews in its own time and for its own time.
    fn lease_ttl(&self) -> Duration {
        let drivers = self.drivers.read();
        let own = drivers.iter().map(|d| d.lease_ttl());
        own.chain(self.library.iter().map(|library| library.lease_ttl()))
            .max()
            .unwrap_or(Duration::from_secs(30))
    }

    async fn find(&self, acquired: &Acquired) -> Option<Arc<dyn Drive>> {
        let head = &acquired.loaded.head;
        let own = self.drivers.read().iter().find(|d| d.fits(head)).cloned();
        match (own, &self.library) {
            (None, Some(library)) => library.find(&head.definition).await.filter(|d| d.fits(head)),
            (own, _) => own,
        }
    }
}

/// A working host. Dropping it ends its claims and lets the runs at work go on; `stop` gives them back in order.
#[must_use = "dropping a host ends its claims"]
pub struct Host {
    shared: Arc<Shared>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

struct Shared {
    store: Arc<dyn Store>,
    registry: Registry,
    options: HostOptions,
    free: Arc<Semaphore>,
    /// Runs that could not be worked on, and when to look at them again.
    resting: Mutex<HashMap<RunId, Resting>>,
    lost: AtomicU64,
}

struct Resting {
    until: Instant,
    pause: Duration,
}

const REST_FIRST: Duration = Duration::from_millis(500);
const REST_LONGEST: Duration = Duration::from_secs(60);
/// Resting runs that a claim passes over by name; more than these are met and given back.
const REST_NAMED: usize = 10_000;

impl Host {
    /// Starts the workers on the current runtime.
    pub fn start(store: Arc<dyn Store>, registry: Registry, options: HostOptions) -> Self {
        let workers = options.workers.max(1) as usize;
        let shared = Arc::new(Shared {
            store,
            registry,
            free: Arc::new(Semaphore::new(workers)),
            options,
            resting: Mutex::new(HashMap::new()),
            lost: AtomicU64::new(0),
        });
        let (stop, stopped) = watch::channel(false);
        let task = tasks::spawn("run host", look(Arc::clone(&shared), stopped));
        Self { shared, stop, task }
    }

    /// Runs at work now.
    pub fn busy(&self) -> u32 {
        let workers = self.shared.options.workers.max(1);
        workers.saturating_sub(u32::try_from(self.shared.free.available_permits()).unwrap_or(u32::MAX))
    }

    /// How often a worker here lost the run that it worked on, since the start.
    pub fn lost(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }

    /// No new claims; runs at work stop at their last committed point and go back to the queue, calls in flight get the
    /// runners' grace. True when everything was given back within `patience`.
    pub async fn stop(self, patience: Duration) -> bool {
        self.stop.send_replace(true);
        let workers = self.shared.options.workers.max(1);
        let idle = async {
            // A claim under way is finished first: what it brings is given back by the workers.
            let _ = self.task.await;
            let _ = self.shared.free.acquire_many(workers).await;
        };
        tokio::time::timeout(patience, idle).await.is_ok()
    }
}

async fn look(shared: Arc<Shared>, stopped: watch::Receiver<bool>) {
    let mut hints = shared.store.hints().subscribe();
    let mut listening = true;
    let mut tick = tokio::time::interval(shared.options.poll_interval.max(Duration::from_millis(1)));
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut stop = stopped.clone();
    loop {
        // A place first: what is claimed is worked on at once.
        let Ok(place) = Arc::clone(&shared.free).acquire_owned().await else {
            return;
        };
        drop(place);
        if *stop.borrow() {
            return;
        }
        if shared.claim(&stopped).await {
            continue;
        }
        loop {
            tokio::select! {
                _ = tick.tick() => break,
                // An error: the host was dropped.
                _ = stop.wait_for(|stop| *stop) => return,
                hint = hints.recv(), if listening => match hint {
                    Ok(Hint::Claimable(_)) | Err(broadcast::error::RecvError::Lagged(_)) => break,
                    Ok(Hint::Posted(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => listening = false,
                },
            }
        }
    }
}

impl Shared {
    /// Claims for every free place. True when there may be more.
    async fn claim(self: &Arc<Self>, stopped: &watch::Receiver<bool>) -> bool {
        let definitions = self.registry.definitions();
        let places = u32::try_from(self.free.available_permits()).unwrap_or(u32::MAX);
        if definitions.is_empty() || places == 0 {
            return false;
        }
        let asked = Instant::now();
        let claim = Claim {
            lease: LeaseRequest {
                owner: self.options.owner.clone(),
                ttl: self.registry.lease_ttl(),
            },
            definitions,
            except: self.resting(asked),
            limit: places,
        };
        let claimed = match self.store.claim(claim).await {
            Ok(claimed) => claimed,
            Err(error) => {
                tracing::warn!(%error, "due runs could not be claimed");
                return false;
            }
        };
        for (run, why) in &claimed.quarantined {
            tracing::error!(run = %run, why, "a run is corrupt and was set aside");
        }
        let full = claimed.runs.len() as u64 >= u64::from(places);
        let mut fits = false;
        for acquired in claimed.runs {
            let driver = self.registry.find(&acquired).await;
            fits |= driver.is_some();
            let Ok(place) = Arc::clone(&self.free).acquire_owned().await else {
                return false;
            };
            let (this, stopped) = (Arc::clone(self), stopped.clone());
            tasks::spawn("run worker", async move {
                let _place = place;
                this.work(acquired, driver, asked, stopped).await;
            });
        }
        // Runs that nobody here can work on are no reason to hurry.
        full && fits
    }

    async fn work(
        &self,
        acquired: Acquired,
        driver: Option<Arc<dyn Drive>>,
        asked: Instant,
        stopped: watch::Receiver<bool>,
    ) {
        let run = acquired.lease.run.clone();
        let Some(driver) = driver else {
            let _ = self.store.release(acquired.lease).await;
            self.rest(run, "no version of its definition fits");
            return;
        };
        let driven = AssertUnwindSafe(driver.drive(acquired, asked, stopped))
            .catch_unwind()
            .await;
        let Ok(driven) = driven else {
            self.rest(run, "its worker panicked");
            return;
        };
        match driven {
            Ok(_) => {
                self.resting.lock().remove(&run);
            }
            // Somebody else has it, or will claim it when the lease has run out.
            Err(RunError::LeaseLost) => {
                self.lost.fetch_add(1, Ordering::Relaxed);
            }
            Err(RunError::Busy) => {}
            Err(error) => self.rest(run, error.code()),
        }
    }

    /// The runs to pass over, the forgotten ones dropped.
    fn resting(&self, now: Instant) -> Vec<RunId> {
        let mut resting = self.resting.lock();
        resting.retain(|_, rest| now < rest.until + rest.pause);
        resting
            .iter()
            .filter(|(_, rest)| now < rest.until)
            .map(|(run, _)| run.clone())
            .take(REST_NAMED)
            .collect()
    }

    /// Does not touch this run for a while, longer each time.
    fn rest(&self, run: RunId, why: &str) {
        tracing::warn!(run = %run, why, "a run could not be worked on");
        let mut resting = self.resting.lock();
        let pause = resting
            .get(&run)
            .map_or(REST_FIRST, |rest| (rest.pause * 2).min(REST_LONGEST));
        resting.insert(
            run,
            Resting {
                until: Instant::now() + pause,
                pause,
            },
        );
    }
}
