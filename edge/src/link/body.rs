//! A node's answer as the gate reads it: the embedded node's own body, or a stream of a link. Polled in place; holds
//! nothing back and starts no task. Dropping it cancels what the node was doing.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use super::session::LinkError;

/// DATA, then one trailers frame. An end without trailers is an end without a terminal (link.md, Missing trailers).
pub struct NodeBody(Kind);

enum Kind {
    Embedded(Box<iop_node::ResponseBody>),
    Link(Incoming),
}

impl From<iop_node::ResponseBody> for NodeBody {
    fn from(body: iop_node::ResponseBody) -> Self {
        Self(Kind::Embedded(Box::new(body)))
    }
}

impl From<Incoming> for NodeBody {
    fn from(body: Incoming) -> Self {
        Self(Kind::Link(body))
    }
}

impl Body for NodeBody {
    type Data = Bytes;
    type Error = LinkError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, LinkError>>> {
        match &mut self.0 {
            Kind::Embedded(body) => Pin::new(&mut **body)
                .poll_frame(cx)
                .map_err(|never| match never {}),
            Kind::Link(body) => Pin::new(body).poll_frame(cx).map_err(|_| LinkError::Lost),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Embedded(body) => body.is_end_stream(),
            Kind::Link(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Embedded(body) => body.size_hint(),
            Kind::Link(body) => body.size_hint(),
        }
    }
}
