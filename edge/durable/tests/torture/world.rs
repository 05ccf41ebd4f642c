//! The services a run calls. Each request is noted with what the store knew when it was sent; its effect is noted apart, with an
//! answer nobody else has.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::ids::RunId;
use iop_durable::record::{ActivityState, Effect};
use iop_durable::runner::{Call, CallError};
use iop_durable::store::Store;
use parking_lot::Mutex;

use super::ledger::{Ledger, Line};

/// The outside, as the nodes of one process reach it.
pub struct World {
    pub ledger: Arc<dyn Ledger>,
    /// The store itself: what is asked of it here meets no fault and is not counted.
    store: Arc<dyn Store>,
    /// How long a service works before its effect, and again before its answer.
    pace: Box<dyn Fn() -> Duration + Send + Sync>,
    /// Keys whose next request is cut off before its effect.
    cut: Mutex<BTreeSet<String>>,
    /// Requests being worked on, by key.
    busy: Mutex<BTreeMap<String, u32>>,
}

/// A request being worked on; dropped with the request, whoever drops it.
struct Busy<'a>(&'a World, &'a str);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        *self.0.busy.lock().get_mut(self.1).unwrap() -= 1;
    }
}

impl World {
    pub fn new(ledger: Arc<dyn Ledger>, store: Arc<dyn Store>) -> Self {
        Self {
            ledger,
            store,
            pace: Box::new(|| Duration::ZERO),
            cut: Mutex::default(),
            busy: Mutex::default(),
        }
    }

    /// The next request of a key that ends like this is cut off before it has its effect, and nobody is told.
    pub fn cut(&self, ending: &str) {
        self.cut.lock().insert(ending.to_owned());
    }

    /// Services that take their time.
    pub fn with_pace(mut self, pace: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        self.pace = Box::new(pace);
        self
    }

    /// Whether this process is being asked for this key: its effect may be yet to come.
    pub fn is_busy(&self, key: &str) -> bool {
        self.busy.lock().get(key).is_some_and(|n| *n > 0)
    }

    /// Carries a call out as its effect promises: idempotent once per key, unsafe each time, read-only never.
    pub async fn serve(&self, call: &Call, effect: Effect) -> Result<Bytes, CallError> {
        self.serve_failing(call, effect, 0).await
    }

    /// The same, answering the first `failures` requests of this key with a failure, without effect.
    pub async fn serve_failing(
        &self,
        call: &Call,
        effect: Effect,
        failures: usize,
    ) -> Result<Bytes, CallError> {
        let key = &call.idempotency_key;
        *self.busy.lock().entry(key.clone()).or_default() += 1;
        let _busy = Busy(self, key);
        self.arrive(call, effect).await;
        self.work().await;
        let cut = |ending: &String| key.ends_with(ending.as_str());
        if self
            .cut
            .lock()
            .extract_if(.., |ending| cut(ending))
            .next()
            .is_some()
        {
            return Err(CallError::Unknown);
        }
        let mut outcome = Err(());
        self.ledger.with(&call.run, &mut |lines| {
            let failed = Line::Fail { key: key.clone() };
            if lines.iter().filter(|line| **line == failed).count() < failures {
                return vec![failed];
            }
            match (effect, answers(lines, key).first()) {
                (Effect::Idempotent, Some(first)) => {
                    outcome = Ok(first.clone());
                    Vec::new()
                }
                (Effect::Idempotent, None) | (Effect::Unsafe | Effect::ReadOnly, _) => {
                    let answer = format!("{:016x}", fastrand::u64(..));
                    outcome = Ok(answer.clone());
                    vec![Line::Apply {
                        key: key.clone(),
                        answer,
                    }]
                }
            }
        });
        self.work().await;
        match outcome {
            Ok(answer) => Ok(Bytes::from(answer)),
            Err(()) => Err(Failure::new(FailureKind::Unavailable, "not this time").into()),
        }
    }

    async fn work(&self) {
        let pace = (self.pace)();
        if !pace.is_zero() {
            tokio::time::sleep(pace).await;
        }
    }

    async fn arrive(&self, call: &Call, effect: Effect) {
        let found = self.store.journal(&call.run, call.activation).await.ok();
        let attempt = found.as_ref().map(|journal| {
            let record = journal.activities.iter().find(|a| a.id == call.activity);
            record.and_then(|record| match record.state {
                ActivityState::Running => record.attempts.last().cloned(),
                ActivityState::Prepared
                | ActivityState::Completed
                | ActivityState::Failed
                | ActivityState::Unknown => None,
            })
        });
        let completed = found.map(|journal| {
            let completed = journal.activities.iter();
            completed
                .filter(|a| a.state == ActivityState::Completed)
                .map(|a| a.key.as_str().to_owned())
                .collect()
        });
        let line = Line::Call {
            key: call.idempotency_key.clone(),
            effect: effect.as_str().to_owned(),
            attempt: call.attempt,
            input: String::from_utf8_lossy(&call.input).into_owned(),
            pid: std::process::id(),
            intent: match effect {
                Effect::ReadOnly => None,
                Effect::Idempotent | Effect::Unsafe => attempt
                    .as_ref()
                    .map(|found| found.as_ref().is_some_and(|a| a.n == call.attempt)),
            },
            incarnation: attempt.flatten().map(|a| a.incarnation),
            completed,
        };
        self.ledger.add(&call.run, &line);
    }

    /// The answers of a key's effects, in order.
    pub fn answers(&self, run: &RunId, key: &str) -> Vec<String> {
        answers(&self.ledger.lines(run), key)
    }
}

/// The answers of a key's effects among some lines.
pub fn answers(lines: &[Line], key: &str) -> Vec<String> {
    let of_key = |line: &Line| match line {
        Line::Apply { key: k, answer } if k == key => Some(answer.clone()),
        Line::Apply { .. } | Line::Call { .. } | Line::Fail { .. } | Line::Commit { .. } => None,
    };
    lines.iter().filter_map(of_key).collect()
}
