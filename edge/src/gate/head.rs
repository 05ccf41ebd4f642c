//! A provider's response head: what of it reaches the client, and what kind of body it announces. Pure.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Response, StatusCode, response};
use iop_shared::execution::Endpoint;
use iop_shared::wire::headers as wire;

use crate::error::X_SHOULD_RETRY;

/// How many attempts a request took (G13).
pub(crate) const X_IOP_ATTEMPTS: HeaderName = HeaderName::from_static("x-iop-attempts");
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// Status and end-to-end headers of a provider's answer.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    /// The provider's `content-length`, bytes (link.md, Length).
    pub(crate) provider_length: Option<u64>,
}

impl Head {
    pub(crate) fn of_provider(parts: response::Parts) -> Self {
        let mut headers = parts.headers;
        let provider_length = headers
            .get(wire::CONTENT_LENGTH)
            .and_then(|v| v.to_str().ok())
            .and_then(|v| v.parse().ok());
        // The node has removed what may not reach a client; these two are its own.
        headers.remove(wire::ORIGIN);
        headers.remove(wire::CONTENT_LENGTH);
        Self {
            status: parts.status,
            headers,
            provider_length,
        }
    }

    /// The gate's budget is spent: a client's own retries would multiply it, unless the provider said otherwise (§13).
    pub(crate) fn forbid_client_retry(&mut self) {
        let said = [X_SHOULD_RETRY, header::RETRY_AFTER, RETRY_AFTER_MS];
        if !said.iter().any(|n| self.headers.contains_key(n)) {
            self.headers
                .insert(X_SHOULD_RETRY, HeaderValue::from_static("false"));
        }
    }

    /// The same status for a JSON body of ours, with the provider's word on retries.
    pub(crate) fn bare(self) -> Self {
        let mut headers = HeaderMap::with_capacity(4);
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        for name in [X_SHOULD_RETRY, header::RETRY_AFTER, RETRY_AFTER_MS] {
            if let Some(value) = self.headers.get(&name) {
                headers.insert(name, value.clone());
            }
        }
        Self {
            status: self.status,
            headers,
            provider_length: None,
        }
    }

    /// The client's response.
    pub(crate) fn into_response<B>(self, attempts: u32, body: B) -> Response<B> {
        let mut response = Response::new(body);
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers;
        response
            .headers_mut()
            .insert(X_IOP_ATTEMPTS, HeaderValue::from(attempts));
        response
    }
}

/// What a head announces.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// An SSE stream.
    Events,
    /// A body that ends; `json`: it has to be JSON when the status is a success.
    Whole { json: bool },
    /// No answer to what was asked.
    Unusable(&'static str),
}

/// The form of answer that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    Whole,
    Stream,
    /// A stream was asked for, and a whole answer does as well.
    Either,
}

/// Whether a body says of itself that it is JSON.
pub(crate) fn is_json(headers: &HeaderMap) -> bool {
    media_type(headers) == Media::Json
}

/// Decides by what was asked (the body's `stream`, never `Accept`) and by what came (G10, G11, G58).
pub(crate) fn judge(
    head: &Head,
    endpoint: Endpoint,
    wanted: Wanted,
    accept_encoding: Option<&HeaderValue>,
) -> Shape {
    if head.status == StatusCode::UNAUTHORIZED {
        return Shape::Unusable("The provider refused the gateway's credential.");
    }
    if head.status.is_redirection() || head.status.is_informational() {
        return Shape::Unusable("The provider redirected the request, which the gateway does not follow.");
    }
    if !readable(head.headers.get(header::CONTENT_ENCODING), accept_encoding) {
        return Shape::Unusable("The provider's answer has an encoding that nobody asked for.");
    }
    if !head.status.is_success() {
        return Shape::Whole { json: false };
    }
    let media = media_type(&head.headers);
    let json = match endpoint {
        Endpoint::Chat
        | Endpoint::Responses
        | Endpoint::Completions
        | Endpoint::Embeddings
        | Endpoint::Rerank
        | Endpoint::Moderations => true,
        // Images and audio answer in what format the request asked for.
        Endpoint::Images | Endpoint::Audio => false,
    };
    match (wanted, media) {
        // `stream` asks these for a body as it is made, which may well be no events.
        (Wanted::Stream | Wanted::Either, Media::Json | Media::Html | Media::Other) if !json => {
            Shape::Whole { json }
        }
        (Wanted::Either, Media::Json) => Shape::Whole { json },
        (Wanted::Stream, Media::Json) | (Wanted::Stream | Wanted::Either, Media::Html) => {
            Shape::Unusable("The provider answered a streaming request without a stream.")
        }
        (Wanted::Whole, Media::Html) if json => Shape::Unusable("The provider answered with a web page."),
        (Wanted::Whole, Media::Events) if json => {
            Shape::Unusable("The provider answered with a stream that nobody asked for.")
        }
        // A stream whose label is wrong or missing is known by its events.
        (Wanted::Stream | Wanted::Either, Media::Events | Media::Other) => Shape::Events,
        (Wanted::Whole, Media::Events) => Shape::Events,
        (Wanted::Whole, Media::Json | Media::Html | Media::Other) => Shape::Whole { json },
    }
}

/// The node decodes what it can; an encoding that is still there has to be one that the client named (link.md, Encodings).
fn readable(encoding: Option<&HeaderValue>, accept: Option<&HeaderValue>) -> bool {
    let Some(encoding) = encoding.map(|v| v.to_str().unwrap_or_default().trim()) else {
        return true;
    };
    let accept = accept.and_then(|v| v.to_str().ok()).unwrap_or_default();
    encoding.eq_ignore_ascii_case("identity")
        || accept.split(',').any(|a| {
            let name = a.split(';').next().unwrap_or_default().trim();
            name == "*" || name.eq_ignore_ascii_case(encoding)
        })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Media {
    Events,
    Json,
    Html,
    Other,
}

fn media_type(headers: &HeaderMap) -> Media {
    let Some(value) = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes) else {
        return Media::Other;
    };
    let value = value
        .split(|b| *b == b';')
        .next()
        .unwrap_or_default()
        .trim_ascii();
    if value.eq_ignore_ascii_case(b"text/event-stream") {
        Media::Events
    } else if value.eq_ignore_ascii_case(b"text/html") {
        Media::Html
    } else if value.eq_ignore_ascii_case(b"application/json")
        || value.to_ascii_lowercase().ends_with(b"+json")
    {
        Media::Json
    } else {
        Media::Other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(status: u16, content_type: &str) -> Head {
        let mut headers = HeaderMap::new();
        if !content_type.is_empty() {
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_str(content_type).unwrap());
        }
        Head {
            status: StatusCode::from_u16(status).unwrap(),
            headers,
            provider_length: None,
        }
    }

    #[test]
    fn shape_follows_what_was_asked_and_what_came() {
        use Endpoint::{Audio, Chat, Images};
        for (status, media, endpoint, stream, want) in [
            (
                200,
                "text/event-stream; charset=utf-8",
                Chat,
                true,
                Some(Shape::Events),
            ),
            (200, "", Chat, true, Some(Shape::Events)),
            (200, "text/plain", Chat, true, Some(Shape::Events)),
            (200, "application/json", Chat, true, None),
            (200, "text/html", Chat, true, None),
            (200, "text/html", Chat, false, None),
            (200, "text/event-stream", Chat, false, None),
            (
                200,
                "application/json",
                Chat,
                false,
                Some(Shape::Whole { json: true }),
            ),
            (
                200,
                "audio/mpeg",
                Audio,
                false,
                Some(Shape::Whole { json: false }),
            ),
            (200, "text/event-stream", Audio, false, Some(Shape::Events)),
            (200, "text/event-stream", Images, true, Some(Shape::Events)),
            (200, "audio/mpeg", Audio, true, Some(Shape::Whole { json: false })),
            (500, "text/html", Chat, true, Some(Shape::Whole { json: false })),
            (
                429,
                "application/json",
                Chat,
                false,
                Some(Shape::Whole { json: false }),
            ),
            (401, "application/json", Chat, false, None),
            (302, "", Chat, false, None),
        ] {
            let wanted = if stream { Wanted::Stream } else { Wanted::Whole };
            let got = judge(&head(status, media), endpoint, wanted, None);
            match want {
                Some(shape) => assert_eq!(got, shape, "{status} {media} {stream}"),
                None => assert!(matches!(got, Shape::Unusable(_)), "{status} {media} {stream}"),
            }
        }
    }

    #[test]
    fn who_can_read_either_form_takes_what_comes_and_no_web_page() {
        let judged = |media| judge(&head(200, media), Endpoint::Chat, Wanted::Either, None);
        assert_eq!(judged("application/json"), Shape::Whole { json: true });
        assert_eq!(judged("text/event-stream"), Shape::Events);
        assert_eq!(judged(""), Shape::Events);
        assert!(matches!(judged("text/html"), Shape::Unusable(_)));
    }

    #[test]
    fn an_encoding_has_to_be_one_that_the_client_reads() {
        let judged = |encoding: &'static str, accept: Option<&'static str>| {
            let mut h = head(200, "application/json");
            h.headers
                .insert(header::CONTENT_ENCODING, HeaderValue::from_static(encoding));
            judge(
                &h,
                Endpoint::Chat,
                Wanted::Whole,
                accept.map(HeaderValue::from_static).as_ref(),
            )
        };
        for (encoding, accept, fits) in [
            ("gzip", Some("gzip, br"), true),
            ("identity", None, true),
            ("snappy", Some("snappy;q=0.5"), true),
            ("snappy", Some("gzip"), false),
            ("gzip, br", Some("gzip, br"), false),
            ("gzip", None, false),
        ] {
            assert_eq!(
                matches!(judged(encoding, accept), Shape::Whole { .. }),
                fits,
                "{encoding} {accept:?}"
            );
        }
    }

    #[test]
    fn what_is_left_of_a_large_refusal_is_its_status_and_its_word_on_retries() {
        let mut h = head(429, "text/html");
        h.headers
            .insert(header::RETRY_AFTER, HeaderValue::from_static("3"));
        h.headers
            .insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        let bare = h.bare();
        assert_eq!(bare.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(bare.headers.len(), 2);
        assert_eq!(bare.headers[header::CONTENT_TYPE], "application/json");
        assert_eq!(bare.headers[header::RETRY_AFTER], "3");
    }

    #[test]
    fn a_providers_word_on_retries_wins() {
        for name in ["retry-after", "retry-after-ms", "x-should-retry"] {
            let mut h = head(429, "");
            h.headers
                .insert(HeaderName::from_static(name), HeaderValue::from_static("2"));
            h.forbid_client_retry();
            assert_eq!(h.headers.len(), 1, "{name}");
        }
        let mut h = head(500, "");
        h.forbid_client_retry();
        assert_eq!(h.headers[X_SHOULD_RETRY], "false");
    }
}
