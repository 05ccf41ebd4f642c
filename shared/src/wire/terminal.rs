//! The one terminal of an attempt, as HTTP trailers (link.md, Tunnel and Errors).
//!
//! Everything a node can say at the end is here; a stream that ends without it ended in no terminal at all.

use http::header::{HeaderMap, HeaderValue};
use serde::{Deserialize, Serialize};

use super::headers;
use crate::execution::FailureCode;
use crate::execution::health::{AttemptFence, LivenessClassification, ProviderHealth};
use crate::openai::usage::Usage;

/// How an attempt ended on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Terminal {
    Complete { usage: Option<Usage> },
    Error(NodeError),
    Cancelled,
}

/// A typed failure with 004's legacy string; `failure` only for `response_stalled`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeError {
    pub code: FailureCode,
    /// For people; no payload, no credential.
    pub message: String,
    pub failure: Option<Box<StallFailure>>,
}

impl NodeError {
    pub fn new(code: FailureCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            failure: None,
        }
    }
}

/// 004's allow-listed metadata of a stall: these keys and no others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StallFailure {
    pub failure_code: FailureCode,
    pub provider_health: ProviderHealth,
    pub liveness_classification: LivenessClassification,
    pub idle_duration_ms: u64,
    pub run_id: String,
    pub attempt_id: String,
    pub attempt_fence: AttemptFence,
    pub adapter: String,
    pub target: String,
    /// Absent on unbound execution paths (004).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health_observation_seq: Option<u64>,
}

const COMPLETE: &str = "complete";
const ERROR: &str = "error";
const CANCELLED: &str = "cancelled";

impl Terminal {
    pub fn error(code: FailureCode, message: impl Into<String>) -> Self {
        Terminal::Error(NodeError::new(code, message))
    }

    /// The trailers of this terminal.
    pub fn to_trailers(&self) -> HeaderMap {
        let mut map = HeaderMap::with_capacity(2);
        match self {
            Terminal::Complete { usage } => {
                map.insert(headers::TERMINAL, HeaderValue::from_static(COMPLETE));
                if let Some(json) = usage.as_ref().and_then(|u| serde_json::to_string(u).ok()) {
                    map.insert(headers::USAGE, headers::encode(&json));
                }
            }
            Terminal::Cancelled => {
                map.insert(headers::TERMINAL, HeaderValue::from_static(CANCELLED));
            }
            Terminal::Error(e) => {
                map.insert(headers::TERMINAL, HeaderValue::from_static(ERROR));
                map.insert(headers::ERROR_CODE, HeaderValue::from_static(e.code.as_str()));
                map.insert(headers::ERROR, headers::encode(&e.message));
                if let Some(json) = e.failure.as_ref().and_then(|f| serde_json::to_string(f).ok()) {
                    map.insert(headers::FAILURE, headers::encode(&json));
                }
            }
        }
        map
    }

    /// Reads trailers; `None` when they hold no terminal that this version knows.
    /// A malformed `iop-failure` is dropped, the error stays: evidence may be absent, a terminal may not.
    pub fn from_trailers(map: &HeaderMap) -> Option<Self> {
        let text = |name| map.get(name).and_then(headers::decode);
        match map.get(headers::TERMINAL)?.to_str().ok()? {
            COMPLETE => Some(Terminal::Complete {
                usage: text(headers::USAGE).and_then(|t| serde_json::from_str(&t).ok()),
            }),
            CANCELLED => Some(Terminal::Cancelled),
            ERROR => Some(Terminal::Error(NodeError {
                code: text(headers::ERROR_CODE)
                    .and_then(|c| FailureCode::parse(&c))
                    .unwrap_or(FailureCode::Internal),
                message: text(headers::ERROR).map(|t| t.into_owned()).unwrap_or_default(),
                failure: text(headers::FAILURE)
                    .and_then(|t| serde_json::from_str(&t).ok())
                    .map(Box::new),
            })),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_round_trip() {
        let failure = StallFailure {
            failure_code: FailureCode::ResponseStalled,
            provider_health: ProviderHealth::Unavailable,
            liveness_classification: LivenessClassification::ProviderUnhealthy,
            idle_duration_ms: 300_001,
            run_id: "r".into(),
            attempt_id: "a".into(),
            attempt_fence: AttemptFence::Confirmed,
            adapter: "vllm".into(),
            target: "modèle".into(),
            health_observation_seq: Some(1),
        };
        for t in [
            Terminal::Complete { usage: None },
            Terminal::Complete {
                usage: Some(Usage {
                    input: 1,
                    output: 2,
                    cached: 3,
                    reasoning: 4,
                }),
            },
            Terminal::Cancelled,
            Terminal::error(FailureCode::ConnectFailed, "refused\r\nx: y"),
            Terminal::Error(NodeError {
                code: FailureCode::ResponseStalled,
                message: "stalled".into(),
                failure: Some(Box::new(failure)),
            }),
        ] {
            assert_eq!(Terminal::from_trailers(&t.to_trailers()), Some(t));
        }
    }

    #[test]
    fn no_terminal_is_not_a_terminal_and_bad_evidence_is_dropped() {
        assert_eq!(Terminal::from_trailers(&HeaderMap::new()), None);
        let mut map = Terminal::error(FailureCode::ResponseStalled, "x").to_trailers();
        map.insert(headers::FAILURE, headers::encode(r#"{"recovery_eligible":true}"#));
        assert_eq!(
            Terminal::from_trailers(&map),
            Some(Terminal::error(FailureCode::ResponseStalled, "x"))
        );
        map.insert(headers::TERMINAL, HeaderValue::from_static("maybe"));
        assert_eq!(Terminal::from_trailers(&map), None);
    }
}
