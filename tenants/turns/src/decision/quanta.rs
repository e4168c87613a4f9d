//! The time for which a tenant keeps its GPUs, and the time for which it may rest.

use super::scene::{Cost, Standing};
use tenants::class::{Class, Weight};

/// The shortest quantum, in microseconds, as all times here are.
pub(super) const QUANTUM_MIN_US: u64 = 100_000;
/// The time for which a tenant keeps the GPUs, as a multiple of what switching it takes (both ways).
pub(super) const COST_FACTOR: u64 = 10;
/// The longest time for which lower classes hold up one that waits, not counting the switch itself.
pub(super) const BOUND_US: u64 = 1_000_000;
/// The greatest factor by which a quantum grows.
pub(super) const GROWTH_MAX: u64 = 8;
/// The least time without a launch after which a background tenant makes way.
const IDLE_BACKGROUND_US: u64 = 50_000;
/// The least time without a launch after which any other tenant makes way.
const IDLE_US: u64 = 500_000;

/// Returns the time for which a tenant keeps its GPUs against one of its own class. `growth` is the factor by which its
/// quantum has grown.
pub(super) fn quantum_us(standing: &Standing, growth: u64) -> u64 {
    quantum_at_us(standing, standing.cost, growth)
}

/// The same if switching it took `cost`.
pub(super) fn quantum_at_us(standing: &Standing, cost: Cost, growth: u64) -> u64 {
    let cost_us = cost.both_us().saturating_mul(COST_FACTOR);
    let one_us = cost_us.max(QUANTUM_MIN_US).saturating_mul(growth);
    one_us.saturating_mul(weight_of(standing).get())
}

/// Returns the time without a launch after which a tenant makes way. For one of its own class or a lower one, it is at
/// least as long as switching it takes. So what is switched for it costs no more than what was idle.
/// The first switch is not waited for so: a guess by bytes is 20 times too long for a server whose cache is empty.
pub fn idle_after_us(standing: &Standing, is_for_higher: bool) -> u64 {
    let least_us = match standing.class {
        Class::Background => IDLE_BACKGROUND_US,
        Class::Fair | Class::Guaranteed => IDLE_US,
    };
    let is_plain = is_for_higher || !standing.cost.is_measured;
    if is_plain { least_us } else { least_us.max(standing.cost.both_us()) }
}

/// Weights are of fair tenants alone.
fn weight_of(standing: &Standing) -> Weight {
    if standing.class == Class::Fair { standing.weight } else { Weight::default() }
}

/// A time for people.
pub(super) fn time(us: u64) -> String {
    match us {
        0..10_000 => format!("{}.{} ms", us / 1_000, us % 1_000 / 100),
        10_000..10_000_000 => format!("{} ms", us / 1_000),
        10_000_000.. => format!("{} s", us / 1_000_000),
    }
}
