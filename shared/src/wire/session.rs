//! Lines of the session stream (link.md): the node's advertisement, and its load between advertisements.

use serde::{Deserialize, Serialize};

use crate::execution::Endpoint;
use crate::ids::{NodeId, ProviderId};

/// One JSON line. An advertisement replaces the last one; a load line updates figures only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum SessionLine {
    Advertisement(Advertisement),
    Load(Load),
}

/// The whole state of a node as the edge may know it; never a credential (design decision 5).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advertisement {
    pub node_id: NodeId,
    /// The node's build version, for people.
    pub version: String,
    pub providers: Vec<ProviderAdvertisement>,
    pub draining: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProviderAdvertisement {
    pub id: ProviderId,
    /// Adapter kind: `openai`, `ollama`, `scripted`.
    pub adapter: String,
    /// What the provider serves now.
    pub targets: Vec<String>,
    pub endpoints: Vec<Endpoint>,
    /// Those of `targets` that are served by the normalized path (`RUNS_PATH`); the others by tunnels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub normalized_targets: Vec<String>,
    /// Requests at once, a hard bound enforced by the node.
    pub capacity: u32,
    /// 0 is 004's default.
    pub response_stall_timeout_ms: i64,
    /// `None`: no limit set by the provider.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_content_timeout_ms: Option<u64>,
    /// Whether a request that failed here may be replayed elsewhere.
    pub replay: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    pub load: Vec<ProviderLoad>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProviderLoad {
    pub id: ProviderId,
    pub in_flight: u32,
}

impl SessionLine {
    /// The line with its line feed.
    pub fn to_line(&self) -> String {
        // Plain strings and numbers always serialize.
        let mut line = serde_json::to_string(self).unwrap_or_default();
        line.push('\n');
        line
    }

    /// # Errors
    /// When the text is no line of this version.
    pub fn parse(line: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_round_trip_and_a_stranger_is_refused() {
        let ad = SessionLine::Advertisement(Advertisement {
            node_id: NodeId::new("gpu-1").unwrap(),
            version: "0.1.0".into(),
            providers: vec![ProviderAdvertisement {
                id: ProviderId::new("vllm").unwrap(),
                adapter: "openai".into(),
                targets: vec!["Qwen/Qwen3-8B".into()],
                endpoints: vec![Endpoint::Chat, Endpoint::Responses],
                normalized_targets: vec![],
                capacity: 32,
                response_stall_timeout_ms: 300_000,
                first_content_timeout_ms: None,
                replay: true,
            }],
            draining: false,
        });
        let load = SessionLine::Load(Load {
            load: vec![ProviderLoad {
                id: ProviderId::new("vllm").unwrap(),
                in_flight: 3,
            }],
        });
        for line in [ad, load] {
            let text = line.to_line();
            assert!(text.ends_with('\n') && text.matches('\n').count() == 1);
            assert_eq!(SessionLine::parse(text.trim_end().as_bytes()).unwrap(), line);
        }
        assert!(SessionLine::parse(b"{\"hello\":1}").is_err());
        assert!(
            SessionLine::parse(
                b"{\"node_id\":\"a b\",\"version\":\"1\",\"providers\":[],\"draining\":false}"
            )
            .is_err()
        );
    }
}
