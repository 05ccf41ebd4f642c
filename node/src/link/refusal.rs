//! What an edge's answer to the handshake means, in words an operator can act on. Pure.

use http::StatusCode;
use http::header::{HeaderMap, UPGRADE};
use iop_shared::wire::{LINK_VERSION, UPGRADE_TOKEN, headers};
use serde::Deserialize;

use crate::metrics::DialResult;

/// A dial that led to no link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) result: DialResult,
    pub(crate) text: String,
}

/// Longest part of an edge's own words that is logged, in characters.
const WORDS: usize = 300;

/// Reads a refusal; `body` is the edge's, if it came.
pub(crate) fn read(status: StatusCode, map: &HeaderMap, body: &[u8]) -> Refusal {
    let said = message(body)
        .map(|m| format!("; the edge says: {m}"))
        .unwrap_or_default();
    let code = status.as_u16();
    let (result, text) = match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => (
            DialResult::Unauthorized,
            format!("the edge refused this node's token ({code}): check `token` of [[edges]]{said}"),
        ),
        StatusCode::UPGRADE_REQUIRED => {
            let spoken = versions(map).unwrap_or_else(|| String::from("other versions"));
            let text = format!(
                "link version mismatch ({code}): this node speaks {UPGRADE_TOKEN} (version {LINK_VERSION}), the edge speaks {spoken}{said}"
            );
            (DialResult::VersionRefused, text)
        }
        StatusCode::CONFLICT => (
            DialResult::Duplicate,
            format!("another node with this id is connected ({code}): ids must be unique{said}"),
        ),
        _ => (
            DialResult::Refused,
            format!("the edge refused the link ({code}){said}"),
        ),
    };
    Refusal { result, text }
}

fn versions(map: &HeaderMap) -> Option<String> {
    let named = map.get(headers::LINK_VERSIONS).or_else(|| map.get(UPGRADE))?;
    Some(clean(named.to_str().ok()?))
}

fn message(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Body {
        error: Inner,
    }
    #[derive(Deserialize)]
    struct Inner {
        message: String,
    }
    let body: Body = serde_json::from_slice(body).ok()?;
    Some(clean(&body.error.message))
}

/// The edge is authenticated by its URL only: its words go into one bounded line.
fn clean(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(WORDS)
        .collect()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn every_refusal_says_what_to_do() {
        let body = br#"{"error":{"message":"no\nway","type":"x","param":null,"code":null}}"#;
        for (status, result, words) in [
            (401, DialResult::Unauthorized, &["token", "401", "no way"][..]),
            (403, DialResult::Unauthorized, &["token", "403"]),
            (409, DialResult::Duplicate, &["409", "unique"]),
            (
                426,
                DialResult::VersionRefused,
                &["426", "version", "iop-link/1", "iop-link/7"],
            ),
            (400, DialResult::Refused, &["400", "no way"]),
            (503, DialResult::Refused, &["503"]),
        ] {
            let mut map = HeaderMap::new();
            map.insert(UPGRADE, HeaderValue::from_static("iop-link/7"));
            let r = read(StatusCode::from_u16(status).unwrap(), &map, body);
            assert_eq!(r.result, result);
            for w in words {
                assert!(r.text.contains(w), "{w} in {}", r.text);
            }
        }
        let mut map = HeaderMap::new();
        map.insert(headers::LINK_VERSIONS, HeaderValue::from_static("2, 3"));
        assert!(
            read(StatusCode::UPGRADE_REQUIRED, &map, b"<html>")
                .text
                .contains("speaks 2, 3")
        );
    }
}
