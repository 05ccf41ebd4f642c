//! A run as a stream: its stored events in order, from any of them on, and its result. Reading is from the store, so a slow
//! reader costs no memory and holds nobody up, and what a reader sees is what was committed (D232 to D235, D238).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::ids::RunId;
use crate::record::EventRecord;
use crate::runner::resume::Intent;
use crate::runner::{Resume, RunError, RunResult, Runner, Start};
use crate::store::{Store, StoreError};
use crate::tasks;
use crate::token::ResumeToken;

/// How often a reader looks by itself; everything in this process is told at once.
const POLL: Duration = Duration::from_millis(500);
const PAGE: u32 = 200;

/// One event of the stream.
pub type StreamEvent = EventRecord;

/// A segment running in the background. Dropping it leaves the run to itself; `request_stop` parks it.
pub struct RunStream<S, E> {
    run: RunId,
    store: Arc<dyn Store>,
    seen: u64,
    ready: VecDeque<EventRecord>,
    published: watch::Receiver<u64>,
    stop: watch::Sender<bool>,
    task: Option<JoinHandle<Result<RunResult<S, E>, RunError>>>,
    finished: Option<Result<RunResult<S, E>, RunError>>,
}

impl<S, E> Runner<S, E>
where
    S: Send + Sync + 'static,
    E: Serialize + DeserializeOwned + Send + Sync + 'static,
{
    /// `start`, as a stream from the first event. When an idempotency key stands for another run that exists already, there are
    /// no events and `wait_result` names that run.
    ///
    /// # Errors
    /// An id that is no id; everything else is told by `wait_result`.
    pub fn start_stream(&self, mut start: Start<S>) -> RunStream<S, E> {
        let run = start.run.get_or_insert_with(RunId::random).clone();
        let this = self.clone();
        self.stream(run, 0, move |published, stop| async move {
            this.start_with(start, Some(published), stop).await
        })
    }

    /// `resume`, as a stream of what comes after the present event.
    ///
    /// # Errors
    /// As `resume`'s loading; the refusals are told by `wait_result`.
    pub async fn resume_stream(
        &self,
        token: &ResumeToken,
        resume: Resume<S>,
    ) -> Result<RunStream<S, E>, RunError> {
        let seen = self.inner.store.load(&token.run).await?.head.event_seq;
        let (this, token) = (self.clone(), token.clone());
        let run = token.run.clone();
        Ok(self.stream(run, seen, move |published, stop| async move {
            this.resume_with(&token, Intent::Resume(resume), Some(published), stop)
                .await
        }))
    }

    fn stream<F, Fut>(&self, run: RunId, seen: u64, segment: F) -> RunStream<S, E>
    where
        F: FnOnce(watch::Sender<u64>, watch::Receiver<bool>) -> Fut,
        Fut: Future<Output = Result<RunResult<S, E>, RunError>> + Send + 'static,
    {
        let (publish, published) = watch::channel(seen);
        let (stop, stopped) = watch::channel(false);
        RunStream {
            run,
            store: Arc::clone(&self.inner.store),
            seen,
            ready: VecDeque::new(),
            published,
            stop,
            task: Some(tasks::spawn("run segment", segment(publish, stopped))),
            finished: None,
        }
    }
}

impl<S, E> RunStream<S, E> {
    pub fn run(&self) -> &RunId {
        &self.run
    }

    /// The next event; `None` after the segment's last one.
    ///
    /// # Errors
    /// The store's. The run is not touched by them; reading may go on.
    pub async fn next(&mut self) -> Result<Option<StreamEvent>, RunError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                self.seen = event.seq;
                return Ok(Some(event));
            }
            // Looked at before reading: what it commits after this is read in the next round. What it has not published is not
            // its own: the run may belong to somebody else, and the segment be refused.
            let over = self.settle().await;
            let published = *self.published.borrow_and_update();
            if published > self.seen {
                match self.store.events(&self.run, self.seen, PAGE).await {
                    Ok(page) if !page.is_empty() => {
                        // What a later segment wrote is told by its own stream.
                        self.ready
                            .extend(page.into_iter().filter(|event| event.seq <= published));
                        continue;
                    }
                    // Deleted since: the result is all there is.
                    Ok(_) | Err(StoreError::NotFound | StoreError::Deleted) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            if over {
                return Ok(None);
            }
            tokio::select! {
                // An error means that the segment is over, or about to be.
                changed = self.published.changed() => {
                    if changed.is_err() {
                        self.join().await;
                    }
                }
                () = tokio::time::sleep(POLL) => {}
            }
        }
    }

    /// Takes the segment's result when it has one.
    async fn settle(&mut self) -> bool {
        if self.finished.is_none() && self.task.as_ref().is_some_and(JoinHandle::is_finished) {
            self.join().await;
        }
        self.finished.is_some()
    }

    async fn join(&mut self) {
        if let Some(task) = self.task.take() {
            self.finished = Some(task.await.unwrap_or(Err(RunError::Stopped)));
        }
    }

    /// Asks the segment to stop at its last committed point; the run goes back to the queue (D103, D238).
    pub fn request_stop(&self) {
        self.stop.send_replace(true);
    }

    /// The segment's result: the source of truth, whether or not anybody read the events (D234).
    ///
    /// # Errors
    /// As `start` and `resume`.
    pub async fn wait_result(mut self) -> Result<RunResult<S, E>, RunError> {
        self.join().await;
        self.finished.unwrap_or(Err(RunError::Stopped))
    }

    /// Every event to the end, and the result.
    ///
    /// # Errors
    /// As `next` and `wait_result`.
    pub async fn collect(mut self) -> Result<(Vec<StreamEvent>, RunResult<S, E>), RunError> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await? {
            events.push(event);
        }
        Ok((events, self.wait_result().await?))
    }

    /// Hands every event to `take` until it says no; then the segment is asked to stop. The result either way.
    ///
    /// # Errors
    /// As `next` and `wait_result`.
    pub async fn consume(
        mut self,
        mut take: impl FnMut(&StreamEvent) -> bool,
    ) -> Result<RunResult<S, E>, RunError> {
        while let Some(event) = self.next().await? {
            if !take(&event) {
                self.request_stop();
                break;
            }
        }
        self.wait_result().await
    }
}
