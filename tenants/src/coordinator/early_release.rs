//! When a pause gives memory back while the rest is still saved.
//!
//! What a pause gives back the driver clears in the background, and copies to the device share it with that. So a resume right
//! after a pause is slower, unless the clearing ran while the pause still copied. The price is that the pause cannot be called
//! off any more from its first release on. So it is done only if host memory is there already, and enough is copied.

use std::time::Duration;

use vmm_pool::{Copies, HostDemand};

use super::overlap::moving_time;

/// From which on it is worth while, for one process at least, in bytes: giving back what one copies in 20 ms takes the driver
/// under 1 ms, and clearing it some 4.
const COPIED_BYTES_MIN: u64 = 1 << 30;

/// What is not in host memory yet, against what is copied, where making it first costs less than is gained: a pause makes it
/// during its copies otherwise.
const GROWTH_SHARE: u64 = 16;

/// A process copies to host memory at least as fast, in bytes a second, whatever else its machine does.
const SLOWEST_TO_MEMORY: u64 = 512 << 20;

/// Does it pay for a pause to give memory back while the rest is still saved, of processes that have said this when they were
/// drained? It does if that is quicker, and nothing but the link is between a process and its host memory: some process copies a
/// GiB, most of the host memory for all is there, and nothing goes to a file.
pub(super) fn pays(drained: &[HostDemand], copies: Copies) -> bool {
    let copied_bytes = || drained.iter().map(|demand| demand.copying.to_memory_bytes);
    let growth = drained.iter().map(|demand| demand.grow_bytes_with(copies));
    let growth_bytes = growth.fold(0, u64::saturating_add);
    let all_bytes = copied_bytes().fold(0, u64::saturating_add);
    copied_bytes().any(|bytes| bytes >= COPIED_BYTES_MIN)
        && growth_bytes <= all_bytes / GROWTH_SHARE
        && drained.iter().all(|demand| demand.copying.to_file_bytes == 0)
}

/// How long saving takes at the slowest, of processes that have said this when they were drained. Files of all may lie on one
/// disk.
pub(super) fn saving_time(drained: &[HostDemand]) -> Duration {
    let copying = || drained.iter().map(|demand| demand.copying);
    let to_memory = copying().map(|copying| copying.to_memory_bytes).max().unwrap_or(0);
    let to_files = copying().map(|copying| copying.to_file_bytes).fold(0, u64::saturating_add);
    Duration::from_secs(to_memory / SLOWEST_TO_MEMORY) + moving_time(to_files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_pool::Copying;

    const MIB: u64 = 1 << 20;
    const MANY: u64 = 2048 * MIB;

    /// It copies `copied_bytes`, for which it takes `growth_bytes` of host memory.
    fn drained(copied_bytes: u64, growth_bytes: u64) -> HostDemand {
        HostDemand {
            saved_bytes: copied_bytes,
            copying: Copying { to_memory_bytes: copied_bytes, ..Copying::default() },
            held_bytes: copied_bytes.saturating_sub(growth_bytes),
            grow_bytes: growth_bytes,
            grow_with_needed_bytes: growth_bytes,
            grow_with_all_bytes: growth_bytes + MANY,
        }
    }

    fn filed(to_file_bytes: u64) -> HostDemand {
        let copying = Copying { to_file_bytes, ..Copying::default() };
        HostDemand { copying, ..HostDemand::default() }
    }

    fn pays(drained: &[HostDemand]) -> bool {
        super::pays(drained, Copies::Needed)
    }

    #[test]
    fn it_pays_where_one_process_copies_much_and_the_rest_does_not_matter() {
        assert!(pays(&[drained(MANY, 0)]));
        assert!(pays(&[drained(0, 0), drained(MANY, 0), HostDemand::default()]));
        assert!(!pays(&[]));
        assert!(!pays(&[drained(COPIED_BYTES_MIN - 1, 0), drained(COPIED_BYTES_MIN - 1, 0)]));
    }

    #[test]
    fn host_memory_is_made_beside_the_copies_where_there_is_much_to_make() {
        assert!(pays(&[drained(MANY, MANY / 16)]));
        assert!(!pays(&[drained(MANY, MANY / 16 + 1)]));
        assert!(!pays(&[drained(MANY, 0), drained(MANY / 4, MANY / 4)]));
        let said = drained(MANY, 0);
        assert!(!super::pays(&[said], Copies::All), "all copies take more");
    }

    #[test]
    fn files_keep_a_pause_from_it() {
        assert!(!pays(&[drained(MANY, 0), filed(1)]));
    }

    #[test]
    fn saving_takes_as_long_as_the_process_with_most_and_all_files() {
        let many = [drained(2 * MANY, 0), drained(MANY, 0), filed(MANY), filed(MANY)];
        assert_eq!(saving_time(&many), Duration::from_secs(8 + 32));
        assert_eq!(saving_time(&[]), Duration::ZERO);
    }
}
