//! Harness of the black-box tests: real `iop-edge` and `iop-node` processes, driven over sockets only.
//!
//! Nothing here links the product. A test talks to the binaries as a client, as a provider or as the network
//! between them does; what it asserts is what one of those can see.
//!
//! No sleeps as synchronisation: stubs have barriers, convergence goes through [`eventually`].

pub mod barrier;
pub mod client;
pub mod config;
pub mod db_proxy;
pub mod fake_node;
pub mod faults;
pub mod fixtures;
pub mod full_disk;
pub mod http2;
pub mod liveness;
pub mod llm;
pub mod mcp_stub;
pub mod metrics;
pub mod openai_like;
pub mod postgres;
mod preload;
pub mod process;
pub mod provider;
pub mod relay;
pub mod runs;
pub mod sdk;
pub mod shell;
pub mod skew;
pub mod stack;
pub mod tool_stub;

use std::future::Future;
use std::time::{Duration, Instant};

/// Runs one test on a small runtime and ends it with a clear message when it hangs.
///
/// # Panics
/// When the test is not done after `limit_s` seconds.
pub fn run<F: Future<Output = ()>>(limit_s: u64, test: F) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let limit = Duration::from_secs(limit_s);
        assert!(
            tokio::time::timeout(limit, test).await.is_ok(),
            "the test was not done after {limit:?}"
        );
    });
    runtime.shutdown_background();
}

/// Polls until `check` gives a value; the one place that waits for convergence.
///
/// # Panics
/// When the deadline passes, with the last reason `check` gave.
pub async fn eventually<T, F, Fut>(what: &str, deadline: Duration, mut check: F) -> T
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T, String>>,
{
    let started = Instant::now();
    loop {
        let reason = match check().await {
            Ok(value) => return value,
            Err(reason) => reason,
        };
        assert!(
            started.elapsed() < deadline,
            "{what}: not within {deadline:?}: {reason}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A fact that was expected within a bound; the value is how long it took.
///
/// # Panics
/// When the bound passes.
pub async fn within<F: Future>(what: &str, bound: Duration, fact: F) -> F::Output {
    match tokio::time::timeout(bound, fact).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: not within {bound:?}"),
    }
}
