//! Processes under Sublet that have had no GPU memory yet. They join their tenant when they first ask for some, and nobody can ask them
//! anything before. What is known of them stands in their environment, which the kernel shows to their own user.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process;

use tenants::identity::TenantName;
use tenants::run_dir::{RUN_DIR_VARIABLE, RunDir};
use tenants::settings::TENANT_VARIABLE;

use crate::environment::PRELOAD_VARIABLE;
use crate::environment::absolute;
use crate::outsiders;
use crate::run::LIBRARY_NAME;

/// The first process of each tenant in `run_dir`, by the tenant's name. Those that have joined are among them.
pub(crate) fn find(run_dir: &RunDir) -> BTreeMap<String, u32> {
    let run_dir = absolute(run_dir.path());
    let mut found = BTreeMap::new();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    for pid in pids.filter(|pid| *pid != process::id()) {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        if let Some(tenant) = tenant_in(&environment, &run_dir) {
            let first = found.entry(tenant).or_insert(pid);
            *first = pid.min(*first);
        }
    }
    found
}

fn tenant_in(environment: &[u8], run_dir: &Path) -> Option<String> {
    let value = |name: &str| {
        let mut lines = environment.split(|byte| *byte == 0);
        lines.find_map(|line| line.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
    };
    let is_there = Path::new(OsStr::from_bytes(value(RUN_DIR_VARIABLE)?)) == run_dir;
    let library = LIBRARY_NAME.as_bytes();
    let is_under_sublet = value(PRELOAD_VARIABLE)?.windows(library.len()).any(|it| it == library);
    let tenant = std::str::from_utf8(value(TENANT_VARIABLE)?).ok()?;
    (is_there && is_under_sublet).then(|| tenant.to_owned())
}

/// That there is such a process of `tenant`, which has none that can be asked.
pub(crate) fn remark(run_dir: &RunDir, tenant: &TenantName) -> Option<String> {
    let pid = *find(run_dir).get(tenant.as_str())?;
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
        let names = |preload: &str, run_dir: &str| {
            let text = format!("A=1\0SUBLET_TENANT=py\0{preload}\0SUBLET_RUN_DIR={run_dir}\0");
            tenant_in(text.as_bytes(), Path::new("/run/sublet"))
        };
        let preload = "LD_PRELOAD=/lib/other.so:/lib/libsublet.so";
        assert_eq!(names(preload, "/run/sublet").as_deref(), Some("py"));
        assert_eq!(names(preload, "/run/other"), None);
        assert_eq!(names("LD_PRELOAD=/lib/other.so", "/run/sublet"), None);
        assert_eq!(tenant_in(b"", Path::new("/run/sublet")), None);
    }
}
