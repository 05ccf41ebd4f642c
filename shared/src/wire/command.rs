//! Provider commands: a closed allow-list, checked before any provider is looked up (004, G46).

use serde::{Deserialize, Serialize};

use super::COMMAND_PREFIX;
use crate::execution::ProviderHealth;
use crate::ids::ProviderId;
use crate::label_enum;

label_enum! {
    /// The three commands of 004.
    pub enum Command {
        Capabilities => "capabilities",
        TransportStatus => "transport_status",
        OllamaApi => "ollama_api",
    }
}

impl Command {
    /// The command of a request path on the link; `None` refuses everything that is not on the list.
    pub fn of_path(path: &str) -> Option<Self> {
        path.strip_prefix(COMMAND_PREFIX).and_then(Self::parse)
    }
}

/// Body of every command request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommandRequest {
    pub provider: ProviderId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// `ollama_api` only: a path of Ollama's read-only API, such as `/api/tags`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

/// 004: the stable evidence of a `capabilities` answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapabilitiesResult {
    pub adapter_key: String,
    pub target: String,
    pub provider_status: ProviderHealth,
    pub health_observation_seq: u64,
}

/// Answer of `transport_status`: what the node sees of its own provider connection, without a probe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportStatusResult {
    pub adapter_key: String,
    pub in_flight: u32,
    pub capacity: u32,
    pub draining: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_three_are_allowed() {
        for c in Command::ALL {
            assert_eq!(Command::of_path(&format!("{COMMAND_PREFIX}{c}")), Some(*c));
        }
        for p in [
            "/link/v1/commands/",
            "/link/v1/commands/shell",
            "/link/v1/commands/capabilities/x",
            "/capabilities",
        ] {
            assert_eq!(Command::of_path(p), None, "{p}");
        }
    }
}
