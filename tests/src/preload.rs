//! A few lines of C between a process and its C library (`LD_PRELOAD`): what the test rules of a process, such as its clock or its
//! disk, without the rights and the luck that doing it to the machine would take.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles `source` into `dir` and gives the library to preload.
///
/// # Panics
/// When there is no C compiler, or it refuses.
pub(crate) fn library(dir: &Path, name: &str, source: &str) -> PathBuf {
    let (text, library) = (dir.join(format!("{name}.c")), dir.join(format!("{name}.so")));
    std::fs::write(&text, source).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O2", "-o"]);
    let output = compiler.arg(&library).arg(&text).output();
    let output = output.unwrap_or_else(|e| panic!("cc: {e} (is it installed?)"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cc: {said}");
    library
}
