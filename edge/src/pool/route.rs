//! Public model names and what may serve them (G30, G54). Values only.

use std::sync::Arc;
use std::time::Duration;

use iop_shared::execution::liveness::DEFAULT_RESPONSE_STALL_TIMEOUT_MS;
use iop_shared::ids::ProviderKey;

/// A public model name: configured, or a target that live providers advertise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    pub name: Arc<str>,
    pub candidates: Vec<Candidate>,
    /// Not configured: its candidates are who advertises it now.
    pub advertised: bool,
    pub liveness: Liveness,
    pub affinity: Affinity,
}

/// Whether requests with one beginning go to one provider (G30), so that its KV cache serves them again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Affinity {
    #[default]
    None,
    /// By `prompt_cache_key`, else by the first messages.
    Prefix,
}

/// One (provider, target) that may serve a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    pub provider: ProviderKey,
    pub target: Arc<str>,
    /// Lower goes first.
    pub priority: u32,
    /// Share of the load inside its priority; at least 1.
    pub weight: u32,
}

/// How long a model's provider may be silent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Liveness {
    pub stall: Option<Duration>,
    pub first_content: Option<Duration>,
    pub preset: Option<Preset>,
}

/// A named `liveness` (G54).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preset {
    Interactive,
    Default,
    Batch,
}

impl Preset {
    const fn stall(self) -> Duration {
        match self {
            Preset::Interactive => Duration::from_secs(45),
            Preset::Default => Duration::from_secs(300),
            Preset::Batch => Duration::from_secs(900),
        }
    }

    const fn first_content(self) -> Option<Duration> {
        match self {
            Preset::Interactive => Some(Duration::from_secs(20)),
            Preset::Default | Preset::Batch => None,
        }
    }
}

impl Liveness {
    /// The stall timeout and the first-content timeout (gateway.md §13, Liveness values): the model's own values win,
    /// then a named preset, then the provider's, then 300 s and none. `provider_stall_ms` 0 is 004's default.
    pub fn effective(
        self,
        provider_stall_ms: i64,
        provider_first_content_ms: Option<u64>,
    ) -> (Duration, Option<Duration>) {
        let provider = || {
            let ms = if provider_stall_ms > 0 {
                provider_stall_ms
            } else {
                DEFAULT_RESPONSE_STALL_TIMEOUT_MS
            };
            Duration::from_millis(ms.unsigned_abs())
        };
        let stall = self
            .stall
            .or(self.preset.map(Preset::stall))
            .unwrap_or_else(provider);
        let first_content = match (self.first_content, self.preset) {
            (Some(own), _) => Some(own),
            (None, Some(preset)) => preset.first_content(),
            (None, None) => provider_first_content_ms.map(Duration::from_millis),
        };
        (stall, first_content)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_wins_then_the_preset_then_the_provider() {
        let s = Duration::from_secs;
        let own = Liveness {
            stall: Some(s(60)),
            first_content: Some(s(5)),
            preset: Some(Preset::Batch),
        };
        assert_eq!(own.effective(1000, Some(1000)), (s(60), Some(s(5))));
        let preset = Liveness {
            preset: Some(Preset::Interactive),
            ..Liveness::default()
        };
        assert_eq!(preset.effective(1000, None), (s(45), Some(s(20))));
        let named_default = Liveness {
            preset: Some(Preset::Default),
            ..Liveness::default()
        };
        assert_eq!(named_default.effective(1000, Some(1000)), (s(300), None));
        assert_eq!(
            Liveness::default().effective(1000, Some(2000)),
            (s(1), Some(s(2)))
        );
        assert_eq!(Liveness::default().effective(0, None), (s(300), None));
    }
}
