//! The settings of a process.

use std::path::Path;

use nix::sys::statfs::{FsType, HUGETLBFS_MAGIC, TMPFS_MAGIC, statfs};

use crate::figures::HostFigure;

/// The settings of a process. By default there are no figures of the machine, no host memory is allocated ahead of a pause
/// without a request, and saved contents stay in host memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settings {
    /// Returns the available memory of the machine and of its control groups. Called while memory is held or allocated ahead of a
    /// pause.
    pub host_figures: Option<fn() -> Vec<HostFigure>>,
    /// The most host memory, in bytes, that the process allocates automatically ahead of its next pause, once the need has been
    /// the same for a while. None: it waits for a request.
    pub prepares_up_to: Option<u64>,
    /// May its saved contents go to a file in this directory while it is paused, if another tenant's pause lacks host memory?
    /// Nothing is gained if such files are in host memory. None: they stay.
    pub spills: Option<fn(&Path) -> bool>,
}

/// Are files in `dir` in host memory, as on tmpfs? If `dir` does not exist yet, its nearest parent decides. If nothing is known,
/// they are not.
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
