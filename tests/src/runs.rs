//! Durable runs from outside: edges on one store, a model and tools under the test's control, a client of `/api/v1`, and what must
//! hold after every scenario.

pub mod agents;
mod api;
mod invariants;
mod sse;

use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;

pub use api::{Api, TERMINAL, encode, waiting_ids};
pub use sse::{Event, Sse};

use crate::config::{Provider, Setup, key};
use crate::db_proxy::DbProxy;
use crate::llm::{Llm, MODEL};
use crate::mcp_stub::McpStub;
use crate::postgres::{self, Postgres};
use crate::relay::Relay;
use crate::stack::Edge;
use crate::tool_stub::ToolStub;

/// The key with every role; what the harness uses when nothing else is said.
pub const ROOT: &str = "sk-root";
/// An operator who is no admin.
pub const BOSS: &str = "sk-boss";
/// A key that may only create runs and see its own.
pub const OWNER: &str = "sk-owner";
/// Another of that kind.
pub const OTHER: &str = "sk-other";

/// Where runs are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Db {
    Sqlite,
    Postgres,
}

impl Db {
    /// For scenarios marked **[both]**.
    pub const BOTH: [Db; 2] = [Db::Sqlite, Db::Postgres];
}

/// What differs from test to test.
#[derive(Debug, Clone)]
pub struct Options {
    pub lease_ttl: Duration,
    pub poll_interval: Duration,
    pub workers: usize,
    /// Lines of sections of the configuration.
    pub lines: Vec<(String, String)>,
    pub env: Vec<(String, String)>,
    /// The store's URL in the place of the server's own, such as a proxy's.
    pub store_url: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            lease_ttl: Duration::from_secs(2),
            poll_interval: Duration::from_millis(100),
            workers: 16,
            lines: Vec::new(),
            env: Vec::new(),
            store_url: None,
        }
    }
}

impl Options {
    /// A line in a section.
    #[must_use]
    pub fn line(mut self, section: &str, line: &str) -> Self {
        self.lines.push((section.to_owned(), line.to_owned()));
        self
    }
}

/// The world outside the edges.
pub struct Stubs {
    pub llm: Llm,
    pub tools: ToolStub,
    pub mcp: McpStub,
}

/// Edges, their store, and the world outside.
pub struct World {
    pub edges: Vec<Edge>,
    pub stubs: Stubs,
    pub postgres: Option<Postgres>,
    pub options: Options,
    /// `[agents.*]` and what else the configuration ends with.
    pub agents: String,
    // The last field: removed after the processes have gone.
    pub dir: TempDir,
}

impl World {
    /// One edge, with the default options.
    pub async fn start(db: Db, agents: impl FnOnce(&Stubs) -> String) -> Self {
        Self::with(db, Options::default(), agents).await
    }

    /// One edge.
    pub async fn with(db: Db, options: Options, agents: impl FnOnce(&Stubs) -> String) -> Self {
        let mut world = Self::without_edges(db, options, agents).await;
        world.add_edge().await;
        world
    }

    /// The store and the stubs; edges are up to the test.
    pub async fn without_edges(db: Db, options: Options, agents: impl FnOnce(&Stubs) -> String) -> Self {
        let postgres = match db {
            Db::Sqlite => None,
            Db::Postgres => Some(Postgres::start().await),
        };
        let stubs = Stubs {
            llm: Llm::start().await,
            tools: ToolStub::start().await,
            mcp: McpStub::start().await,
        };
        let agents = agents(&stubs);
        let dir = tempfile::tempdir().unwrap();
        Self {
            edges: Vec::new(),
            stubs,
            postgres,
            options,
            agents,
            dir,
        }
    }

    /// One edge that reaches its PostgreSQL through a relay. Edges that are added after `options.store_url` was taken away reach it
    /// by themselves.
    pub async fn behind_relay(options: Options, agents: impl FnOnce(&Stubs) -> String) -> (Self, Relay) {
        Self::behind(options, agents, async |own| {
            let relay = Relay::start(&own).await;
            (relay.addr.clone(), relay)
        })
        .await
    }

    /// One edge that reaches its PostgreSQL through a proxy that loses answers.
    pub async fn behind_proxy(options: Options, agents: impl FnOnce(&Stubs) -> String) -> (Self, DbProxy) {
        Self::behind(options, agents, async |own| {
            let proxy = DbProxy::start(&own).await;
            (proxy.addr.clone(), proxy)
        })
        .await
    }

    /// One edge that reaches its PostgreSQL through what `between` starts in front of an address, and gives with its own.
    async fn behind<T>(
        mut options: Options,
        agents: impl FnOnce(&Stubs) -> String,
        between: impl AsyncFnOnce(String) -> (String, T),
    ) -> (Self, T) {
        let server = postgres::Options {
            tcp: true,
            ..postgres::Options::default()
        };
        let postgres = Postgres::with(server).await;
        let own = format!("127.0.0.1:{}", postgres.port().unwrap());
        let (addr, between) = between(own.clone()).await;
        options.store_url = Some(postgres.url().replace(&own, &addr));
        let mut world = Self::without_edges(Db::Sqlite, options, agents).await;
        world.postgres = Some(postgres);
        world.add_edge().await;
        (world, between)
    }

    /// The store's URL as the configuration has it.
    pub fn store_url(&self) -> String {
        match (&self.options.store_url, &self.postgres) {
            (Some(url), _) => url.clone(),
            (None, Some(postgres)) => postgres.url(),
            (None, None) => format!("sqlite://{}", self.sqlite_file().display()),
        }
    }

    /// The SQLite file.
    pub fn sqlite_file(&self) -> std::path::PathBuf {
        self.dir.path().join("iop.db")
    }

    /// What an edge is started with.
    pub fn toml(&self) -> String {
        let every = ["inference", "operator", "admin", "metrics"];
        let keys = [
            key("root", ROOT, &every, ""),
            key("boss", BOSS, &["operator"], ""),
            key("owner", OWNER, &["inference"], ""),
            key("other", OTHER, &["inference"], ""),
        ];
        let provider = Provider::openai("p", &self.stubs.llm.url(), &[MODEL]).capacity(64);
        let mut setup = Setup::of(provider)
            .keys(&keys, ROOT)
            .edge("store", &format!("url = {:?}", self.store_url()))
            .edge("runs", &format!("workers = {}", self.options.workers))
            .edge(
                "runs",
                &format!("lease_ttl = \"{}ms\"", self.options.lease_ttl.as_millis()),
            )
            .edge(
                "runs",
                &format!("poll_interval = \"{}ms\"", self.options.poll_interval.as_millis()),
            );
        for (section, line) in &self.options.lines {
            setup = setup.edge(section, line);
        }
        format!("{}\n{}", setup.edge_toml(false), self.agents)
    }

    /// Starts one more edge on the same store.
    pub async fn add_edge(&mut self) {
        let dir = self.dir.path().join(format!("edge-{}", self.edges.len()));
        std::fs::create_dir_all(&dir).unwrap();
        let edge = self.launch(&dir).await;
        self.edges.push(edge);
    }

    async fn launch(&self, dir: &Path) -> Edge {
        Edge::start(dir, &self.toml(), &self.options.env, Some(ROOT.to_owned())).await
    }

    /// `kill -9` of edge `n`, and waits until it is gone.
    pub async fn kill(&mut self, n: usize) {
        self.edges[n].process.kill().await;
    }

    /// Starts edge `n` again on the same store, with the configuration as it is.
    pub async fn restart(&mut self, n: usize) {
        let dir = self.dir.path().join(format!("edge-{n}"));
        self.edges[n] = self.launch(&dir).await;
    }

    /// Both.
    pub async fn kill_and_restart(&mut self, n: usize) {
        self.kill(n).await;
        self.restart(n).await;
    }

    /// A client of edge `n` with every role.
    pub fn api_of(&self, n: usize) -> Api {
        Api {
            client: self.edges[n].client(),
        }
    }

    /// A client of the first edge with every role.
    pub fn api(&self) -> Api {
        self.api_of(0)
    }
}
