//! A scripted turn as the Responses API writes it. Pure.

use bytes::Bytes;
use iop_shared::openai::answer::{ResponsesAnswer, Said};

use super::plan::{Says, Stream, Turned, pieces};
use crate::providers::Piece;

/// Pieces in which a call's arguments are streamed.
const ARGUMENT_PIECES: u32 = 3;

/// The answer without `stream`.
pub(super) fn whole(turned: &Turned<'_>) -> Bytes {
    let answer = ResponsesAnswer::new(turned.author());
    match &turned.says {
        Says::Text(pieces) => answer.whole(&Said::Text(&pieces.concat()), Some(turned.usage)),
        Says::Calls(calls) => answer.whole(&Said::Calls(calls), Some(turned.usage)),
    }
}

/// The answer with `stream`.
pub(super) fn stream(turned: &Turned<'_>) -> Stream {
    let mut answer = ResponsesAnswer::new(turned.author());
    let mut preamble = vec![answer.begins()];
    let mut content = Vec::new();
    let mut closing = Vec::new();
    match &turned.says {
        Says::Text(pieces) => {
            preamble.push(answer.text_begins());
            content.extend(pieces.iter().map(|piece| answer.text(piece)));
            let text = pieces.concat();
            closing.push(answer.text_ends(&text));
            closing.push(answer.ends(&Said::Text(&text), Some(turned.usage)));
        }
        Says::Calls(calls) => {
            for (index, call) in calls.iter().enumerate() {
                content.push(answer.call_begins(index, call.name));
                for piece in pieces(call.arguments, ARGUMENT_PIECES) {
                    content.push(answer.arguments(index, piece));
                }
                content.push(answer.arguments_end(index, *call));
                content.push(answer.call_ends(index, *call));
            }
            closing.push(answer.ends(&Said::Calls(calls), Some(turned.usage)));
        }
    }
    let tunnel = |events: Vec<Bytes>| events.into_iter().map(Piece::tunnel).collect();
    Stream {
        preamble: tunnel(preamble),
        content: tunnel(content),
        closing: tunnel(closing),
    }
}

#[cfg(test)]
mod tests {
    use iop_shared::openai::answer::Call;
    use serde_json::Value;

    use super::super::plan::testing::turned;
    use super::*;

    fn events(s: &Stream) -> Vec<Value> {
        let all = s.preamble.iter().chain(&s.content).chain(&s.closing);
        let all: Vec<u8> = all.flat_map(|p| p.bytes.to_vec()).collect();
        let text = String::from_utf8(all).unwrap();
        text.split_terminator("\n\n")
            .map(|e| e.split_once("\ndata: ").unwrap().1.parse().unwrap())
            .collect()
    }

    #[test]
    fn a_stream_is_numbered_and_ends_with_the_whole_answer() {
        let calls = vec![Call {
            name: "f",
            arguments: "{\"a\":1}",
        }];
        for (says, kind, said) in [
            (
                Says::Text(vec!["he", "llo"]),
                "response.output_text.delta",
                "hello",
            ),
            (
                Says::Calls(calls),
                "response.function_call_arguments.delta",
                "{\"a\":1}",
            ),
        ] {
            let t = turned(says, false);
            let all = events(&stream(&t));
            for (n, e) in all.iter().enumerate() {
                assert_eq!(e["sequence_number"], n as u64);
            }
            let deltas: String = all
                .iter()
                .filter(|e| e["type"] == kind)
                .map(|e| e["delta"].as_str().unwrap())
                .collect();
            assert_eq!(deltas, said);
            let whole: Value = serde_json::from_slice(&whole(&t)).unwrap();
            assert_eq!(all[all.len() - 1]["response"], whole);
        }
    }
}
