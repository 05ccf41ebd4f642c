//! Dashboards, alert rules and the metrics reference name what a running edge and node expose, and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use iop_tests::client::Client;
use iop_tests::config::{Provider, Setup};
use iop_tests::metrics::Page;
use iop_tests::run;
use iop_tests::stack::{Shape, Stack};
use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_path_buf()
}

fn files(extension: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for file in std::fs::read_dir(root().join("dashboards")).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.extension().is_some_and(|e| e == extension) && !name.ends_with("_test.yml") {
            found.push((name, std::fs::read_to_string(path).unwrap()));
        }
    }
    assert!(!found.is_empty(), "no .{extension} in dashboards");
    found.sort();
    found
}

fn dashboards() -> Vec<(String, Value)> {
    files("json")
        .into_iter()
        .map(|(name, text)| {
            let value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
            (name, value)
        })
        .collect()
}

/// A PromQL expression and where it stands.
struct Query {
    place: String,
    expr: String,
    /// Labels that a legend shows.
    legend: Vec<String>,
}

fn panels(dashboard: &Value) -> Vec<Value> {
    let mut all = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        all.push(panel.clone());
        all.extend(panel["panels"].as_array().into_iter().flatten().cloned());
    }
    all
}

fn queries() -> Vec<Query> {
    let mut all = Vec::new();
    for (file, dashboard) in dashboards() {
        for panel in panels(&dashboard) {
            for target in panel["targets"].as_array().into_iter().flatten() {
                let legend = target["legendFormat"].as_str().unwrap_or_default();
                all.push(Query {
                    place: format!("{file}: {}", panel["title"]),
                    expr: target["expr"].as_str().unwrap().to_owned(),
                    legend: between(legend, "{{", "}}"),
                });
            }
        }
    }
    for (file, text) in files("yml") {
        let rules: Value = serde_yaml_ng::from_str(&text).unwrap();
        for rule in rules["groups"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|g| g["rules"].as_array().unwrap())
        {
            let said = rule["annotations"].to_string();
            all.push(Query {
                place: format!("{file}: {}", rule["alert"]),
                expr: rule["expr"].as_str().unwrap().to_owned(),
                legend: between(&said, "$labels.", " "),
            });
        }
    }
    all
}

fn between(text: &str, open: &str, close: &str) -> Vec<String> {
    text.split(open)
        .skip(1)
        .filter_map(|rest| rest.split(close).next())
        .map(|word| word.trim().to_owned())
        .collect()
}

/// What an expression names.
#[derive(Debug, Default, PartialEq)]
struct Names {
    selectors: Vec<Selector>,
    /// In `by (…)`, `on (…)` and the like.
    grouping: Vec<String>,
}

#[derive(Debug, Default, PartialEq)]
struct Selector {
    metric: String,
    /// Label and value, whatever the operator.
    matchers: Vec<(String, String)>,
}

/// Reads the names out of a PromQL expression; that it is valid is for `promtool` to say.
fn names(expr: &str) -> Names {
    const WORDS: [&str; 12] = [
        "by",
        "without",
        "on",
        "ignoring",
        "group_left",
        "group_right",
        "bool",
        "offset",
        "and",
        "or",
        "unless",
        "inf",
    ];
    let bytes = expr.as_bytes();
    let end_of = |from: usize, keep: fn(u8) -> bool| {
        bytes[from..]
            .iter()
            .position(|b| !keep(*b))
            .map_or(bytes.len(), |n| from + n)
    };
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b':';
    let mut found = Names::default();
    let mut at = 0;
    while at < bytes.len() {
        let b = bytes[at];
        if b.is_ascii_digit() {
            at = end_of(at, |b| b.is_ascii_alphanumeric() || b == b'.');
        } else if b == b'[' {
            at += expr[at..].find(']').unwrap() + 1;
        } else if b.is_ascii_alphabetic() || b == b'_' {
            let end = end_of(at, word);
            let name = &expr[at..end];
            let next = end_of(end, |b| b.is_ascii_whitespace());
            let follows = bytes.get(next).copied();
            at = next;
            if WORDS.contains(&name) && follows == Some(b'(') {
                let close = next + expr[next..].find(')').unwrap();
                let labels = expr[next + 1..close].split(',');
                found
                    .grouping
                    .extend(labels.map(|l| l.trim().to_owned()).filter(|l| !l.is_empty()));
                at = close + 1;
            } else if follows == Some(b'{') {
                let (matchers, end) = matchers(expr, next);
                at = end;
                found.selectors.push(Selector {
                    metric: name.to_owned(),
                    matchers,
                });
            } else if follows != Some(b'(') && !WORDS.contains(&name) && !is_aggregation(&expr[next..]) {
                found.selectors.push(Selector {
                    metric: name.to_owned(),
                    ..Selector::default()
                });
            }
        } else {
            at += 1;
        }
    }
    found
}

/// `sum by (…) (…)`: the name before `by` is an operator.
fn is_aggregation(rest: &str) -> bool {
    ["by", "without"].iter().any(|w| {
        rest.strip_prefix(w)
            .is_some_and(|r| r.trim_start().starts_with('('))
    })
}

/// The matchers of `{…}` that opens at `open`, and where it is closed.
fn matchers(expr: &str, open: usize) -> (Vec<(String, String)>, usize) {
    let mut found = Vec::new();
    let mut at = open + 1;
    loop {
        let rest = &expr[at..];
        let Some(quote) = rest
            .find('"')
            .filter(|q| rest.find('}').is_none_or(|close| *q < close))
        else {
            return (found, at + rest.find('}').unwrap() + 1);
        };
        let label = rest[..quote].trim_matches(|c: char| ",=~! ".contains(c));
        let value = rest[quote + 1..].split('"').next().unwrap();
        found.push((label.to_owned(), value.to_owned()));
        at += quote + 1 + value.len() + 1;
    }
}

#[test]
fn names_are_read_out_of_promql() {
    let found = names(
        r#"histogram_quantile(0.95, sum by (le, instance) (rate(a_bucket{x=~"p|q", y!="1"}[5m]))) / clamp_min(b, 1e-9) and on (z) c"#,
    );
    let selector = |metric: &str, matchers: &[(&str, &str)]| Selector {
        metric: metric.to_owned(),
        matchers: matchers
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect(),
    };
    assert_eq!(
        found.selectors,
        [
            selector("a_bucket", &[("x", "p|q"), ("y", "1")]),
            selector("b", &[]),
            selector("c", &[])
        ]
    );
    assert_eq!(found.grouping, ["le", "instance", "z"]);
}

/// What two live processes expose: label values by series name and label, and the type of each family.
#[derive(Default)]
struct Exposed {
    series: BTreeMap<String, BTreeMap<String, BTreeSet<String>>>,
    types: BTreeMap<String, String>,
}

impl Exposed {
    async fn now() -> Self {
        let script = r#"{ "m" = { chunks = 2 } }"#;
        let setup = Setup::of(Provider::scripted("s", &["m"], script))
            .edge("server", "metrics_listen = \"127.0.0.1:0\"")
            .node("node", "metrics_listen = \"127.0.0.1:0\"");
        let stack = Stack::start(Shape::Linked, setup).await;
        assert_eq!(stack.chat("m", "hi").await.status(), 200);
        let mut exposed = Self::default();
        let node = stack.nodes[0].metrics.clone();
        for addr in [stack.edge.metrics.clone(), node] {
            let text = Client::new(&addr.unwrap()).get("/metrics").await.text();
            exposed.add(&text);
        }
        exposed
    }

    fn add(&mut self, text: &str) {
        for line in text.lines().filter_map(|l| l.strip_prefix("# TYPE ")) {
            let (name, kind) = line.split_once(' ').unwrap();
            self.types.insert(name.to_owned(), kind.to_owned());
        }
        for sample in Page::parse(text).0 {
            let labels = self.series.entry(sample.name).or_default();
            for (label, value) in sample.labels {
                labels.entry(label).or_default().insert(value);
            }
        }
    }

    /// Why a query cannot be answered by what is exposed.
    fn objections(&self, query: &Query) -> Vec<String> {
        // What Prometheus itself adds.
        let added = |label: &str| matches!(label, "instance" | "job");
        let names = names(&query.expr);
        let mut wrong = Vec::new();
        let mut known = BTreeSet::new();
        for selector in names.selectors {
            if selector.metric == "up" {
                continue;
            }
            let Some(labels) = self.series.get(&selector.metric) else {
                wrong.push(format!("no series {}", selector.metric));
                continue;
            };
            known.extend(labels.keys().cloned());
            for (label, value) in selector.matchers {
                let Some(values) = labels.get(&label) else {
                    if !added(&label) {
                        wrong.push(format!("{} has no label {label}", selector.metric));
                    }
                    continue;
                };
                for word in value.split('|') {
                    if !values.contains(word) {
                        wrong.push(format!("{}: {label} is never {word:?}", selector.metric));
                    }
                }
            }
        }
        for label in names.grouping.iter().chain(&query.legend) {
            if !known.contains(label) && !added(label) {
                wrong.push(format!("no series of it has the label {label}"));
            }
        }
        wrong
            .iter()
            .map(|why| format!("{}: {why}\n    {}", query.place, query.expr))
            .collect()
    }
}

#[test]
fn every_query_names_series_labels_and_values_that_exist() {
    run(60, async {
        let exposed = Exposed::now().await;
        let wrong: Vec<String> = queries().iter().flat_map(|q| exposed.objections(q)).collect();
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        for (file, dashboard) in dashboards() {
            for variable in dashboard["templating"]["list"].as_array().unwrap() {
                let Some(definition) = variable["definition"].as_str() else {
                    continue;
                };
                let inner = definition
                    .strip_prefix("label_values(")
                    .and_then(|d| d.strip_suffix(')'));
                let (metric, label) = inner.and_then(|d| d.split_once(", ")).unwrap();
                assert!(exposed.series.contains_key(metric), "{file}: {definition}");
                assert_eq!(label, "instance");
            }
        }
    });
}

#[test]
fn every_series_of_ours_is_on_a_dashboard() {
    run(60, async {
        let exposed = Exposed::now().await;
        let shown: BTreeSet<String> = dashboards()
            .iter()
            .flat_map(|(_, dashboard)| panels(dashboard))
            .flat_map(|panel| panel["targets"].as_array().cloned().unwrap_or_default())
            .flat_map(|target| names(target["expr"].as_str().unwrap()).selectors)
            .map(|selector| selector.metric)
            .collect();
        let of_histogram = ["", "_bucket", "_count", "_sum"];
        let hidden: Vec<&String> = exposed
            .types
            .keys()
            .filter(|name| name.starts_with("iop_"))
            .filter(|name| {
                !of_histogram
                    .iter()
                    .any(|part| shown.contains(&format!("{name}{part}")))
            })
            .collect();
        assert!(hidden.is_empty(), "{hidden:?}");
    });
}

#[test]
fn every_query_is_valid_promql() {
    let dir = tempfile::tempdir().unwrap();
    let mut rules = String::from("groups:\n  - name: queries\n    rules:\n");
    for (n, query) in queries().iter().enumerate() {
        let expr = query.expr.replace("$__rate_interval", "5m").replace('$', "");
        rules.push_str(&format!("      - record: q:{n}\n        expr: {expr:?}\n"));
    }
    let mut to_check = vec![dir.path().join("queries.yml")];
    std::fs::write(&to_check[0], rules).unwrap();
    to_check.push(root().join("dashboards/alerts.yml"));
    for file in to_check {
        promtool("check", &file);
    }
}

/// Runs `promtool check rules` or `promtool test rules`.
fn promtool(verb: &str, file: &Path) {
    let said = std::process::Command::new("promtool")
        .args([verb, "rules"])
        .arg(file)
        .output()
        .expect("promtool is installed (Debian: prometheus)");
    assert!(
        said.status.success(),
        "{}{}",
        String::from_utf8_lossy(&said.stdout),
        String::from_utf8_lossy(&said.stderr)
    );
}

#[test]
fn every_alert_rule_fires_on_its_trouble_and_is_quiet_before() {
    let file = root().join("dashboards/alerts_test.yml");
    promtool("test", &file);
    let cases: Value = serde_yaml_ng::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let mut seen: BTreeMap<String, BTreeSet<bool>> = BTreeMap::new();
    for check in cases["tests"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|case| case["alert_rule_test"].as_array().unwrap())
    {
        let fires = !check["exp_alerts"].as_array().unwrap().is_empty();
        let alert = check["alertname"].as_str().unwrap().to_owned();
        seen.entry(alert).or_default().insert(fires);
    }
    let both: BTreeSet<String> = seen
        .into_iter()
        .filter(|(_, fires)| fires.len() == 2)
        .map(|(alert, _)| alert)
        .collect();
    let rules: Value = serde_yaml_ng::from_str(&files("yml")[0].1).unwrap();
    let all: BTreeSet<String> = rules["groups"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|group| group["rules"].as_array().unwrap())
        .map(|rule| rule["alert"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(both, all, "rules with a case that fires and one that does not");
}

#[test]
fn panels_have_a_data_source_a_description_and_ids_of_their_own() {
    let mut uids = BTreeSet::new();
    for (file, dashboard) in dashboards() {
        assert!(
            uids.insert(dashboard["uid"].as_str().unwrap().to_owned()),
            "{file}: uid"
        );
        assert!(dashboard["schemaVersion"].as_u64().unwrap() >= 39, "{file}");
        let variables: BTreeSet<&str> = dashboard["templating"]["list"]
            .as_array()
            .unwrap()
            .iter()
            .map(|v| v["name"].as_str().unwrap())
            .collect();
        let mut ids = BTreeSet::new();
        for panel in panels(&dashboard) {
            let title = panel["title"].as_str().unwrap();
            assert!(ids.insert(panel["id"].as_u64().unwrap()), "{file} {title}: id");
            if panel["type"] == "row" {
                continue;
            }
            assert!(
                panel["description"].as_str().is_some_and(|d| !d.is_empty()),
                "{file} {title}: no description"
            );
            assert!(
                panel["fieldConfig"]["defaults"]["unit"].is_string(),
                "{file} {title}: no unit"
            );
            let targets = panel["targets"].as_array().unwrap();
            assert!(!targets.is_empty(), "{file} {title}: no query");
            for source in targets
                .iter()
                .map(|t| &t["datasource"])
                .chain([&panel["datasource"]])
            {
                assert_eq!(
                    (source["type"].as_str(), source["uid"].as_str()),
                    (Some("prometheus"), Some("${datasource}")),
                    "{file} {title}"
                );
            }
            for expr in targets.iter().map(|t| t["expr"].as_str().unwrap()) {
                for used in expr.split('$').skip(1) {
                    let end = used.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                    let name = &used[..end.unwrap_or(used.len())];
                    assert!(
                        name == "__rate_interval" || variables.contains(name),
                        "{file} {title}: ${name}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_metrics_reference_is_what_is_exposed() {
    run(60, async {
        let exposed = Exposed::now().await;
        let live: BTreeSet<String> = exposed
            .types
            .iter()
            .filter(|(name, _)| name.starts_with("iop_"))
            .map(|(name, kind)| {
                // A histogram's own series carry its labels, and `le` beside them.
                let sample = if kind == "histogram" {
                    format!("{name}_count")
                } else {
                    name.clone()
                };
                let labels: Vec<&str> = exposed.series[&sample].keys().map(String::as_str).collect();
                format!("{name} | {kind} | {}", labels.join(", "))
            })
            .collect();
        let reference = std::fs::read_to_string(root().join("docs/operations.md")).unwrap();
        let documented: BTreeSet<String> = reference
            .lines()
            .filter_map(|l| l.strip_prefix("| `iop_"))
            .map(|row| {
                let cells: Vec<String> = row
                    .split(" | ")
                    .map(|c| c.replace('`', "").trim().to_owned())
                    .collect();
                let mut labels: Vec<&str> = cells[2].split(", ").filter(|l| *l != "–").collect();
                labels.sort_unstable();
                format!("iop_{} | {} | {}", cells[0], cells[1], labels.join(", "))
            })
            .collect();
        let missing: Vec<&String> = live.difference(&documented).collect();
        let surplus: Vec<&String> = documented.difference(&live).collect();
        assert!(
            missing.is_empty() && surplus.is_empty(),
            "exposed but not in docs/operations.md: {missing:#?}\nin docs/operations.md but not exposed: {surplus:#?}"
        );
    });
}
