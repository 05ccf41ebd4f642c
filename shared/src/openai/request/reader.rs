//! A walk over JSON bytes: no tree, no copies, nothing judged that is not asked for.

use std::borrow::Cow;
use std::ops::{ControlFlow, Range};

use memchr::memchr2;

use super::{RequestError, text};

/// Nested brackets deeper than this are refused.
const MAX_DEPTH: usize = 512;

/// Walks one level of JSON; skips values without looking into them.
pub(in crate::openai) struct Reader<'a> {
    body: &'a [u8],
    pub(super) at: usize,
}

impl<'a> Reader<'a> {
    /// At a byte of a text.
    pub(in crate::openai) fn at(body: &'a [u8], at: usize) -> Self {
        Self { body, at }
    }

    /// The members of the object that starts here, each key's text with its value's bytes; `None`: it is no object.
    pub(in crate::openai) fn object(mut self, mut visit: impl FnMut(&str, &'a [u8])) -> Option<()> {
        self.blanks();
        if self.peek() != Some(b'{') {
            return None;
        }
        self.at += 1;
        self.members(|key, span, body| {
            visit(key, &body[span]);
            Ok(())
        })
        .ok()
    }

    /// The elements of the array that starts here, as the bytes they are, until the visitor breaks; `None`: it is no
    /// array, or broken where it was read.
    pub(super) fn elements(mut self, mut visit: impl FnMut(&'a [u8]) -> ControlFlow<()>) -> Option<()> {
        self.blanks();
        if self.peek() != Some(b'[') {
            return None;
        }
        self.at += 1;
        self.blanks();
        if self.peek() == Some(b']') {
            return Some(());
        }
        loop {
            self.blanks();
            let start = self.at;
            self.skip().ok()?;
            if visit(&self.body[start..self.at]).is_break() {
                return Some(());
            }
            self.blanks();
            match self.peek()? {
                b',' => self.at += 1,
                b']' => return Some(()),
                _ => return None,
            }
        }
    }

    /// Behind a member's key: the value's bytes, if what follows them are only further members of an object that ends
    /// with the text. So the member is one of the outermost object.
    pub(in crate::openai) fn last_level_value(mut self) -> Option<&'a [u8]> {
        self.blanks();
        if self.peek() != Some(b':') {
            return None;
        }
        self.at += 1;
        self.blanks();
        let start = self.at;
        self.skip().ok()?;
        let value = &self.body[start..self.at];
        self.blanks();
        match self.peek()? {
            b',' => {
                self.at += 1;
                self.blanks();
                // An empty rest is no JSON: a comma wants a member.
                if self.peek() == Some(b'}') {
                    return None;
                }
                self.members(|_, _, _| Ok(())).ok()?;
            }
            b'}' => self.at += 1,
            _ => return None,
        }
        self.blanks();
        (self.at == self.body.len()).then_some(value)
    }

    pub(super) fn peek(&self) -> Option<u8> {
        self.body.get(self.at).copied()
    }

    pub(super) fn blanks(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    pub(super) fn broken(&self) -> RequestError {
        RequestError::body(if self.at >= self.body.len() {
            "The request body is not valid JSON: it ends too early.".to_owned()
        } else {
            format!("The request body is not valid JSON (at byte {}).", self.at)
        })
    }

    /// From behind `{` to behind its `}`; the visitor gets each key's text and its value's span.
    pub(super) fn members(
        &mut self,
        mut visit: impl FnMut(&str, Range<usize>, &'a [u8]) -> Result<(), RequestError>,
    ) -> Result<(), RequestError> {
        self.blanks();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.blanks();
            let key = self.key()?;
            self.blanks();
            if self.peek() != Some(b':') {
                return Err(self.broken());
            }
            self.at += 1;
            self.blanks();
            let start = self.at;
            self.skip()?;
            visit(&key, start..self.at, self.body)?;
            self.blanks();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b'}') => {
                    self.at += 1;
                    return Ok(());
                }
                _ => return Err(self.broken()),
            }
        }
    }

    fn key(&mut self) -> Result<Cow<'a, str>, RequestError> {
        if self.peek() != Some(b'"') {
            return Err(self.broken());
        }
        let start = self.at;
        self.string()?;
        let raw = &self.body[start..self.at];
        let inner = &raw[1..raw.len() - 1];
        if !inner.contains(&b'\\') {
            return std::str::from_utf8(inner)
                .map(Cow::Borrowed)
                .map_err(|_| self.broken());
        }
        // A key that is no text (a lone surrogate) is none of ours.
        Ok(Cow::Owned(text(raw).unwrap_or_default()))
    }

    /// From a quote to behind the closing one.
    fn string(&mut self) -> Result<(), RequestError> {
        self.at += 1;
        loop {
            let Some(i) = memchr2(b'"', b'\\', &self.body[self.at..]) else {
                self.at = self.body.len();
                return Err(self.broken());
            };
            self.at += i;
            if self.body[self.at] == b'"' {
                self.at += 1;
                return Ok(());
            }
            self.at = (self.at + 2).min(self.body.len());
        }
    }

    /// Over one value. Nested values must balance; what stands between brackets is not judged.
    fn skip(&mut self) -> Result<(), RequestError> {
        match self.peek() {
            Some(b'"') => self.string(),
            Some(b'{' | b'[') => self.nested(),
            Some(b'-' | b'0'..=b'9' | b't' | b'f' | b'n') => self.scalar(),
            _ => Err(self.broken()),
        }
    }

    fn scalar(&mut self) -> Result<(), RequestError> {
        let start = self.at;
        while matches!(
            self.peek(),
            Some(b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'+' | b'-' | b'.')
        ) {
            self.at += 1;
        }
        let raw = &self.body[start..self.at];
        let number = |raw: &[u8]| serde_json::from_slice::<&serde_json::value::RawValue>(raw).is_ok();
        if matches!(raw, b"true" | b"false" | b"null") || number(raw) {
            Ok(())
        } else {
            self.at = start;
            Err(self.broken())
        }
    }

    fn nested(&mut self) -> Result<(), RequestError> {
        let mut open: Vec<u8> = Vec::new();
        loop {
            match self.peek() {
                None => return Err(self.broken()),
                Some(b'"') => {
                    self.string()?;
                    continue;
                }
                Some(b @ (b'{' | b'[')) => {
                    if open.len() == MAX_DEPTH {
                        return Err(RequestError::body(format!(
                            "The request body is nested deeper than {MAX_DEPTH} levels."
                        )));
                    }
                    open.push(b);
                }
                Some(b @ (b'}' | b']')) => {
                    let fits = open.pop() == Some(if b == b'}' { b'{' } else { b'[' });
                    if !fits {
                        return Err(self.broken());
                    }
                    if open.is_empty() {
                        self.at += 1;
                        return Ok(());
                    }
                }
                Some(_) => {}
            }
            self.at += 1;
        }
    }
}
