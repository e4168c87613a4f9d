//! The clock of turns, the same for all processes of a machine until the machine restarts.

use std::fs;
use std::sync::OnceLock;

use nix::time::{ClockId, clock_gettime};

/// Returns the microseconds since the machine was started, the same in all its processes.
pub(crate) fn now_us() -> u64 {
    let now =
        clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap_or(nix::sys::time::TimeSpec::new(0, 0));
    let us = now.tv_sec().saturating_mul(1_000_000).saturating_add(now.tv_nsec() / 1_000);
    u64::try_from(us.saturating_sub(ahead_us())).unwrap_or(0)
}

/// Returns by how much the clock of this process's time namespace is ahead of the machine's, in microseconds.
fn ahead_us() -> i64 {
    static AHEAD_US: OnceLock<i64> = OnceLock::new();
    *AHEAD_US.get_or_init(|| {
        ahead_in(&fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default())
    })
}

/// Reads that from the kernel's list: a line for each clock, with seconds and nanoseconds.
fn ahead_in(offsets: &str) -> i64 {
    let us = |line: &str| {
        let mut words = line.split_whitespace();
        let is_it = words.next()? == "monotonic";
        let seconds: i64 = words.next()?.parse().ok()?;
        let nanoseconds: i64 = words.next()?.parse().ok()?;
        is_it.then(|| seconds.saturating_mul(1_000_000).saturating_add(nanoseconds / 1_000))
    };
    offsets.lines().find_map(us).unwrap_or(0)
}

/// Returns the id of this start of the machine; empty where the kernel does not say.
pub(crate) fn boot() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        id.trim().to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_of_a_time_namespace_is_told_from_the_machines() {
        let listed = "monotonic      86400  500000000\nboottime       172800         0\n";
        assert_eq!(ahead_in(listed), 86_400_500_000);
        assert_eq!(ahead_in("monotonic -5 0\n"), -5_000_000);
        assert_eq!(ahead_in("monotonic x 0\n"), 0);
        assert_eq!(ahead_in(""), 0);
    }
}
