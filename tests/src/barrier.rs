//! A point in a stub that holds whoever comes there until the test says go.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::provider::Exchange;
use crate::within;

/// How long a test waits for somebody to come.
const WITHIN: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, Default)]
struct Point {
    closed: bool,
    /// How many came while it was closed.
    came: usize,
    /// How many may still pass a closed barrier.
    passes: usize,
}

/// Open unless closed. Clones are the same barrier.
#[derive(Debug, Clone)]
pub struct Barrier {
    point: Arc<watch::Sender<Point>>,
}

impl Default for Barrier {
    fn default() -> Self {
        Self {
            point: Arc::new(watch::channel(Point::default()).0),
        }
    }
}

impl Barrier {
    /// Holds everybody who comes from here on; the count of those who came begins anew.
    pub fn close(&self) {
        self.point.send_replace(Point {
            closed: true,
            ..Point::default()
        });
    }

    /// Lets everybody pass, those who wait included.
    pub fn open(&self) {
        self.point.send_modify(|p| p.closed = false);
    }

    /// Lets `n` pass, those who wait first.
    pub fn let_pass(&self, n: usize) {
        self.point.send_modify(|p| p.passes += n);
    }

    /// Waits until `n` have come since the barrier was closed.
    ///
    /// # Panics
    /// When they have not within half a minute.
    pub async fn reached(&self, n: usize) {
        let mut point = self.point.subscribe();
        let came = async {
            // The sender lives as long as `self`.
            let _ = point.wait_for(|p| p.came >= n).await;
        };
        within(&format!("{n} at the barrier"), WITHIN, came).await;
    }

    /// Waits here while the barrier is closed.
    ///
    /// # Errors
    /// When the peer hangs up meanwhile.
    pub(crate) async fn hold(&self, ex: &mut Exchange) -> io::Result<()> {
        let mut held = false;
        self.point.send_if_modified(|p| {
            held = p.closed;
            p.came += usize::from(p.closed);
            p.closed
        });
        if !held {
            return Ok(());
        }
        let mut point = self.point.subscribe();
        let open = async {
            loop {
                let mut passes = false;
                self.point.send_if_modified(|p| {
                    passes = !p.closed || p.passes > 0;
                    let took = p.closed && p.passes > 0;
                    p.passes -= usize::from(took);
                    took
                });
                if passes || point.changed().await.is_err() {
                    return;
                }
            }
        };
        ex.until(open).await
    }
}
