//! Reads an answer from a run: as it comes, or as far as it is stored.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use iop_durable::ids::{ActivityId, Key, NodeName, RunId};
use iop_durable::patterns::REASON;
use iop_durable::record::Outcome;
use iop_durable::store::Store;
use iop_shared::openai::usage::Usage;

use super::id::ResponseId;
use super::pause::{Pending, pending};
use super::telling::{Heard, On, Part, Telling, pause};
use crate::agents::journal::MODEL;
use crate::agents::turn::TurnAnswer;
use crate::runs::Engine;
use crate::runs::live::{Follow, Update};
use crate::runs::problem::{Code, Problem};

/// How long a store that does not answer is left alone.
const PAUSE: Duration = Duration::from_millis(500);
/// Events that are read at once.
const PAGE: u32 = 200;

/// How an answer ends.
#[derive(Debug, Clone)]
pub(super) enum End {
    Paused(Vec<Pending>),
    Over(Box<Outcome>),
}

/// What comes next of an answer.
#[derive(Debug)]
pub(super) enum News {
    Part(Part),
    End(End, Option<Usage>),
}

/// An answer of a run, as it comes. Dropping what `next` gives loses nothing.
pub(super) struct Reader {
    store: Arc<dyn Store>,
    run: RunId,
    follow: Follow,
    telling: Telling,
    ready: VecDeque<Part>,
    /// Heard, and not told so far: what it is about has to be read.
    heard: Heard,
}

impl Reader {
    /// From behind this event. What runs from here on is not missed.
    pub(super) fn new(engine: &Engine, run: &RunId, after: u64) -> Self {
        Self {
            store: Arc::clone(&engine.store),
            run: run.clone(),
            follow: engine.follow(run, after).with_pieces(),
            telling: Telling::default(),
            ready: VecDeque::new(),
            heard: Heard::Nothing,
        }
    }

    pub(super) fn run(&self) -> &RunId {
        &self.run
    }

    /// Waits for it, and for a store that is away.
    ///
    /// # Errors
    /// What does not pass.
    pub(super) async fn next(&mut self) -> Result<News, Problem> {
        loop {
            match self.attempt().await {
                Err(problem) if problem.retryable => tokio::time::sleep(PAUSE).await,
                news => return news,
            }
        }
    }

    async fn attempt(&mut self) -> Result<News, Problem> {
        loop {
            if let Some(part) = self.ready.pop_front() {
                return Ok(News::Part(part));
            }
            match &self.heard {
                Heard::Nothing => match self.follow.next().await? {
                    Update::Delta(data) => self.ready.extend(self.telling.piece(&data)),
                    Update::Event(event) => {
                        self.heard = self.telling.event(&event);
                        match &self.heard {
                            Heard::Pause(_) => self.ready.extend(self.telling.ends(None)),
                            Heard::Over(outcome) => self.ready.extend(self.telling.ends(Some(outcome))),
                            Heard::Nothing | Heard::Turn(_) => {}
                        }
                    }
                },
                Heard::Turn(n) => {
                    let n = *n;
                    match turn(&self.store, &self.run, n).await? {
                        Some(answer) => self.ready.extend(self.telling.turn(n, answer)),
                        // Deleted with its run; the outcome has the last text.
                        None => self.telling.gone(n),
                    }
                    self.heard = Heard::Nothing;
                }
                Heard::Pause(on) => {
                    let pending = pending(&self.store, &self.run, on).await?;
                    return Ok(News::End(End::Paused(pending), self.telling.usage()));
                }
                Heard::Over(outcome) => {
                    return Ok(News::End(End::Over(outcome.clone()), self.telling.usage()));
                }
            }
        }
    }
}

/// A turn as it is stored.
async fn turn(store: &Arc<dyn Store>, run: &RunId, n: u64) -> Result<Option<TurnAnswer>, Problem> {
    let output = output(store, run, (2 * n).saturating_sub(1), MODEL).await?;
    let answer = output.map(|output| serde_json::from_slice(&output)).transpose();
    answer.map_err(|_| unreadable(run))
}

fn unreadable(run: &RunId) -> Problem {
    Problem::new(Code::RunCorrupt, "A turn of the run cannot be read.").of(run.as_str())
}

/// What the journal has of an activity of a turn.
pub(super) async fn output(
    store: &Arc<dyn Store>,
    run: &RunId,
    activation: u64,
    key: &str,
) -> Result<Option<bytes::Bytes>, Problem> {
    let internal = |_| Problem::new(Code::InternalError, "The journal of the run cannot be addressed.");
    let node = NodeName::new(REASON).map_err(internal)?;
    let key = Key::new(key).map_err(internal)?;
    let id = ActivityId::derive(run, &node, activation, &key);
    let record = store.activity(run, &id).await?;
    Ok(record
        .and_then(|record| record.output)
        .map(|output| output.bytes().clone()))
}

/// An answer as far as it is there.
#[derive(Debug, Default)]
pub(super) struct Answer {
    /// Each message, and whether it counts.
    pub(super) messages: Vec<(String, bool)>,
    pub(super) end: Option<End>,
    /// The event that it ends with.
    pub(super) ends_at: Option<u64>,
    pub(super) usage: Option<Usage>,
}

impl Answer {
    /// Takes a part; what it begins with and says is told again when it ends.
    pub(super) fn take(&mut self, part: Part) {
        match part {
            Part::Begins | Part::Says(_) => {}
            Part::Broken(text) => self.messages.push((text, false)),
            Part::Ends(text) => self.messages.push((text, true)),
        }
    }
}

/// An answer as far as it is stored.
///
/// # Errors
/// The store's.
pub(super) async fn stored(store: &Arc<dyn Store>, id: &ResponseId) -> Result<Answer, Problem> {
    let (mut telling, mut answer, mut after) = (Telling::default(), Answer::default(), id.after);
    loop {
        let page = store.events(&id.run, after, PAGE).await?;
        for event in &page {
            after = event.seq;
            answer.end = match telling.event(event) {
                Heard::Nothing => None,
                Heard::Turn(n) => {
                    let said = turn(store, &id.run, n).await?;
                    let said = said.ok_or_else(|| unreadable(&id.run))?;
                    telling
                        .turn(n, said)
                        .into_iter()
                        .for_each(|part| answer.take(part));
                    None
                }
                Heard::Pause(on) => Some(End::Paused(pending(store, &id.run, &on).await?)),
                Heard::Over(outcome) => Some(End::Over(outcome)),
            };
            answer.usage = telling.usage();
            if answer.end.is_some() {
                answer.ends_at = Some(after);
                return Ok(answer);
            }
        }
        if (page.len() as u64) < u64::from(PAGE) {
            return Ok(answer);
        }
    }
}

/// The pauses of a run behind this event that answers end with, each with its number.
///
/// # Errors
/// The store's.
pub(super) async fn pauses(
    store: &Arc<dyn Store>,
    run: &RunId,
    mut after: u64,
) -> Result<Vec<(u64, Vec<On>)>, Problem> {
    let mut found = Vec::new();
    loop {
        let page = store.events(run, after, PAGE).await?;
        for event in &page {
            after = event.seq;
            found.extend(pause(event).map(|on| (event.seq, on)));
        }
        if (page.len() as u64) < u64::from(PAGE) {
            return Ok(found);
        }
    }
}

/// The response that ended where this one begins.
///
/// # Errors
/// The store's.
pub(super) async fn before(store: &Arc<dyn Store>, id: &ResponseId) -> Result<ResponseId, Problem> {
    let pauses = pauses(store, &id.run, 0).await?;
    let last = pauses.iter().rev().find(|(seq, _)| *seq < id.after);
    Ok(id.at(last.map_or(0, |(seq, _)| *seq)))
}
