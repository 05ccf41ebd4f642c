//! Definitions as a store keeps them: immutable versions of a body under a kind and a name, and one head per name that says who
//! declared it last and whether it is withdrawn. What a body means is the front-end's affair.

use bytes::Bytes;

use crate::ids::hex;
use crate::payload::Payload;
use crate::record::words;
use crate::store::StoreError;
use crate::time::Timestamp;

/// The kinds there are: the front-ends, and what starts their runs.
pub(crate) const KINDS: [&str; 3] = ["agent", "flow", "trigger"];

words! {
    /// Who declared a definition last.
    pub enum Origin {
        Config => "config",
        Api => "api",
    }
}

/// A body to be the newest version of its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Define {
    /// `agent`, `flow` or `trigger`.
    pub kind: String,
    /// 1 to 256 bytes, without U+0000.
    pub name: String,
    pub origin: Origin,
    /// SHA-256 of the body's bytes: 64 lower-case hex digits.
    pub digest: String,
    /// A JSON text; kept byte for byte.
    pub body: Bytes,
}

/// What became of it. Either way the name is there, not withdrawn, and of this origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Defined {
    /// A version was added: the newest plus one, from 1.
    New { version: u64 },
    /// The newest version has this digest already.
    Same { version: u64 },
}

impl Defined {
    pub const fn version(self) -> u64 {
        match self {
            Self::New { version } | Self::Same { version } => version,
        }
    }
}

/// One version of a definition, with what its name says at the moment it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Definition {
    pub kind: String,
    pub name: String,
    /// From 1 without gaps within the name.
    pub version: u64,
    /// 64 lower-case hex digits.
    pub digest: String,
    pub body: Bytes,
    /// Of the name.
    pub origin: Origin,
    /// Of the name.
    pub withdrawn: bool,
    /// When this version was written, by the store's clock.
    pub created_at: Timestamp,
}

/// Whether this is the digest of the body, as text.
pub(crate) fn is_digest_of(digest: &str, body: &Bytes) -> bool {
    hex(Payload::new(body.clone()).digest()) == digest
}

impl Definition {
    /// # Errors
    /// `corrupt` when the body is not what was written.
    pub(crate) fn verified(self) -> Result<Self, StoreError> {
        if is_digest_of(&self.digest, &self.body) {
            Ok(self)
        } else {
            Err(StoreError::corrupt(format!(
                "definition: version {} does not have its digest",
                self.version
            )))
        }
    }
}
