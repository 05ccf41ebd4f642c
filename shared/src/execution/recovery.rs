//! What the edge makes of a stall: evidence for the overlay, eligibility for a replay, and what came of it (004).

use crate::label_enum;

label_enum! {
    /// Where evidence about a provider's health comes from.
    pub enum EvidenceSource {
        Stall => "stall",
        Probe => "probe",
        Unknown => "unknown",
    }
}

label_enum! {
    /// What the overlay made of one piece of evidence.
    pub enum EvidenceDecision {
        /// Accepted, whether or not it changed anything.
        Applied => "applied",
        /// Not newer than what is known, or of a connection that is no longer the provider's.
        RejectedStale => "rejected_stale",
        /// Of another run, attempt, adapter or target than the lease's.
        RejectedBinding => "rejected_binding",
        /// Absent, malformed, contradictory, or without a confirmed fence.
        RejectedAmbiguous => "rejected_ambiguous",
        /// In order, and says nothing: `unknown`.
        Inconclusive => "inconclusive",
    }
}

label_enum! {
    /// How much of the answer the client has (G52).
    pub enum CommitState {
        TransportUncommitted => "transport_uncommitted",
        StreamOpen => "stream_open",
        TerminalCommitted => "terminal_committed",
        Unknown => "unknown",
    }
}

label_enum! {
    /// Whether a stalled request may be replayed, and what forbids it.
    pub enum Eligibility {
        Eligible => "eligible",
        /// The stall is not proven to be this attempt's.
        NoOwner => "no_owner",
        PostCommit => "post_commit",
        UnconfirmedFence => "unconfirmed_fence",
        CallerCancelled => "caller_cancelled",
        ToolSideEffect => "tool_side_effect",
        BudgetExhausted => "budget_exhausted",
        NoCandidate => "no_candidate",
        SameProviderForbidden => "same_provider_forbidden",
        /// No snapshot of the request, or replay is turned off at its provider.
        Other => "other",
    }
}

label_enum! {
    /// What came of an eligible cycle; at most one each.
    pub enum RecoveryResult {
        Redispatched => "redispatched",
        PlanRejected => "plan_rejected",
        AbortFailed => "abort_failed",
        RebuildFailed => "rebuild_failed",
        DispatchFailed => "dispatch_failed",
        /// No provider was to be had in time.
        NotSelected => "not_selected",
        /// The request ended first.
        Terminal => "terminal",
        Other => "other",
    }
}

label_enum! {
    /// The request-local phase of a liveness cycle.
    pub enum RecoveryPhase {
        Idle => "idle",
        EligiblePending => "eligible_pending",
    }
}
