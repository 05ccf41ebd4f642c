//! An answer on its way to a client: as a stream, or whole at its end. Who leaves does not end the run (D3).

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream::unfold;
use http::Response;
use http::header::{self, HeaderValue};
use iop_durable::ids::RunId;
use iop_shared::execution::Outcome;

use super::fault::{Fault, X_IOP_RUN_ID};
use super::pen::Pen;
use super::reader::{Answer, News, Reader};
use crate::app::App;
use crate::drain::Drain;
use crate::gate::{GateBody, RequestGuard};

const KEEP_ALIVE: Bytes = Bytes::from_static(b": keep-alive\n\n");

struct Streaming<P> {
    reader: Reader,
    pen: P,
    /// With it the workers stop: the run goes on at another edge, or here after the start.
    drain: Drain,
    /// A comment goes out after this long without a byte; `None`: never.
    interval: Option<Duration>,
    opened: bool,
    over: bool,
}

impl<P: Pen> Streaming<P> {
    async fn next(&mut self) -> Option<Bytes> {
        if !self.opened {
            self.opened = true;
            return Some(self.pen.opens());
        }
        while !self.over {
            let quiet = async {
                match self.interval {
                    Some(interval) => tokio::time::sleep(interval).await,
                    None => std::future::pending().await,
                }
            };
            let piece = tokio::select! {
                biased;
                news = self.reader.next() => match news {
                    Ok(news) => {
                        self.over = matches!(news, News::End(..));
                        self.pen.news(&news)
                    }
                    Err(problem) => {
                        self.over = true;
                        self.pen.breaks(&problem.into())
                    }
                },
                () = self.drain.started() => {
                    self.over = true;
                    self.pen.breaks(&Fault::draining(self.reader.run()))
                }
                () = quiet => KEEP_ALIVE,
            };
            if !piece.is_empty() {
                return Some(piece);
            }
        }
        None
    }
}

/// The answer as it comes.
pub(super) fn streamed(
    app: &Arc<App>,
    reader: Reader,
    pen: impl Pen,
    guard: RequestGuard,
) -> Response<GateBody> {
    let run = reader.run().clone();
    let streaming = Streaming {
        reader,
        pen,
        drain: app.drain.clone(),
        interval: app.settings.gate.keepalive_interval,
        opened: false,
        over: false,
    };
    let pieces = unfold(streaming, |mut streaming| async move {
        let piece = streaming.next().await?;
        Some((Ok::<_, std::convert::Infallible>(piece), streaming))
    });
    let body = GateBody::streamed(Body::from_stream(pieces), guard, Outcome::Success);
    let mut response = marked(Response::new(body), &run);
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// The answer at its end.
///
/// # Errors
/// `draining` when the process ends first; what does not pass of the store's.
pub(super) async fn collected(app: &App, mut reader: Reader) -> Result<Answer, Fault> {
    let mut answer = Answer::default();
    let run = reader.run().clone();
    loop {
        let news = tokio::select! {
            biased;
            news = reader.next() => news.map_err(|problem| Fault::from(problem).of(&run))?,
            () = app.drain.started() => return Err(Fault::draining(&run)),
        };
        match news {
            News::Part(part) => answer.take(part),
            News::End(end, usage) => {
                answer.end = Some(end);
                answer.usage = usage;
                return Ok(answer);
            }
        }
    }
}

/// A JSON answer about a run.
pub(super) fn whole(body: Bytes, run: &RunId, guard: RequestGuard) -> Response<GateBody> {
    let mut response = marked(Response::new(GateBody::full(body, guard, Outcome::Success)), run);
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn marked(mut response: Response<GateBody>, run: &RunId) -> Response<GateBody> {
    if let Ok(run) = HeaderValue::from_str(run.as_str()) {
        response.headers_mut().insert(X_IOP_RUN_ID, run);
    }
    response
}
