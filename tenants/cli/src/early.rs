//! Processes under Sublet that have had no GPU memory yet. They join their tenant when they first ask for some, and nobody can ask them
//! anything before. What is known of them stands in their environment, which the kernel shows to their own user.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process;

use nix::unistd::geteuid;
use tenants::identity::TenantName;
use tenants::run_dir::{RUN_DIR_VARIABLE, RunDir};
use tenants::settings::TENANT_VARIABLE;

use crate::environment::PRELOAD_VARIABLE;
use crate::environment::absolute;
use crate::outsiders;
use crate::run::LIBRARY_NAME;

/// The first process of each tenant in `run_dir`, by the tenant's name. Those that have joined are among them.
pub(crate) fn find(run_dir: &RunDir) -> BTreeMap<TenantName, u32> {
    let own_uid = geteuid().as_raw();
    let run_dir = absolute(run_dir.path());
    let mut found = BTreeMap::new();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    for pid in pids.filter(|pid| *pid != process::id()) {
        let dir = format!("/proc/{pid}");
        // Root may read what other users wrote.
        if !fs::metadata(&dir).is_ok_and(|found| found.uid() == own_uid) {
            continue;
        }
        let environment = fs::read(dir + "/environ").unwrap_or_default();
        if let Some(tenant) = tenant_in(&environment, &run_dir) {
            let first = found.entry(tenant).or_insert(pid);
            *first = pid.min(*first);
        }
    }
    found
}

fn tenant_in(environment: &[u8], run_dir: &Path) -> Option<TenantName> {
    let value = |name: &str| {
        let mut lines = environment.split(|byte| *byte == 0);
        lines.find_map(|line| line.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
    };
    let is_there = Path::new(OsStr::from_bytes(value(RUN_DIR_VARIABLE)?)) == run_dir;
    let library = LIBRARY_NAME.as_bytes();
    let is_under_sublet = value(PRELOAD_VARIABLE)?.windows(library.len()).any(|it| it == library);
    let tenant = TenantName::new(std::str::from_utf8(value(TENANT_VARIABLE)?).ok()?).ok()?;
    (is_there && is_under_sublet).then_some(tenant)
}

/// That there is such a process of `tenant`, which has none that can be asked.
pub(crate) fn remark(run_dir: &RunDir, tenant: &TenantName) -> Option<String> {
    let pid = *find(run_dir).get(tenant)?;
    Some(format!(
        "process {pid} ({}) runs as tenant '{tenant}' and has no GPU memory yet: it joins when it first asks for some",
        outsiders::command_of(pid)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_of_the_tenant_that_its_environment_names_if_it_meets_here() {
        let found = |tenant: &str, preload: &str, run_dir: &str| {
            let text =
                format!("A=1\0SUBLET_TENANT={tenant}\0{preload}\0SUBLET_RUN_DIR={run_dir}\0");
            tenant_in(text.as_bytes(), Path::new("/run/sublet"))
        };
        let names = |preload: &str, run_dir: &str| found("py", preload, run_dir);
        let preload = "LD_PRELOAD=/lib/other.so:/lib/libsublet.so";
        assert_eq!(names(preload, "/run/sublet"), TenantName::new("py").ok());
        assert_eq!(names(preload, "/run/other"), None);
        assert_eq!(names("LD_PRELOAD=/lib/other.so", "/run/sublet"), None);
        for name in ["py\u{1b}[2J", "a\nspoof  active", "../other", ""] {
            assert_eq!(found(name, preload, "/run/sublet"), None, "{name:?}");
        }
        assert_eq!(tenant_in(b"", Path::new("/run/sublet")), None);
    }
}
