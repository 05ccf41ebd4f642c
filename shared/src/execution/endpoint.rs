//! The model-routed endpoints of `/v1` that a provider can serve (G1–G4).

use crate::label_enum;

label_enum! {
    /// A family of `/v1` paths; the word is used in configuration, on the link and as a label (G83).
    pub enum Endpoint {
        Chat => "chat",
        Responses => "responses",
        Completions => "completions",
        Embeddings => "embeddings",
        Rerank => "rerank",
        Moderations => "moderations",
        Images => "images",
        Audio => "audio",
    }
}

impl Endpoint {
    /// The path below `/v1/` that a plain `POST` to this endpoint uses.
    pub const fn path(self) -> &'static str {
        match self {
            Endpoint::Chat => "chat/completions",
            Endpoint::Responses => "responses",
            Endpoint::Completions => "completions",
            Endpoint::Embeddings => "embeddings",
            Endpoint::Rerank => "rerank",
            Endpoint::Moderations => "moderations",
            Endpoint::Images => "images/generations",
            Endpoint::Audio => "audio/speech",
        }
    }

    /// The endpoint that owns a path below `/v1/` (no leading slash, no query).
    ///
    /// `responses/...` is the stored-response surface (G2); `images/...` and `audio/...` take one more segment.
    pub fn of_path(path: &str) -> Option<Self> {
        let one_segment = |rest: &str| is_name(rest) && !rest.contains('/');
        for e in [
            Endpoint::Chat,
            Endpoint::Responses,
            Endpoint::Completions,
            Endpoint::Embeddings,
            Endpoint::Rerank,
            Endpoint::Moderations,
        ] {
            if path == e.path() {
                return Some(e);
            }
        }
        if let Some(rest) = path.strip_prefix("images/") {
            return one_segment(rest).then_some(Endpoint::Images);
        }
        if let Some(rest) = path.strip_prefix("audio/") {
            return one_segment(rest).then_some(Endpoint::Audio);
        }
        let rest = path.strip_prefix("responses/")?;
        let (id, verb) = rest.split_once('/').unwrap_or((rest, ""));
        (is_name(id) && matches!(verb, "" | "cancel" | "input_items")).then_some(Endpoint::Responses)
    }
}

/// A segment that names something: a server may resolve `..`, encoded or not, and leave the path that was meant.
fn is_name(segment: &str) -> bool {
    let decoded: Vec<u8> = percent_encoding::percent_decode_str(segment).collect();
    !decoded.is_empty() && decoded.iter().any(|b| !matches!(b, b'.' | b'/' | b'\\'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_path_is_owned_by_its_endpoint() {
        for e in Endpoint::ALL {
            assert_eq!(Endpoint::of_path(e.path()), Some(*e));
        }
    }

    #[test]
    fn strangers_and_traversals_have_no_endpoint() {
        for p in [
            "",
            "files",
            "responses/",
            "responses/a/b",
            "responses/a/cancel/x",
            "responses/..",
            "responses/%2e%2E/cancel",
            "audio/%2e%2e",
            "images",
            "audio/a/b",
            "images/",
        ] {
            assert_eq!(Endpoint::of_path(p), None, "{p}");
        }
        assert_eq!(
            Endpoint::of_path("responses/resp_1/input_items"),
            Some(Endpoint::Responses)
        );
        assert_eq!(Endpoint::of_path("audio/transcriptions"), Some(Endpoint::Audio));
    }
}
