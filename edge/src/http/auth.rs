//! Who is asking, and what may they do (G70).
//!
//! Only digests are kept. A presented secret is hashed first and its digest looked up: how long a lookup takes depends
//! on the digest, and nobody can steer a SHA-256 digest towards a stored one byte by byte, so the time says nothing
//! about stored secrets. The digest that was found is compared in constant time all the same.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use http::header::{self, HeaderMap, HeaderName};
use subtle::ConstantTimeEq;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub use crate::config::Role;
use crate::config::{Digest, KeySettings, ModelFilter, Priority, Roles, digest};
use crate::error::{ApiError, ErrorKind};
use crate::pool::Who;

/// The other place where clients put their key.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// A client that is over its concurrency may come back this soon.
const RETRY_SOON: Duration = Duration::from_secs(1);

/// Every key of the configuration.
pub struct Keys {
    by_digest: HashMap<Digest, Arc<Key>>,
    by_name: HashMap<Arc<str>, Arc<Key>>,
    /// Without keys: anybody, on loopback. With keys: whose work goes on when its key is gone.
    nobody: Arc<Key>,
}

struct Key {
    settings: KeySettings,
    /// Its places; `None`: no limit.
    places: Option<Arc<Semaphore>>,
}

/// An authenticated client; cheap to clone.
#[derive(Clone)]
pub struct Caller(Arc<Key>);

/// One of a key's concurrent requests; given back on drop.
#[must_use]
pub struct ConcurrencyGuard {
    _place: Option<OwnedSemaphorePermit>,
}

impl Keys {
    pub fn new(keys: Vec<KeySettings>) -> Self {
        let nobody = Arc::new(Key::new(KeySettings {
            name: Arc::from(""),
            digest: Digest::default(),
            roles: Roles::ALL,
            models: ModelFilter::All,
            concurrency: None,
            priority: Priority::Normal,
        }));
        let keys: Vec<Arc<Key>> = keys.into_iter().map(|k| Arc::new(Key::new(k))).collect();
        let by_name = keys.iter().map(|k| (Arc::clone(&k.settings.name), Arc::clone(k)));
        Self {
            by_name: by_name.collect(),
            by_digest: keys.into_iter().map(|k| (k.settings.digest, k)).collect(),
            nobody,
        }
    }

    /// Whether nobody must show a key.
    pub fn is_open(&self) -> bool {
        self.by_digest.is_empty()
    }

    /// Whether there is a key of this name, with this role.
    pub(crate) fn may(&self, name: &str, role: Role) -> bool {
        let key = self.by_name.get(name);
        key.is_some_and(|key| key.settings.roles.contains(role))
    }

    /// Whose limits work has that this key began and that goes on without a request. Work that was begun without a key, or
    /// goes on where there are none: every model, no limit, normal priority.
    ///
    /// # Errors
    /// `permission_denied` for a key that is gone: who may not begin anything any more lets nothing go on.
    pub(crate) fn owner(&self, name: Option<&str>) -> Result<Caller, ApiError> {
        match name.filter(|_| !self.is_open()) {
            None => Ok(Caller(Arc::clone(&self.nobody))),
            Some(name) => self
                .by_name
                .get(name)
                .map(|key| Caller(Arc::clone(key)))
                .ok_or_else(|| {
                    let why = "The API key that began this is not known here any more.";
                    ApiError::new(ErrorKind::PermissionDenied, why)
                }),
        }
    }

    /// The client that a request's headers speak for.
    ///
    /// # Errors
    /// `invalid_api_key`; never says which secret came.
    pub fn authenticate(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        if self.is_open() {
            return Ok(Caller(Arc::clone(&self.nobody)));
        }
        let Some(secret) = presented(headers) else {
            return Err(ApiError::new(
                ErrorKind::InvalidApiKey,
                "No API key was sent. Send it as \"Authorization: Bearer KEY\".",
            ));
        };
        let digest = digest(secret);
        match self.by_digest.get(&digest) {
            Some(key) if bool::from(key.settings.digest.ct_eq(&digest)) => Ok(Caller(Arc::clone(key))),
            _ => Err(ApiError::new(
                ErrorKind::InvalidApiKey,
                "The API key is not known here.",
            )),
        }
    }
}

/// The bearer token, else `x-api-key`. An empty one is none.
fn presented(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers
        .get(header::AUTHORIZATION)
        .and_then(|v| v.to_str().ok())
        .and_then(|v| {
            let (scheme, token) = v.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
        });
    let api_key = || {
        headers
            .get(X_API_KEY)
            .and_then(|v| v.to_str().ok())
            .map(str::trim)
    };
    bearer.or_else(api_key).filter(|s| !s.is_empty())
}

impl Key {
    fn new(settings: KeySettings) -> Self {
        let places = settings
            .concurrency
            .map(|n| Arc::new(Semaphore::new((n as usize).min(Semaphore::MAX_PERMITS))));
        Self { settings, places }
    }
}

impl Caller {
    /// The key's name, for logs and as the decider of what an operator does; `None` where no keys are configured.
    pub fn name(&self) -> Option<Arc<str>> {
        Some(&self.0.settings.name).filter(|n| !n.is_empty()).cloned()
    }

    /// For the queue.
    pub fn who(&self) -> Who {
        Who {
            key: Arc::clone(&self.0.settings.name),
            priority: self.0.settings.priority,
        }
    }

    pub fn has(&self, role: Role) -> bool {
        self.0.settings.roles.contains(role)
    }

    /// # Errors
    /// `permission_denied` without the role.
    pub fn require(&self, role: Role) -> Result<(), ApiError> {
        self.require_any(&[role])
    }

    /// # Errors
    /// `permission_denied` without any of the roles; it names each that would do.
    pub fn require_any(&self, roles: &[Role]) -> Result<(), ApiError> {
        if roles.iter().any(|role| self.has(*role)) {
            return Ok(());
        }
        let names: Vec<String> = roles.iter().map(|role| format!("\"{role}\"")).collect();
        let message = match &*names {
            [name] => format!("This API key does not have the role {name}."),
            names => format!("This API key has none of the roles {}.", names.join(", ")),
        };
        Err(ApiError::new(ErrorKind::PermissionDenied, message))
    }

    /// Whether the allow-list names this model.
    pub fn may_use(&self, model: &str) -> bool {
        self.0.settings.models.allows(model)
    }

    /// Counts one more request of this key until the guard is dropped.
    ///
    /// # Errors
    /// `rate_limit_exceeded` when the key's concurrency is used up.
    pub fn begin(&self) -> Result<ConcurrencyGuard, ApiError> {
        let place = match &self.0.places {
            None => None,
            Some(places) => Some(Arc::clone(places).try_acquire_owned().map_err(|_| self.full())?),
        };
        Ok(ConcurrencyGuard { _place: place })
    }

    /// The same for work that nobody waits for at a socket: it stands in line for up to `patience`, before requests that
    /// come later.
    ///
    /// # Errors
    /// `rate_limit_exceeded` when no place became free in time.
    pub(crate) async fn begin_within(&self, patience: Duration) -> Result<ConcurrencyGuard, ApiError> {
        let place = match &self.0.places {
            None => None,
            Some(places) => match tokio::time::timeout(patience, Arc::clone(places).acquire_owned()).await {
                Ok(Ok(place)) => Some(place),
                Ok(Err(_)) | Err(_) => return Err(self.full()),
            },
        };
        Ok(ConcurrencyGuard { _place: place })
    }

    fn full(&self) -> ApiError {
        let limit = self.0.settings.concurrency.unwrap_or(u32::MAX);
        ApiError::new(
            ErrorKind::RateLimitExceeded,
            format!("This API key may have {limit} requests at once."),
        )
        .with_retry_after(RETRY_SOON)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::config::ModelPattern;
    use http::HeaderValue;

    fn key(name: &str, secret: &str) -> KeySettings {
        KeySettings {
            name: Arc::from(name),
            digest: digest(secret),
            roles: Roles::of(&[Role::Inference]),
            models: ModelFilter::Only(vec![ModelPattern::Exact("m".into())]),
            concurrency: Some(2),
            priority: Priority::Normal,
        }
    }

    fn sent(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(
            HeaderName::from_static(name),
            HeaderValue::from_str(value).unwrap(),
        )])
    }

    #[test]
    fn a_secret_is_known_by_its_digest_in_both_places() {
        let keys = Keys::new(vec![key("a", "s-a"), key("b", "s-b")]);
        let name = |h: &HeaderMap| keys.authenticate(h).ok().and_then(|c| c.name());
        assert_eq!(name(&sent("authorization", "Bearer s-a")).as_deref(), Some("a"));
        assert_eq!(name(&sent("authorization", "bearer  s-b ")).as_deref(), Some("b"));
        assert_eq!(name(&sent("x-api-key", "s-b")).as_deref(), Some("b"));
        for (header, value) in [
            ("authorization", "Bearer s-c"),
            ("authorization", "Bearer "),
            ("authorization", "s-a"),
            ("authorization", "Basic s-a"),
            ("x-api-key", ""),
            ("accept", "*/*"),
        ] {
            let e = keys.authenticate(&sent(header, value)).err().unwrap();
            assert_eq!(e.kind, ErrorKind::InvalidApiKey);
            assert!(!e.message.contains("s-"), "{}", e.message);
        }
    }

    #[test]
    fn a_key_has_its_roles_and_models_and_no_others() {
        let keys = Keys::new(vec![key("a", "s")]);
        let caller = keys.authenticate(&sent("x-api-key", "s")).ok().unwrap();
        assert!(caller.require(Role::Inference).is_ok());
        assert_eq!(
            caller.require(Role::Admin).unwrap_err().kind,
            ErrorKind::PermissionDenied
        );
        // Whoever asks for a role is told of all that would do.
        let said = |roles: &[Role]| caller.require_any(roles).unwrap_err().message;
        assert_eq!(
            said(&[Role::Admin]),
            "This API key does not have the role \"admin\"."
        );
        assert_eq!(
            said(&[Role::Operator, Role::Admin]),
            "This API key has none of the roles \"operator\", \"admin\"."
        );
        assert!(caller.require_any(&[Role::Operator, Role::Inference]).is_ok());
        assert!(caller.may_use("m") && !caller.may_use("n"));
    }

    #[test]
    fn without_keys_everybody_has_every_role() {
        let keys = Keys::new(Vec::new());
        assert!(keys.is_open());
        let caller = keys.authenticate(&HeaderMap::new()).ok().unwrap();
        assert_eq!(caller.name(), None);
        assert!(Role::ALL.iter().all(|r| caller.require(*r).is_ok()) && caller.may_use("anything"));
        let many: Vec<_> = (0..1000).map(|_| caller.begin().ok().unwrap()).collect();
        drop(many);
    }

    #[test]
    fn concurrency_is_exact_and_given_back_once() {
        let keys = Keys::new(vec![key("a", "s")]);
        let caller = keys.authenticate(&sent("x-api-key", "s")).ok().unwrap();
        let first = caller.begin().ok().unwrap();
        let second = caller.begin().ok().unwrap();
        let refused = caller.begin().err().unwrap();
        assert_eq!(
            (refused.kind, refused.retry_after),
            (ErrorKind::RateLimitExceeded, Some(RETRY_SOON))
        );
        drop(first);
        let third = caller.begin().ok().unwrap();
        assert!(caller.begin().is_err());
        drop((second, third));
        assert!(caller.begin().is_ok());
    }

    #[test]
    fn concurrency_is_exact_between_threads() {
        let keys = Keys::new(vec![KeySettings {
            concurrency: Some(8),
            ..key("a", "s")
        }]);
        let caller = keys.authenticate(&sent("x-api-key", "s")).ok().unwrap();
        let over = AtomicU32::new(0);
        let held = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2_000 {
                        let Ok(guard) = caller.begin() else { continue };
                        if held.fetch_add(1, Ordering::SeqCst) >= 8 {
                            over.fetch_add(1, Ordering::SeqCst);
                        }
                        held.fetch_sub(1, Ordering::SeqCst);
                        drop(guard);
                    }
                });
            }
        });
        let free = caller.0.places.as_ref().unwrap().available_permits();
        assert_eq!((over.into_inner(), free), (0, 8));
    }

    #[tokio::test(start_paused = true)]
    async fn work_stands_in_line_for_a_place_and_goes_before_who_comes_later() {
        let keys = Keys::new(vec![key("a", "s")]);
        let caller = keys.owner(Some("a")).ok().unwrap();
        let first = caller.begin().ok().unwrap();
        let second = caller.begin().ok().unwrap();
        let began = tokio::time::Instant::now();
        let refused = caller.begin_within(Duration::from_secs(3)).await.err().unwrap();
        assert_eq!(refused.kind, ErrorKind::RateLimitExceeded);
        assert_eq!(began.elapsed(), Duration::from_secs(3));
        let mut waiting = Box::pin(caller.begin_within(Duration::from_secs(3)));
        assert!(futures_util::poll!(&mut waiting).is_pending());
        drop(first);
        assert!(caller.begin().is_err(), "the place is the waiting one's");
        let third = waiting.await.ok().unwrap();
        drop((second, third));
        assert!(caller.begin().is_ok());
    }

    #[test]
    fn the_owner_of_work_is_found_by_name_and_a_key_that_is_gone_lets_nothing_go_on() {
        let keys = Keys::new(vec![KeySettings {
            priority: Priority::High,
            ..key("a", "s")
        }]);
        let gone = keys.owner(Some("b")).err().unwrap();
        assert_eq!(gone.kind, ErrorKind::PermissionDenied);
        let (known, none) = (
            keys.owner(Some("a")).ok().unwrap(),
            keys.owner(None).ok().unwrap(),
        );
        let open = Keys::new(Vec::new()).owner(Some("a")).ok().unwrap();
        assert_eq!(known.name().as_deref(), Some("a"));
        assert!(known.may_use("m") && !known.may_use("n"));
        assert_eq!(known.who().priority, Priority::High);
        for nobody in [open, none] {
            assert_eq!((nobody.name(), nobody.who()), (None, Who::nobody()));
            let many: Vec<_> = (0..10).map(|_| nobody.begin().ok().unwrap()).collect();
            assert!(nobody.may_use("n") && many.len() == 10);
        }
    }
}
