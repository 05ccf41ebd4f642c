//! Polls one node to its end. Each time the node has done all it can for now, what gathered in the ledger is committed; while
//! that is under way the node is polled on. The outcome of a last call is left for the step's own commit.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::graph::{NodeEntry, NodeResult};
use crate::runner::ctx::Ctx;
use crate::runner::draft::{Halt, persist};
use crate::runner::ledger::Confirm;
use crate::runner::segment::Segment;
use crate::store::{Authority, Commit, Committed};

/// How the entry into a node ended.
pub(crate) enum Ending<S, E> {
    Returned(NodeResult<S, E>),
    Panicked,
    /// It only waits for things outside.
    Parked,
    Interrupted(Why),
}

/// Why a node was cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    Cancel,
    Deadline,
    /// The host wants its worker back.
    Stop,
}

struct Flying {
    commit: Commit,
    confirms: Vec<Confirm>,
    answer: BoxFuture<'static, Result<Committed, Halt>>,
}

enum Event<S, E> {
    Node(std::thread::Result<NodeResult<S, E>>),
    Flush,
    Landed(Result<Committed, Halt>),
    Parked,
    News,
    Deadline,
    Stop,
    GraceOver,
}

impl<S, E> Segment<S, E>
where
    S: Send + Sync + 'static,
    E: Serialize + DeserializeOwned + Send + Sync + 'static,
{
    pub(crate) async fn drive(&mut self, entry: &NodeEntry<S, E>, typed: S) -> Result<Ending<S, E>, Halt> {
        let ctx = Ctx {
            ledger: Arc::clone(&self.ledger),
            held: Arc::clone(&self.held),
            bindings: Arc::clone(&self.inner.bindings),
            metadata: Arc::new(self.head.metadata.clone()),
            traceparent: self.head.traceparent.as_deref().map(Arc::from),
            owner: self.head.owner.as_deref().map(Arc::from),
            root: self.head.lineage.root.clone(),
        };
        // The call itself may panic too, not only the future it makes.
        let code = Arc::clone(&entry.node);
        let mut node = Box::pin(AssertUnwindSafe(async move { code.run(ctx, typed).await }).catch_unwind());
        let mut flying: Option<Flying> = None;
        let mut why: Option<(Why, Instant)> = None;
        let ledger = Arc::clone(&self.ledger);
        let held = Arc::clone(&self.held);
        let mut stop = self.stop.clone();
        let ending = loop {
            let event = {
                let deaf_until = self.deaf_until;
                let mut news = pin!(async {
                    if let Some(until) = deaf_until {
                        tokio::time::sleep_until(until).await;
                    }
                    held.interrupted(self.signal).await;
                });
                let deadline_in = self.head.deadline.map(|at| at.since(held.now()));
                let mut deadline = pin!(async {
                    match deadline_in {
                        Some(span) => tokio::time::sleep(span).await,
                        None => std::future::pending().await,
                    }
                });
                let grace_until = why.map(|(_, until)| until);
                let mut grace = pin!(async {
                    match grace_until {
                        Some(until) => tokio::time::sleep_until(until).await,
                        None => std::future::pending().await,
                    }
                });
                let mut stopped = pin!(async {
                    // The sender outlives the segment or the stop never comes.
                    if stop.wait_for(|stop| *stop).await.is_err() {
                        std::future::pending::<()>().await;
                    }
                });
                // A stop lets every call finish; a cancellation waits for those that cannot be repeated.
                let interrupted = why.map(|(why, _)| why == Why::Stop);
                std::future::poll_fn(|cx| {
                    if let Poll::Ready(end) = Pin::new(&mut node).poll(cx) {
                        return Poll::Ready(Event::Node(end));
                    }
                    match &mut flying {
                        Some(flying) => {
                            if let Poll::Ready(answer) = flying.answer.as_mut().poll(cx) {
                                return Poll::Ready(Event::Landed(answer));
                            }
                        }
                        None if ledger.has_dirty() => return Poll::Ready(Event::Flush),
                        None if ledger.is_parked() => return Poll::Ready(Event::Parked),
                        None => {}
                    }
                    if let Some(stops) = interrupted {
                        let busy = if stops {
                            ledger.in_flight()
                        } else {
                            ledger.unsafe_in_flight()
                        };
                        if !busy || grace.as_mut().poll(cx).is_ready() {
                            return Poll::Ready(Event::GraceOver);
                        }
                    } else {
                        if deadline.as_mut().poll(cx).is_ready() {
                            return Poll::Ready(Event::Deadline);
                        }
                        if stopped.as_mut().poll(cx).is_ready() {
                            return Poll::Ready(Event::Stop);
                        }
                    }
                    if news.as_mut().poll(cx).is_ready() {
                        return Poll::Ready(Event::News);
                    }
                    Poll::Pending
                })
                .await
            };
            match event {
                Event::Node(Ok(result)) => break Ending::Returned(result),
                Event::Node(Err(_)) => break Ending::Panicked,
                Event::Parked => break Ending::Parked,
                Event::GraceOver => break Ending::Interrupted(why.map_or(Why::Cancel, |(why, _)| why)),
                Event::Flush => flying = Some(self.flush()),
                Event::Landed(answer) => {
                    let Some(flown) = flying.take() else { continue };
                    let committed = answer?;
                    self.landed(flown.commit, committed.revision);
                    // What came in meanwhile is heard before anything leaves.
                    self.hear().await?;
                    self.heed(&mut why);
                    self.let_go(flown.confirms, why.map(|(why, _)| why));
                }
                Event::Deadline => {
                    ledger.stop();
                    why = Some((Why::Deadline, Instant::now() + self.inner.cancel_grace));
                }
                Event::Stop => {
                    ledger.stop();
                    why = Some((Why::Stop, Instant::now() + self.inner.cancel_grace));
                }
                Event::News => {
                    if !held.is_live() {
                        return Err(Halt::LeaseLost);
                    }
                    // A commit under way would look like another's.
                    let mut confirms = Vec::new();
                    if let Some(flown) = flying.take() {
                        let committed = flown.answer.await?;
                        self.landed(flown.commit, committed.revision);
                        confirms = flown.confirms;
                    }
                    self.hear().await?;
                    self.heed(&mut why);
                    self.let_go(confirms, why.map(|(why, _)| why));
                }
            }
        };
        // What the node still had under way is cut off here.
        drop(node);
        if let Some(flown) = flying {
            let committed = flown.answer.await?;
            self.landed(flown.commit, committed.revision);
        }
        Ok(match (why, ending) {
            // Interrupted, whatever the node made of it: its calls are in the journal, its state is discarded.
            (Some((why, _)), _) => Ending::Interrupted(why),
            (None, ending) => ending,
        })
    }

    /// A request to cancel stops what is under way, unless something else did before.
    fn heed(&self, why: &mut Option<(Why, Instant)>) {
        if self.cancel.is_some() && why.is_none() {
            self.ledger.stop();
            *why = Some((Why::Cancel, Instant::now() + self.inner.cancel_grace));
        }
    }

    /// The intents of these calls are stored: they may leave, unless the run is being ended.
    fn let_go(&self, confirms: Vec<Confirm>, why: Option<Why>) {
        for (id, confirm) in confirms {
            match why {
                None | Some(Why::Stop) => {
                    let _ = confirm.send(());
                }
                Some(Why::Cancel | Why::Deadline) => self.ledger.withhold(&id, self.held.now()),
            }
        }
    }

    /// A commit of what gathered, on its way.
    fn flush(&mut self) -> Flying {
        let mut draft = self.draft();
        let confirms = draft.take(self.ledger.take_dirty(), self.ledger.open());
        let outcome = draft.outcome;
        let commit = draft.commit(Authority::Lease(self.held.lease().clone()), None);
        let (store, held, sent) = (
            Arc::clone(&self.inner.store),
            Arc::clone(&self.held),
            commit.clone(),
        );
        let answer = Box::pin(async move { persist(&store, &held, &sent, outcome).await });
        Flying {
            commit,
            confirms,
            answer,
        }
    }
}
