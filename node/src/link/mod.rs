//! Links to edges: dialed, upgraded, then served as HTTP/2 with the roles turned (docs/link.md).
//!
//! `backoff` and `refusal` decide (pure); `dial`, `tls` and `session` move bytes.
