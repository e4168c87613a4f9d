//! The environment of this command, read once.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use tenants::settings::{self, Settings, WrongSetting};

/// The loader's list of objects to load first.
pub(crate) const PRELOAD_VARIABLE: &str = "LD_PRELOAD";

/// The most letters in which an unknown name may differ from the proposed name.
const TYPOS_MAX: usize = 3;

/// The environment and the place of this command, as they were at the start.
#[derive(Debug, Default)]
pub(crate) struct Environment {
    variables: BTreeMap<OsString, OsString>,
    settings: Settings,
    wrong: Vec<WrongSetting>,
    executable: Option<PathBuf>,
}

impl Environment {
    pub(crate) fn read() -> Self {
        Self::new(std::env::vars_os().collect(), std::env::current_exe().ok())
    }

    #[cfg(test)]
    pub(crate) fn of(variables: &[(&str, &str)], executable: Option<PathBuf>) -> Self {
        let variables = variables.iter().map(|(name, value)| (name.into(), value.into()));
        Self::new(variables.collect(), executable)
    }

    fn new(variables: BTreeMap<OsString, OsString>, executable: Option<PathBuf>) -> Self {
        let (settings, wrong) = Settings::read(|name| variables.get(OsStr::new(name)).cloned());
        Self { variables, settings, wrong, executable }
    }

    /// Returns the values of Sublet's own variables.
    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the value of `name`. An empty value counts as absent.
    pub(crate) fn get(&self, name: &str) -> Option<&OsStr> {
        let value = self.variables.get(OsStr::new(name))?;
        (!value.is_empty()).then_some(value)
    }

    /// Returns all variables, by name.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&OsString, &OsString)> {
        self.variables.iter()
    }

    /// As [`Environment::get`], if the value is text.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.get(name)?.to_str()
    }

    /// Describes settings with invalid values. Settings that `passed_over` names are left out.
    pub(crate) fn wrong_settings(&self, passed_over: &[&str]) -> Vec<String> {
        let told = self.wrong.iter().filter(|wrong| !passed_over.contains(&wrong.name));
        told.map(|wrong| wrong.text.clone()).collect()
    }

    /// Describes names that look like settings but are none, each with the nearest real name.
    pub(crate) fn unknown_settings(&self) -> Vec<String> {
        let names = self.variables.keys().filter_map(|name| name.to_str());
        let unknown = names.filter(|name| {
            name.starts_with(settings::PREFIX)
                && !name.starts_with(settings::TEST_PREFIX)
                && !settings::is_known(name)
        });
        let said = unknown.map(|name| {
            let known = settings::SETTINGS.iter().map(|known| known.name);
            let nearest = known.min_by_key(|known| strsim::levenshtein(name, known));
            let most = TYPOS_MAX.min((name.len() - settings::PREFIX.len()) / 2);
            let near = nearest.filter(|known| strsim::levenshtein(name, known) <= most);
            let hint = near.map(|known| format!("; did you mean {known}?"));
            format!("{name} is not a Sublet setting{}", hint.unwrap_or_default())
        });
        said.collect()
    }

    /// Returns the sources of the run directory: its own variable, and the user's runtime directory.
    pub(crate) fn run_dir_sources(&self) -> (Option<PathBuf>, Option<PathBuf>) {
        (self.settings.run_dir.clone(), self.get("XDG_RUNTIME_DIR").map(PathBuf::from))
    }

    /// Returns the absolute path of the file `name` next to this command, or in `../lib`.
    pub(crate) fn installed(&self, name: impl AsRef<Path>) -> Option<PathBuf> {
        let folder = self.executable.as_ref()?.parent()?;
        let mut candidates = ["", "../lib"].map(|place| folder.join(place).join(&name)).into_iter();
        candidates.find(|path| path.is_file()).map(|path| absolute(&path))
    }
}

/// Returns an absolute path, because the command may change its directory. A path that cannot be made absolute is returned
/// unchanged.
pub(crate) fn absolute(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_settings_are_named_unless_they_are_replaced() {
        let environment = Environment::of(
            &[("SUBLET_SLABS", "banana"), ("SUBLET_FAMILY", "a b"), ("SUBLET_CHANGES", "")],
            None,
        );
        let wrong = environment.wrong_settings(&["SUBLET_FAMILY"]);
        assert_eq!(wrong, ["SUBLET_SLABS=banana: expected 0 or 1"]);
        assert_eq!(environment.wrong_settings(&[]).len(), 2);
    }

    #[test]
    fn unknown_settings_are_named_with_the_nearest_known_one() {
        let environment = Environment::of(
            &[
                ("SUBLET_CHANGE", "off"),
                ("SUBLET_TEST_SEED", "1"),
                ("SUBLET_COLOUR_OF_THE_SKY", "blue"),
                ("SUBLET_FOO", "1"),
                ("SUBLET_SLABS", "1"),
                ("OTHER", "1"),
            ],
            None,
        );
        assert_eq!(
            environment.unknown_settings(),
            [
                "SUBLET_CHANGE is not a Sublet setting; did you mean SUBLET_CHANGES?",
                "SUBLET_COLOUR_OF_THE_SKY is not a Sublet setting",
                "SUBLET_FOO is not a Sublet setting",
            ]
        );
    }
}
