//! The wall clock of a process under the test's control: what it reads of the time of day is moved by whole seconds, at its start and
//! while it runs. Its monotonic clock, and every other process, keep the machine's time.
//!
//! The moving is done between the process and its C library.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use tempfile::TempDir;

use crate::preload;

const SOURCE: &str = r#"
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const long *seconds;

__attribute__((constructor)) static void map(void) {
    const char *path = getenv("SKEW_SECONDS");
    int fd = path ? open(path, O_RDONLY) : -1;
    void *page = fd < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    if (page != MAP_FAILED) seconds = page;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int result = syscall(SYS_clock_gettime, clock, time);
    if (!result && seconds && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) time->tv_sec += *seconds;
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
pub struct Skew {
    seconds: File,
    dir: TempDir,
}

impl Skew {
    /// A clock that is ahead by these seconds, or behind.
    ///
    /// # Panics
    /// When there is no C compiler.
    pub fn of(seconds: i64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        preload::library(dir.path(), "skew", SOURCE);
        let skew = Self {
            seconds: File::create(dir.path().join("seconds")).unwrap(),
            dir,
        };
        skew.step(seconds);
        skew
    }

    /// From here on the clock is ahead by these seconds, or behind.
    ///
    /// # Panics
    /// When the file cannot be written.
    pub fn step(&self, seconds: i64) {
        self.seconds.write_all_at(&seconds.to_ne_bytes(), 0).unwrap();
    }

    /// What to start a process with.
    pub fn env(&self) -> Vec<(String, String)> {
        let path = |name: &str| self.dir.path().join(name).to_str().unwrap().to_owned();
        vec![
            ("LD_PRELOAD".to_owned(), path("skew.so")),
            ("SKEW_SECONDS".to_owned(), path("seconds")),
        ]
    }
}
