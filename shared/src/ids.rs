//! Names and ids. A node or provider name matches `[A-Za-z0-9._-]{1,64}` (link.md, Identity).

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The node id of the node inside the edge; its providers carry no prefix. Reserved: no node may dial in with it.
pub const EMBEDDED_NODE: &str = "embedded";

/// Longest node or provider name, in bytes.
pub const NAME_MAX: usize = 64;

/// Why a name was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("must match [A-Za-z0-9._-]{{1,64}}")]
pub struct BadName;

fn check(name: &str) -> Result<(), BadName> {
    let fits = !name.is_empty()
        && name.len() <= NAME_MAX
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
    if fits { Ok(()) } else { Err(BadName) }
}

macro_rules! name_type {
    ($(#[$meta:meta])* $name:ident) => {
        $(#[$meta])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// # Errors
            /// `BadName` when the text is not `[A-Za-z0-9._-]{1,64}`.
            pub fn new(name: &str) -> Result<Self, BadName> {
                check(name)?;
                Ok(Self(Arc::from(name)))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = BadName;
            fn try_from(name: String) -> Result<Self, BadName> {
                Self::new(&name)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.as_str().to_owned()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }
    };
}

name_type!(
    /// A node's own name, unique among the nodes of an edge.
    NodeId
);
name_type!(
    /// A provider's name, unique on its node.
    ProviderId
);

impl NodeId {
    /// The id of the node inside the edge.
    pub fn embedded() -> Self {
        Self(Arc::from(EMBEDDED_NODE))
    }

    pub fn is_embedded(&self) -> bool {
        self.as_str() == EMBEDDED_NODE
    }
}

/// A provider as the edge names it: `<node id>/<provider id>`, or the bare provider id on the embedded node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProviderKey(Arc<str>);

impl ProviderKey {
    pub fn new(node: &NodeId, provider: &ProviderId) -> Self {
        if node.is_embedded() {
            Self(provider.0.clone())
        } else {
            Self(Arc::from(format!("{node}/{provider}")))
        }
    }

    /// Reads a key as written in a configuration's candidate.
    ///
    /// # Errors
    /// `BadName` when either part is no name.
    pub fn parse(text: &str) -> Result<Self, BadName> {
        let (node, provider) = text.split_once('/').unwrap_or((EMBEDDED_NODE, text));
        Ok(Self::new(&NodeId::new(node)?, &ProviderId::new(provider)?))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The node part; `None` for a provider of the embedded node.
    pub fn node(&self) -> Option<&str> {
        self.0.split_once('/').map(|(node, _)| node)
    }
}

impl fmt::Display for ProviderKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for ProviderKey {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&self.0)
    }
}

/// Counts the accepted handshakes of an edge process; assigned by the edge at accept (G41). First is 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ConnectionGeneration(pub u64);

impl fmt::Display for ConnectionGeneration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

macro_rules! uuid_type {
    ($(#[$meta:meta])* $name:ident) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub uuid::Uuid);

        impl $name {
            pub fn parse(text: &str) -> Option<Self> {
                uuid::Uuid::try_parse(text).ok().map(Self)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut buf = uuid::Uuid::encode_buffer();
                f.write_str(self.0.simple().encode_lower(&mut buf))
            }
        }
    };
}

uuid_type!(
    /// One client request (004 `run_id`); a UUIDv7.
    RunId
);
uuid_type!(
    /// One dispatch of a request to one provider (004 `attempt_id`); a UUIDv7.
    AttemptId
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded_and_plain() {
        assert!(NodeId::new("gpu-1.eu_west").is_ok());
        for bad in ["", "a/b", "a b", "é", &"x".repeat(65)] {
            assert_eq!(ProviderId::new(bad), Err(BadName), "{bad}");
        }
    }

    #[test]
    fn provider_keys_carry_the_node_unless_embedded() {
        let p = ProviderId::new("vllm").unwrap();
        assert_eq!(
            ProviderKey::new(&NodeId::new("gpu-1").unwrap(), &p).as_str(),
            "gpu-1/vllm"
        );
        assert_eq!(ProviderKey::new(&NodeId::embedded(), &p).as_str(), "vllm");
        assert_eq!(ProviderKey::parse("gpu-1/vllm").unwrap().node(), Some("gpu-1"));
        assert_eq!(ProviderKey::parse("vllm").unwrap().node(), None);
        assert!(ProviderKey::parse("a/b/c").is_err());
    }
}
