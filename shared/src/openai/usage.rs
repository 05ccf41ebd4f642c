//! Token usage as providers report it, in both shapes (Chat: `prompt_tokens`; Responses: `input_tokens`).

use memchr::memmem;
use serde::{Deserialize, Serialize};

use super::request::Reader;

/// Tokens of one attempt (G14). All counts are tokens; absent in the provider's answer means 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub input: u64,
    pub output: u64,
    /// Part of `input` that the provider served from its prompt cache.
    pub cached: u64,
    /// Part of `output` spent on reasoning.
    pub reasoning: u64,
}

impl Usage {
    /// Reads a `usage` object of either shape, or of both at once; `None` when it counts nothing.
    pub fn from_json(object: &[u8]) -> Option<Self> {
        let (mut prompt, mut input, mut completion, mut output, mut total) = (None, None, None, None, None);
        let (mut cached, mut reasoning) = ([None; 2], [None; 2]);
        Reader::at(object, 0).object(|key, value| match key {
            "prompt_tokens" => prompt = tokens(value),
            "input_tokens" => input = tokens(value),
            "completion_tokens" => completion = tokens(value),
            "output_tokens" => output = tokens(value),
            "total_tokens" => total = tokens(value),
            "prompt_tokens_details" => cached[0] = detail(value, "cached_tokens"),
            "input_tokens_details" => cached[1] = detail(value, "cached_tokens"),
            "completion_tokens_details" => reasoning[0] = detail(value, "reasoning_tokens"),
            "output_tokens_details" => reasoning[1] = detail(value, "reasoning_tokens"),
            _ => {}
        })?;
        let (input, output) = (prompt.or(input), completion.or(output));
        if input.is_none() && output.is_none() && total.is_none() {
            return None;
        }
        Some(Self {
            input: input.or(total).unwrap_or(0),
            output: output.unwrap_or(0),
            cached: cached[0].or(cached[1]).unwrap_or(0),
            reasoning: reasoning[0].or(reasoning[1]).unwrap_or(0),
        })
    }
}

/// A count; an odd number is none.
fn tokens(value: &[u8]) -> Option<u64> {
    std::str::from_utf8(value).ok()?.parse().ok()
}

fn detail(object: &[u8], name: &str) -> Option<u64> {
    let mut count = None;
    Reader::at(object, 0).object(|key, value| {
        if key == name {
            count = tokens(value);
        }
    })?;
    count
}

const MEMBER: &[u8] = b"\"usage\"";

/// Bodies up to this size, in bytes, are walked where the quick way does not settle it.
const WALKED: usize = 64 << 10;

/// The usage of a whole (non-stream) answer: its top-level `usage`.
///
/// Providers write it last, so the quick way looks from the end: what follows the last `"usage"` and its value must be
/// the rest of the outermost object. Else a small body is walked from its start; a large one counts nothing.
pub fn usage_from_body(body: &[u8]) -> Option<Usage> {
    let at = memmem::rfind(body, MEMBER)?;
    if let Some(value) = Reader::at(body, at + MEMBER.len()).last_level_value() {
        return Usage::from_json(value);
    }
    if body.len() > WALKED {
        return None;
    }
    let mut usage = None;
    Reader::at(body, 0).object(|key, value| {
        if key == "usage" {
            usage = Usage::from_json(value);
        }
    })?;
    usage
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_shapes_are_read() {
        let chat = br#"{"prompt_tokens":9,"completion_tokens":12,"total_tokens":21,"prompt_tokens_details":{"cached_tokens":4,"audio_tokens":0},"completion_tokens_details":{"reasoning_tokens":5}}"#;
        let responses = br#"{"input_tokens":9,"input_tokens_details":{"cached_tokens":4},"output_tokens":12,"output_tokens_details":{"reasoning_tokens":5},"total_tokens":21}"#;
        let want = Some(Usage {
            input: 9,
            output: 12,
            cached: 4,
            reasoning: 5,
        });
        assert_eq!(Usage::from_json(chat), want);
        assert_eq!(Usage::from_json(responses), want);
        // Gateways that send both at once.
        let both = br#"{"prompt_tokens":9,"completion_tokens":12,"input_tokens":9,"output_tokens":12,"prompt_tokens_details":null,"input_tokens_details":{"cached_tokens":4},"completion_tokens_details":{"reasoning_tokens":5},"output_tokens_details":{"reasoning_tokens":5}}"#;
        assert_eq!(Usage::from_json(both), want);
        assert_eq!(Usage::from_json(b"{}"), None);
        assert_eq!(Usage::from_json(b"null"), None);
        assert_eq!(Usage::from_json(br#"{"prompt_tokens":-1}"#), None);
    }

    #[test]
    fn only_the_top_level_counts_in_a_body() {
        let small = br#"{"choices":[{"message":{"content":"\"usage\":{\"prompt_tokens\":7}"},"usage":{"prompt_tokens":8}}],"usage":{"prompt_tokens":9}}"#;
        assert_eq!(usage_from_body(small).unwrap().input, 9);
        assert_eq!(usage_from_body(br#"{"x":{"usage":{"prompt_tokens":8}}}"#), None);
        // Another member of that name deeper down comes after it: the body is walked.
        let after = br#"{"usage":{"prompt_tokens":9},"x":{"usage":{"prompt_tokens":8}}}"#;
        assert_eq!(usage_from_body(after).unwrap().input, 9);
        assert_eq!(
            usage_from_body(br#"{"usage":{"prompt_tokens":9},"type":"usage"}"#)
                .unwrap()
                .input,
            9
        );
        let mut large = br#"{"data":[""#.to_vec();
        large.resize(40_000, b'A');
        large.extend_from_slice(br#""],"usage" : {"prompt_tokens":9,"total_tokens":9}}"#);
        assert_eq!(usage_from_body(&large).unwrap().input, 9);
    }
}
