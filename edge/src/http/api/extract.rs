//! What handlers take from a request: path, query and body. Nothing is converted lossily, unknown and repeated names
//! are refused, and a refusal names its field (D258).

use std::borrow::Cow;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use http::Uri;
use http::request::Parts;
use percent_encoding::percent_decode_str;
use serde::de::value::MapDeserializer;
use serde::de::{self, DeserializeOwned, Error as _, IntoDeserializer, Visitor};
use serde::{Deserialize as _, Deserializer, forward_to_deserialize_any};
use serde_json::value::RawValue;

use crate::app::App;
use crate::http::payload::{self, Reservation};
use crate::runs::Runs;
use crate::runs::problem::{Code, Problem};

/// The process that was asked.
pub(super) struct Edge(pub(super) Arc<App>);

/// The runs of this process.
pub(super) struct Hosted(pub(super) Arc<Runs>);

/// Parameters of the path, decoded.
pub(super) struct Url<T>(pub(super) T);

/// The query. Unknown and repeated names are refused.
pub(super) struct Search<T>(pub(super) T);

/// A JSON body, and the memory it is accounted for.
pub(super) struct Json<T>(pub(super) T, pub(super) Reservation);

/// A JSON body that may be absent, or null.
pub(super) struct MaybeJson<T>(pub(super) T, pub(super) Reservation);

/// A JSON body that declares something: what does not fit is an invalid definition, not an invalid request.
pub(super) struct Declared<T>(pub(super) T, pub(super) Reservation);

/// The text of a JSON body beside its value, for digests over what was sent.
pub(super) struct Sent<T>(pub(super) T, pub(super) bytes::Bytes, pub(super) Reservation);

pub(super) fn app(parts: &Parts) -> Result<Arc<App>, Problem> {
    parts
        .extensions
        .get::<Arc<App>>()
        .cloned()
        .ok_or_else(|| Problem::new(Code::InternalError, "The request was not set up."))
}

impl<S: Sync> FromRequestParts<S> for Edge {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        app(parts).map(Self)
    }
}

impl<S: Sync> FromRequestParts<S> for Hosted {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        match app(parts)?.runs() {
            Some(runs) => Ok(Self(Arc::clone(runs))),
            None => Err(Problem::new(
                Code::NotFound,
                "This edge hosts no runs: add [store] to its configuration.",
            )),
        }
    }
}

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Url<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Path::<T>::from_request_parts(parts, state).await {
            Ok(Path(value)) => Ok(Self(value)),
            Err(rejection) => Err(Problem::invalid("path", rejection.body_text())),
        }
    }
}

impl<S: Sync, T: DeserializeOwned> FromRequestParts<S> for Search<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        query(&parts.uri).map(Self)
    }
}

impl<S: Sync, T: DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let (bytes, held) = read(request).await?;
        Ok(Self(json(&bytes)?, held))
    }
}

impl<S: Sync, T: DeserializeOwned + Default> FromRequest<S> for MaybeJson<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let (bytes, held) = read(request).await?;
        let value = match &bytes[..] {
            b"" => None,
            body => json::<Option<T>>(body)?,
        };
        Ok(Self(value.unwrap_or_default(), held))
    }
}

impl<S: Sync, T: DeserializeOwned> FromRequest<S> for Declared<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let (bytes, held) = read(request).await?;
        Ok(Self(declared(&bytes)?, held))
    }
}

impl<S: Sync, T: DeserializeOwned> FromRequest<S> for Sent<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let (bytes, held) = read(request).await?;
        Ok(Self(json(&bytes)?, bytes, held))
    }
}

async fn read(request: Request<Body>) -> Result<(bytes::Bytes, Reservation), Problem> {
    let (parts, body) = request.into_parts();
    let app = app(&parts)?;
    let (limit, idle) = (
        app.settings.server.body_limit,
        app.settings.gate.client_write_timeout,
    );
    Ok(payload::read(&parts.headers, body, limit, idle, &app.body_memory).await?)
}

/// Longest text of a parser's that is told.
const TOLD: usize = 300;

/// The value of a JSON text.
///
/// # Errors
/// `invalid_encoding` when it is no UTF-8; else `invalid_request` with the path of the field at fault.
pub(super) fn json<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let text = std::str::from_utf8(body)
        .map_err(|_| Problem::new(Code::InvalidEncoding, "The body is not valid UTF-8."))?;
    if text.trim_ascii().is_empty() {
        return Err(Problem::new(
            Code::InvalidRequest,
            "The body is empty; a JSON object is expected.",
        ));
    }
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|e| {
        let path = e.path().to_string();
        at_fault(&path, &e.into_inner().to_string())
    })?;
    reader
        .end()
        .map_err(|_| Problem::new(Code::InvalidRequest, "The body goes on after its JSON value."))?;
    Ok(value)
}

/// The value of a JSON text that declares something.
///
/// # Errors
/// As `json` for what is no JSON; `invalid_definition` with the path for what does not fit.
fn declared<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    json::<de::IgnoredAny>(body)?;
    json(body).map_err(|problem| Problem {
        code: Code::InvalidDefinition,
        ..problem
    })
}

/// What a decision rests on: a text, or other JSON, which is kept as it is written.
pub(super) fn evidence<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let raw = Box::<RawValue>::deserialize(deserializer)?;
    match raw.get() {
        "null" => Err(D::Error::custom("null is no evidence")),
        text if text.starts_with('"') => serde_json::from_str(text).map_err(D::Error::custom),
        other => Ok(other.to_owned()),
    }
}

/// The value of a query.
///
/// # Errors
/// `invalid_encoding`, or `invalid_request` with the name of the parameter at fault.
pub(super) fn query<T: DeserializeOwned>(uri: &Uri) -> Result<T, Problem> {
    let mut pairs: Vec<(String, Given)> = Vec::new();
    for pair in uri
        .query()
        .unwrap_or_default()
        .split('&')
        .filter(|p| !p.is_empty())
    {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let decode = |text: &str| decoded(&text.replace('+', " ")).map(Cow::into_owned);
        let name = decode(name).ok_or_else(|| broken("query"))?;
        let Some(value) = decode(value) else {
            return Err(broken(name));
        };
        if pairs.iter().any(|(seen, _)| *seen == name) {
            return Err(Problem::invalid(name, "This parameter was given twice."));
        }
        if value.is_empty() {
            return Err(Problem::invalid(name, "This parameter has no value."));
        }
        pairs.push((name, Given(value)));
    }
    let reader = MapDeserializer::<_, de::value::Error>::new(pairs.into_iter());
    serde_path_to_error::deserialize(reader).map_err(|e| {
        let path = e.path().to_string();
        at_fault(&path, &e.into_inner().to_string())
    })
}

/// Refuses a path or a query whose percent-encoding is broken, or is no UTF-8, or has U+0000 in it: before anything is looked up.
pub(super) fn check_encoding(uri: &Uri) -> Result<(), Problem> {
    if decoded(uri.path()).is_none() {
        return Err(broken("path"));
    }
    if uri.query().is_some_and(|query| decoded(query).is_none()) {
        return Err(broken("query"));
    }
    Ok(())
}

fn broken(param: impl Into<Cow<'static, str>>) -> Problem {
    Problem::new(
        Code::InvalidEncoding,
        "This is not percent-encoded UTF-8 without U+0000.",
    )
    .at(param)
}

/// `None`: a `%` without two hexadecimal digits, bytes that are no UTF-8, or U+0000. Nothing is replaced.
fn decoded(text: &str) -> Option<Cow<'_, str>> {
    let bytes = text.as_bytes();
    let whole = bytes
        .iter()
        .enumerate()
        .filter(|(_, b)| **b == b'%')
        .all(|(at, _)| {
            bytes
                .get(at + 1..at + 3)
                .is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
        });
    let text = percent_decode_str(text).decode_utf8().ok().filter(|_| whole)?;
    (!text.contains('\0')).then_some(text)
}

/// What a parser found wrong. It names a member that is missing or unknown in its text only; the path ends above it.
fn at_fault(path: &str, why: &str) -> Problem {
    let above = path.trim_end_matches(['?', '.']);
    let named = ["missing field `", "unknown field `", "duplicate field `"]
        .iter()
        .find_map(|start| why.strip_prefix(start))
        .and_then(|rest| rest.split('`').next());
    let field = match named {
        Some(name) if above.is_empty() => name.to_owned(),
        Some(name) if above == name || above.ends_with(&format!(".{name}")) => above.to_owned(),
        Some(name) => format!("{above}.{name}"),
        None => above.to_owned(),
    };
    let mut message = why.to_owned();
    if let Some((at, _)) = message.char_indices().nth(TOLD) {
        message.truncate(at);
        message.push('…');
    }
    let problem = Problem::new(Code::InvalidRequest, message);
    if field.is_empty() {
        problem
    } else {
        problem.at(field)
    }
}

/// The value of a parameter: text, read as a number where one is expected.
struct Given(String);

impl<'de> IntoDeserializer<'de, de::value::Error> for Given {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

macro_rules! parsed {
    ($($method:ident $visit:ident $what:literal),+ $(,)?) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, de::value::Error> {
            match self.0.parse() {
                Ok(value) => visitor.$visit(value),
                Err(_) => Err(de::Error::custom(concat!("must be ", $what))),
            }
        }
    )+};
}

impl<'de> de::Deserializer<'de> for Given {
    type Error = de::value::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        visitor.visit_string(self.0)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        words: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        self.0.into_deserializer().deserialize_enum(name, words, visitor)
    }

    parsed! {
        deserialize_bool visit_bool "true or false",
        deserialize_u32 visit_u32 "a whole number",
        deserialize_u64 visit_u64 "a whole number",
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u8 u16 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple tuple_struct map
        struct identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;
    use serde_json::value::RawValue;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Body {
        name: String,
        #[serde(default)]
        parts: Vec<Part>,
        input: Option<Box<RawValue>>,
        #[serde(default)]
        labels: BTreeMap<String, String>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Part {
        n: u32,
    }

    fn fault(body: &str) -> (Code, Option<String>) {
        let problem = json::<Body>(body.as_bytes()).unwrap_err();
        (problem.code, problem.param.map(Cow::into_owned))
    }

    #[test]
    fn a_wrong_body_names_its_field() {
        let ok: Body = json(r#"{"name":"a","input":{"x": 1.00},"parts":[{"n":1}]}"#.as_bytes()).unwrap();
        assert_eq!(ok.input.unwrap().get(), r#"{"x": 1.00}"#);
        assert!(ok.name == "a" && ok.parts[0].n == 1 && ok.labels.is_empty());
        for (body, field) in [
            ("{}", "name"),
            (r#"{"name":1}"#, "name"),
            (r#"{"name":"a","nmae":"b"}"#, "nmae"),
            (r#"{"name":"a","name":"b"}"#, "name"),
            (r#"{"name":"a","parts":[{"n":1},{}]}"#, "parts[1].n"),
            (r#"{"name":"a","parts":[{"n":1,"m":1}]}"#, "parts[0].m"),
            (r#"{"name":"a","parts":[{"n":-1}]}"#, "parts[0].n"),
            (r#"{"name":"a","labels":{"k":1}}"#, "labels.k"),
        ] {
            assert_eq!(
                fault(body),
                (Code::InvalidRequest, Some(field.to_owned())),
                "{body}"
            );
        }
        for body in ["", " ", "x", r#"{"name":"a"}x"#, "[]", "null"] {
            assert_eq!(fault(body), (Code::InvalidRequest, None), "{body}");
        }
    }

    #[test]
    fn a_body_that_is_no_utf8_is_said_to_be() {
        let problem = json::<Body>(b"{\"name\":\"\xff\"}").unwrap_err();
        assert_eq!(problem.code, Code::InvalidEncoding);
        assert!(json::<Body>("{\"name\":\"\u{fffd}\"}".as_bytes()).is_ok());
    }

    #[test]
    fn a_declaration_that_does_not_fit_is_said_to_be_one() {
        let code = |body: &str| declared::<Body>(body.as_bytes()).unwrap_err().code;
        assert_eq!(code(r#"{"name":1}"#), Code::InvalidDefinition);
        assert_eq!(code(r#"{"name":"#), Code::InvalidRequest);
        assert_eq!(code(""), Code::InvalidRequest);
    }

    #[test]
    fn a_deep_body_is_refused_and_told_briefly() {
        let deep = format!("{{\"name\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(fault(&deep).0, Code::InvalidRequest);
        let long = format!("{{\"parts\":\"{}\"}}", "x".repeat(100_000));
        let problem = json::<Body>(long.as_bytes()).unwrap_err();
        assert!(problem.message.len() < 2 * TOLD, "{}", problem.message.len());
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Find {
        limit: Option<u32>,
        name: Option<String>,
    }

    fn find(query_text: &str) -> Result<Find, Problem> {
        query(&format!("/x{query_text}").parse().unwrap())
    }

    #[test]
    fn a_query_is_decoded_and_its_names_are_known() {
        let found = find("?limit=7&&name=a%2Fb+c%26").unwrap();
        assert_eq!((found.limit, found.name.as_deref()), (Some(7), Some("a/b c&")));
        assert_eq!(find("?name=%EF%BF%BD").unwrap().name.as_deref(), Some("\u{fffd}"));
        for (text, code, field) in [
            ("?limit=x", Code::InvalidRequest, "limit"),
            ("?limit=-1", Code::InvalidRequest, "limit"),
            ("?limit=", Code::InvalidRequest, "limit"),
            ("?limit", Code::InvalidRequest, "limit"),
            ("?limit=1&limit=1", Code::InvalidRequest, "limit"),
            ("?limti=1", Code::InvalidRequest, "limti"),
            ("?name=%FF", Code::InvalidEncoding, "name"),
            ("?name=%00", Code::InvalidEncoding, "name"),
            ("?name=%2", Code::InvalidEncoding, "name"),
            ("?name=%zz", Code::InvalidEncoding, "name"),
        ] {
            let problem = find(text).unwrap_err();
            assert_eq!(
                (problem.code, problem.param.as_deref()),
                (code, Some(field)),
                "{text}"
            );
        }
    }

    #[test]
    fn a_path_is_percent_encoded_utf8() {
        let check = |uri: &str| check_encoding(&uri.parse().unwrap()).map_err(|p| (p.code, p.param));
        assert_eq!(check("/runs/a%20b%F0%9F%98%80?x=%41"), Ok(()));
        for (uri, param) in [
            ("/runs/%FF", "path"),
            ("/runs/%00", "path"),
            ("/runs/%", "path"),
            ("/runs/%4", "path"),
            ("/runs/a?x=%C3", "query"),
        ] {
            assert_eq!(
                check(uri),
                Err((Code::InvalidEncoding, Some(param.into()))),
                "{uri}"
            );
        }
    }
}
