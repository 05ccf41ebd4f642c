//! What the node answers with: a run, a terminal of its own, a JSON document or the session's lines.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::Stream;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Response, StatusCode};
use http_body::{Body, Frame};
use iop_shared::openai::errors::ErrorObject;
use iop_shared::wire::event::RunEvent;
use iop_shared::wire::headers;
use iop_shared::wire::terminal::{NodeError, Terminal};

use crate::run::task::RunBody;

/// A response's body. A tunnel's is DATA as the provider sent it, then exactly one trailers frame; a run's is the lines
/// of its events, then the same, and its last line says what the trailers say.
///
/// It never tells its length: a `content-length` on the link would reset the stream of a provider that lied.
pub struct ResponseBody(Kind);

#[expect(
    clippy::large_enum_variant,
    reason = "nearly every body is a run; a box would be one more allocation per request"
)]
enum Kind {
    Run(RunBody),
    /// Boxed, so that a tunnel's body is no larger for it.
    Events(Box<Events>),
    /// The node answered by itself; `bool`: the trailers went out.
    Failed(Terminal, bool),
    Whole(Option<Bytes>),
    Lines(Option<Pin<Box<dyn Stream<Item = Bytes> + Send>>>),
}

/// A run of the normalized path.
struct Events {
    run: RunBody,
    /// While the last line is on its way before them.
    trailers: Option<HeaderMap>,
}

impl Events {
    fn terminal(&self) -> Option<&Terminal> {
        self.run.terminal().filter(|_| self.trailers.is_none())
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Frame<Bytes>>> {
        if let Some(trailers) = self.trailers.take() {
            return Poll::Ready(Some(Frame::trailers(trailers)));
        }
        let Some(frame) = std::task::ready!(self.run.poll_frame(cx)) else {
            return Poll::Ready(None);
        };
        Poll::Ready(Some(match (frame.into_trailers(), self.run.terminal()) {
            (Ok(trailers), Some(terminal)) => {
                self.trailers = Some(trailers);
                Frame::data(Bytes::from(RunEvent::terminal(terminal).to_line()))
            }
            (Ok(trailers), None) => Frame::trailers(trailers),
            (Err(frame), _) => frame,
        }))
    }
}

impl ResponseBody {
    /// The terminal, once it is known: after the trailers of a run, at once when the node answered by itself.
    pub fn terminal(&self) -> Option<&Terminal> {
        match &self.0 {
            Kind::Run(run) => run.terminal(),
            Kind::Events(events) => events.terminal(),
            Kind::Failed(terminal, _) => Some(terminal),
            Kind::Whole(_) | Kind::Lines(_) => None,
        }
    }

    pub(crate) fn run(run: RunBody) -> Self {
        Self(Kind::Run(run))
    }

    pub(crate) fn events(run: RunBody) -> Self {
        Self(Kind::Events(Box::new(Events { run, trailers: None })))
    }

    pub(crate) fn lines(lines: impl Stream<Item = Bytes> + Send + 'static) -> Self {
        Self(Kind::Lines(Some(Box::pin(lines))))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut self.0 {
            Kind::Run(run) => run.poll_frame(cx).map(|f| f.map(Ok)),
            Kind::Events(events) => events.poll_frame(cx).map(|f| f.map(Ok)),
            Kind::Failed(terminal, sent) => {
                let trailers =
                    (!std::mem::replace(sent, true)).then(|| Frame::trailers(terminal.to_trailers()));
                Poll::Ready(trailers.map(Ok))
            }
            Kind::Whole(bytes) => Poll::Ready(bytes.take().map(|b| Ok(Frame::data(b)))),
            Kind::Lines(lines) => {
                let Some(stream) = lines else {
                    return Poll::Ready(None);
                };
                let line = std::task::ready!(stream.as_mut().poll_next(cx));
                if line.is_none() {
                    *lines = None;
                }
                Poll::Ready(line.map(|l| Ok(Frame::data(l))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Run(run) => run.terminal().is_some(),
            Kind::Events(events) => events.terminal().is_some(),
            Kind::Failed(_, sent) => *sent,
            Kind::Whole(bytes) => bytes.is_none(),
            Kind::Lines(lines) => lines.is_none(),
        }
    }
}

/// A failure before any head of a provider: 200, `iop-origin: node`, no data, error trailers; always (link.md).
pub(crate) fn failed(error: NodeError) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody(Kind::Failed(Terminal::Error(error), false)));
    response
        .headers_mut()
        .insert(headers::ORIGIN, headers::ORIGIN_NODE);
    response
}

pub(crate) fn json(status: StatusCode, body: Bytes) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody(Kind::Whole((!body.is_empty()).then_some(body))));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
        .headers_mut()
        .insert(headers::ORIGIN, headers::ORIGIN_NODE);
    response
}

pub(crate) fn json_error(status: StatusCode, code: &str, message: &str) -> Response<ResponseBody> {
    let kind = if status.is_server_error() {
        "server_error"
    } else {
        "invalid_request_error"
    };
    let object = ErrorObject {
        message,
        kind,
        param: None,
        code: Some(code),
    };
    json(status, Bytes::from(object.body()))
}
