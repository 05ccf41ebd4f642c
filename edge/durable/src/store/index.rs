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
        // Its deadline ends a waiting run; an unknown effect outlives it.
        Status::Waiting => [head.waiting.as_ref().and_then(|w| w.due_at), head.deadline]
            .into_iter()
            .flatten()
            .min(),
        Status::Ambiguous => head.waiting.as_ref().and_then(|w| w.due_at),
        Status::Succeeded | Status::Failed | Status::Cancelled | Status::Exhausted | Status::Transferred => {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::Payload;
    use crate::record::{Waiting, WaitingKind, WaitingOn};
    use crate::testing::build;

    /// Every status, with and without a timer and a post, over every kind of column content.
    #[test]
    fn the_index_is_derived_from_the_head() {
        let now = build::at(5_000);
        let (past, written, timer) = (build::at(1_000), build::at(2_000), build::at(9_000));
        for status in Status::ALL {
            for (timed, signal) in [(false, 0), (true, 0), (false, 3), (true, 3)] {
                let mut head = build::head(&build::run("r"), &Payload::new("s"), written);
                head.status = *status;
                head.waiting = Some(Waiting {
                    reason: "timer".to_owned(),
                    due_at: timed.then_some(timer),
                    on: vec![WaitingOn {
                        kind: WaitingKind::Timer,
                        id: "w".to_owned(),
                        node: build::node("n"),
                        key: "k".to_owned(),
                    }],
                });
                let of = |found| due_at(&head, signal, found, now);
                let parked = matches!(status, Status::Waiting | Status::Ambiguous);
                if status.is_terminal() {
                    assert_eq!([of(None), of(Some(past)), of(Some(timer))], [None; 3]);
                } else if parked && signal == 0 {
                    let right = timed.then_some(timer);
                    assert_eq!([of(None), of(Some(past)), of(Some(timer))], [right; 3]);
                } else {
                    let at_once = [Some(written), Some(past), Some(written)];
                    assert_eq!([of(None), of(Some(past)), of(Some(timer))], at_once);
                    assert_eq!(of(Some(now)), Some(now));
                }
                // Twice is the same as once.
                for found in [None, Some(past), Some(now), Some(timer)] {
                    assert_eq!(of(of(found)), of(found));
                }
            }
        }
    }
}
