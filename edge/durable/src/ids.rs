//! Identities. Text ids are stored as they are, never cut, folded or normalised (D120, D258); derived ids are digests of an
//! address.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// Longest text id, in bytes of UTF-8.
pub const ID_MAX: usize = 256;

/// Why an id was refused. `field` says which.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidId {
    #[error("{field}: is empty")]
    Empty { field: &'static str },
    #[error("{field}: is {bytes} bytes long, at most {ID_MAX} are allowed")]
    TooLong { field: &'static str, bytes: usize },
    #[error("{field}: is not valid UTF-8")]
    NotUtf8 { field: &'static str },
    #[error("{field}: contains U+0000")]
    Nul { field: &'static str },
}

/// Checks a text of the caller's before anything is hashed, stored or dispatched with it.
///
/// # Errors
/// `InvalidId`, naming `field`.
pub fn check_text(field: &'static str, text: &str) -> Result<(), InvalidId> {
    if text.is_empty() {
        return Err(InvalidId::Empty { field });
    }
    if text.len() > ID_MAX {
        return Err(InvalidId::TooLong {
            field,
            bytes: text.len(),
        });
    }
    if text.contains('\0') {
        return Err(InvalidId::Nul { field });
    }
    Ok(())
}

macro_rules! text_id {
    ($(#[$meta:meta])* $name:ident, $field:literal) => {
        $(#[$meta])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// # Errors
            /// `InvalidId`: empty, longer than 256 bytes, or with U+0000.
            pub fn new(text: &str) -> Result<Self, InvalidId> {
                check_text($field, text)?;
                Ok(Self(Arc::from(text)))
            }

            /// # Errors
            /// Also when the bytes are not UTF-8; nothing is replaced.
            pub fn from_bytes(bytes: &[u8]) -> Result<Self, InvalidId> {
                let text = std::str::from_utf8(bytes).map_err(|_| InvalidId::NotUtf8 { field: $field })?;
                Self::new(text)
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(text: String) -> Result<Self, InvalidId> {
                Self::new(&text)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.as_str().to_owned()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }
    };
}

text_id!(
    /// One invocation of a graph (D10).
    RunId,
    "run_id"
);
text_id!(
    /// A node of a graph; unique within it.
    NodeName,
    "node"
);
text_id!(
    /// A logical key of an activity or a wait within one activation of a node.
    Key,
    "key"
);
text_id!(
    /// What an outside event says it is about.
    CorrelationId,
    "correlation_id"
);
text_id!(
    /// Names one decision of an operator, one delivery or one cancellation; the same id is the same decision.
    DecisionId,
    "decision_id"
);
text_id!(
    /// Who holds a lease. A label for people: authority is the incarnation.
    Owner,
    "owner"
);
text_id!(
    /// An activity: the digest of its address, see `ActivityId::derive`.
    ActivityId,
    "activity_id"
);
text_id!(
    /// A wait: the digest of its address, see `WaitId::derive`.
    WaitId,
    "wait_id"
);

impl RunId {
    /// `run_` and a UUIDv7.
    pub fn random() -> Self {
        Self(Arc::from(format!("run_{}", uuid::Uuid::now_v7().simple())))
    }
}

/// SHA-256 over length-prefixed parts, so that no two lists of parts share one input.
pub(crate) fn digest_of(parts: &[&[u8]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// Lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use fmt::Write as _;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut out, b| {
            let _ = write!(out, "{b:02x}");
            out
        })
}

impl ActivityId {
    /// The identity of an activity: run, node, activation and logical key (D138). A retry has the same identity, the next
    /// activation of the node another.
    pub fn derive(run: &RunId, node: &NodeName, activation: u64, key: &Key) -> Self {
        let digest = digest_of(&[
            b"activity",
            run.as_str().as_bytes(),
            node.as_str().as_bytes(),
            &activation.to_be_bytes(),
            key.as_str().as_bytes(),
        ]);
        Self(Arc::from(format!("act_{}", hex(&digest[..16]))))
    }
}

impl WaitId {
    /// The identity of a wait: run, node, activation, key and generation.
    pub fn derive(run: &RunId, node: &NodeName, activation: u64, key: &Key, generation: u32) -> Self {
        let digest = digest_of(&[
            b"wait",
            run.as_str().as_bytes(),
            node.as_str().as_bytes(),
            &activation.to_be_bytes(),
            key.as_str().as_bytes(),
            &generation.to_be_bytes(),
        ]);
        Self(Arc::from(format!("wait_{}", hex(&digest[..16]))))
    }
}

/// The place of a commit in a run's history: 1 is the accepted run. Assigned by the store, never by a caller (D107).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Revision(u64);

/// The last revision PostgreSQL's signed 64 bits hold; both durable stores stop there and never wrap (D108).
pub const REVISION_MAX: u64 = i64::MAX as u64;

/// A number that is no revision, or none is left.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a revision is a decimal number from 1 to 9223372036854775807 without sign or leading zero")]
pub struct InvalidRevision;

impl Revision {
    pub const FIRST: Self = Self(1);

    /// # Errors
    /// `InvalidRevision` for 0 and above `REVISION_MAX`.
    pub fn new(n: u64) -> Result<Self, InvalidRevision> {
        if (1..=REVISION_MAX).contains(&n) {
            Ok(Self(n))
        } else {
            Err(InvalidRevision)
        }
    }

    pub fn get(self) -> u64 {
        self.0
    }

    /// # Errors
    /// `InvalidRevision` when the domain is exhausted.
    pub fn next(self) -> Result<Self, InvalidRevision> {
        self.0.checked_add(1).ok_or(InvalidRevision).and_then(Self::new)
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::str::FromStr for Revision {
    type Err = InvalidRevision;
    fn from_str(text: &str) -> Result<Self, InvalidRevision> {
        let canonical = text.bytes().all(|b| b.is_ascii_digit()) && !text.starts_with('0');
        if !canonical {
            return Err(InvalidRevision);
        }
        text.parse().map_err(|_| InvalidRevision).and_then(Self::new)
    }
}

impl TryFrom<String> for Revision {
    type Error = InvalidRevision;
    fn try_from(text: String) -> Result<Self, InvalidRevision> {
        text.parse()
    }
}

impl From<Revision> for String {
    fn from(revision: Revision) -> String {
        revision.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_exact_text() {
        assert_eq!(
            RunId::from_bytes(b"a\xff"),
            Err(InvalidId::NotUtf8 { field: "run_id" })
        );
        assert_eq!(RunId::new("a\0"), Err(InvalidId::Nul { field: "run_id" }));
        assert_eq!(Key::new(""), Err(InvalidId::Empty { field: "key" }));
        assert!(RunId::new(&"é".repeat(128)).is_ok());
        assert!(matches!(
            RunId::new(&"é".repeat(129)),
            Err(InvalidId::TooLong { bytes: 258, .. })
        ));
        assert_eq!(RunId::new("\u{fffd}").unwrap().as_str(), "\u{fffd}");
    }

    #[test]
    fn derived_ids_differ_in_every_part_of_the_address() {
        let id = |run: &str, node: &str, activation, key: &str| {
            ActivityId::derive(
                &RunId::new(run).unwrap(),
                &NodeName::new(node).unwrap(),
                activation,
                &Key::new(key).unwrap(),
            )
        };
        let all = [
            id("r", "n", 1, "k"),
            id("rn", "n", 1, "k"),
            id("r", "nk", 1, "k"),
            id("r", "n", 2, "k"),
            id("r", "n", 1, "kk"),
        ];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        assert_eq!(id("r", "n", 1, "k"), id("r", "n", 1, "k"));
    }

    #[test]
    fn revisions_are_canonical_and_never_wrap() {
        for bad in [
            "",
            "0",
            "01",
            "+1",
            "-1",
            "1.0",
            " 1",
            "9223372036854775808",
            "18446744073709551616",
        ] {
            assert!(bad.parse::<Revision>().is_err(), "{bad}");
        }
        let last: Revision = "9223372036854775807".parse().unwrap();
        assert!(last.next().is_err());
        assert_eq!(serde_json::to_string(&last).unwrap(), "\"9223372036854775807\"");
    }
}
