//! The host memory that a pause may take, and the limits on it.
//!
//! Three things limit that memory: the user's setting (`SUBLET_HOST_BYTES_MAX`), the memory limits of the process's control
//! groups, and the memory that the kernel calls available. Each process reports its need and its limits. The coordinator adds
//! up all processes that share a limit. So a tenant is refused as a whole before any of its memory is released. Another tenant
//! that pauses simultaneously is not seen.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vmm_pool::{Copies, HostBudget, HostDemand};

use crate::identity::id_text;

/// A kind of limit on host memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitKind {
    /// `SUBLET_HOST_BYTES_MAX`: for all saved contents that the tenant keeps on the host.
    Configured,
    /// `MemAvailable` of `/proc/meminfo`, less a tenth that stays for other processes.
    Available,
    /// The memory limit of a control group. A tenth of its free memory stays for others: a process that exceeds the limit is
    /// killed, and a job's memory grows meanwhile. Processes in the same group share the limit.
    ControlGroup {
        /// The directory of the control group.
        path: PathBuf,
        /// Device and inode of that directory: containers may use one path for different groups.
        identity: GroupIdentity,
    },
}

/// Device and inode of a control group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GroupIdentity(#[serde(with = "id_text")] pub u64, #[serde(with = "id_text")] pub u64);

impl LimitKind {
    /// The user's next step.
    pub fn advice(&self) -> &'static str {
        match self {
            Self::Configured => "raise it",
            Self::Available => {
                "free host memory (or set SUBLET_HOST_BYTES_MAX, where the machine grows its memory)"
            }
            Self::ControlGroup { .. } => "raise the memory limit of the container or job",
        }
    }
}

impl fmt::Display for LimitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Configured => f.write_str("SUBLET_HOST_BYTES_MAX"),
            Self::Available => f.write_str("nine tenths of MemAvailable"),
            Self::ControlGroup { path, .. } => {
                write!(f, "nine tenths of what is free in the control group at {}", path.display())
            }
        }
    }
}

/// One limit and the bytes that it leaves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostLimit {
    /// The kind of limit.
    pub kind: LimitKind,
    /// For [`LimitKind::Configured`] the bytes that may be held in all, for the others the bytes that may be added.
    pub bytes: u64,
}

/// The contents that one process must save, and the limits on its host memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostNeed {
    /// The contents that it must save, and the host memory that it takes for them.
    pub demand: HostDemand,
    /// The limits on that host memory.
    pub limits: Vec<HostLimit>,
}

impl HostNeed {
    fn demand_on(&self, kind: &LimitKind, copies: Copies) -> u64 {
        let grow_bytes = self.demand.grow_bytes_with(copies);
        match kind {
            LimitKind::Configured => self.demand.held_bytes.saturating_add(grow_bytes),
            LimitKind::Available | LimitKind::ControlGroup { .. } => grow_bytes,
        }
    }
}

/// Returns how far a process that holds `held_bytes` may grow within `limits` if no other process grows.
pub fn budget(held_bytes: u64, limits: &[HostLimit]) -> HostBudget {
    let left = limits.iter().map(|limit| match limit.kind {
        LimitKind::Configured => limit.bytes.saturating_sub(held_bytes),
        LimitKind::Available | LimitKind::ControlGroup { .. } => limit.bytes,
    });
    HostBudget(left.min())
}

/// The host has too little memory for the contents of the tenant. The message names the limit:
/// `SUBLET_HOST_BYTES_MAX`, a control group, or the memory that the kernel has available. The job runs on. Free host
/// memory, raise the limit, or mark contents that may be lost as `discard`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "saving {saved_bytes} bytes of {processes} process(es) needs {demand_bytes} bytes of host memory, and {kind} \
     leaves {bytes}: {}, or mark memory that needs no saving as discard",
    kind.advice()
)]
pub struct HostShortage {
    /// The limit that is exceeded.
    pub kind: LimitKind,
    /// Bytes that the limit leaves.
    pub bytes: u64,
    /// Bytes that the processes need under the limit.
    pub demand_bytes: u64,
    /// Contents to save, in bytes.
    pub saved_bytes: u64,
    /// The number of processes that share the limit.
    pub processes: usize,
}

impl HostShortage {
    /// Returns how many more bytes the limit would have to leave.
    pub fn missing_bytes(&self) -> u64 {
        self.demand_bytes.saturating_sub(self.bytes)
    }
}

/// The first limit that `needs` exceed together when no copies of earlier pauses are kept; `None` if all needs fit.
pub fn shortage<'a>(needs: impl IntoIterator<Item = &'a HostNeed>) -> Option<HostShortage> {
    shortage_with(needs, Copies::None)
}

/// The most copies of earlier pauses for which the limits leave room in all processes together. All processes keep the same.
pub fn copies_with_room(needs: &[&HostNeed]) -> Copies {
    let fits = |copies: &Copies| shortage_with(needs.iter().copied(), *copies).is_none();
    Copies::FEWER.into_iter().find(fits).unwrap_or(Copies::None)
}

fn shortage_with<'a>(
    needs: impl IntoIterator<Item = &'a HostNeed>,
    copies: Copies,
) -> Option<HostShortage> {
    let mut sums: BTreeMap<&LimitKind, HostShortage> = BTreeMap::new();
    for need in needs.into_iter().filter(|need| need.demand.grow_bytes_with(copies) > 0) {
        for limit in &need.limits {
            let sum = sums.entry(&limit.kind).or_insert_with(|| HostShortage {
                kind: limit.kind.clone(),
                bytes: limit.bytes,
                demand_bytes: 0,
                saved_bytes: 0,
                processes: 0,
            });
            sum.bytes = sum.bytes.min(limit.bytes);
            sum.demand_bytes = sum.demand_bytes.saturating_add(need.demand_on(&limit.kind, copies));
            sum.saved_bytes = sum.saved_bytes.saturating_add(need.demand.saved_bytes);
            sum.processes += 1;
        }
    }
    sums.into_values().find(|sum| sum.demand_bytes > sum.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn need(held_mib: u64, grow_mib: u64, limits: &[HostLimit]) -> HostNeed {
        let demand = HostDemand {
            saved_bytes: grow_mib * MIB,
            held_bytes: held_mib * MIB,
            grow_bytes: grow_mib * MIB,
            grow_with_needed_bytes: grow_mib * MIB,
            grow_with_all_bytes: grow_mib * MIB,
            ..HostDemand::default()
        };
        HostNeed { demand, limits: limits.to_vec() }
    }

    #[test]
    fn as_many_copies_stay_as_all_processes_have_room_for() {
        let limit = [HostLimit { kind: LimitKind::Available, bytes: 100 * MIB }];
        let keeping = |needed_mib: u64, all_mib: u64| {
            let mut need = need(0, 10, &limit);
            need.demand.grow_with_needed_bytes = needed_mib * MIB;
            need.demand.grow_with_all_bytes = all_mib * MIB;
            need
        };
        let [few, some, many] = [keeping(10, 40), keeping(10, 70), keeping(60, 70)];
        assert_eq!(copies_with_room(&[&few, &few]), Copies::All);
        assert_eq!(copies_with_room(&[&few, &some]), Copies::Needed);
        assert_eq!(copies_with_room(&[&some, &many, &many]), Copies::None);
        assert_eq!(shortage([&some, &many, &many]), None, "that is no reason to refuse");
        assert_eq!(copies_with_room(&[]), Copies::All);
    }

    fn group(name: &str, inode: u64, mib: u64) -> HostLimit {
        let kind = LimitKind::ControlGroup {
            path: PathBuf::from(name),
            identity: GroupIdentity(1, inode),
        };
        HostLimit { kind, bytes: mib * MIB }
    }

    #[test]
    fn processes_that_fit_alone_are_refused_together() {
        let limit = [HostLimit { kind: LimitKind::Available, bytes: 100 * MIB }];
        let each = need(0, 60, &limit);
        assert_eq!(shortage([&each]), None);
        let short = shortage([&each, &each]).unwrap();
        assert_eq!((short.demand_bytes, short.processes), (120 * MIB, 2));
        let text = short.to_string();
        assert!(text.contains("MemAvailable leaves 104857600: free host memory"), "{text}");
    }

    #[test]
    fn one_process_may_take_what_the_others_leave() {
        let limit = [HostLimit { kind: LimitKind::Available, bytes: 100 * MIB }];
        assert_eq!(shortage([&need(0, 95, &limit), &need(0, 5, &limit)]), None);
    }

    #[test]
    fn the_users_word_counts_what_is_held_and_stops_growth_only() {
        let limit = [HostLimit { kind: LimitKind::Configured, bytes: 100 * MIB }];
        assert!(shortage([&need(80, 30, &limit)]).is_some());
        assert_eq!(shortage([&need(120, 0, &limit)]), None);
        assert_eq!(budget(80 * MIB, &limit), HostBudget(Some(20 * MIB)));
    }

    #[test]
    fn different_control_groups_of_one_path_are_not_added_up() {
        let (a, b) = (group("/sys/fs/cgroup", 1, 100), group("/sys/fs/cgroup", 2, 100));
        let needs = [need(0, 80, std::slice::from_ref(&a)), need(0, 80, &[b])];
        assert_eq!(shortage(&needs), None);
        let short = shortage([&needs[0], &need(0, 30, &[a])]).unwrap();
        assert!(short.to_string().contains("control group at /sys/fs/cgroup leaves"));
    }
}
