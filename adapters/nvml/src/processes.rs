//! The processes that hold a GPU's memory: only those of the tenant, with NVML's figures for each.

use std::collections::BTreeSet;

use tenants::identity::TenantName;
use tenants::run_dir::RunDir;

use crate::NvmlCode;

/// `nvmlProcessInfo_v1_t`, a row of the first form of the queries.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessV1 {
    /// The process id.
    pub pid: u32,
    /// The bytes that the process holds, with its context's; all ones if unknown.
    pub used_gpu_memory: u64,
}

/// `nvmlProcessInfo_v2_t`, a row of the second and third form.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// The process id.
    pub pid: u32,
    /// The bytes that the process holds, with its context's; all ones if unknown.
    pub used_gpu_memory: u64,
    /// The GPU instance of MIG; all ones without MIG.
    pub gpu_instance_id: u32,
    /// The compute instance of MIG; all ones without MIG.
    pub compute_instance_id: u32,
}

/// One process of an answer.
pub trait ProcessEntry: Copy + Default {
    /// Returns the process id, in the namespace that NVML uses.
    fn pid(&self) -> u32;
}

impl ProcessEntry for ProcessV1 {
    fn pid(&self) -> u32 {
        self.pid
    }
}

impl ProcessEntry for Process {
    fn pid(&self) -> u32 {
        self.pid
    }
}

/// Returns the ids of a tenant's processes, as this process sees them, and `own`, the id of the caller. A process of a pid
/// namespace that is not visible here has no id. Waits only for moments.
pub fn of_tenant(run_dir: &RunDir, tenant: &TenantName, own: u32) -> BTreeSet<u32> {
    let dir = run_dir.existing_tenant(tenant).ok().flatten();
    let mut pids = dir.map(|dir| dir.pids()).unwrap_or_default();
    pids.insert(own);
    pids
}

/// Returns the number of rows to make room for, after NVML has reported `found`.
pub fn room_for(found: usize) -> usize {
    // Some processes may begin in between.
    found.saturating_add(16).min(ROWS_MAX)
}

/// Are rows of the third form like [`Process`] in a driver of this version? In branch 535 before 535.104 each row has one
/// figure more at its end. Later versions have the old form again.
pub fn are_rows_known(version: &str) -> bool {
    let mut numbers = version.split('.').map(|part| part.parse::<u32>().ok());
    !matches!((numbers.next(), numbers.next()), (Some(Some(535)), Some(Some(..104))))
}

/// A number of processes larger than any machine has on a GPU.
pub const ROWS_MAX: usize = 1 << 16;

/// Returns the answer to a caller whose buffer has room for `room` rows: the rows of `pids`, in NVML's order. The number is the
/// count that the caller gets: that of the rows, or that of the rows needed if the buffer is too short.
pub fn answer<R: ProcessEntry>(
    rows: &[R],
    pids: &BTreeSet<u32>,
    room: usize,
) -> (NvmlCode, Vec<R>, u32) {
    let own: Vec<R> = rows.iter().copied().filter(|row| pids.contains(&row.pid())).collect();
    let count = u32::try_from(own.len()).unwrap_or(u32::MAX);
    if own.len() > room {
        return (NvmlCode::INSUFFICIENT_SIZE, Vec::new(), count);
    }
    (NvmlCode::SUCCESS, own, count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(pids: &[u32]) -> Vec<Process> {
        pids.iter().map(|&pid| Process { pid, used_gpu_memory: 7, ..Process::default() }).collect()
    }

    #[test]
    fn rows_are_laid_out_as_in_nvml() {
        assert_eq!(size_of::<ProcessV1>(), 16);
        assert_eq!(size_of::<Process>(), 24);
        assert_eq!(std::mem::offset_of!(Process, used_gpu_memory), 8);
        assert_eq!(std::mem::offset_of!(Process, compute_instance_id), 20);
        assert_eq!(size_of::<crate::MemoryV2>(), 40);
    }

    #[test]
    fn others_processes_are_left_out_in_order() {
        let tenant = BTreeSet::from([3, 9, 12]);
        let (code, found, count) = answer(&rows(&[9, 4, 3]), &tenant, 8);
        assert_eq!((code, found, count), (NvmlCode::SUCCESS, rows(&[9, 3]), 2));
        let (code, found, count) = answer(&rows(&[4]), &tenant, 0);
        assert_eq!((code, found.len(), count), (NvmlCode::SUCCESS, 0, 0));
    }

    #[test]
    fn a_buffer_that_is_too_short_is_told_how_long_it_must_be() {
        let tenant = BTreeSet::from([3, 9]);
        let (code, found, count) = answer(&rows(&[9, 4, 3]), &tenant, 1);
        assert_eq!((code, found.len(), count), (NvmlCode::INSUFFICIENT_SIZE, 0, 2));
        let (code, _, count) = answer(&rows(&[9, 3]), &tenant, 2);
        assert_eq!((code, count), (NvmlCode::SUCCESS, 2));
    }

    #[test]
    fn drivers_whose_rows_are_longer_are_known_by_version() {
        for version in ["535.54.03", "535.86.10", "535.43"] {
            assert!(!are_rows_known(version), "{version}");
        }
        for version in ["535.104.05", "535.183.01", "525.60", "550.54.15", "580.95.05", "", "x.y"] {
            assert!(are_rows_known(version), "{version}");
        }
    }

    #[test]
    fn room_grows_and_is_bounded() {
        assert!(room_for(0) > 0 && room_for(100) > 100);
        assert_eq!(room_for(usize::MAX), ROWS_MAX);
    }

    #[test]
    fn a_tenant_without_a_directory_has_the_process_that_asks() {
        let base = tempfile::tempdir().unwrap();
        let run_dir = RunDir::open(Some(base.path().join("run")), None).unwrap();
        let tenant = TenantName::new("nobody").unwrap();
        assert_eq!(of_tenant(&run_dir, &tenant, 5), BTreeSet::from([5]));
    }
}
