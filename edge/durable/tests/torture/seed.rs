//! Where chance comes from: a seed that a failing test prints and that `IOP_DURABLE_SEED` sets.

/// The name of the setting.
pub const SEED: &str = "IOP_DURABLE_SEED";

/// The seed of this test; told on stderr, which is shown when the test fails.
///
/// # Panics
/// When the setting is no number.
pub fn start() -> u64 {
    let seed = match std::env::var(SEED) {
        Ok(text) => text.parse().unwrap_or_else(|e| panic!("{SEED}={text}: {e}")),
        Err(_) => fastrand::u64(..),
    };
    eprintln!("{SEED}={seed}");
    seed
}

/// Numbers that follow from a seed alone.
#[derive(Debug, Clone)]
pub struct Random(fastrand::Rng);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// From 0, below `end`, which is at least 1.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0.u64(..end)
    }

    /// Other numbers, for somebody who acts beside.
    pub fn fork(&mut self) -> Self {
        Self(self.0.fork())
    }

    /// True `n` times out of `of`.
    pub fn chance(&mut self, n: u64, of: u64) -> bool {
        self.below(of) < n
    }
}
