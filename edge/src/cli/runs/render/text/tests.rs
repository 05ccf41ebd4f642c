use proptest::prelude::*;

use super::*;

#[test]
fn what_a_terminal_would_act_on_is_shown_as_json_escapes() {
    assert_eq!(
        plain("a\u{1b}[2K\rb\u{9b}c\u{7f}"),
        r"a\u001b[2K\u000db\u009bc\u007f"
    );
    assert_eq!(plain("pay \u{202e}001"), r"pay \u202e001");
    assert_eq!(plain("a\u{e0041}b"), r"a\udb40\udc41b");
    assert_eq!(plain("grüße 東京 🚀"), "grüße 東京 🚀");

    let raw: Box<RawValue> = serde_json::from_str("{\n  \"a\\\"\":\t\"x\u{200b}\u{9b}\"\r\n}").unwrap();
    assert_eq!(json(&raw), r#"{   "a\"": "x\u200b\u009b"  }"#);
}

#[test]
fn what_is_pasted_into_a_shell_is_one_word() {
    for (id, word) in [
        ("run_01-a.b", "run_01-a.b"),
        ("a; rm -rf ~", "'a; rm -rf ~'"),
        ("it's $(x)", r"'it'\''s $(x)'"),
        ("a\nb", r"'a\u000ab'"),
        ("", "''"),
    ] {
        assert_eq!(shell(id), word);
    }
}

#[test]
fn a_long_text_is_shown_by_its_beginning() {
    let long = "é".repeat(EXCERPT);
    assert_eq!(excerpt(&long), long);
    assert_eq!(excerpt(&format!("{long}x")), format!("{long} …"));
}

#[test]
fn spans_have_one_unit() {
    for (seconds, text) in [
        (0, "0s"),
        (59, "59s"),
        (60, "1m"),
        (3_599, "59m"),
        (3_600, "1h"),
        (172_799, "47h"),
        (172_800, "2d"),
        (u64::MAX, "213503982334601d"),
    ] {
        assert_eq!(span(seconds), text);
    }
}

proptest! {
    /// Whatever a model writes as arguments: what is shown is one line that a terminal does not act on, and the same JSON.
    #[test]
    fn shown_arguments_are_the_same_json(text in any::<String>(), pretty: bool) {
        let value = serde_json::json!({ &*text: [text, 1, null] });
        let written = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) };
        let shown = json(&RawValue::from_string(written.unwrap()).unwrap());
        prop_assert!(!shown.chars().any(is_hidden));
        prop_assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
    }
}
