//! `/api/v1` of an edge, asked from outside.
//!
//! Follows no redirect and uses no proxy of the environment: the key goes to the edge that was named and nowhere else.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::Url;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::render::plain;
use super::wire::{ErrorBody, Page};

const CONNECT_WITHIN: Duration = Duration::from_secs(5);
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// Items asked for at once: the most that a page may have.
const PAGE: u32 = 200;

/// Everything outside `[A-Za-z0-9._~-]`.
const OUTSIDE: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'-');

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    /// The edge said no.
    #[error("{code}: {message}")]
    Refused { code: String, message: String },
    #[error("cannot reach {base}: {why}")]
    Unreachable { base: String, why: String },
    /// Whether the edge did what it was asked for is not known.
    #[error("no answer from {base}: {why}")]
    Lost { base: String, why: String },
    #[error("{base} answers {status} and no error of /api/v1: is it an edge?")]
    Strange { base: String, status: StatusCode },
    #[error("{base} answers what this program cannot read: {why}")]
    Unreadable { base: String, why: String },
}

impl CallError {
    /// Whether a request may have been carried out although this came back.
    pub(super) fn is_open(&self) -> bool {
        match self {
            Self::Lost { .. } => true,
            // What a proxy says for an edge that it has lost.
            Self::Strange { status, .. } => status.is_server_error(),
            Self::Refused { code, .. } => code == "journal_unavailable",
            Self::Unreachable { .. } | Self::Unreadable { .. } => false,
        }
    }
}

/// An answer that is no error.
pub(super) struct Answer {
    pub(super) body: Bytes,
    /// The same request was answered before, with this.
    pub(super) replayed: bool,
}

impl Answer {
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// Where an edge is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Base(String);

impl Base {
    /// What a variable says, or where an edge listens when nothing else was said.
    ///
    /// # Errors
    /// As `parse`.
    pub(super) fn or_default(text: Option<&str>) -> Result<Self, String> {
        Self::parse(text.unwrap_or("http://127.0.0.1:8080"))
    }

    /// # Errors
    /// What is wrong with the text.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        const WANTED: &str = "must begin with http:// or https:// and name a host";
        let url = Url::parse(text).map_err(|e| format!("{WANTED}: {e}"))?;
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
            return Err(WANTED.to_owned());
        }
        if url.query().is_some()
            || url.fragment().is_some()
            || !url.username().is_empty()
            || url.password().is_some()
        {
            return Err(String::from("must have no user, query or fragment"));
        }
        Ok(Self(url.as_str().trim_end_matches('/').to_owned()))
    }
}

/// A client of one edge.
pub(super) struct Api {
    base: Base,
    http: reqwest::Client,
}

impl Api {
    /// With the key, when there is one.
    ///
    /// # Errors
    /// A key that no header can carry, or a system without TLS.
    pub(super) fn new(base: Base, key: Option<&str>) -> anyhow::Result<Self> {
        let mut headers = HeaderMap::new();
        if let Some(key) = key {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| {
                anyhow::anyhow!("IOP_API_KEY is no key: it has characters that no header may have")
            })?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        // Fails when there is one already, which serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder()
            .default_headers(headers)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .connect_timeout(CONNECT_WITHIN)
            .timeout(ANSWER_WITHIN)
            .user_agent(concat!("iop-edge/", env!("CARGO_PKG_VERSION")))
            .build()?;
        Ok(Self { base, http })
    }

    /// `GET` of one object.
    pub(super) async fn get(&self, path: &str) -> Result<Answer, CallError> {
        self.send(Method::GET, path, None).await
    }

    /// The first items of a list, through as many pages as it takes.
    pub(super) async fn list(
        &self,
        path: &str,
        query: &[(&str, &str)],
        limit: u32,
    ) -> Result<Page, CallError> {
        let mut all = Page::empty();
        loop {
            let left = limit.saturating_sub(u32::try_from(all.data.len()).unwrap_or(u32::MAX));
            let page = self
                .page(path, query, left.min(PAGE), all.next_after.as_deref())
                .await?;
            all.data.extend(page.data);
            (all.has_more, all.next_after) = (page.has_more, page.next_after);
            if !all.has_more || all.data.len() >= limit as usize {
                return Ok(all);
            }
        }
    }

    /// The last items of a list, and how many stand before them. The list is read to its end; no more than `limit` of it and one
    /// page are held.
    pub(super) async fn last(
        &self,
        path: &str,
        query: &[(&str, &str)],
        limit: u32,
    ) -> Result<(Page, u64), CallError> {
        let mut kept = VecDeque::new();
        let (mut before, mut after) = (0, None);
        loop {
            let page = self.page(path, query, PAGE, after.as_deref()).await?;
            kept.extend(page.data);
            while kept.len() > limit as usize {
                kept.pop_front();
                before += 1;
            }
            if !page.has_more {
                let data = kept.into();
                return Ok((
                    Page {
                        data,
                        ..Page::empty()
                    },
                    before,
                ));
            }
            after = page.next_after;
        }
    }

    /// One page. It may be short, or empty, and not be the last; a cursor that stands still would be asked for ever, so it ends the
    /// list.
    async fn page(
        &self,
        path: &str,
        query: &[(&str, &str)],
        size: u32,
        after: Option<&str>,
    ) -> Result<Page, CallError> {
        let size = size.to_string();
        let cursor = after.map(|after| ("after", after));
        let asked = query.iter().copied().chain([("limit", &*size)]).chain(cursor);
        let answer = self.get(&format!("{path}?{}", encoded(asked))).await?;
        let mut page: Page = self.read(&answer)?;
        page.has_more &= page.next_after.is_some() && page.next_after.as_deref() != after;
        Ok(page)
    }

    /// `POST` of something that may be sent twice because it carries an id of its own: an answer that is lost is asked for once
    /// more.
    pub(super) async fn decide(&self, path: &str, body: &impl Serialize) -> Result<Answer, CallError> {
        match self.post(path, body).await {
            Err(error) if error.is_open() => self.post(path, body).await,
            answer => answer,
        }
    }

    /// `POST`, sent once.
    pub(super) async fn post(&self, path: &str, body: &impl Serialize) -> Result<Answer, CallError> {
        let body = serde_json::to_vec(body).map_err(|e| self.unreadable(&e))?;
        self.send(Method::POST, path, Some(body)).await
    }

    async fn send(&self, method: Method, path: &str, body: Option<Vec<u8>>) -> Result<Answer, CallError> {
        let mut request = self
            .http
            .request(method, format!("{}/api/v1/{path}", self.base.0));
        if let Some(body) = body {
            request = request.header(CONTENT_TYPE, "application/json").body(body);
        }
        let answer = request.send().await.map_err(|e| self.lost(&e))?;
        let status = answer.status();
        let replayed = answer
            .headers()
            .get("idempotency-replayed")
            .is_some_and(|v| v == "true");
        let body = answer.bytes().await.map_err(|e| self.lost(&e))?;
        if status.is_success() {
            return Ok(Answer { body, replayed });
        }
        Err(match serde_json::from_slice::<ErrorBody>(&body) {
            Ok(ErrorBody { error }) => CallError::Refused {
                code: plain(&error.code),
                message: plain(&error.message),
            },
            Err(_) => CallError::Strange {
                base: self.base.0.clone(),
                status,
            },
        })
    }

    /// The object of an answer.
    pub(super) fn read<T: DeserializeOwned>(&self, answer: &Answer) -> Result<T, CallError> {
        serde_json::from_slice(&answer.body).map_err(|e| self.unreadable(&e))
    }

    /// The objects of a list.
    pub(super) fn items<T: DeserializeOwned>(&self, page: &Page) -> Result<Vec<T>, CallError> {
        page.data
            .iter()
            .map(|item| serde_json::from_str(item.get()).map_err(|e| self.unreadable(&e)))
            .collect()
    }

    fn unreadable(&self, why: &serde_json::Error) -> CallError {
        CallError::Unreadable {
            base: self.base.0.clone(),
            why: why.to_string(),
        }
    }

    fn lost(&self, error: &reqwest::Error) -> CallError {
        // The innermost cause says what happened; those around it name the URL again.
        let mut cause: &dyn std::error::Error = error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        let base = self.base.0.clone();
        let why = if error.is_timeout() {
            String::from("nothing came in time")
        } else {
            cause.to_string()
        };
        if error.is_connect() {
            CallError::Unreachable { base, why }
        } else {
            CallError::Lost { base, why }
        }
    }
}

/// An id as it was typed. A URL has no place for those that are refused.
///
/// # Errors
/// What is wrong with it.
pub(super) fn id(text: &str) -> Result<String, String> {
    match text {
        "" | "." | ".." => Err(String::from("is no id")),
        text => Ok(text.to_owned()),
    }
}

/// One part of a path.
pub(super) fn segment(text: &str) -> String {
    utf8_percent_encode(text, OUTSIDE).to_string()
}

fn encoded<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    pairs
        .map(|(name, value)| format!("{name}={}", segment(value)))
        .collect::<Vec<_>>()
        .join("&")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edge_is_named_by_an_http_url_without_secrets() {
        for (text, base) in [
            ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("https://edge.example/", "https://edge.example"),
            ("https://edge.example/iop/", "https://edge.example/iop"),
        ] {
            assert_eq!(Base::parse(text), Ok(Base(base.to_owned())));
        }
        for bad in [
            "127.0.0.1:8080",
            "localhost",
            "ftp://edge",
            "http://user:pw@edge",
            "http://edge/?x=1",
            "http://edge/#x",
        ] {
            assert!(Base::parse(bad).is_err(), "{bad}");
        }
        for no_url in ["127.0.0.1:8080", "localhost", "localhost:8080", ""] {
            let why = Base::parse(no_url).unwrap_err();
            assert!(why.starts_with("must begin with http://"), "{no_url}: {why}");
        }
    }

    #[test]
    fn an_id_cannot_leave_its_place_in_a_path() {
        assert_eq!(segment("run_1.a~b-c"), "run_1.a~b-c");
        assert_eq!(segment("../a?b#c/ü"), "..%2Fa%3Fb%23c%2F%C3%BC");
        for no_place in ["", ".", ".."] {
            assert!(id(no_place).is_err());
        }
        assert_eq!(encoded([("a", "1&2"), ("b", "")].into_iter()), "a=1%262&b=");
    }

    #[test]
    fn only_what_may_have_been_done_is_asked_for_again() {
        let refused = |code: &str| CallError::Refused {
            code: code.to_owned(),
            message: String::new(),
        };
        let base = String::from("http://edge");
        let strange = |status| CallError::Strange {
            base: base.clone(),
            status,
        };
        let why = String::new();
        let lost = CallError::Lost {
            base: base.clone(),
            why: why.clone(),
        };
        for open in [
            lost,
            strange(StatusCode::BAD_GATEWAY),
            refused("journal_unavailable"),
        ] {
            assert!(open.is_open(), "{open}");
        }
        let unreachable = CallError::Unreachable {
            base: base.clone(),
            why,
        };
        for settled in [
            unreachable,
            strange(StatusCode::NOT_FOUND),
            refused("approval_expired"),
        ] {
            assert!(!settled.is_open(), "{settled}");
        }
    }
}
