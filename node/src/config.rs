//! `node.toml` (design §4): strict parsing, rules between keys, secrets resolved once.
//!
//! Reads no file and no environment itself: text and a resolver come in, so that `check` and tests use the same path.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use iop_shared::config::{
    ConfigError, Period, ProviderConfig, SecretRef, SecretString, Source, TelemetryConfig,
};
use iop_shared::ids::NodeId;
use serde::Deserialize;

use crate::providers::ProviderSettings;
use crate::providers::openai::bearer;

/// Where secrets are read from.
pub trait Resolver {
    fn env(&self, name: &str) -> Option<String>;
    /// # Errors
    /// When the file cannot be read as text.
    fn file(&self, path: &Path) -> io::Result<String>;
}

/// The environment and file system of this process.
#[derive(Debug, Clone, Copy)]
pub struct ProcessResolver;

impl Resolver for ProcessResolver {
    fn env(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }
    fn file(&self, path: &Path) -> io::Result<String> {
        std::fs::read_to_string(path)
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    node: NodeSection,
    #[serde(default)]
    edges: Vec<EdgeSection>,
    #[serde(default)]
    providers: Vec<ProviderConfig>,
    #[serde(default)]
    telemetry: TelemetryConfig,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeSection {
    id: NodeId,
    metrics_listen: Option<SocketAddr>,
    #[serde(default = "default_drain_timeout")]
    drain_timeout: Period,
}

const fn default_drain_timeout() -> Period {
    Period::secs(120)
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct EdgeSection {
    url: String,
    token: SecretRef,
    tls: Option<EdgeTls>,
}

/// `[edges.tls]`: an authority other than the system's, and the node's own certificate (mTLS).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EdgeTls {
    pub ca: Option<PathBuf>,
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
}

/// One edge to dial.
#[derive(Debug, Clone)]
pub struct EdgeSettings {
    /// Without brackets where it is an IPv6 address.
    pub host: String,
    pub port: u16,
    /// `host:port` as written, for `Host` and for logs.
    pub authority: String,
    /// `None`: plain TCP.
    pub tls: Option<EdgeTls>,
    pub token: Arc<SecretString>,
}

/// A validated `node.toml` with its secrets.
#[derive(Debug, Clone)]
pub struct Settings {
    pub id: NodeId,
    pub metrics_listen: Option<SocketAddr>,
    pub drain_timeout: Duration,
    pub edges: Vec<EdgeSettings>,
    pub providers: Vec<ProviderSettings>,
    pub telemetry: TelemetryConfig,
}

impl Settings {
    /// Reads a configuration text; `file` is its name in errors.
    ///
    /// # Errors
    /// The first thing wrong, with file, line and key.
    pub fn parse(file: &str, text: &str, resolver: &impl Resolver) -> Result<Self, ConfigError> {
        let (parsed, source) = Source::parse::<File>(file, text)?;
        let File {
            node,
            edges,
            providers,
            telemetry,
        } = parsed;
        if node.id.is_embedded() {
            return Err(source.error("node.id", "is reserved for the node inside an edge"));
        }
        if edges.is_empty() {
            return Err(source.error(
                "edges",
                "at least one [[edges]] is required: a node serves the edges it dials",
            ));
        }
        if providers.is_empty() {
            return Err(source.error("providers", "at least one [[providers]] is required"));
        }
        check_telemetry(&telemetry, &source)?;
        let edges = edges
            .into_iter()
            .enumerate()
            .map(|(i, e)| edge(e, &source, &format!("edges[{i}]"), resolver))
            .collect::<Result<Vec<_>, _>>()?;
        for (i, e) in edges.iter().enumerate() {
            if edges[..i].iter().any(|other| other.authority == e.authority) {
                return Err(source.error(
                    &format!("edges[{i}].url"),
                    format!("{} is named twice", e.authority),
                ));
            }
        }
        let providers = ProviderSettings::resolve_all(providers, &source, resolver)?;
        Ok(Self {
            id: node.id,
            metrics_listen: node.metrics_listen,
            drain_timeout: node.drain_timeout.0,
            edges,
            providers,
            telemetry,
        })
    }
}

fn check_telemetry(t: &TelemetryConfig, source: &Source) -> Result<(), ConfigError> {
    if t.otlp_endpoint.is_some() {
        return Err(source.error("telemetry.otlp_endpoint", "is not available yet"));
    }
    if t.gen_ai_metrics {
        return Err(source.error("telemetry.gen_ai_metrics", "is not available yet"));
    }
    match tracing_subscriber::EnvFilter::try_new(&t.log) {
        Ok(_) => Ok(()),
        Err(e) => Err(source.error("telemetry.log", format!("is no tracing filter: {e}"))),
    }
}

fn edge(
    e: EdgeSection,
    source: &Source,
    key: &str,
    resolver: &impl Resolver,
) -> Result<EdgeSettings, ConfigError> {
    let bad = || {
        source.error(
            &format!("{key}.url"),
            "must be http://HOST:PORT or https://HOST:PORT",
        )
    };
    let uri: http::Uri = e.url.parse().map_err(|_| bad())?;
    let (secure, standard_port) = match uri.scheme_str() {
        Some("http") => (false, 80),
        Some("https") => (true, 443),
        _ => return Err(bad()),
    };
    let authority = uri.authority().ok_or_else(bad)?;
    if authority.host().is_empty()
        || authority.as_str().contains('@')
        || uri.path() != "/"
        || uri.query().is_some()
    {
        return Err(bad());
    }
    let tls = match (secure, e.tls) {
        (false, Some(_)) => {
            return Err(source.error(&format!("{key}.tls"), "has no meaning for an http:// URL"));
        }
        (false, None) => None,
        (true, tls) => Some(tls.unwrap_or(EdgeTls {
            ca: None,
            cert: None,
            key: None,
        })),
    };
    if let Some(t) = &tls
        && t.cert.is_some() != t.key.is_some()
    {
        return Err(source.error(&format!("{key}.tls"), "cert and key belong together"));
    }
    let token = e
        .token
        .resolve(|n| resolver.env(n), |p| resolver.file(p))
        .map_err(|m| source.error(&format!("{key}.token"), m))?;
    if bearer(&token).is_none() {
        return Err(source.error(&format!("{key}.token"), "holds a byte that no header may carry"));
    }
    let port = authority.port_u16().unwrap_or(standard_port);
    let host = authority.host();
    Ok(EdgeSettings {
        host: host.trim_start_matches('[').trim_end_matches(']').to_owned(),
        port,
        authority: format!("{host}:{port}"),
        tls,
        token: Arc::new(token),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixed;
    impl Resolver for Fixed {
        fn env(&self, name: &str) -> Option<String> {
            (name == "TOKEN").then(|| String::from("t0ken"))
        }
        fn file(&self, _: &Path) -> io::Result<String> {
            Err(io::Error::from(io::ErrorKind::NotFound))
        }
    }

    const NODE: &str = "[node]\nid = \"gpu-1\"\n";
    const EDGE: &str = "[[edges]]\nurl = \"http://edge:7070\"\ntoken = { env = \"TOKEN\" }\n";
    const PROVIDER: &str =
        "[[providers]]\nid = \"vllm\"\nadapter = \"openai\"\nbase_url = \"http://127.0.0.1:8000/v1\"\n";

    fn parse(text: &str) -> Result<Settings, ConfigError> {
        Settings::parse("node.toml", text, &Fixed)
    }

    #[test]
    fn the_example_of_the_design_is_read() {
        let s = parse(&format!("{NODE}{EDGE}{PROVIDER}")).unwrap();
        assert_eq!(s.id.as_str(), "gpu-1");
        assert_eq!(s.drain_timeout, Duration::from_secs(120));
        assert_eq!((s.edges[0].host.as_str(), s.edges[0].port), ("edge", 7070));
        assert!(s.edges[0].tls.is_none());
        let six = parse(&format!(
            "{NODE}{}{PROVIDER}",
            EDGE.replace("http://edge:7070", "https://[::1]:7")
        ))
        .unwrap();
        assert_eq!(
            (six.edges[0].host.as_str(), six.edges[0].authority.as_str()),
            ("::1", "[::1]:7")
        );
        assert!(six.edges[0].tls.is_some());
    }

    #[test]
    fn each_rule_is_refused_at_its_file_line_and_key() {
        for (text, line, key) in [
            (
                format!("[node]\nid = \"embedded\"\n{EDGE}{PROVIDER}"),
                2,
                "node.id",
            ),
            (format!("{NODE}{PROVIDER}"), 1, "edges"),
            (format!("{NODE}{EDGE}"), 1, "providers"),
            (format!("{NODE}{EDGE}{EDGE}{PROVIDER}"), 7, "edges[1].url"),
            (format!("{NODE}{EDGE}{PROVIDER}{PROVIDER}"), 11, "providers[1].id"),
            (
                format!(
                    "{NODE}{EDGE}{}",
                    PROVIDER.replace("http://127.0.0.1:8000/v1", "8000")
                ),
                9,
                "providers[0].base_url",
            ),
            (
                format!(
                    "{NODE}{}{PROVIDER}",
                    EDGE.replace("http://edge:7070", "edge:7070")
                ),
                4,
                "edges[0].url",
            ),
            (
                format!(
                    "{NODE}{}{PROVIDER}",
                    EDGE.replace("http://edge:7070", "http://edge:7070/link")
                ),
                4,
                "edges[0].url",
            ),
            (
                format!("{NODE}{}{PROVIDER}", EDGE.replace("TOKEN", "NOPE")),
                5,
                "edges[0].token",
            ),
            (
                format!("{NODE}{EDGE}{PROVIDER}api_key = {{ file = \"/nope\" }}\n"),
                10,
                "providers[0].api_key",
            ),
            (
                format!("{NODE}drain_timeout = 30\n{EDGE}{PROVIDER}"),
                3,
                "node.drain_timeout",
            ),
            (format!("{NODE}{EDGE}tls = {{}}\n{PROVIDER}"), 6, "edges[0].tls"),
            (
                format!("{NODE}{EDGE}{PROVIDER}[telemetry]\ngen_ai_metrics = true\n"),
                11,
                "telemetry.gen_ai_metrics",
            ),
            (
                format!("{NODE}{EDGE}{PROVIDER}[telemetry]\notlp_endpoint = \"http://x\"\n"),
                11,
                "telemetry.otlp_endpoint",
            ),
            (
                format!("{NODE}{EDGE}{PROVIDER}[telemetry]\nlog = \"===\"\n"),
                11,
                "telemetry.log",
            ),
            (format!("{NODE}{EDGE}{PROVIDER}[nodes]\n"), 10, "nodes"),
        ] {
            let e = parse(&text).unwrap_err();
            assert_eq!((e.line, e.key.as_str()), (line, key), "{e}\n{text}");
            assert!(!e.to_string().contains("t0ken"));
        }
    }
}
