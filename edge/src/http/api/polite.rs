//! A request body that is read to its end even when nobody wants it: a client that is still uploading reads its refusal only if
//! its bytes are taken meanwhile.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use crate::http::openai::linger;

/// Lingers on what is left when it is dropped.
pub(super) struct Polite<B: Body<Data = Bytes> + Send + Unpin + 'static> {
    body: Option<B>,
    /// The client sends nothing before it is told to.
    waits: bool,
}

impl<B: Body<Data = Bytes> + Send + Unpin + 'static> Polite<B> {
    pub(super) fn new(body: B, waits: bool) -> Self {
        Self {
            body: Some(body),
            waits,
        }
    }
}

impl<B: Body<Data = Bytes> + Send + Unpin + 'static> Body for Polite<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::default, Body::size_hint)
    }
}

impl<B: Body<Data = Bytes> + Send + Unpin + 'static> Drop for Polite<B> {
    fn drop(&mut self) {
        if let Some(body) = self.body.take().filter(|_| !self.waits) {
            linger(body);
        }
    }
}
