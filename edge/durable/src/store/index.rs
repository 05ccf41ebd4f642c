//! The one index column that is not a copy of a sealed one, derived anew: what `rebuild_index` writes (D231).

use crate::record::{RunHead, Status};
use crate::time::Timestamp;

/// When a run can be claimed, from its sealed head and its inbox. `found` is what the column has and stays when it is right.
///
/// Queued and running runs are claimable at once, ended ones never. A waiting run has its timer. Once something was posted to
/// it, it is claimable: waking it once too often costs a claim, once too few loses a wake-up.
pub(crate) fn due_at(
    head: &RunHead,
    signal: u64,
    found: Option<Timestamp>,
    now: Timestamp,
) -> Option<Timestamp> {
    let at_once = match found {
        Some(at) if at <= now => Some(at),
        Some(_) | None => Some(head.updated_at),
    };
    match head.status {
        Status::Queued | Status::Running => at_once,
        Status::Waiting | Status::Ambiguous if signal > 0 => at_once,
        Status::Waiting | Status::Ambiguous => head.waiting.as_ref().and_then(|w| w.due_at),
        Status::Succeeded | Status::Failed | Status::Cancelled | Status::Exhausted | Status::Transferred => {
            None
        }
    }
}
