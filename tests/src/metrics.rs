//! Reads a Prometheus text page.

use std::collections::BTreeMap;

/// One sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

/// One scrape.
#[derive(Debug, Clone)]
pub struct Page(pub Vec<Sample>);

impl Page {
    /// Parses the text format (no escapes in label values are expected beyond `\"` and `\\`).
    pub fn parse(text: &str) -> Self {
        Self(
            text.lines()
                .filter(|l| !l.starts_with('#') && !l.trim().is_empty())
                .filter_map(sample)
                .collect(),
        )
    }

    /// The sum of all series of `name` whose labels include `labels`.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.0
            .iter()
            .filter(|s| s.name == name)
            .filter(|s| {
                labels
                    .iter()
                    .all(|(k, v)| s.labels.get(*k).is_some_and(|found| found == v))
            })
            .map(|s| s.value)
            .sum()
    }

    /// Whether any series has this name.
    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|s| s.name == name)
    }

    /// Every series that says how much is going on right now and is not zero.
    pub fn busy(&self) -> Vec<Sample> {
        self.0
            .iter()
            .filter(|s| s.name.contains("in_flight") || s.name.ends_with("queue_depth"))
            .filter(|s| s.value != 0.0)
            .cloned()
            .collect()
    }
}

fn sample(line: &str) -> Option<Sample> {
    let (series, value) = line.rsplit_once(' ')?;
    let value = value.parse().ok()?;
    let Some((name, rest)) = series.split_once('{') else {
        return Some(Sample {
            name: series.to_owned(),
            labels: BTreeMap::new(),
            value,
        });
    };
    let mut labels = BTreeMap::new();
    let mut rest = rest.strip_suffix('}')?;
    while let Some((key, tail)) = rest.split_once("=\"") {
        let mut end = 0;
        let bytes = tail.as_bytes();
        while bytes.get(end).is_some_and(|b| *b != b'"') {
            end += if bytes[end] == b'\\' { 2 } else { 1 };
        }
        labels.insert(
            key.trim_start_matches(',').trim().to_owned(),
            tail.get(..end)?.to_owned(),
        );
        rest = tail.get(end + 1..)?;
    }
    Some(Sample {
        name: name.to_owned(),
        labels,
        value,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_with_and_without_labels_are_read() {
        let page = Page::parse("# HELP a b\na 1\nb{x=\"1\",y=\"a\\\"b\"} 2.5\nb{x=\"2\"} 1\n");
        assert_eq!(page.sum("a", &[]), 1.0);
        assert_eq!(page.sum("b", &[]), 3.5);
        assert_eq!(page.sum("b", &[("x", "1")]), 2.5);
        assert_eq!(page.0[1].labels["y"], "a\\\"b");
        assert!(!page.has("c"));
    }
}
