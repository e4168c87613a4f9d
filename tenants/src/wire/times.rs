//! How long the pauses of a process took, by length.

use serde::{Deserialize, Serialize};

/// How many pauses took how long. A length belongs to the first bound that it does not exceed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PauseTimes {
    /// For each of the bounds 10 ms, 30 ms, 100 ms, 300 ms, 1 s, 3 s, 10 s, 30 s and 100 s, and for what is longer.
    pub counts: [u64; 10],
    /// All lengths together, in microseconds.
    pub sum_us: u64,
}

impl PauseTimes {
    /// The bounds, in microseconds.
    pub const BOUNDS_US: [u64; 9] = [
        10_000,
        30_000,
        100_000,
        300_000,
        1_000_000,
        3_000_000,
        10_000_000,
        30_000_000,
        100_000_000,
    ];

    /// Counts one more.
    pub fn add(&mut self, elapsed_us: u64) {
        let place = Self::BOUNDS_US.partition_point(|bound_us| *bound_us < elapsed_us);
        self.counts[place] += 1;
        self.sum_us = self.sum_us.saturating_add(elapsed_us);
    }

    /// Those of both.
    #[must_use]
    pub fn plus(mut self, other: Self) -> Self {
        for (all, more) in self.counts.iter_mut().zip(other.counts) {
            *all += more;
        }
        self.sum_us = self.sum_us.saturating_add(other.sum_us);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_counts_at_the_first_bound_that_it_does_not_exceed() {
        let mut times = PauseTimes::default();
        for elapsed_us in [0, 10_000, 10_001, 2_000_000, 100_000_001, u64::MAX] {
            times.add(elapsed_us);
        }
        assert_eq!(times.counts, [2, 1, 0, 0, 0, 1, 0, 0, 0, 2]);
        assert_eq!(times.plus(times).counts[0], 4);
        assert_eq!(times.sum_us, u64::MAX);
    }
}
