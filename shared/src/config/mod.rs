//! Configuration vocabulary that edge and node share: strict TOML, and errors that name file, line and key.
//!
//! This module decides what a value means; it reads no file and no environment itself (the caller hands in text and a
//! resolver). Unknown keys are errors, durations and sizes are strings with a unit, secrets are references.

mod locate;
mod provider;
mod secret;
mod units;

use serde::Deserialize;
use serde::de::DeserializeOwned;

pub use provider::{
    Adapter, CutPoint, ProbeScript, ProviderConfig, Script, StallPoint, Targets, ToolCallScript,
};
pub use secret::{SecretRef, SecretSource, SecretString};
pub use units::{ByteSize, Period};

/// A configuration that was refused. Displays as `file:line: key: message`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}: {key}: {message}")]
pub struct ConfigError {
    pub file: String,
    /// Counted from 1; 1 where the whole file is meant.
    pub line: usize,
    /// Dotted path such as `models[1].candidates[0].provider`; empty parts are left out.
    pub key: String,
    pub message: String,
}

/// A parsed file, kept so that later checks can name lines too.
#[derive(Debug, Clone)]
pub struct Source {
    file: String,
    text: String,
}

impl Source {
    /// Parses a file's text into its strict structure.
    ///
    /// # Errors
    /// Syntax, an unknown key, a wrong type or value; with line and key.
    pub fn parse<T: DeserializeOwned>(file: &str, text: &str) -> Result<(T, Self), ConfigError> {
        let source = Self {
            file: file.to_owned(),
            text: text.to_owned(),
        };
        match toml::from_str(text) {
            Ok(value) => Ok((value, source)),
            Err(e) => {
                let at = e.span().map_or(0, |s| s.start);
                let key = locate::key_at(text, at).unwrap_or_else(|| String::from("(file)"));
                Err(ConfigError {
                    file: source.file,
                    line: locate::line_of(text, at),
                    key,
                    message: one_line(e.message()),
                })
            }
        }
    }

    /// An error about a key that was parsed but makes no sense, such as `models[0].candidates[1].provider`.
    /// Where the key itself is not written in the file, the line is its nearest written parent's.
    pub fn error(&self, key: &str, message: impl Into<String>) -> ConfigError {
        let at = locate::offset_of(&self.text, key);
        ConfigError {
            file: self.file.clone(),
            line: locate::line_of(&self.text, at),
            key: key.to_owned(),
            message: message.into(),
        }
    }

    pub fn file(&self) -> &str {
        &self.file
    }
}

fn one_line(message: &str) -> String {
    message
        .split('\n')
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .collect::<Vec<_>>()
        .join("; ")
}

/// `[telemetry]`, the same on edge and node.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TelemetryConfig {
    /// A tracing filter, such as `info` or `iop_edge=debug,info`.
    pub log: String,
    pub log_format: LogFormat,
    /// OTLP/gRPC endpoint of a collector.
    pub otlp_endpoint: Option<String>,
    /// OpenTelemetry's `gen_ai_*` metrics beside ours.
    pub gen_ai_metrics: bool,
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self {
            log: String::from("info"),
            log_format: LogFormat::Json,
            otlp_endpoint: None,
            gen_ai_metrics: false,
        }
    }
}

crate::label_enum! {
    /// How log lines are written to stderr.
    pub enum LogFormat { Json => "json", Text => "text" }
}

/// A certificate and its key, PEM files.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    pub cert: std::path::PathBuf,
    pub key: std::path::PathBuf,
    /// Only on `[link]`: peers must show a certificate of this authority (mTLS).
    pub client_ca: Option<std::path::PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only its refusals are looked at")]
    struct Demo {
        #[serde(default)]
        telemetry: TelemetryConfig,
        #[serde(default)]
        providers: Vec<ProviderConfig>,
    }

    fn refused(text: &str) -> ConfigError {
        Source::parse::<Demo>("demo.toml", text).unwrap_err()
    }

    #[test]
    fn errors_name_file_line_and_key() {
        let e = refused("[telemetry]\nlog = \"info\"\nlogg = 1\n");
        assert_eq!((e.line, e.key.as_str()), (3, "telemetry.logg"));
        assert!(
            e.to_string()
                .starts_with("demo.toml:3: telemetry.logg: unknown field"),
            "{e}"
        );

        let head = "[[providers]]\nid = \"a\"\nadapter = \"openai\"\nbase_url = \"http://127.0.0.1:1/v1\"\n";
        for (line, key) in [
            (
                "response_stall_timeout = 300",
                "providers[0].response_stall_timeout",
            ),
            (
                "response_stall_timeout = \"300 parsecs\"",
                "providers[0].response_stall_timeout",
            ),
            ("connect_timeout = \"-5s\"", "providers[0].connect_timeout"),
            ("api_key = \"sk-plain\"", "providers[0].api_key"),
            ("capacity = -1", "providers[0].capacity"),
            ("endpoints = [\"chat\", \"chatt\"]", "providers[0].endpoints"),
            ("targets = \"some\"", "providers[0].targets"),
        ] {
            let e = refused(&format!("{head}{line}\n"));
            assert_eq!((e.line, e.key.as_str()), (5, key), "{e}");
        }
        let e = refused("[[providers]]\nid = \"a b\"\nadapter = \"openai\"\n");
        assert_eq!((e.line, e.key.as_str()), (2, "providers[0].id"));
        let e = refused("x = = 1\n");
        assert_eq!(e.line, 1);
    }

    #[test]
    fn a_secret_never_shows_in_an_error() {
        let e = refused("[[providers]]\nid = \"a\"\nadapter = \"openai\"\napi_key = \"sk-plain\"\n");
        assert!(!e.to_string().contains("sk-plain"), "{e}");
        assert!(e.message.contains("{ env ="), "{e}");
    }

    #[test]
    fn later_checks_find_their_line() {
        let text = "[telemetry]\nlog = \"info\"\n\n[[providers]]\nid = \"a\"\nadapter = \"scripted\"\n\n[[providers]]\nid = \"b\"\nadapter = \"scripted\"\n";
        let (_, source) = Source::parse::<Demo>("demo.toml", text).unwrap();
        assert_eq!(source.error("providers[1].id", "twice").line, 9);
        assert_eq!(source.error("providers[1].base_url", "missing").line, 8);
        assert_eq!(source.error("nowhere.at.all", "missing").line, 1);
    }
}
