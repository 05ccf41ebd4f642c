//! Connections that serve nobody: the one used last is the first to be used again.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

use crate::tasks::{self, Kind};

/// uvicorn closes after 5 s; a pool must be quicker than the server (link.md, Stale connections).
const POOL_IDLE: Duration = Duration::from_secs(4);

/// What a connection is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fitness {
    Ready,
    /// It has not got rid of its last request yet, or is no use for this one.
    Skip,
    Closed,
}

/// The idle ones, the longest idle first. Pure.
#[derive(Debug)]
struct Idle<C>(Vec<(C, Instant)>);

impl<C> Idle<C> {
    fn put(&mut self, connection: C, now: Instant) {
        self.0.push((connection, now));
    }

    /// The ready one that was used last. Those that are closed or too old go; those to be skipped keep their places.
    fn take(&mut self, now: Instant, fitness: impl Fn(&C) -> Fitness) -> Option<C> {
        self.expire(now);
        for at in (0..self.0.len()).rev() {
            match self.0.get(at).map(|(connection, _)| fitness(connection)) {
                Some(Fitness::Ready) => return Some(self.0.remove(at).0),
                Some(Fitness::Closed) => drop(self.0.remove(at)),
                Some(Fitness::Skip) | None => {}
            }
        }
        None
    }

    /// Drops those that are too old; when the next one will be.
    fn expire(&mut self, now: Instant) -> Option<Instant> {
        let old = self.0.partition_point(|(_, since)| *since + POOL_IDLE <= now);
        self.0.drain(..old);
        self.0.first().map(|(_, since)| *since + POOL_IDLE)
    }
}

#[derive(Debug)]
struct State<C> {
    idle: Idle<C>,
    /// A task looks after the idle ones.
    reaped: bool,
}

/// The idle connections of one client.
#[derive(Debug)]
pub(super) struct Pool<C>(Mutex<State<C>>);

impl<C> Default for Pool<C> {
    fn default() -> Self {
        Self(Mutex::new(State {
            idle: Idle(Vec::new()),
            reaped: false,
        }))
    }
}

impl<C: Send + 'static> Pool<C> {
    pub(super) fn take(&self, fitness: impl Fn(&C) -> Fitness) -> Option<C> {
        let mut state = self.0.lock();
        if state.idle.0.is_empty() {
            return None;
        }
        state.idle.take(Instant::now(), fitness)
    }

    /// To be called inside the runtime.
    pub(super) fn put(self: &Arc<Self>, connection: C) {
        let mut state = self.0.lock();
        state.idle.put(connection, Instant::now());
        if !std::mem::replace(&mut state.reaped, true) {
            drop(state);
            tasks::spawn(Kind::Session, "provider_pool", reap(Arc::downgrade(self)));
        }
    }

    /// When to look again; `None`: nothing is left to look after.
    fn expire(&self) -> Option<Instant> {
        let mut state = self.0.lock();
        let next = state.idle.expire(Instant::now());
        state.reaped = next.is_some();
        next
    }
}

/// Closes what nobody used in time; ends with the last idle connection, or with the client.
async fn reap<C: Send + 'static>(pool: Weak<Pool<C>>) {
    loop {
        let next = pool.upgrade().and_then(|pool| pool.expire());
        match next {
            Some(next) => sleep_until(next).await,
            None => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn idle(all: &[u8], now: Instant) -> Idle<u8> {
        let mut idle = Idle(Vec::new());
        for connection in all {
            idle.put(*connection, now);
        }
        idle
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_used_ready_one_is_taken_and_skipped_ones_keep_their_places() {
        let now = Instant::now();
        let mut idle = idle(&[0, 1, 2, 3, 4, 5], now);
        let fitness = |c: &u8| match c {
            1 | 3 => Fitness::Ready,
            4 => Fitness::Closed,
            _ => Fitness::Skip,
        };
        assert_eq!(idle.take(now, fitness), Some(3));
        assert_eq!(idle.take(now, fitness), Some(1));
        assert_eq!(idle.take(now, fitness), None);
        assert_eq!(idle.take(now, |_| Fitness::Ready), Some(5));
        assert_eq!(idle.take(now, |_| Fitness::Ready), Some(2));
        assert_eq!(idle.take(now, |_| Fitness::Closed), None);
        assert!(idle.0.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_was_idle_for_four_seconds_is_gone() {
        let begun = Instant::now();
        let just_under = begun + 4 * SECOND - Duration::from_nanos(1);
        let mut kept = idle(&[7], begun);
        assert_eq!(kept.expire(just_under), Some(begun + 4 * SECOND));
        assert_eq!(kept.take(just_under, |_| Fitness::Ready), Some(7));
        let mut gone = idle(&[7], begun);
        assert_eq!(gone.take(begun + 4 * SECOND, |_| Fitness::Ready), None);
        assert!(gone.0.is_empty());
    }

    proptest! {
        #[test]
        fn what_is_taken_is_the_newest_of_the_ready_and_nothing_old_stays(
            steps in proptest::collection::vec((0u64..3000, prop::bool::ANY), 0..64),
        ) {
            let mut now = Instant::now();
            let mut idle = Idle(Vec::new());
            // The same, without any cleverness.
            let mut model: Vec<(usize, Instant)> = Vec::new();
            for (n, (ms, is_put)) in steps.into_iter().enumerate() {
                now += Duration::from_millis(ms);
                if is_put {
                    idle.put(n, now);
                    model.push((n, now));
                } else {
                    model.retain(|(_, since)| now.duration_since(*since) < 4 * SECOND);
                    let odd = model.iter().rposition(|(c, _)| c % 2 == 1);
                    let fitness = |c: &usize| if c % 2 == 1 { Fitness::Ready } else { Fitness::Skip };
                    prop_assert_eq!(idle.take(now, fitness), odd.map(|at| model.remove(at).0));
                    prop_assert_eq!(&idle.0, &model);
                }
            }
        }
    }

    /// Tells that it was dropped by the end of its reference.
    type Token = Arc<()>;

    #[tokio::test(start_paused = true)]
    async fn one_reaper_closes_what_nobody_uses_and_ends_with_the_last() {
        let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
        let before = tasks();
        let pool: Arc<Pool<Token>> = Arc::default();
        let (a, b) = (Token::default(), Token::default());
        pool.put(Arc::clone(&a));
        tokio::time::sleep(2 * SECOND).await;
        pool.put(Arc::clone(&b));
        assert_eq!(tasks(), before + 1);
        let held = |token| Arc::strong_count(token) == 2;
        tokio::time::sleep(Duration::from_millis(1990)).await;
        assert!(held(&a) && held(&b));
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!held(&a) && held(&b));
        tokio::time::sleep(2 * SECOND).await;
        assert!(!held(&a) && !held(&b));
        assert_eq!(tasks(), before);
        // And begins anew.
        pool.put(Arc::clone(&a));
        assert_eq!(tasks(), before + 1);
        // It keeps no pool alive.
        drop(pool);
        assert!(!held(&a));
        tokio::time::sleep(5 * SECOND).await;
        assert_eq!(tasks(), before);
    }
}
