//! A client that speaks HTTP/2 and decides itself when to read: it gives window only for what it has read.

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::Value;
use tokio::net::TcpStream;

/// What a stream may send ahead of its reader, in bytes.
const WINDOW: u32 = 64 * 1024;

/// One connection.
pub struct Http2 {
    addr: String,
    sender: SendRequest<Full<Bytes>>,
}

/// An answer of which the head has come.
pub struct Unread {
    pub status: u16,
    body: Incoming,
}

/// How a stream ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// By `END_STREAM`, with as many bytes as announced.
    Clean,
    /// By the peer's `RST_STREAM`.
    Reset,
    /// In another way: the connection is gone, or the peer broke the protocol.
    Other(String),
}

impl Http2 {
    /// Connects.
    ///
    /// # Panics
    /// When nobody there speaks HTTP/2.
    pub async fn open(addr: &str) -> Self {
        let socket = TcpStream::connect(addr).await.unwrap();
        socket.set_nodelay(true).unwrap();
        let (sender, connection) = Builder::new(TokioExecutor::new())
            .initial_stream_window_size(WINDOW)
            .handshake(TokioIo::new(socket))
            .await
            .unwrap();
        tokio::spawn(connection);
        Self {
            addr: addr.to_owned(),
            sender,
        }
    }

    /// `POST` of JSON; gives the answer when its head is there.
    ///
    /// # Panics
    /// When there is none.
    pub async fn post(&mut self, path: &str, body: &Value) -> Unread {
        let request = http::Request::post(format!("http://{}{path}", self.addr))
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.to_string())))
            .unwrap();
        let response = self.sender.send_request(request).await.unwrap();
        Unread {
            status: response.status().as_u16(),
            body: response.into_body(),
        }
    }
}

impl Unread {
    /// Reads to the end of the stream, whatever that is.
    pub async fn rest(mut self) -> (Bytes, End) {
        let mut all = BytesMut::new();
        loop {
            match self.body.frame().await {
                None => return (all.freeze(), End::Clean),
                Some(Ok(frame)) => all.extend_from_slice(&frame.into_data().unwrap_or_default()),
                Some(Err(error)) => return (all.freeze(), End::of(&error)),
            }
        }
    }
}

impl End {
    fn of(error: &hyper::Error) -> Self {
        let cause = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
        // h2's word for a reset that came, not for one that it sent.
        if cause.starts_with("stream error received") {
            End::Reset
        } else {
            End::Other(cause)
        }
    }
}
