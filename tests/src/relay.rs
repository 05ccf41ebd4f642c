//! The network between two processes: a TCP relay that can go silent without closing, cut, and come back.
//!
//! Silent means what a dead path means: sockets stay open, nothing arrives; what was sent meanwhile arrives
//! after the path is back, as TCP would retransmit it. Who closes in the meantime is on record.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What is known of one relayed connection.
#[derive(Debug, Clone, Default)]
pub struct Passage {
    /// When the dialing side closed.
    pub dialer_closed: Option<Instant>,
    /// When the listening side closed.
    pub listener_closed: Option<Instant>,
    /// The first bytes from the dialing side (at most 4 KiB).
    pub opening: Vec<u8>,
}

/// A relay in front of one address.
pub struct Relay {
    pub addr: String,
    silent: watch::Sender<bool>,
    epoch: watch::Sender<u64>,
    passages: Arc<Mutex<Vec<Passage>>>,
    accept: tokio::task::JoinHandle<()>,
}

impl Relay {
    /// Forwards every connection to `target`.
    ///
    /// # Panics
    /// When loopback is not there.
    pub async fn start(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let silent = watch::channel(false).0;
        let epoch = watch::channel(0).0;
        let passages = Arc::new(Mutex::new(Vec::new()));
        let accept = tokio::spawn({
            let (silent, epoch, passages, target) = (
                silent.clone(),
                epoch.clone(),
                Arc::clone(&passages),
                target.to_owned(),
            );
            async move {
                while let Ok((dialer, _)) = listener.accept().await {
                    let index = {
                        let mut passages = passages.lock();
                        passages.push(Passage::default());
                        passages.len() - 1
                    };
                    let record = Record {
                        passages: Arc::clone(&passages),
                        index,
                    };
                    let (silent, mut epoch, target) = (silent.subscribe(), epoch.subscribe(), target.clone());
                    epoch.mark_unchanged();
                    tokio::spawn(async move {
                        tokio::select! {
                            () = pass(dialer, &target, silent, record) => {}
                            _ = epoch.changed() => {}
                        }
                    });
                }
            }
        });
        Self {
            addr,
            silent,
            epoch,
            passages,
            accept,
        }
    }

    /// Nothing gets through any more; nobody is told.
    pub fn black_hole(&self) {
        self.silent.send_replace(true);
    }

    /// The path is back.
    pub fn restore(&self) {
        self.silent.send_replace(false);
    }

    /// Closes every connection.
    pub fn cut(&self) {
        self.epoch.send_modify(|n| *n += 1);
    }

    /// Every connection so far.
    pub fn passages(&self) -> Vec<Passage> {
        self.passages.lock().clone()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

#[derive(Clone)]
struct Record {
    passages: Arc<Mutex<Vec<Passage>>>,
    index: usize,
}

impl Record {
    fn note(&self, f: impl FnOnce(&mut Passage)) {
        f(&mut self.passages.lock()[self.index]);
    }
}

async fn pass(dialer: TcpStream, target: &str, silent: watch::Receiver<bool>, record: Record) {
    let Ok(listener) = TcpStream::connect(target).await else {
        return;
    };
    let _ = (dialer.set_nodelay(true), listener.set_nodelay(true));
    let (from_dialer, to_dialer) = dialer.into_split();
    let (from_listener, to_listener) = listener.into_split();
    tokio::join!(
        pump(from_dialer, to_listener, silent.clone(), record.clone(), true),
        pump(from_listener, to_dialer, silent, record, false),
    );
}

async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut silent: watch::Receiver<bool>,
    record: Record,
    dialing: bool,
) {
    let mut pending = Vec::new();
    let mut ended = false;
    let mut chunk = vec![0; 64 * 1024];
    loop {
        if !*silent.borrow_and_update() {
            if to.write_all(&pending).await.is_err() || ended {
                let _ = to.shutdown().await;
                // The other direction may have more to say; nothing comes from here any more.
                return;
            }
            pending.clear();
        }
        tokio::select! {
            read = from.read(&mut chunk), if !ended => match read {
                Ok(n) if n > 0 => {
                    pending.extend_from_slice(&chunk[..n]);
                    if dialing {
                        record.note(|p| {
                            let room = 4096_usize.saturating_sub(p.opening.len());
                            p.opening.extend_from_slice(&chunk[..n.min(room)]);
                        });
                    }
                }
                _ => {
                    ended = true;
                    record.note(|p| {
                        let slot = if dialing { &mut p.dialer_closed } else { &mut p.listener_closed };
                        slot.get_or_insert_with(Instant::now);
                    });
                }
            },
            changed = silent.changed() => if changed.is_err() { return },
        }
    }
}
