//! Settings from environment variables, and the process group, which a call may set in place of its variable. Other
//! projects' names of the same settings count too, after our own.
//!
//! | ours | another project's | says |
//! | --- | --- | --- |
//! | `SUBLET_LOG` | `GMM_LOG` (0 to 5) | what is logged |
//! | `SUBLET_RUN_DIR` | `GMM_IPC_DIR` | where processes find each other |
//! | `SUBLET_TENANT` | `AMEM_ENABLE`, `AMEM_GROUPID` | which tenant is joined |
//! | `SUBLET_FAMILY` | | tenants that name the same may open each other's memory |
//! | `SUBLET_FAMILY_TIMEOUT_MS` | | how long opening such memory waits for a tenant that is paused |
//! | `SUBLET_CLASS` | | what the tenant is to others when they take turns |
//! | `SUBLET_WEIGHT` | | how many quanta it has at a time, where it is fair |
//! | `SUBLET_TURNS` | | `auto`: allocations that do not fit queue for others to make way |
//! | `SUBLET_TURNS_TIMEOUT_MS` | | how long such an allocation waits |
//! | `SUBLET_FILE_DIR` | `TMS_DISK_BACKUP_DIR` | where contents in files are saved |
//! | `SUBLET_FILE_CACHE` | | whether contents in files go through the page cache |
//! | `SUBLET_SPILL_DIR` | | where saved contents go when another tenant's pause is short of host memory; they stay where it is not set |
//! | `SUBLET_HOST_BYTES_MAX` | | how much host memory a pause may take |
//! | `SUBLET_ZERO` | | 0: pieces that are all zero are saved as any others |
//! | `SUBLET_DELTA` | | 0: no copies are kept for the next pause, and unchanged pieces are saved as any others |
//! | `SUBLET_NO_LOOK` | | tags whose memory is not looked at for either |
//! | `SUBLET_PIECE_KIB` | | the size of these pieces |
//! | `SUBLET_LINKS` | | 2: copies of one GPU take a neighbour's link too |
//! | `SUBLET_LINKS_KEEP` | | 1: the context on that neighbour stays for the next time |
//! | `SUBLET_LINKS_MIN_MIB` | | less than this is copied through one link |
//! | `SUBLET_EARLY_RELEASE` | | 1: pauses give memory back while they save; read by `tenants`, in whoever pauses |
//! | `SUBLET_HAND_OVER` | | `none`, `plain` or `all`: which memory changes hands in swaps; read by `tenants`, in whoever swaps |
//! | `SUBLET_KERNEL_COPIES` | | 0: contents come back by copy engines alone |
//! | `SUBLET_VERIFY_CONTENTS` | | 1: what is not saved for that is compared byte by byte |
//! | `SUBLET_PREPARE` | | whether host memory for the next pause is brought in ahead, and how much at most |
//! | `SUBLET_BUDGET` | | how much device memory the tenant may hold on which GPU |
//! | `SUBLET_SLABS` | | 0: NCCL's small allocations are not parts of large ones |
//! | `SUBLET_NCCL_AWAY` | | `wait` or `fail`: what calls into NCCL do while its memory alone is away |
//! | `SUBLET_WITHOUT_PINS` | | through which device files no device memory is pinned |
//! | `SUBLET_SPILL_TO_MEMORY` | | 1: saved contents go to `SUBLET_SPILL_DIR` though files there lie in host memory; for tests |
//! | `SUBLET_TOGETHER_TIMEOUT_MS` | | how long `ncclPause` waits for the other processes |

#![expect(unsafe_code, reason = "asks for the terminal session")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use sublet_registrations::device_files::{self, DeviceFile};
use tenants::budget::{BUDGET_VARIABLE, BudgetError, Budgets, gpus};
use tenants::host_memory::is_in_memory;
use tenants::identity::FamilyName;
use tenants::numa;
use tenants::phase::HELD_MAX;
use tenants::region::{NO_LOOK_VARIABLE, TAG_BYTES_MAX};
use tenants::size::{NoSize, Size};
use tenants::turns::{
    CLASS_VARIABLE, Class, TURNS_AUTO, TURNS_TIMEOUT_VARIABLE, TURNS_VARIABLE, WEIGHT_VARIABLE,
    Weight,
};
use vmm_pool::driver::{DeviceOrdinal, PciAddress};
use vmm_pool::{Links, PieceBytes, Pieces};

/// How long `ncclPause` waits for the other processes to call it too, unless the environment says another time. They
/// are at the same step, so the wait is short unless one of them is stuck.
const TOGETHER_TIMEOUT: Duration = Duration::from_mins(2);

/// How long an allocation that does not fit waits for others to make way, where it queues: less than the ten minutes after which PyTorch's watchdog
/// ends a job whose ranks wait for each other.
const TURNS_TIMEOUT: Duration = Duration::from_mins(2);

static GROUP_ID: AtomicI32 = AtomicI32::new(GROUP_UNSET);
const GROUP_UNSET: i32 = i32::MIN;

/// The variable's text, unless it is empty.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The filter of the log; by default warnings.
pub(crate) fn log_filter() -> String {
    let amem_level = || {
        let names = ["off", "error", "warn", "info", "debug", "trace"];
        names.get(variable("GMM_LOG")?.parse::<usize>().ok()?).copied()
    };
    variable("SUBLET_LOG").unwrap_or_else(|| amem_level().unwrap_or("warn").to_owned())
}

/// Why a pause may make kernels of this process count another rank as failed, where the environment says so.
pub(crate) fn short_device_clock() -> Option<String> {
    const NAME: &str = "NCCL_EP_TIMEOUT_MS";
    let value = variable(NAME)?.parse::<u64>().ok().filter(|value| *value > 0)?;
    (u128::from(value) < HELD_MAX.as_millis()).then(|| {
        format!(
            "{NAME}={value}: a pause may hold a rank for {} ms, and kernels of NCCL EP then count it as failed; set it \
             above that, or pause between steps",
            HELD_MAX.as_millis()
        )
    })
}

/// The kinds of device files that are said to pin no device memory.
pub(crate) fn without_pins() -> Vec<DeviceFile> {
    device_files::kinds_of(&variable(device_files::WITHOUT_PINS).unwrap_or_default())
}

/// The run directory that was asked for, if one was.
pub(crate) fn run_dir() -> Option<PathBuf> {
    variable("SUBLET_RUN_DIR").or_else(|| variable("GMM_IPC_DIR")).map(PathBuf::from)
}

/// The directory of the user's session.
pub(crate) fn session_dir() -> Option<PathBuf> {
    variable("XDG_RUNTIME_DIR").map(PathBuf::from)
}

/// The name of the tenant: `SUBLET_TENANT`, or the group of `AMem`, or the terminal session, so that the processes of one
/// launcher find each other.
pub(crate) fn tenant_name() -> String {
    variable("SUBLET_TENANT").unwrap_or_else(|| {
        let group = group_id();
        if variable("AMEM_ENABLE").is_some_and(|value| value != "0") || group != 0 {
            return format!("amem-{group}");
        }
        // SAFETY: the call has no argument that could be wrong; 0 is this process.
        let session = unsafe { libc::getsid(0) };
        format!("session-{session}")
    })
}

/// The family that this process names, if any.
///
/// # Errors
/// What is named is no family's name; the text says what is.
pub(crate) fn family() -> Result<Option<FamilyName>, String> {
    let name = variable("SUBLET_FAMILY").map(|name| FamilyName::new(&name));
    name.transpose().map_err(|error| format!("SUBLET_FAMILY: {error}"))
}

/// What the tenant is to others when they take turns, and its weight.
///
/// # Errors
/// What is named is no class or no weight; the text says which.
pub(crate) fn turns() -> Result<(Class, Weight), String> {
    let class = variable(CLASS_VARIABLE).map(|text| text.parse::<Class>()).transpose();
    let class = class.map_err(|error| format!("{CLASS_VARIABLE}: {error}"))?;
    let weight = variable(WEIGHT_VARIABLE).map(|text| text.parse::<Weight>()).transpose();
    let weight = weight.map_err(|error| format!("{WEIGHT_VARIABLE}: {error}"))?;
    Ok((class.unwrap_or_default(), weight.unwrap_or_default()))
}

/// Whether resumes and allocations of the tenant queue, and how long an allocation waits.
///
/// # Errors
/// A variable says something else than it can; the text says which.
pub(crate) fn queues() -> Result<Option<Duration>, String> {
    match variable(TURNS_VARIABLE).as_deref() {
        None => return Ok(None),
        Some(TURNS_AUTO) => {}
        Some(other) => {
            return Err(format!(
                "{TURNS_VARIABLE} is '{other}', and nothing queues: say {TURNS_AUTO}, or nothing"
            ));
        }
    }
    let parse = |value: String| {
        let refused = || {
            format!("{TURNS_TIMEOUT_VARIABLE} is '{value}', and nothing queues: give milliseconds")
        };
        value.parse().map(Duration::from_millis).map_err(|_| refused())
    };
    let wait = variable(TURNS_TIMEOUT_VARIABLE).map(parse).transpose()?;
    Ok(Some(wait.unwrap_or(TURNS_TIMEOUT)))
}

/// How long opening memory of another tenant waits while that is paused; the usual where nothing is said.
///
/// # Errors
/// The variable is no number; the text says which.
pub(crate) fn family_timeout() -> Result<Option<Duration>, String> {
    const NAME: &str = "SUBLET_FAMILY_TIMEOUT_MS";
    let parse = |value: String| {
        let ms = value.parse().map_err(|_| format!("{NAME} is '{value}': give milliseconds"))?;
        Ok(Duration::from_millis(ms))
    };
    variable(NAME).map(parse).transpose()
}

/// The group of this process: as set, or `AMEM_GROUPID`, or 0.
pub(crate) fn group_id() -> i32 {
    match GROUP_ID.load(Ordering::Relaxed) {
        GROUP_UNSET => variable("AMEM_GROUPID").and_then(|value| value.parse().ok()).unwrap_or(0),
        id => id,
    }
}

/// Sets the group of this process, whatever the environment says.
pub(crate) fn set_group_id(id: i32) {
    GROUP_ID.store(id, Ordering::Relaxed);
}

/// The most host memory that saved contents may take, in bytes.
///
/// # Errors
/// The variable is no number; the text says which.
pub(crate) fn host_bytes_max() -> Result<Option<u64>, String> {
    let parse = |value: String| {
        value
            .parse()
            .map_err(|_| format!("SUBLET_HOST_BYTES_MAX is '{value}': give a number of bytes"))
    };
    variable("SUBLET_HOST_BYTES_MAX").map(parse).transpose()
}

/// Is this process the `sublet` command? It shows the machine as it is, wherever it is run.
pub(crate) fn is_the_command() -> bool {
    const NAME: &str = "sublet";
    std::env::current_exe().is_ok_and(|path| path.file_name().is_some_and(|name| name == NAME))
}

/// Are there any budgets? Not whether they can be read.
pub(crate) fn has_budgets() -> bool {
    variable(BUDGET_VARIABLE).is_some()
}

/// What the tenant may hold on each GPU.
///
/// # Errors
/// The variable says no budgets; the text says what would.
pub(crate) fn budgets() -> Result<Option<Budgets>, String> {
    let refused = |error: BudgetError| {
        format!("{BUDGET_VARIABLE} is not understood, and no budget is kept to: {error}")
    };
    variable(BUDGET_VARIABLE).map(|text| text.parse().map_err(refused)).transpose()
}

/// The number of a device on this machine: by its place in the driver's list, or where there is none by
/// `CUDA_VISIBLE_DEVICES`.
pub(crate) fn gpu_index(device: DeviceOrdinal, address: Option<PciAddress>) -> Option<u32> {
    let list = Path::new(gpus::NODE_GPUS);
    if list.is_dir() {
        return gpus::index_of(list, address?);
    }
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    gpus::index_behind(visible.as_deref(), u32::try_from(device.0).ok()?)
}

/// A variable that is 0 or 1.
///
/// # Errors
/// It is something else; the text says what.
fn switch(name: &str, default: bool) -> Result<bool, String> {
    match variable(name).as_deref() {
        None => Ok(default),
        Some("0") => Ok(false),
        Some("1") => Ok(true),
        Some(value) => Err(format!("{name} is '{value}': give 0 or 1")),
    }
}

/// May a kernel of ours copy to a GPU, where its copy engine is slow?
///
/// # Errors
/// The variable is neither 0 nor 1; the text says what it is.
pub(crate) fn may_kernels_copy() -> Result<bool, String> {
    switch("SUBLET_KERNEL_COPIES", true)
}

/// Are NCCL's small allocations made as parts of large ones?
///
/// # Errors
/// The variable is neither 0 nor 1; the text says what it is.
pub(crate) fn slabs() -> Result<bool, String> {
    switch("SUBLET_SLABS", true)
}

/// Do calls into NCCL fail while its memory alone is away, instead of waiting for it?
///
/// # Errors
/// The variable says neither; the text says so.
pub(crate) fn nccl_fails_while_away() -> Result<bool, String> {
    match variable("SUBLET_NCCL_AWAY").as_deref() {
        None | Some("wait") => Ok(false),
        Some("fail") => Ok(true),
        Some(other) => Err(format!(
            "SUBLET_NCCL_AWAY is '{other}', and calls into NCCL wait while its memory is away: say wait or fail"
        )),
    }
}

/// What a pause looks for before it copies.
///
/// # Errors
/// A variable says something else than it can; the text says which.
pub(crate) fn pieces() -> Result<Pieces, String> {
    let piece_bytes = match variable("SUBLET_PIECE_KIB") {
        None => PieceBytes::default(),
        Some(value) => {
            let bytes = value.parse().ok().and_then(|kib: u64| kib.checked_mul(1024));
            let refused =
                || format!("SUBLET_PIECE_KIB is '{value}': give a power of two from 16 to 2048");
            bytes.and_then(PieceBytes::new).ok_or_else(refused)?
        }
    };
    Ok(Pieces {
        piece_bytes,
        finds_zeros: switch("SUBLET_ZERO", true)?,
        finds_unchanged: switch("SUBLET_DELTA", true)?,
        is_verified: switch("SUBLET_VERIFY_CONTENTS", false)?,
    })
}

/// How copies of one GPU take two links, where they are to.
///
/// # Errors
/// A variable says something else than it can; the text says which.
pub(crate) fn links() -> Result<Option<Links>, String> {
    let count = variable("SUBLET_LINKS");
    match count.as_deref() {
        None | Some("1") => return Ok(None),
        Some("2") => {}
        Some(value) => {
            return Err(format!(
                "SUBLET_LINKS is '{value}', and each GPU's copies take its own link: give 1 or 2"
            ));
        }
    }
    let usual = Links::default();
    let least_bytes = match variable("SUBLET_LINKS_MIN_MIB") {
        None => usual.least_bytes,
        Some(value) => {
            let bytes = value.parse().ok().and_then(|mib: u64| mib.checked_mul(1 << 20));
            bytes
                .ok_or_else(|| format!("SUBLET_LINKS_MIN_MIB is '{value}': give a number of MiB"))?
        }
    };
    let shares_link = |one, other| numa::share_bridge(Path::new("/sys"), one, other);
    let keeps_context = switch("SUBLET_LINKS_KEEP", false)?;
    Ok(Some(Links { least_bytes, keeps_context, shares_link, ..usual }))
}

/// Tags whose memory no pause looks at, whatever their regions say.
///
/// # Errors
/// The variable names what no tag can be; the text says what.
pub(crate) fn no_look() -> Result<BTreeSet<String>, String> {
    variable(NO_LOOK_VARIABLE).map_or_else(|| Ok(BTreeSet::new()), |text| tags_in(&text))
}

fn tags_in(text: &str) -> Result<BTreeSet<String>, String> {
    let tags: BTreeSet<String> = text.split(',').map(|tag| tag.trim().to_owned()).collect();
    let is_none = |tag: &&String| !(1..=TAG_BYTES_MAX).contains(&tag.len());
    match tags.iter().find(is_none) {
        Some(tag) => Err(format!(
            "{NO_LOOK_VARIABLE} is '{text}', and '{tag}' is no tag: all memory is looked at; name tags of 1 to \
             {TAG_BYTES_MAX} bytes with commas between them"
        )),
        None => Ok(tags),
    }
}

/// Up to how much host memory, in bytes, is brought in ahead of the next pause: without a bound by `1`, not at all by `0`
/// or where nothing is said.
///
/// # Errors
/// The variable is neither that nor a size; the text says what is.
pub(crate) fn prepares_up_to() -> Result<Option<u64>, String> {
    variable("SUBLET_PREPARE").map_or(Ok(None), |value| bound_of(&value))
}

fn bound_of(value: &str) -> Result<Option<u64>, String> {
    let refused = || {
        format!(
            "SUBLET_PREPARE is '{value}', and nothing is brought in ahead of a pause: say 1, or how much at most, such as \
             16GiB"
        )
    };
    match value {
        "0" => return Ok(None),
        "1" => return Ok(Some(u64::MAX)),
        _ => {}
    }
    value.parse().map(|Size(bytes)| Some(bytes)).map_err(|NoSize| refused())
}

/// The directory that contents in files are saved in, as an absolute path. It may not be there: the first pause that
/// needs it fails then, with a message that names it.
pub(crate) fn file_dir() -> Option<PathBuf> {
    let named = variable("SUBLET_FILE_DIR").or_else(|| variable("TMS_DISK_BACKUP_DIR"))?;
    Some(std::path::absolute(&named).unwrap_or(PathBuf::from(named)))
}

/// The directory that saved contents may go to when another tenant's pause is short of host memory, as an absolute path.
///
/// # Errors
/// Files there lie in host memory, so that nothing would be gained; `SUBLET_SPILL_TO_MEMORY=1`, which is for tests, allows it.
pub(crate) fn spill_dir() -> Result<Option<PathBuf>, String> {
    let Some(named) = variable("SUBLET_SPILL_DIR") else { return Ok(None) };
    let dir = std::path::absolute(&named).unwrap_or(PathBuf::from(named));
    if is_in_memory(&dir) && !switch("SUBLET_SPILL_TO_MEMORY", false)? {
        return Err(format!(
            "SUBLET_SPILL_DIR is {}, where files lie in host memory (tmpfs), so that contents which went there would make no room: name a \
             directory on a disk; none of them goes there",
            dir.display()
        ));
    }
    Ok(Some(dir))
}

/// Do contents in files go through the page cache, also where the filesystem takes them past it?
pub(crate) fn file_cache() -> bool {
    variable("SUBLET_FILE_CACHE").is_some_and(|value| value != "0")
}

/// How long a process waits for the others of its tenant to ask for the same.
pub(crate) fn together_timeout() -> Duration {
    variable("SUBLET_TOGETHER_TIMEOUT_MS")
        .and_then(|value| value.parse().ok())
        .map_or(TOGETHER_TIMEOUT, Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use super::{bound_of, tags_in};

    #[test]
    fn tags_are_read_and_what_is_none_is_named() {
        let tags = ["kv", "nccl"].map(str::to_owned).into();
        assert_eq!(tags_in("kv, nccl"), Ok(tags));
        for text in ["kv,", ",", &"x".repeat(129)] {
            let error = tags_in(text).unwrap_err();
            assert!(error.contains(text) && error.contains("is no tag"), "{error}");
        }
    }

    #[test]
    fn sizes_are_read_and_anything_else_is_named() {
        for (text, bytes) in [
            ("0", None),
            ("1", Some(u64::MAX)),
            ("4096", Some(4096)),
            ("512M", Some(512 << 20)),
            ("16GiB", Some(16 << 30)),
            ("16 gb", Some(16 << 30)),
            ("2T", Some(2 << 40)),
            ("8k", Some(8 << 10)),
        ] {
            assert_eq!(bound_of(text), Ok(bytes), "{text}");
        }
        for text in ["yes", "-1", "16 GPUs", "GiB", "99999999999999999999", "99999999T", "1.5G"] {
            let error = bound_of(text).unwrap_err();
            assert!(error.contains(text) && error.contains("16GiB"), "{error}");
        }
    }
}
