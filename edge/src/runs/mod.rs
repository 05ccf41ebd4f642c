//! The durable runtime inside the edge: where runs are stored, who works on them, and what people and clients do to them.
//!
//! Two engines stand beside each other: one on the configured store, and one in memory for runs that nobody needs to outlive the
//! process (D63). Everything above them is the same.

pub(crate) mod calls;
pub(crate) mod catalog;
mod create;
pub(crate) mod gates;
pub(crate) mod live;
pub(crate) mod merged;
mod observed;
pub(crate) mod outside;
pub(crate) mod people;
pub mod problem;
pub(crate) mod steer;
mod sweep;
pub(crate) mod view;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use anyhow::Context as _;
use iop_durable::host::{Host, HostOptions, Registry};
use iop_durable::ids::{Owner, RunId};
use iop_durable::record::DefinitionRef;
use iop_durable::runner::{Limits, Operator, Options};
use iop_durable::store::memory::MemoryStore;
use iop_durable::store::postgres::PostgresStore;
use iop_durable::store::sqlite::{SqliteStore, path_of};
use iop_durable::store::{Loaded, Store, StoreError};
use iop_durable::time::HostClock;
use parking_lot::Mutex;
use tokio::sync::mpsc;

pub(crate) use create::{Child, CreateRun, Made};

use self::catalog::{Catalog, Compiled, Shelf};
use self::live::{Follow, Live};
use self::observed::Observed;
use self::problem::{Code, Problem};
use crate::agents::prices::Prices;
use crate::agents::program::Room;
use crate::agents::spec::AgentSpec;
use crate::agents::state::usage;
use crate::agents::tools::Toolbox;
use crate::app::App;
use crate::config::{Role, RunsSettings, StoreUrl};
use crate::http::auth::Caller;
use crate::metrics::Metrics;
use crate::tasks;

/// How often a follower looks at the store without a word: what runs here is told at once.
const FOLLOW_POLL: Duration = Duration::from_millis(500);

/// How long a run that is not kept is there after its end: several looks of those who follow it at another edge.
const LINGER: Duration = Duration::from_secs(4);

/// What `Runs` is made of.
pub struct Ingredients {
    pub settings: RunsSettings,
    pub store: StoreUrl,
    pub agents: BTreeMap<String, AgentSpec>,
    pub prices: Prices,
    pub metrics: Arc<Metrics>,
}

/// The runs of this edge.
pub struct Runs {
    /// Durable first.
    engines: [Engine; 2],
    catalog: Arc<Catalog>,
    toolbox: Toolbox,
    settings: RunsSettings,
    metrics: Arc<Metrics>,
    app: Arc<OnceLock<Weak<App>>>,
    ended: Mutex<Option<mpsc::UnboundedReceiver<RunId>>>,
    /// Held while a run is made under a name of its caller's: together by durable ones, alone by the others.
    names: tokio::sync::RwLock<()>,
}

/// Runs of one store, and who works on them.
pub(crate) struct Engine {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) operator: Operator,
    /// Whether its runs outlive the process.
    pub(crate) durable: bool,
    shelf: Arc<Shelf>,
    live: Arc<Live>,
    host: Mutex<Option<Host>>,
}

/// A run that its caller may see.
pub(crate) struct Seen<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) loaded: Loaded,
}

impl Engine {
    /// What runs the runs of this definition.
    ///
    /// # Errors
    /// `definition_missing`, `definition_changed`; the store's.
    pub(crate) async fn pinned(&self, definition: &DefinitionRef) -> Result<Arc<Compiled>, Problem> {
        self.shelf.pinned(definition).await
    }

    /// Runs at work now.
    fn busy(&self) -> u32 {
        self.host.lock().as_ref().map_or(0, Host::busy)
    }

    /// How often a worker lost its run, since the start.
    fn lost(&self) -> u64 {
        self.host.lock().as_ref().map_or(0, Host::lost)
    }

    /// Follows a run from behind this event.
    pub(crate) fn follow(&self, run: &RunId, after: u64) -> Follow {
        self.live.follow(Arc::clone(&self.store), run, after, FOLLOW_POLL)
    }
}

impl Runs {
    /// Opens the store and registers the configuration's agents. Nothing runs before `start`.
    ///
    /// # Errors
    /// A store that cannot be opened, with what to do about it.
    pub async fn open(ingredients: Ingredients) -> anyhow::Result<Arc<Self>> {
        let Ingredients {
            settings,
            store,
            agents,
            prices,
            metrics,
        } = ingredients;
        let owner = Owner::new(&format!("edge-{}", uuid::Uuid::now_v7().simple()))?;
        let app = Arc::new(OnceLock::new());
        let (tell, ended) = mpsc::unbounded_channel();
        let alone = !matches!(store, StoreUrl::Postgres(_));
        let opened = open_store(&store).await?;
        let options = Options {
            lease_ttl: settings.lease_ttl,
            limits: Limits {
                max_state: settings.max_state,
                max_payload: settings.max_result,
                ..Limits::default()
            },
            cancel_grace: settings.cancel_grace,
            linger: LINGER,
            ..Options::new(owner.clone())
        };
        let watched = |inner: Arc<dyn Store>| {
            let live = Arc::new(Live::default());
            let observed = Observed::new(inner, Arc::clone(&metrics), Arc::clone(&live), tell.clone());
            (Arc::new(observed) as Arc<dyn Store>, live)
        };
        let (durable, live) = watched(opened);
        let catalog = Catalog::open(Arc::clone(&durable), alone, &agents, prices)
            .await
            .context("store: the agents cannot be registered")?;
        let catalog = Arc::new(catalog);
        let engine = |store: Arc<dyn Store>, live: Arc<Live>, durable: bool| {
            let room = Room {
                store: Arc::clone(&store),
                live: Arc::clone(&live),
                metrics: Arc::clone(&metrics),
                durable,
                app: Arc::clone(&app),
            };
            Engine {
                operator: Operator::new(
                    Arc::clone(&store),
                    options.owner.clone(),
                    options.lease_ttl,
                    options.limits,
                )
                .usage(usage),
                shelf: Arc::new(Shelf::new(Arc::clone(&catalog), Arc::new(room), options.clone())),
                store,
                durable,
                live,
                host: Mutex::new(None),
            }
        };
        let (volatile, volatile_live) = watched(Arc::new(MemoryStore::new(Arc::new(HostClock::new()))));
        Ok(Arc::new(Self {
            engines: [
                engine(durable, live, true),
                engine(volatile, volatile_live, false),
            ],
            catalog,
            toolbox: Toolbox::new(settings.max_result)?,
            settings,
            metrics,
            app,
            ended: Mutex::new(Some(ended)),
            names: tokio::sync::RwLock::new(()),
        }))
    }

    /// Starts the workers and the sweeper. Once.
    pub fn start(self: &Arc<Self>, app: &Arc<App>) {
        if self.app.set(Arc::downgrade(app)).is_err() {
            return;
        }
        for engine in &self.engines {
            let library: Arc<Shelf> = Arc::clone(&engine.shelf);
            let options = HostOptions {
                owner: engine.shelf.owner().clone(),
                workers: u32::try_from(self.settings.workers).unwrap_or(u32::MAX),
                poll_interval: self.settings.poll_interval,
            };
            let host = Host::start(Arc::clone(&engine.store), Registry::of(library), options);
            *engine.host.lock() = Some(host);
        }
        let this = Arc::downgrade(self);
        tasks::spawn(tasks::Kind::Service, "run sweeper", sweep::sweep(this));
        if let Some(ended) = self.ended.lock().take() {
            let this = Arc::downgrade(self);
            tasks::spawn(
                tasks::Kind::Service,
                "ended children",
                sweep::tell_parents(this, ended),
            );
        }
    }

    /// No new claims; what runs stops at its last committed point and goes back to the queue. True when all was given back within
    /// `patience`.
    pub async fn stop(&self, patience: Duration) -> bool {
        let hosts = self.engines.iter().map(|engine| engine.host.lock().take());
        let stopped = hosts.flatten().map(|host| host.stop(patience));
        futures_util::future::join_all(stopped)
            .await
            .into_iter()
            .all(|all| all)
    }

    pub(crate) fn engines(&self) -> [&Engine; 2] {
        let [durable, volatile] = &self.engines;
        [durable, volatile]
    }

    pub(crate) fn engine(&self, durable: bool) -> &Engine {
        let [first, second] = &self.engines;
        if durable { first } else { second }
    }

    pub(crate) fn catalog(&self) -> &Arc<Catalog> {
        &self.catalog
    }

    pub(crate) fn toolbox(&self) -> &Toolbox {
        &self.toolbox
    }

    pub(crate) fn settings(&self) -> &RunsSettings {
        &self.settings
    }

    /// A run that this caller may see: its own, or any for an operator and an admin (durable-api §8 "Access").
    ///
    /// # Errors
    /// `invalid_encoding`, `run_not_found`, `run_deleted`, `run_corrupt`; the store's.
    pub(crate) async fn see(&self, caller: &Caller, run: &str) -> Result<Seen<'_>, Problem> {
        let id =
            RunId::new(run).map_err(|e| Problem::new(Code::InvalidEncoding, e.to_string()).at("run_id"))?;
        let [durable, volatile] = self.engines();
        let seen = match volatile.store.load(&id).await {
            // Another process may have a durable run of this id: nobody hides it from its owner.
            Ok(loaded) if sees(caller, loaded.head.owner.as_deref()) => Seen {
                engine: volatile,
                loaded,
            },
            Ok(_) | Err(StoreError::NotFound) => Seen {
                engine: durable,
                loaded: durable
                    .store
                    .load(&id)
                    .await
                    .map_err(|e| Problem::from(e).of(run))?,
            },
            Err(error) => return Err(Problem::from(error).of(run)),
        };
        if sees(caller, seen.loaded.head.owner.as_deref()) {
            Ok(seen)
        } else {
            Err(Problem::from(StoreError::NotFound).of(run))
        }
    }
}

/// Whether this caller may see a run that was made by this key.
pub(crate) fn sees(caller: &Caller, owner: Option<&str>) -> bool {
    caller.has(Role::Operator) || caller.has(Role::Admin) || caller.name().as_deref() == owner
}

async fn open_store(url: &StoreUrl) -> anyhow::Result<Arc<dyn Store>> {
    Ok(match url {
        StoreUrl::Sqlite(url) => {
            let path: PathBuf = path_of(url).context("store.url")?;
            let store = SqliteStore::open(&path).await;
            // Its sentence has the cause in it: a chain would say it twice.
            Arc::new(store.map_err(|e| anyhow::anyhow!("store.url: {}: {e}", path.display()))?)
        }
        StoreUrl::Postgres(url) => {
            // The URL may hold a password: errors do not repeat it.
            let store = PostgresStore::connect(url).await;
            Arc::new(store.map_err(|e| anyhow::anyhow!("store.url: PostgreSQL: {e}"))?)
        }
        StoreUrl::Memory => Arc::new(MemoryStore::new(Arc::new(HostClock::new()))),
    })
}
