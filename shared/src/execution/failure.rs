//! What a node can fail with: a closed list that crosses the link as `iop-error-code` (link.md).

use crate::label_enum;

label_enum! {
    /// Typed failure of one attempt, decided on the node.
    pub enum FailureCode {
        /// The provider's capacity is taken; not a failure, the edge queues again (G32).
        Capacity => "capacity",
        /// The node takes no new work.
        Draining => "draining",
        /// No provider of that id on this node.
        ProviderMissing => "provider_missing",
        /// The provider exists and cannot serve this endpoint or is switched off.
        ProviderUnavailable => "provider_unavailable",
        /// The provider does not serve that target.
        TargetMissing => "target_missing",
        /// The tunnel request itself is malformed.
        InvalidRequest => "invalid_request",
        /// No connection to the provider: refused, unreachable, TLS, timeout.
        ConnectFailed => "connect_failed",
        /// The provider hung up before its message ended, or its message broke HTTP.
        ProviderCut => "provider_cut",
        /// No progress for the stall timeout (004).
        ResponseStalled => "response_stalled",
        /// A defect of the node.
        Internal => "internal",
    }
}

impl FailureCode {
    /// Whether the provider was reached at all: a refusal before dispatch is no attempt (gateway.md §13, Budgets).
    pub const fn is_attempt(self) -> bool {
        match self {
            FailureCode::Capacity | FailureCode::Draining => false,
            FailureCode::ProviderMissing
            | FailureCode::ProviderUnavailable
            | FailureCode::TargetMissing
            | FailureCode::InvalidRequest
            | FailureCode::ConnectFailed
            | FailureCode::ProviderCut
            | FailureCode::ResponseStalled
            | FailureCode::Internal => true,
        }
    }
}
