//! Provider health: three types, so that 004's two names for three things cannot be swapped (gateway.md §6).

use crate::label_enum;

label_enum! {
    /// What the exact-target probe found.
    pub enum ProbeOutcome {
        Available => "available",
        Unavailable => "unavailable",
        Timeout => "timeout",
        Error => "error",
        Unsupported => "unsupported",
        Unknown => "unknown",
        IdentityMismatch => "identity_mismatch",
    }
}

label_enum! {
    /// What a stall is called in `liveness_classification`.
    pub enum LivenessClassification {
        RequestStalled => "request_stalled",
        ProviderUnhealthy => "provider_unhealthy",
        HealthUnknown => "health_unknown",
    }
}

label_enum! {
    /// What a provider is called in `provider_health`.
    pub enum ProviderHealth {
        Available => "available",
        Unavailable => "unavailable",
        Unknown => "unknown",
    }
}

label_enum! {
    /// Whether the node saw its hold on the provider's connection end within the close grace (004).
    pub enum AttemptFence {
        Confirmed => "confirmed",
        Unconfirmed => "unconfirmed",
        Unknown => "unknown",
    }
}

label_enum! {
    /// Which way an attempt's bytes take (004).
    pub enum ExecutionPath {
        Normalized => "normalized",
        ProviderTunnel => "provider_tunnel",
        Unknown => "unknown",
    }
}

impl ProbeOutcome {
    /// 004: only an exact, validated answer says anything; everything else fails closed.
    pub const fn classification(self) -> LivenessClassification {
        match self {
            ProbeOutcome::Available => LivenessClassification::RequestStalled,
            ProbeOutcome::Unavailable => LivenessClassification::ProviderUnhealthy,
            ProbeOutcome::Timeout
            | ProbeOutcome::Error
            | ProbeOutcome::Unsupported
            | ProbeOutcome::Unknown
            | ProbeOutcome::IdentityMismatch => LivenessClassification::HealthUnknown,
        }
    }

    pub const fn health(self) -> ProviderHealth {
        self.classification().health()
    }
}

impl LivenessClassification {
    /// The pair of 004: exactly request_stalled/available, provider_unhealthy/unavailable, health_unknown/unknown.
    pub const fn health(self) -> ProviderHealth {
        match self {
            LivenessClassification::RequestStalled => ProviderHealth::Available,
            LivenessClassification::ProviderUnhealthy => ProviderHealth::Unavailable,
            LivenessClassification::HealthUnknown => ProviderHealth::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_outcomes_leave_unknown() {
        for o in ProbeOutcome::ALL {
            let want = match o {
                ProbeOutcome::Available => ("request_stalled", "available"),
                ProbeOutcome::Unavailable => ("provider_unhealthy", "unavailable"),
                ProbeOutcome::Timeout
                | ProbeOutcome::Error
                | ProbeOutcome::Unsupported
                | ProbeOutcome::Unknown
                | ProbeOutcome::IdentityMismatch => ("health_unknown", "unknown"),
            };
            assert_eq!((o.classification().as_str(), o.health().as_str()), want);
        }
    }
}
