//! A disk that is full when the test says so: every write of a process to a regular file is refused with `ENOSPC`. Its sockets
//! and pipes, and every other process, go on.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use tempfile::TempDir;

use crate::preload;

const SOURCE: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static volatile const long *full;

__attribute__((constructor)) static void map(void) {
    const char *path = getenv("FULL_DISK");
    int fd = path ? open(path, O_RDONLY) : -1;
    void *page = fd < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    if (page != MAP_FAILED) full = page;
}

static int refused(int fd) {
    struct stat file;
    if (!full || !*full || fstat(fd, &file) || !S_ISREG(file.st_mode)) return 0;
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
pub struct Disk {
    full: File,
    dir: TempDir,
}

impl Disk {
    /// One with room.
    ///
    /// # Panics
    /// When there is no C compiler.
    pub fn with_room() -> Self {
        let dir = tempfile::tempdir().unwrap();
        preload::library(dir.path(), "full", SOURCE);
        let disk = Self {
            full: File::create(dir.path().join("full")).unwrap(),
            dir,
        };
        disk.empty();
        disk
    }

    /// From here on nothing can be written.
    pub fn fill(&self) {
        self.set(1);
    }

    /// There is room again.
    pub fn empty(&self) {
        self.set(0);
    }

    fn set(&self, full: i64) {
        self.full.write_all_at(&full.to_ne_bytes(), 0).unwrap();
    }

    /// What to start a process with.
    pub fn env(&self) -> Vec<(String, String)> {
        let path = |name: &str| self.dir.path().join(name).to_str().unwrap().to_owned();
        vec![
            ("LD_PRELOAD".to_owned(), path("full.so")),
            ("FULL_DISK".to_owned(), path("full")),
        ]
    }
}
