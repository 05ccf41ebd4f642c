use iop_shared::execution::Eligibility;

use super::*;

const LIMIT: Duration = Duration::from_secs(2);
const MS: Duration = Duration::from_millis(1);
const PATH: ExecutionPath = ExecutionPath::ProviderTunnel;

/// Rows of callers that left, after an attempt that begins now and is dropped when `life` is over.
async fn rows_after(life: impl AsyncFnOnce(&mut AttemptGuard)) -> u64 {
    let metrics = Arc::new(Metrics::new().unwrap());
    let mut guard = AttemptGuard::new(metrics.clone(), true, PATH, LIMIT, Instant::now());
    life(&mut guard).await;
    drop(guard);
    let row = (
        PATH,
        ProviderHealth::Unknown,
        CommitState::TransportUncommitted,
        Eligibility::CallerCancelled,
    );
    metrics.recovery_eligibility.at(row).get()
}

#[tokio::test(start_paused = true)]
async fn who_leaves_is_counted_from_when_a_stall_must_have_been_claimed() {
    for (stays, rows) in [
        (Duration::ZERO, 0),
        (LIMIT - MS, 0),
        // The node's clock may not have come to it.
        (LIMIT, 0),
        (LIMIT + CLAIMED - MS, 0),
        (LIMIT + CLAIMED, 1),
        (LIMIT * 2, 1),
    ] {
        let counted = rows_after(async |_| tokio::time::sleep(stays).await).await;
        assert_eq!(counted, rows, "after {stays:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_clock_of_who_leaves_begins_anew_with_each_sign_of_the_provider() {
    for (rest, rows) in [(LIMIT, 0), (LIMIT + CLAIMED, 1)] {
        let counted = rows_after(async |guard| {
            for _ in 0..3 {
                tokio::time::sleep(LIMIT - MS).await;
                guard.progress(Instant::now());
            }
            tokio::time::sleep(rest).await;
        });
        assert_eq!(counted.await, rows, "{rest:?} after the last one");
    }
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_has_ended_or_given_content_leaves_no_such_row() {
    let settled = async |guard: &mut AttemptGuard| {
        guard.settle(AttemptResult::ResponseStalled);
        tokio::time::sleep(LIMIT * 2).await;
    };
    assert_eq!(rows_after(settled).await, 0, "the stall was told");
    let committed = async |guard: &mut AttemptGuard| {
        guard.committed();
        tokio::time::sleep(LIMIT * 2).await;
    };
    assert_eq!(rows_after(committed).await, 0, "it is the stream that ends");
}
