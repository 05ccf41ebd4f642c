//! What went wrong inside a run, as it is stored and told (D14): closed kinds, the original message kept (D236).

use serde::{Deserialize, Serialize};

/// Kinds of failure (D14, durable-api §8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    Timeout,
    RateLimited,
    Auth,
    Configuration,
    Unavailable,
    ProviderError,
    ToolError,
    Verification,
    InvalidInput,
    Refused,
    Internal,
}

impl FailureKind {
    pub const ALL: [Self; 11] = [
        Self::Timeout,
        Self::RateLimited,
        Self::Auth,
        Self::Configuration,
        Self::Unavailable,
        Self::ProviderError,
        Self::ToolError,
        Self::Verification,
        Self::InvalidInput,
        Self::Refused,
        Self::Internal,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::RateLimited => "rate_limited",
            Self::Auth => "auth",
            Self::Configuration => "configuration",
            Self::Unavailable => "unavailable",
            Self::ProviderError => "provider_error",
            Self::ToolError => "tool_error",
            Self::Verification => "verification",
            Self::InvalidInput => "invalid_input",
            Self::Refused => "refused",
            Self::Internal => "internal",
        }
    }

    /// Whether a run that failed with this may be resumed (D22).
    pub const fn resumable(self) -> bool {
        match self {
            Self::Timeout | Self::RateLimited | Self::Unavailable | Self::ProviderError => true,
            Self::Auth
            | Self::Configuration
            | Self::ToolError
            | Self::Verification
            | Self::InvalidInput
            | Self::Refused
            | Self::Internal => false,
        }
    }
}

/// A failure of a node, a step or an activity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{code}: {message}")]
pub struct Failure {
    pub kind: FailureKind,
    /// A word of the host's own, such as `response_stalled`.
    pub code: String,
    /// For people; never a secret, never a payload.
    pub message: String,
    /// Whether the same call may succeed later. Read by retry policies only.
    pub retryable: bool,
}

impl Failure {
    /// A failure whose code is its kind and that is retryable when its kind is resumable.
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            code: kind.as_str().to_owned(),
            message: message.into(),
            retryable: kind.resumable(),
        }
    }

    #[must_use]
    pub fn code(mut self, code: impl Into<String>) -> Self {
        self.code = code.into();
        self
    }

    #[must_use]
    pub fn retryable(mut self, retryable: bool) -> Self {
        self.retryable = retryable;
        self
    }
}
