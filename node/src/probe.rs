//! The exact-target probe (004 `ProbeHealth`): bounded, fail-closed, evidence only.
//!
//! It changes no request, no place and no advertisement; a provider generates nothing for it.

use std::future::Future;
use std::time::Duration;

use iop_shared::execution::ProbeOutcome;
use tokio::time::Instant;

use crate::providers::registry::Slot;

/// 004: five seconds, its own and nobody else's.
const BOUND: Duration = Duration::from_secs(5);

/// Who is asked for what, and who answered for what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The provider's id on this node.
    pub(crate) instance: String,
    /// Adapter kind as advertised.
    pub(crate) adapter: String,
    pub(crate) target: String,
}

/// What a provider says of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Available,
    Unavailable,
    Unknown,
}

/// A provider's answer to a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProbeReport {
    pub(crate) identity: Identity,
    pub(crate) status: Status,
}

/// Why a probe has no report. An error leaves no room for a status, so it cannot be outvoted by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProbeError {
    Timeout,
    /// No connection, no success, nothing readable.
    Failed,
    /// The provider has no way to tell.
    Unsupported,
}

/// An adapter that can tell whether it serves a target.
pub(crate) trait ProviderProber {
    /// Unbounded in time, the caller bounds it.
    ///
    /// # Errors
    /// Whatever kept the provider from a definite answer.
    fn probe(&self, target: &str) -> impl Future<Output = Result<ProbeReport, ProbeError>> + Send;
}

/// Asks the provider whether it serves exactly this target now.
pub(crate) async fn health(slot: &Slot, target: &str) -> ProbeOutcome {
    let asked = Identity {
        instance: slot.id.to_string(),
        adapter: slot.adapter.as_str().to_owned(),
        target: target.to_owned(),
    };
    let answer = if asked.is_whole() {
        bounded(slot.backend.probe(target)).await
    } else {
        // Nobody can be asked for nothing.
        Err(ProbeError::Failed)
    };
    classify(&asked, answer.as_ref())
}

/// An answer that comes with the deadline or after it is none, even if the timer was late to see it.
async fn bounded(
    probe: impl Future<Output = Result<ProbeReport, ProbeError>>,
) -> Result<ProbeReport, ProbeError> {
    let deadline = Instant::now() + BOUND;
    match tokio::time::timeout_at(deadline, probe).await {
        Ok(answer) if Instant::now() < deadline => answer,
        Ok(_) | Err(_) => Err(ProbeError::Timeout),
    }
}

impl Identity {
    fn is_whole(&self) -> bool {
        !self.instance.is_empty() && !self.adapter.is_empty() && !self.target.is_empty()
    }
}

/// 004 `ClassifyProbeOutcome`: an error beats everything, then the identity must be exact, then the status counts. Pure.
pub(crate) fn classify(asked: &Identity, answer: Result<&ProbeReport, &ProbeError>) -> ProbeOutcome {
    if !asked.is_whole() {
        return ProbeOutcome::IdentityMismatch;
    }
    match answer {
        Err(ProbeError::Timeout) => ProbeOutcome::Timeout,
        Err(ProbeError::Failed) => ProbeOutcome::Error,
        Err(ProbeError::Unsupported) => ProbeOutcome::Unsupported,
        Ok(report) if report.identity != *asked => ProbeOutcome::IdentityMismatch,
        Ok(report) => match report.status {
            Status::Available => ProbeOutcome::Available,
            Status::Unavailable => ProbeOutcome::Unavailable,
            Status::Unknown => ProbeOutcome::Unknown,
        },
    }
}

#[cfg(test)]
mod tests {
    use iop_shared::execution::ProviderHealth;

    use super::*;

    fn identity(instance: &str, adapter: &str, target: &str) -> Identity {
        Identity {
            instance: instance.into(),
            adapter: adapter.into(),
            target: target.into(),
        }
    }

    const STATUSES: [(Status, ProbeOutcome); 3] = [
        (Status::Available, ProbeOutcome::Available),
        (Status::Unavailable, ProbeOutcome::Unavailable),
        (Status::Unknown, ProbeOutcome::Unknown),
    ];

    #[test]
    fn only_an_exact_answer_of_whom_was_asked_says_anything() {
        let triples = || {
            ["", "a", "b"]
                .into_iter()
                .flat_map(|i| ["", "a", "b"].map(move |a| (i, a)))
                .flat_map(|(i, a)| ["", "a", "b"].map(move |t| (i, a, t)))
        };
        for (i, a, t) in triples() {
            let asked = identity(i, a, t);
            let whole = !i.is_empty() && !a.is_empty() && !t.is_empty();
            for (e, outcome) in [
                (ProbeError::Timeout, ProbeOutcome::Timeout),
                (ProbeError::Failed, ProbeOutcome::Error),
                (ProbeError::Unsupported, ProbeOutcome::Unsupported),
            ] {
                let want = if whole {
                    outcome
                } else {
                    ProbeOutcome::IdentityMismatch
                };
                assert_eq!(classify(&asked, Err(&e)), want);
                assert_eq!(want.health(), ProviderHealth::Unknown);
            }
            for (ri, ra, rt) in triples() {
                for (status, outcome) in STATUSES {
                    let report = ProbeReport {
                        identity: identity(ri, ra, rt),
                        status,
                    };
                    let want = if whole && (i, a, t) == (ri, ra, rt) {
                        outcome
                    } else {
                        ProbeOutcome::IdentityMismatch
                    };
                    assert_eq!(classify(&asked, Ok(&report)), want, "{asked:?} {report:?}");
                }
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_at_the_deadline_or_after_it_is_none() {
        let report = ProbeReport {
            identity: identity("p", "openai", "m"),
            status: Status::Available,
        };
        for (after_ms, in_time) in [(0, true), (4999, true), (5000, false), (9000, false)] {
            let report = report.clone();
            let begun = Instant::now();
            let answer = bounded(async move {
                tokio::time::sleep(Duration::from_millis(after_ms)).await;
                Ok(report)
            })
            .await;
            assert_eq!(answer.is_ok(), in_time, "{after_ms}");
            assert_eq!(answer.err(), (!in_time).then_some(ProbeError::Timeout));
            assert!(begun.elapsed() <= BOUND + Duration::from_millis(1));
        }
        // A probe that blocks its thread past the deadline and then answers was still too late.
        let late = bounded(async move {
            tokio::time::advance(Duration::from_secs(6)).await;
            Ok(report)
        });
        assert_eq!(late.await, Err(ProbeError::Timeout));
    }
}
