//! `[[providers]]`: the same table in `edge.toml` (embedded node) and `node.toml` (design §4).

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::{self, Deserializer};

use super::{Period, SecretRef, Source};
use crate::config::ConfigError;
use crate::execution::Endpoint;
use crate::ids::ProviderId;
use crate::label_enum;

label_enum! {
    /// Which wire a provider speaks.
    pub enum Adapter {
        /// OpenAI's API below `base_url`: vLLM, SGLang, llama.cpp, cloud accounts.
        Openai => "openai",
        /// Ollama; its OpenAI-compatible API below `base_url` + `/v1`.
        Ollama => "ollama",
        /// No model at all: answers by script (design §4).
        Scripted => "scripted",
    }
}

impl Adapter {
    /// Served when `endpoints` is absent.
    pub const fn default_endpoints(self) -> &'static [Endpoint] {
        match self {
            Adapter::Openai => &[
                Endpoint::Chat,
                Endpoint::Responses,
                Endpoint::Completions,
                Endpoint::Embeddings,
                Endpoint::Rerank,
                Endpoint::Moderations,
                Endpoint::Images,
                Endpoint::Audio,
            ],
            Adapter::Ollama => &[
                Endpoint::Chat,
                Endpoint::Responses,
                Endpoint::Completions,
                Endpoint::Embeddings,
            ],
            Adapter::Scripted => &[Endpoint::Chat, Endpoint::Responses],
        }
    }
}

/// The models a provider serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Targets {
    /// Asked from the provider (`GET /v1/models`) and refreshed.
    Auto,
    List(Vec<String>),
}

impl<'de> Deserialize<'de> for Targets {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected \"auto\" or a list of target names")]
        enum Raw {
            Word(String),
            List(Vec<String>),
        }
        match Raw::deserialize(d)? {
            Raw::Word(w) if w == "auto" => Ok(Targets::Auto),
            Raw::Word(w) => Err(de::Error::custom(format!(
                "expected \"auto\" or a list of target names, not {w:?}"
            ))),
            Raw::List(list) => Ok(Targets::List(list)),
        }
    }
}

/// One provider, as written.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProviderConfig {
    pub id: ProviderId,
    pub adapter: Adapter,
    /// Required but for `scripted`.
    pub base_url: Option<String>,
    pub api_key: Option<SecretRef>,
    /// `None`: `auto`, or the script's targets.
    pub targets: Option<Targets>,
    /// `None`: the adapter's default.
    pub endpoints: Option<Vec<Endpoint>>,
    /// Requests at once; a hard bound enforced by the node (G32).
    #[serde(default = "default_capacity")]
    pub capacity: u32,
    /// `None` or zero: 004's default of 300 s.
    pub response_stall_timeout: Option<Period>,
    /// `None`: no limit (G54).
    pub first_content_timeout: Option<Period>,
    #[serde(default = "default_connect_timeout")]
    pub connect_timeout: Period,
    /// Whether a request that failed here may be replayed elsewhere.
    #[serde(default = "yes")]
    pub replay: bool,
    /// Sent with every request to the provider; they win over the client's.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// `scripted` only: behaviour per target.
    pub script: Option<BTreeMap<String, Script>>,
}

const fn default_capacity() -> u32 {
    32
}

const fn default_connect_timeout() -> Period {
    Period::secs(5)
}

const fn yes() -> bool {
    true
}

impl ProviderConfig {
    /// What the types cannot say; `key` is this provider's place, such as `providers[0]`.
    ///
    /// # Errors
    /// The first rule broken, at its key.
    pub fn validate(&self, source: &Source, key: &str) -> Result<(), ConfigError> {
        let fail = |field: &str, message: String| Err(source.error(&format!("{key}.{field}"), message));
        if self.capacity == 0 {
            return fail("capacity", "must be at least 1".into());
        }
        if self.endpoints.as_ref().is_some_and(Vec::is_empty) {
            return fail("endpoints", "must name at least one endpoint".into());
        }
        if self.connect_timeout.0.is_zero() {
            return fail("connect_timeout", "must be longer than zero".into());
        }
        if let Some(Targets::List(list)) = &self.targets {
            if list.is_empty() {
                return fail("targets", "must name at least one target".into());
            }
            if let Some(i) = list.iter().position(|t| t.is_empty() || t.len() > 512) {
                return fail(&format!("targets[{i}]"), "must be 1 to 512 bytes long".into());
            }
            if let Some(i) = (1..list.len()).find(|i| list[..*i].contains(&list[*i])) {
                return fail(
                    &format!("targets[{i}]"),
                    format!("target {:?} is named twice", list[i]),
                );
            }
        }
        for name in self.headers.keys() {
            let parsed = http::HeaderName::try_from(name.as_str());
            let framing = |h: &http::HeaderName| {
                matches!(
                    *h,
                    http::header::CONTENT_LENGTH
                        | http::header::HOST
                        | http::header::TRANSFER_ENCODING
                        | http::header::CONNECTION
                )
            };
            if parsed.as_ref().map_or(true, framing)
                || http::HeaderValue::try_from(&self.headers[name]).is_err()
            {
                return fail(&format!("headers.{name}"), "is no header that may be set".into());
            }
        }
        for (target, script) in self.script.iter().flatten() {
            if script.normalized && !script.tool_calls.is_empty() {
                return fail(
                    &format!("script.{target}.tool_calls"),
                    "cannot be said by the normalized path, which carries text; leave out `normalized` or the calls"
                        .into(),
                );
            }
        }
        match self.adapter {
            Adapter::Openai | Adapter::Ollama => {
                if self.script.is_some() {
                    return fail(
                        "script",
                        format!("is for adapter = \"scripted\" only, not {}", self.adapter),
                    );
                }
                let Some(url) = &self.base_url else {
                    return fail(
                        "base_url",
                        format!("is required for adapter = \"{}\"", self.adapter),
                    );
                };
                match url.parse::<http::Uri>() {
                    Ok(u)
                        if matches!(u.scheme_str(), Some("http" | "https"))
                            && u.host().is_some()
                            && u.query().is_none() => {}
                    _ => {
                        return fail(
                            "base_url",
                            "must be an http:// or https:// URL without a query".into(),
                        );
                    }
                }
            }
            Adapter::Scripted => {
                if self.base_url.is_some() {
                    return fail("base_url", "has no meaning for adapter = \"scripted\"".into());
                }
                if self.targets == Some(Targets::Auto) {
                    return fail(
                        "targets",
                        "a scripted provider serves the targets of its script; name them or leave this out"
                            .into(),
                    );
                }
                if self.script.is_none() && self.targets.is_none() {
                    return fail(
                        "script",
                        "is required for adapter = \"scripted\" (or name targets)".into(),
                    );
                }
            }
        }
        Ok(())
    }

    /// The endpoints this provider serves.
    pub fn served_endpoints(&self) -> Vec<Endpoint> {
        self.endpoints
            .clone()
            .unwrap_or_else(|| self.adapter.default_endpoints().to_vec())
    }
}

/// How a scripted target behaves; every key optional (gateway.md §13).
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Script {
    /// Text of the answer; `{tool_result}` in it is what the tool said that was called before.
    pub reply: String,
    /// Content chunks of a stream.
    pub chunks: u32,
    pub chunk_delay: Period,
    /// Before the head.
    pub first_delay: Period,
    pub tool_calls: Vec<ToolCallScript>,
    pub stall: Option<StallPoint>,
    pub cut: Option<CutPoint>,
    /// Answer with this status instead.
    pub status: Option<u16>,
    /// Sent as `Retry-After` with `status`.
    pub retry_after: Option<Period>,
    /// Misbehave on the first n attempts only; `None`: on every attempt.
    pub fail_first: Option<u32>,
    /// Keeps working after its caller left, so that the fence stays unconfirmed.
    pub ignores_cancel: bool,
    /// Serve by the normalized path.
    pub normalized: bool,
    pub probe: ProbeScript,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            reply: String::from("Hello! I am a scripted model: no GPU was needed for this answer."),
            chunks: 12,
            chunk_delay: Period::secs(0),
            first_delay: Period::secs(0),
            tool_calls: Vec::new(),
            stall: None,
            cut: None,
            status: None,
            retry_after: None,
            fail_first: None,
            ignores_cancel: false,
            normalized: false,
            probe: ProbeScript::Available,
        }
    }
}

/// One call that a scripted model makes.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolCallScript {
    pub name: String,
    /// JSON text.
    #[serde(default = "empty_object")]
    pub arguments: String,
}

fn empty_object() -> String {
    String::from("{}")
}

/// Where a scripted answer goes silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StallPoint {
    BeforeHeaders,
    AfterHeaders,
    AfterPreamble,
    AfterChunks(u32),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AfterChunks {
    after_chunks: u32,
}

impl<'de> Deserialize<'de> for StallPoint {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        const WORDS: &str =
            "expected \"before_headers\", \"after_headers\", \"after_preamble\" or { after_chunks = N }";
        #[derive(Deserialize)]
        #[serde(
            untagged,
            expecting = "expected \"before_headers\", \"after_headers\", \"after_preamble\" or { after_chunks = N }"
        )]
        enum Raw {
            Word(String),
            Chunks(AfterChunks),
        }
        match Raw::deserialize(d)? {
            Raw::Chunks(c) => Ok(StallPoint::AfterChunks(c.after_chunks)),
            Raw::Word(w) => match w.as_str() {
                "before_headers" => Ok(StallPoint::BeforeHeaders),
                "after_headers" => Ok(StallPoint::AfterHeaders),
                "after_preamble" => Ok(StallPoint::AfterPreamble),
                _ => Err(de::Error::custom(WORDS)),
            },
        }
    }
}

/// After how many content chunks a scripted answer breaks off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CutPoint {
    pub after_chunks: u32,
}

label_enum! {
    /// What a scripted target says to a probe.
    pub enum ProbeScript {
        Available => "available",
        Missing => "missing",
        Refuse => "refuse",
        Hang => "hang",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct File {
        providers: Vec<ProviderConfig>,
    }

    fn parse(text: &str) -> Result<(Vec<ProviderConfig>, Source), ConfigError> {
        Source::parse::<File>("f.toml", text).map(|(f, s)| (f.providers, s))
    }

    #[test]
    fn every_script_key_of_the_contract_is_read() {
        let (p, s) = parse(
            r#"
[[providers]]
id = "s"
adapter = "scripted"
script = { "t" = { reply = "hi", chunks = 20, chunk_delay = "50ms", first_delay = "0s", tool_calls = [{ name = "f", arguments = "{}" }], stall = { after_chunks = 3 }, cut = { after_chunks = 3 }, status = 503, retry_after = "2s", fail_first = 1, ignores_cancel = true, probe = "hang" }, "u" = { stall = "after_preamble", normalized = true }, "v" = {} }
"#,
        )
        .unwrap();
        p[0].validate(&s, "providers[0]").unwrap();
        let script = p[0].script.as_ref().unwrap();
        assert_eq!(script["t"].stall, Some(StallPoint::AfterChunks(3)));
        assert_eq!(script["u"].stall, Some(StallPoint::AfterPreamble));
        assert!(script["u"].normalized && !script["v"].normalized);
        assert_eq!(script["v"].probe, ProbeScript::Available);
    }

    #[test]
    fn rules_between_keys_are_checked_at_their_key() {
        for (body, key) in [
            ("adapter = \"openai\"", "providers[0].base_url"),
            (
                "adapter = \"openai\"\nbase_url = \"ftp://x\"",
                "providers[0].base_url",
            ),
            (
                "adapter = \"openai\"\nbase_url = \"http://x/v1\"\ncapacity = 0",
                "providers[0].capacity",
            ),
            (
                "adapter = \"openai\"\nbase_url = \"http://x/v1\"\ntargets = [\"a\", \"a\"]",
                "providers[0].targets[1]",
            ),
            (
                "adapter = \"openai\"\nbase_url = \"http://x/v1\"\nscript = {}",
                "providers[0].script",
            ),
            (
                "adapter = \"openai\"\nbase_url = \"http://x/v1\"\nheaders = { host = \"x\" }",
                "providers[0].headers.host",
            ),
            ("adapter = \"scripted\"", "providers[0].script"),
            (
                "adapter = \"scripted\"\nbase_url = \"http://x\"\nscript = {}",
                "providers[0].base_url",
            ),
            (
                "adapter = \"scripted\"\nscript = { t = { normalized = true, tool_calls = [{ name = \"f\" }] } }",
                "providers[0].script.t.tool_calls",
            ),
        ] {
            let (p, s) = parse(&format!("[[providers]]\nid = \"a\"\n{body}\n")).unwrap();
            assert_eq!(p[0].validate(&s, "providers[0]").unwrap_err().key, key, "{body}");
        }
    }
}
