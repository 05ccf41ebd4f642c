//! A disk that is full when the test says so: every write of a process to a regular file is refused with `ENOSPC`. Its sockets
//! and pipes, and every other process, go on.

use crate::preload::Preload;

const SOURCE: &str = r#"
#include <errno.h>
#include <sys/stat.h>
#include <sys/types.h>

static int refused(int fd) {
    struct stat file;
    if (!number || !*number || fstat(fd, &file) || !S_ISREG(file.st_mode)) return 0;
    errno = ENOSPC;
    return 1;
}

ssize_t write(int fd, const void *bytes, size_t size) {
    return refused(fd) ? -1 : syscall(SYS_write, fd, bytes, size);
}

ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t at) {
    return refused(fd) ? -1 : syscall(SYS_pwrite64, fd, bytes, size, at);
}

ssize_t pwrite(int fd, const void *bytes, size_t size, off_t at) {
    return pwrite64(fd, bytes, size, at);
}
"#;

/// The disk of the processes that are started with its `env`.
pub struct Disk(Preload);

impl Disk {
    /// One with room.
    ///
    /// # Panics
    /// When there is no C compiler.
    pub fn with_room() -> Self {
        Self(Preload::of(SOURCE, 0))
    }

    /// From here on nothing can be written.
    pub fn fill(&self) {
        self.0.set(1);
    }

    /// There is room again.
    pub fn empty(&self) {
        self.0.set(0);
    }

    /// What to start a process with.
    pub fn env(&self) -> Vec<(String, String)> {
        self.0.env()
    }
}
