//! The JSON Schema of a tool's arguments, compiled once per version and asked before a call is made; and of a person's answer.
//!
//! What is checked comes from a model or from a person, and a schema may come from a model: neither makes a check take long.

use jsonschema::error::ValidationErrorKind;
use jsonschema::{PatternOptions, ValidationError, Validator};
use serde_json::Value;

use super::arguments;

/// How deep a schema may be nested.
const DEPTH_MAX: usize = 64;

/// Steps of one match of a `pattern`: arguments come from a model.
const BACKTRACK_MAX: usize = 100_000;

/// Values nested deeper than this are judged but not explained: only a judgement remembers what it has seen.
const EXPLAINED_MAX: usize = 8;

/// Bytes of what is told of one mismatch.
const TOLD_MAX: usize = 512;

/// A compiled schema.
#[derive(Debug)]
pub(crate) struct Arguments {
    validator: Validator,
}

impl Arguments {
    /// A `$ref` stays inside the schema: nothing is fetched and no file is read.
    ///
    /// # Errors
    /// What is wrong with the schema and where, for the one who declared it.
    pub(crate) fn compile(schema: &Value) -> Result<Self, String> {
        if !schema.is_object() {
            return Err(String::from("has to be an object"));
        }
        if deeper_than(schema, DEPTH_MAX) {
            return Err(format!("is nested deeper than {DEPTH_MAX}"));
        }
        let patterns = PatternOptions::fancy_regex().backtrack_limit(BACKTRACK_MAX);
        jsonschema::options()
            .offline()
            .with_pattern_options(patterns)
            .build(schema)
            .map(|validator| Self { validator })
            .map_err(|e| match e.instance_path().as_str() {
                "" => e.to_string(),
                at => format!("{at}: {e}"),
            })
    }

    /// The same of a schema that nobody here has declared. It repeats no part of itself by a `$ref`: what a check costs is bounded
    /// by the sizes of schema and value.
    ///
    /// # Errors
    /// As [`Self::compile`], and when there is a reference in it.
    pub(crate) fn compile_foreign(schema: &Value) -> Result<Self, String> {
        if refers(schema) {
            return Err(String::from("has to do without $ref"));
        }
        Self::compile(schema)
    }

    /// # Errors
    /// When the text is no JSON object of this schema: where and which rule, never a value.
    pub(crate) fn check(&self, arguments: &str) -> Result<(), String> {
        self.hold("arguments", &arguments::value(arguments)?)
    }

    /// The same of a person's answer, which may be any JSON.
    ///
    /// # Errors
    /// Where and which rule, never a value.
    pub(crate) fn check_answer(&self, answer: &Value) -> Result<(), String> {
        self.hold("contents of the answer", answer)
    }

    fn hold(&self, what: &str, value: &Value) -> Result<(), String> {
        if self.validator.is_valid(value) {
            return Ok(());
        }
        if deeper_than(value, EXPLAINED_MAX) {
            return Err(format!("the {what} do not satisfy the schema"));
        }
        self.validator.validate(value).map_err(|e| told(what, &e))
    }
}

/// Whether anything in it may be a reference, wherever it stands.
fn refers(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.iter().any(refers),
        Value::Object(members) => members.iter().any(|(name, member)| {
            matches!(name.as_str(), "$ref" | "$dynamicRef" | "$recursiveRef") || refers(member)
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

fn deeper_than(value: &Value, levels: usize) -> bool {
    let Some(levels) = levels.checked_sub(1) else {
        return true;
    };
    match value {
        Value::Array(items) => items.iter().any(|item| deeper_than(item, levels)),
        Value::Object(members) => members.values().any(|member| deeper_than(member, levels)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

/// The place in the arguments and the rule in the schema. A missing member is named: its name is the schema's own.
fn told(what: &str, error: &ValidationError<'_>) -> String {
    let at = error.instance_path().as_str();
    let rule = error.schema_path().as_str();
    let mut told = format!("the {what} at {at:?} do not satisfy {rule:?}");
    if let ValidationErrorKind::Required { property } = error.kind() {
        told.push_str(&format!(": {property} is missing"));
    }
    if told.len() > TOLD_MAX {
        told.truncate(told.floor_char_boundary(TOLD_MAX));
        told.push('…');
    }
    told
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use serde_json::json;

    use super::*;

    fn check(schema: &Value, arguments: &str) -> Result<(), String> {
        Arguments::compile(schema).unwrap().check(arguments)
    }

    #[test]
    fn a_mismatch_names_place_and_rule_and_no_value() {
        let schema = json!({
            "type": "object",
            "properties": {
                "amount": {"type": "integer", "maximum": 100},
                "lines": {"type": "array", "items": {"enum": ["a", "b"]}},
                "mail": {"type": "string", "pattern": "^[a-z]+@[a-z]+$"},
                "to": {"$ref": "#/$defs/account"},
            },
            "required": ["amount"],
            "additionalProperties": false,
            "$defs": {"account": {"anyOf": [{"type": "string", "minLength": 40}, {"type": "null"}]}},
        });
        let secret = "hunter2";
        for (arguments, told) in [
            (
                json!({"amount": 7, "lines": ["a"], "mail": "a@b", "to": null}),
                None,
            ),
            (
                json!({"amount": secret}),
                Some(r#"at "/amount" do not satisfy "/properties/amount/type""#),
            ),
            (
                json!({"amount": 101}),
                Some(r#"at "/amount" do not satisfy "/properties/amount/maximum""#),
            ),
            (
                json!({"amount": 1, "lines": ["a", secret]}),
                Some(r#"at "/lines/1" do not satisfy "/properties/lines/items/enum""#),
            ),
            (
                json!({"amount": 1, "mail": secret}),
                Some(r#"at "/mail" do not satisfy "/properties/mail/pattern""#),
            ),
            (
                json!({"amount": 1, "to": secret}),
                Some(r#"at "/to" do not satisfy "/$defs/account/anyOf""#),
            ),
            (
                json!({secret: 1, "amount": 1}),
                Some(r#"at "" do not satisfy "/additionalProperties""#),
            ),
            (
                json!({}),
                Some(r#"at "" do not satisfy "/required": "amount" is missing"#),
            ),
        ] {
            let result = check(&schema, &arguments.to_string());
            match told {
                None => result.unwrap(),
                Some(told) => {
                    let error = result.unwrap_err();
                    assert_eq!(error, format!("the arguments {told}"));
                    assert!(!error.contains(secret));
                }
            }
        }
    }

    #[test]
    fn arguments_are_one_object_whatever_the_schema_says() {
        for arguments in ["", "[]", "null", "7", "{", r#"{"a":1,"a":2}"#] {
            assert!(check(&json!({}), arguments).is_err(), "{arguments}");
        }
        check(&json!({}), "{}").unwrap();
    }

    #[test]
    fn schemas_that_are_none_are_refused() {
        let mut deep = json!({});
        for _ in 0..DEPTH_MAX {
            deep = json!({ "not": deep });
        }
        for (schema, why) in [
            (json!("object"), "has to be an object"),
            (json!(true), "has to be an object"),
            (json!({"type": "objekt"}), "/type: "),
            (
                json!({"properties": {"a": {"minimum": "1"}}}),
                "/properties/a/minimum: ",
            ),
            (
                json!({"properties": {"a": {"pattern": "("}}}),
                "/properties/a/pattern: ",
            ),
            (json!({"$ref": "#/$defs/nowhere"}), "nowhere"),
            (deep, "is nested deeper than 64"),
        ] {
            let error = Arguments::compile(&schema).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn nothing_outside_the_schema_is_read() {
        let file = format!("file://{}", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
        for target in [
            file.as_str(),
            "http://127.0.0.1:9/schema.json",
            "https://example.com/s",
            "other.json",
        ] {
            let error = Arguments::compile(&json!({ "$ref": target })).unwrap_err();
            assert!(
                !error.contains("refused") && !error.contains("expected value"),
                "{error}"
            );
        }
        // The drafts themselves are part of the library.
        assert!(
            check(
                &json!({"$schema": "http://json-schema.org/draft-07/schema#", "required": ["a"]}),
                "{}"
            )
            .is_err()
        );
    }

    #[test]
    fn a_schema_that_leads_back_to_itself_comes_to_an_end() {
        for schema in [
            json!({"$ref": "#"}),
            json!({"allOf": [{"$ref": "#"}]}),
            json!({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"not": {"$ref": "#/$defs/b"}}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}}),
        ] {
            if let Ok(arguments) = Arguments::compile(&schema) {
                let _ = arguments.check(r#"{"a":{"b":[1]}}"#);
            }
        }
        let tree = json!({"properties": {"next": {"$ref": "#"}}, "additionalProperties": false});
        let arguments = format!("{}{{}}{}", r#"{"next":"#.repeat(120), "}".repeat(120));
        check(&tree, &arguments).unwrap();
        let arguments = format!("{}{{\"x\":1}}{}", r#"{"next":"#.repeat(120), "}".repeat(120));
        assert!(check(&tree, &arguments).is_err());
        let name = "n".repeat(2 * TOLD_MAX);
        let long = json!({"additionalProperties": {"type": "integer"}});
        let told = check(&long, &json!({ name: "x" }).to_string()).unwrap_err();
        assert!(told.len() < TOLD_MAX + 32 && told.ends_with('…'), "{told}");
    }

    #[test]
    fn a_check_costs_a_bounded_time() {
        let deep = |inner: &str| format!("{}{inner}{}", r#"{"x":"#.repeat(120), "}".repeat(120));
        let doubled =
            json!({"properties": {"x": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}}, "maxProperties": 1});
        let either = json!({
            "$ref": "#/$defs/e",
            "$defs": {"e": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
                      "a": {"properties": {"x": {"$ref": "#/$defs/e"}}, "maxProperties": 1},
                      "b": {"properties": {"x": {"$ref": "#/$defs/e"}}, "maxProperties": 1, "minProperties": 1}},
        });
        let pattern = json!({"properties": {"a": {"pattern": "^(?=(a+)+$)(\\1|a)+b$"}}});
        let begun = Instant::now();
        for schema in [doubled, either] {
            check(&schema, &deep("{}")).unwrap();
            let error = check(&schema, &deep(r#"{"x":1,"y":1}"#)).unwrap_err();
            assert_eq!(error, "the arguments do not satisfy the schema");
        }
        assert!(check(&pattern, &json!({"a": "a".repeat(5_000)}).to_string()).is_err());
        assert!(begun.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn a_foreign_schema_refers_to_nothing() {
        let chain = json!({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/b"}]}, "b": {}}});
        for schema in [
            chain,
            json!({"properties": {"a": {"items": [{"$dynamicRef": "#a"}]}}}),
            json!({"not": {"$recursiveRef": "#"}}),
        ] {
            let error = Arguments::compile_foreign(&schema).unwrap_err();
            assert_eq!(error, "has to do without $ref");
        }
        let answer = Arguments::compile_foreign(&json!({"type": "integer", "minimum": 1})).unwrap();
        answer.check_answer(&json!(1)).unwrap();
        let error = answer.check_answer(&json!(0)).unwrap_err();
        assert_eq!(
            error,
            r#"the contents of the answer at "" do not satisfy "/minimum""#
        );
    }
}
