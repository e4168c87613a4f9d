//! The memory figures of the machine and of this process's control groups, from the kernel.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use sublet_protocol::host_memory::{GroupIdentity, HostLimit, LimitKind};

/// The most nested control groups that are read. They are usually nested a few levels deep.
const CGROUP_DEPTH_MAX: usize = 32;
/// The least limit that counts as no limit. Version 1 writes "no limit" as the largest multiple of a page. No real limit is near
/// that.
const UNLIMITED_BYTES_MIN: u64 = 1 << 60;

/// Memory of the machine, or of a control group, at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFigure {
    /// The machine, as [`LimitKind::Available`], or the control group.
    pub kind: LimitKind,
    /// The total, in bytes.
    pub total_bytes: u64,
    /// Bytes that may still be allocated.
    pub available_bytes: u64,
}

impl HostFigure {
    /// Returns the bytes that background work leaves free for others: a tenth of the total.
    pub fn reserve_bytes(&self) -> u64 {
        self.total_bytes / 10
    }

    /// Returns the bytes that background work may allocate.
    pub fn spare_bytes(&self) -> u64 {
        self.available_bytes.saturating_sub(self.reserve_bytes())
    }
}

/// Returns the limits on this process's host memory now.
///
/// `configured_bytes`, if given, is the user's limit for the whole tenant. It replaces the kernel's figure, which is far too low
/// on machines that grow their memory on use. The limits of control groups still hold: a process that exceeds one is killed.
pub fn limits(configured_bytes: Option<u64>) -> Vec<HostLimit> {
    let configured = configured_bytes.map(|bytes| HostLimit { kind: LimitKind::Configured, bytes });
    let others = figures(configured_bytes).into_iter().map(HostLimit::from);
    configured.into_iter().chain(others).collect()
}

/// Returns the present memory figures of the machine and of this process's control groups. With `configured_bytes`, the machine's
/// figure is left out ([`limits`]).
pub fn figures(configured_bytes: Option<u64>) -> Vec<HostFigure> {
    let machine = match configured_bytes {
        Some(_) => None,
        None => fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
            let total_bytes = bytes_of("MemTotal:", &text)?;
            let available_bytes = bytes_of("MemAvailable:", &text)?;
            Some(HostFigure { kind: LimitKind::Available, total_bytes, available_bytes })
        }),
    };
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    machine.into_iter().chain(control_groups(&groups, Path::new("/sys/fs/cgroup"))).collect()
}

impl From<HostFigure> for HostLimit {
    fn from(HostFigure { kind, available_bytes, .. }: HostFigure) -> Self {
        Self { kind, bytes: available_bytes - available_bytes / 10 }
    }
}

fn bytes_of(name: &str, meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The files of one version of control groups.
struct Version {
    limit: &'static str,
    usage: &'static str,
    /// The page cache, which the kernel frees first.
    cache: [&'static str; 2],
}

const V1: Version = Version {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    cache: ["total_inactive_file", "total_active_file"],
};
const V2: Version = Version {
    limit: "memory.max",
    usage: "memory.current",
    cache: ["inactive_file", "active_file"],
};

/// Returns the memory of all control groups that `membership` (`/proc/self/cgroup`) names, and of their parents.
fn control_groups(membership: &str, mount: &Path) -> Vec<HostFigure> {
    let mut found = Vec::new();
    for line in membership.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let (root, version) = if controllers.is_empty() {
            (mount.to_owned(), V2)
        } else if controllers.split(',').any(|name| name == "memory") {
            (mount.join("memory"), V1)
        } else {
            continue;
        };
        let own = root.join(path.trim_start_matches('/'));
        // In a container the path may be the machine's, while the group itself is mounted as the root.
        let own = if own.is_dir() { own } else { root.clone() };
        let around = own.ancestors().take_while(|dir| dir.starts_with(&root));
        found.extend(around.take(CGROUP_DEPTH_MAX).filter_map(|dir| figure_of(dir, &version)));
    }
    found
}

fn figure_of(dir: &Path, version: &Version) -> Option<HostFigure> {
    let number = |name: &str| fs::read_to_string(dir.join(name)).ok()?.trim().parse::<u64>().ok();
    let most = number(version.limit).filter(|bytes| *bytes < UNLIMITED_BYTES_MIN)?;
    let statistics = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let cache: u64 = statistics
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(name, _)| version.cache.contains(name))
        .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
        .fold(0, u64::saturating_add);
    let held = number(version.usage)?.saturating_sub(cache);
    let place = fs::metadata(dir).ok()?;
    let kind = LimitKind::ControlGroup {
        path: dir.to_owned(),
        identity: GroupIdentity(place.dev(), place.ino()),
    };
    Some(HostFigure { kind, total_bytes: most, available_bytes: most.saturating_sub(held) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_line_is_read() {
        let text = "MemTotal:       100 kB\nMemAvailable:     80 kB\n";
        assert_eq!(bytes_of("MemAvailable:", text), Some(80 * 1024));
        assert_eq!(bytes_of("MemAvailable:", "MemAvailable: many kB"), None);
        assert!(limits(None).iter().any(|limit| limit.kind == LimitKind::Available));
        let word = HostLimit { kind: LimitKind::Configured, bytes: 7 };
        let limits = limits(Some(7));
        assert!(limits.contains(&word));
        assert!(limits.iter().all(|limit| limit.kind != LimitKind::Available));
    }

    #[test]
    fn limits_of_both_versions_are_read_up_to_the_root() {
        let base = tempfile::tempdir().unwrap();
        let put = |dir: &str, files: &[(&str, &str)]| {
            let dir = base.path().join(dir);
            fs::create_dir_all(&dir).unwrap();
            for (name, text) in files {
                fs::write(dir.join(name), text).unwrap();
            }
        };
        let stat = "anon 5\ninactive_file 20\nactive_file 10\n";
        put("job/step", &[("memory.max", "max\n"), ("memory.current", "50\n")]);
        put("job", &[("memory.max", "100\n"), ("memory.current", "70\n"), ("memory.stat", stat)]);
        let limits_of = |membership: &str| -> Vec<u64> {
            let found = control_groups(membership, base.path());
            found.into_iter().map(|figure| HostLimit::from(figure).bytes).collect()
        };
        let found = control_groups("0::/job/step\n", base.path());
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].total_bytes, found[0].available_bytes), (100, 60));
        assert_eq!(limits_of("0::/job/step\n"), [54], "nine tenths of what is free");

        put("memory/ours", &[("memory.limit_in_bytes", "90"), ("memory.usage_in_bytes", "30")]);
        put("memory", &[("memory.limit_in_bytes", "9223372036854771712")]);
        assert_eq!(limits_of("4:memory:/ours\n1:cpu:/\n"), [54]);
        // A path of the machine's, seen from inside a container.
        put("memory", &[("memory.limit_in_bytes", "80"), ("memory.usage_in_bytes", "10")]);
        assert_eq!(limits_of("4:memory:/docker/1234\n"), [63]);
    }

    fn machine(available_bytes: u64) -> HostFigure {
        HostFigure { kind: LimitKind::Available, total_bytes: 1000, available_bytes }
    }

    #[test]
    fn background_work_leaves_a_tenth_of_all() {
        assert_eq!(
            [machine(900), machine(150), machine(90)].map(|figure| figure.spare_bytes()),
            [800, 50, 0]
        );
        let figures = figures(None);
        let own = figures.iter().find(|figure| figure.kind == LimitKind::Available).unwrap();
        assert!(own.total_bytes >= own.available_bytes && own.available_bytes > 0);
        assert!(super::figures(Some(7)).iter().all(|figure| figure.kind != LimitKind::Available));
    }
}
