//! The wall clock of a process under the test's control: what it reads of the time of day is moved by whole seconds, at its start and
//! while it runs. Its monotonic clock, and every other process, keep the machine's time.
//!
//! The moving is done between the process and its C library.

use crate::preload::Preload;

const SOURCE: &str = r#"
#include <sys/time.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *time) {
    int result = syscall(SYS_clock_gettime, clock, time);
    if (!result && number && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) time->tv_sec += *number;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec time;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &time)) return -1;
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"#;

/// The clock of the processes that are started with its `env`.
pub struct Skew(Preload);

impl Skew {
    /// A clock that is ahead by these seconds, or behind.
    ///
    /// # Panics
    /// When there is no C compiler.
    pub fn of(seconds: i64) -> Self {
        Self(Preload::of(SOURCE, seconds))
    }

    /// From here on the clock is ahead by these seconds, or behind.
    ///
    /// # Panics
    /// When the file cannot be written.
    pub fn step(&self, seconds: i64) {
        self.0.set(seconds);
    }

    /// What to start a process with.
    pub fn env(&self) -> Vec<(String, String)> {
        self.0.env()
    }
}
