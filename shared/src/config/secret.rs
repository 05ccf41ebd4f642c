//! Secrets are references, never text in a configuration (design decision 10).

use std::fmt;
use std::path::PathBuf;

use secrecy::SecretBox;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};

/// A secret in memory: no `Debug`, wiped on drop.
pub type SecretString = SecretBox<str>;

/// Where a secret stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SecretSource {
    /// An environment variable.
    Env(String),
    /// A file; one trailing line feed is dropped.
    File(PathBuf),
}

/// A reference such as `{ env = "VLLM_API_KEY" }` or `{ file = "/run/secrets/key" }`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretRef(pub SecretSource);

const ADVICE: &str = "a secret is a reference: { env = \"NAME\" } or { file = \"PATH\" }";

impl SecretRef {
    /// Reads the secret through the caller's hands.
    ///
    /// # Errors
    /// When it is absent, unreadable or empty; names the reference, never the value.
    pub fn resolve(
        &self,
        env: impl Fn(&str) -> Option<String>,
        file: impl Fn(&std::path::Path) -> std::io::Result<String>,
    ) -> Result<SecretString, String> {
        let text = match &self.0 {
            SecretSource::Env(name) => {
                env(name).ok_or_else(|| format!("environment variable {name} is not set"))?
            }
            SecretSource::File(path) => {
                file(path).map_err(|e| format!("cannot read {}: {e}", path.display()))?
            }
        };
        let text = text.strip_suffix('\n').unwrap_or(&text);
        let text = text.strip_suffix('\r').unwrap_or(text);
        if text.is_empty() {
            return Err(format!("{self} is empty"));
        }
        Ok(SecretString::from(text))
    }
}

impl fmt::Display for SecretRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            SecretSource::Env(name) => write!(f, "environment variable {name}"),
            SecretSource::File(path) => write!(f, "file {}", path.display()),
        }
    }
}

impl<'de> Deserialize<'de> for SecretRef {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Reference;
        impl<'de> Visitor<'de> for Reference {
            type Value = SecretRef;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(ADVICE)
            }

            // serde's own message would quote the secret.
            fn visit_str<E: de::Error>(self, _: &str) -> Result<SecretRef, E> {
                Err(E::custom(ADVICE))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<SecretRef, A::Error> {
                let source = match map.next_key::<String>()?.as_deref() {
                    Some("env") => SecretSource::Env(map.next_value()?),
                    Some("file") => SecretSource::File(map.next_value()?),
                    _ => return Err(de::Error::custom(ADVICE)),
                };
                if map.next_key::<String>()?.is_some() {
                    return Err(de::Error::custom(ADVICE));
                }
                Ok(SecretRef(source))
            }
        }
        d.deserialize_any(Reference)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use secrecy::ExposeSecret;

    #[test]
    fn a_secret_is_read_without_its_line_end_and_never_empty() {
        let env = |n: &str| (n == "KEY").then(|| String::from("sk-1\n"));
        let file = |_: &std::path::Path| Ok(String::from("\n"));
        let by_env = SecretRef(SecretSource::Env("KEY".into()));
        assert_eq!(
            by_env
                .resolve(env, file)
                .ok()
                .map(|s| s.expose_secret().to_owned())
                .as_deref(),
            Some("sk-1")
        );
        let missing = SecretRef(SecretSource::Env("OTHER".into()));
        assert_eq!(
            missing.resolve(env, file).err().as_deref(),
            Some("environment variable OTHER is not set")
        );
        let empty = SecretRef(SecretSource::File("/k".into()));
        assert_eq!(
            empty.resolve(env, file).err().as_deref(),
            Some("file /k is empty")
        );
    }
}
