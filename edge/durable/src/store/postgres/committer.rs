//! Writes batches: one statement each, on a connection of its own. When a statement fails for one member's sake, the members
//! are written one by one, so that only that one fails.

use std::sync::Arc;

use sqlx::postgres::PgRow;

use super::batched::{Answers, Batched, Done};
use super::connect::{ATTEMPTS, Line, Server};
use super::fail::{self, Fault};
use super::notify::Notifier;
use super::queue::Queue;
use super::read::was_there;
use super::verdict::Refusal;
use super::work::{Job, Write};
use crate::ids::RunId;
use crate::store::StoreError;

/// One committer.
pub(super) struct Committer {
    line: Line,
    queue: Arc<Queue>,
    notifier: Notifier,
}

impl Committer {
    pub(super) fn new(server: Server, queue: Arc<Queue>, notifier: Notifier) -> Self {
        Self {
            line: Line::new(server),
            queue,
            notifier,
        }
    }

    /// Until the queue is closed and empty.
    pub(super) async fn run(mut self) {
        while let Some(batch) = self.queue.next().await {
            let runs: Vec<RunId> = batch.iter().map(|write| write.run().clone()).collect();
            self.write(batch).await;
            self.queue.done(runs.iter());
        }
    }

    async fn write(&mut self, batch: Vec<Write>) {
        let (mut creations, mut commits, mut posts) = (Vec::new(), Vec::new(), Vec::new());
        for write in batch {
            match write {
                Write::Create(job) => creations.push(job),
                Write::Commit(job) => commits.push(job),
                Write::Post(job) => posts.push(job),
            }
        }
        self.batch(creations).await;
        self.batch(commits).await;
        self.batch(posts).await;
    }

    async fn batch<W: Batched>(&mut self, mut jobs: Vec<Box<Job<W>>>) {
        jobs.sort_by(|a, b| a.run.cmp(&b.run));
        if jobs.len() > 1 {
            match self.send(&jobs).await {
                Ok(answers) => {
                    let mut unsettled = Vec::new();
                    for (job, answer) in jobs.into_iter().zip(answers) {
                        match answer {
                            Err(Refusal::Gone | Refusal::Carry) => unsettled.push(job),
                            Err(Refusal::Error(error)) => job.tell(Err(error)),
                            Ok(done) => self.done(*job, done),
                        }
                    }
                    jobs = unsettled;
                }
                Err(Failed::Nothing(error)) => return tell_all(jobs, &error),
                Err(Failed::Statement(error)) => match fail::fault(&error) {
                    Fault::Taken | Fault::Value | Fault::Blocked | Fault::Again => {}
                    Fault::Lost | Fault::Unsent | Fault::Other => return tell_all(jobs, &fail::write(error)),
                },
            }
        }
        for job in jobs {
            self.single(job).await;
        }
    }

    async fn single<W: Batched>(&mut self, mut job: Box<Job<W>>) {
        loop {
            let answer = match self.send(std::slice::from_ref(&job)).await {
                Ok(mut answers) => answers.pop().unwrap_or_else(|| {
                    Err(StoreError::corrupt("the statement did not answer for the run").into())
                }),
                Err(Failed::Nothing(error)) => Err(error.into()),
                Err(Failed::Statement(error)) => self.explain(&job, error).await.map_err(Refusal::Error),
            };
            match answer {
                Ok(done) => return self.done(*job, done),
                Err(Refusal::Error(error)) => return job.tell(Err(error)),
                Err(Refusal::Gone) => {
                    let error = self.absent(&job.run).await;
                    return job.tell(Err(error));
                }
                // Nothing is known of the next time, so there is no third.
                Err(Refusal::Carry) => job.work.carry(),
            }
        }
    }

    /// One statement for all of them; one answer each, in their order.
    async fn send<W: Batched>(&mut self, jobs: &[Box<Job<W>>]) -> Result<Answers<W::Answer>, Failed> {
        let members: Vec<(&RunId, &W)> = jobs.iter().map(|job| (&job.run, &job.work)).collect();
        let mut left = ATTEMPTS;
        let rows: Vec<PgRow> = loop {
            self.line.ready().await.map_err(Failed::Nothing)?;
            match self.line.rows(W::statement(&members)).await {
                Ok(rows) => break rows,
                Err(error) if left > 1 && fail::fault(&error).is_worth_another() => left -= 1,
                Err(error) => return Err(Failed::Statement(error)),
            }
        };
        // It was done; an answer that cannot be read leaves that open.
        W::answers(&members, &rows).map_err(|error| Failed::Nothing(StoreError::unconfirmed(error)))
    }

    async fn explain<W: Batched>(
        &mut self,
        job: &Job<W>,
        error: sqlx::Error,
    ) -> Result<Done<W::Answer>, StoreError> {
        if fail::fault(&error) != Fault::Taken {
            return Err(fail::write(error));
        }
        let Some(sql) = job.work.who_took(&job.run) else {
            return Err(fail::write(error));
        };
        self.line.ready().await?;
        let found = self.line.rows(sql).await.map_err(fail::read)?;
        match job.work.taken(&found)? {
            Some(answer) => Ok(Done {
                answer,
                claimable: false,
            }),
            None => Err(fail::write(error)),
        }
    }

    async fn absent(&mut self, run: &RunId) -> StoreError {
        if let Err(error) = self.line.ready().await {
            return error;
        }
        match self.line.rows(was_there(run)).await {
            Ok(rows) if rows.is_empty() => StoreError::NotFound,
            Ok(_) => StoreError::Deleted,
            Err(error) => fail::read(error),
        }
    }

    fn done<W: Batched>(&self, job: Job<W>, done: Done<W::Answer>) {
        self.notifier.done(&job.run, W::POSTS, done.claimable);
        job.tell(Ok(done.answer));
    }
}

/// Why there is no answer.
enum Failed {
    /// Before the statement was sent, or after it was done.
    Nothing(StoreError),
    Statement(sqlx::Error),
}

fn tell_all<W: Batched>(jobs: Vec<Box<Job<W>>>, error: &StoreError) {
    for job in jobs {
        job.tell(Err(error.clone()));
    }
}
