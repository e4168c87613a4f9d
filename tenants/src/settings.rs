//! The variables of the environment that Sublet reads: one list for the processes of a job, for the command, and for the page that explains
//! them. A value is checked here before it is used. `docs/reference.md` says what each is about.

use std::str::FromStr;

use vmm_pool::PieceBytes;

use crate::budget::Budgets;
use crate::identity::{FamilyName, TenantName};
use crate::size::Size;
use crate::turns::{Class, TURNS_AUTO, Weight};

/// What the names of all settings begin with.
pub const PREFIX: &str = "SUBLET_";
/// What the names of variables of this project's own tests begin with.
pub const TEST_PREFIX: &str = "SUBLET_TEST_";
/// Whether a process that cannot join its tenant ends: 1, or 0.
pub const REQUIRED_VARIABLE: &str = "SUBLET_REQUIRED";

/// What a setting may say.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// 0 or 1.
    Switch,
    /// One of these words.
    Word(&'static [&'static str]),
    /// Some of these words, with commas or blanks between them.
    Words(&'static [&'static str]),
    /// A whole number of milliseconds.
    Milliseconds,
    /// A [`Size`]. A bare number counts bytes.
    Bytes,
    /// A path, or any other text.
    Text,
    /// What this function accepts. Its error says what is expected.
    Parsed(fn(&str) -> Result<(), String>),
}

/// One variable.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Its name.
    pub name: &'static str,
    /// What it may say.
    pub kind: Kind,
    /// What holds while it is not set, or empty.
    pub default: &'static str,
}

impl Setting {
    /// Does `value` say what it can? An empty one counts as not set.
    ///
    /// # Errors
    /// It does not; the text names the setting, the value and what is expected.
    pub fn check(&self, value: &str) -> Result<(), String> {
        if value.is_empty() {
            return Ok(());
        }
        self.kind.check(value).map_err(|expected| format!("{}={value}: {expected}", self.name))
    }
}

impl Kind {
    fn check(self, value: &str) -> Result<(), String> {
        let one_of = |words: &[&str]| words.join(", ");
        match self {
            Self::Switch => expect(matches!(value, "0" | "1"), || "0 or 1".to_owned()),
            Self::Word(words) => expect(words.contains(&value), || one_of(words)),
            Self::Words(words) => {
                let all_known = names_in(value).all(|name| words.contains(&name));
                expect(all_known, || format!("some of {}, with commas between", one_of(words)))
            }
            Self::Milliseconds => {
                expect(value.parse::<u64>().is_ok(), || "a whole number of milliseconds".to_owned())
            }
            Self::Bytes => expect(bytes_in(value, 1).is_some(), || {
                "a size such as 512MiB or 1.5GiB".to_owned()
            }),
            Self::Text => Ok(()),
            Self::Parsed(check) => check(value),
        }
    }
}

fn expect(is_so: bool, what: impl Fn() -> String) -> Result<(), String> {
    if is_so { Ok(()) } else { Err(format!("expected {}", what())) }
}

/// The setting of this name, if it is one.
pub fn named(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.name == name)
}

/// The names in a list with commas or blanks between them.
pub fn names_in(text: &str) -> impl Iterator<Item = &str> {
    text.split([',', ' ']).filter(|name| !name.is_empty())
}

/// A size in bytes. A bare number counts units of `unit` bytes.
pub fn bytes_in(text: &str, unit: u64) -> Option<u64> {
    match text.parse::<u64>() {
        Ok(count) => count.checked_mul(unit),
        Err(_) => text.parse().ok().map(|Size(bytes)| bytes),
    }
}

/// Pieces of the size that `SUBLET_PIECE_KIB` names.
pub fn piece_bytes(text: &str) -> Option<PieceBytes> {
    PieceBytes::new(bytes_in(text, 1 << 10)?)
}

/// The most host memory, in bytes, that `SUBLET_PREPARE` has brought in: none by `0`, without a bound by `1`.
///
/// # Errors
/// It is neither that nor a size; the text says what is expected.
pub fn preparation(text: &str) -> Result<Option<u64>, String> {
    match text {
        "0" => Ok(None),
        "1" => Ok(Some(u64::MAX)),
        _ => text
            .parse()
            .map(|Size(bytes)| Some(bytes))
            .map_err(|_| "expected 0, 1, or a size such as 16GiB".to_owned()),
    }
}

fn parses<T: FromStr<Err: std::fmt::Display>>(text: &str) -> Result<(), String> {
    text.parse::<T>().map(drop).map_err(|error| error.to_string())
}

fn parsed_family(text: &str) -> Result<(), String> {
    FamilyName::new(text).map(drop).map_err(|error| error.to_string())
}

fn parsed_tenant(text: &str) -> Result<(), String> {
    TenantName::new(text).map(drop).map_err(|error| error.to_string())
}

fn parsed_piece(text: &str) -> Result<(), String> {
    expect(piece_bytes(text).is_some(), || "a power of two from 16 to 2048".to_owned())
}

fn parsed_preparation(text: &str) -> Result<(), String> {
    preparation(text).map(drop)
}

const fn setting(name: &'static str, kind: Kind, default: &'static str) -> Setting {
    Setting { name, kind, default }
}

/// All settings, by name.
pub const SETTINGS: [Setting; 29] = [
    setting("SUBLET_ASK_TORCH", Kind::Switch, "1"),
    setting("SUBLET_BUDGET", Kind::Parsed(parses::<Budgets>), "none"),
    setting("SUBLET_CLASS", Kind::Parsed(parses::<Class>), "fair"),
    setting(
        "SUBLET_COMPAT",
        Kind::Words(&["areal", "nemo_rl", "openrlhf", "slime", "verl"]),
        "none",
    ),
    setting("SUBLET_DELTA", Kind::Switch, "1"),
    setting("SUBLET_FAMILY", Kind::Parsed(parsed_family), "none"),
    setting("SUBLET_FAMILY_TIMEOUT_MS", Kind::Milliseconds, "30000"),
    setting("SUBLET_FILE_CACHE", Kind::Switch, "0"),
    setting("SUBLET_FILE_DIR", Kind::Text, "/tmp"),
    setting("SUBLET_HOST_BYTES_MAX", Kind::Bytes, "nine tenths of what is available"),
    setting("SUBLET_LIBRARY", Kind::Text, "beside the command, or ../lib"),
    setting("SUBLET_LOG", Kind::Text, "warn"),
    setting("SUBLET_NCCL_AWAY", Kind::Word(&["wait", "fail"]), "wait"),
    setting("SUBLET_PIECE_KIB", Kind::Parsed(parsed_piece), "64"),
    setting("SUBLET_PREPARE", Kind::Parsed(parsed_preparation), "0"),
    setting(REQUIRED_VARIABLE, Kind::Switch, "0"),
    setting("SUBLET_RUN_DIR", Kind::Text, "$XDG_RUNTIME_DIR/sublet, else /tmp/sublet-<uid>"),
    setting("SUBLET_SLABS", Kind::Switch, "1"),
    setting("SUBLET_SPILL_DIR", Kind::Text, "none"),
    setting("SUBLET_SPILL_TO_MEMORY", Kind::Switch, "0"),
    setting("SUBLET_TENANT", Kind::Parsed(parsed_tenant), "the terminal session's"),
    setting("SUBLET_TOGETHER_TIMEOUT_MS", Kind::Milliseconds, "120000"),
    setting("SUBLET_TURNS", Kind::Word(&[TURNS_AUTO]), "none"),
    setting("SUBLET_TURNS_TIMEOUT_MS", Kind::Milliseconds, "120000"),
    setting("SUBLET_VERIFY_CONTENTS", Kind::Switch, "0"),
    setting("SUBLET_VLLM", Kind::Switch, "0"),
    setting("SUBLET_WEIGHT", Kind::Parsed(parses::<Weight>), "1"),
    setting("SUBLET_WITHOUT_PINS", Kind::Words(&["uverbs", "gdrdrv", "nvidia-fs"]), "none"),
    setting("SUBLET_ZERO", Kind::Switch, "1"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    fn root() -> &'static Path {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
    }

    fn check(name: &str, value: &str) -> Result<(), String> {
        named(name).unwrap_or_else(|| panic!("{name} is no setting")).check(value)
    }

    #[test]
    fn names_are_in_order_and_each_default_that_is_a_value_is_one() {
        assert!(SETTINGS.is_sorted_by(|one, other| one.name < other.name));
        for setting in &SETTINGS {
            assert!(setting.name.starts_with(PREFIX));
            let is_prose = setting.default == "none" || setting.default.contains([' ', '\'']);
            assert!(is_prose || setting.check(setting.default).is_ok(), "{setting:?}");
            assert_eq!(setting.check(""), Ok(()), "an empty value is one that is not set");
        }
    }

    #[test]
    fn a_wrong_value_is_refused_with_its_name_and_what_is_expected() {
        for (name, value, expected) in [
            ("SUBLET_ZERO", "banana", "SUBLET_ZERO=banana: expected 0 or 1"),
            ("SUBLET_VLLM", "yes", "SUBLET_VLLM=yes: expected 0 or 1"),
            ("SUBLET_NCCL_AWAY", "3", "SUBLET_NCCL_AWAY=3: expected wait, fail"),
            ("SUBLET_TURNS", "always", "SUBLET_TURNS=always: expected auto"),
            ("SUBLET_TURNS_TIMEOUT_MS", "2m", "expected a whole number of milliseconds"),
            ("SUBLET_HOST_BYTES_MAX", "much", "expected a size such as 512MiB or 1.5GiB"),
            ("SUBLET_PIECE_KIB", "48", "expected a power of two from 16 to 2048"),
            ("SUBLET_PREPARE", "yes", "expected 0, 1, or a size"),
            ("SUBLET_COMPAT", "verl,trl", "expected some of areal, nemo_rl"),
            ("SUBLET_WITHOUT_PINS", "uverb", "expected some of uverbs"),
            ("SUBLET_BUDGET", "60PB", "is no budget"),
            ("SUBLET_CLASS", "urgent", "is no class"),
            ("SUBLET_WEIGHT", "0", "is no weight"),
            ("SUBLET_TENANT", "../x", "is no tenant name"),
            ("SUBLET_FAMILY", "a b", "is no family's name"),
        ] {
            let error = check(name, value).unwrap_err();
            assert!(error.starts_with(&format!("{name}={value}: ")), "{error}");
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn sizes_take_units_in_every_setting_and_a_bare_number_has_the_unit_of_its_name() {
        for (text, unit, bytes) in [
            ("512MiB", 1, 512 << 20),
            ("1.5GiB", 1, 3 << 29),
            ("1048576", 1, 1 << 20),
            ("4096", 1 << 20, 4 << 30),
            ("4GiB", 1 << 20, 4 << 30),
        ] {
            assert_eq!(bytes_in(text, unit), Some(bytes), "{text}");
        }
        assert_eq!(bytes_in("99999999999999", 1 << 20), None);
        assert_eq!(piece_bytes("64"), piece_bytes("64KiB"));
        assert_eq!(preparation("1.5GiB"), Ok(Some(3 << 29)));
        assert_eq!((preparation("0"), preparation("1")), (Ok(None), Ok(Some(u64::MAX))));
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
        let Some(Setting { kind: Kind::Words(words), .. }) = named("SUBLET_COMPAT") else {
            panic!("SUBLET_COMPAT is a list of words");
        };
        let list = text.lines().find_map(|line| line.strip_prefix("FRAMEWORKS")).unwrap();
        let known: Vec<_> = list.split('"').skip(1).step_by(2).collect();
        assert_eq!(known, *words);
    }
}
