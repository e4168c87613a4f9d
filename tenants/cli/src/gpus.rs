//! The GPUs of this machine as people know them: index and name as `nvidia-smi` shows them, and the name that all processes
//! share. The source is NVIDIA's management library, or else the kernel driver's files in `/proc`. Without both, a GPU has only
//! its machine-wide name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use serde::{Deserialize, Serialize};
use tenants::budget::gpus;

/// The longest wait for the library. A GPU that has fallen off the bus makes NVIDIA's tools wait for ever.
const TIMEOUT: Duration = Duration::from_secs(3);
/// The number of characters of a machine-wide name that tell a machine's GPUs apart: `GPU-5f00be66`.
const SHORT_CHARS: usize = 12;

/// The number of characters of a machine-wide name after `GPU-`.
const UUID_CHARS: usize = 36;

fn is_uuid(text: &str) -> bool {
    let fits = |(index, byte): (usize, u8)| match index {
        8 | 13 | 18 | 23 => byte == b'-',
        _ => byte.is_ascii_hexdigit(),
    };
    text.bytes().enumerate().all(fits)
}

/// Returns the labels of GPUs. Indices are in order and as ranges: `0-3,6`.
pub(crate) fn labels<'a>(gpus: impl IntoIterator<Item = &'a Gpu>) -> String {
    let (mut indices, mut others) = (BTreeSet::new(), BTreeSet::new());
    for gpu in gpus {
        match gpu.index {
            Some(index) => drop(indices.insert(index)),
            None => drop(others.insert(gpu.label())),
        }
    }
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for index in indices {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == index => *last = index,
            _ => parts.push((index, index)),
        }
    }
    let range = |(first, last): (u32, u32)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    parts.into_iter().map(range).chain(others).collect::<Vec<_>>().join(",")
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Gpu {
    /// As `nvidia-smi` numbers them; an application's own ordinals may differ.
    pub(crate) index: Option<u32>,
    /// Such as `NVIDIA H200`.
    pub(crate) name: Option<String>,
    /// Such as `GPU-5f00be66-6abd-452b-8111-0cecf4164a2a`.
    pub(crate) uuid: String,
    /// Bytes in use by everybody, as the management library tells.
    pub(crate) used_bytes: Option<u64>,
    pub(crate) total_bytes: Option<u64>,
}

impl Gpu {
    fn unknown(uuid: &str) -> Self {
        let uuid = uuid.to_owned();
        Self { index: None, name: None, uuid, used_bytes: None, total_bytes: None }
    }

    /// Returns a label for a narrow column: the index, or the first digits of the machine-wide name.
    pub(crate) fn label(&self) -> String {
        self.index.map_or_else(
            || self.uuid.chars().take(SHORT_CHARS).collect(),
            |index| index.to_string(),
        )
    }

    /// Returns a name for a sentence: `GPU 0 (GPU-5f00be66)`, or `GPU-5f00be66`.
    pub(crate) fn in_words(&self) -> String {
        let short: String = self.uuid.chars().take(SHORT_CHARS).collect();
        self.index.map_or_else(|| short.clone(), |index| format!("GPU {index} ({short})"))
    }
}

/// The memory that a process has on one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "HeldOnGpu"))]
pub(crate) struct GpuBytes {
    /// The GPU, by its machine-wide name.
    pub(crate) uuid: String,
    pub(crate) bytes: u64,
}

/// The GPUs that could be found, in order of their indices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Gpus {
    list: Vec<Gpu>,
    /// The memory of each process on them, by the process id in the management library; none if the library does not answer.
    held: Option<BTreeMap<u32, Vec<GpuBytes>>>,
}

impl Gpus {
    /// Queries this machine for its GPUs, for a bounded time. Without an answer, no GPUs are known.
    pub(crate) fn look() -> Self {
        Self::try_look().unwrap_or_default()
    }

    /// As [`Gpus::look`], but returns none if the machine does not answer. Another query would leave one more hanging thread
    /// behind.
    pub(crate) fn try_look() -> Option<Self> {
        in_time(ask)
    }

    #[cfg(test)]
    pub(crate) fn of(list: Vec<Gpu>) -> Self {
        Self { list, held: None }
    }

    #[cfg(test)]
    pub(crate) fn with_held(list: Vec<Gpu>, held: BTreeMap<u32, Vec<GpuBytes>>) -> Self {
        Self { list, held: Some(held) }
    }

    pub(crate) fn count(&self) -> usize {
        self.list.len()
    }

    /// Returns the memory of each process on each GPU, if the management library reports it. Its ids may be of another PID
    /// namespace.
    pub(crate) fn held(&self) -> Option<&BTreeMap<u32, Vec<GpuBytes>>> {
        self.held.as_ref()
    }

    /// Returns the memory of a process on each GPU, contexts included, or none if it is not known. In another PID namespace, this
    /// process and the management library see different ids.
    pub(crate) fn held_by(&self, pid: u32) -> Option<Vec<GpuBytes>> {
        let held = self.held.as_ref()?;
        held.get(&pid).cloned().or_else(|| knows_all_pids().then(Vec::new))
    }

    /// Returns the GPU with this name. An unknown GPU has only its name.
    pub(crate) fn find(&self, uuid: &str) -> Gpu {
        let known = self.list.iter().find(|gpu| gpu.uuid == uuid);
        known.cloned().unwrap_or_else(|| Gpu::unknown(uuid))
    }

    /// Names several GPUs for a sentence: `GPU 0`, `GPU 0-3,6`, or short names for GPUs without an index.
    pub(crate) fn several<'a>(&self, uuids: impl IntoIterator<Item = &'a str>) -> String {
        let found: Vec<_> = uuids.into_iter().map(|uuid| self.find(uuid)).collect();
        let label = labels(found.iter());
        if found.iter().any(|gpu| gpu.index.is_some()) { format!("GPU {label}") } else { label }
    }

    /// Returns `text` with each full machine-wide name replaced by [`Gpu::in_words`].
    pub(crate) fn named_in(&self, text: &str) -> String {
        let mut parts = text.split("GPU-");
        let mut named = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let rest = part.get(UUID_CHARS..).filter(|_| is_uuid(&part[..UUID_CHARS]));
            if let Some(rest) = rest {
                let uuid = format!("GPU-{}", &part[..UUID_CHARS]);
                named = named.strip_suffix("GPU ").map_or(named.clone(), str::to_owned);
                named += &self.find(&uuid).in_words();
                named += rest;
            } else {
                named += "GPU-";
                named += part;
            }
        }
        named
    }

    /// As [`Self::named_in`] for this machine's GPUs. They are queried only if the text names one.
    pub(crate) fn numbered(text: &str) -> String {
        if text.contains("GPU-") { Self::look().named_in(text) } else { text.to_owned() }
    }

    /// Returns all known GPUs, and the further ones of `uuids`.
    pub(crate) fn with<'a>(&self, uuids: impl IntoIterator<Item = &'a str>) -> Vec<Gpu> {
        let mut all = self.list.clone();
        for uuid in uuids {
            if !all.iter().any(|gpu| gpu.uuid == uuid) {
                all.push(Gpu::unknown(uuid));
            }
        }
        all
    }
}

/// Repeated looks, for commands that go on. After the first look without an answer there are no more, because each would leave a
/// hanging thread behind. The GPUs are then the last known ones, without their own figures.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    last: Gpus,
    is_silent: bool,
}

impl Watched {
    /// Returns the GPUs now, from `ask`, which is [`Gpus::try_look`], and whether this look is the first without an answer.
    pub(crate) fn look(&mut self, ask: impl FnOnce() -> Option<Gpus>) -> (&Gpus, bool) {
        if self.is_silent {
            return (&self.last, false);
        }
        if let Some(found) = ask() {
            self.last = found;
        } else {
            self.is_silent = true;
            self.last.held = None;
            for gpu in &mut self.last.list {
                (gpu.used_bytes, gpu.total_bytes) = (None, None);
            }
        }
        (&self.last, self.is_silent)
    }
}

/// Runs `ask`, which queries the management library, and returns the answer; none if it is too late.
pub(crate) fn in_time<T: Send + 'static>(ask: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (say, said) = channel();
    // A thread that hangs in the library ends with this process.
    let started = thread::Builder::new().spawn(move || say.send(ask()).ok());
    started.ok().and_then(|_| said.recv_timeout(TIMEOUT).ok())
}

fn ask() -> Gpus {
    by_library().unwrap_or_else(|_| by_proc(Path::new(gpus::NODE_GPUS)))
}

fn by_library() -> Result<Gpus, NvmlError> {
    let nvml = Nvml::init()?;
    let mut list = Vec::new();
    let mut held: BTreeMap<u32, Vec<GpuBytes>> = BTreeMap::new();
    for index in 0..nvml.device_count()? {
        // A GPU that does not answer is left out, and the others are shown.
        let Ok(device) = nvml.device_by_index(index) else { continue };
        let Ok(uuid) = device.uuid() else { continue };
        let memory = device.memory_info().ok();
        for process in device.running_compute_processes().unwrap_or_default() {
            if let UsedGpuMemory::Used(bytes) = process.used_gpu_memory {
                held.entry(process.pid).or_default().push(GpuBytes { uuid: uuid.clone(), bytes });
            }
        }
        list.push(Gpu {
            index: Some(index),
            name: device.name().ok(),
            uuid,
            used_bytes: memory.as_ref().map(|memory| memory.used),
            total_bytes: memory.map(|memory| memory.total),
        });
    }
    Ok(Gpus { list, held: Some(held) })
}

/// Is this process in the machine's initial PID namespace? The kernel has a fixed inode for it (`PROC_PID_INIT_INO`).
pub(crate) fn knows_all_pids() -> bool {
    const FIRST: u64 = 0xEFFF_FFFC;
    fs::metadata("/proc/self/ns/pid").is_ok_and(|found| found.ino() == FIRST)
}

/// Reads the GPUs from `/proc`. `nvidia-smi` numbers them by their place on the bus.
fn by_proc(dir: &Path) -> Gpus {
    let gpus = (0..).zip(gpus::places(dir)).filter_map(|(index, place)| {
        let text = fs::read_to_string(dir.join(place).join("information")).ok()?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            Some(line.trim().to_owned())
        };
        // A GPU that no process has used since the machine started is shown with question marks.
        let uuid = field("GPU UUID").filter(|uuid| !uuid.contains('?'))?;
        let name = field("Model");
        Some(Gpu { index: Some(index), name, uuid, used_bytes: None, total_bytes: None })
    });
    Gpus { list: gpus.collect(), held: None }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const UUID: &str = "GPU-5f00be66-6abd-452b-8111-0cecf4164a2a";

    pub(crate) fn h200() -> Gpu {
        Gpu {
            index: Some(3),
            name: Some("NVIDIA H200".to_owned()),
            uuid: UUID.to_owned(),
            used_bytes: Some(20 << 30),
            total_bytes: Some(140 << 30),
        }
    }

    #[test]
    fn a_known_gpu_has_index_and_name_and_another_its_machine_wide_name() {
        let gpus = Gpus::of(vec![h200()]);
        let known = gpus.find(UUID);
        assert_eq!(known.label(), "3");
        assert_eq!(known.in_words(), "GPU 3 (GPU-5f00be66)");
        let other = gpus.find("GPU-00000001-0000-0000-0000-000000000000");
        assert_eq!(other.label(), "GPU-00000001");
        assert_eq!(other.in_words(), "GPU-00000001");
        assert_eq!(gpus.with([UUID, "ordinal-0", "ordinal-0"]).len(), 2);
    }

    #[test]
    fn names_in_a_text_are_short_and_several_gpus_are_ranges() {
        let gpus = Gpus::of(vec![h200()]);
        let text = format!("room on {UUID}: 3 MiB; GPU {UUID} lacks, GPU-5f00be66 and GPU-x");
        let expected = "room on GPU 3 (GPU-5f00be66): 3 MiB; GPU 3 (GPU-5f00be66) lacks, GPU-5f00be66 and GPU-x";
        assert_eq!(gpus.named_in(&text), expected);
        let at = |index| Gpu { index: Some(index), uuid: format!("GPU-{index}"), ..h200() };
        let all = Gpus::of([6, 0, 1, 3, 2].map(at).to_vec());
        assert_eq!(all.several(["GPU-0", "GPU-3", "GPU-2", "GPU-1", "GPU-6"]), "GPU 0-3,6");
        assert_eq!(all.several(["GPU-3"]), "GPU 3");
        assert_eq!(Gpus::default().several([UUID, "ordinal-0"]), "GPU-5f00be66,ordinal-0");
    }

    #[test]
    fn gpus_that_do_not_answer_are_asked_no_more_and_keep_their_names() {
        let mut watched = Watched::default();
        let found = Gpus::of(vec![h200()]);
        assert_eq!(watched.look(|| Some(found.clone())), (&found, false));
        let gone = Gpus::of(vec![Gpu { used_bytes: None, total_bytes: None, ..h200() }]);
        assert_eq!(watched.look(|| None), (&gone, true));
        assert_eq!(watched.look(|| panic!("asked again")), (&gone, false));
    }

    #[test]
    fn without_the_library_the_kernel_driver_tells() {
        let base = tempfile::tempdir().unwrap();
        for (place, uuid) in [("0000:9b:00.0", UUID), ("0000:19:00.0", "GPU-????????-????")] {
            let dir = base.path().join(place);
            fs::create_dir(&dir).unwrap();
            let text = format!(
                "Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n"
            );
            fs::write(dir.join("information"), text).unwrap();
        }
        let found = by_proc(base.path());
        let wanted = Gpu { index: Some(1), used_bytes: None, total_bytes: None, ..h200() };
        assert_eq!(found, Gpus::of(vec![wanted]));
        assert_eq!(by_proc(Path::new("/no/such/directory")), Gpus::default());
    }
}
