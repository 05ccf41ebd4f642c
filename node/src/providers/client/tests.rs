//! Whole requests over loopback, and what a provider sees of them.

use std::io::{Read as _, Write as _};
use std::pin::pin;

use futures_util::FutureExt;
use futures_util::future::join_all;
use http::StatusCode;
use http_body_util::{BodyExt, Full, StreamBody};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Barrier, watch};

use super::*;
use crate::tasks::{self, AbortOnDrop, Kind};

/// More than any of this takes, and less than somebody would wait for.
const LONG: Duration = Duration::from_secs(5);
/// 004's close grace.
const GRACE: Duration = Duration::from_secs(2);

/// A provider whose behaviour the path names.
struct Server {
    at: String,
    seen: Arc<Seen>,
    _accept: AbortOnDrop,
}

#[derive(Default)]
struct Seen {
    /// The heads that came, each with the number of its socket.
    heads: Mutex<Vec<(usize, String)>>,
    sockets: watch::Sender<usize>,
    /// Peers that hung up while they were owed an answer.
    gone: watch::Sender<usize>,
}

impl Server {
    async fn start() -> Self {
        Self::at("127.0.0.1:0").await
    }

    async fn at(address: &str) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let at = listener.local_addr().unwrap().to_string();
        let seen = Arc::new(Seen::default());
        let shared = Arc::clone(&seen);
        let together = Arc::new(Barrier::new(5));
        let accept = tasks::spawn(Kind::Session, "server", async move {
            while let Ok((socket, _)) = listener.accept().await {
                let (seen, together) = (Arc::clone(&shared), Arc::clone(&together));
                seen.sockets.send_modify(|n| *n += 1);
                let number = *seen.sockets.borrow();
                tasks::spawn(Kind::Session, "socket", async move {
                    // An error is a peer that hung up.
                    let _ = serve(socket, number, &seen, &together).await;
                });
            }
        });
        Self {
            at,
            seen,
            _accept: AbortOnDrop(accept),
        }
    }

    fn target(&self, path: &str) -> Target {
        Target::parse(&format!("http://{}{path}", self.at)).unwrap()
    }

    fn sockets(&self) -> usize {
        *self.seen.sockets.borrow()
    }

    /// The sockets on which requests came, in their order.
    fn used(&self) -> Vec<usize> {
        self.seen.heads.lock().iter().map(|(socket, _)| *socket).collect()
    }

    fn last_head(&self) -> String {
        self.seen.heads.lock().last().unwrap().1.clone()
    }

    async fn hung_up(&self) {
        let mut gone = self.seen.gone.subscribe();
        let hung_up = gone.wait_for(|n| *n == 1);
        assert!(tokio::time::timeout(GRACE, hung_up).await.is_ok());
    }
}

async fn serve(mut socket: TcpStream, number: usize, seen: &Seen, together: &Barrier) -> std::io::Result<()> {
    let mut buf = Vec::new();
    loop {
        let end = loop {
            if let Some(end) = buf.windows(4).position(|w| w == b"\r\n\r\n") {
                break end + 4;
            }
            if socket.read_buf(&mut buf).await? == 0 {
                return Ok(());
            }
        };
        let head = String::from_utf8_lossy(&buf[..end]).into_owned();
        buf.drain(..end);
        seen.heads.lock().push((number, head.clone()));
        let path = head.split(' ').nth(1).unwrap();
        let length = head.lines().find_map(|l| l.strip_prefix("content-length: "));
        let length = if path == "/early" {
            0
        } else {
            length.map_or(0, |l| l.parse().unwrap())
        };
        while buf.len() < length {
            if socket.read_buf(&mut buf).await? == 0 {
                return Ok(());
            }
        }
        buf.drain(..length);
        let answer = match path {
            "/chunked" => "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
            "/trailers" => {
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-t\r\n\r\n2\r\nok\r\n0\r\nx-t: 1\r\n\r\n"
            }
            "/none" => "HTTP/1.1 204 No Content\r\n\r\n",
            "/empty" => "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            "/informed" => {
                "HTTP/1.1 103 Early Hints\r\nx: y\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
            }
            "/close" => "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
            "/old" => "HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
            "/early" => "HTTP/1.1 413 Payload Too Large\r\ncontent-length: 0\r\n\r\n",
            "/upgraded" => "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
            "/to-the-end" => {
                socket.write_all(b"HTTP/1.1 200 OK\r\n\r\nok").await?;
                return Ok(());
            }
            "/hang-up" => return Ok(()),
            "/endless" => {
                socket
                    .write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")
                    .await?;
                while matches!(socket.read_buf(&mut buf).await, Ok(n) if n > 0) {}
                seen.gone.send_modify(|n| *n += 1);
                return Ok(());
            }
            "/together" => {
                together.wait().await;
                "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
            }
            _ if head.starts_with("HEAD ") => "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n",
            _ => "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        };
        socket.write_all(answer.as_bytes()).await?;
        // No more than this is read of it.
        if path == "/early" {
            std::future::pending::<()>().await;
        }
    }
}

fn client() -> Client {
    Client::new(LONG)
}

async fn get(client: &Client, to: Target) -> Result<Response<ClientBody>, ClientError> {
    client
        .send(Method::GET, to, HeaderMap::new(), SendBody::empty())
        .await
}

/// Status and body of a whole answer.
async fn whole(client: &Client, to: Target) -> (StatusCode, Bytes) {
    let answer = get(client, to).await.unwrap();
    let status = answer.status();
    (status, answer.into_body().collect().await.unwrap().to_bytes())
}

async fn kind_of_failure(client: &Client, to: Target) -> ClientErrorKind {
    get(client, to).await.map(|_| ()).unwrap_err().kind
}

#[tokio::test]
async fn requests_after_one_another_use_one_socket_however_their_answers_end() {
    let (server, client) = (Server::start().await, client());
    for path in [
        "/",
        "/chunked",
        "/trailers",
        "/informed",
        "/none",
        "/empty",
        "/chunked",
        "/",
    ] {
        let (status, body) = whole(&client, server.target(path)).await;
        let is_empty = matches!(path, "/none" | "/empty");
        assert_eq!(body, if is_empty { "" } else { "ok" }, "{path}");
        assert_eq!(status.as_u16(), if path == "/none" { 204 } else { 200 });
        let head = client
            .send(
                Method::HEAD,
                server.target("/head"),
                HeaderMap::new(),
                SendBody::empty(),
            )
            .await;
        // Nothing of its body need be read: it has none.
        drop(head.unwrap());
    }
    assert_eq!((server.sockets(), server.used()), (1, vec![1; 16]));
}

#[tokio::test]
async fn an_answer_read_to_its_length_is_at_its_end_without_another_poll() {
    let (server, client) = (Server::start().await, client());
    for _ in 0..3 {
        let mut body = get(&client, server.target("/")).await.unwrap().into_body();
        let frame = body.frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), "ok");
        assert!(body.is_end_stream());
    }
    assert_eq!(server.used(), [1, 1, 1]);
}

#[tokio::test]
async fn requests_at_the_same_time_use_as_many_sockets_as_they_are() {
    let (server, client) = (Server::start().await, client());
    for _ in 0..2 {
        let five = (0..5).map(|_| whole(&client, server.target("/together")));
        assert!(join_all(five).await.iter().all(|(_, body)| body == "ok"));
        assert_eq!(server.sockets(), 5);
        for _ in 0..5 {
            whole(&client, server.target("/")).await;
        }
        assert_eq!(server.sockets(), 5);
    }
    // The one used last is used again.
    let used = server.used();
    assert_eq!(used[5..10], [used[5]; 5]);
    assert_eq!(used[15..], [used[15]; 5]);
}

#[tokio::test]
async fn a_socket_belongs_to_its_origin() {
    let (one, other, client) = (Server::start().await, Server::start().await, client());
    for _ in 0..2 {
        for server in [&one, &other] {
            whole(&client, server.target("/")).await;
        }
    }
    assert_eq!((one.used(), other.used()), (vec![1, 1], vec![1, 1]));
}

#[tokio::test]
async fn a_socket_idle_for_four_seconds_is_not_used_again() {
    let (server, client) = (Server::start().await, client());
    for (idle, sockets) in [(0, 1), (3900, 1), (4000, 2), (3900, 2)] {
        tokio::time::pause();
        tokio::time::advance(Duration::from_millis(idle)).await;
        tokio::time::resume();
        whole(&client, server.target("/")).await;
        assert_eq!(server.sockets(), sockets, "{idle}");
    }
}

#[tokio::test]
async fn a_socket_that_the_answer_ends_is_not_used_again() {
    let (server, client) = (Server::start().await, client());
    for (n, path) in ["/close", "/old", "/to-the-end"].into_iter().enumerate() {
        assert_eq!(whole(&client, server.target(path)).await.1, "ok");
        assert_eq!(server.sockets(), n + 1, "{path}");
    }
    let upgraded = whole(&client, server.target("/upgraded")).await;
    assert_eq!(upgraded, (StatusCode::SWITCHING_PROTOCOLS, Bytes::new()));
    whole(&client, server.target("/")).await;
    assert_eq!(server.used(), [1, 2, 3, 4, 5]);
}

#[tokio::test]
async fn a_socket_that_still_sends_its_last_request_is_passed_over() {
    let (server, client) = (Server::start().await, client());
    let body = SendBody::new(Full::new(Bytes::from(vec![0; 32 << 20])));
    let early = client
        .send(Method::POST, server.target("/early"), HeaderMap::new(), body)
        .await
        .unwrap();
    assert_eq!(early.status(), StatusCode::PAYLOAD_TOO_LARGE);
    drop(early);
    for _ in 0..2 {
        whole(&client, server.target("/")).await;
    }
    assert_eq!(server.used(), [1, 2, 2]);
}

/// Reads one head and answers; the head.
fn answer_one(socket: &mut std::net::TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        assert_eq!(socket.read(&mut byte).unwrap(), 1);
        head.push(byte[0]);
    }
    socket
        .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        .unwrap();
    String::from_utf8(head).unwrap()
}

#[tokio::test]
async fn a_request_that_a_closed_socket_never_took_is_sent_on_another() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (close, closing) = std::sync::mpsc::channel::<()>();
    let (closed, is_closed) = std::sync::mpsc::channel();
    let server = std::thread::spawn(move || {
        let (mut first, _) = listener.accept().unwrap();
        let mut heads = vec![answer_one(&mut first)];
        closing.recv().unwrap();
        drop(first);
        closed.send(()).unwrap();
        let (mut second, _) = listener.accept().unwrap();
        heads.push(answer_one(&mut second));
        // Nothing else comes, on this socket or another.
        assert_eq!(second.read(&mut [0]).unwrap(), 0);
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err());
        heads
    });
    let client = client();
    whole(&client, Target::parse(&format!("{url}/1")).unwrap()).await;
    // This thread runs nothing while the server closes, and gets to know of it in the turn in which it sends: the
    // socket is closed, its connection does not know yet.
    close.send(()).unwrap();
    is_closed.recv().unwrap();
    tokio::task::yield_now().await;
    let body = SendBody::new(Full::new(Bytes::from_static(b"")));
    let to = Target::parse(&format!("{url}/2")).unwrap();
    let answer = client
        .send(Method::POST, to, HeaderMap::new(), body)
        .await
        .unwrap();
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "ok");
    drop(client);
    let heads = tokio::task::spawn_blocking(|| server.join().unwrap())
        .await
        .unwrap();
    assert!(heads[0].starts_with("GET /1 ") && heads[1].starts_with("POST /2 "));
}

#[tokio::test]
async fn a_request_that_was_sent_is_not_sent_again() {
    let (server, client) = (Server::start().await, client());
    whole(&client, server.target("/")).await;
    let kind = kind_of_failure(&client, server.target("/hang-up")).await;
    assert_eq!((kind, server.used()), (ClientErrorKind::Cut, vec![1, 1]));
    // Neither is one on a new socket.
    let kind = kind_of_failure(&client, server.target("/hang-up")).await;
    assert_eq!((kind, server.used()), (ClientErrorKind::Cut, vec![1, 1, 2]));
}

#[tokio::test]
async fn a_new_socket_that_is_closed_at_once_is_tried_once() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = Target::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
    let accepted = Mutex::new(0);
    let closing = async {
        loop {
            drop(listener.accept().await.unwrap());
            *accepted.lock() += 1;
        }
    };
    let client = client();
    let kind = tokio::select! {
        kind = kind_of_failure(&client, to) => kind,
        () = closing => unreachable!(),
    };
    assert_eq!((kind, *accepted.lock()), (ClientErrorKind::Cut, 1));
}

#[tokio::test]
async fn a_body_dropped_early_closes_its_socket_and_the_fence_sees_it() {
    let (server, client) = (Server::start().await, client());
    let mut hold = Hold::default();
    let mut body = client
        .send_held(
            Method::GET,
            server.target("/endless"),
            HeaderMap::new(),
            SendBody::empty(),
            &mut hold,
        )
        .await
        .unwrap()
        .into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "ok");
    let mut end = pin!(hold.end());
    assert!(end.as_mut().now_or_never().is_none());
    drop(body);
    assert!(tokio::time::timeout(GRACE, end).await.is_ok());
    server.hung_up().await;
    whole(&client, server.target("/")).await;
    assert_eq!(server.used(), [1, 2]);
}

/// Accepts, and never says a word.
async fn mute() -> (TcpListener, Target) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    // A TLS handshake needs an answer.
    let to = format!("https://{}", listener.local_addr().unwrap());
    (listener, Target::parse(&to).unwrap())
}

#[tokio::test]
async fn a_handshake_without_an_answer_ends_with_the_connect_timeout() {
    let (listener, to) = mute().await;
    let client = Client::new(Duration::from_millis(50));
    let error = get(&client, to).await.map(|_| ()).unwrap_err();
    assert_eq!(error.kind, ClientErrorKind::Connect);
    assert_eq!(error.to_string(), "no connection within connect_timeout");
    drop(listener);
}

#[tokio::test]
async fn a_client_that_leaves_while_it_connects_holds_nothing() {
    let (listener, to) = mute().await;
    let client = client();
    let mut hold = Hold::default();
    let (mut socket, _) = {
        let sending = client.send_held(Method::GET, to, HeaderMap::new(), SendBody::empty(), &mut hold);
        tokio::select! {
            _ = sending => unreachable!(),
            accepted = listener.accept() => accepted.unwrap(),
        }
    };
    assert!(hold.end().now_or_never().is_some());
    let mut hello = Vec::new();
    let read = tokio::time::timeout(GRACE, socket.read_to_end(&mut hello));
    // A reset is an end as well.
    drop(read.await.unwrap());
}

#[tokio::test]
async fn nobody_there_is_no_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = Target::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
    drop(listener);
    assert_eq!(kind_of_failure(&client(), to).await, ClientErrorKind::Connect);
}

#[tokio::test]
async fn an_upload_whose_source_fails_is_no_fault_of_the_provider() {
    let (server, client) = (Server::start().await, client());
    for path in ["/", "/chunked"] {
        let source = futures_util::stream::iter([
            Ok(Frame::data(Bytes::from_static(b"begun"))),
            Err(std::io::Error::other("gone")),
        ]);
        let headers = HeaderMap::from_iter([(http::header::CONTENT_LENGTH, HeaderValue::from_static("10"))]);
        let body = SendBody::new(StreamBody::new(source));
        let error = client
            .send(Method::POST, server.target(path), headers, body)
            .await
            .map(|_| ())
            .unwrap_err();
        assert_eq!(error.kind, ClientErrorKind::Upload);
        assert_eq!(error.to_string(), "the request's body ended early");
    }
}

#[tokio::test]
async fn the_head_on_the_wire_is_this_one() {
    let (server, client) = (Server::start().await, client());
    let headers = || {
        let mut headers = HeaderMap::new();
        headers.insert("x-first", HeaderValue::from_static("1"));
        headers.append("x-many", HeaderValue::from_static("a"));
        headers.append("x-many", HeaderValue::from_static("b"));
        headers
    };
    let at = server.at.clone();
    for (url, body, head) in [
        (
            format!("http://{at}"),
            "",
            format!("GET / HTTP/1.1\r\nx-first: 1\r\nx-many: a\r\nx-many: b\r\nhost: {at}\r\n\r\n"),
        ),
        (
            format!("http://{at}?a=b"),
            "",
            format!("GET /?a=b HTTP/1.1\r\nx-first: 1\r\nx-many: a\r\nx-many: b\r\nhost: {at}\r\n\r\n"),
        ),
        (
            format!("http://user:secret@{at}/v1/a%20b/../c?x=1"),
            "{}",
            format!(
                "POST /v1/a%20b/../c?x=1 HTTP/1.1\r\nx-first: 1\r\nx-many: a\r\nx-many: b\r\nhost: {at}\r\n\
                 content-length: 2\r\n\r\n"
            ),
        ),
    ] {
        let method = if body.is_empty() {
            Method::GET
        } else {
            Method::POST
        };
        let body = SendBody::new(Full::new(Bytes::from_static(body.as_bytes())));
        let to = Target::parse(&url).unwrap();
        let answer = client.send(method, to, headers(), body).await.unwrap();
        answer.into_body().collect().await.unwrap();
        assert_eq!(server.last_head(), head);
    }
    let mut own = headers();
    own.insert(HOST, HeaderValue::from_static("configured"));
    let answer = client
        .send(Method::GET, server.target("/"), own, SendBody::empty())
        .await;
    answer.unwrap().into_body().collect().await.unwrap();
    assert_eq!(
        server.last_head(),
        "GET / HTTP/1.1\r\nx-first: 1\r\nx-many: a\r\nx-many: b\r\nhost: configured\r\n\r\n"
    );
}

#[test]
fn a_host_is_name_and_port_and_nothing_else() {
    for (url, host) in [
        ("http://a.example/v1", "a.example"),
        ("http://a.example:80/v1", "a.example"),
        ("https://a.example:443", "a.example"),
        ("http://a.example:443/v1", "a.example:443"),
        ("https://a.example:80/v1", "a.example:80"),
        ("http://127.0.0.1:8000/v1", "127.0.0.1:8000"),
        ("http://[::1]:8080/v1", "[::1]:8080"),
        ("https://[2001:db8::1]/v1", "[2001:db8::1]"),
        ("https://user:secret@a.example:8443/v1", "a.example:8443"),
        ("http://user:secret@[::1]/v1", "[::1]"),
    ] {
        assert_eq!(Target::parse(url).unwrap().host, host, "{url}");
    }
    for url in [
        "",
        "/v1",
        "a.example",
        "ftp://a.example/",
        "http://",
        "http:///v1",
    ] {
        assert!(Target::parse(url).is_none(), "{url}");
    }
}
