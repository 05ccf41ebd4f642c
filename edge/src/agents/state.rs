//! What an agent's run carries from step to step. The transcript is not in it: that is in the journal, once.

use iop_shared::openai::usage::Usage;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::{RawValue, to_raw_value};

/// The state of a run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AgentState {
    /// Until the first turn is committed; then it is in the journal. JSON null is an input.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "present"
    )]
    pub(crate) input: Option<Box<RawValue>>,
    /// Calls of the last turn that have no results yet.
    #[serde(default)]
    pub(crate) pending: u32,
    #[serde(default)]
    pub(crate) usage: Totals,
    /// The last turn's text, when it called nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) answer: Option<String>,
}

fn present<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Box<RawValue>>, D::Error> {
    Box::<RawValue>::deserialize(d).map(Some)
}

/// Tokens of all turns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Totals {
    pub(crate) input_tokens: u64,
    pub(crate) output_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) reasoning_tokens: u64,
    pub(crate) total_tokens: u64,
}

impl Totals {
    pub(crate) fn add(&mut self, usage: &Usage) {
        self.input_tokens += usage.input;
        self.output_tokens += usage.output;
        self.cached_tokens += usage.cached;
        self.reasoning_tokens += usage.reasoning;
        self.total_tokens = self.input_tokens + self.output_tokens;
    }
}

impl From<Usage> for Totals {
    fn from(usage: Usage) -> Self {
        let mut totals = Self::default();
        totals.add(&usage);
        totals
    }
}

impl From<Totals> for Usage {
    fn from(totals: Totals) -> Self {
        Self {
            input: totals.input_tokens,
            output: totals.output_tokens,
            cached: totals.cached_tokens,
            reasoning: totals.reasoning_tokens,
        }
    }
}

/// `outcome.usage` of a stored state; `None` for one that is not an agent's.
pub(crate) fn usage(state: &[u8]) -> Option<Box<RawValue>> {
    let state: AgentState = serde_json::from_slice(state).ok()?;
    to_raw_value(&state.usage).ok()
}

/// Serde of a usage under the names that runs have for it everywhere.
pub(crate) mod tokens {
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    use super::{Totals, Usage};

    pub(crate) fn serialize<S: Serializer>(usage: &Option<Usage>, s: S) -> Result<S::Ok, S::Error> {
        usage.map(Totals::from).serialize(s)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Usage>, D::Error> {
        Ok(Option::<Totals>::deserialize(d)?.map(Usage::from))
    }
}

impl AgentState {
    pub(crate) fn of_input(input: Box<RawValue>) -> Self {
        Self {
            input: Some(input),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_reads_back() {
        let mut state = AgentState::of_input(RawValue::from_string(r#"{"a" : 1.0}"#.to_owned()).unwrap());
        state.usage.add(&Usage {
            input: 3,
            output: 4,
            cached: 1,
            reasoning: 2,
        });
        let text = serde_json::to_string(&state).unwrap();
        let back: AgentState = serde_json::from_str(&text).unwrap();
        assert_eq!(back.input.unwrap().get(), r#"{"a" : 1.0}"#);
        assert_eq!(back.usage.total_tokens, 7);
        let told = usage(text.as_bytes()).unwrap();
        assert!(told.get().contains("\"total_tokens\":7"), "{told}");
        assert!(usage(b"{\"step\":1}").is_none());
        let state = AgentState::of_input(RawValue::from_string("null".to_owned()).unwrap());
        let back: AgentState = serde_json::from_slice(&serde_json::to_vec(&state).unwrap()).unwrap();
        assert_eq!(back.input.unwrap().get(), "null");
        let begun: AgentState = serde_json::from_str(r#"{"pending":1}"#).unwrap();
        assert!(begun.input.is_none());
    }
}
