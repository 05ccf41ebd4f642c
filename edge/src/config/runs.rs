//! `[runs]` and `[store]`: how runs are worked on, and where they are kept.

use std::time::Duration;

use iop_shared::config::{ByteSize, Source};

use super::build::{Checked, Site, World};
use super::file::{EdgeFile, RunsFile, StoreFile};
use super::settings::{RunsSettings, StoreUrl};

/// The longest span the runtime counts with.
const YEAR: Duration = Duration::from_hours(24 * 366);

/// What one row of a database holds with room to spare.
const ROW: ByteSize = ByteSize::mib(512);

/// `[runs]`.
///
/// # Errors
/// The first rule broken.
pub(super) fn rules(site: &Site<'_>, file: Option<&RunsFile>) -> Checked<RunsSettings> {
    let default = RunsFile::default();
    let file = file.unwrap_or(&default);
    if file.workers == 0 {
        return site.fail("runs.workers", "must be at least 1");
    }
    for (key, period, least, words) in [
        ("runs.lease_ttl", file.lease_ttl, Duration::from_secs(1), "1s"),
        (
            "runs.poll_interval",
            file.poll_interval,
            Duration::from_millis(50),
            "50ms",
        ),
        ("runs.cancel_grace", file.cancel_grace, Duration::ZERO, "0s"),
    ] {
        if !(least..=YEAR).contains(&period.0) {
            return site.fail(key, format!("must be at least {words} and at most a year"));
        }
    }
    for (key, size) in [
        ("runs.max_state", file.max_state),
        ("runs.max_result", file.max_result),
    ] {
        if !(ByteSize::kib(1)..=ROW).contains(&size) {
            return site.fail(key, "must be at least 1KiB and at most 512MiB");
        }
    }
    Ok(RunsSettings {
        workers: file.workers,
        lease_ttl: file.lease_ttl.0,
        poll_interval: file.poll_interval.0,
        max_state: file.max_state.0,
        max_result: file.max_result.0,
        cancel_grace: file.cancel_grace.0,
    })
}

/// `[store]`. A store that forgets is one that was meant (D271).
///
/// # Errors
/// The rule broken.
pub(super) fn store(site: &Site<'_>, file: &EdgeFile) -> Checked<StoreUrl> {
    let dev = file.runs.as_ref().is_some_and(|runs| runs.dev);
    let default = StoreFile::default();
    let url = &file.store.as_ref().unwrap_or(&default).url;
    let rest = |scheme: &str| url.strip_prefix(scheme).filter(|rest| !rest.is_empty());
    if let Some(file) = rest("sqlite://") {
        if file.starts_with('?') || file.contains(":memory:") || file.contains("mode=memory") {
            return site.fail(
                "store.url",
                "must name a file: sqlite://FILE; memory:// is a store that forgets",
            );
        }
        Ok(StoreUrl::Sqlite(url.clone()))
    } else if rest("postgres://").or_else(|| rest("postgresql://")).is_some() {
        Ok(StoreUrl::Postgres(url.clone()))
    } else if url == "memory://" && dev {
        Ok(StoreUrl::Memory)
    } else if url == "memory://" {
        site.fail(
            "store.url",
            "memory:// forgets every run when the process ends; only with [runs] dev = true",
        )
    } else {
        site.fail(
            "store.url",
            "must be sqlite://FILE or postgres://USER@HOST/DATABASE",
        )
    }
}

/// What a file says of the store, the rest of it unjudged.
///
/// # Errors
/// Its fault.
pub(super) fn store_of(file: &EdgeFile, source: &Source) -> Checked<StoreUrl> {
    let nothing = World {
        env: &|_| None,
        file: &|_| Err(std::io::ErrorKind::NotFound.into()),
    };
    store(&Site::new(source, &nothing), file)
}
