//! The node's own listener: `/metrics`, `/livez`, `/readyz`; open, and nothing else (gateway.md §13).

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;

use crate::service::Node;
use crate::tasks::{self, Kind};

/// After an accept that failed, such as for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves for as long as the process lives.
pub async fn serve(node: Node, listener: TcpListener) {
    loop {
        let socket = match listener.accept().await {
            Ok((socket, _)) => socket,
            Err(e) => {
                tracing::warn!(reason = %e, "cannot accept on metrics_listen");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let node = node.clone();
        tasks::spawn(Kind::Session, "metrics", async move {
            let service = service_fn(|request: Request<Incoming>| {
                let response = answer(&node, request.method(), request.uri().path());
                async move { Ok::<_, Infallible>(response) }
            });
            // A scraper that hangs up is no news.
            let _ = http1::Builder::new()
                .timer(TokioTimer::new())
                .serve_connection(TokioIo::new(socket), service)
                .await;
        });
    }
}

fn answer(node: &Node, method: &Method, path: &str) -> Response<Full<Bytes>> {
    if !matches!(*method, Method::GET | Method::HEAD) {
        return text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed\n");
    }
    match path {
        "/livez" => text(StatusCode::OK, "ok\n"),
        "/readyz" if node.is_draining() => text(StatusCode::SERVICE_UNAVAILABLE, "draining\n"),
        "/readyz" => text(StatusCode::OK, "ok\n"),
        "/metrics" => match node.metrics().encode() {
            Ok(page) => {
                let mut response = Response::new(Full::new(Bytes::from(page)));
                let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
                response.headers_mut().insert(CONTENT_TYPE, kind);
                response
            }
            Err(e) => {
                tracing::error!(reason = %e, "metrics cannot be written");
                text(StatusCode::INTERNAL_SERVER_ERROR, "metrics cannot be written\n")
            }
        },
        _ => text(StatusCode::NOT_FOUND, "not found\n"),
    }
}

fn text(status: StatusCode, body: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from_static(body.as_bytes())));
    *response.status_mut() = status;
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}
