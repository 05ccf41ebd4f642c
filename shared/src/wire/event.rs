//! The normalized path: one run request and its event lines (link.md, Run; 004 `RunRequest`, `RunEvent`).

use serde::{Deserialize, Serialize};

use crate::execution::event::{Disposition, RuntimeEventKind, classify_runtime_event};
use crate::ids::ProviderId;
use crate::openai::usage::Usage;

/// Body of `POST /link/v1/runs`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunRequest {
    pub run_id: String,
    pub attempt_id: String,
    pub provider: ProviderId,
    pub target: String,
    /// Milliseconds; 0 is 004's default.
    #[serde(default)]
    pub response_stall_timeout_ms: i64,
    /// Opaque correlation value (004 `session_id`); selects nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    pub messages: Vec<Message>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    pub role: String,
    pub content: String,
}

/// One JSON line of a run's response.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunEvent {
    #[serde(rename = "type")]
    pub kind: RuntimeEventKind,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub delta: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// 004's legacy string.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
}

impl RunEvent {
    pub fn new(kind: RuntimeEventKind) -> Self {
        Self {
            kind,
            delta: String::new(),
            message: String::new(),
            usage: None,
            error: String::new(),
        }
    }

    /// What this event does to the watchdog.
    pub fn disposition(&self) -> Disposition {
        let has_content = !self.delta.is_empty() || !self.message.is_empty();
        classify_runtime_event(self.kind, has_content, self.usage.is_some())
    }
}
