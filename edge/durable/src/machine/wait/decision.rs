//! The ledger of a wait: what a decision's record says, and the digest that tells the same decision from another with its id.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::{Cancellation, Delivery, Verdict};
use crate::ids::{CorrelationId, DecisionId, Revision, digest_of};
use crate::payload::Digest;
use crate::record::{DecisionRecord, Scope, WaitLabels, WaitRecord};
use crate::time::Timestamp;

/// The body of a `DecisionRecord` in a wait's scope, as JSON (D90, D168). A payload stands here by length and digest only: the
/// winner's bytes are in the wait.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "act", rename_all = "snake_case", deny_unknown_fields)]
pub enum WaitDecision {
    Deliver {
        verdict: Verdict,
        generation: u32,
        /// Of the head it met.
        revision: Revision,
        by: Option<String>,
        correlation_id: CorrelationId,
        /// As the sender gave them.
        labels: Option<WaitLabels>,
        payload_bytes: u64,
        /// `sha256:…`.
        payload_digest: String,
    },
    Cancel {
        generation: u32,
        /// Of the head it met.
        revision: Revision,
        by: Option<String>,
        reason: String,
        evidence: String,
    },
}

impl WaitDecision {
    pub(super) fn of_delivery(wait: &WaitRecord, delivery: &Delivery, verdict: Verdict) -> Self {
        Self::Deliver {
            verdict,
            generation: wait.generation,
            revision: delivery.revision,
            by: delivery.by.clone(),
            correlation_id: delivery.correlation.clone(),
            labels: delivery.labels.clone(),
            payload_bytes: delivery.payload.bytes().len() as u64,
            payload_digest: delivery.payload.digest_text(),
        }
    }

    pub(super) fn of_cancellation(wait: &WaitRecord, cancellation: &Cancellation) -> Self {
        Self::Cancel {
            generation: wait.generation,
            revision: cancellation.revision,
            by: cancellation.by.clone(),
            reason: cancellation.reason.clone(),
            evidence: cancellation.evidence.clone(),
        }
    }

    pub(super) fn record(
        &self,
        wait: &WaitRecord,
        id: &DecisionId,
        content: Digest,
        now: Timestamp,
    ) -> Result<DecisionRecord, serde_json::Error> {
        Ok(DecisionRecord {
            run: wait.run.clone(),
            scope: Scope::Wait(wait.id.clone()),
            id: id.clone(),
            content,
            body: serde_json::to_vec(self).map(Bytes::from)?,
            created_at: now,
        })
    }

    /// # Errors
    /// When the body is not that of a wait's decision.
    pub fn decode(body: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(body)
    }
}

/// Whether a record is the decision of this id in this wait's ledger.
pub(super) fn belongs(record: &DecisionRecord, wait: &WaitRecord, id: &DecisionId) -> bool {
    let scope = Scope::Wait(wait.id.clone());
    record.run == wait.run && record.scope == scope && record.id == *id
}

/// Correlation, labels and payload: what the sender says. Who sent it, when, and what it met may differ between two tries.
pub(super) fn content_of_delivery(delivery: &Delivery) -> Digest {
    let labels = delivery.labels.as_ref().map_or([""; 3], |labels| {
        [
            labels.matcher.as_str(),
            labels.payload.as_str(),
            labels.continuation.as_str(),
        ]
    });
    digest_of(&[
        b"deliver",
        delivery.correlation.as_str().as_bytes(),
        if delivery.labels.is_some() { b"1" } else { b"0" },
        labels[0].as_bytes(),
        labels[1].as_bytes(),
        labels[2].as_bytes(),
        delivery.payload.digest(),
    ])
}

/// Reason and evidence: what the operator says.
pub(super) fn content_of_cancellation(cancellation: &Cancellation) -> Digest {
    digest_of(&[
        b"cancel",
        cancellation.reason.as_bytes(),
        cancellation.evidence.as_bytes(),
    ])
}
