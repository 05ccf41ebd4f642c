//! Reads: pages, lists and single rows. What a run has is read with one text, whether there is such a run included.

use super::args::{Args, args};
use super::clock::Clocks;
use super::readers::{Readers, of_run};
use super::rebuild::IndexRow;
use super::rows::{Found, activity_columns, bytes_of, wait_columns};
use crate::ids::{ActivityId, CorrelationId, DecisionId, Revision, RunId, WaitId};
use crate::record::{
    ActivityRecord, CheckpointRecord, DecisionRecord, EventRecord, Scope, StepRecord, WaitRecord, WaitingKind,
};
use crate::store::rows::{self, Cells, all, signed};
use crate::store::{Created, Due, IdempotencyKey, Journal, Listed, Loaded, RunFilter, StoreError};
use crate::time::Timestamp;

/// A run with the lease on it.
const LOAD: &[&str] = of_run!(concat!(
    "SELECT ",
    rows::lease_columns!(),
    ", ",
    rows::head_columns!(bytes_of!("r", "state", "state_digest")),
    " FROM runs r LEFT JOIN run_leases l ON l.run_id = r.run_id WHERE r.run_id = ?"
));

/// The waits of a run.
const WAITS: &[&str] = of_run!(concat!(
    "SELECT ",
    wait_columns!(),
    " FROM waits w WHERE w.run_id = ? ORDER BY w.armed_at, w.wait_id"
));

/// The connections and the clock that reads need.
#[derive(Debug)]
pub(super) struct Reads {
    pub(super) readers: Readers,
    clocks: Clocks,
}

impl Reads {
    pub(super) fn new(readers: Readers, clocks: Clocks) -> Self {
        Self { readers, clocks }
    }

    pub(super) async fn close(&self) {
        self.readers.close().await;
    }

    pub(super) async fn load(&self, run: &RunId) -> Result<Loaded, StoreError> {
        let id = run.as_str();
        let lease_now = self.clocks.lease().as_millis();
        let answer = self.readers.of_run(LOAD, args![id, id]).await?;
        self.loaded(run, lease_now, &answer)
    }

    /// The same for several runs.
    ///
    /// # Errors
    /// `unavailable` for all of them.
    pub(super) async fn load_all(
        &self,
        runs: &[RunId],
    ) -> Result<Vec<Result<Loaded, StoreError>>, StoreError> {
        let lease_now = self.clocks.lease().as_millis();
        let args = runs.iter().map(|run| args![run.as_str(), run.as_str()]);
        let answers = self.readers.of_runs(LOAD, args.collect()).await?;
        let loaded = runs
            .iter()
            .zip(answers)
            .map(|(run, answer)| answer.and_then(|answer| self.loaded(run, lease_now, &answer)));
        Ok(loaded.collect())
    }

    /// What `LOAD` has found.
    fn loaded(&self, run: &RunId, lease_now: i64, answer: &[Vec<Found>]) -> Result<Loaded, StoreError> {
        let row = answer.first().and_then(|rows| rows.first());
        // It was deleted between the two statements.
        let mut cells = Cells::new(row.ok_or(StoreError::Deleted)?);
        let lease = rows::live_lease(&mut cells, run, lease_now)?;
        rows::head(&mut cells)?.open(run, lease, self.clocks.wall())
    }

    pub(super) async fn journal(&self, run: &RunId, activation: u64) -> Result<Journal, StoreError> {
        const SQL: &[&str] = of_run!(
            concat!(
                "SELECT ",
                activity_columns!(),
                " FROM activities a WHERE a.run_id = ? AND a.activation = ? UNION ALL SELECT ",
                activity_columns!(),
                " FROM activities a INDEXED BY activities_open WHERE a.run_id = ? AND a.activation <> ? \
                 AND a.state <> 'completed' AND a.state <> 'failed' ORDER BY 3, 2"
            ),
            concat!(
                "SELECT ",
                wait_columns!(),
                " FROM waits w WHERE w.run_id = ? AND (w.activation = ? OR w.status = 'armed') \
                 ORDER BY w.armed_at, w.wait_id"
            )
        );
        let (id, activation) = (run.as_str(), signed(activation));
        let args = args![id, id, activation, id, activation, id, activation];
        let answer = self.readers.of_run(SQL, args).await?;
        let mut answer = answer.into_iter();
        let mut next = || answer.next().unwrap_or_default();
        Ok(Journal {
            activities: all(&next(), |row| rows::activity(row, run))?,
            waits: all(&next(), |row| rows::wait(row, Some(run)))?,
        })
    }

    pub(super) async fn activity(
        &self,
        run: &RunId,
        id: &ActivityId,
    ) -> Result<Option<ActivityRecord>, StoreError> {
        const SQL: &[&str] = of_run!(concat!(
            "SELECT ",
            activity_columns!(),
            " FROM activities a WHERE a.run_id = ? AND a.activity_id = ?"
        ));
        let args = args![run.as_str(), run.as_str(), id.as_str()];
        let found = self.of_run(SQL, args).await?;
        found.first().map(|row| rows::activity(row, run)).transpose()
    }

    pub(super) async fn activities(
        &self,
        run: &RunId,
        after: Option<&ActivityId>,
        limit: u32,
    ) -> Result<Vec<ActivityRecord>, StoreError> {
        const FIRST: &[&str] = of_run!(concat!(
            "SELECT ",
            activity_columns!(),
            " FROM activities a WHERE a.run_id = ? ORDER BY a.activation, a.activity_id LIMIT ?"
        ));
        const NEXT: &[&str] = of_run!(concat!(
            "SELECT ",
            activity_columns!(),
            " FROM activities a WHERE a.run_id = ? AND (a.activation, a.activity_id) > \
             (SELECT activation, activity_id FROM activities WHERE run_id = ? AND activity_id = ?) \
             ORDER BY a.activation, a.activity_id LIMIT ?"
        ));
        let (id, limit) = (run.as_str(), i64::from(limit));
        let found = match after {
            None => self.of_run(FIRST, args![id, id, limit]).await?,
            Some(after) => {
                self.of_run(NEXT, args![id, id, id, after.as_str(), limit])
                    .await?
            }
        };
        all(&found, |row| rows::activity(row, run))
    }

    pub(super) async fn wait(&self, run: &RunId, id: &WaitId) -> Result<Option<WaitRecord>, StoreError> {
        const SQL: &[&str] = of_run!(concat!(
            "SELECT ",
            wait_columns!(),
            " FROM waits w WHERE w.run_id = ? AND w.wait_id = ?"
        ));
        let args = args![run.as_str(), run.as_str(), id.as_str()];
        let found = self.of_run(SQL, args).await?;
        found.first().map(|row| rows::wait(row, Some(run))).transpose()
    }

    pub(super) async fn keyed(&self, key: &IdempotencyKey) -> Result<Option<Created>, StoreError> {
        const SQL: &str = "SELECT request, run_id FROM idempotency_keys WHERE scope = ? AND key = ?";
        let found = self
            .readers
            .rows(SQL, args![key.scope.as_str(), key.key.as_str()])
            .await?;
        found.first().map(|row| rows::keyed(row, key)).transpose()
    }

    pub(super) async fn waits(&self, run: &RunId) -> Result<Vec<WaitRecord>, StoreError> {
        let found = self.of_run(WAITS, args![run.as_str(), run.as_str()]).await?;
        all(&found, |row| rows::wait(row, Some(run)))
    }

    /// Every wait is opened.
    pub(super) async fn misfiled(&self, run: &RunId) -> Result<Vec<(WaitId, WaitingKind)>, StoreError> {
        let found = self.of_run(WAITS, args![run.as_str(), run.as_str()]).await?;
        rows::misfiled(&found, run)
    }

    /// A corrupt row does not hide the others; whoever loads its run finds it.
    pub(super) async fn armed(
        &self,
        correlation: &CorrelationId,
        limit: u32,
    ) -> Result<Vec<WaitRecord>, StoreError> {
        const SQL: &str = concat!(
            "SELECT ",
            wait_columns!(),
            " FROM waits w INDEXED BY waits_armed WHERE w.correlation_id = ? AND w.status = 'armed' \
             ORDER BY w.armed_at, w.run_id, w.wait_id LIMIT ? OFFSET ?"
        );
        let mut armed = Vec::new();
        let mut seen = 0;
        loop {
            let missing = i64::from(limit) - signed(armed.len() as u64);
            let page = self
                .readers
                .rows(SQL, args![correlation.as_str(), missing, seen])
                .await?;
            armed.extend(page.iter().filter_map(|row| rows::wait(row, None).ok()));
            if page.is_empty() || armed.len() >= limit as usize {
                return Ok(armed);
            }
            seen += signed(page.len() as u64);
        }
    }

    pub(super) async fn addressed(
        &self,
        correlation: &CorrelationId,
        id: &DecisionId,
        limit: u32,
    ) -> Result<Vec<WaitRecord>, StoreError> {
        const SQL: &str = concat!(
            "SELECT ",
            wait_columns!(),
            " FROM decisions d INDEXED BY decisions_of_waits CROSS JOIN waits w \
             ON w.run_id = d.run_id AND w.wait_id = substr(d.scope, 6) \
             WHERE d.decision_id = ? AND d.scope >= 'wait:' AND d.scope < 'wait;' AND w.correlation_id = ? \
             ORDER BY w.armed_at, w.run_id, w.wait_id LIMIT ?"
        );
        let found = self
            .readers
            .rows(SQL, args![id.as_str(), correlation.as_str(), i64::from(limit)])
            .await?;
        Ok(found
            .iter()
            .filter_map(|row| rows::wait(row, None).ok())
            .collect())
    }

    pub(super) async fn decision(
        &self,
        run: &RunId,
        scope: &Scope,
        id: &DecisionId,
    ) -> Result<Option<DecisionRecord>, StoreError> {
        const SQL: &str = concat!(
            "SELECT ",
            rows::decision_columns!(),
            " FROM decisions d WHERE d.run_id = ? AND d.scope = ? AND d.decision_id = ?"
        );
        let args = args![run.as_str(), scope.to_text(), id.as_str()];
        let found = self.readers.rows(SQL, args).await?;
        found.first().map(|row| rows::decision(row, run)).transpose()
    }

    pub(super) async fn decisions(
        &self,
        run: &RunId,
        scope: &Scope,
    ) -> Result<Vec<DecisionRecord>, StoreError> {
        const SQL: &str = concat!(
            "SELECT ",
            rows::decision_columns!(),
            " FROM decisions d WHERE d.run_id = ? AND d.scope = ? ORDER BY d.created_at, d.decision_id"
        );
        let args = args![run.as_str(), scope.to_text()];
        let found = self.readers.rows(SQL, args).await?;
        all(&found, |row| rows::decision(row, run))
    }

    pub(super) async fn steps(
        &self,
        run: &RunId,
        after: u64,
        limit: u32,
    ) -> Result<Vec<StepRecord>, StoreError> {
        const SQL: &[&str] = of_run!(
            "SELECT s.body FROM steps s WHERE s.run_id = ? AND s.activation > ? ORDER BY s.activation LIMIT ?"
        );
        let args = args![run.as_str(), run.as_str(), signed(after), i64::from(limit)];
        all(&self.of_run(SQL, args).await?, rows::step)
    }

    pub(super) async fn events(
        &self,
        run: &RunId,
        after: u64,
        limit: u32,
    ) -> Result<Vec<EventRecord>, StoreError> {
        const SQL: &str = concat!(
            "SELECT ",
            rows::event_columns!(),
            " FROM events e WHERE e.run_id = ? AND e.seq > ? ORDER BY e.seq LIMIT ?"
        );
        let args = args![run.as_str(), signed(after), i64::from(limit)];
        let found = self.readers.rows(SQL, args).await?;
        all(&found, rows::event)
    }

    pub(super) async fn history(
        &self,
        run: &RunId,
        before: Option<Revision>,
        limit: u32,
    ) -> Result<Vec<CheckpointRecord>, StoreError> {
        const SQL: &[&str] = of_run!(concat!(
            "SELECT ",
            rows::checkpoint_columns!("NULL"),
            " FROM checkpoints c WHERE c.run_id = ? AND (? IS NULL OR c.revision < ?) \
             ORDER BY c.revision DESC LIMIT ?"
        ));
        let before = before.map(|revision| signed(revision.get()));
        let args = args![run.as_str(), run.as_str(), before, before, i64::from(limit)];
        all(&self.of_run(SQL, args).await?, |row| {
            rows::listed_checkpoint(row, run)
        })
    }

    pub(super) async fn checkpoint(
        &self,
        run: &RunId,
        revision: Revision,
    ) -> Result<CheckpointRecord, StoreError> {
        const SQL: &[&str] = of_run!(concat!(
            "SELECT ",
            rows::checkpoint_columns!(concat!(
                "CASE WHEN c.pruned THEN NULL ELSE ",
                bytes_of!("c", "state", "state_digest"),
                " END"
            )),
            " FROM checkpoints c WHERE c.run_id = ? AND c.revision = ?"
        ));
        let args = args![run.as_str(), run.as_str(), signed(revision.get())];
        let found = self.of_run(SQL, args).await?;
        let row = found.first().ok_or(StoreError::CheckpointUnavailable)?;
        rows::checkpoint(row, run)
    }

    pub(super) async fn list(&self, filter: RunFilter) -> Result<Vec<Listed>, StoreError> {
        let (sql, args) = list(filter);
        let found = self.readers.rows(sql, args).await?;
        all(&found, rows::listed)
    }

    pub(super) async fn due(
        &self,
        until: Timestamp,
        after: Option<&(Timestamp, RunId)>,
        limit: u32,
    ) -> Result<Vec<Due>, StoreError> {
        const SQL: &str = concat!(
            "SELECT ",
            rows::due_columns!(),
            ", EXISTS (SELECT 1 FROM run_leases l WHERE l.run_id = r.run_id AND l.expires_at > ?) \
             FROM runs r INDEXED BY runs_due WHERE r.due_at <= ? AND r.quarantine IS NULL \
             AND (r.due_at, r.run_id) > (?, ?) ORDER BY r.due_at, r.run_id LIMIT ?"
        );
        let (time, run) = after.map_or((0, ""), |(time, run)| (time.as_millis(), run.as_str()));
        let args = args![
            self.clocks.lease().as_millis(),
            until.as_millis(),
            time,
            run,
            i64::from(limit),
        ];
        let found = self.readers.rows(SQL, args).await?;
        all(&found, rows::due)
    }

    /// Every run in order of ids, after this one.
    pub(super) async fn index(&self, after: Option<&RunId>, limit: u32) -> Result<Vec<IndexRow>, StoreError> {
        const SQL: &str =
            "SELECT run_id, revision, signal, due_at FROM runs WHERE run_id > ? ORDER BY run_id LIMIT ?";
        let args = args![after.map_or("", RunId::as_str), i64::from(limit)];
        let found = self.readers.rows(SQL, args).await?;
        all(&found, |row| {
            let mut cells = Cells::new(row);
            Ok(IndexRow {
                run: cells.run()?,
                revision: cells.get()?,
                signal: cells.get()?,
                due_at: cells.get()?,
            })
        })
    }

    async fn of_run(&self, texts: &'static [&'static str], args: Args) -> Result<Vec<Found>, StoreError> {
        let answer = self.readers.of_run(texts, args).await?;
        Ok(answer.into_iter().next().unwrap_or_default())
    }
}

/// The text of a list: only the conditions that are asked for, so that each finds its index.
fn list(filter: RunFilter) -> (String, Args) {
    let mut sql = concat!("SELECT ", rows::listed_columns!("NULL"), " FROM runs r WHERE 1").to_owned();
    let mut args = Args::default();
    let mut when = |condition: &str| {
        sql.push_str(" AND ");
        sql.push_str(condition);
    };
    if let Some((kind, name)) = filter.definition {
        when("r.kind = ? AND r.definition = ?");
        args.put(kind).put(name);
    }
    if let Some(parent) = &filter.parent {
        when("r.parent_id = ?");
        args.put(parent.as_str());
    }
    if let Some(owner) = filter.owner {
        // Few runs have one parent or wait for one kind: their indexes lead, whatever an owner has.
        let narrow = filter.parent.is_some() || filter.waiting_kind.is_some();
        when(if narrow { "+r.owner = ?" } else { "r.owner = ?" });
        args.put(owner);
    }
    if let Some(status) = filter.status {
        when("r.status = ?");
        args.put(status.as_str());
    }
    if let Some(kind) = filter.waiting_kind {
        when("r.waiting_kind = ?");
        args.put(kind.as_str());
    }
    if let Some(before) = filter.due_before {
        when("r.due_at < ?");
        args.put(before.as_millis());
    }
    if let Some((time, run)) = &filter.after {
        when("(r.created_at, r.run_id) > (?, ?)");
        args.put(time.as_millis()).put(run.as_str());
    }
    sql.push_str(" ORDER BY r.created_at, r.run_id LIMIT ?");
    args.put(i64::from(filter.limit));
    (sql, args)
}
