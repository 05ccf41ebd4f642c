//! Header names of the link and the rules for the rest of them (link.md, Headers; G11, G12).
//!
//! Values of `iop-*` headers are percent-encoded outside visible ASCII, so that any target name fits.

use std::borrow::Cow;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};

macro_rules! names {
    ($($(#[$meta:meta])* $id:ident = $name:literal;)+) => {
        $($(#[$meta])* pub const $id: HeaderName = HeaderName::from_static($name);)+
    };
}

names! {
    /// Handshake: the node's id.
    NODE_ID = "iop-node-id";
    /// Handshake: random per start of the node process.
    NODE_INSTANCE = "iop-node-instance";
    /// Handshake answer: the generation the edge assigned.
    CONNECTION_GENERATION = "iop-connection-generation";
    /// Handshake refusal (426): link versions the edge speaks.
    LINK_VERSIONS = "iop-link-versions";
    /// Tunnel and run request: `RunId`.
    RUN_ID = "iop-run-id";
    /// Tunnel and run request: `AttemptId`.
    ATTEMPT_ID = "iop-attempt-id";
    /// Tunnel, run and command request: provider id on that node.
    PROVIDER = "iop-provider";
    /// Tunnel, run and command request: the name the provider knows.
    TARGET = "iop-target";
    /// Tunnel and run request: milliseconds; 0 is 004's default.
    RESPONSE_STALL_TIMEOUT_MS = "iop-response-stall-timeout-ms";
    /// Tunnel request: HTTP method towards the provider; absent means `POST`.
    METHOD = "iop-method";
    /// Tunnel request: path and query below `/v1/`; absent means the endpoint's own path.
    PATH = "iop-path";
    /// Tunnel request: the client's `Accept-Encoding`; the provider itself is asked for identity.
    ACCEPT_ENCODING = "iop-accept-encoding";
    /// Response head: who wrote it, `provider` or `node`.
    ORIGIN = "iop-origin";
    /// Response head: the provider's `content-length`; never sent as such on the link.
    CONTENT_LENGTH = "iop-content-length";
    /// Trailer: `complete`, `error` or `cancelled`.
    TERMINAL = "iop-terminal";
    /// Trailer: `FailureCode`.
    ERROR_CODE = "iop-error-code";
    /// Trailer: 004's legacy error string.
    ERROR = "iop-error";
    /// Trailer: ASCII-escaped JSON of allow-listed keys, for `response_stalled` only.
    FAILURE = "iop-failure";
    /// Trailer: token usage, JSON.
    USAGE = "iop-usage";
}

/// `iop-origin` of a provider's own head (004 `response_start`).
pub const ORIGIN_PROVIDER: HeaderValue = HeaderValue::from_static("provider");
/// `iop-origin` of an answer that the node made itself.
pub const ORIGIN_NODE: HeaderValue = HeaderValue::from_static("node");

const ENCODED: &AsciiSet = &CONTROLS.add(b'%').add(b' ');

/// Encodes any text as a header value.
pub fn encode(text: &str) -> HeaderValue {
    let encoded: Cow<'_, str> = utf8_percent_encode(text, ENCODED).into();
    // Percent-encoding leaves only visible ASCII, which every header value may hold.
    HeaderValue::from_str(&encoded).unwrap_or_else(|_| HeaderValue::from_static(""))
}

/// A value that is sent once and never again: kept out of HPACK's tables on both sides, where it would only push out
/// what is sent with every request.
pub fn once(text: &str) -> HeaderValue {
    let mut value = encode(text);
    value.set_sensitive(true);
    value
}

/// Reads a value written by `encode`; `None` when it is not UTF-8 behind the encoding.
pub fn decode(value: &HeaderValue) -> Option<Cow<'_, str>> {
    percent_decode_str(value.to_str().ok()?).decode_utf8().ok()
}

/// Hop-by-hop headers (RFC 9110 §7.6.1), which no proxy passes on.
fn is_hop_by_hop(name: &HeaderName) -> bool {
    matches!(
        *name,
        header::CONNECTION
            | header::TRANSFER_ENCODING
            | header::TE
            | header::TRAILER
            | header::UPGRADE
            | header::PROXY_AUTHENTICATE
            | header::PROXY_AUTHORIZATION
    ) || matches!(name.as_str(), "keep-alive" | "proxy-connection")
}

/// Removes what `Connection` names and every hop-by-hop header.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(header::CONNECTION) {
        let named: Vec<HeaderName> = headers
            .get_all(header::CONNECTION)
            .iter()
            .filter_map(|v| v.to_str().ok())
            .flat_map(|v| v.split(','))
            .filter_map(|n| HeaderName::try_from(n.trim()).ok())
            .collect();
        for name in named {
            headers.remove(name);
        }
    }
    remove_if(headers, is_hop_by_hop);
}

/// The client's headers as they may travel to a provider (G12): no hop-by-hop, no credential, no cookie,
/// nothing of ours, no framing (recomputed), no `accept-encoding` (asked as identity), no `expect`.
pub fn client_to_provider(headers: &mut HeaderMap) {
    strip_hop_by_hop(headers);
    remove_if(headers, |n| {
        matches!(
            *n,
            header::AUTHORIZATION
                | header::COOKIE
                | header::HOST
                | header::CONTENT_LENGTH
                | header::ACCEPT_ENCODING
                | header::EXPECT
                | header::FORWARDED
        ) || n.as_str() == "x-api-key"
            || n.as_str() == "api-key"
            || n.as_str().starts_with("x-forwarded-")
            || is_ours(n)
    });
}

/// The provider's headers as they may travel to a client (G11): no hop-by-hop, no cookie, no credential, nothing of ours.
/// `content-length` is handled by the caller (link.md, Length).
pub fn provider_to_client(headers: &mut HeaderMap) {
    strip_hop_by_hop(headers);
    remove_if(headers, |n| {
        matches!(
            *n,
            header::SET_COOKIE | header::AUTHORIZATION | header::WWW_AUTHENTICATE
        ) || matches!(
            n.as_str(),
            "x-api-key" | "api-key" | "set-cookie2" | "x-iop-request-id" | "x-iop-attempts"
        ) || is_ours(n)
    });
}

fn is_ours(name: &HeaderName) -> bool {
    name.as_str().starts_with("iop-") || name.as_str().starts_with("x-iop-")
}

/// Walks once; allocates only when something has to go.
fn remove_if(headers: &mut HeaderMap, gone: impl Fn(&HeaderName) -> bool) {
    if !headers.keys().any(&gone) {
        return;
    }
    let names: Vec<HeaderName> = headers.keys().filter(|n| gone(n)).cloned().collect();
    for name in names {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_target_name_survives_a_header() {
        for t in [
            "Qwen/Qwen3-8B",
            "qwen3:8b",
            "modèle été",
            "100% done",
            "a\r\nb: c",
            "",
        ] {
            assert_eq!(decode(&encode(t)).unwrap(), t);
        }
    }

    #[test]
    fn credentials_and_ours_never_reach_a_provider() {
        let mut h = HeaderMap::new();
        for (n, v) in [
            ("authorization", "Bearer secret"),
            ("x-api-key", "secret"),
            ("cookie", "a=b"),
            ("iop-target", "x"),
            ("x-iop-debug", "x"),
            ("connection", "x-named, close"),
            ("x-named", "1"),
            ("keep-alive", "1"),
            ("te", "trailers"),
            ("x-stainless-lang", "python"),
            ("x-codex-turn-metadata", "{}"),
        ] {
            h.append(HeaderName::from_static(n), HeaderValue::from_static(v));
        }
        client_to_provider(&mut h);
        let mut left: Vec<_> = h.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["x-codex-turn-metadata", "x-stainless-lang"]);
    }

    #[test]
    fn repeated_provider_headers_stay_repeated_and_cookies_go() {
        let mut h = HeaderMap::new();
        h.append("x-multi", HeaderValue::from_static("1"));
        h.append("x-multi", HeaderValue::from_static("2"));
        h.append("set-cookie", HeaderValue::from_static("a=b"));
        h.append("retry-after", HeaderValue::from_static("2"));
        provider_to_client(&mut h);
        assert_eq!(h.get_all("x-multi").iter().count(), 2);
        assert!(h.get("set-cookie").is_none());
        assert_eq!(h["retry-after"], "2");
    }
}
