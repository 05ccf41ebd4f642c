//! Paths into JSON such as `$.a.b[0]`: members by name, items by number (durable-api §5 `reconcile`).

use serde_json::Value;

/// A path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Path(Vec<Step>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Member(String),
    Item(usize),
}

impl Path {
    /// # Errors
    /// When the text is no path.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let wrong = || String::from("has to be a path such as $.a.b[0]");
        let mut rest = text.strip_prefix('$').ok_or_else(wrong)?;
        let mut steps = Vec::new();
        while !rest.is_empty() {
            if let Some(after) = rest.strip_prefix('.') {
                let end = after.find(['.', '[']).unwrap_or(after.len());
                let (name, after) = after.split_at(end);
                if name.is_empty() || name.contains([']', '*', '"', '\'', ' ']) {
                    return Err(wrong());
                }
                steps.push(Step::Member(name.to_owned()));
                rest = after;
            } else {
                let (number, after) = rest
                    .strip_prefix('[')
                    .and_then(|r| r.split_once(']'))
                    .ok_or_else(wrong)?;
                if !number.bytes().all(|b| b.is_ascii_digit()) {
                    return Err(wrong());
                }
                steps.push(Step::Item(number.parse().map_err(|_| wrong())?));
                rest = after;
            }
        }
        Ok(Self(steps))
    }

    /// What stands there, if anything but null does.
    pub(crate) fn find<'a>(&self, value: &'a Value) -> Option<&'a Value> {
        self.0
            .iter()
            .try_fold(value, |value, step| match step {
                Step::Member(name) => value.as_object()?.get(name),
                Step::Item(n) => value.as_array()?.get(*n),
            })
            .filter(|value| !value.is_null())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_path_finds_what_is_there() {
        let value = json!({"a": {"b": [10, {"c-d": false}]}, "n": null, "0": "text"});
        for (path, found) in [
            ("$", Some(value.clone())),
            ("$.a.b[0]", Some(json!(10))),
            ("$.a.b[1].c-d", Some(json!(false))),
            ("$.0", Some(json!("text"))),
            ("$.n", None),
            ("$.a.b[2]", None),
            ("$.a[0]", None),
            ("$.a.b.c", None),
            ("$[0]", None),
        ] {
            assert_eq!(Path::parse(path).unwrap().find(&value), found.as_ref(), "{path}");
        }
        assert_eq!(Path::parse("$").unwrap().find(&Value::Null), None);
    }

    #[test]
    fn what_is_no_path_is_refused() {
        for text in [
            "",
            "a",
            ".a",
            "$a",
            "$.",
            "$..a",
            "$.a.",
            "$[",
            "$[]",
            "$[-1]",
            "$[+1]",
            "$[x]",
            "$[0",
            "$.a]",
            "$.*",
            "$['a']",
            "$[99999999999999999999999]",
            "$.a b",
        ] {
            assert!(Path::parse(text).is_err(), "{text}");
        }
    }
}
