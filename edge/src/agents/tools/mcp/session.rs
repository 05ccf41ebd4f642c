//! Sessions with MCP servers: made when first needed, shared by calls, made anew before a call and never during one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use iop_durable::runner::CallError;
use parking_lot::Mutex;
use rmcp::ServiceError;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, ClientCapabilities, ClientConfig, ClientRequest,
    ElicitationCapability, Implementation, PingRequest, ProtocolVersion,
};
use rmcp::service::{
    ClientInitializeError, ClientLifecycleMode, ClientServiceExt as _, RoleClient, RunningService,
};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::common::client_side_sse::ExponentialBackoff;
use rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig;
use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, timeout};

use super::{Server, answer};
use crate::agents::tools::client::Clients;

/// A session that was used within this time is taken to be there; an older one is asked first.
const FRESH: Duration = Duration::from_secs(1);
/// How long a server may take to say that it knows a session, or to say whether it speaks without sessions.
const PROBE: Duration = Duration::from_secs(5);
/// A session that nobody used for this long is given up.
const IDLE: Duration = Duration::from_secs(600);
/// How often an event stream that was cut is taken up again. This repeats no call.
const RESUMES: usize = 3;
/// Calls that one session has under way; more than workers can start.
const CONCURRENT: usize = 4096;

/// A digest of URL and headers: a map of it holds no secret.
type Key = [u8; 32];
/// The lock is held while a session is made, so that calls that need one make one.
type Slot = Arc<tokio::sync::Mutex<Option<Arc<Session>>>>;

pub(super) struct Sessions {
    http: reqwest::Client,
    max_result: usize,
    slots: Mutex<HashMap<Key, Slot>>,
}

pub(super) struct Session {
    service: RunningService<RoleClient, ClientConfig>,
    /// Whether the server has sessions that it can forget.
    stateful: bool,
    used: Mutex<Instant>,
}

impl Sessions {
    /// `max_result`: in bytes; an answer's body may be twice that, for JSON escapes.
    pub(super) fn new(clients: &Clients, max_result: usize) -> anyhow::Result<Self> {
        let http = clients
            .builder()
            .connect_timeout(Duration::from_secs(10))
            .build()?;
        Ok(Self {
            http,
            max_result,
            slots: Mutex::default(),
        })
    }

    /// A session that the server knew a moment ago.
    ///
    /// # Errors
    /// When there is none and none can be made. No call has left then.
    pub(super) async fn get(&self, server: Server<'_>) -> Result<Arc<Session>, CallError> {
        let slot = self.slot(server);
        let mut slot = slot.lock().await;
        if let Some(session) = slot.as_ref()
            && session.is_there().await
        {
            return Ok(Arc::clone(session));
        }
        *slot = None;
        let session = self.make(server).await.map_err(|e| answer::refused(&e))?;
        Ok(Arc::clone(slot.insert(Arc::new(session))))
    }

    /// Makes the next call begin with a new session, unless another call has seen to that.
    pub(super) async fn forget(&self, server: Server<'_>, session: &Arc<Session>) {
        let slot = self.slot(server);
        let mut slot = slot.lock().await;
        if slot.as_ref().is_some_and(|s| Arc::ptr_eq(s, session)) {
            *slot = None;
        }
    }

    fn slot(&self, server: Server<'_>) -> Slot {
        let mut slots = self.slots.lock();
        slots.retain(|_, slot| match slot.try_lock() {
            Ok(session) => session.as_ref().is_some_and(|s| s.used.lock().elapsed() < IDLE),
            // In use.
            Err(_) => true,
        });
        Arc::clone(slots.entry(key(server)).or_default())
    }

    /// Without sessions where the server can do that (2026-07-28), else with one.
    async fn make(&self, server: Server<'_>) -> Result<Session, ClientInitializeError> {
        // Only there may a server ask a person in the middle of a call and be answered later.
        let mut modern = client();
        modern.capabilities.elicitation = Some(ElicitationCapability::new());
        let discover = ClientLifecycleMode::Discover {
            preferred_versions: vec![ProtocolVersion::V_2026_07_28],
        };
        let begun = modern.serve_with_lifecycle(self.transport(server), discover);
        match timeout(PROBE, begun).await {
            Ok(Ok(service)) => return Ok(Session::of(service, false)),
            Ok(Err(error)) if answer::unreachable(&error) => return Err(error),
            Ok(Err(_)) | Err(_) => {}
        }
        let begun = client().serve_with_lifecycle(self.transport(server), ClientLifecycleMode::Initialize);
        begun.await.map(|service| Session::of(service, true))
    }

    fn transport(&self, server: Server<'_>) -> StreamableHttpClientTransport<reqwest::Client> {
        let body = self.max_result.saturating_mul(2).saturating_add(64 * 1024);
        let mut config = StreamableHttpClientTransportConfig::with_uri(server.url)
            .custom_headers(headers(server.headers))
            .reinit_on_expired_session(false)
            .max_concurrent_requests(CONCURRENT)
            .max_json_response_size(body)
            .max_sse_event_size(body);
        let mut resumes = ExponentialBackoff::default();
        resumes.max_times = Some(RESUMES);
        config.retry_config = Arc::new(resumes);
        StreamableHttpClientTransport::with_client(self.http.clone(), config)
    }
}

impl Session {
    fn of(service: RunningService<RoleClient, ClientConfig>, stateful: bool) -> Self {
        Self {
            service,
            stateful,
            used: Mutex::new(Instant::now()),
        }
    }

    /// Sends one `tools/call`; the server is told when its answer is not waited for any more.
    pub(super) async fn call(&self, params: CallToolRequestParams) -> Result<CallToolResponse, ServiceError> {
        let response = self.service.call_tool_once(params).await;
        if response.is_ok() {
            *self.used.lock() = Instant::now();
        }
        response
    }

    async fn is_there(&self) -> bool {
        if self.service.is_closed() || self.service.is_transport_closed() {
            return false;
        }
        if !self.stateful || self.used.lock().elapsed() < FRESH {
            return true;
        }
        let ping = ClientRequest::PingRequest(PingRequest::default());
        let known = match timeout(PROBE, self.service.send_request(ping)).await {
            Ok(Ok(_)) => true,
            // Some servers do not know this request, and say so in the session.
            Ok(Err(ServiceError::McpError(_) | ServiceError::UnexpectedResponse)) => true,
            Ok(Err(_)) | Err(_) => false,
        };
        if known {
            *self.used.lock() = Instant::now();
        }
        known
    }
}

fn client() -> ClientConfig {
    ClientConfig::new(
        ClientCapabilities::default(),
        Implementation::new("iop", env!("CARGO_PKG_VERSION")),
    )
}

fn headers(headers: &HeaderMap) -> HashMap<HeaderName, HeaderValue> {
    let sensitive = |(name, value): (&HeaderName, &HeaderValue)| {
        let mut value = value.clone();
        value.set_sensitive(true);
        (name.clone(), value)
    };
    headers.iter().map(sensitive).collect()
}

fn key(server: Server<'_>) -> Key {
    let mut headers: Vec<(&str, &[u8])> = server
        .headers
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_bytes()))
        .collect();
    headers.sort_unstable();
    let mut digest = Sha256::new();
    for part in std::iter::once(server.url.as_bytes())
        .chain(headers.iter().flat_map(|(name, value)| [name.as_bytes(), value]))
    {
        digest.update((part.len() as u64).to_be_bytes());
        digest.update(part);
    }
    digest.finalize().into()
}
