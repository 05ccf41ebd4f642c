//! Sessions in memory, where time can be paused.

use tokio::time::Instant;

use super::*;

#[tokio::test(start_paused = true)]
async fn a_node_is_live_from_its_first_line_to_its_goodbye() {
    let registry = registry();
    let pair = Pair::start(&registry, hello("n1", "a"));
    assert_eq!(live(&registry), []);
    pair.fake.says(line("n1"));
    let lease = lease(&registry).await;
    assert_eq!(live(&registry), [("n1".into(), 1)]);
    let session = Arc::clone(lease.session());
    assert!(session.is_live() && !session.embedded);
    assert_eq!(
        (session.node_id.as_str(), session.generation),
        ("n1", pair.generation)
    );
    // The node says goodbye while a stream runs: no new work, and the stream finishes.
    let response = session.call(tunnel("short")).await.unwrap();
    let Pair {
        fake, ended, reason, ..
    } = pair;
    let Fake {
        session: lines,
        served,
        seen,
    } = fake;
    drop(lines);
    ended.await.unwrap();
    assert_eq!(reason.borrow().unwrap(), Ended::Closed);
    assert_eq!(live(&registry), []);
    assert!(!session.is_live());
    let (bytes, trailers) = read(response).await.unwrap();
    assert_eq!(
        (bytes, trailers.unwrap()["iop-terminal"].to_str().unwrap()),
        (25_000, "complete")
    );
    // Nobody holds the session: its connection closes.
    drop((lease, session));
    served.await.unwrap();
    let uris = seen.uris.lock().clone();
    assert_eq!(
        uris,
        ["http://node/link/v1/session", "http://node/link/v1/tunnels/chat"]
    );
}

#[tokio::test(start_paused = true)]
async fn a_node_that_says_nothing_is_given_up_after_5_seconds() {
    let registry = registry();
    let start = Instant::now();
    let pair = Pair::start(&registry, hello("n1", "a"));
    let (ended, fake) = pair.ended().await;
    assert_eq!((ended, start.elapsed().as_secs()), (Ended::Silent, 5));
    assert_eq!(live(&registry), []);
    fake.served.await.unwrap();
    // Half a line, a blank one or keep-alive bytes are no sign of a session either.
    let start = Instant::now();
    let pair = Pair::start(&registry, hello("n1", "a"));
    pair.fake.says("\n\n{\"node_id\":");
    assert_eq!(
        (pair.ended().await.0, start.elapsed().as_secs()),
        (Ended::Silent, 5)
    );
}

#[tokio::test(start_paused = true)]
async fn a_bad_first_line_never_makes_a_node_live() {
    let long = vec![b'x'; (1 << 20) + 1];
    for (said, status, expected) in [
        (Bytes::from("hello\n"), 200, Ended::BadLine),
        (Bytes::from("{\"load\":[]}\n"), 200, Ended::BadLine),
        (Bytes::from("{\"node_id\":\"n1\"}\n"), 200, Ended::BadLine),
        (Bytes::from(long), 200, Ended::BadLine),
        (line("n2"), 200, Ended::ForeignId),
        (line("n1"), 404, Ended::NoSession),
    ] {
        let registry = registry();
        let status = StatusCode::from_u16(status).unwrap();
        let pair = Pair::scripted(&registry, hello("n1", "a"), false, status);
        pair.fake.says(said);
        let (ended, fake) = pair.ended().await;
        assert_eq!(ended, expected);
        assert_eq!(live(&registry), []);
        // The connection goes too, so that the node dials again.
        fake.served.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_later_line_that_is_wrong_ends_the_session() {
    for (said, expected) in [
        (Bytes::from("{}\n"), Ended::BadLine),
        (line("n2"), Ended::ForeignId),
    ] {
        let registry = registry();
        let pair = Pair::start(&registry, hello("n1", "a"));
        pair.fake.says(line("n1"));
        drop(lease(&registry).await);
        pair.fake.says(said);
        let (ended, fake) = pair.ended().await;
        assert_eq!(ended, expected);
        assert_eq!(live(&registry), []);
        fake.served.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_node_advertises_is_followed() {
    let registry = registry();
    let pair = Pair::start(&registry, hello("n1", "a"));
    // Cut anywhere.
    let text = line("n1");
    pair.fake.says(text.slice(..20));
    pair.fake.says(text.slice(20..));
    pair.fake.says("{\"load\":[{\"id\":\"p\",\"in_flight\":7}]}\n");
    drop(lease(&registry).await);
    pair.fake
        .says(SessionLine::Advertisement(advertisement("n1", true)).to_line());
    let draining = || {
        registry
            .pool()
            .nodes()
            .iter()
            .all(|n| n.state == crate::metrics::SessionState::Draining)
    };
    eventually("the node is shown as draining", draining).await;
    pair.fake.says(line("n1"));
    drop(lease(&registry).await);
}

#[tokio::test(start_paused = true)]
async fn the_late_end_of_an_older_generation_changes_nothing() {
    let registry = registry();
    let old = Pair::start(&registry, hello("n1", "a"));
    old.fake.says(line("n1"));
    let old_lease = lease(&registry).await;
    let response = old_lease.session().call(tunnel("short")).await.unwrap();

    let new = Pair::start(&registry, hello("n1", "a"));
    new.fake.says(line("n1"));
    let (ended, old_fake) = old.ended().await;
    assert_eq!(ended, Ended::Released);
    assert_eq!(live(&registry), [("n1".into(), 2)]);
    assert!(!old_lease.session().is_live());
    // New leases are of the new one, the old stream finishes, and only then the old connection goes.
    let new_lease = lease(&registry).await;
    assert_eq!(new_lease.generation(), ConnectionGeneration(2));
    assert!(!old_fake.served.is_finished());
    assert!(read(response).await.unwrap().1.is_some());
    drop(old_lease);
    old_fake.served.await.unwrap();
    assert_eq!(live(&registry), [("n1".into(), 2)]);
    let response = new_lease.session().call(tunnel("short")).await.unwrap();
    assert!(read(response).await.unwrap().1.is_some());
}

#[tokio::test(start_paused = true)]
async fn the_newest_handshake_wins_even_when_the_older_one_speaks_last() {
    let registry = registry();
    let old = Pair::start(&registry, hello("n1", "a"));
    let new = Pair::start(&registry, hello("n1", "b"));
    new.fake.says(line("n1"));
    drop(lease(&registry).await);
    old.fake.says(line("n1"));
    assert_eq!(old.ended().await.0, Ended::Released);
    assert_eq!(live(&registry), [("n1".into(), 2)]);
    assert_eq!(lease(&registry).await.generation(), new.generation);
}

#[tokio::test(start_paused = true)]
async fn a_rival_is_refused_while_the_older_session_answers_and_wins_when_it_does_not() {
    use super::super::handshake::Refusal;
    for deaf in [false, true] {
        let registry = registry();
        let pair = Pair::scripted(&registry, hello("n1", "a"), deaf, StatusCode::OK);
        pair.fake.says(line("n1"));
        drop(lease(&registry).await);
        let start = Instant::now();
        // The same process, another id, or one that does not say who it is: nobody is asked.
        for newcomer in [
            hello("n1", "a"),
            hello("n2", "b"),
            Hello {
                instance: None,
                ..hello("n1", "")
            },
        ] {
            assert!(registry.admit(&newcomer).await.is_ok());
        }
        assert_eq!(start.elapsed(), Duration::ZERO);
        let admitted = registry.admit(&hello("n1", "b")).await;
        if deaf {
            assert_eq!(
                (admitted, start.elapsed().as_secs()),
                (Ok(ConnectionGeneration(5)), 2)
            );
        } else {
            assert_eq!(
                (admitted, start.elapsed().as_secs()),
                (Err(Refusal::Duplicate), 0)
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_black_hole_is_noticed_within_15_seconds() {
    let registry = registry();
    let (near, far, hole) = holed_path();
    let pair = Pair::over(&registry, hello("n1", "a"), near, Fake::start(far));
    pair.fake.says(line("n1"));
    let lease = lease(&registry).await;
    let response = lease.session().call(tunnel("endless")).await.unwrap();
    // An idle path that works is kept.
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(lease.session().is_live());
    hole.send_replace(true);
    let start = Instant::now();
    let session = Arc::clone(lease.session());
    let (ended, _fake) = pair.ended().await;
    assert_eq!(ended, Ended::Lost);
    assert!(
        start.elapsed() <= Duration::from_secs(15),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(live(&registry), []);
    assert_eq!(read(response).await.unwrap_err(), LinkError::Lost);
    assert_eq!(session.call(tunnel("short")).await.err(), Some(LinkError::Lost));
    assert!(
        start.elapsed() <= Duration::from_secs(15),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn a_drain_tells_every_linked_node_and_ends_its_session() {
    let registry = registry();
    let pairs = ["n1", "n2", "n3"].map(|id| {
        let pair = Pair::start(&registry, hello(id, "a"));
        pair.fake.says(line(id));
        pair
    });
    eventually("three nodes are live", || live(&registry).len() == 3).await;
    registry.drain().await;
    assert_eq!(live(&registry), []);
    for pair in pairs {
        let (ended, fake) = pair.ended().await;
        assert_eq!(
            (ended, fake.seen.drains.load(Ordering::SeqCst)),
            (Ended::Released, 1)
        );
        fake.served.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_does_not_wait_for_a_node_that_is_not_there() {
    let registry = registry();
    let (near, far, hole) = holed_path();
    let pair = Pair::over(&registry, hello("n1", "a"), near, Fake::start(far));
    pair.fake.says(line("n1"));
    drop(lease(&registry).await);
    hole.send_replace(true);
    let start = Instant::now();
    registry.drain().await;
    assert_eq!(start.elapsed().as_secs(), 2);
    assert_eq!(pair.ended().await.0, Ended::Released);
}
