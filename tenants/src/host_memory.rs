//! How much host memory a pause may take.

use std::fs;

use vmm_pool::HostBudget;

/// The budget of one of `members` processes of a tenant that pause together.
///
/// `limit_bytes`, when given, is the user's word for the whole tenant and is not doubted: on machines that
/// grow their memory as it is used, the kernel's own figure is far too low. Otherwise it is what the kernel
/// calls available (`MemAvailable` in `/proc/meminfo`), less a tenth that stays for everybody else.
pub fn budget(limit_bytes: Option<u64>, members: usize) -> HostBudget {
    let members = members.max(1) as u64;
    let whole = limit_bytes.or_else(|| {
        let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
        available_bytes(&meminfo).map(|bytes| bytes - bytes / 10)
    });
    HostBudget(whole.map(|bytes| bytes / members))
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_line_is_read_and_shared_among_members() {
        let text = "MemTotal:       100 kB\nMemAvailable:     80 kB\n";
        assert_eq!(available_bytes(text), Some(80 * 1024));
        assert_eq!(budget(Some(100), 4), HostBudget(Some(25)));
        assert!(budget(None, 1).0.is_some_and(|bytes| bytes > 0));
    }
}
