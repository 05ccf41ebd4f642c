//! What happens to a body that a provider encoded although it was asked for identity (link.md, Encodings). Pure.

use http::HeaderMap;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, HeaderValue};

/// The codings the node can undo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Coding {
    Gzip,
    /// zlib, as RFC 9110 means it.
    Deflate,
    Brotli,
    Zstd,
}

/// What to do with a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plan {
    Pass,
    Decode(Coding),
    /// Neither the client nor the node can read it; it travels as it is and the edge refuses it.
    Unreadable,
}

/// Whether a head announces server-sent events.
pub(crate) fn is_event_stream(headers: &HeaderMap) -> bool {
    const SSE: &[u8] = b"text/event-stream";
    headers
        .get(CONTENT_TYPE)
        .and_then(|v| v.as_bytes().get(..SSE.len()))
        .is_some_and(|start| start.eq_ignore_ascii_case(SSE))
}

/// The plan for a provider's head; `accept` is the client's `Accept-Encoding`.
pub(crate) fn plan(headers: &HeaderMap, accept: Option<&HeaderValue>) -> Plan {
    if !headers.contains_key(CONTENT_ENCODING) {
        return Plan::Pass;
    }
    let mut names = headers
        .get_all(CONTENT_ENCODING)
        .iter()
        .flat_map(|v| v.to_str().unwrap_or("?").split(','))
        .map(str::trim)
        .filter(|n| !n.is_empty() && !n.eq_ignore_ascii_case("identity"));
    let Some(name) = names.next() else {
        return Plan::Pass;
    };
    if names.next().is_some() {
        // Codings on top of each other: nobody sends them, nothing here undoes them.
        return Plan::Unreadable;
    }
    // Events are read on the way, so they must be plain whatever the client could decode.
    if !is_event_stream(headers) && accepts(accept, name) {
        return Plan::Pass;
    }
    coding(name).map_or(Plan::Unreadable, Plan::Decode)
}

fn coding(name: &str) -> Option<Coding> {
    let is = |word: &str| name.eq_ignore_ascii_case(word);
    if is("gzip") || is("x-gzip") {
        Some(Coding::Gzip)
    } else if is("deflate") {
        Some(Coding::Deflate)
    } else if is("br") {
        Some(Coding::Brotli)
    } else if is("zstd") {
        Some(Coding::Zstd)
    } else {
        None
    }
}

/// RFC 9110 §12.5.3. An absent header would allow anything; here it means that the client did not ask for a coding.
fn accepts(accept: Option<&HeaderValue>, name: &str) -> bool {
    let Some(list) = accept.and_then(|v| v.to_str().ok()) else {
        return false;
    };
    let mut by_star = false;
    for item in list.split(',') {
        let mut parts = item.split(';').map(str::trim);
        let Some(coding) = parts.next() else { continue };
        let refused = parts.any(|p| {
            p.split_once('=').is_some_and(|(k, q)| {
                k.trim().eq_ignore_ascii_case("q") && q.trim().parse::<f32>().is_ok_and(|q| q <= 0.0)
            })
        });
        if coding.eq_ignore_ascii_case(name) {
            return !refused;
        }
        if coding == "*" {
            by_star = !refused;
        }
    }
    by_star
}

/// Asked of every provider.
pub(crate) const IDENTITY: (http::HeaderName, HeaderValue) =
    (ACCEPT_ENCODING, HeaderValue::from_static("identity"));

#[cfg(test)]
mod tests {
    use super::*;

    fn head(kind: &'static str, encoding: Option<&'static str>) -> HeaderMap {
        let mut h = HeaderMap::new();
        h.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        if let Some(e) = encoding {
            h.insert(CONTENT_ENCODING, HeaderValue::from_static(e));
        }
        h
    }

    #[test]
    fn streams_are_decoded_whole_bodies_only_where_the_client_cannot() {
        const SSE: &str = "Text/Event-Stream; charset=utf-8";
        const JSON: &str = "application/json";
        for (kind, encoding, accept, want) in [
            (SSE, None, None, Plan::Pass),
            (SSE, Some("identity"), None, Plan::Pass),
            (SSE, Some("gzip"), Some("gzip"), Plan::Decode(Coding::Gzip)),
            (SSE, Some("X-GZIP"), None, Plan::Decode(Coding::Gzip)),
            (SSE, Some("deflate"), None, Plan::Decode(Coding::Deflate)),
            (SSE, Some("br"), Some("br"), Plan::Decode(Coding::Brotli)),
            (SSE, Some("zstd"), None, Plan::Decode(Coding::Zstd)),
            (SSE, Some("snappy"), Some("snappy"), Plan::Unreadable),
            (JSON, Some("gzip"), Some("gzip, deflate, br"), Plan::Pass),
            (JSON, Some("gzip"), Some("br"), Plan::Decode(Coding::Gzip)),
            (
                JSON,
                Some("gzip"),
                Some("gzip;q=0, *"),
                Plan::Decode(Coding::Gzip),
            ),
            (JSON, Some("gzip"), Some("*"), Plan::Pass),
            (JSON, Some("gzip"), Some("*;q=0"), Plan::Decode(Coding::Gzip)),
            (JSON, Some("gzip"), None, Plan::Decode(Coding::Gzip)),
            (JSON, Some("snappy"), Some("snappy"), Plan::Pass),
            (JSON, Some("snappy"), Some("gzip"), Plan::Unreadable),
            (JSON, Some("gzip, br"), Some("gzip"), Plan::Unreadable),
        ] {
            let accept = accept.map(HeaderValue::from_static);
            assert_eq!(
                plan(&head(kind, encoding), accept.as_ref()),
                want,
                "{kind} {encoding:?} {accept:?}"
            );
        }
    }
}
