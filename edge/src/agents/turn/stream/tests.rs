use std::sync::Mutex;

use futures_util::stream;
use proptest::prelude::*;

use super::super::answer::TurnAnswer;
use super::*;

const MAX: usize = 4096;

/// What is read of a body that comes in these pieces, and what was shown of it.
fn read(pieces: Vec<Result<Bytes, ()>>, max: usize) -> (Result<TurnAnswer, Broken>, Vec<Delta>) {
    let shown = Mutex::new(Vec::new());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let answer = runtime.block_on(async {
        let mut assembly = Assembly::new(max);
        let tell = |delta| shown.lock().unwrap().push(delta);
        read_events(stream::iter(pieces), max, &mut assembly, &tell).await?;
        assembly.finish(1)
    });
    (answer, shown.into_inner().unwrap())
}

fn whole(text: &str) -> Vec<Result<Bytes, ()>> {
    vec![Ok(Bytes::copy_from_slice(text.as_bytes()))]
}

const ANSWER: &str = concat!(
    ": keep-alive\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
    "event: message\r\nid: 7\r\ndata: {\"choices\":[{\"index\":0,\r\ndata: \"delta\":{\"content\":\"h\u{e9} \"}}]}\r\n\r\n",
    "data:\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\u{1f600}\"}}]}\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":\"c\",\"function\":{\"name\":\"f\",\"arguments\":\"{\"}}]}}]}\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"}\"}}]}}]}\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"tool_calls\"}]}\n\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}\n\n",
    "data: [DONE]\n\n",
);

#[test]
fn an_answer_is_read_from_its_events() {
    let (answer, shown) = read(whole(ANSWER), MAX);
    let answer = answer.unwrap();
    assert_eq!(answer.content.as_deref(), Some("h\u{e9} \u{1f600}"));
    assert_eq!(
        (answer.tool_calls.len(), answer.tool_calls[0].arguments.as_str()),
        (1, "{}")
    );
    assert_eq!(answer.finish_reason.as_deref(), Some("tool_calls"));
    assert_eq!(answer.usage.map(|u| (u.input, u.output)), Some((3, 2)));
    assert_eq!(shown.len(), 4);
}

#[test]
fn a_clean_end_completes_what_the_model_had_finished_and_nothing_else() {
    let without_done = ANSWER.strip_suffix("data: [DONE]\n\n").unwrap();
    assert!(read(whole(without_done), MAX).0.is_ok());
    let unfinished = &ANSWER[..ANSWER
        .find("data: {\"choices\":[{\"index\":0,\"delta\":{},")
        .unwrap()];
    assert_eq!(read(whole(unfinished), MAX).0, Err(Broken::Cut));
    assert_eq!(read(Vec::new(), MAX).0, Err(Broken::Cut));
}

#[test]
fn a_broken_connection_is_no_end_whatever_was_said() {
    let mut pieces = whole(ANSWER.strip_suffix("data: [DONE]\n\n").unwrap());
    pieces.push(Err(()));
    assert_eq!(read(pieces, MAX).0, Err(Broken::Cut));
}

#[test]
fn nothing_after_the_end_is_read() {
    let more = format!("{ANSWER}data: {{\"error\":{{\"message\":\"late\"}}}}\n\n");
    assert!(read(whole(&more), MAX).0.is_ok());
}

#[test]
fn a_byte_order_mark_is_no_part_of_the_first_event() {
    for marks in [1, 2] {
        let marked = format!(
            "{}{}",
            "\u{feff}".repeat(marks),
            &ANSWER[": keep-alive\n\n".len()..]
        );
        assert!(read(whole(&marked), MAX).0.is_ok());
    }
    let only = read(whole("\u{feff}\n\n"), MAX).0;
    assert_eq!(only, Err(Broken::Cut));
}

#[test]
fn bytes_that_are_no_text_are_malformed_at_once() {
    let pieces = vec![
        Ok(Bytes::from_static(b"data: \"\xff\"\n\n")),
        Ok(Bytes::from_static(ANSWER.as_bytes())),
    ];
    assert_eq!(read(pieces, MAX).0, Err(Broken::Malformed));
}

#[test]
fn neither_a_line_nor_an_event_grows_without_end() {
    let max = 64;
    let endless = |piece: &'static [u8]| vec![Ok(Bytes::from_static(piece)); 1000];
    // No line feed comes, or no end of an event.
    for piece in [
        &b"data: 0123456789"[..],
        b"data: 0123456789\n",
        b"data: 0123456789\r\n",
    ] {
        let (answer, _) = read(endless(piece), max);
        assert_eq!(answer, Err(Broken::TooLarge(max)));
    }
    // Comments and heartbeats between events are as many as they like.
    let mut pieces = endless(b": ping\n\n");
    pieces.extend(endless(b"data:\n\n"));
    pieces.extend(whole("data: {\"choices\":[{\"delta\":{\"content\":\"x\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n"));
    assert!(read(pieces, max).0.is_ok());
}

#[test]
fn a_whole_answer_comes_in_pieces_too() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let body = r#"{"choices":[{"message":{"content":"hello"},"finish_reason":"stop"}]}"#;
    let pieces = |n: usize| -> Vec<Result<Bytes, ()>> {
        let of = |c: &[u8]| Ok(Bytes::copy_from_slice(c));
        body.as_bytes().chunks(n).map(of).collect()
    };
    for n in [1, 7, 1000] {
        let mut assembly = Assembly::new(MAX);
        let read = read_whole(stream::iter(pieces(n)), MAX, &mut assembly, &|_| {});
        assert_eq!(runtime.block_on(read), Ok(()));
        assert_eq!(assembly.finish(1).unwrap().content.as_deref(), Some("hello"));
    }
    let mut cut = pieces(7);
    cut.push(Err(()));
    let mut assembly = Assembly::new(MAX);
    let read = read_whole(stream::iter(cut), MAX, &mut assembly, &|_| {});
    assert_eq!(runtime.block_on(read), Err(Broken::Cut));
    let read = read_whole(stream::iter(pieces(7)), 8, &mut assembly, &|_| {});
    assert_eq!(runtime.block_on(read), Err(Broken::TooLarge(8)));
}

#[test]
fn of_an_errors_body_only_the_beginning_is_read() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let piece = || Ok::<_, ()>(Bytes::from_static(b"0123456789"));
    let endless = stream::repeat_with(piece);
    assert_eq!(runtime.block_on(read_some(endless, 25)).len(), 30);
    let broken = stream::iter([piece(), Err(()), piece()]);
    assert_eq!(&runtime.block_on(read_some(broken, 25))[..], b"0123456789");
}

/// A body cut at these places, counted modulo its length.
fn cut_at(text: &str, places: &[usize]) -> Vec<Result<Bytes, ()>> {
    let mut at: Vec<usize> = places.iter().map(|p| p % (text.len() + 1)).collect();
    at.extend([0, text.len()]);
    at.sort_unstable();
    let piece = |w: &[usize]| Ok(Bytes::copy_from_slice(&text.as_bytes()[w[0]..w[1]]));
    at.windows(2).map(piece).collect()
}

/// A delta of an answer, as JSON.
fn delta() -> impl Strategy<Value = String> {
    let text = || "[a-c\u{e9}\u{1f600}\"\\\\\n]{0,6}".prop_map(|t| serde_json::Value::from(t).to_string());
    prop_oneof![
        text().prop_map(|t| format!("{{\"content\":{t}}}")),
        text().prop_map(|t| format!("{{\"reasoning_content\":{t}}}")),
        text().prop_map(|t| format!("{{\"refusal\":{t}}}")),
        (0_u32..3, text()).prop_map(|(n, t)| {
            format!("{{\"tool_calls\":[{{\"index\":{n},\"id\":\"c{n}\",\"function\":{{\"name\":\"f\",\"arguments\":{t}}}}}]}}")
        }),
    ]
}

proptest! {
    #[test]
    fn any_split_of_a_stream_gives_the_same_answer(
        deltas in prop::collection::vec(delta(), 0..8),
        crlf in any::<bool>(),
        done in any::<bool>(),
        places in prop::collection::vec(any::<usize>(), 0..40),
    ) {
        let end = if crlf { "\r\n" } else { "\n" };
        let mut text = String::new();
        for delta in &deltas {
            text += &format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{delta}}}]}}{end}{end}");
        }
        text += &format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{}},\"finish_reason\":\"stop\"}}]}}{end}{end}");
        if done {
            text += &format!("data: [DONE]{end}{end}");
        }
        let (at_once, shown_at_once) = read(whole(&text), MAX);
        let (in_pieces, shown) = read(cut_at(&text, &places), MAX);
        prop_assert!(at_once.is_ok());
        prop_assert_eq!(at_once, in_pieces);
        prop_assert_eq!(shown_at_once, shown);
        // Byte by byte as well.
        let every: Vec<usize> = (0..text.len()).collect();
        prop_assert_eq!(read(cut_at(&text, &every), MAX).0, read(whole(&text), MAX).0);
    }

    /// Whatever comes, reading ends with an answer or a reason.
    #[test]
    fn no_bytes_at_all_make_a_reader_panic(
        bytes in prop::collection::vec(
            prop_oneof![Just(b'\n'), Just(b'\r'), Just(b':'), Just(b'{'), Just(0xef), Just(0xbb), Just(0xbf), any::<u8>()],
            0..200,
        ),
        size in 1_usize..20,
    ) {
        let pieces: Vec<_> = bytes.chunks(size).map(|c| Ok(Bytes::copy_from_slice(c))).collect();
        let _ = read(pieces, 64);
    }
}
