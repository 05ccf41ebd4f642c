//! What a handshake is and how it is refused (link.md, Handshake). Pure: facts in, a greeting or a refusal out.
//!
//! Nobody without a token learns more than that a link is here.

use std::borrow::Cow;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Method, Response, StatusCode, Version, request};
use http_body_util::Full;
use iop_shared::config::SecretString;
use iop_shared::ids::{ConnectionGeneration, EMBEDDED_NODE, NodeId};
use iop_shared::label_enum;
use iop_shared::openai::errors::ErrorObject;
use iop_shared::wire::{HANDSHAKE_PATH, LINK_VERSION, UPGRADE_TOKEN, headers};
use secrecy::ExposeSecret;
use subtle::{Choice, ConstantTimeEq};

/// Longest `iop-node-instance`, in bytes.
const INSTANCE_MAX: usize = 128;

/// An acceptable handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) node_id: NodeId,
    /// Random per start of the node's process, where it says so.
    pub(super) instance: Option<Box<str>>,
}

label_enum! {
    /// Why a handshake was refused; the word is the `code`.
    pub(super) enum Refusal {
        NotFound => "not_found",
        MethodNotAllowed => "method_not_allowed",
        BadToken => "invalid_link_token",
        NoUpgrade => "upgrade_required",
        BadVersion => "link_version",
        BadNodeId => "invalid_node_id",
        ReservedNodeId => "reserved_node_id",
        Duplicate => "duplicate_node",
        TooSlow => "handshake_timeout",
        Draining => "draining",
    }
}

impl Refusal {
    pub(super) const fn status(self) -> StatusCode {
        match self {
            Refusal::NotFound => StatusCode::NOT_FOUND,
            Refusal::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Refusal::BadToken => StatusCode::UNAUTHORIZED,
            Refusal::NoUpgrade | Refusal::BadVersion => StatusCode::UPGRADE_REQUIRED,
            Refusal::BadNodeId | Refusal::ReservedNodeId => StatusCode::BAD_REQUEST,
            Refusal::Duplicate => StatusCode::CONFLICT,
            Refusal::TooSlow => StatusCode::REQUEST_TIMEOUT,
            Refusal::Draining => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    const fn openai_type(self) -> &'static str {
        match self {
            Refusal::NotFound
            | Refusal::MethodNotAllowed
            | Refusal::BadToken
            | Refusal::NoUpgrade
            | Refusal::BadVersion
            | Refusal::BadNodeId
            | Refusal::ReservedNodeId
            | Refusal::Duplicate
            | Refusal::TooSlow => "invalid_request_error",
            Refusal::Draining => "server_error",
        }
    }

    /// For the operator of the node; `node_id` is known to be one where a refusal comes this late.
    pub(super) fn message(self, node_id: Option<&NodeId>) -> Cow<'static, str> {
        match self {
            Refusal::NotFound => "This port is for nodes, which ask for /link; clients use the edge's main port.".into(),
            Refusal::MethodNotAllowed => "The link is asked for with GET.".into(),
            Refusal::BadToken => "The link token is missing or not one of this edge's [link] tokens.".into(),
            Refusal::NoUpgrade => format!(
                "The link begins with an HTTP/1.1 upgrade: send \"Connection: upgrade\" and \"Upgrade: {UPGRADE_TOKEN}\"."
            )
            .into(),
            Refusal::BadVersion => {
                format!("This edge does not speak that link version; it speaks {UPGRADE_TOKEN}.").into()
            }
            Refusal::BadNodeId => "The node id (iop-node-id) is missing or does not match [A-Za-z0-9._-]{1,64}.".into(),
            Refusal::ReservedNodeId => {
                format!("The node id \"{EMBEDDED_NODE}\" is reserved for the node inside the edge.").into()
            }
            Refusal::Duplicate => {
                let id = node_id.map_or("", NodeId::as_str);
                format!("Another instance of node \"{id}\" is connected and alive; node ids must be unique.").into()
            }
            Refusal::TooSlow => "The handshake was not complete in time.".into(),
            Refusal::Draining => "The edge is draining and takes no new nodes.".into(),
        }
    }

    /// The whole answer.
    pub(super) fn response(self, node_id: Option<&NodeId>) -> Response<Full<Bytes>> {
        let message = self.message(node_id);
        let object = ErrorObject {
            message: &message,
            kind: self.openai_type(),
            param: None,
            code: Some(self.as_str()),
        };
        let mut response = Response::new(Full::new(Bytes::from(object.body())));
        *response.status_mut() = self.status();
        let map = response.headers_mut();
        map.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match self {
            Refusal::MethodNotAllowed => {
                map.insert(header::ALLOW, HeaderValue::from_static("GET"));
            }
            Refusal::BadToken => {
                map.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            Refusal::NoUpgrade | Refusal::BadVersion => {
                map.insert(header::UPGRADE, HeaderValue::from_static(UPGRADE_TOKEN));
                map.insert(header::CONNECTION, HeaderValue::from_static("upgrade, close"));
                map.insert(headers::LINK_VERSIONS, HeaderValue::from(LINK_VERSION));
            }
            Refusal::Draining => {
                map.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            Refusal::NotFound
            | Refusal::BadNodeId
            | Refusal::ReservedNodeId
            | Refusal::Duplicate
            | Refusal::TooSlow => {}
        }
        response
    }
}

/// The answer to an acceptable handshake.
pub(super) fn accepted(generation: ConnectionGeneration) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::default());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let map = response.headers_mut();
    map.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    map.insert(header::UPGRADE, HeaderValue::from_static(UPGRADE_TOKEN));
    map.insert(headers::CONNECTION_GENERATION, HeaderValue::from(generation.0));
    response
}

/// Judges a request by itself; whether its node may come in now is the registry's question.
pub(super) fn read(
    asked: &request::Parts,
    tokens: &[SecretString],
    draining: bool,
) -> Result<Hello, Refusal> {
    let map = &asked.headers;
    if asked.uri.path() != HANDSHAKE_PATH {
        return Err(Refusal::NotFound);
    }
    if asked.method != Method::GET {
        return Err(Refusal::MethodNotAllowed);
    }
    if !is_admitted(map, tokens) {
        return Err(Refusal::BadToken);
    }
    let offers_upgrade = asked.version == Version::HTTP_11
        && list(map, &header::CONNECTION).any(|option| option.eq_ignore_ascii_case("upgrade"))
        && list(map, &header::UPGRADE).next().is_some();
    if !offers_upgrade {
        return Err(Refusal::NoUpgrade);
    }
    if !list(map, &header::UPGRADE).any(|token| token.eq_ignore_ascii_case(UPGRADE_TOKEN)) {
        return Err(Refusal::BadVersion);
    }
    let node_id = map
        .get(headers::NODE_ID)
        .and_then(headers::decode)
        .and_then(|id| NodeId::new(&id).ok());
    let node_id = node_id.ok_or(Refusal::BadNodeId)?;
    if node_id.is_embedded() {
        return Err(Refusal::ReservedNodeId);
    }
    if draining {
        return Err(Refusal::Draining);
    }
    let instance = map.get(headers::NODE_INSTANCE).and_then(headers::decode);
    let instance = instance
        .filter(|i| !i.is_empty() && i.len() <= INSTANCE_MAX)
        .map(|i| Box::from(&*i));
    Ok(Hello { node_id, instance })
}

/// Compares with every token, each in constant time: how long it takes says nothing about any of them but its length.
fn is_admitted(map: &HeaderMap, tokens: &[SecretString]) -> bool {
    let Some(presented) = bearer(map) else {
        return false;
    };
    let any = |found: Choice, token: &SecretString| found | token.expose_secret().as_bytes().ct_eq(presented);
    tokens.iter().fold(Choice::from(0), any).into()
}

fn bearer(map: &HeaderMap) -> Option<&[u8]> {
    let (scheme, token) = map
        .get(header::AUTHORIZATION)?
        .as_bytes()
        .split_first_chunk::<7>()?;
    (scheme.eq_ignore_ascii_case(b"bearer ") && !token.is_empty()).then_some(token)
}

/// The members of a comma-separated header.
fn list<'a>(map: &'a HeaderMap, name: &header::HeaderName) -> impl Iterator<Item = &'a str> {
    map.get_all(name)
        .into_iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','))
        .map(str::trim)
        .filter(|member| !member.is_empty())
}

/// Whether a newcomer must wait for the older session to be pinged: only when both are known to be different processes.
pub(super) fn is_rival(old: Option<&str>, new: Option<&str>) -> bool {
    matches!((old, new), (Some(old), Some(new)) if old != new)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &[(&str, &str)] = &[
        ("connection", "keep-alive, Upgrade"),
        ("upgrade", "iop-link/1"),
        ("authorization", "Bearer two"),
        ("iop-node-id", "gpu-1"),
        ("iop-node-instance", "abc"),
    ];

    /// The good handshake with some headers replaced; an empty value removes.
    fn asked(changes: &[(&'static str, &str)]) -> request::Parts {
        let mut request = http::Request::get("/link").body(()).unwrap();
        for (name, value) in GOOD.iter().chain(changes) {
            if value.is_empty() {
                request.headers_mut().remove(*name);
            } else {
                request.headers_mut().insert(*name, value.parse().unwrap());
            }
        }
        request.into_parts().0
    }

    fn tokens() -> Vec<SecretString> {
        ["one", "two"].map(SecretString::from).into()
    }

    fn judge(parts: &request::Parts) -> Result<Hello, Refusal> {
        read(parts, &tokens(), false)
    }

    #[test]
    fn any_of_the_tokens_admits() {
        let hello = Hello {
            node_id: NodeId::new("gpu-1").unwrap(),
            instance: Some("abc".into()),
        };
        assert_eq!(judge(&asked(&[])).unwrap(), hello);
        assert_eq!(judge(&asked(&[("authorization", "bearer one")])).unwrap(), hello);
        let anonymous = judge(&asked(&[("iop-node-instance", "")])).unwrap();
        assert_eq!(anonymous.instance, None);
    }

    #[test]
    fn each_fault_has_its_own_refusal() {
        let long = "x".repeat(65);
        for (changes, refusal) in [
            (&[("authorization", "")][..], Refusal::BadToken),
            (&[("authorization", "Bearer ")], Refusal::BadToken),
            (&[("authorization", "Bearer on")], Refusal::BadToken),
            (&[("authorization", "Bearer onetwo")], Refusal::BadToken),
            (&[("authorization", "Basic two")], Refusal::BadToken),
            (&[("upgrade", "")], Refusal::NoUpgrade),
            (&[("connection", "")], Refusal::NoUpgrade),
            (&[("connection", "close")], Refusal::NoUpgrade),
            (&[("upgrade", "iop-link/2")], Refusal::BadVersion),
            (&[("upgrade", "h2c")], Refusal::BadVersion),
            (&[("iop-node-id", "")], Refusal::BadNodeId),
            (&[("iop-node-id", "a b")], Refusal::BadNodeId),
            (&[("iop-node-id", "a%2Fb")], Refusal::BadNodeId),
            (&[("iop-node-id", &long)], Refusal::BadNodeId),
            (&[("iop-node-id", "embedded")], Refusal::ReservedNodeId),
            // The first fault that may be told is told.
            (
                &[("authorization", "x"), ("upgrade", ""), ("iop-node-id", "")],
                Refusal::BadToken,
            ),
        ] {
            assert_eq!(judge(&asked(changes)), Err(refusal), "{changes:?}");
        }
        let mut elsewhere = asked(&[("authorization", "")]);
        elsewhere.uri = http::Uri::from_static("/v1/models");
        assert_eq!(judge(&elsewhere), Err(Refusal::NotFound));
        let mut posted = asked(&[]);
        posted.method = Method::POST;
        assert_eq!(judge(&posted), Err(Refusal::MethodNotAllowed));
        let mut old = asked(&[]);
        old.version = Version::HTTP_10;
        assert_eq!(judge(&old), Err(Refusal::NoUpgrade));
        assert_eq!(read(&asked(&[]), &tokens(), true), Err(Refusal::Draining));
        assert_eq!(read(&asked(&[]), &[], false), Err(Refusal::BadToken));
    }

    #[test]
    fn several_versions_may_be_offered() {
        assert!(judge(&asked(&[("upgrade", "iop-link/9, iop-link/1")])).is_ok());
    }

    #[test]
    fn every_refusal_has_words_in_the_error_form() {
        use futures_util::FutureExt;
        use http_body_util::BodyExt;
        let id = NodeId::new("gpu-1").unwrap();
        for r in Refusal::ALL {
            let response = r.response(Some(&id));
            assert!(response.status().is_client_error() || response.status().is_server_error());
            assert_eq!(
                response.headers().contains_key(headers::LINK_VERSIONS),
                response.status() == StatusCode::UPGRADE_REQUIRED
            );
            let body = response
                .into_body()
                .collect()
                .now_or_never()
                .unwrap()
                .unwrap()
                .to_bytes();
            let v: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(v["error"].as_object().unwrap().len(), 4);
            assert_eq!(v["error"]["code"], r.as_str());
            assert!(v["error"]["message"].as_str().unwrap().len() > 20);
        }
        let upgrade = Refusal::BadVersion.response(None);
        assert_eq!(upgrade.headers()[headers::LINK_VERSIONS], "1");
        assert_eq!(upgrade.headers()["upgrade"], "iop-link/1");
    }

    #[test]
    fn only_two_known_and_different_instances_are_rivals() {
        for (old, new, rival) in [
            (Some("a"), Some("b"), true),
            (Some("a"), Some("a"), false),
            (None, Some("b"), false),
            (Some("a"), None, false),
            (None, None, false),
        ] {
            assert_eq!(is_rival(old, new), rival);
        }
    }
}
