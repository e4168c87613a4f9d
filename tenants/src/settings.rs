//! The settings of Sublet in the environment: one list for the processes of a job, for the command, and for the page that
//! explains them. [`Settings::read`] reads all settings. A program calls it once and hands the values on. `docs/reference.md`
//! explains each setting.

use std::ffi::OsString;
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::budget::{BUDGET_VARIABLE, Budgets};
use crate::class::{TURNS_VARIABLE, TurnSettings};
use crate::identity::{FamilyName, TenantName};
use crate::run_dir::RUN_DIR_VARIABLE;
use crate::size::Size;
use crate::time;

/// The prefix of the names of all settings.
pub const PREFIX: &str = "SUBLET_";
/// The prefix of the names of variables of this project's own tests.
pub const TEST_PREFIX: &str = "SUBLET_TEST_";
/// Names the tenant that a process belongs to.
pub const TENANT_VARIABLE: &str = "SUBLET_TENANT";
/// Names the family, whose tenants may open each other's memory.
pub const FAMILY_VARIABLE: &str = "SUBLET_FAMILY";
/// The mark of a launch: all processes of one `sublet run` have the same value.
pub const LAUNCH_VARIABLE: &str = "SUBLET_LAUNCH";
/// If 1, a process that cannot join its tenant ends; if 0, it runs on.
pub const REQUIRED_VARIABLE: &str = "SUBLET_REQUIRED";

/// Frameworks for which the Python package has a module.
const FRAMEWORKS: [&str; 6] = ["areal", "nemo_rl", "openrlhf", "slime", "verl", "vllm"];
/// Kinds of device files.
const DEVICE_FILES: [&str; 3] = ["uverbs", "gdrdrv", "nvidia-fs"];

/// The values of all settings that programs of this workspace read.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the environment")]
pub struct Settings {
    /// The memory that the tenant may hold on each GPU.
    pub budgets: Option<Budgets>,
    /// Does a pause skip contents that it need not copy, such as those unchanged since the last pause?
    pub detects_changes: bool,
    /// Tenants that name the same family may open each other's memory.
    pub family: Option<FamilyName>,
    /// The directory for saved contents that are kept in a file.
    pub file_dir: Option<PathBuf>,
    /// The most host memory that the tenant's saved contents may take, in bytes.
    pub host_bytes_max: Option<u64>,
    /// The filter of the log.
    pub log: Option<String>,
    /// Do calls into NCCL fail while only NCCL's memory is released, instead of waiting for it?
    pub fails_without_nccl: bool,
    /// The most host memory, in bytes, that is prepared ahead of the next pause. None: no memory is prepared.
    pub prepares_up_to: Option<u64>,
    /// Does Sublet look for writes to paged memory that no call names?
    pub checks_paging: bool,
    /// Does a process that cannot join its tenant end?
    pub is_required: bool,
    /// The directory where tenants meet.
    pub run_dir: Option<PathBuf>,
    /// Are NCCL's small allocations made as parts of large ones?
    pub uses_slabs: bool,
    /// May saved contents of a paused process go to a file, if another process's pause lacks host memory?
    pub spills: bool,
    /// The tenant.
    pub tenant: Option<TenantName>,
    /// The settings of the tenant's turns.
    pub turns: TurnSettings,
    /// The longest time that a process waits for others. It waits for the rest of its tenant to call `ncclPause` too, and for a
    /// paused tenant whose memory it opens. None: the usual time of each wait.
    pub wait: Option<Duration>,
    /// Names of kinds of device files through which no device memory is pinned.
    pub without_pins: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            budgets: None,
            detects_changes: true,
            family: None,
            file_dir: None,
            host_bytes_max: None,
            log: None,
            fails_without_nccl: false,
            prepares_up_to: None,
            checks_paging: false,
            is_required: false,
            run_dir: None,
            uses_slabs: true,
            spills: false,
            tenant: None,
            turns: TurnSettings::default(),
            wait: None,
            without_pins: Vec::new(),
        }
    }
}

/// A setting whose value is not valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongSetting {
    /// Its name.
    pub name: &'static str,
    /// The name, the value and the expected values.
    pub text: String,
}

/// The function that puts a value into [`Settings`]. Its error has the expected values.
#[derive(Clone, Copy, Debug)]
enum Put {
    Text(fn(&mut Settings, &str) -> Result<(), String>),
    /// Any path is valid.
    Path(fn(&mut Settings, PathBuf)),
}

/// One variable.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Its name.
    pub name: &'static str,
    put: Put,
}

impl Settings {
    /// Reads all settings. `value_of` returns a setting's value by name. An empty value counts as not set, and so does a wrong
    /// one.
    pub fn read(value_of: impl Fn(&str) -> Option<OsString>) -> (Self, Vec<WrongSetting>) {
        let (mut settings, mut wrong) = (Self::default(), Vec::new());
        for Setting { name, put } in SETTINGS {
            let Some(value) = value_of(name).filter(|value| !value.is_empty()) else { continue };
            let outcome = match put {
                Put::Path(put) => {
                    put(&mut settings, value.into());
                    continue;
                }
                Put::Text(put) => match value.to_str() {
                    Some(text) => put(&mut settings, text),
                    None => Err("expected text in UTF-8".to_owned()),
                },
            };
            if let Err(expected) = outcome {
                let text = format!("{name}={}: {expected}", value.display());
                wrong.push(WrongSetting { name, text });
            }
        }
        (settings, wrong)
    }
}

/// Is there a setting of this name?
pub fn is_known(name: &str) -> bool {
    SETTINGS.iter().any(|setting| setting.name == name)
}

fn expected<T>(value: Option<T>, what: &str) -> Result<T, String> {
    value.ok_or_else(|| format!("expected {what}"))
}

fn switch(text: &str) -> Result<bool, String> {
    let value = match text {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    };
    expected(value, "0 or 1")
}

fn parsed<T: FromStr<Err: Display>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: T::Err| error.to_string())
}

fn size(text: &str) -> Result<u64, String> {
    let size = text.parse().ok().map(|Size(bytes)| bytes);
    expected(size, "a size such as 512MiB or 1.5GiB")
}

/// Parses names from `known`, separated by commas or blanks.
fn names(text: &str, known: &[&str]) -> Result<Vec<String>, String> {
    let names: Vec<_> =
        text.split([',', ' ']).filter(|name| !name.is_empty()).map(str::to_owned).collect();
    let are_known = names.iter().all(|name| known.contains(&name.as_str()));
    expected(
        are_known.then_some(names),
        &format!("some of {}, with commas between", known.join(", ")),
    )
}

/// Parses `0`, `1` (no limit) or a size.
fn preparation(text: &str) -> Result<Option<u64>, String> {
    match text {
        "0" => Ok(None),
        "1" => Ok(Some(u64::MAX)),
        _ => size(text).map(Some).map_err(|_| "expected 0, 1, or a size such as 16GiB".to_owned()),
    }
}

fn on_or_off(text: &str) -> Result<bool, String> {
    match text {
        "off" => Ok(false),
        "on" => Ok(true),
        _ => Err("expected on or off".to_owned()),
    }
}

/// Stores `value` in `place`.
fn put<T>(place: &mut T, value: Result<T, String>) -> Result<(), String> {
    value.map(|value| *place = value)
}

/// As [`put`], for a place that may be empty.
fn fill<T>(place: &mut Option<T>, value: Result<T, String>) -> Result<(), String> {
    put(place, value.map(Some))
}

const fn text(name: &'static str, put: fn(&mut Settings, &str) -> Result<(), String>) -> Setting {
    Setting { name, put: Put::Text(put) }
}

const fn path(name: &'static str, put: fn(&mut Settings, PathBuf)) -> Setting {
    Setting { name, put: Put::Path(put) }
}

/// All settings, by name.
pub const SETTINGS: [Setting; 19] = [
    text(BUDGET_VARIABLE, |to, text| fill(&mut to.budgets, parsed(text))),
    text("SUBLET_CHANGES", |to, text| put(&mut to.detects_changes, on_or_off(text))),
    // The Python package reads it.
    text("SUBLET_COMPAT", |_, text| names(text, &FRAMEWORKS).map(drop)),
    text(FAMILY_VARIABLE, |to, text| {
        fill(&mut to.family, FamilyName::new(text).map_err(|error| error.to_string()))
    }),
    path("SUBLET_FILE_DIR", |to, path| to.file_dir = Some(path)),
    text("SUBLET_HOST_BYTES_MAX", |to, text| fill(&mut to.host_bytes_max, size(text))),
    // The command reads it.
    text(LAUNCH_VARIABLE, |_, _| Ok(())),
    text("SUBLET_LOG", |to, text| fill(&mut to.log, Ok(text.to_owned()))),
    text("SUBLET_NCCL_AWAY", |to, text| {
        let value = ["wait", "fail"].contains(&text).then_some(text == "fail");
        put(&mut to.fails_without_nccl, expected(value, "wait or fail"))
    }),
    text("SUBLET_PAGING_CHECK", |to, text| put(&mut to.checks_paging, switch(text))),
    text("SUBLET_PREPARE", |to, text| put(&mut to.prepares_up_to, preparation(text))),
    text(REQUIRED_VARIABLE, |to, text| {
        // A value that is not understood was meant as a 1.
        to.is_required = true;
        put(&mut to.is_required, switch(text))
    }),
    path(RUN_DIR_VARIABLE, |to, path| to.run_dir = Some(path)),
    text("SUBLET_SLABS", |to, text| put(&mut to.uses_slabs, switch(text))),
    text("SUBLET_SPILL", |to, text| put(&mut to.spills, switch(text))),
    text(TENANT_VARIABLE, |to, text| {
        fill(&mut to.tenant, TenantName::new(text).map_err(|error| error.to_string()))
    }),
    text(TURNS_VARIABLE, |to, text| put(&mut to.turns, parsed(text))),
    text("SUBLET_WAIT", |to, text| fill(&mut to.wait, time::parse(text))),
    text("SUBLET_WITHOUT_PINS", |to, text| put(&mut to.without_pins, names(text, &DEVICE_FILES))),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::ffi::OsStr;
    use std::fs;
    use std::os::unix::ffi::OsStrExt as _;
    use std::path::Path;

    use super::*;
    use crate::class::Class;

    fn root() -> &'static Path {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
    }

    fn read(variables: &[(&str, &str)]) -> (Settings, Vec<WrongSetting>) {
        for (name, _) in variables {
            assert!(is_known(name), "{name}");
        }
        Settings::read(|name| {
            let (_, value) = variables.iter().find(|(known, _)| *known == name)?;
            Some(value.into())
        })
    }

    #[test]
    fn each_setting_gets_to_its_place() {
        let (settings, wrong) = read(&[
            ("SUBLET_BUDGET", "0=60GiB"),
            ("SUBLET_CHANGES", "off"),
            ("SUBLET_COMPAT", "slime, vllm"),
            ("SUBLET_FAMILY", "rl"),
            ("SUBLET_FILE_DIR", "/nvme"),
            ("SUBLET_HOST_BYTES_MAX", "1.5GiB"),
            ("SUBLET_LAUNCH", "12-34"),
            ("SUBLET_LOG", "debug"),
            ("SUBLET_NCCL_AWAY", "fail"),
            ("SUBLET_PAGING_CHECK", "1"),
            ("SUBLET_PREPARE", "1"),
            ("SUBLET_REQUIRED", "1"),
            ("SUBLET_RUN_DIR", "/run/sublet"),
            ("SUBLET_SLABS", "0"),
            ("SUBLET_SPILL", "1"),
            ("SUBLET_TENANT", "train"),
            ("SUBLET_TURNS", "auto,class=background"),
            ("SUBLET_WAIT", "1500ms"),
            ("SUBLET_WITHOUT_PINS", "uverbs,gdrdrv"),
        ]);
        assert_eq!(wrong, []);
        assert_eq!(settings.budgets.unwrap().to_string(), "0=60GiB");
        assert!(!settings.detects_changes);
        assert_eq!(settings.family, Some(FamilyName::new("rl").unwrap()));
        assert_eq!(settings.tenant, Some(TenantName::new("train").unwrap()));
        let dirs = [settings.file_dir, settings.run_dir].map(Option::unwrap);
        assert_eq!(dirs, ["/nvme", "/run/sublet"].map(PathBuf::from));
        assert_eq!(settings.host_bytes_max, Some(3 << 29));
        assert_eq!(settings.log.as_deref(), Some("debug"));
        assert_eq!(settings.prepares_up_to, Some(u64::MAX));
        assert!(settings.fails_without_nccl && settings.is_required && settings.spills);
        assert!(settings.checks_paging);
        assert!(!settings.uses_slabs);
        assert_eq!((settings.turns.queues, settings.turns.class), (true, Class::Background));
        assert_eq!(settings.wait, Some(Duration::from_millis(1500)));
        assert_eq!(settings.without_pins, ["uverbs", "gdrdrv"]);
        assert_eq!(read(&[("SUBLET_PREPARE", "16g")]).0.prepares_up_to, Some(16 << 30));
    }

    #[test]
    fn an_empty_value_counts_as_not_set() {
        assert!(SETTINGS.is_sorted_by(|one, other| one.name < other.name));
        for Setting { name, .. } in &SETTINGS {
            assert!(name.starts_with(PREFIX) && !name.starts_with(TEST_PREFIX), "{name}");
            let (settings, wrong) = read(&[(name, "")]);
            assert_eq!(wrong, [], "{name}");
            assert_eq!(format!("{settings:?}"), format!("{:?}", Settings::default()), "{name}");
        }
    }

    #[test]
    fn a_wrong_value_is_named_with_what_is_expected_and_counts_as_not_set() {
        for (name, value, expected) in [
            ("SUBLET_CHANGES", "banana", "SUBLET_CHANGES=banana: expected on or off"),
            ("SUBLET_SLABS", "yes", "SUBLET_SLABS=yes: expected 0 or 1"),
            ("SUBLET_SPILL", "/nvme", "expected 0 or 1"),
            ("SUBLET_TURNS", "always", "'always' is none of auto, deep, class=, weight= and wait="),
            ("SUBLET_TURNS", "auto,class=urgent", "'urgent' is no class"),
            ("SUBLET_TURNS", "weight=0", "'0' is no weight"),
            ("SUBLET_TURNS", "wait=soon", "'soon' is no time"),
            ("SUBLET_WAIT", "2d", "'2d' is no time; examples: 500ms"),
            ("SUBLET_HOST_BYTES_MAX", "much", "expected a size such as 512MiB or 1.5GiB"),
            ("SUBLET_PREPARE", "yes", "expected 0, 1, or a size"),
            ("SUBLET_NCCL_AWAY", "no", "expected wait or fail"),
            ("SUBLET_COMPAT", "verl,trl", "expected some of areal, nemo_rl"),
            ("SUBLET_WITHOUT_PINS", "uverb", "expected some of uverbs"),
            ("SUBLET_BUDGET", "60PB", "is no budget"),
            ("SUBLET_TENANT", "../x", "is no tenant name"),
            ("SUBLET_FAMILY", "a b", "is no family's name"),
        ] {
            let (settings, wrong) = read(&[(name, value)]);
            let [WrongSetting { name: named, text }] = &wrong[..] else { panic!("{wrong:?}") };
            assert!(text.starts_with(&format!("{name}={value}: ")), "{text}");
            assert!(*named == name && text.contains(expected), "{text}");
            assert_eq!(format!("{settings:?}"), format!("{:?}", Settings::default()), "{name}");
        }
        let (settings, wrong) = read(&[("SUBLET_REQUIRED", "yes")]);
        assert!(settings.is_required && wrong.len() == 1);
    }

    #[test]
    fn paths_are_any_and_all_else_is_text() {
        let bytes = OsStr::from_bytes(b"/\xff");
        let (settings, wrong) = Settings::read(|_| Some(bytes.to_owned()));
        assert_eq!(settings.file_dir.as_deref(), Some(Path::new(bytes)));
        assert_eq!(wrong.len(), SETTINGS.len() - 2);
        assert!(wrong.iter().all(|wrong| wrong.text.ends_with("expected text in UTF-8")));
    }

    #[test]
    fn the_page_of_settings_lists_exactly_these() {
        let page = fs::read_to_string(root().join("docs/reference.md")).unwrap();
        let (_, rest) = page.split_once("\n## Settings\n").expect("the part about settings");
        let rows = rest.split("\n## ").next().unwrap_or_default().lines();
        let cells = rows.filter_map(|row| row.strip_prefix("| `")?.split(" | ").next());
        let listed: BTreeSet<_> = cells
            .flat_map(|cell| cell.split('`'))
            .filter(|name| name.starts_with(PREFIX))
            .collect();
        let known: BTreeSet<_> = SETTINGS.iter().map(|setting| setting.name).collect();
        assert_eq!(listed, known);
    }

    #[test]
    fn frameworks_are_those_that_the_python_package_knows() {
        let text = fs::read_to_string(root().join("ffi/python/sublet/compat/__init__.py")).unwrap();
        let list = text.lines().find_map(|line| line.strip_prefix("FRAMEWORKS")).unwrap();
        let known: Vec<_> = list.split('"').skip(1).step_by(2).collect();
        assert_eq!(known, FRAMEWORKS);
    }
}
