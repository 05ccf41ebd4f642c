use eventsource_stream::Eventsource;
use futures_util::StreamExt;
use proptest::prelude::*;

use super::*;

type Dispatched = (Vec<u8>, Option<Vec<u8>>);

/// What a scan of one split found: dispatched events, and every boundary as an absolute offset.
#[derive(Debug, PartialEq, Eq, Default)]
struct Found {
    events: Vec<Dispatched>,
    boundaries: Vec<usize>,
}

fn scan(chunks: &[&[u8]]) -> Found {
    let (mut scanner, mut found, mut base) = (SseScanner::new(), Found::default(), 0);
    for chunk in chunks {
        let mut pos = 0;
        while let Some(event) = scanner.next_event(chunk, &mut pos) {
            found.boundaries.push(base + event.end);
            if let Some(data) = event.data {
                found
                    .events
                    .push((data.into_owned(), event.name.map(Cow::into_owned)));
            }
        }
        assert_eq!(pos, chunk.len());
        base += chunk.len();
    }
    found
}

/// The reference: `eventsource-stream`. It panics on a BOM at a chunk's start (byte slicing), so it gets the input without;
/// it drops some events whose data is empty (`data:`) but not others (`data`), and calls nameless ones `message`.
fn reference(input: &[u8]) -> Vec<Dispatched> {
    let stream = futures_util::stream::iter([Ok::<_, std::convert::Infallible>(
        input.strip_prefix(BOM).unwrap_or(input).to_vec(),
    )])
    .eventsource();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let events = runtime.block_on(stream.collect::<Vec<_>>());
    events
        .into_iter()
        .map(|e| e.unwrap())
        .filter(|e| !e.data.is_empty())
        .map(|e| (e.data.into_bytes(), Some(e.event.into_bytes())))
        .collect()
}

/// Ours in the reference's terms, empty data left out on both sides.
fn as_reference(found: &Found) -> Vec<Dispatched> {
    let named = |name: &Option<Vec<u8>>| {
        Some(
            name.clone()
                .filter(|n| !n.is_empty())
                .unwrap_or_else(|| b"message".to_vec()),
        )
    };
    found
        .events
        .iter()
        .filter(|(d, _)| !d.is_empty())
        .map(|(d, n)| (d.clone(), named(n)))
        .collect()
}

#[test]
fn fields_lines_and_boundaries_follow_the_standard() {
    for (input, want) in [
        (&b"data: a\n\n"[..], vec!["a"]),
        (b"data:a\r\rdata: b\r\n\r\n", vec!["a", "b"]),
        (b"data:  two\n\n", vec![" two"]),
        (b"data\n\n", vec![""]),
        (b"data:\ndata:\n\n", vec!["\n"]),
        (b"data: a\ndata: b\n\n", vec!["a\nb"]),
        (b": comment\n\nevent: x\n\ndata: a\n\n", vec!["a"]),
        (b"\xef\xbb\xbfdata: a\n\n", vec!["a"]),
        (b"\xef\xbb\xbf\ndata: a\n\n", vec!["a"]),
        // Only at the start of the stream; later it is the beginning of an unknown name.
        (b"data: a\n\xef\xbb\xbf\ndata: b\n\n", vec!["a\nb"]),
        (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", vec!["a"]),
        (b"database: a\ndata : b\n Data: c\n\n", vec![]),
        (b"\n\n\ndata: a\n\n", vec!["a"]),
        (b"data: a", vec![]),
    ] {
        let found = scan(&[input]);
        assert_eq!(scan(&input.chunks(1).collect::<Vec<_>>()).events, found.events);
        let data: Vec<_> = found
            .events
            .iter()
            .map(|(d, _)| std::str::from_utf8(d).unwrap())
            .collect();
        assert_eq!(data, want, "{:?}", String::from_utf8_lossy(input));
    }
}

#[test]
fn a_comment_may_be_put_in_exactly_between_events() {
    let mut scanner = SseScanner::new();
    let mut pos = 0;
    assert!(scanner.at_boundary());
    assert!(scanner.next_event(b"data: a\n", &mut pos).is_none());
    assert!(!scanner.at_boundary() && scanner.finish());
    pos = 0;
    assert!(scanner.next_event(b"\r", &mut pos).is_some());
    assert!(scanner.at_boundary());
    // The LF of a CRLF that the chunk cut is no event of its own.
    pos = 0;
    assert!(scanner.next_event(b"\n", &mut pos).is_none());
    assert!(scanner.at_boundary() && !scanner.finish());
}

#[test]
fn a_large_event_in_single_bytes_is_kept_once() {
    let mut input = b"data: ".to_vec();
    input.resize(1 << 20, b'x');
    input.extend_from_slice(b"\n\n");
    let (mut scanner, mut events) = (SseScanner::new(), 0);
    for byte in input.chunks(1) {
        let mut pos = 0;
        if let Some(event) = scanner.next_event(byte, &mut pos) {
            assert_eq!(event.data.unwrap().len(), (1 << 20) - 6);
            events += 1;
        }
        // Amortized growth only: never more than twice what is pending, so no copy per byte.
        assert!(scanner.carry.capacity() <= 2 * scanner.carry.len().max(64));
    }
    assert_eq!(events, 1);
}

#[test]
fn an_oversize_event_is_delimited_without_its_fields() {
    let mut scanner = SseScanner::new();
    let block = vec![b'x'; 1 << 20];
    for _ in 0..17 {
        let mut pos = 0;
        assert!(scanner.next_event(&block, &mut pos).is_none());
    }
    assert_eq!(scanner.pending_bytes(), 17 << 20);
    assert_eq!(scanner.carry.capacity(), 0);
    let mut pos = 0;
    let event = scanner.next_event(b"\n\ndata: a\n\n", &mut pos).unwrap();
    assert!(event.oversize && event.data.is_none() && event.end == 2);
    assert_eq!(
        scanner
            .next_event(b"\n\ndata: a\n\n", &mut pos)
            .unwrap()
            .data
            .unwrap(),
        &b"a"[..]
    );
}

fn line() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => "[a-zé漢\u{1F600}\" ]{0,6}".prop_map(|s| format!("data: {s}")),
        1 => "[a-z]{0,4}".prop_map(|s| format!("data:{s}")),
        1 => Just("data".to_owned()),
        1 => "[a-z]{0,4}".prop_map(|s| format!("event: {s}")),
        1 => "[a-z :]{0,4}".prop_map(|s| format!(":{s}")),
        1 => "[0-9]{1,3}".prop_map(|s| format!("id: {s}")),
        1 => "[0-9]{1,3}".prop_map(|s| format!("retry: {s}")),
        1 => "[a-z]{1,5}".prop_map(|s| s),
        3 => Just(String::new()),
    ]
}

fn stream() -> impl Strategy<Value = Vec<u8>> {
    let end = prop_oneof![Just("\n"), Just("\r\n"), Just("\r")];
    (any::<bool>(), prop::collection::vec((line(), end), 0..10)).prop_map(|(bom, lines)| {
        let mut out = if bom { BOM.to_vec() } else { Vec::new() };
        for (line, end) in &lines {
            out.extend_from_slice(line.as_bytes());
            out.extend_from_slice(end.as_bytes());
        }
        out
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_split_of_every_input_finds_the_same(
        input in stream(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let whole = scan(&[&input]);
        for cut in 0..=input.len() {
            let (a, b) = input.split_at(cut);
            let split = scan(&[a, b]);
            prop_assert_eq!(&split.events, &whole.events, "cut at {}", cut);
            // A CR at the end of a chunk ends its event there; its LF is then counted to what follows.
            for (s, w) in split.boundaries.iter().zip(&whole.boundaries) {
                prop_assert!(s == w || (s + 1 == *w && *s == cut));
            }
        }
        let bytes: Vec<&[u8]> = input.chunks(1).collect();
        prop_assert_eq!(&scan(&bytes).events, &whole.events);
        let mut points: Vec<usize> = cuts.iter().map(|c| c.index(input.len() + 1)).collect();
        points.sort_unstable();
        let (mut parts, mut from) = (Vec::new(), 0);
        for p in points {
            parts.push(&input[from..p]);
            from = p;
        }
        parts.push(&input[from..]);
        prop_assert_eq!(&scan(&parts).events, &whole.events);
    }

    #[test]
    fn it_agrees_with_eventsource_stream(mut input in stream()) {
        // It waits for what follows a CR at the very end; a comment line settles that.
        input.extend_from_slice(b":\n");
        prop_assert_eq!(as_reference(&scan(&[&input])), reference(&input));
    }

    #[test]
    fn arbitrary_bytes_never_panic_and_boundaries_rise(input in prop::collection::vec(any::<u8>(), 0..200)) {
        let found = scan(&[&input]);
        prop_assert!(found.boundaries.windows(2).all(|w| w[0] < w[1]));
    }
}
