//! `GET /link/v1/session`: the advertisement, then its changes, then load at most once a second when changed (link.md).
//!
//! Ends when the link closes; for the edge in the same process it ends with its reader.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::Response;
use http::header::{CONTENT_TYPE, HeaderValue};
use iop_shared::wire::headers;
use iop_shared::wire::session::{Advertisement, Load, ProviderLoad, SessionLine};
use tokio::sync::watch;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

use super::Node;
use super::body::ResponseBody;
use super::scope::Scope;

/// Load lines are no closer together than this.
const LOAD_INTERVAL: Duration = Duration::from_secs(1);

struct Lines {
    node: Node,
    advertisement: watch::Receiver<Arc<Advertisement>>,
    closing: watch::Receiver<bool>,
    told: Vec<ProviderLoad>,
    tick: Interval,
    begun: bool,
}

pub(super) fn open(node: &Node, scope: &Scope) -> Response<ResponseBody> {
    let mut tick = interval_at(Instant::now() + LOAD_INTERVAL, LOAD_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut told = node.loads();
    for load in &mut told {
        // What an edge takes for granted until told otherwise.
        load.in_flight = 0;
    }
    let lines = Lines {
        node: node.clone(),
        advertisement: node.subscribe(),
        closing: scope.closing(),
        told,
        tick,
        begun: false,
    };
    let mut response = Response::new(ResponseBody::lines(stream::unfold(
        lines,
        |mut lines| async move {
            lines
                .next()
                .await
                .map(|line| (Bytes::from(line.to_line()), lines))
        },
    )));
    let map = response.headers_mut();
    map.insert(CONTENT_TYPE, HeaderValue::from_static("application/jsonl"));
    map.insert(headers::ORIGIN, headers::ORIGIN_NODE);
    response
}

impl Lines {
    async fn next(&mut self) -> Option<SessionLine> {
        if !std::mem::replace(&mut self.begun, true) {
            return Some(self.advertise());
        }
        loop {
            tokio::select! {
                biased;
                () = async { drop(self.closing.wait_for(|closing| *closing).await) } => return None,
                changed = self.advertisement.changed() => {
                    changed.ok()?;
                    return Some(self.advertise());
                }
                _ = self.tick.tick() => {
                    let load = self.node.loads();
                    if load != self.told {
                        self.told.clone_from(&load);
                        return Some(SessionLine::Load(Load { load }));
                    }
                }
            }
        }
    }

    fn advertise(&mut self) -> SessionLine {
        SessionLine::Advertisement(Advertisement::clone(&self.advertisement.borrow_and_update()))
    }
}
