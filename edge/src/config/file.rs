//! `edge.toml` as written: strict structures with the documented defaults (design §4). What a value may be beside its
//! type is said in `validate`.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use iop_shared::config::{ByteSize, Period, ProviderConfig, SecretRef, TelemetryConfig, TlsConfig};
use iop_shared::label_enum;
use serde::Deserialize;

use super::settings::{OnNodeLost, Priority, Role};
use crate::agents::spec::{AgentSpec, PriceSpec};

/// A key that is known but does nothing yet: any value is read, none is accepted.
type Later = Option<toml::Value>;

#[derive(Debug, Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct EdgeFile {
    pub demo: bool,
    pub server: ServerFile,
    pub link: Option<LinkFile>,
    pub store: Option<StoreFile>,
    pub auth: AuthFile,
    pub gate: GateFile,
    pub ejection: Option<EjectionFile>,
    pub queue: QueueFile,
    pub providers: Vec<ProviderConfig>,
    pub models: Vec<ModelFile>,
    pub runs: Option<RunsFile>,
    pub telemetry: TelemetryConfig,
    pub agents: BTreeMap<String, AgentSpec>,
    pub prices: BTreeMap<String, PriceSpec>,
    pub flows: Later,
    pub triggers: Later,
    pub nats: Later,
    pub webhooks: Later,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ServerFile {
    pub listen: SocketAddr,
    pub metrics_listen: Option<SocketAddr>,
    pub body_limit: ByteSize,
    pub body_memory: ByteSize,
    pub drain_timeout: Period,
    pub tls: Option<TlsConfig>,
}

impl Default for ServerFile {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            metrics_listen: None,
            body_limit: ByteSize::mib(64),
            body_memory: ByteSize::mib(1024),
            drain_timeout: Period::secs(120),
            tls: None,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LinkFile {
    #[serde(default = "link_listen")]
    pub listen: SocketAddr,
    #[serde(default)]
    pub tokens: Vec<SecretRef>,
    pub tls: Option<TlsConfig>,
}

fn link_listen() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 7070))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct StoreFile {
    pub url: String,
}

impl Default for StoreFile {
    fn default() -> Self {
        Self {
            url: String::from("sqlite://iop.db"),
        }
    }
}

impl std::fmt::Debug for StoreFile {
    // The URL may hold a password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreFile").finish_non_exhaustive()
    }
}

#[derive(Debug, Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct AuthFile {
    pub keys: Vec<KeyFile>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KeyFile {
    pub name: String,
    pub secret: Option<SecretRef>,
    pub secret_sha256: Option<String>,
    #[serde(default = "inference_only")]
    pub roles: Vec<Role>,
    #[serde(default = "every_model")]
    pub models: Vec<String>,
    pub concurrency: Option<u32>,
    pub priority: Option<Priority>,
    pub rpm: Later,
    pub tpm: Later,
    pub budget: Later,
}

fn inference_only() -> Vec<Role> {
    vec![Role::Inference]
}

fn every_model() -> Vec<String> {
    vec![String::from("*")]
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct GateFile {
    pub max_attempts: u32,
    pub max_elapsed: Period,
    pub hold_bytes: ByteSize,
    pub keepalive_open_after: Period,
    pub keepalive_interval: Period,
    pub on_node_lost: OnNodeLost,
    pub client_write_timeout: Period,
    pub snapshot_bytes: ByteSize,
}

impl Default for GateFile {
    fn default() -> Self {
        Self {
            max_attempts: 3,
            max_elapsed: Period::secs(600),
            hold_bytes: ByteSize::kib(256),
            keepalive_open_after: Period::secs(25),
            keepalive_interval: Period::secs(15),
            on_node_lost: OnNodeLost::Replay,
            client_write_timeout: Period::secs(30),
            snapshot_bytes: ByteSize::mib(64),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct EjectionFile {
    pub consecutive: u32,
    pub base: Period,
    pub max: Period,
}

impl Default for EjectionFile {
    fn default() -> Self {
        Self {
            consecutive: 5,
            base: Period::secs(2),
            max: Period::secs(20),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct QueueFile {
    pub max_depth: usize,
    pub max_wait: Period,
}

impl Default for QueueFile {
    fn default() -> Self {
        Self {
            max_depth: 256,
            max_wait: Period::secs(30),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelFile {
    pub name: String,
    #[serde(default)]
    pub candidates: Vec<CandidateFile>,
    pub liveness: Option<LivenessPreset>,
    pub response_stall_timeout: Option<Period>,
    pub first_content_timeout: Option<Period>,
    #[serde(default)]
    pub affinity: Affinity,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CandidateFile {
    pub provider: String,
    pub target: String,
    #[serde(default)]
    pub priority: u32,
    #[serde(default = "one")]
    pub weight: u32,
}

const fn one() -> u32 {
    1
}

label_enum! {
    /// Named pairs of liveness limits (G54).
    pub enum LivenessPreset { Default => "default", Interactive => "interactive", Batch => "batch" }
}

label_enum! {
    /// Whether requests with one beginning go to one provider (G30).
    #[derive(Default)]
    pub enum Affinity {
        #[default]
        None => "none",
        Prefix => "prefix",
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RunsFile {
    pub workers: usize,
    pub lease_ttl: Period,
    pub poll_interval: Period,
    pub max_state: ByteSize,
    pub max_result: ByteSize,
    pub cancel_grace: Period,
    pub dev: bool,
}

impl Default for RunsFile {
    fn default() -> Self {
        Self {
            workers: 16,
            lease_ttl: Period::secs(30),
            poll_interval: Period::secs(1),
            max_state: ByteSize::mib(64),
            max_result: ByteSize::mib(16),
            cancel_grace: Period::secs(10),
            dev: false,
        }
    }
}
