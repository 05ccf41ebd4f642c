//! A provider under the test's control, down to the byte: an HTTP/1.1 server whose answers are async code.
//!
//! Every request is recorded; every socket is counted; a handler that waits notices at once when its peer
//! hangs up, and the time of that is kept.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::client::find;

/// One request as it arrived.
#[derive(Debug, Clone)]
pub struct Received {
    pub method: String,
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub body: Bytes,
    /// When the peer hung up on this exchange before the handler was done with it.
    pub hung_up: Option<Instant>,
    /// The handler is done.
    pub done: bool,
}

impl Received {
    /// The first value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(k, _)| k.eq_ignore_ascii_case(name))
            .map(|(_, v)| v.as_str())
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// When it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

#[derive(Default)]
struct State {
    received: Vec<Received>,
    open_sockets: usize,
    sockets: usize,
}

struct Shared {
    state: Mutex<State>,
    changed: watch::Sender<u64>,
}

impl Shared {
    fn change<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        let value = f(&mut self.state.lock());
        self.changed.send_modify(|n| *n += 1);
        value
    }
}

type Answering = Pin<Box<dyn Future<Output = io::Result<()>> + Send>>;
type Handler = dyn Fn(Exchange) -> Answering + Send + Sync;

/// A running stub; stops accepting when dropped.
pub struct Stub {
    pub addr: String,
    shared: Arc<Shared>,
    accept: tokio::task::JoinHandle<()>,
}

impl Stub {
    /// Serves every request with `answer`, its body read beforehand.
    pub async fn start<F, Fut>(answer: F) -> Self
    where
        F: Fn(Exchange) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = io::Result<()>> + Send + 'static,
    {
        let answer = Arc::new(answer);
        Self::start_unread(move |mut exchange| {
            let answer = Arc::clone(&answer);
            async move {
                exchange.read_body().await?;
                answer(exchange).await
            }
        })
        .await
    }

    /// Serves every request with `answer`, which decides itself whether to read the body.
    ///
    /// # Panics
    /// When loopback is not there.
    pub async fn start_unread<F, Fut>(answer: F) -> Self
    where
        F: Fn(Exchange) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = io::Result<()>> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: watch::channel(0).0,
        });
        let handler: Arc<Handler> = Arc::new(move |exchange| Box::pin(answer(exchange)));
        let accept = tokio::spawn({
            let shared = Arc::clone(&shared);
            async move {
                while let Ok((stream, _)) = listener.accept().await {
                    tokio::spawn(connection(stream, Arc::clone(&handler), Arc::clone(&shared)));
                }
            }
        });
        Self { addr, shared, accept }
    }

    /// The base URL for a provider's configuration.
    pub fn url(&self) -> String {
        format!("http://{}/v1", self.addr)
    }

    /// Everything received so far.
    pub fn received(&self) -> Vec<Received> {
        self.shared.state.lock().received.clone()
    }

    /// The newest request.
    ///
    /// # Panics
    /// When there is none.
    pub fn last(&self) -> Received {
        self.shared.state.lock().received.last().cloned().unwrap()
    }

    /// Sockets that the peer has open towards the stub.
    pub fn open_sockets(&self) -> usize {
        self.shared.state.lock().open_sockets
    }

    /// Sockets ever accepted.
    pub fn sockets(&self) -> usize {
        self.shared.state.lock().sockets
    }

    /// Waits until `n` requests have arrived.
    ///
    /// # Panics
    /// When they have not after 20 s.
    pub async fn arrived(&self, n: usize) {
        self.until(
            &format!("{n} requests at the provider"),
            Duration::from_secs(20),
            |s| s.received.len() >= n,
        )
        .await;
    }

    /// Waits until the peer has hung up on request `i`; the bound counts from now.
    ///
    /// # Panics
    /// When it has not.
    pub async fn hung_up(&self, i: usize, bound: Duration) {
        self.until(&format!("hang-up on request {i}"), bound, |s| {
            s.received.get(i).is_some_and(|r| r.hung_up.is_some())
        })
        .await;
    }

    /// Waits until no handler runs any more.
    ///
    /// # Panics
    /// When one still does after the bound.
    pub async fn idle(&self, bound: Duration) {
        self.until("an idle provider", bound, |s| s.received.iter().all(|r| r.done))
            .await;
    }

    async fn until(&self, what: &str, bound: Duration, fact: impl Fn(&State) -> bool) {
        let mut changed = self.shared.changed.subscribe();
        let wait = async {
            loop {
                changed.borrow_and_update();
                if fact(&self.shared.state.lock()) {
                    return;
                }
                if changed.changed().await.is_err() {
                    return;
                }
            }
        };
        if tokio::time::timeout(bound, wait).await.is_err() {
            let state = self.shared.state.lock();
            let seen: Vec<_> = state
                .received
                .iter()
                .map(|r| (&r.method, &r.path, r.done, r.hung_up.is_some()))
                .collect();
            panic!(
                "{what}: not within {bound:?}; seen {seen:?}, {} sockets open",
                state.open_sockets
            );
        }
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

/// One request and the means to answer it.
pub struct Exchange {
    pub method: String,
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub body: Bytes,
    index: usize,
    conn: Option<Wire>,
    back: Option<tokio::sync::oneshot::Sender<Wire>>,
    shared: Arc<Shared>,
    /// The connection serves another request after this one.
    reusable: bool,
}

struct Wire {
    stream: TcpStream,
    buf: BytesMut,
}

impl Exchange {
    /// The first value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(k, _)| k.eq_ignore_ascii_case(name))
            .map(|(_, v)| v.as_str())
    }

    /// The body as JSON; `null` when it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// Reads the request body, whichever way it is framed.
    ///
    /// # Errors
    /// When the peer hangs up in the middle.
    pub async fn read_body(&mut self) -> io::Result<()> {
        if self.header("expect").is_some() {
            self.raw(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
        }
        let chunked = self
            .header("transfer-encoding")
            .is_some_and(|v| v.eq_ignore_ascii_case("chunked"));
        let length: usize = self
            .header("content-length")
            .and_then(|v| v.parse().ok())
            .unwrap_or(0);
        let read = match (&mut self.conn, chunked) {
            (Some(wire), true) => wire.chunked_body().await,
            (Some(wire), false) => wire.sized_body(length).await,
            (None, _) => Err(io::ErrorKind::NotConnected.into()),
        };
        match read {
            Ok(body) => {
                self.body = body.clone();
                let index = self.index;
                self.shared.change(|s| s.received[index].body = body);
                Ok(())
            }
            Err(e) => {
                self.note_hang_up();
                Err(e)
            }
        }
    }

    /// A whole answer with `content-length`.
    ///
    /// # Errors
    /// When the peer is gone.
    pub async fn reply(&mut self, status: u16, headers: &[(&str, &str)], body: &[u8]) -> io::Result<()> {
        let mut out = response_head(status, headers);
        out.extend_from_slice(format!("content-length: {}\r\n\r\n", body.len()).as_bytes());
        out.extend_from_slice(body);
        self.raw(&out).await?;
        self.reusable = true;
        Ok(())
    }

    /// A JSON answer.
    ///
    /// # Errors
    /// When the peer is gone.
    pub async fn json_reply(&mut self, status: u16, body: &serde_json::Value) -> io::Result<()> {
        self.reply(
            status,
            &[("content-type", "application/json")],
            body.to_string().as_bytes(),
        )
        .await
    }

    /// The head of a chunked answer.
    ///
    /// # Errors
    /// When the peer is gone.
    pub async fn head(&mut self, status: u16, headers: &[(&str, &str)]) -> io::Result<()> {
        let mut out = response_head(status, headers);
        out.extend_from_slice(b"transfer-encoding: chunked\r\n\r\n");
        self.raw(&out).await
    }

    /// The head of a stream of events.
    ///
    /// # Errors
    /// When the peer is gone.
    pub async fn sse(&mut self) -> io::Result<()> {
        self.head(200, &[("content-type", "text/event-stream")]).await
    }

    /// One chunk of the body, in one write.
    ///
    /// # Errors
    /// When the peer is gone.
    pub async fn chunk(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let mut out = format!("{:x}\r\n", bytes.len()).into_bytes();
        out.extend_from_slice(bytes);
        out.extend_from_slice(b"\r\n");
        self.raw(&out).await
    }

    /// One `data:` event.
    ///
    /// # Errors
    /// When the peer is gone.
    pub async fn data(&mut self, data: &str) -> io::Result<()> {
        self.chunk(format!("data: {data}\n\n").as_bytes()).await
    }

    /// The end of a chunked answer.
    ///
    /// # Errors
    /// When the peer is gone.
    pub async fn end(&mut self) -> io::Result<()> {
        self.raw(b"0\r\n\r\n").await?;
        self.reusable = true;
        Ok(())
    }

    /// Bytes as they are. Notices a peer that hangs up while the write is blocked.
    ///
    /// # Errors
    /// When the peer is gone.
    pub async fn raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(wire) = &mut self.conn else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let result = wire.stream.write_all(bytes).await;
        if result.is_err() {
            self.note_hang_up();
        }
        result
    }

    /// Waits for `fact`, or for the peer to hang up, whichever comes first.
    ///
    /// # Errors
    /// When the peer hung up.
    pub async fn until<T>(&mut self, fact: impl Future<Output = T>) -> io::Result<T> {
        tokio::select! {
            biased;
            result = hang_up(&mut self.conn) => { self.note_hang_up(); Err(result) }
            value = fact => Ok(value),
        }
    }

    /// Waits until the peer hangs up.
    pub async fn gone(&mut self) {
        hang_up(&mut self.conn).await;
        self.note_hang_up();
    }

    /// Closes the connection at once, with a reset when `reset`.
    pub fn cut(&mut self, reset: bool) {
        if let Some(wire) = self.conn.take() {
            if reset {
                let _ = socket2::SockRef::from(&wire.stream).set_linger(Some(Duration::ZERO));
            }
            drop(wire);
            self.shared.change(|s| s.open_sockets -= 1);
        }
        self.reusable = false;
    }

    fn note_hang_up(&self) {
        let index = self.index;
        self.shared.change(|s| {
            s.received[index].hung_up.get_or_insert_with(Instant::now);
        });
    }
}

impl Drop for Exchange {
    /// Marks the exchange as answered and hands the connection back when it can serve more.
    fn drop(&mut self) {
        let index = self.index;
        let closing = match (self.conn.take(), self.back.take()) {
            (Some(wire), Some(back)) if self.reusable => back.send(wire).is_err(),
            (Some(_), _) => true,
            (None, _) => false,
        };
        self.shared.change(|s| {
            s.received[index].done = true;
            s.open_sockets -= usize::from(closing);
        });
    }
}

impl Wire {
    async fn fill(&mut self) -> io::Result<()> {
        self.buf.reserve(256 * 1024);
        if self.stream.read_buf(&mut self.buf).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    async fn sized_body(&mut self, length: usize) -> io::Result<Bytes> {
        while self.buf.len() < length {
            self.fill().await?;
        }
        Ok(self.buf.split_to(length).freeze())
    }

    async fn chunked_body(&mut self) -> io::Result<Bytes> {
        let mut body = BytesMut::new();
        loop {
            let line_end = loop {
                if let Some(end) = find(&self.buf, b"\r\n") {
                    break end;
                }
                self.fill().await?;
            };
            let size = std::str::from_utf8(&self.buf[..line_end]).unwrap_or_default();
            let size =
                usize::from_str_radix(size.trim(), 16).map_err(|_| io::Error::other("bad chunk size"))?;
            while self.buf.len() < line_end + 2 + size + 2 {
                self.fill().await?;
            }
            self.buf.advance(line_end + 2);
            body.extend_from_slice(&self.buf.split_to(size));
            self.buf.advance(2);
            if size == 0 {
                return Ok(body.freeze());
            }
        }
    }
}

async fn connection(stream: TcpStream, handler: Arc<Handler>, shared: Arc<Shared>) {
    let _ = stream.set_nodelay(true);
    shared.change(|s| {
        s.open_sockets += 1;
        s.sockets += 1;
    });
    let mut wire = Wire {
        stream,
        buf: BytesMut::new(),
    };
    loop {
        let end = loop {
            if let Some(end) = find(&wire.buf, b"\r\n\r\n") {
                break end;
            }
            if wire.fill().await.is_err() {
                shared.change(|s| s.open_sockets -= 1);
                return;
            }
        };
        let head = wire.buf.split_to(end + 4);
        let text = String::from_utf8_lossy(&head).into_owned();
        let mut lines = text.split("\r\n");
        let mut request_line = lines.next().unwrap_or_default().split(' ');
        let (method, path) = (
            request_line.next().unwrap_or_default(),
            request_line.next().unwrap_or_default(),
        );
        let headers: Vec<(String, String)> = lines
            .filter_map(|l| l.split_once(':'))
            .map(|(k, v)| (k.trim().to_ascii_lowercase(), v.trim().to_owned()))
            .collect();
        let received = Received {
            method: method.to_owned(),
            path: path.to_owned(),
            headers: headers.clone(),
            body: Bytes::new(),
            hung_up: None,
            done: false,
        };
        let index = shared.change(|s| {
            s.received.push(received);
            s.received.len() - 1
        });
        let (back, returned) = tokio::sync::oneshot::channel();
        let exchange = Exchange {
            method: method.to_owned(),
            path: path.to_owned(),
            headers,
            body: Bytes::new(),
            index,
            conn: Some(wire),
            back: Some(back),
            shared: Arc::clone(&shared),
            reusable: false,
        };
        // An error is a peer that hung up; it is on record already.
        let _ = handler(exchange).await;
        match returned.await {
            Ok(next) => wire = next,
            Err(_) => return,
        }
    }
}

async fn hang_up(conn: &mut Option<Wire>) -> io::Error {
    let Some(wire) = conn else {
        return io::ErrorKind::NotConnected.into();
    };
    loop {
        match wire.stream.read_buf(&mut wire.buf).await {
            Ok(0) => return io::ErrorKind::UnexpectedEof.into(),
            Ok(_) => {}
            Err(e) => return e,
        }
    }
}

fn response_head(status: u16, headers: &[(&str, &str)]) -> Vec<u8> {
    let reason = http::StatusCode::from_u16(status)
        .ok()
        .and_then(|s| s.canonical_reason())
        .unwrap_or("Odd");
    let mut out = format!("HTTP/1.1 {status} {reason}\r\n");
    for (k, v) in headers {
        out.push_str(&format!("{k}: {v}\r\n"));
    }
    out.into_bytes()
}
