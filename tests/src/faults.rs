//! Providers that misbehave by a table, a stack that routes to them in order, and what its clients saw.
//!
//! A [`Faulty`] does for each attempt what its [`Script`] says and counts the attempts of each target. A [`Bench`]
//! has two of them: every [`Route`] is a model in four cells (Chat and Responses, whole and as a stream), each with
//! a first provider and perhaps a second one of its own, so that no cell disturbs another. The names of the two
//! providers stand in everything they send: ids, headers, texts.

mod answers;
mod bench;
mod front;
mod provider;
mod script;
mod verdict;

pub use answers::{Answers, Api, Events, words};
pub use bench::{Bench, Cell, Route, Seen, ask, failures};
pub use front::Front;
pub use provider::{Faulty, large, malformed};
pub use script::{Act, Reply, Script, Then, WORDS};
pub use verdict::{PRIMARY, SECOND, assert_bytes, assert_gapless, assert_own_answer, typed_error};
