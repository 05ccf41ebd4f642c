//! URLs with places in them: `{name}` is an argument, `{idempotency_key}` the call's key (durable-api §8 Tools).
//!
//! What is put in is percent-encoded outside the unreserved characters, and places stand in path and query alone: no argument
//! changes scheme, host or port, nor how many segments the path has.

use std::collections::BTreeSet;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::Url;

use super::arguments::{Members, Text};

/// Everything outside the unreserved characters of RFC 3986.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// The place of the call's key.
const KEY: &str = "idempotency_key";

/// Bytes of a URL; the client below takes no longer one.
const URL_MAX: usize = 65_000;

/// A URL with places.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Template {
    parts: Vec<Part>,
    /// Scheme, host and port, as they were declared.
    origin: Url,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Place(String),
}

impl Template {
    /// # Errors
    /// What is wrong with the URL, for the one who declared it.
    pub(crate) fn parse(url: &str) -> Result<Self, String> {
        if let Some(c) = url
            .chars()
            .find(|c| c.is_control() || c.is_whitespace() || *c == '\\')
        {
            return Err(format!("{c:?} has to be percent-encoded"));
        }
        if url.contains('#') {
            return Err(String::from("a fragment is never sent"));
        }
        let parts = parts(url)?;
        let origin = origin(url)?;
        Ok(Self { parts, origin })
    }

    /// The URL of one call. With `rest` the arguments without a place are its last query parameters.
    ///
    /// # Errors
    /// Which argument does not fit its place; never its value.
    pub(crate) fn render(&self, members: &Members, key: &str, rest: bool) -> Result<Url, String> {
        let mut path = Segments::default();
        let mut query: Option<String> = None;
        let mut used = BTreeSet::new();
        for part in &self.parts {
            match (part, &mut query) {
                (Part::Text(text), None) => match text.split_once('?') {
                    None => path.text(text),
                    Some((before, after)) => {
                        path.text(before);
                        query = Some(after.to_owned());
                    }
                },
                (Part::Text(text), Some(query)) => query.push_str(text),
                (Part::Place(name), query) => {
                    let value = if name == KEY {
                        key.to_owned()
                    } else {
                        used.insert(name.as_str());
                        scalar(members, name)?
                    };
                    match query {
                        None => path.place(name, &value),
                        Some(query) => query.extend(utf8_percent_encode(&value, ENCODED)),
                    }
                }
            }
        }
        let mut url = path.finish()?;
        if rest {
            let mut query_text = query.take().unwrap_or_default();
            for (name, value) in members.others(&used) {
                if !query_text.is_empty() && !query_text.ends_with('&') {
                    query_text.push('&');
                }
                query_text.extend(utf8_percent_encode(name, ENCODED));
                query_text.push('=');
                query_text.extend(utf8_percent_encode(&value, ENCODED));
            }
            query = Some(query_text).filter(|q| !q.is_empty());
        }
        if let Some(query) = query {
            url.push('?');
            url.push_str(&query);
        }
        if url.len() > URL_MAX {
            return Err(format!("the arguments make a URL of more than {URL_MAX} bytes"));
        }
        let url = Url::parse(&url).map_err(|_| String::from("the arguments make no URL"))?;
        if url.origin() == self.origin.origin() && url.username().is_empty() && url.password().is_none() {
            Ok(url)
        } else {
            Err(String::from("the arguments make a URL of another host"))
        }
    }
}

fn scalar(members: &Members, name: &str) -> Result<String, String> {
    match members.get(name) {
        Some(Text::Scalar(text)) => Ok(text),
        Some(Text::Compound(_)) => Err(format!(
            "argument {name} has to be a string, a number or a boolean"
        )),
        None => Err(format!("argument {name} is missing")),
    }
}

/// The URL up to its query. A segment with a place in it must name something: an empty one or a dot segment would be another
/// resource.
#[derive(Default)]
struct Segments {
    url: String,
    /// Where the last segment begins.
    start: usize,
    /// The last place in the last segment.
    place: Option<String>,
    wrong: Option<String>,
}

impl Segments {
    fn text(&mut self, text: &str) {
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('/') {
            self.url.push_str(before);
            self.close();
            self.url.push('/');
            self.start = self.url.len();
            rest = after;
        }
        self.url.push_str(rest);
    }

    fn place(&mut self, name: &str, value: &str) {
        self.url.extend(utf8_percent_encode(value, ENCODED));
        self.place = Some(name.to_owned());
    }

    fn close(&mut self) {
        let Some(name) = self.place.take() else {
            return;
        };
        let segment = self.url[self.start..].to_ascii_lowercase().replace("%2e", ".");
        if matches!(segment.as_str(), "" | "." | "..") {
            self.wrong.get_or_insert(name);
        }
    }

    fn finish(mut self) -> Result<String, String> {
        self.close();
        match self.wrong {
            None => Ok(self.url),
            Some(name) => Err(format!("argument {name} must not be empty, . or .. in a path")),
        }
    }
}

fn parts(url: &str) -> Result<Vec<Part>, String> {
    let mut parts = Vec::new();
    let mut rest = url;
    while let Some((text, after)) = rest.split_once('{') {
        if text.contains('}') {
            return Err(String::from("a } without its {"));
        }
        let (name, after) = after.split_once('}').ok_or("a { without its }")?;
        if name.is_empty() || name.contains('{') {
            return Err(String::from("a place is {name}, with the name of an argument"));
        }
        parts.extend([Part::Text(text.to_owned()), Part::Place(name.to_owned())]);
        rest = after;
    }
    if rest.contains('}') {
        return Err(String::from("a } without its {"));
    }
    parts.push(Part::Text(rest.to_owned()));
    parts.retain(|part| *part != Part::Text(String::new()));
    Ok(parts)
}

/// Scheme, host and port, which have to stand there as text.
fn origin(url: &str) -> Result<Url, String> {
    let schemes = ["http://", "https://"];
    let scheme = schemes
        .into_iter()
        .find(|s| {
            url.get(..s.len())
                .is_some_and(|start| start.eq_ignore_ascii_case(s))
        })
        .ok_or("has to begin with http:// or https://")?;
    let end = url[scheme.len()..]
        .find(['/', '?'])
        .map_or(url.len(), |at| scheme.len() + at);
    let authority = &url[scheme.len()..end];
    if authority.is_empty() {
        return Err(String::from("names no host"));
    }
    if authority.contains(['{', '}']) {
        return Err(String::from("scheme, host and port cannot be arguments"));
    }
    if authority.contains('@') {
        return Err(String::from("credentials belong into headers"));
    }
    Url::parse(&url[..end]).map_err(|e| format!("is no URL: {e}"))
}

#[cfg(test)]
mod tests;
