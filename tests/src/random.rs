//! Numbers that look random, for instants.

#![expect(clippy::print_stdout, reason = "a failed test shows the seed that repeats it")]

use std::time::{SystemTime, UNIX_EPOCH};

use crate::Outcome;

/// Numbers that look random. A run is repeated by giving its seed in `SUBLET_TEST_SEED`.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// From `SUBLET_TEST_SEED`, or the clock; says which.
    pub fn new() -> Outcome<Self> {
        let given = std::env::var("SUBLET_TEST_SEED").ok().and_then(|text| text.parse().ok());
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let seed = given.unwrap_or(u64::from(now.subsec_nanos()));
        println!("SUBLET_TEST_SEED={seed}");
        Ok(Self(seed))
    }

    /// The next, less than `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}
