//! A node that is killed: before commit the request goes on at another node, after it the stream ends in one typed
//! error (G57).

use std::sync::Arc;
use std::time::Duration;

use iop_tests::client::Conn;
use iop_tests::faults::{Act, Bench, Cell, Route, Seen, Then, WORDS};
use iop_tests::{eventually, run};

const AT_ONCE: Duration = Duration::from_secs(5);

/// Opens every cell and waits until the first provider has all of them.
async fn held(bench: &Bench, cells: &[Cell]) -> Vec<Conn> {
    let mut conns = Vec::new();
    for cell in cells {
        let body = cell.api.request(&cell.model(), cell.stream);
        conns.push(bench.stack.client().open(cell.api.path(), &body).await);
    }
    eventually("every request is at the first provider", AT_ONCE, || async {
        let seen = bench.primary.all_attempts();
        if seen == cells.len() {
            Ok(())
        } else {
            Err(format!("{seen}"))
        }
    })
    .await;
    conns
}

/// Kills the first node and reads what the clients see.
async fn kill_and_read(bench: &Bench, conns: Vec<Conn>) -> Vec<Seen> {
    bench.stack.nodes[0].process.signal("KILL");
    let started = std::time::Instant::now();
    let mut all = Vec::new();
    for mut conn in conns {
        let answer = iop_tests::within("an answer", AT_ONCE, conn.answer())
            .await
            .unwrap();
        all.push(Seen {
            answer,
            elapsed: started.elapsed(),
        });
    }
    all
}

async fn quiet(bench: &Bench) {
    bench.stack.edge.quiet(AT_ONCE).await;
    eventually("the other node is quiet", AT_ONCE, || async {
        let busy = bench.stack.nodes[1]
            .scrape()
            .await
            .map(|p| p.busy())
            .unwrap_or_default();
        if busy.is_empty() {
            Ok(())
        } else {
            Err(format!("{busy:?}"))
        }
    })
    .await;
    for provider in [&bench.primary, &bench.second] {
        provider.stub.idle(AT_ONCE).await;
    }
}

async fn lost(bench: &Bench) -> f64 {
    let page = bench.stack.edge.scrape().await;
    page.sum("iop_edge_attempts_total", &[("result", "node_lost")])
}

fn silent() -> Vec<Route> {
    vec![
        Route::new("silence", Act::Silence),
        Route::new("head", Act::Head(Then::Silence)),
        Route::new("preamble", Act::Preamble(Then::Silence)),
    ]
}

async fn before_commit() {
    let bench = Bench::start_nodes(silent(), |s| s).await;
    let cells = bench.cells();
    let conns = held(&bench, &cells).await;
    for (cell, seen) in cells.iter().zip(kill_and_read(&bench, conns).await) {
        seen.assert_clean(*cell, &bench.of_second(*cell), 2);
        bench.assert_counts(*cell, 1, 1);
    }
    assert_eq!(lost(&bench).await, cells.len() as f64);
    quiet(&bench).await;
}

#[test]
fn failover_to_another_node_when_one_is_killed_before_commit() {
    run(60, before_commit());
}

#[test]
fn no_failover_from_a_lost_node_where_the_operator_forbids_it() {
    run(60, async {
        let bench = Bench::start_nodes(silent(), |s| s.edge("gate", "on_node_lost = \"fail\"")).await;
        let cells = bench.cells();
        let conns = held(&bench, &cells).await;
        for (cell, seen) in cells.iter().zip(kill_and_read(&bench, conns).await) {
            seen.answer.assert_error(502, "node_lost");
            assert_eq!(
                seen.answer.header("x-should-retry"),
                Some("false"),
                "{}",
                cell.model()
            );
            assert_eq!(seen.attempts(), 1, "{}", cell.model());
            bench.assert_counts(*cell, 1, 0);
        }
        quiet(&bench).await;
    });
}

/// Reads until the last word that was sent is there.
async fn read_words(bench: &Arc<Bench>, cell: Cell, conn: &mut Conn, n: usize) -> Vec<u8> {
    let head = conn.head().await.unwrap();
    assert_eq!(head.status, 200, "{}", cell.model());
    assert_eq!(head.header("x-iop-attempts"), Some("1"), "{}", cell.model());
    let last = bench.of_primary(cell).stream(WORDS).content[n - 1].clone();
    let mut seen = Vec::new();
    while !seen.ends_with(&last) {
        let piece = conn.piece().await.unwrap();
        seen.extend_from_slice(&piece.expect("the stream ended before its words"));
    }
    seen
}

#[test]
fn no_failover_when_a_node_is_killed_after_commit_but_one_typed_error() {
    run(60, async {
        let route = Route::new("words", Act::Content(20, Then::Silence)).streams();
        let bench = Bench::start_nodes(vec![route], |s| s).await;
        let cells = bench.cells();
        let mut conns = held(&bench, &cells).await;
        let mut begun = Vec::new();
        for (cell, conn) in cells.iter().zip(&mut conns) {
            begun.push(read_words(&bench, *cell, conn, 20).await);
        }
        bench.stack.nodes[0].process.signal("KILL");
        for ((cell, mut conn), mut body) in cells.iter().zip(conns).zip(begun) {
            let rest = iop_tests::within("the end", AT_ONCE, conn.body()).await.unwrap();
            body.extend_from_slice(&rest);
            let answer = iop_tests::client::Answer {
                head: iop_tests::client::Head {
                    status: 200,
                    headers: Vec::new(),
                },
                body: body.into(),
                complete: conn.complete(),
            };
            let seen = Seen {
                answer,
                elapsed: Duration::ZERO,
            };
            let answers = bench.of_primary(*cell);
            let events = answers.stream(WORDS);
            let words = events.content.into_iter().take(20);
            let sent: Vec<Vec<u8>> = events.preamble.into_iter().chain(words).collect();
            seen.assert_broken_off(*cell, &answers, &sent, "node_lost");
            bench.assert_counts(*cell, 1, 0);
        }
        quiet(&bench).await;
    });
}
