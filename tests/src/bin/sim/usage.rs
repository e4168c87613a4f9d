//! What a process takes of its machine.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use sublet_tests::Outcome;

/// Resident memory and descriptors of this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    /// Anonymous resident memory, less what the caller accounts for otherwise.
    pub(crate) resident_bytes: u64,
    /// Open descriptors, but for those of simulated device memory, which is accounted for in bytes.
    pub(crate) fds: usize,
}

/// Host memory that a process holds for saved contents, in bytes, as its maps show: a fork leaves out those alone. None
/// if it has ended.
pub(crate) fn held_host_bytes(pid: u32) -> u64 {
    let maps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let (mut held_kib, mut map_kib) = (0, 0);
    for line in maps.lines() {
        if let Some(text) = line.strip_prefix("Rss:") {
            map_kib = kib(text);
        } else if let Some(flags) = line.strip_prefix("VmFlags:") {
            held_kib += if flags.split_whitespace().any(|flag| flag == "dc") { map_kib } else { 0 };
        }
    }
    held_kib * 1024
}

/// The simulated device memory that a process holds, for an error: by its file, how many descriptors and how many mappings.
pub(crate) fn device_memory_of(pid: u32) -> BTreeMap<String, (usize, usize)> {
    let mut held: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let links = fds.filter_map(|fd| fs::read_link(fd.path()).ok());
    for path in links.filter(|path| is_memory(path)) {
        held.entry(path.display().to_string()).or_default().0 += 1;
    }
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    for path in paths.filter(|path| is_memory(Path::new(path))) {
        held.entry(path.to_owned()).or_default().1 += 1;
    }
    held
}

/// The mappings of this process with the most anonymous memory, for an error.
pub(crate) fn largest_mappings() -> String {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let (mut head, mut all) = ("", Vec::new());
    for line in maps.lines() {
        if let Some(text) = line.strip_prefix("Anonymous:") {
            all.push((kib(text), head));
        } else if line.split_whitespace().next().is_some_and(|first| first.contains('-')) {
            head = line;
        }
    }
    all.sort_unstable_by(|one, other| other.cmp(one));
    let largest = all.iter().take(8).map(|(kib, head)| format!("{kib} KiB at {head}"));
    largest.collect::<Vec<_>>().join("\n")
}

fn kib(text: &str) -> u64 {
    text.trim().trim_end_matches("kB").trim().parse().unwrap_or(0)
}

fn resident_bytes(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    line.map_or(0, kib) * 1024
}

impl Usage {
    /// As it is now, without `other_bytes` of memory.
    pub(crate) fn now(other_bytes: u64) -> Outcome<Self> {
        let status = fs::read_to_string("/proc/self/status")?;
        let entries = fs::read_dir("/proc/self/fd")?.flatten();
        let targets = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
        let fds = targets.filter(|target| !is_memory(target)).count();
        Ok(Self { resident_bytes: resident_bytes(&status).saturating_sub(other_bytes), fds })
    }
}

/// What the descriptors of this process are that [`Usage`] counts, for an error: of sockets, the path and the state too.
pub(crate) fn descriptors() -> Vec<String> {
    let sockets = fs::read_to_string("/proc/self/net/unix").unwrap_or_default();
    let told = |target: &Path| {
        let name = target.display().to_string();
        let inode = name.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'));
        let line = inode.and_then(|inode| {
            sockets.lines().find(|line| line.split_whitespace().nth(6) == Some(inode))
        });
        line.map_or(name.clone(), |line| {
            let words: Vec<_> = line.split_whitespace().collect();
            format!("{name} type {} state {} at {:?}", words[4], words[5], words.get(7))
        })
    };
    let entries = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let links =
        entries.filter_map(|entry| Some((entry.file_name(), fs::read_link(entry.path()).ok()?)));
    let others = links.filter(|(_, target)| !is_memory(target));
    let mut all: Vec<_> =
        others.map(|(fd, target)| format!("{}: {}", fd.to_string_lossy(), told(&target))).collect();
    all.sort_unstable();
    all
}

fn is_memory(target: &Path) -> bool {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with("h-")
}
