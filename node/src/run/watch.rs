//! A watchdog with a clock: polled inline where the provider is polled, no task and no channel stands between.
//!
//! Costs one reading of the clock per wait. The alarm is made at the first wait and moved only when it goes off, so a
//! chunk resets no timer.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use iop_shared::execution::Disposition;
use tokio::task::unconstrained;
use tokio::time::{Instant, Sleep, sleep_until};

use super::watchdog::{StallClaim, Verdict, Watchdog};

/// The watchdog of one attempt and its alarm.
pub(crate) struct Watch {
    dog: Watchdog,
    /// Never set later than the watchdog's deadline: deadlines only grow.
    alarm: Option<Pin<Box<Sleep>>>,
    /// Whom the alarm wakes.
    wakes: Option<Waker>,
}

impl Watch {
    pub(crate) fn new(timeout: Duration) -> Self {
        Self {
            dog: Watchdog::new(timeout),
            alarm: None,
            wakes: None,
        }
    }

    /// The provider said something.
    pub(crate) fn heard(&mut self, disposition: Disposition) {
        self.dog.heard(disposition, || Instant::now().into_std());
    }

    /// To be asked when the provider was polled and has nothing. Ready once at most, with the stall.
    pub(crate) fn poll_stall(&mut self, cx: &mut Context<'_>) -> Poll<StallClaim> {
        let now = Instant::now();
        match self.dog.waiting(now.into_std()) {
            Verdict::Stalled(claim) => Poll::Ready(claim),
            Verdict::Off => Poll::Pending,
            Verdict::Until(deadline) => {
                self.arm(cx, now, Instant::from_std(deadline));
                Poll::Pending
            }
        }
    }

    fn arm(&mut self, cx: &mut Context<'_>, now: Instant, deadline: Instant) {
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        if alarm.deadline() <= now {
            alarm.as_mut().reset(deadline);
        } else if self.wakes.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
            return;
        }
        self.wakes = Some(cx.waker().clone());
        // Unconstrained: a spent budget would leave the alarm without its waker.
        if pin!(unconstrained(alarm.as_mut())).poll(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
    }

    /// Runs a call of the provider until it has a result.
    ///
    /// # Errors
    /// The stall; the call is not polled again, and is the caller's to drop.
    pub(crate) async fn until<F: Future>(&mut self, mut call: Pin<&mut F>) -> Result<F::Output, StallClaim> {
        poll_fn(|cx| match call.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Ok(output)),
            Poll::Pending => self.poll_stall(cx).map(Err),
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_alarm_stays_where_it_is_until_it_goes_off() {
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let mut cx = Context::from_waker(&waker);
        let mut watch = Watch::new(Duration::from_secs(10));
        let begun = Instant::now();
        assert!(watch.poll_stall(&mut cx).is_pending());
        let set = watch.alarm.as_ref().map(|a| a.deadline());
        for _ in 0..9 {
            tokio::time::advance(Duration::from_secs(1)).await;
            watch.heard(Disposition::Progress);
            assert!(watch.poll_stall(&mut cx).is_pending());
            assert_eq!(watch.alarm.as_ref().map(|a| a.deadline()), set);
        }
        assert_eq!(count.0.load(Ordering::SeqCst), 0);
        tokio::time::advance(Duration::from_millis(1001)).await;
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        assert!(watch.poll_stall(&mut cx).is_pending());
        assert_eq!(
            watch.alarm.as_ref().map(|a| a.deadline()),
            Some(begun + Duration::from_secs(19))
        );
        tokio::time::advance(Duration::from_secs(9)).await;
        assert_eq!(count.0.load(Ordering::SeqCst), 2);
        let idle = Duration::from_millis(10_001);
        assert_eq!(watch.poll_stall(&mut cx), Poll::Ready(StallClaim { idle }));
        assert!(watch.poll_stall(&mut cx).is_pending());
    }

    #[tokio::test(start_paused = true)]
    async fn the_alarm_wakes_whoever_polled_last() {
        let (first, second) = (Arc::new(Count::default()), Arc::new(Count::default()));
        let mut watch = Watch::new(Duration::from_secs(10));
        for count in [&first, &second] {
            let waker = Waker::from(Arc::clone(count));
            assert!(watch.poll_stall(&mut Context::from_waker(&waker)).is_pending());
        }
        tokio::time::advance(Duration::from_secs(11)).await;
        assert_eq!(
            (first.0.load(Ordering::SeqCst), second.0.load(Ordering::SeqCst)),
            (0, 1)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_ends_is_no_stall_and_one_that_hangs_is_one_at_the_timeout() {
        let begun = Instant::now();
        let mut watch = Watch::new(Duration::from_secs(10));
        let short = tokio::time::sleep(Duration::from_secs(9));
        assert_eq!(watch.until(pin!(short)).await, Ok(()));
        watch.heard(Disposition::Progress);
        let long = pin!(std::future::pending::<()>());
        let claim = watch.until(long).await.unwrap_err();
        assert_eq!((claim.idle.as_secs(), begun.elapsed().as_secs()), (10, 19));
    }
}
