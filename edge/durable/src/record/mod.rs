//! What is kept about a run. Records are plain values; `machine` decides how they change, `envelope` how they are sealed,
//! `store` where they live.

mod activity;
mod event;
mod outcome;
mod run;
mod wait;

pub use activity::{
    ActivityRecord, ActivityState, Attempt, AttemptClass, Backoff, Effect, NotBefore, Origin, RetryPolicy,
    most_attempts,
};
pub use event::{EventName, EventRecord};
pub use outcome::{DENIED, Exhausted, Outcome, OutcomeCancel, OutcomeError, Reason, SPENT};
pub use run::{
    Budget, CancelRequest, CheckpointRecord, DecisionRecord, DefinitionRef, Inbox, Lineage, RunHead, Scope,
    Status, StepRecord, StepStatus, Waiting, WaitingKind, WaitingOn,
};
pub use wait::{Continuation, DeadlinePolicy, Settled, WaitLabels, WaitRecord, WaitStatus};

/// A closed list of words: the same in JSON, in the tables and in errors.
macro_rules! words {
    ($(#[$meta:meta])* $vis:vis enum $name:ident { $($(#[$vmeta:meta])* $variant:ident => $word:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
        $vis enum $name { $($(#[$vmeta])* #[serde(rename = $word)] $variant),+ }

        impl $name {
            /// Every word of the list.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }

            /// The value of a word of the list.
            pub fn parse(word: &str) -> Option<Self> {
                match word { $($word => Some(Self::$variant),)+ _ => None }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}
pub(crate) use words;
