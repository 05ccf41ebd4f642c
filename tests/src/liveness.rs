//! Reads what the product tells of stalls: the counters and the structured lines of 004, by their whole rows.
//!
//! A row is its label values in the order of 004, joined by `/`. Whoever reads a family here checks its label names and
//! its closed values on the way.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::Value;

use crate::eventually;
use crate::metrics::Page;
use crate::process::Process;
use crate::stack::{Shape, Stack};

/// A counter of 004 with its closed labels.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    pub name: &'static str,
    pub labels: &'static [(&'static str, &'static [&'static str])],
}

/// How often each row was counted; rows at zero are left out.
pub type Rows = BTreeMap<String, u64>;

const PATHS: &[&str] = &["normalized", "provider_tunnel", "unknown"];
const HEALTHS: &[&str] = &["available", "unavailable", "unknown"];

pub const STALLS: Family = Family {
    name: "iop_node_response_stalls_total",
    labels: STALL_LABELS,
};

const STALL_LABELS: &[(&str, &[&str])] = &[
    ("execution_path", PATHS),
    ("provider_health", HEALTHS),
    (
        "liveness_classification",
        &["request_stalled", "provider_unhealthy", "health_unknown"],
    ),
    ("attempt_fence", &["confirmed", "unconfirmed", "unknown"]),
];

pub const EVIDENCE: Family = Family {
    name: "iop_edge_provider_health_evidence_total",
    labels: &[
        ("source", &["stall", "probe", "unknown"]),
        ("evidence_health", HEALTHS),
        (
            "decision",
            &[
                "applied",
                "rejected_stale",
                "rejected_binding",
                "rejected_ambiguous",
                "inconclusive",
            ],
        ),
    ],
};

pub const TRANSITIONS: Family = Family {
    name: "iop_edge_provider_health_transitions_total",
    labels: &[("from_health", HEALTHS), ("to_health", HEALTHS)],
};

pub const ELIGIBILITY: Family = Family {
    name: "iop_edge_liveness_recovery_eligibility_total",
    labels: &[
        ("execution_path", PATHS),
        ("provider_health", HEALTHS),
        (
            "commit_state",
            &[
                "transport_uncommitted",
                "stream_open",
                "terminal_committed",
                "unknown",
            ],
        ),
        (
            "eligibility",
            &[
                "eligible",
                "no_owner",
                "post_commit",
                "unconfirmed_fence",
                "caller_cancelled",
                "tool_side_effect",
                "budget_exhausted",
                "no_candidate",
                "same_provider_forbidden",
                "other",
            ],
        ),
    ],
};

pub const RESULTS: Family = Family {
    name: "iop_edge_liveness_recovery_results_total",
    labels: &[
        ("execution_path", PATHS),
        ("provider_health", HEALTHS),
        (
            "recovery_result",
            &[
                "redispatched",
                "plan_rejected",
                "abort_failed",
                "rebuild_failed",
                "dispatch_failed",
                "not_selected",
                "terminal",
                "other",
            ],
        ),
    ],
};

/// The histogram beside `STALLS`.
pub const STALL_DURATION: &str = "iop_node_response_stall_duration_seconds";

impl Family {
    /// Every row of the page, zero or not.
    ///
    /// # Panics
    /// When a series has other labels than 004's, or a value outside their sets.
    pub fn all(&self, page: &Page) -> BTreeMap<String, u64> {
        self.read(page, self.name, &[])
    }

    /// The rows that were counted.
    pub fn rows(&self, page: &Page) -> Rows {
        let mut rows = self.all(page);
        rows.retain(|_, n| *n > 0);
        rows
    }

    /// The rows of a series of that name with these labels, apart from `more`.
    ///
    /// # Panics
    /// As `all`; also when a row is there twice.
    pub fn read(&self, page: &Page, name: &str, more: &[&str]) -> BTreeMap<String, u64> {
        let mut rows = BTreeMap::new();
        for sample in page.0.iter().filter(|s| s.name == name) {
            let names: BTreeSet<&str> = sample.labels.keys().map(String::as_str).collect();
            let expected = self.labels.iter().map(|(label, _)| *label);
            let expected: BTreeSet<&str> = expected.chain(more.iter().copied()).collect();
            assert_eq!(names, expected, "labels of {name}");
            let mut row = Vec::new();
            for (label, values) in self.labels {
                let value = sample.labels[*label].as_str();
                assert!(values.contains(&value), "{name}: {label}={value:?}");
                row.push(value);
            }
            for label in more {
                row.push(&sample.labels[*label]);
            }
            // Counts are whole numbers far below 2^53.
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "counts are small"
            )]
            let count = sample.value as u64;
            let twice = rows.insert(row.join("/"), count);
            assert_eq!(twice, None, "{name} has two series {row:?}");
        }
        rows
    }

    /// The whole product of the label values.
    pub fn product(&self) -> BTreeSet<String> {
        let mut rows = vec![String::new()];
        for (_, values) in self.labels {
            let longer = |row: &String| {
                let join = |value: &&str| match row.as_str() {
                    "" => (*value).to_owned(),
                    row => format!("{row}/{value}"),
                };
                values.iter().map(join).collect::<Vec<_>>()
            };
            rows = rows.iter().flat_map(longer).collect();
        }
        rows.into_iter().collect()
    }
}

/// Rows as a test expects them.
pub fn rows(of: &[(&str, u64)]) -> Rows {
    of.iter().map(|(row, n)| ((*row).to_owned(), *n)).collect()
}

/// A structured line of 004, by its `message`.
#[derive(Debug, Clone, Copy)]
pub struct Line {
    pub message: &'static str,
    pub fields: &'static [&'static str],
}

pub const STALL_LINE: Line = Line {
    message: "node_response_stall_observation",
    fields: &[
        "execution_path",
        "provider_health",
        "liveness_classification",
        "attempt_fence",
        "idle_duration_ms",
    ],
};

pub const HEALTH_LINE: Line = Line {
    message: "edge_provider_health_observation",
    fields: &[
        "source",
        "evidence_health",
        "decision",
        "from_health",
        "to_health",
        "state_changed",
    ],
};

pub const RECOVERY_LINE: Line = Line {
    message: "edge_liveness_recovery_observation",
    fields: &[
        "phase",
        "execution_path",
        "provider_health",
        "commit_state",
        "eligibility",
        "recovery_result",
    ],
};

/// What every line of the log has, whatever it tells.
const FRAME: [&str; 4] = ["timestamp", "level", "target", "message"];

impl Line {
    /// These lines of a process, in order.
    ///
    /// # Panics
    /// When one has other fields than 004's.
    pub fn of(&self, process: &Process) -> Vec<Value> {
        let mut lines = Vec::new();
        for text in process.lines_with(self.message) {
            let line: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
            if line["message"] != self.message {
                panic!("{:?} elsewhere than in `message`: {text}", self.message);
            }
            let fields: BTreeSet<&str> = line.as_object().unwrap().keys().map(String::as_str).collect();
            let expected: BTreeSet<&str> = FRAME.into_iter().chain(self.fields.iter().copied()).collect();
            assert_eq!(fields, expected, "{text}");
            lines.push(line);
        }
        lines
    }

    /// How many of these lines a process has, whatever else stands in them: at finer levels the log adds its spans.
    pub fn count(&self, process: &Process) -> usize {
        process.lines_with(self.message).len()
    }

    /// How often each combination of these fields was logged, read as rows.
    pub fn rows(&self, process: &Process, fields: &[&str]) -> Rows {
        let mut rows = Rows::new();
        for line in self.of(process) {
            let row: Vec<String> = fields.iter().map(|f| word(&line[f])).collect();
            *rows.entry(row.join("/")).or_default() += 1;
        }
        rows
    }
}

fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The page with the families of the node: the edge's own for an embedded one.
///
/// # Panics
/// When a node has no metrics listener.
pub async fn node_page(stack: &Stack) -> Page {
    match stack.shape {
        Shape::Embedded => stack.edge.scrape().await,
        Shape::Linked => {
            assert_eq!(stack.nodes.len(), 1, "one node's page");
            stack.nodes[0].scrape().await.expect("the node has metrics")
        }
    }
}

/// The process that logs for the node.
pub fn node_process(stack: &Stack) -> &Process {
    match stack.shape {
        Shape::Embedded => &stack.edge.process,
        Shape::Linked => &stack.nodes[0].process,
    }
}

/// Waits until the counted rows of the edge are exactly these.
pub async fn edge_rows(stack: &Stack, family: Family, expected: &Rows) {
    eventually(family.name, Duration::from_secs(5), || async {
        same(expected, &family.rows(&stack.edge.scrape().await))
    })
    .await;
}

/// Waits until the counted rows of the node are exactly these.
pub async fn node_rows(stack: &Stack, family: Family, expected: &Rows) {
    eventually(family.name, Duration::from_secs(5), || async {
        same(expected, &family.rows(&node_page(stack).await))
    })
    .await;
}

/// Waits until the lines of a process, read as rows of `fields`, are exactly these.
pub async fn lines(process: &Process, line: Line, fields: &[&str], expected: &Rows) {
    eventually(line.message, Duration::from_secs(5), || async {
        same(expected, &line.rows(process, fields))
    })
    .await;
}

fn same(expected: &Rows, seen: &Rows) -> Result<(), String> {
    if expected == seen {
        return Ok(());
    }
    let missing: Rows = expected
        .iter()
        .filter(|(row, n)| seen.get(*row) != Some(n))
        .map(|(row, n)| (row.clone(), *n))
        .collect();
    let other: Rows = seen
        .iter()
        .filter(|(row, n)| expected.get(*row) != Some(n))
        .map(|(row, n)| (row.clone(), *n))
        .collect();
    Err(format!("expected {missing:?}, there is {other:?}"))
}

/// One provider of `/api/v1/providers` by the id that its own configuration gives it.
///
/// # Panics
/// When it is not there.
pub async fn provider(stack: &Stack, id: &str) -> Value {
    let behind = format!("/{id}");
    let all = stack.edge.admin("providers").await;
    let named = |p: &&Value| {
        p["id"]
            .as_str()
            .is_some_and(|full| full == id || full.ends_with(&behind))
    };
    all.iter()
        .find(named)
        .unwrap_or_else(|| panic!("no {id} in {all:?}"))
        .clone()
}

/// What the snapshot says of a provider's health: status, health, effective capacity, overlay's health.
pub fn projection(provider: &Value) -> (String, String, u64, Option<String>) {
    (
        word(&provider["status"]),
        word(&provider["health"]),
        provider["effective_capacity"].as_u64().unwrap(),
        provider["overlay"]["health"].as_str().map(str::to_owned),
    )
}

/// A provider that nothing has lowered.
///
/// # Panics
/// When something has.
pub fn assert_clean(provider: &Value) {
    let whole = provider["capacity"].as_u64().unwrap();
    let clean = ("available".to_owned(), "available".to_owned(), whole, None);
    assert_eq!(projection(provider), clean, "{provider}");
    assert_eq!(provider["overlay"], Value::Null, "{provider}");
}

/// A provider that the evidence of that number has lowered.
///
/// # Panics
/// When it is not.
pub fn assert_lowered(provider: &Value, sequence: Option<u64>) {
    let gone = "unavailable".to_owned();
    assert_eq!(
        projection(provider),
        (gone.clone(), gone.clone(), 0, Some(gone)),
        "{provider}"
    );
    assert!(
        sequence.is_none_or(|n| provider["overlay"]["sequence"] == n),
        "{provider}"
    );
}

/// A provider that newer evidence has raised again.
///
/// # Panics
/// When it is not.
pub fn assert_raised(provider: &Value, sequence: Option<u64>) {
    let back = "available".to_owned();
    let whole = provider["capacity"].as_u64().unwrap();
    assert_eq!(
        projection(provider),
        (back.clone(), back.clone(), whole, Some(back)),
        "{provider}"
    );
    assert!(
        sequence.is_none_or(|n| provider["overlay"]["sequence"] == n),
        "{provider}"
    );
}

/// Waits until a provider is in the state that `check` asserts.
pub async fn until_status(stack: &Stack, id: &str, status: &str, bound: Duration) {
    eventually(&format!("{id} is {status}"), bound, || async {
        let provider = provider(stack, id).await;
        if provider["status"] == status {
            Ok(())
        } else {
            Err(provider.to_string())
        }
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_has_every_row_once() {
        assert_eq!(STALLS.product().len(), 81);
        assert_eq!(EVIDENCE.product().len(), 45);
        assert_eq!(TRANSITIONS.product().len(), 9);
        assert_eq!(ELIGIBILITY.product().len(), 360);
        assert_eq!(RESULTS.product().len(), 72);
        assert!(TRANSITIONS.product().contains("available/unavailable"));
    }

    #[test]
    fn rows_are_read_in_the_order_of_the_contract() {
        let page = Page::parse(
            "iop_edge_provider_health_transitions_total{to_health=\"unavailable\",from_health=\"available\"} 2\n\
             iop_edge_provider_health_transitions_total{to_health=\"available\",from_health=\"available\"} 0\n",
        );
        assert_eq!(TRANSITIONS.rows(&page), rows(&[("available/unavailable", 2)]));
        assert_eq!(TRANSITIONS.all(&page).len(), 2);
        assert!(same(&rows(&[("a", 1)]), &rows(&[("a", 2)])).is_err());
    }

    #[test]
    #[should_panic(expected = "from_health=\"gone\"")]
    fn a_value_outside_its_set_is_seen() {
        let page = Page::parse(
            "iop_edge_provider_health_transitions_total{to_health=\"unavailable\",from_health=\"gone\"} 0\n",
        );
        TRANSITIONS.all(&page);
    }
}
