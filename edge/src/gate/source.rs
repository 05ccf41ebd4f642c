//! A node's answer as the gate reads it: data, then exactly one end.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::Body;
use iop_shared::wire::terminal::{NodeError, Terminal};

use super::normalized::Renderer;
use crate::link::NodeBody;

/// One thing read from a node's answer.
#[derive(Debug)]
pub(crate) enum Pulled {
    Data(Bytes),
    /// The provider's message is complete.
    Complete,
    /// The node's typed error.
    Failed(NodeError),
    /// The link ended without a terminal: fence unknown (link.md, Missing trailers).
    Lost,
}

/// Reads one attempt's body; after an end it keeps saying `Complete`.
pub(crate) struct Source {
    body: Option<NodeBody>,
    /// Of a run: its events become the bytes of a native answer.
    renderer: Option<Box<Renderer>>,
}

impl Source {
    pub(crate) fn new(body: NodeBody) -> Self {
        Self {
            body: Some(body),
            renderer: None,
        }
    }

    pub(crate) fn rendered(body: NodeBody, renderer: Renderer) -> Self {
        Self {
            body: Some(body),
            renderer: Some(Box::new(renderer)),
        }
    }

    /// Nothing to read.
    pub(crate) fn none() -> Self {
        Self {
            body: None,
            renderer: None,
        }
    }

    pub(crate) fn poll_pull(&mut self, cx: &mut Context<'_>) -> Poll<Pulled> {
        loop {
            let Some(body) = self.body.as_mut() else {
                return Poll::Ready(Pulled::Complete);
            };
            // Nothing that still comes could be read.
            if let Some(failure) = self.renderer.as_ref().and_then(|r| r.failure()) {
                let failed = Pulled::Failed(failure.clone());
                self.body = None;
                return Poll::Ready(failed);
            }
            let end = match ready!(Pin::new(body).poll_frame(cx)) {
                None | Some(Err(_)) => Pulled::Lost,
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if data.is_empty() => continue,
                    Ok(data) => match &mut self.renderer {
                        None => return Poll::Ready(Pulled::Data(data)),
                        Some(renderer) => {
                            let rendered = renderer.feed(&data);
                            if !rendered.is_empty() {
                                return Poll::Ready(Pulled::Data(rendered));
                            }
                            continue;
                        }
                    },
                    Err(frame) => match frame
                        .into_trailers()
                        .ok()
                        .as_ref()
                        .and_then(Terminal::from_trailers)
                    {
                        Some(Terminal::Complete { .. }) => Pulled::Complete,
                        Some(Terminal::Error(e)) => Pulled::Failed(e),
                        Some(Terminal::Cancelled) | None => Pulled::Lost,
                    },
                },
            };
            self.body = None;
            return Poll::Ready(end);
        }
    }

    pub(crate) async fn pull(&mut self) -> Pulled {
        std::future::poll_fn(|cx| self.poll_pull(cx)).await
    }
}
