//! What is found over all runs: lists, due work, armed waits.

use super::connect::Pool;
use super::rows::WAITS;
use super::sql::{NOW, Sql};
use crate::ids::{CorrelationId, DecisionId, RunId};
use crate::record::WaitRecord;
use crate::store::rows::{self, all};
use crate::store::{Due, Listed, RunFilter, StoreError};
use crate::time::Timestamp;

/// A corrupt row does not hide the others; whoever loads its run finds it.
pub(super) async fn armed(
    pool: &Pool,
    correlation: &CorrelationId,
    limit: u32,
) -> Result<Vec<WaitRecord>, StoreError> {
    let rows = pool
        .read(|| {
            let mut sql = Sql::new(WAITS);
            sql.push("WHERE w.status = 'armed' AND w.correlation_id = ")
                .bind(correlation.as_str())
                .push(" ORDER BY w.armed_at, w.run_id, w.wait_id LIMIT ")
                .bind(i64::from(limit));
            sql
        })
        .await?;
    Ok(rows.iter().filter_map(|row| rows::wait(row, None).ok()).collect())
}

/// A corrupt row does not hide the others, as above.
pub(super) async fn addressed(
    pool: &Pool,
    correlation: &CorrelationId,
    id: &DecisionId,
    limit: u32,
) -> Result<Vec<WaitRecord>, StoreError> {
    let rows = pool
        .read(|| {
            let mut sql = Sql::new(WAITS);
            sql.push("JOIN decisions t ON t.run_id = w.run_id AND t.scope = 'wait:' || w.wait_id WHERE t.decision_id = ")
                .bind(id.as_str())
                .push(" AND t.scope >= 'wait:' AND t.scope < 'wait;' AND w.correlation_id = ")
                .bind(correlation.as_str())
                .push(" ORDER BY w.armed_at, w.run_id, w.wait_id LIMIT ")
                .bind(i64::from(limit));
            sql
        })
        .await?;
    Ok(rows.iter().filter_map(|row| rows::wait(row, None).ok()).collect())
}

pub(super) async fn list(pool: &Pool, filter: &RunFilter) -> Result<Vec<Listed>, StoreError> {
    let rows = pool.read(|| list_sql(filter)).await?;
    all(&rows, rows::listed)
}

/// The order is that of one index, and the statement is written so that only that index gives it: the equality of the first
/// filter stands as a range of the whole key. For a filter that almost nothing passes, walking all runs in their order would
/// else look cheap.
fn list_sql(filter: &RunFilter) -> Sql {
    let (leading, values): (&[&str], Vec<&str>) = match filter {
        RunFilter {
            parent: Some(parent), ..
        } => (&["parent_id"], vec![parent.as_str()]),
        RunFilter {
            waiting_kind: Some(kind),
            ..
        } => (&["waiting_kind"], vec![kind.as_str()]),
        // Few runs are not over.
        RunFilter {
            status: Some(status), ..
        } if !status.is_terminal() => (&["status"], vec![status.as_str()]),
        RunFilter {
            owner: Some(owner), ..
        } => (&["owner"], vec![owner]),
        RunFilter {
            definition: Some((kind, name)),
            ..
        } => (&["kind", "definition"], vec![kind, name]),
        RunFilter {
            status: Some(status), ..
        } => (&["status"], vec![status.as_str()]),
        RunFilter { .. } => (&[], Vec::new()),
    };
    let key = leading
        .iter()
        .map(|column| format!("r.{column}, "))
        .collect::<String>()
        + "r.created_at, r.run_id";
    let mut sql = Sql::new(concat!(
        "SELECT ",
        rows::listed_columns!("NULL::bytea"),
        " FROM runs r WHERE ("
    ));
    sql.push(&key).push(") > (");
    for value in &values {
        sql.bind(*value).push(", ");
    }
    let (time, run) = filter
        .after
        .as_ref()
        .map_or((i64::MIN, ""), |(time, run)| (time.as_millis(), run.as_str()));
    sql.bind(time).push(", ").bind(run).push(")");
    for (column, value) in leading.iter().zip(&values) {
        sql.push(" AND r.").push(column).push(" <= ").bind(*value);
    }
    if let Some(status) = filter.status
        && leading != ["status"]
    {
        sql.push(" AND r.status = ").bind(status.as_str());
    }
    if let Some(owner) = &filter.owner
        && leading != ["owner"]
    {
        sql.push(" AND r.owner = ").bind(&**owner);
    }
    if let Some((kind, name)) = &filter.definition
        && leading != ["kind", "definition"]
    {
        sql.push(" AND r.kind = ")
            .bind(&**kind)
            .push(" AND r.definition = ")
            .bind(&**name);
    }
    if let Some(kind) = filter.waiting_kind
        && leading != ["waiting_kind"]
    {
        sql.push(" AND r.waiting_kind = ").bind(kind.as_str());
    }
    if let Some(before) = filter.due_before {
        sql.push(" AND r.due_at < ").bind(before.as_millis());
    }
    sql.push(" ORDER BY ")
        .push(&key)
        .push(" LIMIT ")
        .bind(i64::from(filter.limit));
    sql
}

pub(super) async fn due(
    pool: &Pool,
    until: Timestamp,
    after: Option<&(Timestamp, RunId)>,
    limit: u32,
) -> Result<Vec<Due>, StoreError> {
    let rows = pool
        .read(|| {
            let mut sql = Sql::new(concat!(
                "SELECT ",
                rows::due_columns!(),
                ", COALESCE((SELECT l.expires_at > "
            ));
            sql.push(NOW)
                .push(
                    " FROM run_leases l WHERE l.run_id = r.run_id), false) FROM runs r \
                     WHERE r.quarantine IS NULL AND r.due_at <= ",
                )
                .bind(until.as_millis());
            if let Some((time, run)) = after {
                sql.push(" AND (r.due_at, r.run_id) > (")
                    .bind(time.as_millis())
                    .push(", ")
                    .bind(run.as_str())
                    .push(")");
            }
            sql.push(" ORDER BY r.due_at, r.run_id LIMIT ")
                .bind(i64::from(limit));
            sql
        })
        .await?;
    all(&rows, rows::due)
}
