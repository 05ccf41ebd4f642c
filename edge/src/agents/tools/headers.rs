//! The headers that a declaration gives a request. Secrets are read at each call, so that replaced ones hold at once.

use std::cell::Cell;
use std::collections::BTreeMap;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName, HeaderValue, InvalidHeaderValue};
use iop_durable::failure::{Failure, FailureKind};
use iop_shared::config::{SecretRef, SecretSource, SecretString};
use memchr::memmem;
use secrecy::ExposeSecret;

use crate::agents::spec::{EnvRef, FileRef, HeaderText};

/// Headers of one request, and the secrets in them.
#[derive(Default)]
pub(crate) struct Resolved {
    pub(crate) map: HeaderMap,
    secrets: Vec<SecretString>,
}

/// Bytes of a secret that is looked for in results, and of the last word of one: a shorter one stands in too many texts.
const LONG: usize = 8;

/// What stands in the place of a secret.
const REDACTED: &[u8] = b"[redacted]";

impl Resolved {
    /// What a service said of its own failure, without the secrets that were sent there, whole or without a scheme such as `Bearer`.
    pub(crate) fn redact(&self, text: Bytes) -> Bytes {
        self.without(text, 1)
    }

    /// The same of a result. What is short stays there: a result is data.
    pub(crate) fn redact_result(&self, result: Bytes) -> Bytes {
        self.without(result, LONG)
    }

    fn without(&self, mut text: Bytes, least: usize) -> Bytes {
        for secret in &self.secrets {
            let whole = secret.expose_secret();
            let last = whole.rsplit(' ').next().filter(|word| word.len() >= LONG);
            let parts = [Some(whole).filter(|whole| whole.len() >= least), last];
            for part in parts.into_iter().flatten() {
                text = replaced(text, part.as_bytes());
            }
        }
        text
    }
}

fn replaced(text: Bytes, part: &[u8]) -> Bytes {
    let mut kept = 0;
    let mut out = Vec::new();
    for at in memmem::find_iter(&text, part) {
        out.extend_from_slice(&text[kept..at]);
        out.extend_from_slice(REDACTED);
        kept = at + part.len();
    }
    if kept == 0 {
        return text;
    }
    out.extend_from_slice(&text[kept..]);
    out.into()
}

/// Headers of the message itself, of the protocol above it and of the call: no declaration sets them.
const FIXED: [&str; 14] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "idempotency-key",
    "keep-alive",
    "mcp-protocol-version",
    "mcp-session-id",
    "proxy-connection",
    "te",
    "trailer",
    "traceparent",
    "transfer-encoding",
    "upgrade",
];

/// A header that a declaration may set.
///
/// # Errors
/// Why it may not.
pub(crate) fn settable(name: &str) -> Result<HeaderName, &'static str> {
    match HeaderName::from_bytes(name.as_bytes()) {
        Err(_) => Err("is no header name"),
        Ok(name) if FIXED.contains(&name.as_str()) => Err("is set by the edge"),
        Ok(name) => Ok(name),
    }
}

/// # Errors
/// A failure of kind `configuration` that names the header and the reference, never the value.
pub(crate) async fn resolve(declared: &BTreeMap<String, HeaderText>) -> Result<Resolved, Failure> {
    let mut resolved = Resolved::default();
    for (name, text) in declared {
        let wrong = |why: String| Failure::new(FailureKind::Configuration, format!("header {name}: {why}"));
        let parsed = settable(name).map_err(|why| wrong(why.to_owned()))?;
        let value = match text {
            HeaderText::Plain(text) => HeaderValue::from_str(text),
            HeaderText::Env(EnvRef { env }) => secret(SecretSource::Env(env.clone()), &mut resolved)
                .await
                .map_err(wrong)?,
            HeaderText::File(FileRef { file }) => secret(SecretSource::File(file.into()), &mut resolved)
                .await
                .map_err(wrong)?,
        };
        let value = value.map_err(|_| wrong(String::from("is no header value")))?;
        resolved.map.insert(parsed, value);
    }
    Ok(resolved)
}

async fn secret(
    source: SecretSource,
    resolved: &mut Resolved,
) -> Result<Result<HeaderValue, InvalidHeaderValue>, String> {
    let file = match &source {
        SecretSource::Env(_) => Ok(String::new()),
        SecretSource::File(path) => tokio::fs::read_to_string(path).await,
    };
    let file = Cell::new(file);
    let secret = SecretRef(source).resolve(
        |name| std::env::var(name).ok(),
        |_| file.replace(Ok(String::new())),
    )?;
    let value = HeaderValue::from_str(secret.expose_secret()).map(|mut value| {
        value.set_sensitive(true);
        value
    });
    resolved.secrets.push(secret);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared(pairs: &[(&str, HeaderText)]) -> BTreeMap<String, HeaderText> {
        pairs
            .iter()
            .map(|(name, text)| ((*name).to_owned(), text.clone()))
            .collect()
    }

    fn plain(text: &str) -> HeaderText {
        HeaderText::Plain(text.to_owned())
    }

    fn file(path: &std::path::Path) -> HeaderText {
        HeaderText::File(FileRef {
            file: path.display().to_string(),
        })
    }

    #[tokio::test]
    async fn a_replaced_file_holds_at_the_next_call() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let headers = declared(&[("Authorization", file(&path)), ("x-team", plain("a"))]);
        for token in ["Bearer first-token", "Bearer second-token"] {
            std::fs::write(&path, format!("{token}\n")).unwrap();
            let resolved = resolve(&headers).await.unwrap();
            assert_eq!(resolved.map["authorization"], token);
            assert!(resolved.map["authorization"].is_sensitive());
            assert_eq!(resolved.map["x-team"], "a");
            let word = token.split_once(' ').unwrap().1;
            assert_eq!(
                resolved.redact(format!("<{token}> <{word}> a").into()),
                "<[redacted]> <[redacted]> a"
            );
        }
    }

    #[tokio::test]
    async fn a_short_secret_is_no_reason_to_change_a_result() {
        let dir = tempfile::tempdir().unwrap();
        for (secret, result) in [
            ("s", "a list of items"),
            ("items", "a list of items"),
            ("Basic a-long-one", "a-long-one[]a-long-one"),
        ] {
            let path = dir.path().join("secret");
            std::fs::write(&path, secret).unwrap();
            let resolved = resolve(&declared(&[("x-a", file(&path))])).await.unwrap();
            let shown = resolved.redact_result(Bytes::from(result));
            let whole = result.replace("a-long-one", "[redacted]");
            assert_eq!(shown, whole);
            let shown = resolved.redact(format!("<{secret}>").into());
            assert!(!shown.windows(secret.len()).any(|w| w == secret.as_bytes()) || secret.len() == 1);
        }
        let none = Resolved::default();
        assert_eq!(none.redact(Bytes::from("as it is")), "as it is");
    }

    #[tokio::test]
    async fn a_header_that_cannot_be_is_named_without_its_value() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "hunter2\r\nx: y").unwrap();
        let env = HeaderText::Env(EnvRef {
            env: String::from("IOP_TEST_NOBODY_SETS_THIS"),
        });
        for (name, text, why) in [
            (
                "authorization",
                env,
                "header authorization: environment variable IOP_TEST_NOBODY_SETS_THIS is not set",
            ),
            (
                "authorization",
                file(&path),
                "header authorization: is no header value",
            ),
            ("x-y", file(&dir.path().join("none")), "header x-y: cannot read"),
            ("x-y", plain("hunter2\n"), "header x-y: is no header value"),
            ("x y", plain("a"), "header x y: is no header name"),
            ("Host", plain("a"), "header Host: is set by the edge"),
            (
                "content-length",
                plain("1"),
                "header content-length: is set by the edge",
            ),
            (
                "Idempotency-Key",
                plain("a"),
                "header Idempotency-Key: is set by the edge",
            ),
        ] {
            let failure = resolve(&declared(&[(name, text)])).await.map(|_| ()).unwrap_err();
            assert_eq!(failure.kind, FailureKind::Configuration);
            assert!(!failure.retryable);
            assert!(failure.message.starts_with(why), "{}", failure.message);
            assert!(!failure.message.contains("hunter2"));
        }
    }
}
