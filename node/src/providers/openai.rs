//! Providers that speak OpenAI's API over HTTP: `openai` and `ollama` (its compatible API below `/v1`).
//!
//! Bytes pass in both directions; only heads are shaped. The provider's own credential is added here and nowhere else.

use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use iop_shared::config::{Adapter, SecretString};
use iop_shared::execution::{Endpoint, FailureCode};
use iop_shared::ids::ProviderId;
use iop_shared::label::Label;
use iop_shared::wire::terminal::NodeError;
use secrecy::ExposeSecret;
use serde::Deserialize;

use super::client::{Client, ClientError, ClientErrorKind, SendBody, Target};
use super::hold::Hold;
use super::{ProviderBody, ProviderSettings, TunnelAsk};
use crate::probe::{Identity, ProbeError, ProbeReport, ProviderProber, Status};
use crate::run::encoding::Plan;
use crate::run::head;
use crate::run::source::HttpSource;

/// A list of models or an answer of Ollama's own API is no larger, and no slower, than this.
const ASIDE_BYTES: usize = 2 << 20;
const ASIDE_BOUND: Duration = Duration::from_secs(5);
/// Ollama's read-only API.
const OLLAMA_PATHS: &[&str] = &["/api/tags", "/api/version", "/api/ps"];

/// One provider behind HTTP.
pub(crate) struct HttpProvider {
    id: ProviderId,
    adapter: Adapter,
    client: Client,
    /// Ends in `/v1` or whatever the provider calls it; no slash.
    base: String,
    /// Where a plain request to each endpoint goes, in `Endpoint` order.
    endpoints: Vec<Target>,
    models: Target,
    /// Ollama's own API; `None` for other adapters.
    ollama: Option<String>,
    /// Set on every request: they win over the client's.
    own: Vec<(HeaderName, HeaderValue)>,
}

/// Why the provider's own list of models is not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ListError {
    #[error("{0}")]
    Unreachable(String),
    #[error("it answered {0}")]
    Status(StatusCode),
    #[error("its answer is no list of models")]
    Malformed,
    #[error("it gave no answer within 5 s")]
    Timeout,
}

impl HttpProvider {
    pub(crate) fn new(settings: &ProviderSettings) -> Result<Self, String> {
        let config = &settings.config;
        let given = config
            .base_url
            .as_deref()
            .unwrap_or_default()
            .trim_end_matches('/');
        let (base, ollama) = match config.adapter {
            Adapter::Ollama => {
                let root = given.strip_suffix("/v1").unwrap_or(given);
                (format!("{root}/v1"), Some(root.to_owned()))
            }
            Adapter::Openai | Adapter::Scripted => (given.to_owned(), None),
        };
        let target = |path: &str| {
            Target::parse(&format!("{base}/{path}")).ok_or_else(|| String::from("base_url is no HTTP URL"))
        };
        let endpoints = Endpoint::ALL
            .iter()
            .map(|e| target(e.path()))
            .collect::<Result<Vec<_>, _>>()?;
        let models = target("models")?;
        let mut own = Vec::new();
        if let Some(key) = &settings.api_key {
            let value = bearer(key).ok_or("api_key holds a byte that no header may carry")?;
            own.push((AUTHORIZATION, value));
        }
        for (name, value) in &config.headers {
            let name = HeaderName::try_from(name.as_str())
                .map_err(|_| format!("header {name} has no valid name"))?;
            let mut value = HeaderValue::try_from(value.as_str())
                .map_err(|_| format!("header {name} has no valid value"))?;
            // A configured header may be a credential as well.
            value.set_sensitive(true);
            own.push((name, value));
        }
        let client = Client::new(config.connect_timeout.0);
        Ok(Self {
            id: config.id.clone(),
            adapter: config.adapter,
            client,
            base,
            endpoints,
            models,
            ollama,
            own,
        })
    }

    pub(crate) async fn call(
        &self,
        ask: TunnelAsk,
        hold: &mut Hold,
    ) -> Result<Response<ProviderBody>, NodeError> {
        let TunnelAsk {
            endpoint,
            method,
            path,
            mut headers,
            accept_encoding,
            body,
        } = ask;
        let to = self.address(endpoint, path.as_deref())?;
        head::towards_provider(&mut headers, &self.own);
        let answer = self
            .client
            .send_held(method, to, headers, body, hold)
            .await
            .map_err(|e| failure(&e))?;
        let (mut parts, body) = answer.into_parts();
        parts.extensions.clear();
        let coding = match head::from_provider(&mut parts.headers, accept_encoding.as_ref()) {
            Plan::Pass | Plan::Unreadable => None,
            Plan::Decode(coding) => Some(coding),
        };
        if !head::fits(&parts.headers) {
            return Err(cut("the provider's header list is larger than 128 KiB"));
        }
        Ok(Response::from_parts(
            parts,
            ProviderBody::Http(HttpSource::new(body, coding)),
        ))
    }

    fn address(&self, endpoint: Endpoint, path: Option<&str>) -> Result<Target, NodeError> {
        match path {
            None => self.endpoints.get(endpoint.index()).cloned(),
            Some(path) => Target::parse(&format!("{}/{path}", self.base)),
        }
        .ok_or_else(|| {
            NodeError::new(
                FailureCode::InvalidRequest,
                "iop-path is no path below the provider",
            )
        })
    }

    /// The names in the provider's own list of models, bounded in size and time.
    pub(crate) async fn list_models(&self) -> Result<Vec<String>, ListError> {
        let list = self.list().await?;
        Ok(list.data.into_iter().map(|m| m.id).collect())
    }

    async fn list(&self) -> Result<List, ListError> {
        let (status, body) = match tokio::time::timeout(ASIDE_BOUND, self.get(self.models.clone())).await {
            Err(_) => return Err(ListError::Timeout),
            Ok(Err(e)) => return Err(ListError::Unreachable(e.message)),
            Ok(Ok(answer)) => answer,
        };
        if !status.is_success() {
            return Err(ListError::Status(status));
        }
        serde_json::from_slice(&body).map_err(|_| ListError::Malformed)
    }

    /// A `GET` of Ollama's own API; its answer as it is.
    pub(crate) async fn ollama_get(&self, path: &str) -> Result<(StatusCode, Bytes), NodeError> {
        let invalid = |text: &str| NodeError::new(FailureCode::InvalidRequest, text);
        let root = self
            .ollama
            .as_ref()
            .ok_or_else(|| invalid("the provider's adapter is not ollama"))?;
        if !OLLAMA_PATHS.contains(&path) {
            return Err(invalid("path must be one of /api/tags, /api/version, /api/ps"));
        }
        let to = Target::parse(&format!("{root}{path}")).ok_or_else(|| invalid("path is no path"))?;
        tokio::time::timeout(ASIDE_BOUND, self.get(to))
            .await
            .unwrap_or_else(|_| Err(cut("the provider gave no answer within 5 s")))
    }

    async fn get(&self, to: Target) -> Result<(StatusCode, Bytes), NodeError> {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        head::towards_provider(&mut headers, &self.own);
        let answer = self
            .client
            .send(Method::GET, to, headers, SendBody::empty())
            .await
            .map_err(|e| failure(&e))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ASIDE_BYTES)
            .collect()
            .await
            .map_err(|_| cut("the provider's answer is too large or was cut"))?;
        Ok((status, body.to_bytes()))
    }
}

impl ProviderProber for HttpProvider {
    /// Looks for the target in the provider's list: an engine generates nothing for that.
    async fn probe(&self, target: &str) -> Result<ProbeReport, ProbeError> {
        let list = self.list().await.map_err(|e| match e {
            ListError::Timeout => ProbeError::Timeout,
            ListError::Status(
                StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED,
            ) => ProbeError::Unsupported,
            ListError::Unreachable(_) | ListError::Status(_) | ListError::Malformed => ProbeError::Failed,
        })?;
        Ok(ProbeReport {
            identity: Identity {
                instance: self.id.to_string(),
                adapter: self.adapter.as_str().to_owned(),
                target: target.to_owned(),
            },
            status: list.status(self.adapter, target),
        })
    }
}

/// A page of `GET /v1/models`.
#[derive(Debug, Deserialize)]
struct List {
    data: Vec<Model>,
    /// More pages follow.
    #[serde(default)]
    has_more: bool,
}

#[derive(Debug, Deserialize)]
struct Model {
    id: String,
}

impl List {
    /// What the list says of a target; a part of a list proves no absence.
    fn status(&self, adapter: Adapter, target: &str) -> Status {
        if self.data.iter().any(|m| is_same(adapter, &m.id, target)) {
            Status::Available
        } else if self.has_more {
            Status::Unknown
        } else {
            Status::Unavailable
        }
    }
}

/// Ollama's `llama3` is its `llama3:latest`; any other name is exact.
fn is_same(adapter: Adapter, a: &str, b: &str) -> bool {
    match adapter {
        Adapter::Ollama => {
            let bare = |name| str::strip_suffix(name, ":latest").unwrap_or(name);
            bare(a) == bare(b)
        }
        Adapter::Openai | Adapter::Scripted => a == b,
    }
}

/// The `Authorization` of a key; `None` when no header can carry it.
pub(crate) fn bearer(key: &SecretString) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(format!("Bearer {}", key.expose_secret())).ok()?;
    value.set_sensitive(true);
    Some(value)
}

fn cut(text: &str) -> NodeError {
    NodeError::new(FailureCode::ProviderCut, text)
}

fn failure(e: &ClientError) -> NodeError {
    match e.kind {
        ClientErrorKind::Connect => NodeError::new(
            FailureCode::ConnectFailed,
            format!("cannot connect to the provider: {e}"),
        ),
        ClientErrorKind::Cut => NodeError::new(
            FailureCode::ProviderCut,
            format!("the provider hung up before an answer: {e}"),
        ),
        ClientErrorKind::Upload => NodeError::new(FailureCode::InvalidRequest, e.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(adapter: Adapter, list: &str, target: &str) -> Status {
        serde_json::from_str::<List>(list)
            .unwrap()
            .status(adapter, target)
    }

    #[test]
    fn a_target_is_available_only_under_its_exact_name() {
        let list = r#"{"object":"list","data":[{"id":"llama3:latest"},{"id":"qwen"},{"id":"a/b:7b"}]}"#;
        for (target, openai, ollama) in [
            ("llama3:latest", Status::Available, Status::Available),
            ("llama3", Status::Unavailable, Status::Available),
            ("qwen", Status::Available, Status::Available),
            ("qwen:latest", Status::Unavailable, Status::Available),
            ("a/b:7b", Status::Available, Status::Available),
            ("a/b", Status::Unavailable, Status::Unavailable),
            ("llama", Status::Unavailable, Status::Unavailable),
            ("LLAMA3", Status::Unavailable, Status::Unavailable),
        ] {
            assert_eq!(status(Adapter::Openai, list, target), openai, "{target}");
            assert_eq!(status(Adapter::Ollama, list, target), ollama, "{target}");
        }
    }

    #[test]
    fn a_part_of_a_list_proves_no_absence() {
        let part = r#"{"data":[{"id":"a"}],"has_more":true}"#;
        assert_eq!(status(Adapter::Openai, part, "a"), Status::Available);
        assert_eq!(status(Adapter::Openai, part, "b"), Status::Unknown);
        assert_eq!(
            status(Adapter::Openai, r#"{"data":[]}"#, "b"),
            Status::Unavailable
        );
    }
}
