//! The environment of this process. All settings of Sublet are [`Settings`]. Other projects' variables apply if Sublet's are not
//! set: `GMM_LOG` (0 to 5), `GMM_IPC_DIR`, `AMEM_ENABLE` and `AMEM_GROUPID`, `TMS_DISK_BACKUP_DIR`.

use std::borrow::Cow;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

use nix::unistd::{Pid, getsid};
use sublet_registrations::device_files::{self, DeviceFile};
use tenants::budget::{BUDGET_VARIABLE, gpus};
use tenants::identity::TenantName;
use tenants::keep::is_in_memory;
use tenants::phase::HELD_MAX;
use tenants::settings::{Settings, TENANT_VARIABLE, WrongSetting};
use vmm_pool::driver::{DeviceOrdinal, PciAddress};

static GROUP_ID: AtomicI32 = AtomicI32::new(GROUP_UNSET);
const GROUP_UNSET: i32 = i32::MIN;

/// The environment as it was when this process joined its tenant.
static JOINED_WITH: OnceLock<Environment> = OnceLock::new();

/// The values of the variables that matter here.
#[derive(Clone, Debug)]
pub(crate) struct Environment {
    pub(crate) settings: Settings,
    /// Settings that count as not set.
    pub(crate) wrong: Vec<WrongSetting>,
    /// The directory of the user's session.
    pub(crate) session_dir: Option<PathBuf>,
    visible_devices: Option<String>,
    is_amem_enabled: bool,
    amem_group: Option<i32>,
    nccl_ep_timeout_ms: Option<u64>,
}

/// Returns the environment from the time when this process joined its tenant; before that, the present one.
pub(crate) fn current() -> Cow<'static, Environment> {
    JOINED_WITH.get().map_or_else(|| Cow::Owned(Environment::read()), Cow::Borrowed)
}

/// Returns the environment at the time of joining, which applies from then on.
pub(crate) fn at_joining() -> &'static Environment {
    JOINED_WITH.get_or_init(Environment::read)
}

/// Returns the variable's text, unless it is empty.
pub(crate) fn variable(name: &str) -> Option<String> {
    value_of(name)?.into_string().ok().filter(|value| !value.is_empty())
}

fn value_of(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

impl Environment {
    fn read() -> Self {
        let (mut settings, wrong) = Settings::read(value_of);
        let absolute = |dir: PathBuf| std::path::absolute(&dir).unwrap_or(dir);
        let theirs = |name| variable(name).map(PathBuf::from);
        settings.file_dir =
            settings.file_dir.or_else(|| theirs("TMS_DISK_BACKUP_DIR")).map(absolute);
        settings.run_dir = settings.run_dir.or_else(|| theirs("GMM_IPC_DIR"));
        settings.log = settings.log.or_else(amem_level);
        Self {
            settings,
            wrong,
            session_dir: theirs("XDG_RUNTIME_DIR"),
            visible_devices: variable("CUDA_VISIBLE_DEVICES"),
            is_amem_enabled: variable("AMEM_ENABLE").is_some_and(|value| value != "0"),
            amem_group: variable("AMEM_GROUPID").and_then(|value| value.parse().ok()),
            nccl_ep_timeout_ms: variable("NCCL_EP_TIMEOUT_MS")
                .and_then(|value| value.parse().ok())
                .filter(|value| *value > 0),
        }
    }

    /// Returns the tenant: `SUBLET_TENANT`, or the group of `AMem`, or the terminal session. So the processes of one launcher get
    /// the same tenant.
    ///
    /// # Errors
    /// The name is not valid for a tenant; the text says which names are.
    pub(crate) fn tenant(&self) -> Result<TenantName, String> {
        if let Some(wrong) = self.wrong.iter().find(|wrong| wrong.name == TENANT_VARIABLE) {
            return Err(wrong.text.clone());
        }
        if let Some(named) = &self.settings.tenant {
            return Ok(named.clone());
        }
        let group = self.group_id();
        let name = if self.is_amem_enabled || group != 0 {
            format!("amem-{group}")
        } else {
            // It cannot fail for this process itself.
            format!("session-{}", getsid(None).map_or(0, Pid::as_raw))
        };
        TenantName::new(&name).map_err(|error| error.to_string())
    }

    /// Are there any budgets, valid or not?
    pub(crate) fn has_budgets(&self) -> bool {
        let is_wrong = |wrong: &WrongSetting| wrong.name == BUDGET_VARIABLE;
        self.settings.budgets.is_some() || self.wrong.iter().any(is_wrong)
    }

    /// Returns the group of this process: the one that was set, or `AMEM_GROUPID`, or 0.
    pub(crate) fn group_id(&self) -> i32 {
        match GROUP_ID.load(Ordering::Relaxed) {
            GROUP_UNSET => self.amem_group.unwrap_or(0),
            id => id,
        }
    }

    /// Returns the kinds of device files that, by the settings, pin no device memory.
    pub(crate) fn without_pins(&self) -> Vec<DeviceFile> {
        device_files::named(&self.settings.without_pins)
    }

    /// Returns the notes for people about the settings of this process.
    pub(crate) fn notes(&self) -> Vec<String> {
        let mut notes: Vec<_> = self
            .wrong
            .iter()
            // The environment has a wrong `SUBLET_` setting. The message has its name, its value and what is expected. The
            // setting has no effect. Correct it, or unset it; `sublet run` refuses to start with it.
            .map(|wrong| format!("{}; the process runs as if this were not set", wrong.text))
            .collect();
        notes.extend(self.short_device_clock());
        notes
    }

    /// Returns why a pause may make kernels of this process count another rank as failed, if the environment has such a setting.
    fn short_device_clock(&self) -> Option<String> {
        let value = self.nccl_ep_timeout_ms?;
        let held_ms = HELD_MAX.as_millis();
        (u128::from(value) < held_ms).then(|| {
            format!(
                "NCCL_EP_TIMEOUT_MS={value}: a pause may hold a rank for {held_ms} ms, and kernels of NCCL EP then count it as \
                 failed; set it above that, or pause between steps"
            )
        })
    }
}

/// Returns a warning if files in `dir` would free no host memory.
pub(crate) fn no_room_in(dir: &Path) -> Option<String> {
    is_in_memory(dir).then(|| {
        format!(
            "SUBLET_SPILL=1 has no effect, because files in {} lie in host memory (tmpfs): set SUBLET_FILE_DIR to a \
             directory on a disk",
            dir.display()
        )
    })
}

/// Returns the log filter of `GMM_LOG`.
fn amem_level() -> Option<String> {
    let names = ["off", "error", "warn", "info", "debug", "trace"];
    names.get(variable("GMM_LOG")?.parse::<usize>().ok()?).map(|name| (*name).to_owned())
}

/// Sets the group of this process. It has precedence over the environment.
pub(crate) fn set_group_id(id: i32) {
    GROUP_ID.store(id, Ordering::Relaxed);
}

/// Is this process the `sublet` command? The command shows the machine as it is, also inside a tenant.
pub(crate) fn is_the_command() -> bool {
    const NAME: &str = "sublet";
    std::env::current_exe().is_ok_and(|path| path.file_name().is_some_and(|name| name == NAME))
}

/// Returns the number of a device on this machine: by its place in the driver's list, or without a list by
/// `CUDA_VISIBLE_DEVICES`.
pub(crate) fn gpu_index(device: DeviceOrdinal, address: Option<PciAddress>) -> Option<u32> {
    let list = Path::new(gpus::NODE_GPUS);
    if list.is_dir() {
        return gpus::index_of(list, address?);
    }
    let environment = current();
    gpus::index_behind(environment.visible_devices.as_deref(), u32::try_from(device.0).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_files_that_a_setting_may_name_are_those_that_are_known() {
        let names = DeviceFile::ALL.map(DeviceFile::name).join(",");
        let (settings, wrong) = Settings::read(|name| {
            (name == device_files::WITHOUT_PINS).then(|| OsString::from(&names))
        });
        assert_eq!(wrong, []);
        assert_eq!(device_files::named(&settings.without_pins), DeviceFile::ALL);
    }
}
