//! Opaque bytes of the host: state, inputs, outputs. Never parsed, never converted, compared by digest (D259).

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

/// SHA-256 of some bytes.
pub type Digest = [u8; 32];

/// Bytes with their SHA-256.
#[derive(Clone)]
pub struct Payload {
    bytes: Bytes,
    digest: Digest,
    stored: bool,
}

impl Payload {
    pub fn new(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        let digest = Sha256::digest(&bytes).into();
        Self {
            bytes,
            digest,
            stored: false,
        }
    }

    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    pub fn digest(&self) -> &Digest {
        &self.digest
    }

    /// `sha256:` and the digest in hex, as in the REST objects.
    pub fn digest_text(&self) -> String {
        format!("sha256:{}", crate::ids::hex(&self.digest))
    }

    /// Whether the store already holds these bytes for this run, so that a commit need not carry them again. A hint: sending
    /// them twice is right too.
    pub(crate) fn is_stored(&self) -> bool {
        self.stored
    }

    pub(crate) fn mark_stored(&mut self) {
        self.stored = true;
    }
}

impl PartialEq for Payload {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl Eq for Payload {}

impl std::fmt::Debug for Payload {
    /// Length and digest only: the bytes are the host's.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Payload({} bytes, {})", self.bytes.len(), self.digest_text())
    }
}
