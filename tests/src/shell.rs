//! `iop-edge runs` as a person calls it.

use std::path::Path;

use crate::process::{Finished, finish};

/// Runs `iop-edge runs …` against an edge, with this key.
pub async fn cli_as(key: &str, addr: &str, args: &[&str]) -> Finished {
    let env = [
        ("IOP_URL".to_owned(), format!("http://{addr}")),
        ("IOP_API_KEY".to_owned(), key.to_owned()),
    ];
    let all: Vec<&str> = std::iter::once("runs").chain(args.iter().copied()).collect();
    finish("iop-edge", &all, &env, Path::new("/")).await
}

/// What it printed, having done what it was asked for without a word of complaint.
///
/// # Panics
/// When it did not.
#[track_caller]
pub fn done(finished: &Finished) -> &str {
    assert_eq!(
        (finished.code, &*finished.stderr),
        (Some(0), ""),
        "{}",
        finished.stdout
    );
    &finished.stdout
}

/// What it printed, having been refused with these words.
///
/// # Panics
/// When it was not.
#[track_caller]
pub fn refused<'a>(finished: &'a Finished, says: &[&str]) -> &'a str {
    assert_eq!(finished.code, Some(1), "{}{}", finished.stdout, finished.stderr);
    for word in says {
        assert!(finished.stderr.contains(word), "{word:?}: {}", finished.stderr);
    }
    &finished.stdout
}
