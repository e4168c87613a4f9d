//! Processes of a tenant that did not answer, as the kernel shows them. A stopped process cannot answer, but holds its memory.

use std::fs;
use std::path::{Path, PathBuf};

use procfs::process::Process;
use serde::{Deserialize, Serialize};
use tenants::coordinator::{MemberFailure, TenantStats};

use crate::gpus::GpuBytes;
use crate::outsiders;

const CONTROL_GROUPS: &str = "/sys/fs/cgroup";

/// One process.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Silent {
    pub(crate) pid: u32,
    pub(crate) command: String,
    pub(crate) standing: Standing,
    /// On each GPU, as NVIDIA's management library tells; nothing where it does not.
    pub(crate) gpus: Vec<GpuBytes>,
}

/// The state that keeps a process from answering, as far as the kernel tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) enum Standing {
    Stopped,
    Traced,
    Frozen,
    Uninterruptible,
    /// Nothing that the kernel knows of.
    Runs,
}

impl Standing {
    /// Returns the text for the column of states.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Stopped => "no answer: stopped (SIGSTOP)",
            Self::Traced => "no answer: held by a debugger",
            Self::Frozen => "no answer: in a frozen cgroup",
            Self::Uninterruptible => "no answer: waits in the kernel (D)",
            Self::Runs => "no answer",
        }
    }
}

impl Silent {
    /// Returns the live ones of a tenant, by process id, without their GPUs.
    pub(crate) fn of(stats: &TenantStats) -> Vec<Self> {
        let of = |failure: &MemberFailure| {
            let pid = failure.who.pid?;
            let standing = standing_of(format!("/proc/{pid}").into(), Path::new(CONTROL_GROUPS))?;
            let command = outsiders::command_of(pid);
            Some(Self { pid, command, standing, gpus: Vec::new() })
        };
        let mut all: Vec<_> = stats.failures.iter().filter_map(of).collect();
        all.sort_by_key(|silent| silent.pid);
        all.dedup_by_key(|silent| silent.pid);
        all
    }
}

/// Returns the state of the process with this directory in `/proc`; none if it has ended.
fn standing_of(dir: PathBuf, groups: &Path) -> Option<Standing> {
    let process = Process::new_with_root(dir).ok()?;
    let own = process.stat().ok().map(|stat| stat.state).filter(|state| !"ZX".contains(*state))?;
    // The thread that answers is not the main thread.
    let mut threads = process.tasks().into_iter().flatten().flatten();
    let mut waits = || threads.any(|thread| thread.stat().is_ok_and(|stat| stat.state == 'D'));
    Some(match own {
        'T' => Standing::Stopped,
        't' => Standing::Traced,
        _ if is_frozen(&process, groups) => Standing::Frozen,
        'D' => Standing::Uninterruptible,
        _ if waits() => Standing::Uninterruptible,
        _ => Standing::Runs,
    })
}

fn is_frozen(process: &Process, groups: &Path) -> bool {
    let holds = |path: &Path, word: &str| {
        fs::read_to_string(path).is_ok_and(|text| text.lines().any(|line| line == word))
    };
    process.cgroups().into_iter().flatten().any(|group| {
        let path = group.pathname.trim_start_matches('/');
        if group.controllers.is_empty() {
            return holds(&groups.join(path).join("cgroup.events"), "frozen 1");
        }
        let is_freezer = group.controllers.iter().any(|name| name == "freezer");
        is_freezer && holds(&groups.join("freezer").join(path).join("freezer.state"), "FROZEN")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_of_a_process_is_told_apart() {
        let base = tempfile::tempdir().unwrap();
        let (proc, groups) = (base.path().join("proc"), base.path().join("cgroup"));
        let process = |pid: u32, letter: char, thread: char, group: &str| {
            let dir = proc.join(pid.to_string());
            let task = dir.join("task").join((pid + 1).to_string());
            fs::create_dir_all(&task).unwrap();
            let rest = " 1".repeat(49);
            fs::write(dir.join("stat"), format!("{pid} (a) b) {letter}{rest}")).unwrap();
            fs::write(task.join("stat"), format!("{pid} (agent) {thread}{rest}")).unwrap();
            fs::write(dir.join("cgroup"), group).unwrap();
            standing_of(dir, &groups)
        };
        for (path, text) in [
            ("cold/cgroup.events", "populated 1\nfrozen 1\n"),
            ("warm/cgroup.events", "populated 1\nfrozen 0\n"),
            ("freezer/old/freezer.state", "FROZEN\n"),
        ] {
            let path = groups.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        assert_eq!(process(10, 'T', 'T', "0::/warm"), Some(Standing::Stopped));
        assert_eq!(process(20, 't', 't', "0::/"), Some(Standing::Traced));
        assert_eq!(process(30, 'S', 'S', "0::/cold"), Some(Standing::Frozen));
        assert_eq!(process(40, 'D', 'D', "4:freezer:/old\n1:cpu:/x"), Some(Standing::Frozen));
        assert_eq!(process(50, 'S', 'D', "0::/warm"), Some(Standing::Uninterruptible));
        assert_eq!(process(60, 'R', 'S', "0::/warm"), Some(Standing::Runs));
        assert_eq!(process(70, 'Z', 'Z', "0::/"), None);
        assert_eq!(standing_of(proc.join("80"), &groups), None);
    }
}
