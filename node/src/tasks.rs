//! The one way to start a task: its kind says what an end means, and a panic is always seen.

use std::future::Future;
use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;
use tokio::task::JoinHandle;

/// What a task is to the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Runs as long as the process; its end is logged as an error.
    Service,
    /// Belongs to one link, connection or stream; may end at any time.
    Session,
}

/// Starts a task on the current runtime.
pub fn spawn<F>(kind: Kind, name: &'static str, future: F) -> JoinHandle<()>
where
    F: Future<Output = ()> + Send + 'static,
{
    #[expect(clippy::disallowed_methods, reason = "this is the place that wraps it")]
    tokio::spawn(async move {
        let ended = AssertUnwindSafe(future).catch_unwind().await;
        match (kind, ended) {
            (_, Err(_)) => tracing::error!(task = name, "task panicked"),
            (Kind::Service, Ok(())) => tracing::error!(task = name, "service task ended"),
            (Kind::Session, Ok(())) => {}
        }
    })
}

/// What hyper starts on behalf of a connection: the streams of a link.
#[derive(Debug, Clone, Copy)]
pub struct SessionExecutor(pub &'static str);

impl<F> hyper::rt::Executor<F> for SessionExecutor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        spawn(Kind::Session, self.0, future);
    }
}

/// A task that ends with its handle.
#[derive(Debug)]
pub struct AbortOnDrop(pub JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The process's runtime: one worker per CPU it may use; with one CPU no second thread takes turns with the first.
///
/// # Errors
/// When the system gives no thread or no event queue.
pub fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    let alone = std::thread::available_parallelism().is_ok_and(|n| n.get() == 1);
    let mut builder = if alone {
        tokio::runtime::Builder::new_current_thread()
    } else {
        tokio::runtime::Builder::new_multi_thread()
    };
    builder.enable_all().build()
}
