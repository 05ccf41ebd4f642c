//! Rules of URLs, headers and paths. Where a request goes must not depend on an argument.

use std::collections::BTreeMap;

use ::http::header::{self, HeaderName, HeaderValue};
use serde_json::Value;

use super::{Checked, Invalid, refuse};
use crate::agents::spec::{EnvRef, FileRef, HeaderText};
use crate::agents::tools::headers::settable;
use crate::agents::tools::template::Template;

/// The place that is not an argument.
const KEY: &str = "idempotency_key";

/// A URL with places; their names. With a schema that lists properties, each is one of them.
pub(super) fn template<'a>(url: &'a str, schema: Option<&Value>) -> Result<Vec<&'a str>, Invalid> {
    if let Err(why) = Template::parse(url) {
        return Err(Invalid::at("url", why));
    }
    let places = url.split('{').skip(1).filter_map(|it| it.split_once('}'));
    let names: Vec<&str> = places.map(|(name, _)| name).collect();
    let properties = schema
        .and_then(|it| it.get("properties"))
        .and_then(Value::as_object);
    if let Some(properties) = properties {
        let unknown = |name: &&&str| **name != KEY && !properties.contains_key(**name);
        if let Some(name) = names.iter().find(unknown) {
            return Err(Invalid::at(
                "url",
                format!("{{{name}}} is no property of the tool's parameters"),
            ));
        }
    }
    Ok(names)
}

/// A URL without places.
pub(super) fn plain(url: &str) -> Checked {
    if template(url, None)?.is_empty() {
        Ok(())
    } else {
        refuse("url", "takes no {argument}: it is the same for every call")
    }
}

/// Nobody puts anything but a secret there.
const SECRET: [HeaderName; 3] = [header::AUTHORIZATION, header::PROXY_AUTHORIZATION, header::COOKIE];

pub(super) fn headers(headers: &BTreeMap<String, HeaderText>) -> Checked {
    let mut seen: BTreeMap<String, &str> = BTreeMap::new();
    for (name, text) in headers {
        let field = format!("headers.{name}");
        let parsed = match settable(name) {
            Ok(parsed) => parsed,
            Err(why) => return refuse(field, why),
        };
        if let Some(other) = seen.insert(parsed.as_str().to_owned(), name) {
            return refuse(field, format!("is the same header as {other:?}"));
        }
        match text {
            HeaderText::Plain(_) if SECRET.contains(&parsed) || parsed.as_str().contains("api-key") => {
                return refuse(
                    field,
                    "is a secret, and a secret is a reference: { env = \"NAME\" } or { file = \"PATH\" }",
                );
            }
            HeaderText::Plain(value) if HeaderValue::try_from(value).is_err() => {
                return refuse(field, "is no header value");
            }
            HeaderText::Env(EnvRef { env }) if env.is_empty() || env.contains(['=', '\0']) => {
                return refuse(format!("{field}.env"), "is no name of a variable");
            }
            HeaderText::File(FileRef { file }) if file.is_empty() || file.contains('\0') => {
                return refuse(format!("{field}.file"), "is no path");
            }
            HeaderText::Plain(_) | HeaderText::Env(_) | HeaderText::File(_) => {}
        }
    }
    Ok(())
}
