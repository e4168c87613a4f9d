//! Device files by which a process may have its device memory pinned.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The directory in which the kernel lists a process's descriptors.
pub const OWN_DESCRIPTORS: &str = "/proc/self/fd";

/// A kind of such device files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceFile {
    /// `/dev/infiniband/uverbs*`: network cards.
    Verbs,
    /// `/dev/gdrdrv`: GDRCopy.
    GdrCopy,
    /// `/dev/nvidia-fs*`: GPUDirect Storage.
    Storage,
}

impl DeviceFile {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Verbs, Self::GdrCopy, Self::Storage];

    /// Returns the name by which a user says that files of this kind pin nothing.
    pub fn name(self) -> &'static str {
        match self {
            Self::Verbs => "uverbs",
            Self::GdrCopy => "gdrdrv",
            Self::Storage => "nvidia-fs",
        }
    }

    /// Returns the advice for running without files of this kind, or without device memory that they pin.
    fn advice(self) -> &'static str {
        match self {
            Self::Verbs => {
                "have the network leave device memory alone (NCCL_NET_GDR_LEVEL=LOC, UCX_IB_GPU_DIRECT_RDMA=n)"
            }
            Self::GdrCopy => "do without GDRCopy (NCCL_GDRCOPY_ENABLE=0, UCX_TLS=^gdr_copy)",
            Self::Storage => "close cuFile before the pause (cuFileDriverClose)",
        }
    }

    /// Returns the kind of the file at `path`, wherever `/dev` is mounted.
    fn of(path: &Path) -> Option<Self> {
        let mut parts = path.iter().rev().map(|part| part.to_str().unwrap_or_default());
        let (file, folder, above) = (parts.next()?, parts.next()?, parts.next());
        match (above, folder, file) {
            (Some("dev"), "infiniband", file) if file.starts_with("uverbs") => Some(Self::Verbs),
            (_, "dev", "gdrdrv") => Some(Self::GdrCopy),
            (_, "dev", file) if file.starts_with("nvidia-fs") => Some(Self::Storage),
            _ => None,
        }
    }
}

/// Returns the first open file of each kind, by the links in the directory `descriptors`. Empty if the directory cannot be
/// read.
pub fn open_in(descriptors: &Path) -> BTreeMap<DeviceFile, PathBuf> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(descriptors).into_iter().flatten().flatten() {
        if let Ok(path) = fs::read_link(entry.path())
            && let Some(kind) = DeviceFile::of(&path)
        {
            found.entry(kind).or_insert(path);
        }
    }
    found
}

/// After a look, the next look waits this many times as long as that look took.
const REST_SHARE: u32 = 20;
/// The longest such wait.
const REST_MAX: Duration = Duration::from_millis(50);

/// Looks at open files. They take at most a twentieth of the caller's time, however often it looks and however many files are
/// open.
#[derive(Debug, Default)]
pub struct Looks {
    /// The time before which there is no look.
    next: Mutex<Option<Instant>>,
}

impl Looks {
    /// Makes a value for a process where nobody has looked yet.
    pub const fn new() -> Self {
        Self { next: Mutex::new(None) }
    }

    /// As [`open_in`]; `None` if it is too early after the last look. Waits for a look that is under way.
    pub fn open_in(&self, descriptors: &Path) -> Option<BTreeMap<DeviceFile, PathBuf>> {
        self.at_most(Instant::now, || open_in(descriptors))
    }

    fn at_most<T>(&self, now: impl Fn() -> Instant, look: impl FnOnce() -> T) -> Option<T> {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let began = now();
        if next.is_some_and(|next| began < next) {
            return None;
        }
        let seen = look();
        let ended = now();
        let rest = ended.saturating_duration_since(began).saturating_mul(REST_SHARE).min(REST_MAX);
        *next = ended.checked_add(rest);
        Some(seen)
    }
}

/// Returns the reason why the device memory of a process may be pinned unseen. The process's descriptors are in `descriptors`.
/// `known` are the kinds that pin nothing, as the user says. `is_seen` returns the reason if registrations with a kind are not
/// seen.
pub fn unseen_pins(
    descriptors: &Path,
    known: &[DeviceFile],
    is_seen: impl Fn(DeviceFile) -> Result<(), String>,
) -> Option<String> {
    let open = open_in(descriptors).into_iter().filter(|(kind, _)| !known.contains(kind));
    open.into_iter().find_map(|(kind, path)| {
        let why = is_seen(kind).err()?;
        Some(format!(
            "it has {} open, and may have device memory registered there that would be moved away from under it \
             ({why}); {}, or set {}={} where it is known to register none",
            path.display(),
            kind.advice(),
            WITHOUT_PINS,
            kind.name(),
        ))
    })
}

/// The environment variable that lists kinds which pin no device memory, as the user says.
pub const WITHOUT_PINS: &str = "SUBLET_WITHOUT_PINS";

/// Returns the kinds with these names. Other names are ignored.
pub fn named(names: &[String]) -> Vec<DeviceFile> {
    DeviceFile::ALL
        .into_iter()
        .filter(|kind| names.iter().any(|name| name == kind.name()))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn with_open(paths: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a directory");
        for (number, path) in paths.iter().enumerate() {
            symlink(path, dir.path().join(number.to_string())).expect("a link");
        }
        dir
    }

    #[test]
    fn device_files_are_known_by_their_place() {
        let dir = with_open(&[
            "socket:[17]",
            "/dev/nvidia0",
            "/dev/nvidiactl",
            "/dev/infiniband/rdma_cm",
            "/home/gdrdrv",
            "/dev/infiniband/uverbs3",
            "/newroot/dev/gdrdrv",
            "/dev/nvidia-fs2",
        ]);
        let wanted = [
            (DeviceFile::Verbs, PathBuf::from("/dev/infiniband/uverbs3")),
            (DeviceFile::GdrCopy, PathBuf::from("/newroot/dev/gdrdrv")),
            (DeviceFile::Storage, PathBuf::from("/dev/nvidia-fs2")),
        ];
        assert_eq!(open_in(dir.path()), wanted.into());
        assert_eq!(open_in(&dir.path().join("none")), BTreeMap::new());
    }

    #[test]
    fn looks_take_a_small_part_of_the_time_and_are_never_long_ago() {
        let (looks, start) = (Looks::new(), Instant::now());
        let clock = std::cell::Cell::new(start);
        let looked_at = |at_us: u64, takes_us: u64| {
            clock.set(start + Duration::from_micros(at_us));
            let look = || clock.set(clock.get() + Duration::from_micros(takes_us));
            looks.at_most(|| clock.get(), look).is_some()
        };
        assert!(looked_at(0, 100));
        assert!(!looked_at(101, 100));
        assert!(!looked_at(2_099, 100));
        assert!(looked_at(2_100, 10_000));
        assert!(!looked_at(62_099, 100), "it took long");
        assert!(looked_at(62_100, 0), "and it is long ago");
        assert!(looked_at(62_100, 0), "it takes nothing");
        let dir = with_open(&["/dev/gdrdrv"]);
        assert!(Looks::new().open_in(dir.path()).is_some_and(|open| open.len() == 1));
    }

    #[test]
    fn pins_that_nobody_sees_are_named_with_the_way_out() {
        let dir = with_open(&["/dev/gdrdrv"]);
        let unseen = |_| Err("libgdrapi.so is not loaded".to_owned());
        let why = unseen_pins(dir.path(), &[], unseen).expect("a reason");
        for word in [
            "it has /dev/gdrdrv open",
            "libgdrapi.so is not loaded",
            "NCCL_GDRCOPY_ENABLE=0",
            "SUBLET_WITHOUT_PINS=gdrdrv",
        ] {
            assert!(why.contains(word), "{word}: {why}");
        }
        assert_eq!(unseen_pins(dir.path(), &[DeviceFile::GdrCopy], unseen), None);
        assert_eq!(unseen_pins(dir.path(), &[], |_| Ok(())), None);
    }

    #[test]
    fn kinds_have_names() {
        let names = ["nvidia-fs", "uverbs", "else"].map(str::to_owned);
        assert_eq!(named(&names), [DeviceFile::Verbs, DeviceFile::Storage]);
        assert_eq!(named(&[]), []);
    }
}
