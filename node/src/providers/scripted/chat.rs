//! A scripted turn as Chat Completions writes it. Pure.

use bytes::Bytes;
use iop_shared::openai::answer::{ChatAnswer, Said};

use super::plan::{Says, Stream, Turned, pieces};
use crate::providers::Piece;

/// Pieces in which a call's arguments are streamed.
const ARGUMENT_PIECES: u32 = 3;

/// The answer without `stream`.
pub(super) fn whole(turned: &Turned<'_>) -> Bytes {
    let answer = ChatAnswer::new(turned.author(), turned.include_usage);
    match &turned.says {
        Says::Text(pieces) => answer.whole(&Said::Text(&pieces.concat()), Some(turned.usage)),
        Says::Calls(calls) => answer.whole(&Said::Calls(calls), Some(turned.usage)),
    }
}

/// The answer with `stream`.
pub(super) fn stream(turned: &Turned<'_>) -> Stream {
    let answer = ChatAnswer::new(turned.author(), turned.include_usage);
    let mut content = Vec::new();
    let (role, end) = match &turned.says {
        Says::Text(pieces) => {
            content.extend(pieces.iter().map(|piece| answer.text(piece)));
            let end = answer.ends(&Said::Text(&pieces.concat()), Some(turned.usage));
            (answer.text_begins(), end)
        }
        Says::Calls(calls) => {
            for (index, call) in calls.iter().enumerate() {
                content.push(answer.call_begins(index, call.name));
                for piece in pieces(call.arguments, ARGUMENT_PIECES) {
                    content.push(answer.arguments(index, piece));
                }
            }
            let end = answer.ends(&Said::Calls(calls), Some(turned.usage));
            (answer.calls_begin(), end)
        }
    };
    Stream {
        preamble: vec![Piece::tunnel(role)],
        content: content.into_iter().map(Piece::tunnel).collect(),
        closing: vec![Piece::tunnel(end)],
    }
}

#[cfg(test)]
mod tests {
    use iop_shared::openai::answer::Call;
    use serde_json::{Value, json};

    use super::super::plan::testing::turned;
    use super::*;

    fn values(pieces: &[Piece]) -> Vec<Value> {
        let all: Vec<u8> = pieces.iter().flat_map(|p| p.bytes.to_vec()).collect();
        let text = String::from_utf8(all).unwrap();
        text.split_terminator("\n\n")
            .filter_map(|e| e.strip_prefix("data: ").unwrap().parse().ok())
            .collect()
    }

    #[test]
    fn a_stream_says_what_the_whole_answer_says() {
        let t = turned(Says::Text(vec!["he", "llo"]), true);
        let s = stream(&t);
        let said: String = values(&s.content)
            .iter()
            .map(|v| v["choices"][0]["delta"]["content"].as_str().unwrap())
            .collect();
        let whole: Value = serde_json::from_slice(&whole(&t)).unwrap();
        assert_eq!(whole["choices"][0]["message"]["content"], said);
        let closing = values(&s.closing);
        assert_eq!(closing[0]["choices"][0]["finish_reason"], "stop");
        assert_eq!(closing[1]["usage"], whole["usage"]);
        assert_eq!(closing[1]["choices"], json!([]));
        assert!(s.closing[0].bytes.ends_with(b"data: [DONE]\n\n"));
    }

    #[test]
    fn calls_have_dense_indexes_and_whole_arguments() {
        let calls = vec![
            Call {
                name: "f",
                arguments: "{\"city\":\"Paris\"}",
            },
            Call {
                name: "g",
                arguments: "{}",
            },
        ];
        let t = turned(Says::Calls(calls), false);
        let mut arguments = vec![String::new(); 2];
        for v in values(&stream(&t).content) {
            let call = &v["choices"][0]["delta"]["tool_calls"][0];
            arguments[call["index"].as_u64().unwrap() as usize] +=
                call["function"]["arguments"].as_str().unwrap();
        }
        assert_eq!(arguments, ["{\"city\":\"Paris\"}", "{}"]);
        let whole: Value = serde_json::from_slice(&whole(&t)).unwrap();
        assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
        assert_eq!(
            whole["choices"][0]["message"]["tool_calls"][1]["function"]["name"],
            "g"
        );
    }
}
