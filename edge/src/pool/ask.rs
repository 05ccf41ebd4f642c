//! What a request asks the pool for, and why it may get nothing.

use std::sync::Arc;

use iop_shared::execution::Endpoint;
use iop_shared::ids::ProviderKey;
use tokio::time::Instant;

use super::grant::Want;
use super::route::Model;
use crate::config::Priority;

/// What one attempt asks for.
pub struct Ask<'a> {
    pub model: &'a Arc<Model>,
    pub endpoint: Endpoint,
    /// State of this request lives there only.
    pub pinned: Option<&'a (ProviderKey, Arc<str>)>,
    /// It was served before, and the node refused for want of room: when it first asked. It goes to the head of the line,
    /// and its longest wait counts from then.
    pub since: Option<Instant>,
    pub who: &'a Who,
    /// Requests of one value go to one provider while it is not fuller than the others (G30); `None`: the least loaded.
    pub affinity: Option<u64>,
    /// 004 `AvoidProviderID`: tried already, not to be taken again.
    pub avoid: &'a [ProviderKey],
    /// 004 `AllowAvoidedProviderFallback`: the last of `avoid` may be taken when no other is eligible.
    pub allow_avoided: bool,
}

impl<'a> Ask<'a> {
    /// The first ask of a request that prefers nothing.
    pub fn first(model: &'a Arc<Model>, endpoint: Endpoint, who: &'a Who) -> Self {
        Self {
            model,
            endpoint,
            pinned: None,
            since: None,
            who,
            affinity: None,
            avoid: &[],
            allow_avoided: false,
        }
    }

    /// Whether these prospects leave somebody for it.
    pub(super) fn hopes(&self, prospects: Prospects) -> bool {
        prospects.other || (self.allow_avoided && prospects.same)
    }

    /// `model`: as it is now.
    pub(super) fn want<'w>(&'w self, model: &'w Model) -> Want<'w> {
        Want {
            endpoint: self.endpoint,
            candidates: &model.candidates,
            pinned: self.pinned.map(|(provider, target)| (provider, target)),
            avoid: self.avoid,
            allow_avoided: self.allow_avoided,
            affinity: self.affinity,
        }
    }
}

/// Whose request it is: fairness between keys inside a class (G33).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Who {
    /// The key's name; empty where no keys are configured.
    pub key: Arc<str>,
    pub priority: Priority,
}

impl Who {
    /// The gateway's own requests, and everybody's where no keys are configured.
    pub fn nobody() -> Self {
        Self {
            key: Arc::from(""),
            priority: Priority::Normal,
        }
    }
}

/// Who could take a request again (G55): live, serving, not lowered and not ejected; full counts, and a cool-down that ends
/// within five seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prospects {
    /// A provider that was not tried yet.
    pub other: bool,
    /// The last one that was tried.
    pub same: bool,
}

/// Why there is no lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// Too many wait already.
    QueueFull,
    /// All providers stayed full for the longest wait.
    QueueTimeout,
    /// No provider came for the longest wait; with something to avoid: nobody else is eligible.
    NoProvider,
    /// Whoever serves the model serves other endpoints only.
    OtherEndpoint,
}
