//! Dials one edge for as long as the process lives: TCP, TLS, the upgrade, then the session; and again.
//!
//! Every step towards a link is bounded by `backoff::ATTEMPT`. A refusal is logged in words, once a minute.

use std::time::Instant;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONNECTION, HOST, HeaderValue, UPGRADE};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use iop_shared::wire::{HANDSHAKE_PATH, UPGRADE_TOKEN, h2, headers};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;

use super::activity::{Activity, Watched};
use super::backoff::{ATTEMPT, Limiter, Redial};
use super::refusal::{self, Refusal};
use super::session::{self, Ended};
use super::tls::Connector;
use crate::config::EdgeSettings;
use crate::metrics::{DialResult, LinkState};
use crate::providers::openai::bearer;
use crate::service::Node;

/// Longest refusal that is read, in bytes.
const REFUSAL_BODY: usize = 4 << 10;

/// One edge, dialed again and again.
pub(super) struct Dialer {
    node: Node,
    edge: EdgeSettings,
    tls: Option<Connector>,
    instance: String,
    close: watch::Receiver<bool>,
}

/// A link that was accepted.
struct Accepted {
    io: Upgraded,
    activity: Activity,
    generation: String,
}

impl Dialer {
    pub(super) fn new(
        node: Node,
        edge: EdgeSettings,
        tls: Option<Connector>,
        instance: String,
        close: watch::Receiver<bool>,
    ) -> Self {
        Self {
            node,
            edge,
            tls,
            instance,
            close,
        }
    }

    pub(super) async fn run(mut self) {
        let mut redial = Redial::new();
        let mut limiter = Limiter::default();
        while !*self.close.borrow() {
            let mut close = self.close.clone();
            let dialed = tokio::select! {
                dialed = tokio::time::timeout(ATTEMPT, self.dial()) => dialed,
                _ = close.wait_for(|c| *c) => return,
            };
            let dialed = dialed.unwrap_or_else(|_| {
                let text = format!("no answer within {} s", ATTEMPT.as_secs());
                Err(Refusal {
                    result: DialResult::Timeout,
                    text,
                })
            });
            match dialed {
                Ok(link) => {
                    self.node.metrics().dials.at((DialResult::Accepted,)).inc();
                    limiter.reset();
                    let begun = Instant::now();
                    self.serve(link).await;
                    redial.lived(begun.elapsed());
                }
                Err(refusal) => {
                    self.node.metrics().dials.at((refusal.result,)).inc();
                    if limiter.is_news(refusal.result, Instant::now()) {
                        self.tell(&refusal);
                    }
                }
            }
            tokio::select! {
                () = tokio::time::sleep(redial.next()) => {}
                _ = close.wait_for(|c| *c) => {}
            }
        }
    }

    async fn serve(&mut self, link: Accepted) {
        let edge = self.edge.authority.as_str();
        tracing::info!(edge, connection_generation = link.generation, "link is up");
        let up = UpGuard::new(&self.node);
        let ended = session::serve(&self.node, link.io, &link.activity, self.close.clone()).await;
        drop(up);
        match ended {
            Ended::Closed => tracing::info!(edge, "link closed"),
            Ended::Silent => {
                tracing::warn!(edge, "link is dead: no sign of life from the edge; dialing again")
            }
            Ended::Lost => tracing::warn!(edge, "link lost; dialing again"),
        }
    }

    fn tell(&self, refusal: &Refusal) {
        let (edge, result, reason) = (
            self.edge.authority.as_str(),
            refusal.result.as_str(),
            refusal.text.as_str(),
        );
        match refusal.result {
            DialResult::Unauthorized
            | DialResult::VersionRefused
            | DialResult::Duplicate
            | DialResult::Refused => {
                tracing::error!(edge, result, reason, "the edge refused the link");
            }
            DialResult::Unreachable | DialResult::Timeout | DialResult::Accepted => {
                tracing::warn!(edge, result, reason, "cannot reach the edge");
            }
        }
    }

    async fn dial(&self) -> Result<Accepted, Refusal> {
        let socket = TcpStream::connect((self.edge.host.as_str(), self.edge.port))
            .await
            .map_err(|e| unreachable(&e.to_string()))?;
        prepare(&socket);
        let activity = Activity::new();
        match &self.tls {
            None => self.upgrade(socket, activity).await,
            Some(tls) => {
                let stream = tls
                    .connect(socket)
                    .await
                    .map_err(|e| unreachable(&format!("TLS: {e}")))?;
                self.upgrade(stream, activity).await
            }
        }
    }

    async fn upgrade<S>(&self, io: S, activity: Activity) -> Result<Accepted, Refusal>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let io = TokioIo::new(Watched::new(io, activity.clone()));
        let (mut sender, connection) = http1::handshake::<_, Empty<Bytes>>(io)
            .await
            .map_err(|e| unreachable(&e.to_string()))?;
        let request = self.handshake()?;
        let talk = async move {
            let response = sender
                .send_request(request)
                .await
                .map_err(|e| unreachable(&cause(&e)))?;
            if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                accepted(response, activity).await
            } else {
                Err(refused(response).await)
            }
        };
        // The connection ends by itself: it hands the socket over, or its sender is gone.
        let (_, talked) = tokio::join!(connection.with_upgrades(), talk);
        talked
    }

    fn handshake(&self) -> Result<Request<Empty<Bytes>>, Refusal> {
        let bad = |what: &str| unreachable(&format!("{what} cannot be sent in a header"));
        let mut request = Request::new(Empty::new());
        *request.uri_mut() = http::Uri::from_static(HANDSHAKE_PATH);
        let map = request.headers_mut();
        map.insert(
            HOST,
            HeaderValue::try_from(self.edge.authority.as_str()).map_err(|_| bad("the edge's name"))?,
        );
        map.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        map.insert(UPGRADE, HeaderValue::from_static(UPGRADE_TOKEN));
        map.insert(
            AUTHORIZATION,
            bearer(&self.edge.token).ok_or_else(|| bad("the token"))?,
        );
        map.insert(headers::NODE_ID, headers::encode(self.node.id().as_str()));
        map.insert(headers::NODE_INSTANCE, headers::encode(&self.instance));
        Ok(request)
    }
}

async fn accepted(response: Response<Incoming>, activity: Activity) -> Result<Accepted, Refusal> {
    let refused = |text: &str| Refusal {
        result: DialResult::Refused,
        text: text.to_owned(),
    };
    let generation = response
        .headers()
        .get(headers::CONNECTION_GENERATION)
        .and_then(|v| v.to_str().ok())
        .filter(|v| v.parse::<u64>().is_ok())
        .ok_or_else(|| refused("the edge accepted without a connection generation"))?
        .to_owned();
    let io = hyper::upgrade::on(response)
        .await
        .map_err(|e| unreachable(&cause(&e)))?;
    Ok(Accepted {
        io,
        activity,
        generation,
    })
}

async fn refused(response: Response<Incoming>) -> Refusal {
    let (parts, body) = response.into_parts();
    // Without the edge's words the status alone must do.
    let body = Limited::new(body, REFUSAL_BODY)
        .collect()
        .await
        .map(|b| b.to_bytes())
        .unwrap_or_default();
    refusal::read(parts.status, &parts.headers, &body)
}

fn unreachable(text: &str) -> Refusal {
    Refusal {
        result: DialResult::Unreachable,
        text: text.to_owned(),
    }
}

/// An error's innermost words.
fn cause(error: &dyn std::error::Error) -> String {
    let mut root = error;
    while let Some(next) = root.source() {
        root = next;
    }
    root.to_string()
}

/// Best effort: a link works without either, later and less quick to die.
fn prepare(socket: &TcpStream) {
    let _ = socket.set_nodelay(true);
    let _ = socket2::SockRef::from(socket).set_tcp_user_timeout(Some(h2::PING_INTERVAL + h2::PING_TIMEOUT));
}

/// Counts a link as up for as long as it is.
struct UpGuard<'a>(&'a Node);

impl<'a> UpGuard<'a> {
    fn new(node: &'a Node) -> Self {
        node.metrics().links.at((LinkState::Up,)).inc();
        node.metrics().links.at((LinkState::Down,)).dec();
        Self(node)
    }
}

impl Drop for UpGuard<'_> {
    fn drop(&mut self) {
        self.0.metrics().links.at((LinkState::Up,)).dec();
        self.0.metrics().links.at((LinkState::Down,)).inc();
    }
}

#[cfg(test)]
mod tests;
