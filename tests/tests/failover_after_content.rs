//! The fault matrix after content: one typed error in the endpoint's own form, or the stream as the provider sent it;
//! no replay, and never the end of a success that was none (G22, G56, G58).

use std::sync::Arc;
use std::time::Duration;

use iop_tests::client::sse_data;
use iop_tests::faults::{
    Act, Api, Bench, Cell, Route, Seen, Then, WORDS, assert_bytes, assert_gapless, failures, large, malformed,
};
use iop_tests::run;
use iop_tests::stack::Shape;
use serde_json::Value;

const STALL: Duration = Duration::from_secs(1);
const GRACE: Duration = Duration::from_secs(7);
const AT_ONCE: Duration = Duration::from_secs(3);

fn routes() -> Vec<Route> {
    let streams = [
        Route::new("good", Act::Good),
        Route::new("cut-40", Act::Content(40, Then::Cut)),
        Route::new("end-40", Act::Content(40, Then::End)),
        Route::new("stall-20", Act::Content(20, Then::Silence)).stalls(),
        Route::new("error-30", Act::Content(30, Then::Error)),
        Route::new("failed-30", Act::Content(30, Then::Failed)),
        Route::new("malformed-10", Act::Malformed(10)),
        Route::new("no-terminal", Act::NoTerminal),
    ];
    let mut routes: Vec<Route> = streams.into_iter().map(Route::streams).collect();
    // What is too large to be held is committed: a whole answer, and the preamble of a stream.
    routes.push(Route::new("large-cut", Act::Large(Then::Cut)));
    routes.push(Route::new("large-stall", Act::Large(Then::Silence)).stalls());
    routes
}

/// The first events of the first provider's stream: preamble and `n` words.
fn sent(bench: &Bench, cell: Cell, n: usize) -> Vec<Vec<u8>> {
    let events = bench.of_primary(cell).stream(WORDS);
    let words = events.content.into_iter().take(n);
    events.preamble.into_iter().chain(words).collect()
}

async fn check(bench: Arc<Bench>, cell: Cell) {
    let seen = bench.ask(cell).await;
    let (what, body, answers) = (cell.model(), &seen.answer.body, bench.of_primary(cell));
    assert_eq!(seen.attempts(), 1, "{what}");
    bench.assert_counts(cell, 1, 0);
    assert!(
        !seen.answer.text().contains("second"),
        "{what}: {}",
        seen.answer.text()
    );
    match cell.route {
        "good" => seen.assert_clean(cell, &answers, 1),
        "cut-40" | "end-40" => {
            seen.assert_broken_off(cell, &answers, &sent(&bench, cell, 40), "provider_disconnected");
        }
        "large-cut" | "large-stall" if !cell.stream => {
            // Nothing could follow that would not look like an end.
            assert_eq!(seen.answer.status(), 200, "{what}");
            assert!(!seen.answer.complete, "{what}: a complete message");
            let part = large(&answers, false);
            assert!(body.len() <= part.len(), "{what}: more than was sent");
            assert_bytes(&what, body, &part[..body.len()]);
        }
        "large-cut" => {
            let sent = [large(&answers, true)];
            seen.assert_broken_off(cell, &answers, &sent, "provider_disconnected");
        }
        "large-stall" => {
            let sent = [large(&answers, true)];
            seen.assert_broken_off(cell, &answers, &sent, "response_stalled");
        }
        "stall-20" => {
            seen.assert_broken_off(cell, &answers, &sent(&bench, cell, 20), "response_stalled");
            assert!(seen.elapsed >= STALL, "{what}: {:?}", seen.elapsed);
        }
        "error-30" | "failed-30" => said_by_the_provider(&seen, cell, &sent(&bench, cell, 30)),
        "malformed-10" => {
            assert_bytes(&what, body, &malformed(&answers, 10).concat());
            assert!(seen.answer.complete, "{what}");
        }
        "no-terminal" => {
            let mut all = sent(&bench, cell, WORDS);
            all.extend(answers.stream(WORDS).finish);
            if cell.api == Api::Chat {
                // Every choice has its `finish_reason`: the end is supplied.
                all.push(b"data: [DONE]\n\n".to_vec());
                assert_bytes(&what, body, &all.concat());
                assert!(seen.answer.complete, "{what}");
            } else {
                seen.assert_broken_off(cell, &answers, &all, "provider_disconnected");
            }
        }
        other => panic!("no expectation for {other}"),
    }
    let most = if cell.route.contains("stall") {
        STALL + GRACE
    } else {
        AT_ONCE
    };
    assert!(seen.elapsed <= most, "{what}: {:?}", seen.elapsed);
}

/// What was sent, then the provider's own error once, in a form that clients of the endpoint understand.
fn said_by_the_provider(seen: &Seen, cell: Cell, sent: &[Vec<u8>]) {
    let (what, text) = (cell.model(), seen.answer.text());
    let prefix = sent.concat();
    let shared = seen.answer.body.len().min(prefix.len());
    assert_bytes(&what, &seen.answer.body[..shared], &prefix);
    assert!(seen.answer.complete, "{what}");
    for success in ["[DONE]", "response.completed"] {
        assert!(!text.contains(success), "{what}: {text}");
    }
    let rest: Vec<Value> = sse_data(&String::from_utf8_lossy(&seen.answer.body[prefix.len()..]))
        .iter()
        .map(|d| serde_json::from_str(d).unwrap())
        .collect();
    let last = rest.last().unwrap();
    let message = match cell.api {
        Api::Chat => {
            assert_eq!(rest.len(), 1, "{what}: {rest:?}");
            &last["error"]["message"]
        }
        Api::Responses => {
            assert_gapless(&text);
            let failed = rest.iter().filter(|e| e["type"] == "response.failed").count();
            assert_eq!(
                (failed, &last["type"]),
                (1, &Value::from("response.failed")),
                "{what}: {rest:?}"
            );
            assert_eq!(last["response"]["status"], "failed", "{what}");
            &last["response"]["error"]["message"]
        }
    };
    assert_eq!(message, "in band of primary", "{what}");
}

async fn after_content(shape: Shape) {
    let bench = Bench::start(shape, routes(), |s| s).await;
    let cells = bench.cells();
    failures(cells.clone(), |cell| check(Arc::clone(&bench), cell)).await;
    bench.done().await;
    let page = bench.stack.edge.scrape().await;
    let all = page.sum("iop_edge_attempts_total", &[]);
    assert_eq!(all, cells.len() as f64, "one attempt for each request");
    let stalled = page.sum("iop_edge_attempts_total", &[("result", "response_stalled")]);
    assert_eq!(stalled, 6.0);
    // Good, malformed in between, and Chat without `[DONE]`.
    let good = |endpoint| {
        let labels = [("endpoint", endpoint), ("outcome", "success")];
        page.sum("iop_edge_requests_total", &labels)
    };
    assert_eq!((good("chat"), good("responses")), (3.0, 2.0), "no fake success");
}

#[test]
fn embedded_no_failover_after_content_but_one_typed_error() {
    run(60, after_content(Shape::Embedded));
}

#[test]
fn linked_no_failover_after_content_but_one_typed_error() {
    run(60, after_content(Shape::Linked));
}
