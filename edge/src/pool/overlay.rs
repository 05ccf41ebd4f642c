//! The runtime health overlay (004, G35): what proven evidence says of a provider, apart from its configuration. Pure.
//!
//! Keyed by connection generation and provider; the key holds the node. Only a stall lowers, only a later probe of the
//! target that lowered raises again. It projects; it never retries, never ends a request and never holds a place.

use std::collections::BTreeMap;
use std::sync::Arc;

use iop_shared::execution::{AttemptFence, EvidenceDecision, EvidenceSource, FailureCode, ProviderHealth};
use iop_shared::ids::{ConnectionGeneration, ProviderKey};
use iop_shared::wire::command::CapabilitiesResult;
use iop_shared::wire::terminal::StallFailure;

/// One piece of evidence, as it was received.
#[derive(Debug, Clone, Copy)]
pub(super) struct Evidence<'a> {
    pub(super) source: EvidenceSource,
    /// It names what it was asked of: the lease's run, attempt, adapter and target, or the command's provider and a target
    /// that is still mapped there.
    pub(super) bound: bool,
    /// It came over the connection that is the provider's now.
    pub(super) current: bool,
    /// What was stalled or probed.
    pub(super) target: &'a Arc<str>,
    /// `None`: absent, malformed or contradictory.
    pub(super) reading: Option<Reading>,
}

/// What well-formed evidence says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reading {
    /// 004: without a confirmed fence a stall proves nothing. A probe holds nothing that would need one.
    pub(super) fence: AttemptFence,
    /// 004 `health_observation_seq`; absent where the node has no session.
    pub(super) sequence: Option<u64>,
    pub(super) health: ProviderHealth,
}

impl Reading {
    /// `None`: another failure, or a pair that 004 does not know.
    pub(super) fn of_stall(failure: &StallFailure) -> Option<Self> {
        let sound = failure.failure_code == FailureCode::ResponseStalled
            && failure.liveness_classification.health() == failure.provider_health;
        sound.then_some(Self {
            fence: failure.attempt_fence,
            sequence: failure.health_observation_seq,
            health: failure.provider_health,
        })
    }

    pub(super) fn of_probe(result: &CapabilitiesResult) -> Self {
        Self {
            fence: AttemptFence::Confirmed,
            sequence: Some(result.health_observation_seq),
            health: result.provider_status,
        }
    }
}

/// What the overlay made of evidence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) decision: EvidenceDecision,
    /// Before it; `unknown` where the connection is no longer the provider's.
    pub(super) from: ProviderHealth,
    /// After it.
    pub(super) to: ProviderHealth,
}

impl Verdict {
    pub(super) fn changed(&self) -> bool {
        self.from != self.to
    }
}

#[derive(Debug, Default)]
struct Known {
    /// The newest accepted one.
    sequence: u64,
    /// The target that lowered it and has to answer again.
    lowered_by: Option<Arc<str>>,
    /// Lowered now, or once.
    shown: bool,
}

impl Known {
    fn health(&self) -> ProviderHealth {
        if self.lowered_by.is_some() {
            ProviderHealth::Unavailable
        } else {
            ProviderHealth::Available
        }
    }

    /// Only a stall lowers, only a probe raises. A second stall does not change which target has to answer.
    fn learn(&mut self, evidence: &Evidence<'_>, health: ProviderHealth) {
        match (evidence.source, health) {
            (EvidenceSource::Stall, ProviderHealth::Unavailable) => {
                self.lowered_by.get_or_insert_with(|| evidence.target.clone());
                self.shown = true;
            }
            (EvidenceSource::Probe, ProviderHealth::Available) => self.lowered_by = None,
            (EvidenceSource::Stall, ProviderHealth::Available | ProviderHealth::Unknown)
            | (EvidenceSource::Probe, ProviderHealth::Unavailable | ProviderHealth::Unknown)
            | (EvidenceSource::Unknown, _) => {}
        }
    }
}

/// The sequence and the health that are accepted, or why nothing is: the first test that fails names the decision.
fn weigh(known: Option<&Known>, evidence: &Evidence<'_>) -> Result<(u64, ProviderHealth), EvidenceDecision> {
    let lowered_by = known.and_then(|k| k.lowered_by.as_ref());
    let of_another =
        evidence.source == EvidenceSource::Probe && lowered_by.is_some_and(|t| t != evidence.target);
    if !evidence.bound || of_another {
        return Err(EvidenceDecision::RejectedBinding);
    }
    if !evidence.current {
        return Err(EvidenceDecision::RejectedStale);
    }
    let Some(Reading {
        fence: AttemptFence::Confirmed,
        sequence: Some(sequence),
        health,
    }) = evidence.reading
    else {
        return Err(EvidenceDecision::RejectedAmbiguous);
    };
    if evidence.source == EvidenceSource::Unknown {
        return Err(EvidenceDecision::RejectedAmbiguous);
    }
    if sequence <= known.map_or(0, |k| k.sequence) {
        return Err(EvidenceDecision::RejectedStale);
    }
    if health == ProviderHealth::Unknown {
        return Err(EvidenceDecision::Inconclusive);
    }
    Ok((sequence, health))
}

/// What is known of the providers of all live generations.
#[derive(Debug, Default)]
pub(super) struct Overlay {
    known: BTreeMap<(ConnectionGeneration, ProviderKey), Known>,
}

impl Overlay {
    /// Weighs one piece of evidence, and remembers what was accepted.
    pub(super) fn take(
        &mut self,
        generation: ConnectionGeneration,
        provider: &ProviderKey,
        evidence: &Evidence<'_>,
    ) -> Verdict {
        let key = (generation, provider.clone());
        let known = self.known.get(&key);
        let from = if evidence.current {
            known.map_or(ProviderHealth::Available, Known::health)
        } else {
            ProviderHealth::Unknown
        };
        match weigh(known, evidence) {
            Err(decision) => Verdict {
                decision,
                from,
                to: from,
            },
            Ok((sequence, health)) => {
                let known = self.known.entry(key).or_default();
                known.sequence = sequence;
                known.learn(evidence, health);
                Verdict {
                    decision: EvidenceDecision::Applied,
                    from,
                    to: known.health(),
                }
            }
        }
    }

    /// The target that lowered a provider; `None`: it is not lowered.
    pub(super) fn lowered_by(
        &self,
        generation: ConnectionGeneration,
        provider: &ProviderKey,
    ) -> Option<&Arc<str>> {
        self.known
            .get(&(generation, provider.clone()))?
            .lowered_by
            .as_ref()
    }

    /// What a snapshot shows: health and newest accepted sequence; `None`: never lowered.
    pub(super) fn shown(
        &self,
        generation: ConnectionGeneration,
        provider: &ProviderKey,
    ) -> Option<(ProviderHealth, u64)> {
        let known = self.known.get(&(generation, provider.clone()))?;
        known.shown.then(|| (known.health(), known.sequence))
    }

    /// A generation is gone; the next one starts clean.
    pub(super) fn forget(&mut self, generation: ConnectionGeneration) {
        self.known.retain(|(of, _), _| *of != generation);
    }
}

#[cfg(test)]
mod tests;
