//! Token usage as providers report it, in both shapes (Chat: `prompt_tokens`; Responses: `input_tokens`).

use memchr::memmem;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::members::read;

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
        let [prompt, input, completion, output, total] = read(
            object,
            [
                "prompt_tokens",
                "input_tokens",
                "completion_tokens",
                "output_tokens",
                "total_tokens",
            ],
        )?
        .map(tokens);
        let details = read(
            object,
            [
                "prompt_tokens_details",
                "input_tokens_details",
                "completion_tokens_details",
                "output_tokens_details",
            ],
        )?;
        let detail = |of: [Option<&RawValue>; 2], name| {
            of.into_iter()
                .flatten()
                .find_map(|d| tokens(read(d.get().as_bytes(), [name])?[0]))
                .unwrap_or(0)
        };
        let (input, output) = (prompt.or(input), completion.or(output));
        if input.is_none() && output.is_none() && total.is_none() {
            return None;
        }
        Some(Self {
            input: input.or(total).unwrap_or(0),
            output: output.unwrap_or(0),
            cached: detail([details[0], details[1]], "cached_tokens"),
            reasoning: detail([details[2], details[3]], "reasoning_tokens"),
        })
    }
}

/// A count; an odd number is none.
fn tokens(raw: Option<&RawValue>) -> Option<u64> {
    raw?.get().parse().ok()
}

/// Bodies up to this size, in bytes, are read exactly; in larger ones the last `"usage"` member is taken.
const EXACT: usize = 16 << 10;

/// The usage of a whole (non-stream) answer: its top-level `usage`.
///
/// A large body (embeddings, images) is not walked: inside a JSON string the quotes would be escaped, so the last
/// `"usage"` is a member, and providers write it after the data.
pub fn usage_from_body(body: &[u8]) -> Option<Usage> {
    let at = memmem::rfind(body, b"\"usage\"")?;
    if body.len() <= EXACT {
        return Usage::from_json(read(body, ["usage"])?[0]?.get().as_bytes());
    }
    let rest = body[at + b"\"usage\"".len()..]
        .trim_ascii_start()
        .strip_prefix(b":")?;
    let mut values = serde_json::Deserializer::from_slice(rest).into_iter::<&RawValue>();
    Usage::from_json(values.next()?.ok()?.get().as_bytes())
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
        let mut large = br#"{"data":[""#.to_vec();
        large.resize(40_000, b'A');
        large.extend_from_slice(br#""],"usage" : {"prompt_tokens":9,"total_tokens":9}}"#);
        assert_eq!(usage_from_body(&large).unwrap().input, 9);
    }
}
