//! A client with its hands on the socket: HTTP/1.1 written and read by hand, so that a test decides when to
//! read, when to stop reading and when to hang up, and sees whether a message was complete.

use std::io;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// No answer of these tests may take longer.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// Status and headers, in the order they came.
#[derive(Debug, Clone, Default)]
pub struct Head {
    pub status: u16,
    pub headers: Vec<(String, String)>,
}

impl Head {
    /// The first value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(k, _)| k.eq_ignore_ascii_case(name))
            .map(|(_, v)| v.as_str())
    }

    /// Every value of a header.
    pub fn all(&self, name: &str) -> Vec<&str> {
        self.headers
            .iter()
            .filter(|(k, _)| k.eq_ignore_ascii_case(name))
            .map(|(_, v)| v.as_str())
            .collect()
    }
}

/// A whole answer. `complete` is false when the connection ended before the message did.
#[derive(Debug, Clone)]
pub struct Answer {
    pub head: Head,
    pub body: Bytes,
    pub complete: bool,
}

impl Answer {
    pub fn status(&self) -> u16 {
        self.head.status
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.header(name)
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// When it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("no JSON ({e}) in {} {}", self.head.status, self.text()))
    }

    /// `error.code` of an OpenAI error, after checking that its four keys are there.
    ///
    /// # Panics
    /// When the answer is not in OpenAI's error shape.
    pub fn error_code(&self) -> String {
        let json = self.json();
        let error = json["error"]
            .as_object()
            .unwrap_or_else(|| panic!("no error object in {}", self.text()));
        for key in ["message", "type", "param", "code"] {
            assert!(error.contains_key(key), "error without {key}: {}", self.text());
        }
        let content_type = self.header("content-type").unwrap_or_default();
        assert!(content_type.starts_with("application/json"), "{content_type}");
        error["code"].as_str().unwrap_or_default().to_owned()
    }

    /// Checks status and code at once.
    ///
    /// # Panics
    /// When they differ.
    #[track_caller]
    pub fn assert_error(&self, status: u16, code: &str) {
        assert_eq!(
            (self.head.status, self.error_code().as_str()),
            (status, code),
            "{}",
            self.text()
        );
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Framing {
    Length(u64),
    Chunked,
    UntilClose,
    Done,
}

/// One connection.
pub struct Conn {
    stream: TcpStream,
    buf: BytesMut,
    framing: Framing,
    complete: bool,
}

impl Conn {
    /// Connects.
    ///
    /// # Errors
    /// When nobody listens.
    pub async fn open(addr: &str) -> io::Result<Self> {
        let stream = TcpStream::connect(addr).await?;
        stream.set_nodelay(true)?;
        Ok(Self::over(stream))
    }

    /// Speaks over a socket that the test prepared (small buffers).
    pub fn over(stream: TcpStream) -> Self {
        Self {
            stream,
            buf: BytesMut::new(),
            framing: Framing::Done,
            complete: true,
        }
    }

    /// Writes bytes as they are.
    ///
    /// # Errors
    /// When the peer is gone.
    pub async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await?;
        self.stream.flush().await
    }

    /// Writes a request head and body.
    ///
    /// # Errors
    /// When the peer is gone.
    pub async fn request(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<()> {
        let mut out = request_head(method, path, headers, Some(body.len()));
        if body.len() < 64 * 1024 {
            out.extend_from_slice(body);
            return self.send(&out).await;
        }
        self.send(&out).await?;
        self.send(body).await
    }

    /// Closes the writing half only.
    ///
    /// # Errors
    /// When the socket is gone.
    pub async fn half_close(&mut self) -> io::Result<()> {
        self.stream.shutdown().await
    }

    /// Reads the next head, interim ones included.
    ///
    /// # Errors
    /// When the connection ends before the head does, or after 30 s.
    pub async fn any_head(&mut self) -> io::Result<Head> {
        let read = async {
            loop {
                if let Some(end) = find(&self.buf, b"\r\n\r\n") {
                    let head = self.buf.split_to(end + 4);
                    return parse_head(&head);
                }
                self.fill().await?;
            }
        };
        let head = timed(read).await?;
        self.framing = if head.status < 200 || head.status == 204 || head.status == 304 {
            Framing::Done
        } else if head
            .header("transfer-encoding")
            .is_some_and(|v| v.eq_ignore_ascii_case("chunked"))
        {
            Framing::Chunked
        } else if let Some(length) = head.header("content-length") {
            Framing::Length(
                length
                    .parse()
                    .map_err(|_| io::Error::other("bad content-length"))?,
            )
        } else {
            Framing::UntilClose
        };
        self.complete = self.framing == Framing::Done;
        Ok(head)
    }

    /// Reads the final head.
    ///
    /// # Errors
    /// As [`Conn::any_head`].
    pub async fn head(&mut self) -> io::Result<Head> {
        loop {
            let head = self.any_head().await?;
            if head.status >= 200 {
                return Ok(head);
            }
        }
    }

    /// The next piece of payload; `None` when the message ended or the connection did.
    ///
    /// # Errors
    /// After 30 s of silence.
    pub async fn piece(&mut self) -> io::Result<Option<Bytes>> {
        match timed(self.piece_inner()).await {
            Ok(piece) => Ok(piece),
            Err(e) if e.kind() == io::ErrorKind::TimedOut => Err(e),
            // Reset or unexpected end: the message is cut.
            Err(_) => Ok(None),
        }
    }

    async fn piece_inner(&mut self) -> io::Result<Option<Bytes>> {
        match self.framing {
            Framing::Done => Ok(None),
            Framing::Length(0) => {
                self.finish();
                Ok(None)
            }
            Framing::Length(left) => {
                if self.buf.is_empty() {
                    self.fill().await?;
                }
                let n = self.buf.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                self.framing = Framing::Length(left - n as u64);
                Ok(Some(self.buf.split_to(n).freeze()))
            }
            Framing::Chunked => {
                let line_end = loop {
                    if let Some(end) = find(&self.buf, b"\r\n") {
                        break end;
                    }
                    self.fill().await?;
                };
                let size_text = std::str::from_utf8(&self.buf[..line_end]).unwrap_or_default();
                let size = usize::from_str_radix(size_text.split(';').next().unwrap_or_default().trim(), 16)
                    .map_err(|_| io::Error::other("bad chunk size"))?;
                // A trailer section is not expected: the last chunk is followed by a bare line end.
                while self.buf.len() < line_end + 2 + size + 2 {
                    self.fill().await?;
                }
                self.buf.advance(line_end + 2);
                let data = self.buf.split_to(size).freeze();
                self.buf.advance(2);
                if size == 0 {
                    self.finish();
                    return Ok(None);
                }
                Ok(Some(data))
            }
            Framing::UntilClose => {
                if self.buf.is_empty() && self.stream.read_buf(&mut self.buf).await? == 0 {
                    self.finish();
                    return Ok(None);
                }
                Ok(Some(self.buf.split().freeze()))
            }
        }
    }

    fn finish(&mut self) {
        self.framing = Framing::Done;
        self.complete = true;
    }

    /// Reads payload until `needle` was seen; gives everything read, without losing what follows.
    ///
    /// # Panics
    /// When the message ends first.
    pub async fn until(&mut self, needle: &str) -> String {
        let mut seen = String::new();
        while !seen.contains(needle) {
            match self.piece().await.unwrap() {
                Some(piece) => seen.push_str(&String::from_utf8_lossy(&piece)),
                None => panic!("the message ended before {needle:?}: {seen:?}"),
            }
        }
        seen
    }

    /// Reads the rest of the message.
    ///
    /// # Errors
    /// After 30 s of silence.
    pub async fn body(&mut self) -> io::Result<Bytes> {
        let mut all = BytesMut::new();
        while let Some(piece) = self.piece().await? {
            all.extend_from_slice(&piece);
        }
        Ok(all.freeze())
    }

    /// Reads a whole answer.
    ///
    /// # Errors
    /// When there is no head, or after 30 s of silence.
    pub async fn answer(&mut self) -> io::Result<Answer> {
        let head = self.head().await?;
        let body = self.body().await?;
        Ok(Answer {
            head,
            body,
            complete: self.complete,
        })
    }

    /// Whether the last message ended as its framing says.
    pub fn complete(&self) -> bool {
        self.complete
    }

    /// Waits until the peer closes.
    ///
    /// # Errors
    /// After 30 s.
    pub async fn closed(&mut self) -> io::Result<()> {
        timed(async {
            loop {
                match self.stream.read_buf(&mut self.buf).await {
                    Ok(0) | Err(_) => return Ok(()),
                    Ok(_) => self.buf.clear(),
                }
            }
        })
        .await
    }

    async fn fill(&mut self) -> io::Result<()> {
        self.buf.reserve(64 * 1024);
        if self.stream.read_buf(&mut self.buf).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }
}

/// Where requests go and with which key.
#[derive(Debug, Clone)]
pub struct Client {
    pub addr: String,
    pub key: Option<String>,
}

impl Client {
    /// A client without a key.
    pub fn new(addr: &str) -> Self {
        Self {
            addr: addr.to_owned(),
            key: None,
        }
    }

    /// The same client with another key.
    #[must_use]
    pub fn with_key(&self, key: &str) -> Self {
        Self {
            addr: self.addr.clone(),
            key: Some(key.to_owned()),
        }
    }

    /// One request on its own connection.
    ///
    /// # Panics
    /// When there is no answer.
    pub async fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        match self.try_request(method, path, headers, body).await {
            Ok(answer) => answer,
            Err(e) => panic!("{method} {path}: {e}"),
        }
    }

    /// One request on its own connection.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn try_request(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<Answer> {
        self.start(method, path, headers, body).await?.answer().await
    }

    /// Sends a request and leaves the answer to the caller.
    ///
    /// # Errors
    /// When the connection fails.
    pub async fn start(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<Conn> {
        let mut conn = Conn::open(&self.addr).await?;
        let bearer = self.key.as_ref().map(|k| format!("Bearer {k}"));
        let mut all: Vec<(&str, &str)> = headers.to_vec();
        if let Some(bearer) = &bearer {
            all.push(("authorization", bearer));
        }
        if !all.iter().any(|(k, _)| k.eq_ignore_ascii_case("content-type")) && !body.is_empty() {
            all.push(("content-type", "application/json"));
        }
        conn.request(method, path, &all, body).await?;
        Ok(conn)
    }

    /// `GET`.
    pub async fn get(&self, path: &str) -> Answer {
        self.request("GET", path, &[], b"").await
    }

    /// `POST` of JSON.
    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.request("POST", path, &[], body.to_string().as_bytes()).await
    }

    /// Starts a `POST` of JSON.
    ///
    /// # Panics
    /// When the connection fails.
    pub async fn open(&self, path: &str, body: &Value) -> Conn {
        self.start("POST", path, &[], body.to_string().as_bytes())
            .await
            .unwrap()
    }
}

/// A request head by hand; without a length no `content-length` is written.
pub fn request_head(method: &str, path: &str, headers: &[(&str, &str)], length: Option<usize>) -> Vec<u8> {
    let mut out = format!("{method} {path} HTTP/1.1\r\n");
    if !headers.iter().any(|(k, _)| k.eq_ignore_ascii_case("host")) {
        out.push_str("host: test\r\n");
    }
    for (k, v) in headers {
        out.push_str(&format!("{k}: {v}\r\n"));
    }
    if let Some(length) = length.filter(|l| *l > 0 || method != "GET") {
        out.push_str(&format!("content-length: {length}\r\n"));
    }
    out.push_str("\r\n");
    out.into_bytes()
}

/// The `data` of every complete event of an LF- or CRLF-framed stream.
pub fn sse_data(text: &str) -> Vec<String> {
    text.replace("\r\n", "\n")
        .split("\n\n")
        .filter_map(|event| {
            let lines: Vec<&str> = event
                .lines()
                .filter_map(|l| l.strip_prefix("data:"))
                .map(|l| l.strip_prefix(' ').unwrap_or(l))
                .collect();
            (!lines.is_empty()).then(|| lines.join("\n"))
        })
        .collect()
}

/// Where `needle` begins.
pub fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|w| w == needle)
}

/// Parses an HTTP/1.1 response head.
///
/// # Errors
/// When it is none.
pub fn parse_head(bytes: &[u8]) -> io::Result<Head> {
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.split("\r\n");
    let status_line = lines.next().unwrap_or_default();
    let status = status_line.split(' ').nth(1).and_then(|s| s.parse().ok());
    let status = status.ok_or_else(|| io::Error::other(format!("bad status line {status_line:?}")))?;
    let headers = lines
        .filter_map(|l| l.split_once(':'))
        .map(|(k, v)| (k.trim().to_ascii_lowercase(), v.trim().to_owned()))
        .collect();
    Ok(Head { status, headers })
}

async fn timed<T>(work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    match tokio::time::timeout(ANSWER_WITHIN, work).await {
        Ok(result) => result,
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "no answer within 30 s")),
    }
}
