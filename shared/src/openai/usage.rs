//! Token usage as providers report it, in both shapes (Chat: `prompt_tokens`; Responses: `input_tokens`).

use serde::{Deserialize, Serialize};

/// Tokens of one attempt (G14). All counts are tokens; absent in the provider's answer means 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub input: u64,
    pub output: u64,
    /// Part of `input` that the provider served from its prompt cache.
    pub cached: u64,
    /// Part of `output` spent on reasoning.
    pub reasoning: u64,
}
