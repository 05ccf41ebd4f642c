//! What the edge runs with: validated values, secrets resolved, TLS material loaded.
//!
//! Nothing here is read from a file; `load` makes it. Consumers may take for granted what `validate` promises.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use iop_node::ProviderSettings;
use iop_shared::config::{SecretString, TelemetryConfig};
use iop_shared::label_enum;

use crate::agents::prices::Prices;
use crate::agents::spec::AgentSpec;
use crate::pool::Model;

/// Everything a running edge was told.
pub struct Settings {
    /// Whether this is the demonstration: its tool is served below `/demo/`. Then there are no keys.
    pub demo: bool,
    pub server: ServerSettings,
    /// `None`: no node can dial in.
    pub link: Option<LinkSettings>,
    /// Empty: loopback only, every role granted.
    pub keys: Vec<KeySettings>,
    pub gate: GateSettings,
    pub ejection: EjectionSettings,
    pub queue: QueueSettings,
    /// The embedded node's providers; empty: no embedded node.
    pub providers: Vec<ProviderSettings>,
    /// Empty: every live target is served under its own name.
    pub models: Vec<Model>,
    pub runs: RunsSettings,
    pub store: StoreUrl,
    /// Whether the file says anything of runs: a store, their settings or an agent.
    pub hosts_runs: bool,
    /// The declarations of the file, by name; checked, their secrets there.
    pub agents: BTreeMap<String, AgentSpec>,
    pub prices: Prices,
    pub telemetry: TelemetryConfig,
    /// Sentences for the operator about what was accepted but does nothing (yet); logged at start, shown by `check`.
    pub notes: Vec<String>,
}

/// `[server]`.
pub struct ServerSettings {
    pub listen: SocketAddr,
    /// `/metrics` moved to its own listener.
    pub metrics_listen: Option<SocketAddr>,
    /// Bytes of one request body.
    pub body_limit: usize,
    /// Bytes of all request bodies held at once.
    pub body_memory: usize,
    pub drain_timeout: Duration,
    pub tls: Option<Arc<rustls::ServerConfig>>,
}

/// `[link]`.
pub struct LinkSettings {
    pub listen: SocketAddr,
    /// Never empty.
    pub tokens: Vec<SecretString>,
    /// Asks for client certificates where `client_ca` was given.
    pub tls: Option<Arc<rustls::ServerConfig>>,
}

/// One key of `[auth]`; the secret itself is gone by now.
pub struct KeySettings {
    pub name: Arc<str>,
    pub digest: Digest,
    pub roles: Roles,
    pub models: ModelFilter,
    /// Requests at once; `None`: no limit.
    pub concurrency: Option<u32>,
    pub priority: Priority,
}

/// SHA-256 of a secret.
pub type Digest = [u8; 32];

label_enum! {
    /// What a key may do (G70); no role contains another.
    pub enum Role {
        Inference => "inference",
        Operator => "operator",
        Admin => "admin",
        Metrics => "metrics",
    }
}

/// A set of roles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Roles(u8);

impl Roles {
    pub const ALL: Roles = Roles(0b1111);

    pub fn of(roles: &[Role]) -> Self {
        Self(roles.iter().fold(0, |set, role| set | 1 << *role as u8))
    }

    pub const fn contains(self, role: Role) -> bool {
        self.0 & (1 << role as u8) != 0
    }
}

label_enum! {
    /// Whose requests leave the queue first (G33).
    pub enum Priority { Low => "low", Normal => "normal", High => "high" }
}

/// Which model names a key may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelFilter {
    All,
    Only(Vec<ModelPattern>),
}

/// One entry of an allow-list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelPattern {
    Exact(String),
    /// Written with a `*` at its end.
    Prefix(String),
}

impl ModelFilter {
    pub fn allows(&self, model: &str) -> bool {
        match self {
            ModelFilter::All => true,
            ModelFilter::Only(patterns) => patterns.iter().any(|p| match p {
                ModelPattern::Exact(name) => name == model,
                ModelPattern::Prefix(prefix) => model.starts_with(prefix.as_str()),
            }),
        }
    }
}

/// `[gate]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GateSettings {
    /// Dispatches of one request, the first included; at least 1.
    pub max_attempts: u32,
    /// Since admission, queue time not counted.
    pub max_elapsed: Duration,
    /// Bytes held before commit.
    pub hold_bytes: usize,
    /// `None`: a stream is never opened before its first content.
    pub keepalive_open_after: Option<Duration>,
    /// `None`: no keep-alive comments.
    pub keepalive_interval: Option<Duration>,
    pub on_node_lost: OnNodeLost,
    /// How long a client may take nothing before its request ends.
    pub client_write_timeout: Duration,
    /// Bytes of the largest request that can be replayed.
    pub snapshot_bytes: usize,
}

label_enum! {
    /// What an uncommitted, side-effect-safe request does when its node is gone (G57).
    pub enum OnNodeLost { Replay => "replay", Fail => "fail" }
}

/// `[ejection]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EjectionSettings {
    /// Failures in a row that eject.
    pub consecutive: u32,
    /// The first ejection; doubles up to `max`.
    pub base: Duration,
    pub max: Duration,
}

/// `[queue]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueSettings {
    /// Waiting requests per model; 0: nobody waits.
    pub max_depth: usize,
    pub max_wait: Duration,
}

/// `[runs]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunsSettings {
    pub workers: usize,
    pub lease_ttl: Duration,
    pub poll_interval: Duration,
    /// Bytes of one run's state.
    pub max_state: u64,
    /// Bytes of one answer of a model or a tool.
    pub max_result: u64,
    /// How long an unsafe call in flight may still answer after a cancellation.
    pub cancel_grace: Duration,
}

/// `[store] url`. No `Debug`: it may hold a password.
#[derive(Clone, PartialEq, Eq)]
pub enum StoreUrl {
    Sqlite(String),
    Postgres(String),
    /// Gone with the process; for development.
    Memory,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_a_set() {
        let some = Roles::of(&[Role::Inference, Role::Metrics]);
        assert!(some.contains(Role::Metrics) && !some.contains(Role::Admin));
        assert!(Role::ALL.iter().all(|r| Roles::ALL.contains(*r)));
        assert_eq!(Roles::of(Role::ALL), Roles::ALL);
    }

    #[test]
    fn an_allow_list_knows_names_and_prefixes() {
        let only = ModelFilter::Only(vec![
            ModelPattern::Exact("a".into()),
            ModelPattern::Prefix("qwen/".into()),
        ]);
        for (name, allowed) in [
            ("a", true),
            ("ab", false),
            ("qwen/3", true),
            ("qwen", false),
            ("", false),
        ] {
            assert_eq!(only.allows(name), allowed, "{name}");
        }
        assert!(ModelFilter::All.allows("anything"));
    }
}
