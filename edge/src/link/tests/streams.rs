//! Many streams over one real connection.

use tokio::net::{TcpListener, TcpStream};

use super::*;

/// A live link over loopback.
async fn linked(registry: &Arc<Registry>) -> Pair {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (far, near) = tokio::join!(
        TcpStream::connect(listener.local_addr().unwrap()),
        listener.accept()
    );
    let (far, (near, _)) = (far.unwrap(), near.unwrap());
    far.set_nodelay(true).unwrap();
    near.set_nodelay(true).unwrap();
    let pair = Pair::over(registry, hello("n1", "a"), near, Fake::start(far));
    pair.fake.says(line("n1"));
    pair
}

async fn session(registry: &Registry) -> Arc<Session> {
    Arc::clone(lease(registry).await.session())
}

#[test]
fn runs_that_nobody_reads_do_not_hold_up_the_others() {
    threaded(async {
        let registry = registry();
        let _pair = linked(&registry).await;
        let session = session(&registry).await;
        let mut unread = Vec::new();
        for _ in 0..64 {
            unread.push(session.call(tunnel_of("endless", 21)).await.unwrap());
        }
        let healthy =
            (0..200).map(|_| async { read(session.call(tunnel("short")).await.unwrap()).await.unwrap() });
        for (bytes, trailers) in futures_util::future::join_all(healthy).await {
            assert_eq!((bytes, trailers.is_some()), (25_000, true));
        }
        assert_eq!(unread.len(), 64);
        assert!(session.is_live());
    });
}

#[test]
fn five_thousand_cancels_at_once_reach_the_node_and_leave_the_link_alive() {
    threaded(async {
        const RUNS: usize = 5000;
        let registry = registry();
        let pair = linked(&registry).await;
        let session = session(&registry).await;
        // In large frames: what is asked of the link here are the cancels, not how many frames fill the windows.
        let runs = (0..RUNS).map(|_| session.call(tunnel_of("endless", 4096)));
        let runs = futures_util::future::join_all(runs).await;
        assert!(runs.iter().all(Result::is_ok));
        let kept = session.call(tunnel("short")).await.unwrap();
        drop(runs);
        let seen = Arc::clone(&pair.fake.seen);
        eventually("every run was dropped", || {
            seen.cancelled.load(Ordering::SeqCst) == RUNS
        })
        .await;
        assert!(read(kept).await.unwrap().1.is_some());
        let response = session.call(tunnel("short")).await.unwrap();
        assert_eq!(read(response).await.unwrap().0, 25_000);
        assert!(session.is_live());
        assert_eq!(live(&registry), [("n1".into(), 1)]);
    });
}

#[test]
fn a_call_that_is_dropped_before_its_head_is_cancelled() {
    threaded(async {
        let registry = registry();
        let pair = linked(&registry).await;
        let session = session(&registry).await;
        let calls = futures_util::future::join_all((0..100).map(|_| session.call(tunnel("mute"))));
        let seen = Arc::clone(&pair.fake.seen);
        tokio::select! {
            _ = calls => unreachable!("no head ever comes"),
            () = eventually("all are under way", || seen.begun.load(Ordering::SeqCst) == 100) => {}
        }
        eventually("all were dropped", || {
            seen.cancelled.load(Ordering::SeqCst) == 100
        })
        .await;
        let response = session.call(tunnel("short")).await.unwrap();
        assert!(read(response).await.unwrap().1.is_some());
        assert!(!pair.ended.is_finished());
    });
}

#[test]
fn an_end_without_trailers_is_seen_as_such() {
    threaded(async {
        let registry = registry();
        let _pair = linked(&registry).await;
        let session = session(&registry).await;
        let response = session.call(tunnel("unfinished")).await.unwrap();
        assert_eq!(read(response).await.unwrap(), (750, None));
    });
}

#[test]
fn a_connection_that_breaks_ends_its_streams_and_its_session() {
    threaded(async {
        let registry = registry();
        let pair = linked(&registry).await;
        let session = session(&registry).await;
        let response = session.call(tunnel("endless")).await.unwrap();
        pair.fake.served.abort();
        assert_eq!(read(response).await.unwrap_err(), LinkError::Lost);
        assert_eq!(pair.ended().await.0, Ended::Lost);
        assert_eq!(live(&registry), []);
    });
}
