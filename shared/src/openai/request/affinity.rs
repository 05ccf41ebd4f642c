//! What a request has in common with others of its conversation (G30). Pure.
//!
//! The value is one number for every turn of a conversation that grows at its end, in every process, so that two edges
//! send it to one provider.

use std::ops::ControlFlow;

use sha2::{Digest, Sha256};

use super::{Reader, RequestFacts, text};

/// Of longer beginnings the first bytes and the length count: a hash of them all would hold up other requests.
const HASHED_MAX: usize = 256 * 1024;

/// By the client's `prompt_cache_key`, else by the first messages: of `messages`, or of `instructions` and `input`, up to
/// and including the first one of the user. `None`: there is no such beginning. `body` is the one that `facts` were read
/// from.
pub fn affinity_key(facts: &RequestFacts, body: &[u8]) -> Option<u64> {
    let mut beginning = Beginning::default();
    if let Some(key) = facts.prompt_cache_key.as_deref().filter(|key| !key.is_empty()) {
        beginning.part(b'k', key.as_bytes());
        return Some(beginning.hash());
    }
    let of = |span: &Option<_>| span.clone().and_then(|span| body.get(span));
    if let Some(messages) = of(&facts.messages) {
        return beginning.up_to_user(messages);
    }
    let input = of(&facts.input)?;
    if let Some(instructions) = of(&facts.instructions).filter(|i| *i != b"null") {
        beginning.part(b'i', instructions);
    }
    if input.first() == Some(&b'"') {
        beginning.part(b't', input);
        return Some(beginning.hash());
    }
    beginning.up_to_user(input)
}

#[derive(Default)]
struct Beginning {
    sha: Sha256,
    hashed: usize,
}

impl Beginning {
    /// `tag` says what it is; with the length, no two lists of parts run into one another.
    fn part(&mut self, tag: u8, bytes: &[u8]) {
        self.sha.update([tag]);
        self.sha.update((bytes.len() as u64).to_le_bytes());
        let taken = bytes.len().min(HASHED_MAX - self.hashed);
        self.sha.update(&bytes[..taken]);
        self.hashed += taken;
    }

    /// `None`: no user speaks in it, so its end is still to come.
    fn up_to_user(mut self, items: &[u8]) -> Option<u64> {
        let mut found = false;
        Reader::at(items, 0).elements(|item| {
            let said = of_user(item);
            found = said.is_some();
            match said {
                // The same as an `input` that is a plain text.
                Some(Some(words)) => self.part(b't', words),
                Some(None) | None => self.part(b'm', item),
            }
            if found {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        found.then(|| self.hash())
    }

    fn hash(self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..]: [u8; 32] = self.sha.finalize().into();
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

/// `Some`: a message of the user, with its text where it is a plain one.
fn of_user(item: &[u8]) -> Option<Option<&[u8]>> {
    let (mut user, mut words) = (false, None);
    if item.first() == Some(&b'{') {
        Reader::at(item, 0).object(|key, value| match key {
            "role" => user = text(value).is_some_and(|role| role == "user"),
            "content" => words = Some(value).filter(|v| v.first() == Some(&b'"')),
            _ => {}
        })?;
    }
    user.then_some(words)
}

#[cfg(test)]
mod tests;
