//! Numbers that look random, for instants.

#![expect(clippy::print_stdout, reason = "a failed test shows the seed that repeats it")]

/// The seed of a run: `SUBLET_TEST_SEED`, which `cargo xtask test` sets, or a fresh one. It is printed.
#[must_use]
pub fn seed() -> u64 {
    let given = std::env::var("SUBLET_TEST_SEED").ok().and_then(|text| text.parse().ok());
    let seed = given.unwrap_or_else(|| fastrand::u64(..1 << 40));
    println!("SUBLET_TEST_SEED={seed}");
    seed
}

/// Numbers that look random, from [`seed`].
#[derive(Debug)]
pub struct Random(fastrand::Rng);

impl Random {
    /// The first of them is the same for the same seed.
    #[expect(clippy::new_without_default, reason = "it prints")]
    #[must_use]
    pub fn new() -> Self {
        Self(fastrand::Rng::with_seed(seed()))
    }

    /// The next, less than `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0.u64(..limit)
    }
}
