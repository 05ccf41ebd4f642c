//! The edge of iop: OpenAI clients in front, nodes behind, one StreamGate per request between them.

pub mod error;
pub mod metrics;
pub mod tasks;
