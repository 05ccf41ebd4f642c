//! `[auth] keys`: rules, and digests instead of secrets.

use std::collections::HashMap;
use std::sync::Arc;

use iop_shared::ids::NodeId;
use secrecy::ExposeSecret;
use sha2::{Digest as _, Sha256};

use super::build::{Checked, Site};
use super::file::{AuthFile, KeyFile};
use super::settings::{Digest, KeySettings, ModelFilter, ModelPattern, Priority, Roles};

/// SHA-256 of a secret: what a key is known by.
pub fn digest(secret: &str) -> Digest {
    Sha256::digest(secret.as_bytes()).into()
}

/// Lower-case hex, as in `secret_sha256`.
pub fn hex(digest: &Digest) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    digest
        .iter()
        .flat_map(|b| [b >> 4, b & 15])
        .map(|n| char::from(DIGITS[usize::from(n)]))
        .collect()
}

/// The digest of 64 hex digits.
pub(crate) fn from_hex(text: &str) -> Option<Digest> {
    let nibble = |b: u8| char::from(b).to_digit(16).and_then(|d| u8::try_from(d).ok());
    let mut digest = Digest::default();
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != digest.len() || !rest.is_empty() {
        return None;
    }
    for (out, [high, low]) in digest.iter_mut().zip(pairs) {
        *out = nibble(*high)? << 4 | nibble(*low)?;
    }
    Some(digest)
}

/// Whether a text may name a key: names stand in logs, so they are as plain as a node's.
pub fn is_key_name(name: &str) -> bool {
    NodeId::new(name).is_ok()
}

/// What can be said without reading a secret.
pub(super) fn rules(site: &Site<'_>, file: &AuthFile) {
    for (i, key) in file.keys.iter().enumerate() {
        site.keep(rule(site, &file.keys[..i], i, key));
    }
}

/// `before`: the keys that stand before this one.
fn rule(site: &Site<'_>, before: &[KeyFile], i: usize, key: &KeyFile) -> Checked<()> {
    let at = |field: &str| format!("auth.keys[{i}].{field}");
    if !is_key_name(&key.name) {
        return site.fail(&at("name"), "must match [A-Za-z0-9._-]{1,64}");
    }
    if before.iter().any(|k| k.name == key.name) {
        return site.fail(&at("name"), format!("key {:?} is defined twice", key.name));
    }
    for (field, value) in [("rpm", &key.rpm), ("tpm", &key.tpm), ("budget", &key.budget)] {
        if value.is_some() {
            return site.fail(&at(field), "not available yet");
        }
    }
    match (&key.secret, &key.secret_sha256) {
        (Some(_), None) => {}
        (None, Some(hex)) if from_hex(hex).is_some() => {}
        (None, Some(_)) => return site.fail(&at("secret_sha256"), "must be 64 hexadecimal digits"),
        (Some(_), Some(_)) => {
            return site.fail(
                &at("secret_sha256"),
                "give either secret or secret_sha256, not both",
            );
        }
        (None, None) => return site.fail(&at("secret"), "give either secret or secret_sha256"),
    }
    if key.roles.is_empty() {
        return site.fail(&at("roles"), "must name at least one role");
    }
    if key.concurrency == Some(0) {
        return site.fail(
            &at("concurrency"),
            "must be at least 1; leave it out for no limit",
        );
    }
    for (m, pattern) in key.models.iter().enumerate() {
        if pattern_of(pattern).is_none() {
            return site.fail(
                &at(&format!("models[{m}]")),
                "must be a model's name, \"*\", or the beginning of names followed by one \"*\"",
            );
        }
    }
    Ok(())
}

/// Reads the secrets and keeps their digests.
pub(super) fn build(site: &Site<'_>, file: &AuthFile) -> Vec<KeySettings> {
    let mut seen: HashMap<Digest, &str> = HashMap::new();
    let mut keys = Vec::with_capacity(file.keys.len());
    for (i, key) in file.keys.iter().enumerate() {
        let field = if key.secret.is_some() {
            "secret"
        } else {
            "secret_sha256"
        };
        let at = format!("auth.keys[{i}].{field}");
        let read = match (&key.secret, key.secret_sha256.as_deref().and_then(from_hex)) {
            (Some(reference), _) => site.secret(&at, reference).map(|it| digest(it.expose_secret())),
            (None, Some(digest)) => Ok(digest),
            (None, None) => site.fail(&at, "must be 64 hexadecimal digits"),
        };
        let Some(digest) = site.keep(read) else { continue };
        if let Some(other) = seen.insert(digest, &key.name) {
            site.keep::<()>(site.fail(&at, format!("is the same secret as key {other:?} has")));
        }
        keys.push(KeySettings {
            name: Arc::from(key.name.as_str()),
            digest,
            roles: Roles::of(&key.roles),
            models: filter_of(key),
            concurrency: key.concurrency,
            priority: key.priority.unwrap_or(Priority::Normal),
        });
    }
    keys
}

/// `None`: not a pattern.
fn pattern_of(text: &str) -> Option<ModelPattern> {
    match text.split_once('*') {
        None if text.is_empty() => None,
        None => Some(ModelPattern::Exact(text.to_owned())),
        Some((start, "")) => Some(ModelPattern::Prefix(start.to_owned())),
        Some(_) => None,
    }
}

fn filter_of(key: &KeyFile) -> ModelFilter {
    let patterns: Vec<ModelPattern> = key.models.iter().filter_map(|m| pattern_of(m)).collect();
    let everything = |p: &ModelPattern| matches!(p, ModelPattern::Prefix(start) if start.is_empty());
    if patterns.iter().any(everything) {
        ModelFilter::All
    } else {
        ModelFilter::Only(patterns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_written_and_read_as_hex() {
        let d = digest("abc");
        assert_eq!(
            hex(&d),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(from_hex(&hex(&d)), Some(d));
        assert_eq!(from_hex(&hex(&d).to_uppercase()), Some(d));
        for bad in ["", "ba", &"g".repeat(64), &"é".repeat(32), &"0".repeat(66)] {
            assert_eq!(from_hex(bad), None, "{bad}");
        }
    }

    #[test]
    fn only_a_trailing_star_is_a_pattern() {
        assert_eq!(pattern_of("a/b"), Some(ModelPattern::Exact("a/b".into())));
        assert_eq!(pattern_of("a/*"), Some(ModelPattern::Prefix("a/".into())));
        assert_eq!(pattern_of("*"), Some(ModelPattern::Prefix(String::new())));
        for bad in ["", "a*b", "**", "*a"] {
            assert_eq!(pattern_of(bad), None, "{bad}");
        }
    }
}
