//! A `multipart/form-data` body (RFC 7578): only the `model` and `stream` parts are read, only `model` is changed (G4).
//!
//! Parts are found by their delimiter lines; what a part holds is never searched, so bytes that look like headers
//! inside a file stay what they are.

use std::ops::Range;

use bytes::Bytes;
use memchr::memmem::{self, Finder};

use super::request::{RequestError, SplicedBody};

/// Longest boundary of RFC 2046 §5.1.1, in bytes.
const BOUNDARY_MAX: usize = 70;
/// A part's headers are no longer than this, in bytes.
const PART_HEADERS_MAX: usize = 8 << 10;

/// What of a multipart body routes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MultipartFacts {
    model: String,
    /// Every `model` part's content: readers differ on which one counts.
    model_spans: Vec<Range<usize>>,
    stream: bool,
}

impl MultipartFacts {
    pub fn model(&self) -> &str {
        &self.model
    }

    pub fn stream(&self) -> bool {
        self.stream
    }
}

/// Reads the parts' headers and the `model` and `stream` values.
///
/// # Errors
/// A malformed body, or a `model` that is missing or no text.
pub fn inspect(content_type: &str, body: &Bytes) -> Result<MultipartFacts, RequestError> {
    let boundary = boundary(content_type)
        .ok_or_else(|| RequestError::body("The multipart content-type has no valid boundary."))?;
    let (mut model, mut model_spans) = (None, Vec::new());
    let mut stream = false;
    for part in Parts::new(body, boundary)? {
        let part = part?;
        match part.name.as_deref() {
            Some("model") => {
                let text = std::str::from_utf8(&body[part.content.clone()])
                    .map_err(|_| RequestError::at("model", "`model` must be text."))?;
                model = Some(text.to_owned());
                model_spans.push(part.content);
            }
            Some("stream") => stream = body[part.content].trim_ascii().eq_ignore_ascii_case(b"true"),
            Some(_) | None => {}
        }
    }
    let model = model.ok_or_else(|| RequestError::at("model", "The form field `model` is missing."))?;
    if model.is_empty() {
        return Err(RequestError::at("model", "`model` must not be empty."));
    }
    Ok(MultipartFacts {
        model,
        model_spans,
        stream,
    })
}

/// The body for a provider that knows the model as `target`.
pub fn splice(body: &Bytes, facts: &MultipartFacts, target: &str) -> SplicedBody {
    if facts.model == target && facts.model_spans.len() == 1 {
        return SplicedBody::whole(body.clone());
    }
    let name = Bytes::copy_from_slice(target.as_bytes());
    SplicedBody::edited(
        body,
        facts.model_spans.iter().map(|span| (span.clone(), name.clone())),
    )
}

/// The `boundary` parameter, quoted or not.
fn boundary(content_type: &str) -> Option<&str> {
    for parameter in content_type.split(';').skip(1) {
        let Some((name, value)) = parameter.split_once('=') else {
            continue;
        };
        if name.trim().eq_ignore_ascii_case("boundary") {
            let value = value.trim();
            let value = value
                .strip_prefix('"')
                .and_then(|v| v.strip_suffix('"'))
                .unwrap_or(value);
            let fits = !value.is_empty()
                && value.len() <= BOUNDARY_MAX
                && value
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b" '()+_,-./:=?".contains(&b));
            return fits.then_some(value);
        }
    }
    None
}

struct Part {
    name: Option<String>,
    content: Range<usize>,
}

/// Walks from delimiter to delimiter.
struct Parts<'a> {
    body: &'a [u8],
    /// CRLF, two dashes, the boundary.
    delimiter: Finder<'static>,
    /// Just behind the last delimiter.
    at: usize,
    done: bool,
}

/// What follows a delimiter.
enum After {
    /// Another part; its headers start with the CRLF here.
    Part(usize),
    /// Two dashes: the last one.
    Close,
    /// Anything else: these bytes only look like a delimiter.
    Content,
}

impl<'a> Parts<'a> {
    fn new(body: &'a [u8], boundary: &str) -> Result<Self, RequestError> {
        let delimiter = Finder::new(&[b"\r\n--", boundary.as_bytes()].concat()).into_owned();
        let mut parts = Self {
            body,
            delimiter,
            at: 0,
            done: false,
        };
        // The first delimiter has no CRLF before it unless a preamble does.
        let first = &parts.delimiter.needle()[2..];
        if body.starts_with(first) && !matches!(parts.after(first.len()), After::Content) {
            parts.at = first.len();
        } else {
            parts.next_delimiter(0)?;
        }
        Ok(parts)
    }

    fn after(&self, at: usize) -> After {
        let rest = &self.body[at..];
        if rest.starts_with(b"--") {
            return After::Close;
        }
        let padding = rest.iter().take_while(|b| matches!(b, b' ' | b'\t')).count();
        if rest[padding..].starts_with(b"\r\n") {
            After::Part(at + padding)
        } else {
            After::Content
        }
    }

    /// Moves behind the next delimiter; where it starts.
    fn next_delimiter(&mut self, mut from: usize) -> Result<usize, RequestError> {
        loop {
            let start = self.delimiter.find(&self.body[from..]).ok_or_else(malformed)? + from;
            self.at = start + self.delimiter.needle().len();
            if !matches!(self.after(self.at), After::Content) {
                return Ok(start);
            }
            from = self.at;
        }
    }

    fn part(&mut self) -> Result<Option<Part>, RequestError> {
        let After::Part(headers_at) = self.after(self.at) else {
            return Ok(None);
        };
        // Keeps the CRLF, so that a part without headers starts with its blank line.
        let window = &self.body[headers_at..self.body.len().min(headers_at + PART_HEADERS_MAX)];
        let headers_len = memmem::find(window, b"\r\n\r\n").ok_or_else(malformed)?;
        let content_at = headers_at + headers_len + 4;
        // The CRLF before the delimiter may be the blank line's own when the part is empty.
        let end = self.next_delimiter(content_at - 2)?;
        Ok(Some(Part {
            name: part_name(&window[..headers_len]),
            content: content_at.min(end)..end,
        }))
    }
}

impl Iterator for Parts<'_> {
    type Item = Result<Part, RequestError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let part = self.part().transpose();
        self.done = !matches!(part, Some(Ok(_)));
        part
    }
}

fn malformed() -> RequestError {
    RequestError::body("The multipart body is malformed: a delimiter or a part's headers are missing.")
}

/// The `name` of a part's `Content-Disposition: form-data`.
fn part_name(headers: &[u8]) -> Option<String> {
    let headers = String::from_utf8_lossy(headers);
    let line = headers.split("\r\n").find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.trim()
            .eq_ignore_ascii_case("content-disposition")
            .then_some(value)
    })?;
    let (kind, mut rest) = line.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("form-data") {
        return None;
    }
    // Parameters one by one: a quoted file name may hold anything, `; name="model"` too.
    loop {
        let (name, value) = rest.split_once('=')?;
        let value = value.trim_start();
        let (text, after) = match value.strip_prefix('"') {
            Some(quoted) => quoted_text(quoted)?,
            None => {
                let end = value.find(';').unwrap_or(value.len());
                (value[..end].trim().to_owned(), &value[end..])
            }
        };
        if name.trim().eq_ignore_ascii_case("name") {
            return Some(text);
        }
        rest = after.trim_start().strip_prefix(';')?;
    }
}

/// A quoted string's text and what follows its closing quote.
fn quoted_text(quoted: &str) -> Option<(String, &str)> {
    let mut text = String::new();
    let mut chars = quoted.char_indices();
    while let Some((i, c)) = chars.next() {
        match c {
            '"' => return Some((text, &quoted[i + 1..])),
            '\\' => text.push(chars.next()?.1),
            _ => text.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body::Body as _;
    use proptest::prelude::*;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    const TYPE: &str = "multipart/form-data; boundary=XyZ";

    fn sent(mut body: SplicedBody) -> Vec<u8> {
        let (mut out, mut cx) = (Vec::new(), Context::from_waker(Waker::noop()));
        while let Poll::Ready(Some(Ok(frame))) = Pin::new(&mut body).poll_frame(&mut cx) {
            out.extend_from_slice(&frame.into_data().unwrap());
        }
        out
    }

    fn form(parts: &[(&str, &[u8])]) -> Bytes {
        let mut out = Vec::new();
        for (disposition, content) in parts {
            out.extend_from_slice(
                format!("--XyZ\r\nContent-Disposition: form-data; {disposition}\r\n\r\n").as_bytes(),
            );
            out.extend_from_slice(content);
            out.extend_from_slice(b"\r\n");
        }
        out.extend_from_slice(b"--XyZ--\r\n");
        Bytes::from(out)
    }

    #[test]
    fn only_the_model_part_changes() {
        let file: &[u8] =
            b"\x00\r\n--XyQ\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nfake\r\n--Xy";
        let tricky = "name=\"file\"; filename=\"a\\\"; name=\\\"model\"";
        let body = form(&[
            (tricky, file),
            ("name=model", b"whisper"),
            ("name=\"stream\"", b"true"),
            ("name=\"empty\"", b""),
        ]);
        let facts = inspect(TYPE, &body).unwrap();
        assert_eq!((facts.model(), facts.stream()), ("whisper", true));
        let out = sent(splice(&body, &facts, "openai/whisper-large"));
        let want = form(&[
            (tricky, file),
            ("name=model", b"openai/whisper-large"),
            ("name=\"stream\"", b"true"),
            ("name=\"empty\"", b""),
        ]);
        assert_eq!(out, want);
        assert_eq!(sent(splice(&body, &facts, "whisper")), body);
    }

    #[test]
    fn what_only_looks_like_a_delimiter_is_content() {
        let file: &[u8] = b"\r\n--XyZ1\r\n\r\n--XyZ-\r\n--XyZ \n--XyZ\r\n";
        let body = form(&[("name=\"file\"", file), ("name=\"model\"", b"m")]);
        let facts = inspect(TYPE, &body).unwrap();
        let want = form(&[("name=\"file\"", file), ("name=\"model\"", b"t")]);
        assert_eq!(sent(splice(&body, &facts, "t")), want);
    }

    #[test]
    fn every_model_part_is_renamed_and_the_last_one_counts() {
        let body = form(&[
            ("name=\"model\"", b"x"),
            ("name=\"file\"", b"f"),
            ("name=\"model\"", b"m"),
        ]);
        let facts = inspect(TYPE, &body).unwrap();
        assert_eq!(facts.model(), "m");
        let want = form(&[
            ("name=\"model\"", b"m"),
            ("name=\"file\"", b"f"),
            ("name=\"model\"", b"m"),
        ]);
        assert_eq!(sent(splice(&body, &facts, "m")), want);
    }

    #[test]
    fn refusals_say_what_is_wrong() {
        for (content_type, body, param) in [
            ("multipart/form-data", form(&[("name=\"model\"", b"m")]), None),
            (TYPE, Bytes::from_static(b"hello"), None),
            (
                TYPE,
                Bytes::from_static(b"--XyZ\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm"),
                None,
            ),
            (TYPE, form(&[("name=\"file\"", b"x")]), Some("model")),
            (TYPE, form(&[("name=\"model\"", b"")]), Some("model")),
            (TYPE, form(&[("name=\"model\"", b"\xff")]), Some("model")),
        ] {
            assert_eq!(inspect(content_type, &body).unwrap_err().param, param);
        }
        let quoted = "multipart/form-data; charset=utf-8; boundary=\"XyZ\"";
        assert_eq!(
            inspect(quoted, &form(&[("name=\"model\"", b"m")]))
                .unwrap()
                .model(),
            "m"
        );
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(body in prop::collection::vec(any::<u8>(), 0..80), head in any::<bool>()) {
            let mut all = if head { b"--XyZ\r\n".to_vec() } else { Vec::new() };
            all.extend(body);
            let _ = inspect(TYPE, &Bytes::from(all));
        }

        #[test]
        fn files_of_any_bytes_travel(file in prop::collection::vec(any::<u8>(), 0..60), target in "[a-z]{1,9}") {
            prop_assume!(memmem::find(&file, b"\r\n--XyZ").is_none());
            let body = form(&[("name=\"file\"; filename=\"f\"", &file), ("name=\"model\"", b"m")]);
            let facts = inspect(TYPE, &body).unwrap();
            let want = form(&[("name=\"file\"; filename=\"f\"", &file), ("name=\"model\"", target.as_bytes())]);
            prop_assert_eq!(sent(splice(&body, &facts, &target)), want.to_vec());
        }
    }
}
