//! What a client says it takes.

use http::header::{self, HeaderMap};

/// Whether a media type is named in `Accept`, and not with `q=0`. A range such as `*/*` names nothing.
pub(super) fn names(headers: &HeaderMap, media: &str) -> bool {
    headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|range| {
            let mut parts = range.split(';').map(str::trim);
            parts
                .next()
                .is_some_and(|named| named.eq_ignore_ascii_case(media))
                && !parts.any(refuses)
        })
}

/// `q=0`, with or without decimals.
fn refuses(parameter: &str) -> bool {
    let weight = parameter
        .split_once('=')
        .filter(|(name, _)| name.trim().eq_ignore_ascii_case("q"));
    weight.is_some_and(|(_, weight)| weight.trim().parse() == Ok(0.0_f32))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn a_media_type_is_named_or_it_is_not() {
        let of = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(header::ACCEPT, HeaderValue::from_static(value));
            }
            names(&headers, "text/event-stream")
        };
        for yes in [
            &["text/event-stream"][..],
            &["application/json;q=0.5, Text/Event-Stream;q=0.9"],
            &["application/json", "text/event-stream ; charset=utf-8 ; q=0.001"],
        ] {
            assert!(of(yes), "{yes:?}");
        }
        for no in [
            &[][..],
            &["*/*"],
            &["text/*"],
            &["text/event-stream;q=0"],
            &["text/event-stream; charset=utf-8; Q = 0.000"],
        ] {
            assert!(!of(no), "{no:?}");
        }
    }
}
