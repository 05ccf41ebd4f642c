//! The one way this crate starts a task.

use std::future::Future;

use tokio::task::JoinHandle;

/// Starts a task on the current runtime. A panic inside is logged with the task's name; dropping the handle detaches it.
#[expect(clippy::disallowed_methods, reason = "the one place where a task is started")]
pub(crate) fn spawn<T: Send + 'static>(
    name: &'static str,
    task: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    tokio::spawn(async move {
        let mut guard = PanicLog { name, armed: true };
        let value = task.await;
        guard.armed = false;
        value
    })
}

struct PanicLog {
    name: &'static str,
    armed: bool,
}

impl Drop for PanicLog {
    fn drop(&mut self) {
        if self.armed && std::thread::panicking() {
            tracing::error!(task = self.name, "a task panicked");
        }
    }
}
