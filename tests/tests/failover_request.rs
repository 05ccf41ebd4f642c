//! What one request's replays are made of and bounded by: the same bytes again, kept up to a bound, a place in the queue,
//! a client that is still there, and one budget (G55, G60, §13).

use std::sync::Arc;
use std::time::{Duration, Instant};

use iop_tests::config::{Provider, Setup};
use iop_tests::faults::{Act, Api, Bench, Faulty, Reply, Route, Script};
use iop_tests::stack::{Shape, Stack};
use iop_tests::{eventually, fixtures, run, within};

fn status(status: u16, code: &str) -> Act {
    Act::Status(Reply::error(status, code))
}

/// The request of a plain cell, as a client writes it, is what both providers get, but for the model's name.
#[test]
fn failover_sends_the_same_bytes_again() {
    run(60, async {
        for shape in Shape::ALL {
            let bench = Bench::start(shape, vec![Route::new("500", status(500, "internal"))], |s| s).await;
            for cell in bench.cells() {
                let spaced = format!(
                    "{{ \"model\" : \"{}\",\n  \"n\": 1, \"seed\":9007199254740993, \"x\":\"\\u0041\", \"stream\": {}, {} }}",
                    cell.model(),
                    cell.stream,
                    match cell.api {
                        Api::Chat => "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]",
                        Api::Responses => "\"input\" : \"hi\"",
                    }
                );
                let client = bench.stack.client();
                let answer = client
                    .request("POST", cell.api.path(), &[], spaced.as_bytes())
                    .await;
                assert_eq!(answer.status(), 200, "{}", answer.text());
                let (first, again) = (bench.primary.stub.last(), bench.second.stub.last());
                assert_eq!(first.body, again.body, "{}", cell.model());
                let text = String::from_utf8_lossy(&again.body).into_owned();
                let expected = spaced.replace(
                    &format!("\"{}\"", cell.model()),
                    &format!("\"{}\"", cell.target()),
                );
                if cell.api == Api::Responses || !cell.stream {
                    assert_eq!(text, expected, "{}", cell.model());
                }
                let ids = [&first, &again].map(|r| r.header("x-request-id").map(str::to_owned));
                assert_eq!(ids[0], ids[1], "{}", cell.model());
            }
            bench.done().await;
        }
    });
}

/// A body over the snapshot's bound is sent once.
#[test]
fn no_failover_for_a_body_that_was_not_kept() {
    run(60, async {
        for shape in Shape::ALL {
            let routes = vec![Route::new("500", status(500, "internal"))];
            let bench = Bench::start(shape, routes, |s| s.edge("gate", "snapshot_bytes = \"16KiB\"")).await;
            for cell in bench.cells() {
                let long = "x".repeat(20 * 1024);
                let body = match cell.api {
                    Api::Chat => fixtures::chat(&cell.model(), &long, cell.stream),
                    Api::Responses => fixtures::responses(&cell.model(), &long, cell.stream),
                };
                let answer = bench.stack.client().post(cell.api.path(), &body).await;
                let attempts = answer.header("x-iop-attempts");
                assert_eq!((answer.status(), attempts), (500, Some("1")), "{}", cell.model());
                bench.assert_counts(cell, 1, 0);
            }
            bench.done().await;
        }
    });
}

/// Four candidates, three attempts: the budget ends it, whoever is left.
#[test]
fn failover_ends_after_three_attempts_by_default() {
    run(60, async {
        for shape in Shape::ALL {
            let mut faulty = Vec::new();
            let mut setup = Setup::default()
                .nodes(&["n1"])
                .node("node", "metrics_listen = \"127.0.0.1:0\"");
            for name in ["one", "two", "three", "four"] {
                let one = Faulty::start(name).await;
                one.script("t", Script::always(status(503, name)));
                setup = setup.provider(Provider::openai(name, &one.stub.url(), &["t"]));
                faulty.push(one);
            }
            let candidates = ["one", "two", "three", "four"].map(|name| (name, "t"));
            let stack = Stack::start(shape, setup.ranked("m", &candidates)).await;
            for api in Api::ALL {
                for stream in [false, true] {
                    let answer = stack.client().post(api.path(), &api.request("m", stream)).await;
                    assert_eq!(answer.status(), 503, "{}", answer.text());
                    assert_eq!(
                        answer.json()["error"]["code"],
                        "three",
                        "the last attempt's answer"
                    );
                    assert_eq!(answer.header("x-iop-attempts"), Some("3"));
                    assert_eq!(answer.header("x-should-retry"), Some("false"));
                }
            }
            let counts: Vec<usize> = faulty.iter().map(|f| f.attempts("t")).collect();
            assert_eq!(counts, [4, 4, 4, 0], "{shape:?}");
            stack.settled(Duration::from_secs(5)).await;
        }
    });
}

/// The second provider takes one request at a time: replays wait for it, and a wait is no attempt.
async fn waits_for_room(shape: Shape) {
    let slow = Act::Paced {
        words: 3,
        first: Duration::from_millis(200),
        gap: Duration::ZERO,
    };
    let route = Route::new("narrow", status(500, "internal"))
        .then(slow)
        .second_line("capacity = 1")
        .one_model();
    let bench = Bench::start(shape, vec![route], |s| s).await;
    let cells = bench.cells();
    // Two rounds: more would eject the first provider.
    let asking = cells.iter().map(|cell| {
        let bench = Arc::clone(&bench);
        async move {
            let seen = bench.ask(*cell).await;
            seen.assert_clean_words(*cell, &bench.of_second(*cell), 2, 3);
        }
    });
    futures_util::future::join_all(asking).await;
    bench.assert_counts(cells[0], cells.len(), cells.len());
    bench.done().await;
}

#[test]
fn failover_to_a_busy_provider_waits_for_room() {
    run(60, async {
        tokio::join!(waits_for_room(Shape::Embedded), waits_for_room(Shape::Linked));
    });
}

/// A client that leaves ends the request, whatever it waits for: nobody is asked for it afterwards.
async fn client_leaves(shape: Shape) {
    let busy = Act::Status(Reply::error(429, "busy").header("retry-after", "2"));
    let routes = vec![
        // Before the first one has stalled.
        Route::new("silence", Act::Silence).stalls(),
        // While its `Retry-After` runs.
        Route::once("waits", busy).alone(),
    ];
    let bench = Bench::start(shape, routes, |s| s).await;
    let cells = bench.cells();
    let mut conns = Vec::new();
    for cell in &cells {
        let body = cell.api.request(&cell.model(), cell.stream);
        conns.push(bench.stack.client().open(cell.api.path(), &body).await);
    }
    eventually(
        "every request is at the first provider",
        Duration::from_secs(5),
        || async {
            let seen = bench.primary.all_attempts();
            if seen == cells.len() {
                Ok(())
            } else {
                Err(format!("{seen} of {}", cells.len()))
            }
        },
    )
    .await;
    drop(conns);
    let left = Instant::now();
    within("nothing in flight", Duration::from_secs(2), bench.done()).await;
    // Past the stall limit and past the `Retry-After`.
    tokio::time::sleep_until((left + Duration::from_millis(2_500)).into()).await;
    for cell in cells {
        bench.assert_counts(cell, 1, 0);
    }
    let page = bench.stack.edge.scrape().await;
    assert_eq!(page.sum("iop_edge_client_cancelled_total", &[]), 8.0);
    assert_eq!(page.sum("iop_edge_liveness_recovery_results_total", &[]), 0.0);
    bench.done().await;
}

#[test]
fn no_failover_for_a_client_that_has_left() {
    run(60, async {
        tokio::join!(client_leaves(Shape::Embedded), client_leaves(Shape::Linked));
    });
}
