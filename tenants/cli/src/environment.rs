//! The environment, read once.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use tenants::run_dir::RUN_DIR_VARIABLE;

/// Names the tenant that a process belongs to.
pub(crate) const TENANT_VARIABLE: &str = "SUBLET_TENANT";
/// Names the family, whose tenants may open each other's memory.
pub(crate) const FAMILY_VARIABLE: &str = "SUBLET_FAMILY";
/// Names the preload object.
pub(crate) const LIBRARY_VARIABLE: &str = "SUBLET_LIBRARY";
/// The loader's list of objects to load first.
pub(crate) const PRELOAD_VARIABLE: &str = "LD_PRELOAD";

/// The environment and the place of this command, as they were at the start.
#[derive(Debug, Default)]
pub(crate) struct Environment {
    variables: BTreeMap<OsString, OsString>,
    executable: Option<PathBuf>,
}

impl Environment {
    pub(crate) fn read() -> Self {
        Self { variables: std::env::vars_os().collect(), executable: std::env::current_exe().ok() }
    }

    #[cfg(test)]
    pub(crate) fn of(variables: &[(&str, &str)], executable: Option<PathBuf>) -> Self {
        let variables = variables.iter().map(|(name, value)| (name.into(), value.into()));
        Self { variables: variables.collect(), executable }
    }

    /// The value of `name`; an empty one counts as absent.
    pub(crate) fn get(&self, name: &str) -> Option<&OsStr> {
        let value = self.variables.get(OsStr::new(name))?;
        (!value.is_empty()).then_some(value)
    }

    /// As [`Environment::get`], when it is text.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.get(name)?.to_str()
    }

    /// What the run directory is chosen from: its own variable, and the user's runtime directory.
    pub(crate) fn run_dir_sources(&self) -> (Option<PathBuf>, Option<PathBuf>) {
        let path = |name| self.get(name).map(PathBuf::from);
        (path(RUN_DIR_VARIABLE), path("XDG_RUNTIME_DIR"))
    }

    /// Where this command lies.
    pub(crate) fn executable(&self) -> Option<&PathBuf> {
        self.executable.as_ref()
    }
}
