//! A provider's HTTP body as a source of plain bytes: decoded where the plan says so, gathered where its length is
//! unknown. Buffers one batch at most; what is not asked for stays with the provider.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use async_compression::tokio::bufread::{BrotliDecoder, GzipDecoder, ZlibDecoder, ZstdDecoder};
use async_compression::zstd::DParameter;
use bytes::{Bytes, BytesMut};
use futures_util::Stream;
use http_body::Body;
use iop_shared::execution::FailureCode;
use iop_shared::wire::terminal::NodeError;
use tokio::io::AsyncRead;
use tokio_util::io::{StreamReader, poll_read_buf};

use super::encoding::Coding;
use super::gather::{Gather, Source};
use crate::providers::client::ClientBody;

/// RFC 9659: no zstd window of a web response is larger than 8 MiB.
const ZSTD_WINDOW_LOG: u32 = 23;
/// Decoded bytes per read.
const DECODED: usize = 8 << 10;

/// A provider's body on its way to the edge.
pub(crate) enum HttpSource {
    /// Of a known length: its frames are as large as they come.
    Whole(Plain<ClientBody>),
    Stream(Gather<Plain<ClientBody>>),
    Decoded(Gather<Decoded>),
}

impl HttpSource {
    pub(crate) fn new(body: ClientBody, coding: Option<Coding>) -> Self {
        let plain = Plain { body };
        match coding {
            Some(coding) => HttpSource::Decoded(Gather::new(Decoded::new(plain, coding))),
            None if plain.body.size_hint().exact().is_some() => HttpSource::Whole(plain),
            None => HttpSource::Stream(Gather::new(plain)),
        }
    }

    pub(crate) fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, NodeError>>> {
        match self {
            HttpSource::Whole(s) => s.poll_data(cx),
            HttpSource::Stream(s) => s.poll_data(cx),
            HttpSource::Decoded(s) => s.poll_data(cx),
        }
    }

    /// Holds bytes that leave at one of the next polls.
    pub(crate) fn has_some(&self) -> bool {
        match self {
            HttpSource::Whole(_) => false,
            HttpSource::Stream(s) => s.has_some(),
            HttpSource::Decoded(s) => s.has_some(),
        }
    }
}

/// The data frames of a body; trailers of a provider end here.
pub(crate) struct Plain<B> {
    body: B,
}

impl<B: Body<Data = Bytes> + Unpin> Source for Plain<B> {
    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, NodeError>>> {
        loop {
            return Poll::Ready(match std::task::ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => Some(Ok(data)),
                    Err(_) => continue,
                },
                // The library's text may name the URL; that it was cut is all there is to know.
                Some(Err(_)) => Some(Err(cut("the provider hung up before its answer ended"))),
                None => None,
            });
        }
    }

    fn is_end(&self) -> bool {
        self.body.is_end_stream()
    }
}

fn cut(text: &str) -> NodeError {
    NodeError::new(FailureCode::ProviderCut, text)
}

/// The same frames as the reader that decoders want; an error keeps its `NodeError` inside.
struct Frames<B>(Plain<B>);

impl<B: Body<Data = Bytes> + Unpin> Stream for Frames<B> {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0
            .poll_data(cx)
            .map(|item| item.map(|r| r.map_err(|e| io::Error::other(Cut(e)))))
    }
}

#[derive(Debug, thiserror::Error)]
#[error("cut")]
struct Cut(NodeError);

/// A decoder over a body.
pub(crate) struct Decoded {
    reader: Pin<Box<dyn AsyncRead + Send>>,
    buf: BytesMut,
}

impl Decoded {
    fn new<B>(plain: Plain<B>, coding: Coding) -> Self
    where
        B: Body<Data = Bytes> + Send + Unpin + 'static,
    {
        let frames = StreamReader::new(Frames(plain));
        let reader: Pin<Box<dyn AsyncRead + Send>> = match coding {
            Coding::Gzip => {
                let mut d = GzipDecoder::new(frames);
                d.multiple_members(true);
                Box::pin(d)
            }
            Coding::Deflate => Box::pin(ZlibDecoder::new(frames)),
            Coding::Brotli => Box::pin(BrotliDecoder::new(frames)),
            Coding::Zstd => {
                let mut d = ZstdDecoder::with_params(frames, &[DParameter::window_log_max(ZSTD_WINDOW_LOG)]);
                d.multiple_members(true);
                Box::pin(d)
            }
        };
        Self {
            reader,
            buf: BytesMut::new(),
        }
    }
}

impl Source for Decoded {
    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, NodeError>>> {
        self.buf.reserve(DECODED);
        match std::task::ready!(poll_read_buf(self.reader.as_mut(), cx, &mut self.buf)) {
            Ok(0) => Poll::Ready(None),
            Ok(_) => Poll::Ready(Some(Ok(self.buf.split().freeze()))),
            Err(e) => Poll::Ready(Some(Err(match e.downcast::<Cut>() {
                Ok(Cut(inner)) => inner,
                Err(_) => cut("the provider's encoded answer is broken"),
            }))),
        }
    }

    fn is_end(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use async_compression::tokio::write::{BrotliEncoder, GzipEncoder, ZlibEncoder, ZstdEncoder};
    use http_body::Frame;
    use tokio::io::{AsyncWrite, AsyncWriteExt};
    use tokio::sync::mpsc;

    use super::*;

    /// A body fed by the test.
    struct Fed(mpsc::UnboundedReceiver<Result<Bytes, io::Error>>);
    impl Body for Fed {
        type Data = Bytes;
        type Error = io::Error;
        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
            self.0.poll_recv(cx).map(|o| o.map(|r| r.map(Frame::data)))
        }
    }

    type Enc = Box<dyn FnOnce(Vec<u8>) -> Box<dyn Encoder>>;
    trait Encoder {
        fn inner(&self) -> &Vec<u8>;
        fn io(&mut self) -> &mut (dyn AsyncWrite + Unpin);
    }
    macro_rules! encoder {
        ($($t:ident),*) => { $(impl Encoder for $t<Vec<u8>> {
            fn inner(&self) -> &Vec<u8> { self.get_ref() }
            fn io(&mut self) -> &mut (dyn AsyncWrite + Unpin) { self }
        })* };
    }
    encoder!(GzipEncoder, ZlibEncoder, BrotliEncoder, ZstdEncoder);

    #[tokio::test]
    async fn every_event_leaves_when_the_encoder_flushed_it() {
        let codings: Vec<(Coding, Enc)> = vec![
            (Coding::Gzip, Box::new(|v| Box::new(GzipEncoder::new(v)))),
            (Coding::Deflate, Box::new(|v| Box::new(ZlibEncoder::new(v)))),
            (Coding::Brotli, Box::new(|v| Box::new(BrotliEncoder::new(v)))),
            (Coding::Zstd, Box::new(|v| Box::new(ZstdEncoder::new(v)))),
        ];
        for (coding, make) in codings {
            let (tx, rx) = mpsc::unbounded_channel();
            let mut decoded = Gather::new(Decoded::new(Plain { body: Fed(rx) }, coding));
            let mut enc = make(Vec::new());
            let mut sent = 0;
            for i in 0..5 {
                let event = format!("data: {{\"n\":{i}}}\n\n");
                enc.io().write_all(event.as_bytes()).await.unwrap();
                enc.io().flush().await.unwrap();
                let bytes = Bytes::copy_from_slice(&enc.inner()[sent..]);
                sent = enc.inner().len();
                tx.send(Ok(bytes)).unwrap();
                // The stream is still open: an event that waited for the next one would hang here.
                let got = poll_fn(|cx| decoded.poll_data(cx)).await.unwrap().unwrap();
                assert_eq!(got, event.as_bytes(), "{coding:?}");
            }
            enc.io().shutdown().await.unwrap();
            tx.send(Ok(Bytes::copy_from_slice(&enc.inner()[sent..]))).unwrap();
            drop(tx);
            assert_eq!(poll_fn(|cx| decoded.poll_data(cx)).await, None, "{coding:?}");
        }
    }

    #[tokio::test]
    async fn a_cut_and_a_corrupt_encoding_are_both_typed() {
        let (tx, rx) = mpsc::unbounded_channel();
        let mut decoded = Decoded::new(Plain { body: Fed(rx) }, Coding::Gzip);
        tx.send(Err(io::Error::from(io::ErrorKind::ConnectionReset)))
            .unwrap();
        let e = poll_fn(|cx| decoded.poll_data(cx)).await.unwrap().unwrap_err();
        assert_eq!(e, cut("the provider hung up before its answer ended"));

        let (tx, rx) = mpsc::unbounded_channel();
        let mut decoded = Decoded::new(Plain { body: Fed(rx) }, Coding::Gzip);
        tx.send(Ok(Bytes::from_static(b"this is no gzip at all")))
            .unwrap();
        let e = poll_fn(|cx| decoded.poll_data(cx)).await.unwrap().unwrap_err();
        assert_eq!(e, cut("the provider's encoded answer is broken"));
    }
}
