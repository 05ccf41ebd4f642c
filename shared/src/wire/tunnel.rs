//! The head of a tunnel request: which attempt, which provider, which path (link.md, Tunnel).

use http::header::{HeaderMap, HeaderValue};
use http::{Method, Uri};

use super::{TUNNEL_PREFIX, headers};
use crate::execution::Endpoint;
use crate::ids::{AttemptId, ProviderId, RunId};

/// What the edge tells the node about an attempt besides the client's own headers and body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TunnelHead {
    pub endpoint: Endpoint,
    pub run_id: RunId,
    pub attempt_id: AttemptId,
    pub provider: ProviderId,
    pub target: String,
    /// Milliseconds; 0 is 004's default; validated by the node before any provider is called.
    pub response_stall_timeout_ms: i64,
    /// Towards the provider.
    pub method: Method,
    /// Path and query below `/v1/`; `None`: the endpoint's own path.
    pub path: Option<String>,
    /// The client's `Accept-Encoding`.
    pub accept_encoding: Option<HeaderValue>,
}

/// Which part of a tunnel head was missing or malformed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} is missing or malformed")]
pub struct BadTunnelHead(pub &'static str);

impl TunnelHead {
    /// The request path on the link.
    pub fn uri(endpoint: Endpoint) -> Uri {
        let path = match endpoint {
            Endpoint::Chat => "/link/v1/tunnels/chat",
            Endpoint::Responses => "/link/v1/tunnels/responses",
            Endpoint::Completions => "/link/v1/tunnels/completions",
            Endpoint::Embeddings => "/link/v1/tunnels/embeddings",
            Endpoint::Rerank => "/link/v1/tunnels/rerank",
            Endpoint::Moderations => "/link/v1/tunnels/moderations",
            Endpoint::Images => "/link/v1/tunnels/images",
            Endpoint::Audio => "/link/v1/tunnels/audio",
        };
        Uri::from_static(path)
    }

    /// Adds the head to the client's end-to-end headers.
    pub fn write(&self, map: &mut HeaderMap) {
        map.insert(headers::RUN_ID, headers::once(&self.run_id.to_string()));
        map.insert(headers::ATTEMPT_ID, headers::once(&self.attempt_id.to_string()));
        map.insert(headers::PROVIDER, headers::encode(self.provider.as_str()));
        map.insert(headers::TARGET, headers::encode(&self.target));
        map.insert(
            headers::RESPONSE_STALL_TIMEOUT_MS,
            HeaderValue::from(self.response_stall_timeout_ms),
        );
        if self.method != Method::POST {
            map.insert(headers::METHOD, headers::encode(self.method.as_str()));
        }
        if let Some(path) = &self.path {
            map.insert(headers::PATH, headers::encode(path));
        }
        if let Some(value) = &self.accept_encoding {
            map.insert(headers::ACCEPT_ENCODING, value.clone());
        }
    }

    /// Takes the head out of a request's headers; what stays is the client's.
    ///
    /// # Errors
    /// The first header that is missing or malformed; also a path that is not the endpoint's.
    pub fn take(uri_path: &str, map: &mut HeaderMap) -> Result<Self, BadTunnelHead> {
        let endpoint = uri_path
            .strip_prefix(TUNNEL_PREFIX)
            .and_then(Endpoint::parse)
            .ok_or(BadTunnelHead("endpoint"))?;
        let mut text = |name: http::HeaderName, what: &'static str| {
            let value = map.remove(name).ok_or(BadTunnelHead(what))?;
            headers::decode(&value)
                .map(|t| t.into_owned())
                .ok_or(BadTunnelHead(what))
        };
        let run_id =
            RunId::parse(&text(headers::RUN_ID, "iop-run-id")?).ok_or(BadTunnelHead("iop-run-id"))?;
        let attempt_id = AttemptId::parse(&text(headers::ATTEMPT_ID, "iop-attempt-id")?)
            .ok_or(BadTunnelHead("iop-attempt-id"))?;
        let provider = ProviderId::new(&text(headers::PROVIDER, "iop-provider")?)
            .map_err(|_| BadTunnelHead("iop-provider"))?;
        let target = text(headers::TARGET, "iop-target")?;
        let response_stall_timeout_ms = text(
            headers::RESPONSE_STALL_TIMEOUT_MS,
            "iop-response-stall-timeout-ms",
        )?
        .parse()
        .map_err(|_| BadTunnelHead("iop-response-stall-timeout-ms"))?;
        let method = match text(headers::METHOD, "iop-method") {
            Err(_) => Method::POST,
            Ok(m) => match m.as_str() {
                "POST" => Method::POST,
                "GET" => Method::GET,
                "DELETE" => Method::DELETE,
                _ => return Err(BadTunnelHead("iop-method")),
            },
        };
        let path = text(headers::PATH, "iop-path").ok();
        if let Some(path) = &path {
            let bare = path.split_once('?').map_or(path.as_str(), |(p, _)| p);
            if Endpoint::of_path(bare) != Some(endpoint) || bare.contains("..") {
                return Err(BadTunnelHead("iop-path"));
            }
        }
        let accept_encoding = map.remove(headers::ACCEPT_ENCODING);
        Ok(Self {
            endpoint,
            run_id,
            attempt_id,
            provider,
            target,
            response_stall_timeout_ms,
            method,
            path,
            accept_encoding,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> TunnelHead {
        TunnelHead {
            endpoint: Endpoint::Responses,
            run_id: RunId(uuid::Uuid::from_u128(7)),
            attempt_id: AttemptId(uuid::Uuid::from_u128(8)),
            provider: ProviderId::new("vllm").unwrap(),
            target: "Qwen/Qwen3 8B".into(),
            response_stall_timeout_ms: 0,
            method: Method::GET,
            path: Some("responses/resp_1/input_items?limit=2".into()),
            accept_encoding: Some(HeaderValue::from_static("gzip")),
        }
    }

    #[test]
    fn a_head_round_trips_and_leaves_the_clients_headers() {
        let mut map = HeaderMap::new();
        map.insert("x-client", HeaderValue::from_static("1"));
        head().write(&mut map);
        let uri = TunnelHead::uri(Endpoint::Responses);
        assert_eq!(TunnelHead::take(uri.path(), &mut map).unwrap(), head());
        assert_eq!(map.len(), 1);
    }

    #[test]
    fn uris_are_the_prefix_and_the_word() {
        for e in Endpoint::ALL {
            assert_eq!(TunnelHead::uri(*e).path(), format!("{TUNNEL_PREFIX}{e}"));
        }
    }

    #[test]
    fn each_missing_or_foreign_part_is_named() {
        for (name, what) in [
            (headers::RUN_ID, "iop-run-id"),
            (headers::ATTEMPT_ID, "iop-attempt-id"),
            (headers::PROVIDER, "iop-provider"),
            (headers::TARGET, "iop-target"),
            (
                headers::RESPONSE_STALL_TIMEOUT_MS,
                "iop-response-stall-timeout-ms",
            ),
        ] {
            let mut map = HeaderMap::new();
            head().write(&mut map);
            map.remove(name);
            assert_eq!(
                TunnelHead::take("/link/v1/tunnels/responses", &mut map),
                Err(BadTunnelHead(what))
            );
        }
        for path in [
            "chat/completions",
            "../admin",
            "responses/../x",
            "responses/../../etc",
        ] {
            let mut map = HeaderMap::new();
            TunnelHead {
                path: Some(path.into()),
                ..head()
            }
            .write(&mut map);
            assert_eq!(
                TunnelHead::take("/link/v1/tunnels/responses", &mut map),
                Err(BadTunnelHead("iop-path"))
            );
        }
    }
}
