//! Reading a request body within its bounds: one body (`body_limit`) and all of them together (`body_memory`).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::FutureExt;
use http::header::{self, HeaderMap};
use http_body::Body;
use http_body_util::BodyExt;
use prometheus::IntGauge;

use crate::error::{ApiError, ErrorKind};

/// The bytes that all buffered bodies may hold together (gateway.md §13, Snapshot).
#[derive(Clone)]
pub struct BodyMemory(Arc<Inner>);

struct Inner {
    limit: usize,
    used: AtomicUsize,
    gauge: IntGauge,
}

impl BodyMemory {
    pub fn new(limit_bytes: usize, gauge: IntGauge) -> Self {
        Self(Arc::new(Inner {
            limit: limit_bytes,
            used: AtomicUsize::new(0),
            gauge,
        }))
    }

    /// Room for a body that is here already.
    ///
    /// # Errors
    /// `capacity_exhausted` when all bodies together are at the limit.
    pub(crate) fn hold(&self, bytes: usize) -> Result<Reservation, ApiError> {
        let mut held = self.reserve();
        held.grow(bytes)?;
        Ok(held)
    }

    fn reserve(&self) -> Reservation {
        Reservation {
            memory: self.0.clone(),
            bytes: 0,
        }
    }
}

/// A part of the memory, given back on drop.
pub(crate) struct Reservation {
    memory: Arc<Inner>,
    bytes: usize,
}

impl Reservation {
    fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        let taken = self
            .memory
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(bytes).filter(|sum| *sum <= self.memory.limit)
            });
        if taken.is_err() {
            return Err(ApiError::new(
                ErrorKind::CapacityExhausted,
                "Too many request bodies are being held; try again.",
            )
            .with_retry_after(std::time::Duration::from_secs(1)));
        }
        self.bytes += bytes;
        self.memory.gauge.add(i64::try_from(bytes).unwrap_or(i64::MAX));
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.memory.used.fetch_sub(self.bytes, Ordering::Relaxed);
        self.memory
            .gauge
            .sub(i64::try_from(self.bytes).unwrap_or(i64::MAX));
    }
}

/// Largest first allocation on the word of a `content-length` alone, in bytes.
const TRUST: usize = 1 << 20;

/// Reads a whole body. A client that sends nothing for `idle` is refused: what it announced is held against the memory
/// of all. Too large is said by `content-length` alone, before a byte is read (G24).
pub(crate) async fn read<B>(
    headers: &HeaderMap,
    mut body: B,
    limit_bytes: usize,
    idle: Duration,
    memory: &BodyMemory,
) -> Result<(Bytes, Reservation), ApiError>
where
    B: Body<Data = Bytes> + Unpin,
{
    let announced = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.parse::<u64>().ok());
    if announced.is_some_and(|n| n > limit_bytes as u64) {
        return Err(too_large(limit_bytes));
    }
    let announced = announced.and_then(|n| usize::try_from(n).ok());
    let mut held = memory.reserve();
    held.grow(announced.unwrap_or(0))?;
    let mut first = Bytes::new();
    let mut all = BytesMut::new();
    loop {
        // hyper has the whole of a small body at once: a timer is made only where there is something to wait for.
        let frame = match body.frame().now_or_never() {
            Some(frame) => frame,
            None => tokio::time::timeout(idle, body.frame()).await.map_err(|_| {
                ApiError::new(
                    ErrorKind::InvalidRequest,
                    "The request body did not arrive in time.",
                )
            })?,
        };
        let Some(frame) = frame else { break };
        let frame = frame
            .map_err(|_| ApiError::new(ErrorKind::ClientClosedRequest, "The request body broke off."))?;
        let Ok(data) = frame.into_data() else { continue };
        let total = first.len() + all.len() + data.len();
        if total > limit_bytes {
            return Err(too_large(limit_bytes));
        }
        if total > held.bytes {
            held.grow(total - held.bytes)?;
        }
        if first.is_empty() && all.is_empty() {
            first = data;
            continue;
        }
        if all.is_empty() {
            all.reserve(announced.unwrap_or(0).min(TRUST).max(total));
            all.extend_from_slice(&first);
            first = Bytes::new();
        }
        all.extend_from_slice(&data);
    }
    Ok((if all.is_empty() { first } else { all.freeze() }, held))
}

fn too_large(limit_bytes: usize) -> ApiError {
    ApiError::new(
        ErrorKind::RequestTooLarge,
        format!("The request body is larger than the limit of {limit_bytes} bytes."),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::{Full, StreamBody};

    const IDLE: Duration = Duration::from_secs(5);

    fn memory(limit: usize) -> BodyMemory {
        BodyMemory::new(limit, IntGauge::new("g", "g").unwrap())
    }

    fn chunks(parts: &[&'static str]) -> impl Body<Data = Bytes, Error = std::convert::Infallible> + Unpin {
        let frames: Vec<_> = parts
            .iter()
            .map(|p| Ok(http_body::Frame::data(Bytes::from_static(p.as_bytes()))))
            .collect();
        StreamBody::new(futures_util::stream::iter(frames))
    }

    #[tokio::test]
    async fn a_body_is_joined_and_its_memory_given_back() {
        let m = memory(100);
        let (body, held) = read(&HeaderMap::new(), chunks(&["ab", "", "cd", "e"]), 10, IDLE, &m)
            .await
            .unwrap();
        assert_eq!(&body[..], b"abcde");
        assert_eq!(m.0.used.load(Ordering::Relaxed), 5);
        assert_eq!(m.0.gauge.get(), 5);
        drop(held);
        assert_eq!(m.0.used.load(Ordering::Relaxed), 0);
        assert_eq!(m.0.gauge.get(), 0);
    }

    #[tokio::test]
    async fn too_large_is_said_by_length_alone_and_by_count() {
        let m = memory(100);
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_LENGTH, 11.into());
        let e = read(&headers, Full::new(Bytes::new()), 10, IDLE, &m)
            .await
            .err()
            .unwrap();
        assert_eq!(e.kind, ErrorKind::RequestTooLarge);
        let e = read(&HeaderMap::new(), chunks(&["123456", "123456"]), 10, IDLE, &m)
            .await
            .err()
            .unwrap();
        assert_eq!(e.kind, ErrorKind::RequestTooLarge);
        assert_eq!(m.0.used.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn all_bodies_together_are_bounded() {
        let m = memory(8);
        let first = read(&HeaderMap::new(), chunks(&["12345"]), 10, IDLE, &m)
            .await
            .unwrap();
        let e = read(&HeaderMap::new(), chunks(&["1234"]), 10, IDLE, &m)
            .await
            .err()
            .unwrap();
        assert_eq!(e.kind, ErrorKind::CapacityExhausted);
        drop(first);
        assert!(
            read(&HeaderMap::new(), chunks(&["1234"]), 10, IDLE, &m)
                .await
                .is_ok()
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_sends_nothing_is_refused_and_holds_nothing() {
        let m = memory(100);
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_LENGTH, 10.into());
        let silent = StreamBody::new(futures_util::stream::pending::<
            Result<http_body::Frame<Bytes>, std::convert::Infallible>,
        >());
        let e = read(&headers, silent, 10, IDLE, &m).await.err().unwrap();
        assert_eq!(e.kind, ErrorKind::InvalidRequest);
        assert_eq!(m.0.used.load(Ordering::Relaxed), 0);
    }
}
