//! The normalized path: one run request and its event lines (link.md, Run; 004 `RunRequest`, `RunEvent`).

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::terminal::Terminal;
use crate::execution::Endpoint;
use crate::execution::event::{Disposition, RuntimeEventKind, classify_runtime_event};
use crate::ids::{AttemptId, ProviderId, RunId};
use crate::openai::usage::Usage;

/// Body of `POST /link/v1/runs`: JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunRequest {
    /// What the client asked; the answer has no form of it.
    pub endpoint: Endpoint,
    #[serde(serialize_with = "text", deserialize_with = "run_id")]
    pub run_id: RunId,
    #[serde(serialize_with = "text", deserialize_with = "attempt_id")]
    pub attempt_id: AttemptId,
    pub provider: ProviderId,
    /// The name the provider knows.
    pub target: String,
    /// Milliseconds; 0 is 004's default; validated by the node before any provider is called.
    #[serde(default)]
    pub response_stall_timeout_ms: i64,
    /// Opaque correlation value (004 `session_id`); selects nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    /// In the order of the conversation.
    pub messages: Vec<Message>,
}

/// One turn of a conversation, as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// `system`, `developer`, `user` or `assistant`.
    pub role: String,
    pub content: String,
}

/// A body that is no run request. It does not say why: the reader's own text may repeat a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the run's body is no run request")]
pub struct BadRunRequest;

impl RunRequest {
    /// # Errors
    /// No JSON object with these members and no others.
    pub fn parse(body: &[u8]) -> Result<Self, BadRunRequest> {
        serde_json::from_slice(body).map_err(|_| BadRunRequest)
    }

    pub fn to_json(&self) -> String {
        // Plain strings and numbers always serialize.
        serde_json::to_string(self).unwrap_or_default()
    }
}

fn text<T: std::fmt::Display, S: Serializer>(id: &T, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(id)
}

fn run_id<'de, D: Deserializer<'de>>(d: D) -> Result<RunId, D::Error> {
    RunId::parse(&String::deserialize(d)?).ok_or_else(|| serde::de::Error::custom("no run id"))
}

fn attempt_id<'de, D: Deserializer<'de>>(d: D) -> Result<AttemptId, D::Error> {
    AttemptId::parse(&String::deserialize(d)?).ok_or_else(|| serde::de::Error::custom("no attempt id"))
}

/// One JSON line of a run's response. The last one is the terminal, and the trailers agree with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunEvent {
    #[serde(rename = "type", deserialize_with = "known")]
    pub kind: RuntimeEventKind,
    /// Text that goes on from what was said so far.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub delta: String,
    /// Text said at once; none of it was said by deltas before.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// 004's legacy string.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
}

/// A line that is no event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the line is no run event")]
pub struct BadRunEvent;

/// A type that this version does not know says nothing (004: `none`).
fn known<'de, D: Deserializer<'de>>(d: D) -> Result<RuntimeEventKind, D::Error> {
    let word = String::deserialize(d)?;
    Ok(RuntimeEventKind::parse(&word).unwrap_or(RuntimeEventKind::Unknown))
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

    pub fn delta(text: impl Into<String>) -> Self {
        Self {
            delta: text.into(),
            ..Self::new(RuntimeEventKind::Delta)
        }
    }

    pub fn usage(usage: Usage) -> Self {
        Self {
            usage: Some(usage),
            ..Self::new(RuntimeEventKind::Usage)
        }
    }

    /// The last line of a run that ended so.
    pub fn terminal(terminal: &Terminal) -> Self {
        match terminal {
            Terminal::Complete { usage } => Self {
                usage: *usage,
                ..Self::new(RuntimeEventKind::Complete)
            },
            Terminal::Error(e) => Self {
                error: e.message.clone(),
                ..Self::new(RuntimeEventKind::Error)
            },
            Terminal::Cancelled => Self::new(RuntimeEventKind::Cancelled),
        }
    }

    /// Reads a line, with or without its line feed. Members that this version does not know are skipped.
    ///
    /// # Errors
    /// No JSON object with a `type`, or a known member of the wrong type.
    pub fn parse(line: &[u8]) -> Result<Self, BadRunEvent> {
        serde_json::from_slice(line).map_err(|_| BadRunEvent)
    }

    /// The line with its line feed.
    pub fn to_line(&self) -> String {
        // Plain strings and numbers always serialize; line feeds inside strings are escaped.
        let mut line = serde_json::to_string(self).unwrap_or_default();
        line.push('\n');
        line
    }

    /// What this event does to the watchdog.
    pub fn disposition(&self) -> Disposition {
        let has_content = !self.delta.is_empty() || !self.message.is_empty();
        classify_runtime_event(self.kind, has_content, self.usage.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::execution::FailureCode;

    fn request() -> RunRequest {
        RunRequest {
            endpoint: Endpoint::Responses,
            run_id: RunId(uuid::Uuid::from_u128(7)),
            attempt_id: AttemptId(uuid::Uuid::from_u128(8)),
            provider: ProviderId::new("s").unwrap(),
            target: "Qwen/Qwen3 8B".into(),
            response_stall_timeout_ms: 45_000,
            session_id: None,
            messages: vec![Message {
                role: "user".into(),
                content: "a \"b\"\n\u{1F30D}".into(),
            }],
        }
    }

    #[test]
    fn a_request_round_trips_and_foreign_members_are_refused() {
        let text = request().to_json();
        assert_eq!(RunRequest::parse(text.as_bytes()), Ok(request()));
        let mut json: serde_json::Value = text.parse().unwrap();
        json.as_object_mut().unwrap().remove("response_stall_timeout_ms");
        let read = RunRequest::parse(json.to_string().as_bytes()).unwrap();
        assert_eq!(read.response_stall_timeout_ms, 0);
        for (key, value) in [
            ("temperature", serde_json::json!(1)),
            ("run_id", serde_json::json!("r")),
            ("attempt_id", serde_json::json!(1)),
            ("provider", serde_json::json!("a/b")),
            ("endpoint", serde_json::json!("shell")),
            ("messages", serde_json::json!([{"role": "user"}])),
        ] {
            let mut bad = json.clone();
            bad[key] = value;
            assert_eq!(
                RunRequest::parse(bad.to_string().as_bytes()),
                Err(BadRunRequest),
                "{key}"
            );
        }
        for bad in ["", "[]", "{}", "null"] {
            assert_eq!(RunRequest::parse(bad.as_bytes()), Err(BadRunRequest), "{bad}");
        }
    }

    #[test]
    fn events_are_single_lines_that_round_trip() {
        let usage = Usage {
            input: 1,
            output: 2,
            cached: 3,
            reasoning: 4,
        };
        for (event, want) in [
            (RunEvent::new(RuntimeEventKind::Start), Disposition::Start),
            (RunEvent::delta("a\r\n\u{2028}b"), Disposition::Progress),
            (RunEvent::delta(""), Disposition::None),
            (RunEvent::usage(usage), Disposition::Progress),
            (
                RunEvent::terminal(&Terminal::Complete { usage: Some(usage) }),
                Disposition::Terminal,
            ),
            (
                RunEvent::terminal(&Terminal::error(FailureCode::ProviderCut, "cut")),
                Disposition::Terminal,
            ),
            (RunEvent::terminal(&Terminal::Cancelled), Disposition::Terminal),
        ] {
            let line = event.to_line();
            assert!(line.ends_with('\n') && line.matches('\n').count() == 1, "{line}");
            assert_eq!(RunEvent::parse(line.as_bytes()), Ok(event.clone()));
            assert_eq!(event.disposition(), want, "{line}");
        }
    }

    #[test]
    fn strange_types_and_members_say_nothing_and_what_is_no_event_is_refused() {
        let strange = RunEvent::parse(br#"{"type":"thought","delta":"x","score":[1]}"#).unwrap();
        assert_eq!(
            (strange.kind, strange.disposition()),
            (RuntimeEventKind::Unknown, Disposition::None)
        );
        for bad in [
            "",
            "{}",
            "[]",
            "{\"type\":1}",
            "{\"type\":\"delta\",\"delta\":1}",
            "{\"type\":\"delta\"",
        ] {
            assert_eq!(RunEvent::parse(bad.as_bytes()), Err(BadRunEvent), "{bad}");
        }
    }
}
