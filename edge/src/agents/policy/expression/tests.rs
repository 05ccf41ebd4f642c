use std::time::{Duration, Instant};

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn holds(expression: &str, args: &Json) -> Result<bool, String> {
    Expression::compile(expression)
        .unwrap()
        .holds("t", &args.to_string())
}

#[test]
fn the_language_of_rules() {
    let args = json!({
        "amount": 12, "region": "eu-1", "tags": ["a", "b"], "lines": [{"price": 3}, {"price": 7}],
        "nested": {"a": {"b": true}}, "none": null,
    });
    for (expression, expected) in [
        ("args.amount > 10 && args.region.startsWith('eu')", true),
        ("args.amount in [1, 2, 12]", true),
        ("'a' in args.tags && !('c' in args.tags)", true),
        ("args['region'] == 'eu-1'", true),
        ("args.lines.exists(line, line.price > 5)", true),
        ("args.lines.all(line, line.price > 5)", false),
        ("args.lines.map(line, line.price) == [3, 7]", true),
        ("args.lines.filter(line, line.price > 5).size() == 1", true),
        ("size(args.tags) == 2", true),
        ("has(args.nested.a) && args.nested.a.b", true),
        ("has(args.missing)", false),
        ("args.none == null", true),
        ("args.region.matches('^eu-[0-9]+$')", true),
        ("matches(args.region, '^us')", false),
        ("type(args.amount) == int", true),
        ("tool == 't'", true),
        ("args.amount > 10 ? true : false", true),
        ("double(args.amount) / 5.0 > 2.0", true),
        ("{'a': 1}.exists(k, k == 'a')", true),
        ("true || args.missing > 1", true),
    ] {
        assert_eq!(holds(expression, &args), Ok(expected), "{expression}");
    }
}

#[test]
fn what_gives_no_truth_is_an_error() {
    let args = json!({"amount": 12, "text": "x"});
    for expression in [
        "args.amount",
        "args.missing > 1",
        "args.text > 1",
        "args.amount / 0 == 1",
        "9223372036854775807 + args.amount > 0",
        "args.text + 1 == 'x1'",
        "args.amount.startsWith('1')",
        "args",
        "null",
        "'true'",
        "args.amount[0]",
        "int(args.text) > 0",
        "args.text.exists(c, c == 'x')",
    ] {
        assert!(holds(expression, &args).is_err(), "{expression}");
    }
}

#[test]
fn mistakes_are_found_before_any_call() {
    for (expression, why) in [
        ("", "always, never"),
        ("  ", "always, never"),
        ("Always", "no Always"),
        ("args.amount >", "CEL expression"),
        ("arg.amount > 1", "no arg;"),
        ("amount > 1", "no amount;"),
        ("args.lines.all(x, y > 1)", "no y;"),
        ("args.lines.all(x, x > 1) && x > 1", "no x;"),
        ("now() > 1", "no function now"),
        ("args.text.lower() == 'x'", "no function lower"),
        (
            "timestamp('2026-01-01T00:00:00Z') > args.at",
            "no function timestamp",
        ),
        ("args.text.matches(args.pattern)", "literal pattern"),
        ("args.text.matches('(')", "pattern that is none"),
        ("args.text.matches(1)", "pattern that is none"),
        ("Thing{a: 1} == args", "no type Thing"),
        (
            "args.a.all(a, args.b.all(b, args.c.all(c, args.d.all(d, a == d))))",
            "loops",
        ),
        (&format!("args.a == '{}'", "x".repeat(TEXT_MAX)), "bytes long"),
        (&format!("{}true{}", "!(".repeat(1000), ")".repeat(1000)), ""),
        (&format!("{}1{} == 1", "(".repeat(1500), ")".repeat(1500)), ""),
        (&format!("{}1{} == 1", "[".repeat(1500), "]".repeat(1500)), ""),
        (&format!("1{} == 1", " + 1".repeat(900)), ""),
        (&format!("args{} == 1", ".a".repeat(1500)), ""),
        (&format!("args{} == 1", "[0]".repeat(1000)), ""),
        (&format!("{}true", "true ? ".repeat(500)), ""),
    ] {
        let error = Expression::compile(expression).expect_err(expression);
        assert!(error.contains(why), "{expression}: {error}");
        assert!(error.len() < 512 && !error.contains('\n'), "{error}");
    }
}

#[test]
fn every_function_of_the_list_is_one() {
    let env = Arc::new(Env::stdlib());
    let is_known = |text: String| {
        let root = Parser::new().parse(&text).unwrap();
        let result = Value::resolve(&root, &Context::with_env(Arc::clone(&env)));
        !matches!(result, Err(cel::ExecutionError::UndeclaredReference(_)))
    };
    for name in FUNCTIONS {
        assert!(
            is_known(format!("{name}('1')")) || is_known(format!("'1'.{name}('1')")),
            "{name}"
        );
    }
    assert!(!is_known("now()".to_owned()));
    for name in TYPES {
        Expression::compile(&format!("type(args.a) == {name}")).unwrap();
    }
}

#[test]
fn many_terms_side_by_side_are_no_depth() {
    let terms: Vec<String> = (0..60).map(|i| format!("args.region == 'r{i}'")).collect();
    assert_eq!(holds(&terms.join(" || "), &json!({"region": "r59"})), Ok(true));
    assert_eq!(holds(&terms.join(" && "), &json!({"region": "r59"})), Ok(false));
}

#[test]
fn the_largest_arguments_are_judged_and_loops_over_them_are_not() {
    let text = json!({"text": "x".repeat((1 << 20) - 100)});
    let begun = Instant::now();
    assert_eq!(holds("args.text.contains('y')", &text), Ok(false));
    let many = json!({"list": vec![0; (1 << 19) - 100]});
    assert_eq!(holds("1 in args.list", &many), Ok(false));
    assert!(holds("args.list.all(x, x == 0)", &many).is_err());
    assert!(holds("args.list.map(x, args.list).size() == 1", &many).is_err());
    let some = json!({"list": vec![0; 2_000]});
    assert_eq!(holds("args.list.all(x, x == 0)", &some), Ok(true));
    assert_eq!(
        holds("args.list.map(x, args.list).size() == 2000", &some),
        Ok(true)
    );
    assert!(holds("args.list.all(x, args.list.all(y, x == y))", &some).is_err());
    let few = json!({"list": vec![0; 150]});
    assert_eq!(
        holds("args.list.all(x, args.list.all(y, x == y))", &few),
        Ok(true)
    );
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn elements_of_its_own_lists_count_too() {
    let list = format!("[{}]", vec!["1"; 400].join(","));
    let expression = format!("{list}.all(x, {list}.all(y, {list}.all(z, x == z)))");
    assert!(holds(&expression, &json!({})).is_err());
}

#[test]
fn the_deepest_arguments_take_little_stack() {
    let deep = |n: usize| format!("{}1{}", r#"{"a":"#.repeat(n), "}".repeat(n));
    let judge = move || {
        let expression = Expression::compile("args == args && args.a == args.a").unwrap();
        (
            expression.holds("t", &deep(120)),
            expression.holds("t", &deep(100_000)).is_err(),
        )
    };
    let thread = std::thread::Builder::new()
        .stack_size(512 << 10)
        .spawn(judge)
        .unwrap();
    assert_eq!(thread.join().unwrap(), (Ok(true), true));
}

fn any_json() -> impl Strategy<Value = Json> {
    let leaf = prop_oneof![
        Just(Json::Null),
        any::<bool>().prop_map(Json::from),
        any::<i64>().prop_map(Json::from),
        any::<u64>().prop_map(Json::from),
        any::<f64>().prop_map(Json::from),
        ".{0,8}".prop_map(Json::from),
    ];
    leaf.prop_recursive(4, 32, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Json::from),
            prop::collection::btree_map("[a-d]", inner, 0..4)
                .prop_map(|members| Json::Object(members.into_iter().collect())),
        ]
    })
}

/// Expressions that are near ones people write.
fn any_expression() -> impl Strategy<Value = String> {
    let word = prop::sample::select(vec![
        "args",
        "args.a",
        "args.b",
        "args['c']",
        "args.a.b",
        "tool",
        "1",
        "-1",
        "2u",
        "1.5",
        "'x'",
        "true",
        "null",
        "[1, 'a']",
        "{'a': 1}",
        "x",
        "int",
        "b'x'",
        "args.a[0]",
        "has(args.a)",
    ])
    .prop_map(str::to_owned);
    word.prop_recursive(4, 24, 3, |inner| {
        let operator = prop::sample::select(vec![
            "==", "!=", "<", ">", "<=", ">=", "+", "-", "*", "/", "%", "&&", "||", "in",
        ]);
        let call = prop::sample::select(vec![
            "size", "int", "uint", "double", "string", "bytes", "bool", "type", "dyn", "!", "-",
        ]);
        let method = prop::sample::select(vec!["contains", "startsWith", "endsWith"]);
        let loops = prop::sample::select(vec!["all", "exists", "exists_one", "map", "filter"]);
        prop_oneof![
            (inner.clone(), operator, inner.clone()).prop_map(|(a, op, b)| format!("({a} {op} {b})")),
            (call, inner.clone()).prop_map(|(call, a)| format!("{call}({a})")),
            (inner.clone(), method, inner.clone()).prop_map(|(a, m, b)| format!("{a}.{m}({b})")),
            (inner.clone(), loops, inner.clone()).prop_map(|(a, m, b)| format!("{a}.{m}(x, {b})")),
            (inner.clone(), inner.clone(), inner).prop_map(|(a, b, c)| format!("({a} ? {b} : {c})")),
        ]
    })
}

proptest! {
    #[test]
    fn no_text_panics(text in ".{0,80}") {
        if let Ok(expression) = Expression::compile(&text) {
            let _ = expression.holds("t", "{}");
        }
    }

    #[test]
    fn no_expression_panics_over_any_arguments(text in any_expression(), args in any_json()) {
        if let Ok(expression) = Expression::compile(&text) {
            let args = json!({"a": args, "b": 3, "c": ["x", 1]}).to_string();
            let first = expression.holds("tool", &args);
            prop_assert_eq!(&first, &expression.holds("tool", &args));
        }
    }
}
