//! How long a tenant keeps its GPUs, and how long it may rest.

use super::scene::Standing;
use super::{Class, Weight};

/// The figures by which turns are decided. Times are in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The shortest quantum.
    pub quantum_min_us: u64,
    /// How many times as long as its switching takes (both ways) a tenant keeps the GPUs.
    pub cost_factor: u64,
    /// How long one that waits is held up by those of lower classes, at most, besides the switch itself.
    pub bound_us: u64,
    /// How many times as long a quantum grows at most.
    pub growth_max: u64,
    /// How long a background tenant launches nothing until it makes way, at least.
    pub idle_background_us: u64,
    /// How long another one does, at least.
    pub idle_us: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            quantum_min_us: 100_000,
            cost_factor: 10,
            bound_us: 1_000_000,
            growth_max: 8,
            idle_background_us: 50_000,
            idle_us: 500_000,
        }
    }
}

/// How long a tenant keeps its GPUs against one of its own class, if its quantum has grown to so many times its length.
pub(super) fn quantum_us(standing: &Standing, growth: u64, settings: &Settings) -> u64 {
    let cost_us = standing.cost.both_us().saturating_mul(settings.cost_factor);
    let one_us = cost_us.max(settings.quantum_min_us).saturating_mul(growth);
    one_us.saturating_mul(weight_of(standing).get())
}

/// How long a tenant launches nothing until it makes way: for one of its own class or a lower one as long as switching it takes, so that what
/// is switched for it costs no more than what was idle.
pub fn idle_after_us(standing: &Standing, is_for_higher: bool, settings: &Settings) -> u64 {
    let least_us = match standing.class {
        Class::Background => settings.idle_background_us,
        Class::Fair | Class::Guaranteed => settings.idle_us,
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
