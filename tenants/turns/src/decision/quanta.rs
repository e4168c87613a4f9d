//! The time for which a tenant keeps its GPUs, and the idle time after which it may be paused.

use super::scene::{Cost, Standing};
use tenants::class::{Class, Weight};

/// The shortest quantum, in microseconds, as all times here are.
pub(super) const QUANTUM_MIN_US: u64 = 100_000;
/// The time for which a tenant keeps the GPUs, as a multiple of its switching time (both ways).
pub(super) const COST_FACTOR: u64 = 10;
/// The longest time for which lower classes hold up a waiting tenant, not counting the switch itself.
pub(super) const BOUND_US: u64 = 1_000_000;
/// The greatest factor by which a quantum grows.
pub(super) const GROWTH_MAX: u64 = 8;
/// The shortest time without a launch after which a background tenant is paused for others.
const IDLE_BACKGROUND_US: u64 = 50_000;
/// The shortest time without a launch after which any other tenant is paused for others.
const IDLE_US: u64 = 500_000;

/// Returns the time for which a tenant keeps its GPUs while one of its own class waits. `growth` is the factor by which its
/// quantum has grown.
pub(super) fn quantum_us(standing: &Standing, growth: u64) -> u64 {
    quantum_at_us(standing, standing.cost, growth)
}

/// Returns the same for a tenant whose switching takes `cost`.
pub(super) fn quantum_at_us(standing: &Standing, cost: Cost, growth: u64) -> u64 {
    let cost_us = cost.both_us().saturating_mul(COST_FACTOR);
    let one_us = cost_us.max(QUANTUM_MIN_US).saturating_mul(growth);
    one_us.saturating_mul(weight_of(standing).get())
}

/// Returns the time without a launch after which a tenant is paused for others. For a waiter of its own class or a lower one, it
/// is at least the switching time. So the switch costs no more than the idle time. This does not hold before the first switch: a
/// guess by bytes is 20 times too long for a server whose cache is empty.
pub fn idle_after_us(standing: &Standing, is_for_higher: bool) -> u64 {
    let least_us = match standing.class {
        Class::Background => IDLE_BACKGROUND_US,
        Class::Fair | Class::Guaranteed => IDLE_US,
    };
    let is_plain = is_for_higher || !standing.cost.is_measured;
    if is_plain { least_us } else { least_us.max(standing.cost.both_us()) }
}

/// Returns the weight of a fair tenant. Other classes have none, and get the default.
fn weight_of(standing: &Standing) -> Weight {
    if standing.class == Class::Fair { standing.weight } else { Weight::default() }
}

/// Returns a time as a text for people.
pub(super) fn time(us: u64) -> String {
    match us {
        0..10_000 => format!("{}.{} ms", us / 1_000, us % 1_000 / 100),
        10_000..10_000_000 => format!("{} ms", us / 1_000),
        10_000_000.. => format!("{} s", us / 1_000_000),
    }
}
