//! The exact-target probe (004 `ProbeHealth`): bounded, fail-closed, evidence only.
//!
//! It changes no request, no place and no advertisement.

use std::time::Duration;

use iop_shared::execution::ProbeOutcome;

use crate::providers::registry::Slot;

/// 004: five seconds, its own and nobody else's.
const BOUND: Duration = Duration::from_secs(5);

/// Asks the provider whether it serves exactly this target now.
pub(crate) async fn health(slot: &Slot, target: &str) -> ProbeOutcome {
    if target.is_empty() {
        return ProbeOutcome::IdentityMismatch;
    }
    tokio::time::timeout(BOUND, slot.backend.probe(target))
        .await
        .unwrap_or(ProbeOutcome::Timeout)
}
