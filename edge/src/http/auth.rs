//! Who is asking, and what may they do (G70).
//!
//! Only digests are kept. A presented secret is hashed first and its digest looked up: how long a lookup takes depends
//! on the digest, and nobody can steer a SHA-256 digest towards a stored one byte by byte, so the time says nothing
//! about stored secrets. The digest that was found is compared in constant time all the same.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use http::header::{self, HeaderMap, HeaderName};
use subtle::ConstantTimeEq;

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
    /// Without keys: anybody, on loopback.
    anybody: Option<Arc<Key>>,
}

struct Key {
    settings: KeySettings,
    in_use: AtomicU32,
}

/// An authenticated client; cheap to clone.
#[derive(Clone)]
pub struct Caller(Arc<Key>);

/// One of a key's concurrent requests; given back on drop.
#[must_use]
pub struct ConcurrencyGuard(Arc<Key>);

impl Keys {
    pub fn new(keys: Vec<KeySettings>) -> Self {
        let anybody = keys.is_empty().then(|| {
            Arc::new(Key::new(KeySettings {
                name: Arc::from(""),
                digest: Digest::default(),
                roles: Roles::ALL,
                models: ModelFilter::All,
                concurrency: None,
                priority: Priority::Normal,
            }))
        });
        let by_digest = keys
            .into_iter()
            .map(|k| (k.digest, Arc::new(Key::new(k))))
            .collect();
        Self { by_digest, anybody }
    }

    /// Whether anybody must show a key.
    pub fn is_open(&self) -> bool {
        self.anybody.is_some()
    }

    /// The client that a request's headers speak for.
    ///
    /// # Errors
    /// `invalid_api_key`; never says which secret came.
    pub fn authenticate(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        if let Some(key) = &self.anybody {
            return Ok(Caller(Arc::clone(key)));
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
        Self {
            settings,
            in_use: AtomicU32::new(0),
        }
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

    /// # Errors
    /// `permission_denied` without the role.
    pub fn require(&self, role: Role) -> Result<(), ApiError> {
        if self.0.settings.roles.contains(role) {
            return Ok(());
        }
        Err(ApiError::new(
            ErrorKind::PermissionDenied,
            format!("This API key does not have the role \"{role}\"."),
        ))
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
        let limit = self.0.settings.concurrency.unwrap_or(u32::MAX);
        let taken = self
            .0
            .in_use
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| {
                (n < limit).then(|| n + 1)
            });
        match taken {
            Ok(_) => Ok(ConcurrencyGuard(Arc::clone(&self.0))),
            Err(_) => Err(ApiError::new(
                ErrorKind::RateLimitExceeded,
                format!("This API key may have {limit} requests at once."),
            )
            .with_retry_after(RETRY_SOON)),
        }
    }
}

impl Drop for ConcurrencyGuard {
    fn drop(&mut self) {
        self.0.in_use.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
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
        assert_eq!(
            (over.into_inner(), caller.0.in_use.load(Ordering::SeqCst)),
            (0, 0)
        );
    }
}
