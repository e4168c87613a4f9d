//! The settings of a process.

use std::path::Path;

use nix::sys::statfs::{FsType, HUGETLBFS_MAGIC, TMPFS_MAGIC, statfs};

use crate::figures::HostFigure;

/// The settings of a process. By default its machine has no figures, none comes in ahead of a pause before it is asked, and its
/// contents stay where they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settings {
    /// The available memory of the machine and of its control groups. Asked while memory is held or brought in ahead of
    /// a pause.
    pub host_figures: Option<fn() -> Vec<HostFigure>>,
    /// Up to how much host memory, in bytes, it brings in by itself ahead of its next pause, once what that would take has
    /// been the same for a while. None when it waits until it is asked.
    pub prepares_up_to: Option<u64>,
    /// May its saved contents go to a file in this directory while it is paused, when another tenant's pause is short of host
    /// memory? Nothing is gained where such files lie in host memory. None when they stay.
    pub spills: Option<fn(&Path) -> bool>,
}

/// Do files in `dir` lie in the host's memory, as on tmpfs? Where it is not there yet, its nearest parent tells; where nothing does, they do not.
pub fn is_in_memory(dir: &Path) -> bool {
    const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);
    let known = dir.ancestors().find_map(|place| statfs(place).ok());
    let kind = known.map(|known| known.filesystem_type());
    kind.is_some_and(|kind| [TMPFS_MAGIC, RAMFS_MAGIC, HUGETLBFS_MAGIC].contains(&kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_on_tmpfs_lie_in_memory() {
        for dir in ["/dev/shm", "/dev/shm/not/there"] {
            assert!(is_in_memory(Path::new(dir)), "{dir}");
        }
        for dir in ["/proc", "/sys/not-there", "", "relative"] {
            assert!(!is_in_memory(Path::new(dir)), "{dir}");
        }
    }
}
