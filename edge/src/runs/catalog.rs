//! The agents there are: immutable versions in the store, declared by the configuration or over REST, compiled when a run of
//! theirs needs it (D116, durable-api §8 "Which definition").

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use iop_durable::host::Library;
use iop_durable::ids::Owner;
use iop_durable::record::DefinitionRef;
use iop_durable::runner::{Drive, Options, Runner};
use iop_durable::store::{Define, Defined, Definition, Origin, Store, StoreError};
use iop_durable::time::Timestamp;
use parking_lot::RwLock;

use super::problem::{Code, Problem};
use crate::agents::prices::Prices;
use crate::agents::program::{Program, Room};
use crate::agents::spec::AgentSpec;
use crate::agents::spec::check::{canonical, check, is_name};
use crate::agents::state::AgentState;

/// The front-end's name in definitions.
pub(crate) const AGENT: &str = "agent";
/// Versions held in memory: compiled ones are large, and runs of few versions are under way at once.
const KEPT: u64 = 1_000;
/// Names that are read at once.
const PAGE: u32 = 200;

/// One version of an agent.
pub(crate) struct Version {
    pub(crate) name: String,
    /// From 1.
    pub(crate) version: u64,
    /// `sha256:…` of the canonical declaration.
    pub(crate) digest: String,
    pub(crate) spec: Arc<AgentSpec>,
    pub(crate) created_at: Timestamp,
}

/// A version with what runs it.
pub(crate) struct Compiled {
    pub(crate) version: Arc<Version>,
    pub(crate) program: Arc<Program>,
    pub(crate) runner: Runner<AgentState>,
}

/// The agents of a store, as this process sees them.
pub(crate) struct Catalog {
    store: Arc<dyn Store>,
    prices: Prices,
    /// Names that this process's configuration declares.
    configured: BTreeSet<String>,
    /// Nobody else writes to the store: what is known here is what is there.
    alone: bool,
    /// Agents whose runs this process works on, as of the last look at the store, each with its newest version; `None` for one that
    /// cannot be read.
    available: RwLock<BTreeMap<String, Option<Arc<Version>>>>,
    /// Held while a definition is written, until it is known.
    writing: tokio::sync::Mutex<()>,
    /// One is being written, or its writer has left before it was known here.
    unknown: AtomicBool,
    versions: moka::sync::Cache<(String, u64), Arc<Version>>,
}

impl Catalog {
    /// Registers the configuration's agents and looks up the others.
    ///
    /// # Errors
    /// The store's.
    pub(super) async fn open(
        store: Arc<dyn Store>,
        alone: bool,
        agents: &BTreeMap<String, AgentSpec>,
        prices: Prices,
    ) -> Result<Self, StoreError> {
        let catalog = Self {
            alone,
            writing: tokio::sync::Mutex::default(),
            unknown: AtomicBool::new(false),
            store,
            prices,
            configured: agents.keys().cloned().collect(),
            available: RwLock::default(),
            versions: moka::sync::Cache::new(KEPT),
        };
        for (name, spec) in agents {
            catalog.define(name, spec, Origin::Config).await?;
        }
        catalog.refresh().await?;
        Ok(catalog)
    }

    async fn define(&self, name: &str, spec: &AgentSpec, origin: Origin) -> Result<Defined, StoreError> {
        let (body, digest) = canonical(spec);
        self.store
            .define(Define {
                kind: AGENT.to_owned(),
                name: name.to_owned(),
                origin,
                digest,
                body,
            })
            .await
    }

    /// Looks up which agents there are, unless that is known.
    ///
    /// # Errors
    /// The store's; what is known stays.
    pub(super) async fn keep_up(&self) -> Result<(), StoreError> {
        if self.alone && !self.unknown.load(Ordering::Acquire) {
            return Ok(());
        }
        self.refresh().await
    }

    async fn refresh(&self) -> Result<(), StoreError> {
        let _writing = self.writing.lock().await;
        let mut names = BTreeMap::new();
        let mut after = None;
        loop {
            let page = self.store.definitions(AGENT, after, PAGE).await?;
            let full = page.len() as u64 >= u64::from(PAGE);
            after = page.last().map(|definition| definition.name.clone());
            let there = page.into_iter().filter(|d| self.is_available(d));
            names.extend(there.map(|d| (d.name.clone(), self.version(d).ok())));
            if !full {
                break;
            }
        }
        *self.available.write() = names;
        self.unknown.store(false, Ordering::Release);
        Ok(())
    }

    /// An agent of a configuration is there where that configuration is.
    fn is_available(&self, definition: &Definition) -> bool {
        !definition.withdrawn
            && (definition.origin == Origin::Api || self.configured.contains(&definition.name))
    }

    /// The version that new runs get.
    ///
    /// # Errors
    /// `agent_not_found`; the store's.
    pub(crate) async fn newest(&self, agent: &str) -> Result<Arc<Version>, Problem> {
        if self.alone
            && !self.unknown.load(Ordering::Acquire)
            && let Some(Some(newest)) = self.available.read().get(agent)
        {
            return Ok(Arc::clone(newest));
        }
        self.newest_stored(agent).await
    }

    async fn newest_stored(&self, agent: &str) -> Result<Arc<Version>, Problem> {
        let found = self.store.definition(AGENT, agent, None).await?;
        match found.filter(|definition| self.is_available(definition)) {
            Some(definition) => self.version(definition),
            None => Err(Problem::new(Code::AgentNotFound, "There is no agent of this name.").at("agent")),
        }
    }

    fn version(&self, definition: Definition) -> Result<Arc<Version>, Problem> {
        let key = (definition.name.clone(), definition.version);
        let digest = format!("sha256:{}", definition.digest);
        if let Some(version) = self.versions.get(&key).filter(|version| version.digest == digest) {
            return Ok(version);
        }
        let spec: AgentSpec = serde_json::from_slice(&definition.body).map_err(|_| {
            let why = "The stored definition is of another program.";
            Problem::new(Code::DefinitionChanged, why)
        })?;
        let version = Arc::new(Version {
            name: definition.name,
            version: definition.version,
            digest,
            spec: Arc::new(spec),
            created_at: definition.created_at,
        });
        self.versions.insert(key, Arc::clone(&version));
        Ok(version)
    }

    /// The version that a run is pinned to; its agent has to be there.
    ///
    /// # Errors
    /// `definition_missing`, `definition_changed`; the store's.
    pub(crate) async fn pinned_version(&self, definition: &DefinitionRef) -> Result<Arc<Version>, Problem> {
        match self.newest(&definition.name).await {
            Ok(newest) if newest.version == definition.version && newest.digest == definition.digest => {
                return Ok(newest);
            }
            Err(problem) if problem.code == Code::AgentNotFound => {
                let why = "The agent of this run is gone; the run waits until it is there again.";
                return Err(Problem::new(Code::DefinitionMissing, why));
            }
            Ok(_) => {}
            // A damaged newest version says nothing of the pinned one.
            Err(problem) if problem.code == Code::RunCorrupt => {}
            Err(problem) => return Err(problem),
        }
        let changed = || {
            Problem::new(
                Code::DefinitionChanged,
                "The version this run is pinned to is not the stored one.",
            )
        };
        let stored = self
            .store
            .definition(AGENT, &definition.name, Some(definition.version));
        let stored = match stored.await {
            Ok(stored) => stored.ok_or_else(changed)?,
            Err(StoreError::Corrupt { .. }) => return Err(changed()),
            Err(error) => return Err(error.into()),
        };
        let version = self.version(stored)?;
        if version.digest == definition.digest {
            Ok(version)
        } else {
            Err(changed())
        }
    }

    pub(crate) fn has_price(&self, model: &str) -> bool {
        self.prices.get(model).is_some()
    }

    /// Whether runs of this definition have somebody to work on them.
    pub(crate) fn has(&self, agent: &str) -> bool {
        self.available.read().contains_key(agent)
    }

    /// The newest versions of the agents there are, by name: those that can be read. As of the last look at the store.
    pub(crate) fn readable(&self) -> Vec<Arc<Version>> {
        self.available.read().values().flatten().cloned().collect()
    }

    /// Declares an agent; true when that is a new version.
    ///
    /// # Errors
    /// `invalid_definition`, naming the field; the store's.
    pub(crate) async fn put(&self, name: &str, spec: AgentSpec) -> Result<(Arc<Version>, bool), Problem> {
        let invalid = |field: String, message: String| {
            Problem::new(Code::InvalidDefinition, format!("{field}: {message}")).at(field)
        };
        if !is_name(name) {
            return Err(invalid(
                "name".to_owned(),
                "must match [A-Za-z0-9._-]{1,64}".to_owned(),
            ));
        }
        check(&spec, &self.prices).map_err(|e| invalid(e.field, e.message))?;
        if self.configured.contains(name) {
            let why = "is declared in the configuration of this edge";
            return Err(invalid("name".to_owned(), why.to_owned()));
        }
        let _writing = self.writing.lock().await;
        let unknown = self.unknown.swap(true, Ordering::AcqRel);
        let defined = self.define(name, &spec, Origin::Api).await?;
        let version = self.newest_stored(name).await?;
        let known = Some(Arc::clone(&version));
        self.available.write().insert(name.to_owned(), known);
        self.unknown.store(unknown, Ordering::Release);
        Ok((version, matches!(defined, Defined::New { .. })))
    }

    /// Withdraws an agent; its versions and runs stay.
    ///
    /// # Errors
    /// `agent_not_found`; `invalid_definition` for one that the configuration declares.
    pub(crate) async fn delete(&self, name: &str) -> Result<(), Problem> {
        let _writing = self.writing.lock().await;
        self.newest_stored(name).await?;
        if self.configured.contains(name) {
            let why = "name: is declared in the configuration of this edge; take it out there";
            return Err(Problem::new(Code::InvalidDefinition, why).at("name"));
        }
        let unknown = self.unknown.swap(true, Ordering::AcqRel);
        self.store.withdraw(AGENT, name).await?;
        self.available.write().remove(name);
        self.unknown.store(unknown, Ordering::Release);
        Ok(())
    }

    /// The newest versions of the agents there are, by name.
    ///
    /// # Errors
    /// The store's.
    pub(crate) async fn list(&self, after: Option<&str>, limit: u32) -> Result<Vec<Arc<Version>>, Problem> {
        let mut found = Vec::new();
        let mut after = after.map(str::to_owned);
        loop {
            let page = self.store.definitions(AGENT, after, PAGE).await?;
            let full = page.len() as u64 >= u64::from(PAGE);
            after = page.last().map(|definition| definition.name.clone());
            for definition in page {
                if self.is_available(&definition) {
                    found.push(self.version(definition)?);
                    if found.len() as u64 >= u64::from(limit) {
                        return Ok(found);
                    }
                }
            }
            if !full {
                return Ok(found);
            }
        }
    }

    /// The versions of an agent above this one.
    ///
    /// # Errors
    /// `agent_not_found`; the store's.
    pub(crate) async fn versions(
        &self,
        name: &str,
        after: u64,
        limit: u32,
    ) -> Result<Vec<Arc<Version>>, Problem> {
        self.newest(name).await?;
        let page = self.store.versions(AGENT, name, after, limit).await?;
        page.into_iter()
            .map(|definition| self.version(definition))
            .collect()
    }
}

/// The versions that one engine runs.
pub(crate) struct Shelf {
    catalog: Arc<Catalog>,
    room: Arc<Room>,
    options: Options,
    compiled: moka::sync::Cache<(String, u64), Arc<Compiled>>,
}

impl Shelf {
    pub(super) fn new(catalog: Arc<Catalog>, room: Arc<Room>, options: Options) -> Self {
        Self {
            catalog,
            room,
            options,
            compiled: moka::sync::Cache::new(KEPT),
        }
    }

    /// Who holds the leases.
    pub(super) fn owner(&self) -> &Owner {
        &self.options.owner
    }

    /// What runs this version.
    ///
    /// # Errors
    /// `definition_changed` when this program cannot.
    pub(crate) fn compiled(&self, version: &Arc<Version>) -> Result<Arc<Compiled>, Problem> {
        let key = (version.name.clone(), version.version);
        let same = |compiled: &Arc<Compiled>| compiled.version.digest == version.digest;
        if let Some(compiled) = self.compiled.get(&key).filter(same) {
            return Ok(compiled);
        }
        let unfit = |why: String| {
            tracing::error!(
                agent = version.name,
                version = version.version,
                why,
                "a definition cannot be run"
            );
            Problem::new(
                Code::DefinitionChanged,
                "This program cannot run the stored definition.",
            )
        };
        let price = self.catalog.prices.get(&version.spec.model).cloned();
        let program = Program::new(Arc::clone(version), price, Arc::clone(&self.room))
            .map_err(|e| unfit(e.to_string()))?;
        let program = Arc::new(program);
        let graph = Arc::clone(&program).graph().map_err(|e| unfit(e.to_string()))?;
        let runner = Runner::new(
            Arc::new(graph),
            Arc::clone(&self.room.store),
            self.options.clone(),
        )
        .map_err(|e| unfit(e.to_string()))?;
        let compiled = Arc::new(Compiled {
            version: Arc::clone(version),
            program,
            runner,
        });
        self.compiled.insert(key, Arc::clone(&compiled));
        Ok(compiled)
    }

    /// What runs the runs of this definition.
    ///
    /// # Errors
    /// `definition_missing`, `definition_changed`; the store's.
    pub(crate) async fn pinned(&self, definition: &DefinitionRef) -> Result<Arc<Compiled>, Problem> {
        let version = self.catalog.pinned_version(definition).await?;
        self.compiled(&version)
    }
}

impl Library for Shelf {
    fn definitions(&self) -> Vec<(String, String)> {
        let names = self.catalog.available.read();
        names
            .keys()
            .map(|name| (AGENT.to_owned(), name.clone()))
            .collect()
    }

    fn lease_ttl(&self) -> Duration {
        self.options.lease_ttl
    }

    fn find(&self, definition: &DefinitionRef) -> BoxFuture<'_, Option<Arc<dyn Drive>>> {
        let definition = definition.clone();
        async move {
            let compiled = self.pinned(&definition).await.ok()?;
            Some(Arc::new(compiled.runner.clone()) as Arc<dyn Drive>)
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests;
