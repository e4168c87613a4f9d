//! Settings from environment variables, and the process group, which a call may set instead of its variable. All of our
//! own are listed in [`tenants::settings`], which says what each may hold. Other projects' names count after our own:
//! `GMM_LOG` (0 to 5), `GMM_IPC_DIR`, `AMEM_ENABLE` and `AMEM_GROUPID`, `TMS_DISK_BACKUP_DIR`.

#![expect(unsafe_code, reason = "asks for the terminal session")]

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use sublet_registrations::device_files::{self, DeviceFile};
use tenants::budget::{BUDGET_VARIABLE, Budgets, gpus};
use tenants::host_memory::is_in_memory;
use tenants::identity::FamilyName;
use tenants::phase::HELD_MAX;
use tenants::settings::{self, REQUIRED_VARIABLE};
use tenants::turns::{
    CLASS_VARIABLE, Class, TURNS_TIMEOUT_VARIABLE, TURNS_VARIABLE, WEIGHT_VARIABLE, Weight,
};
use vmm_pool::Pieces;
use vmm_pool::driver::{DeviceOrdinal, PciAddress};

/// How long `ncclPause` waits for the other processes to call it too, unless the environment says another time. They
/// are at the same step, so the wait is short unless one of them is stuck.
pub(crate) const TOGETHER_TIMEOUT: Duration = Duration::from_mins(2);

/// How long an allocation that does not fit waits for others to make way, where it queues: less than the ten minutes after which PyTorch's watchdog
/// ends a job whose ranks wait for each other.
const TURNS_TIMEOUT: Duration = Duration::from_mins(2);

static GROUP_ID: AtomicI32 = AtomicI32::new(GROUP_UNSET);
const GROUP_UNSET: i32 = i32::MIN;

/// The variable's text, unless it is empty.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// As [`variable`], once the list of settings has accepted it.
///
/// # Errors
/// It says something else than it can; the text says what is expected.
fn setting(name: &str) -> Result<Option<String>, String> {
    let value = variable(name);
    if let (Some(setting), Some(value)) = (settings::named(name), &value) {
        setting.check(value)?;
    }
    Ok(value)
}

/// A setting whose text was accepted, read.
fn read<T: FromStr>(name: &str) -> Result<Option<T>, String> {
    Ok(setting(name)?.and_then(|value| value.parse().ok()))
}

/// A time that a setting gives in milliseconds.
fn time(name: &str) -> Result<Option<Duration>, String> {
    Ok(read(name)?.map(Duration::from_millis))
}

/// A setting that is 0 or 1.
fn switch(name: &str, default: bool) -> Result<bool, String> {
    Ok(setting(name)?.map_or(default, |value| value == "1"))
}

/// Must this process end where it cannot join its tenant? A value that is not understood says yes: it was meant as one.
pub(crate) fn is_required() -> bool {
    switch(REQUIRED_VARIABLE, false).unwrap_or(true)
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
    Ok(setting("SUBLET_FAMILY")?.and_then(|name| FamilyName::new(&name).ok()))
}

/// What the tenant is to others when they take turns, and its weight.
///
/// # Errors
/// What is named is no class or no weight; the text says which.
pub(crate) fn turns() -> Result<(Class, Weight), String> {
    let (class, weight) = (read(CLASS_VARIABLE)?, read(WEIGHT_VARIABLE)?);
    Ok((class.unwrap_or_default(), weight.unwrap_or_default()))
}

/// Whether resumes and allocations of the tenant queue, and how long an allocation waits.
///
/// # Errors
/// A variable says something else than it can; the text says which.
pub(crate) fn queues() -> Result<Option<Duration>, String> {
    if setting(TURNS_VARIABLE)?.is_none() {
        return Ok(None);
    }
    Ok(Some(time(TURNS_TIMEOUT_VARIABLE)?.unwrap_or(TURNS_TIMEOUT)))
}

/// How long opening memory of another tenant waits while that is paused; the usual where nothing is said.
///
/// # Errors
/// The variable is no number; the text says which.
pub(crate) fn family_timeout() -> Result<Option<Duration>, String> {
    time("SUBLET_FAMILY_TIMEOUT_MS")
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
    Ok(setting("SUBLET_HOST_BYTES_MAX")?.and_then(|value| settings::bytes_in(&value, 1)))
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
    read(BUDGET_VARIABLE)
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
    Ok(setting("SUBLET_NCCL_AWAY")?.is_some_and(|value| value == "fail"))
}

/// What a pause looks for before it copies.
///
/// # Errors
/// A variable says something else than it can; the text says which.
pub(crate) fn pieces() -> Result<Pieces, String> {
    let piece_bytes = setting("SUBLET_PIECE_KIB")?.and_then(|value| settings::piece_bytes(&value));
    Ok(Pieces {
        piece_bytes: piece_bytes.unwrap_or_default(),
        finds_zeros: switch("SUBLET_ZERO", true)?,
        finds_unchanged: switch("SUBLET_DELTA", true)?,
        is_verified: switch("SUBLET_VERIFY_CONTENTS", false)?,
    })
}

/// Up to how much host memory, in bytes, is brought in ahead of the next pause: without a bound by `1`, not at all by `0`
/// or where nothing is said.
///
/// # Errors
/// The variable is neither that nor a size; the text says what is.
pub(crate) fn prepares_up_to() -> Result<Option<u64>, String> {
    setting("SUBLET_PREPARE")?.map_or(Ok(None), |value| settings::preparation(&value))
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
///
/// # Errors
/// The variable is neither 0 nor 1; the text says what it is.
pub(crate) fn file_cache() -> Result<bool, String> {
    switch("SUBLET_FILE_CACHE", false)
}

/// How long a process waits for the others of its tenant to ask for the same.
///
/// # Errors
/// The variable is no number of milliseconds; the text says what it is.
pub(crate) fn together_timeout() -> Result<Option<Duration>, String> {
    time("SUBLET_TOGETHER_TIMEOUT_MS")
}

#[cfg(test)]
mod tests {
    use tenants::settings::{self, Kind};

    use super::DeviceFile;

    #[test]
    fn device_files_that_a_setting_names_are_those_that_are_known() {
        let names = DeviceFile::ALL.map(DeviceFile::name);
        let kind = settings::named("SUBLET_WITHOUT_PINS").map(|setting| setting.kind);
        assert!(matches!(kind, Some(Kind::Words(words)) if words == names), "{kind:?}");
    }
}
