//! Heads in both directions: what reaches a provider and what of its head reaches the edge (G11, G12). Pure.

use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue};
use iop_shared::wire::{h2, headers};

use super::encoding::{self, IDENTITY, Plan};

/// The size of a header list as HTTP/2 counts it (RFC 9113 §6.5.2), in bytes.
fn list_bytes(map: &HeaderMap) -> usize {
    map.iter().map(|(n, v)| n.as_str().len() + v.len() + 32).sum()
}

/// The link's limit; it holds in-process too, so that both shapes refuse the same.
pub(crate) fn fits(map: &HeaderMap) -> bool {
    list_bytes(map) <= h2::MAX_HEADER_LIST as usize
}

/// Turns the client's headers, cleared of what may not travel, into the provider's: its own settings win.
pub(crate) fn towards_provider(map: &mut HeaderMap, own: &[(HeaderName, HeaderValue)]) {
    for (name, value) in own {
        map.insert(name.clone(), value.clone());
    }
    let (name, value) = IDENTITY;
    map.insert(name, value);
}

/// Turns a provider's headers into those of the tunnel's head, and says what to do with the body.
pub(crate) fn from_provider(map: &mut HeaderMap, accept_encoding: Option<&HeaderValue>) -> Plan {
    let plan = encoding::plan(map, accept_encoding);
    headers::provider_to_client(map);
    // h2 resets a stream whose DATA is shorter than its content-length, and the terminal would be lost.
    let length = map.remove(CONTENT_LENGTH);
    match plan {
        Plan::Pass => {
            if let Some(length) = length {
                map.insert(headers::CONTENT_LENGTH, length);
            }
        }
        Plan::Decode(_) => {
            map.remove(CONTENT_ENCODING);
        }
        Plan::Unreadable => {}
    }
    map.insert(headers::ORIGIN, headers::ORIGIN_PROVIDER);
    plan
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut m = HeaderMap::new();
        for (n, v) in pairs {
            m.append(HeaderName::from_static(n), HeaderValue::from_static(v));
        }
        m
    }

    #[test]
    fn the_providers_own_credential_replaces_the_clients_and_identity_is_asked() {
        let mut m = map(&[
            ("authorization", "Bearer client"),
            ("accept-encoding", "br"),
            ("x-a", "1"),
            ("x-org", "c"),
        ]);
        let own = [
            (
                http::header::AUTHORIZATION,
                HeaderValue::from_static("Bearer own"),
            ),
            (HeaderName::from_static("x-org"), HeaderValue::from_static("o")),
        ];
        towards_provider(&mut m, &own);
        assert_eq!(
            m,
            map(&[
                ("authorization", "Bearer own"),
                ("accept-encoding", "identity"),
                ("x-a", "1"),
                ("x-org", "o")
            ])
        );
    }

    #[test]
    fn the_length_travels_under_another_name_and_goes_with_the_encoding() {
        let mut plain = map(&[
            ("content-length", "5"),
            ("set-cookie", "a=b"),
            ("iop-origin", "forged"),
        ]);
        assert_eq!(from_provider(&mut plain, None), Plan::Pass);
        assert_eq!(
            plain,
            map(&[("iop-content-length", "5"), ("iop-origin", "provider")])
        );
        let mut gz = map(&[("content-length", "5"), ("content-encoding", "gzip"), ("x", "1")]);
        assert!(matches!(from_provider(&mut gz, None), Plan::Decode(_)));
        assert_eq!(gz, map(&[("iop-origin", "provider"), ("x", "1")]));
    }

    #[test]
    fn a_header_list_is_bounded_as_on_the_link() {
        let mut m = HeaderMap::new();
        m.insert(
            "x-big",
            HeaderValue::from_str(&"a".repeat(h2::MAX_HEADER_LIST as usize - 37)).unwrap(),
        );
        assert!(fits(&m));
        m.insert("y", HeaderValue::from_static(""));
        assert!(!fits(&m));
    }
}
