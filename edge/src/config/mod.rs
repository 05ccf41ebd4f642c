//! `edge.toml`: strict parsing, validation, and the runtime settings made of it (design §4).

mod settings;

pub use settings::{
    Digest, EjectionSettings, GateSettings, KeySettings, LinkSettings, ModelFilter, ModelPattern, OnNodeLost,
    Priority, ProviderSettings, QueueSettings, Role, Roles, RunsSettings, ServerSettings, Settings, StoreUrl,
};
