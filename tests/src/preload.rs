//! A few lines of C between a process and its C library (`LD_PRELOAD`), and one number that they go by: what the test rules of a
//! process, such as its clock or its disk, without the rights and the luck that doing it to the machine would take.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::process::Command;

use tempfile::TempDir;

/// Before each source: `number` is the test's number, null in a process without one.
const NUMBER: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static volatile const long *number;

__attribute__((constructor)) static void map(void) {
    const char *path = getenv("PRELOAD_NUMBER");
    int fd = path ? open(path, O_RDONLY) : -1;
    void *page = fd < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    if (page != MAP_FAILED) number = page;
}
"#;

/// A compiled library and its number.
pub(crate) struct Preload {
    number: File,
    dir: TempDir,
}

impl Preload {
    /// # Panics
    /// When there is no C compiler, or it refuses.
    pub(crate) fn of(source: &str, number: i64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().join("preload.c");
        std::fs::write(&text, [NUMBER, source].concat()).unwrap();
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O2", "-o"]);
        let output = compiler.arg(dir.path().join("preload.so")).arg(&text).output();
        let output = output.unwrap_or_else(|e| panic!("cc: {e} (is it installed?)"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "cc: {said}");
        let preload = Self {
            number: File::create(dir.path().join("number")).unwrap(),
            dir,
        };
        preload.set(number);
        preload
    }

    /// Every process that was started with `env` sees it at once.
    ///
    /// # Panics
    /// When the file cannot be written.
    pub(crate) fn set(&self, number: i64) {
        self.number.write_all_at(&number.to_ne_bytes(), 0).unwrap();
    }

    /// What to start a process with.
    pub(crate) fn env(&self) -> Vec<(String, String)> {
        let path = |name: &str| self.dir.path().join(name).to_str().unwrap().to_owned();
        vec![
            ("LD_PRELOAD".to_owned(), path("preload.so")),
            ("PRELOAD_NUMBER".to_owned(), path("number")),
        ]
    }
}
