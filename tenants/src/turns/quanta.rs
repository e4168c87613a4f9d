//! How long a tenant keeps its GPUs, and how long it may rest.

use super::scene::Standing;
use super::{Class, Weight};

/// The shortest quantum, in microseconds, as all times here are.
pub(super) const QUANTUM_MIN_US: u64 = 100_000;
/// How many times as long as its switching takes (both ways) a tenant keeps the GPUs.
pub(super) const COST_FACTOR: u64 = 10;
/// How long one that waits is held up by those of lower classes, at most, besides the switch itself.
pub(super) const BOUND_US: u64 = 1_000_000;
/// How many times as long a quantum grows at most.
pub(super) const GROWTH_MAX: u64 = 8;
/// How long a background tenant launches nothing until it makes way, at least,
const IDLE_BACKGROUND_US: u64 = 50_000;
/// and another one.
const IDLE_US: u64 = 500_000;

/// How long a tenant keeps its GPUs against one of its own class, if its quantum has grown to so many times its length.
pub(super) fn quantum_us(standing: &Standing, growth: u64) -> u64 {
    let cost_us = standing.cost.both_us().saturating_mul(COST_FACTOR);
    let one_us = cost_us.max(QUANTUM_MIN_US).saturating_mul(growth);
    one_us.saturating_mul(weight_of(standing).get())
}

/// How long a tenant launches nothing until it makes way: for one of its own class or a lower one as long as switching it takes, so that what
/// is switched for it costs no more than what was idle.
pub fn idle_after_us(standing: &Standing, is_for_higher: bool) -> u64 {
    let least_us = match standing.class {
        Class::Background => IDLE_BACKGROUND_US,
        Class::Fair | Class::Guaranteed => IDLE_US,
    };
    if is_for_higher { least_us } else { least_us.max(standing.cost.both_us()) }
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
