use proptest::prelude::*;
use serde_json::json;

use super::*;

fn render(template: &str, arguments: &str, rest: bool) -> Result<String, String> {
    let members = Members::parse(arguments.as_bytes()).unwrap();
    let template = Template::parse(template).unwrap();
    template
        .render(&members, "run_1/reason/2/call_1.0", rest)
        .map(Url::into)
}

#[test]
fn places_are_filled_and_encoded() {
    let table = [
        (
            "http://h/items/{sku}",
            r#"{"sku":"a b/c?d#e"}"#,
            "http://h/items/a%20b%2Fc%3Fd%23e",
        ),
        (
            "http://h/items/{sku}",
            r#"{"sku":12345678901234567890123}"#,
            "http://h/items/12345678901234567890123",
        ),
        (
            "http://h/{a}/{b}?x={c}&y={a}",
            r#"{"a":"1","b":true,"c":""}"#,
            "http://h/1/true?x=&y=1",
        ),
        (
            "http://h/x?key={idempotency_key}",
            "{}",
            "http://h/x?key=run_1%2Freason%2F2%2Fcall_1.0",
        ),
        (
            "http://h/{idempotency_key}",
            r#"{"idempotency_key":"x"}"#,
            "http://h/run_1%2Freason%2F2%2Fcall_1.0",
        ),
        (
            "https://h:8443/ü/{p}",
            r#"{"p":"ß~._-%2e"}"#,
            "https://h:8443/%C3%BC/%C3%9F~._-%252e",
        ),
        (
            "http://h?q={q}",
            r#"{"q":"@\r\nHost: evil"}"#,
            "http://h/?q=%40%0D%0AHost%3A%20evil",
        ),
        ("http://h/v{x}.{y}", r#"{"x":".","y":"."}"#, "http://h/v..."),
    ];
    for (template, arguments, url) in table {
        assert_eq!(render(template, arguments, false).unwrap(), url);
    }
}

#[test]
fn other_arguments_go_into_the_query_in_their_order() {
    let table = [
        (
            "http://h/i/{sku}",
            r#"{"z":1,"sku":"s","a":"x y","n":null,"o":{"k": [1, 2]}}"#,
            "http://h/i/s?z=1&a=x%20y&o=%7B%22k%22%3A%5B1%2C2%5D%7D",
        ),
        (
            "http://h/i?fixed=1",
            r#"{"a&b":"="}"#,
            "http://h/i?fixed=1&a%26b=%3D",
        ),
        ("http://h/i?", r#"{"a":1}"#, "http://h/i?a=1"),
        ("http://h/i?f=1&", r#"{"a":1}"#, "http://h/i?f=1&a=1"),
        ("http://h/i", "{}", "http://h/i"),
        ("http://h", r#"{"a":1}"#, "http://h/?a=1"),
    ];
    for (template, arguments, url) in table {
        assert_eq!(render(template, arguments, true).unwrap(), url);
    }
}

#[test]
fn an_argument_that_does_not_fit_is_named_and_not_repeated() {
    let table = [
        ("http://h/{a}", "{}", "argument a is missing"),
        ("http://h/{a}", r#"{"a":null}"#, "argument a is missing"),
        (
            "http://h/?q={a}",
            r#"{"a":["secret"]}"#,
            "argument a has to be a string, a number or a boolean",
        ),
        (
            "http://h/{a}",
            r#"{"a":""}"#,
            "argument a must not be empty, . or .. in a path",
        ),
        (
            "http://h/x/{a}/y",
            r#"{"a":".."}"#,
            "argument a must not be empty, . or .. in a path",
        ),
        (
            "http://h/x/{a}{b}/y",
            r#"{"a":".","b":"."}"#,
            "argument b must not be empty, . or .. in a path",
        ),
        (
            "http://h/x/.{a}",
            r#"{"a":"."}"#,
            "argument a must not be empty, . or .. in a path",
        ),
        (
            "http://h/x/%2E{a}",
            r#"{"a":"."}"#,
            "argument a must not be empty, . or .. in a path",
        ),
        (
            "http://h/x/%2e{a}?q=1",
            r#"{"a":""}"#,
            "argument a must not be empty, . or .. in a path",
        ),
    ];
    for (template, arguments, why) in table {
        assert_eq!(render(template, arguments, false).unwrap_err(), why);
    }
    let long = json!({ "a": "x".repeat(URL_MAX) }).to_string();
    assert!(
        render("http://h/{a}", &long, false)
            .unwrap_err()
            .contains("65000 bytes")
    );
    assert!(
        render("http://h/", &long, true)
            .unwrap_err()
            .contains("65000 bytes")
    );
}

#[test]
fn urls_that_could_go_astray_are_refused() {
    for (url, why) in [
        ("ftp://h/", "has to begin with http:// or https://"),
        ("{scheme}://h/", "has to begin with http:// or https://"),
        ("http://{host}/", "scheme, host and port cannot be arguments"),
        ("http://h{x}", "scheme, host and port cannot be arguments"),
        ("http://h:{port}/", "scheme, host and port cannot be arguments"),
        ("http://h.{tld}?q", "scheme, host and port cannot be arguments"),
        ("http://user:pw@h/", "credentials belong into headers"),
        ("http:///x", "names no host"),
        ("http://", "names no host"),
        ("http://h/a b", "' ' has to be percent-encoded"),
        ("http://h\\@evil/", "'\\\\' has to be percent-encoded"),
        ("http://h/\n{x}", "'\\n' has to be percent-encoded"),
        ("http://h/#frag", "a fragment is never sent"),
        ("http://h/{", "a { without its }"),
        ("http://h/}", "a } without its {"),
        ("http://h/{a}}", "a } without its {"),
        ("http://h/{}", "a place is {name}, with the name of an argument"),
        (
            "http://h/{{a}}",
            "a place is {name}, with the name of an argument",
        ),
        ("http://h:99999/", "is no URL: invalid port number"),
    ] {
        assert_eq!(Template::parse(url).unwrap_err(), why, "{url}");
    }
}

/// Texts that are likely to break out of a place.
fn hostile() -> impl Strategy<Value = String> {
    const PIECES: &[&str] = &[
        "..",
        ".",
        "/",
        "//",
        "\\",
        "@",
        ":",
        "?",
        "#",
        "&",
        "=",
        "%2e",
        "%2f",
        "%",
        "\r\n",
        "\t",
        " ",
        "\0",
        "evil.example",
        "http://",
        ";",
        "ü",
        "[::1]",
        "{x}",
        "\u{202e}",
    ];
    prop_oneof![
        ".*",
        prop::collection::vec(prop::sample::select(PIECES), 0..6).prop_map(|p| p.concat()),
    ]
}

proptest! {
    /// Whatever an argument is, the URL has the declared origin, segments and query names, and gives the argument back.
    #[test]
    fn no_argument_leaves_its_place(a in hostile(), b in hostile(), other in hostile()) {
        let arguments = json!({ "a": a, "b": b, "other": other }).to_string();
        let members = Members::parse(arguments.as_bytes()).unwrap();
        let template = Template::parse("http://tools.example:8080/v1/{a}/x-{b}/end?q={b}").unwrap();
        match template.render(&members, "k/1", true) {
            Ok(url) => {
                prop_assert_eq!(url.scheme(), "http");
                prop_assert_eq!(url.host_str(), Some("tools.example"));
                prop_assert_eq!(url.port(), Some(8080));
                prop_assert!(url.username().is_empty() && url.password().is_none() && url.fragment().is_none());
                let decoded = |s: &str| percent_encoding::percent_decode_str(s).decode_utf8().unwrap().into_owned();
                let segments: Vec<_> = url.path_segments().unwrap().map(decoded).collect();
                prop_assert_eq!(segments, ["v1".to_owned(), a, format!("x-{b}"), "end".to_owned()]);
                let query: Vec<_> = url
                    .query()
                    .unwrap()
                    .split('&')
                    .map(|pair| pair.split_once('=').unwrap())
                    .map(|(name, value)| (name.to_owned(), decoded(value)))
                    .collect();
                prop_assert_eq!(query, [("q".to_owned(), b), ("other".to_owned(), other)]);
                prop_assert!(url.as_str().bytes().all(|b| b.is_ascii_graphic()));
            }
            Err(why) => {
                prop_assert!(matches!(a.as_str(), "" | "." | ".."), "{}", why);
            }
        }
    }

    #[test]
    fn reading_a_template_never_fails_badly(url in "(https?://)?[a-z{}/?#@:.%\\\\ ]{0,24}") {
        if let Ok(template) = Template::parse(&url) {
            let members = Members::parse(b"{\"a\":\"../..\"}").unwrap();
            if let Ok(rendered) = template.render(&members, "k", true) {
                prop_assert_eq!(rendered.origin(), template.origin.origin());
            }
        }
    }
}
