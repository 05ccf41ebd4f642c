//! One accepted connection: HTTP/2 with the edge as client, live while the session stream speaks (link.md).
//!
//! Ends for exactly one reason, logged once. Ending gives up the seat and the connection's last handle here; the
//! connection itself closes when the last stream that uses it has ended.

use std::future::Future;
use std::sync::Arc;

use http::{Request, StatusCode, Uri};
use http_body_util::BodyExt;
use hyper::client::conn::http2;
use hyper::rt::{Executor, Read, Write};
use hyper_util::rt::TokioTimer;
use iop_shared::ids::ConnectionGeneration;
use iop_shared::label_enum;
use iop_shared::openai::request::SplicedBody;
use iop_shared::wire::session::{Advertisement, SessionLine};
use iop_shared::wire::{SESSION_PATH, h2};

use super::body::NodeBody;
use super::handshake::Hello;
use super::lines::Lines;
use super::registry::Registry;
use super::session::Session;
use crate::tasks::{self, Kind};

label_enum! {
    /// How a session ended.
    pub(super) enum Ended {
        /// The node said goodbye.
        Closed => "closed",
        /// A newer connection of the node took over, or the edge drains.
        Released => "released",
        /// The connection broke, or no ping came back.
        Lost => "lost",
        /// No valid line came in time.
        Silent => "silent",
        /// The node did not serve a session.
        NoSession => "no_session",
        /// A line was not one of this version, or too long.
        BadLine => "bad_line",
        /// The node advertised another id than it shook hands with.
        ForeignId => "foreign_node_id",
    }
}

/// Starts hyper's tasks the way every task is started. One of them is the connection itself.
#[derive(Debug, Clone, Copy)]
struct Tasks;

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Tasks {
    fn execute(&self, future: F) {
        tasks::spawn(Kind::Session, "link_stream", future);
    }
}

/// The settings of link.md; each has ended a whole connection somewhere.
fn builder() -> http2::Builder<Tasks> {
    let mut builder = http2::Builder::new(Tasks);
    builder
        .timer(TokioTimer::new())
        .initial_stream_window_size(h2::EDGE_STREAM_WINDOW)
        .initial_connection_window_size(h2::EDGE_CONNECTION_WINDOW)
        .max_concurrent_reset_streams(h2::EDGE_CONCURRENT_RESET_STREAMS)
        .max_local_error_reset_streams(None)
        .max_header_list_size(h2::MAX_HEADER_LIST)
        .keep_alive_interval(h2::PING_INTERVAL)
        .keep_alive_timeout(h2::PING_TIMEOUT)
        .keep_alive_while_idle(true);
    builder
}

/// Serves an upgraded connection until its session ends.
pub(super) async fn serve<I>(
    io: I,
    hello: Hello,
    generation: ConnectionGeneration,
    registry: &Arc<Registry>,
) -> Ended
where
    I: Read + Write + Unpin + Send + 'static,
{
    let Hello { node_id, instance } = hello;
    let ended = match builder().handshake(io).await {
        Err(_) => Ended::Lost,
        Ok((sender, connection)) => {
            tasks::spawn(Kind::Session, "link", async move {
                if let Err(error) = connection.await {
                    tracing::debug!(connection_generation = generation.0, %error, "a link's connection failed");
                }
            });
            let session = Arc::new(Session::linked(node_id.clone(), generation, sender));
            talk(&session, instance, registry).await
        }
    };
    let (node, connection_generation, reason) = (node_id.as_str(), generation.0, ended.as_str());
    match ended {
        Ended::Closed | Ended::Released => {
            tracing::info!(node, connection_generation, reason, "a node's session ended");
        }
        Ended::Lost | Ended::Silent | Ended::NoSession | Ended::BadLine | Ended::ForeignId => {
            tracing::warn!(node, connection_generation, reason, "a node's session ended");
        }
    }
    ended
}

async fn talk(session: &Arc<Session>, instance: Option<Box<str>>, registry: &Arc<Registry>) -> Ended {
    let begun = tokio::time::timeout(h2::SESSION_DEADLINE, begin(session)).await;
    let (mut stream, advertisement) = match begun {
        Err(_) => return Ended::Silent,
        Ok(Err(ended)) => return ended,
        Ok(Ok(begun)) => begun,
    };
    let Some(_seat) = registry.up(session, instance, &advertisement) else {
        return Ended::Released;
    };
    tracing::info!(
        node = %session.node_id,
        connection_generation = session.generation.0,
        version = advertisement.version,
        providers = advertisement.providers.len(),
        "a node is connected"
    );
    let pool = registry.pool();
    loop {
        let line = tokio::select! {
            biased;
            () = session.ended() => return Ended::Released,
            line = stream.next() => line,
        };
        match line {
            Ok(SessionLine::Advertisement(a)) if a.node_id != session.node_id => return Ended::ForeignId,
            Ok(SessionLine::Advertisement(a)) => pool.advertised(session.generation, &a),
            Ok(SessionLine::Load(l)) => pool.load(session.generation, &l.load),
            Err(ended) => return ended,
        }
    }
}

/// Opens the session stream and reads its first line.
async fn begin(session: &Session) -> Result<(SessionStream, Advertisement), Ended> {
    let mut request = Request::new(SplicedBody::default());
    *request.uri_mut() = Uri::from_static(SESSION_PATH);
    let response = session.call(request).await.map_err(|_| Ended::Lost)?;
    if response.status() != StatusCode::OK {
        return Err(Ended::NoSession);
    }
    let mut stream = SessionStream {
        body: response.into_body(),
        lines: Lines::default(),
    };
    match stream.next().await? {
        SessionLine::Advertisement(a) if a.node_id == session.node_id => Ok((stream, a)),
        SessionLine::Advertisement(_) => Err(Ended::ForeignId),
        SessionLine::Load(_) => Err(Ended::BadLine),
    }
}

struct SessionStream {
    body: NodeBody,
    lines: Lines,
}

impl SessionStream {
    /// Cancel-safe: what was read stays.
    async fn next(&mut self) -> Result<SessionLine, Ended> {
        loop {
            if let Some(line) = self.lines.next().map_err(|_| Ended::BadLine)? {
                return SessionLine::parse(&line).map_err(|_| Ended::BadLine);
            }
            match self.body.frame().await {
                None => return Err(Ended::Closed),
                Some(Err(_)) => return Err(Ended::Lost),
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        self.lines.push(data);
                    }
                }
            }
        }
    }
}
