//! Processes under Sublet that have had no GPU memory yet. They join their tenant at their first allocation, and cannot be
//! contacted before. Only their environment is known, which the kernel shows to their own user.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use nix::unistd::geteuid;
use procfs::process::{Process, all_processes};
use tenants::code::Code;
use tenants::identity::TenantName;
use tenants::run_dir::{RUN_DIR_VARIABLE, RunDir};
use tenants::settings::TENANT_VARIABLE;

use crate::environment::PRELOAD_VARIABLE;
use crate::environment::absolute;
use crate::failure::{EXIT_UNCHANGED, Failure};
use crate::outsiders;
use crate::run::LIBRARY_NAME;

/// Returns the first process of each tenant in `run_dir`, by the tenant's name. This includes processes that have joined.
pub(crate) fn find(run_dir: &RunDir) -> BTreeMap<TenantName, u32> {
    let mut found = BTreeMap::new();
    for (tenant, pid) in all(run_dir) {
        let first = found.entry(tenant).or_insert(pid);
        *first = pid.min(*first);
    }
    found
}

/// Returns this user's processes under Sublet that use `run_dir`, each with its tenant.
pub(crate) fn all(run_dir: &RunDir) -> impl Iterator<Item = (TenantName, u32)> {
    let own_uid = geteuid().as_raw();
    let run_dir = absolute(run_dir.path());
    let processes = all_processes().into_iter().flatten().flatten();
    processes.filter_map(move |process| {
        let pid = process.pid().cast_unsigned();
        // Root may read what other users wrote.
        if pid == std::process::id() || process.uid().ok() != Some(own_uid) {
            return None;
        }
        Some((tenant_in(&process.environ().unwrap_or_default(), &run_dir)?, pid))
    })
}

fn tenant_in(environment: &HashMap<OsString, OsString>, run_dir: &Path) -> Option<TenantName> {
    let mut preloaded =
        environment.get(OsStr::new(PRELOAD_VARIABLE))?.as_bytes().windows(LIBRARY_NAME.len());
    let is_under_sublet = preloaded.any(|it| it == LIBRARY_NAME.as_bytes());
    named_in(environment, run_dir).filter(|_| is_under_sublet)
}

/// Returns the tenant of `run_dir` that an environment names, whatever libraries are preloaded.
fn named_in(environment: &HashMap<OsString, OsString>, run_dir: &Path) -> Option<TenantName> {
    let value = |name: &str| environment.get(OsStr::new(name));
    let is_there = Path::new(value(RUN_DIR_VARIABLE)?) == run_dir;
    let tenant = TenantName::new(value(TENANT_VARIABLE)?.to_str()?).ok()?;
    is_there.then_some(tenant)
}

/// The relation to Sublet of a process that is no member of a tenant.
pub(crate) enum Parentage {
    /// It runs under Sublet, and joins its tenant at its first allocation of GPU memory.
    Early,
    /// The job of this tenant started it, and it runs without Sublet.
    Strayed(TenantName),
    /// No tenant of `run_dir` has started it, as far as the kernel shows it to this user.
    Foreign,
}

/// The longest chain of parents that is followed.
const PARENTS_MAX: usize = 32;

/// Returns the parentage of a process, from its environment and those of its parents.
pub(crate) fn parentage(run_dir: &RunDir, pid: u32) -> Parentage {
    let run_dir = absolute(run_dir.path());
    let mut next = Process::new(pid.cast_signed()).ok();
    for place in 0..PARENTS_MAX {
        let Some(process) = next else { break };
        let environment = process.environ().unwrap_or_default();
        if place == 0 && tenant_in(&environment, &run_dir).is_some() {
            return Parentage::Early;
        }
        if let Some(tenant) = named_in(&environment, &run_dir) {
            return Parentage::Strayed(tenant);
        }
        let parent = process.stat().map(|stat| stat.ppid).ok().filter(|parent| *parent > 1);
        next = parent.and_then(|parent| Process::new(parent).ok());
    }
    Parentage::Foreign
}

/// Returns the tenant that `given` means: the tenant of that name, or the tenant of the process with that id.
///
/// # Errors
/// `given` is the id of a process that no pause reaches.
pub(crate) fn meant(given: &TenantName, run_dir: &RunDir) -> Result<TenantName, Failure> {
    let pid = given.as_str().parse().ok();
    let Some(pid) = pid.filter(|pid| Process::new(u32::cast_signed(*pid)).is_ok()) else {
        return Ok(given.clone());
    };
    let live = run_dir.live_tenants()?;
    if live.contains(given) {
        return Ok(given.clone());
    }
    let dir = |name: &TenantName| run_dir.existing_tenant(name).ok().flatten();
    let is_of = |name: &TenantName| dir(name).is_some_and(|dir| dir.pids().contains(&pid));
    let joined = live.into_iter().find(is_of);
    if let Some(found) =
        joined.or_else(|| all(run_dir).find(|(_, one)| *one == pid).map(|(name, _)| name))
    {
        return Ok(found);
    }
    let who = format!("process {pid} ({})", outsiders::command_of(pid));
    let message = match parentage(run_dir, pid) {
        Parentage::Strayed(tenant) => {
            format!(
                "{who} was started by the job of tenant '{tenant}' without Sublet: no pause reaches it"
            )
        }
        Parentage::Early | Parentage::Foreign => format!(
            "{who} was not started under `sublet run`, so no pause reaches it; NVIDIA's cuda-checkpoint pauses single processes"
        ),
    };
    Err(Failure::new(message, EXIT_UNCHANGED).because(Code::NoSuchTenant))
}

/// Returns a remark if `tenant` has such a process, and no process that can be contacted.
pub(crate) fn remark(run_dir: &RunDir, tenant: &TenantName) -> Option<String> {
    let pid = *find(run_dir).get(tenant)?;
    Some(format!(
        "process {pid} ({}) runs as tenant '{tenant}' and has no GPU memory yet: it joins at its first allocation",
        outsiders::command_of(pid)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_of_the_tenant_that_its_environment_names_if_it_meets_here() {
        let found = |tenant: &str, preload: &str, run_dir: &str| {
            let all = [("A", "1"), ("SUBLET_TENANT", tenant), ("LD_PRELOAD", preload)];
            let all = all.into_iter().chain([("SUBLET_RUN_DIR", run_dir)]);
            let all = all.map(|(name, value)| (name.into(), value.into())).collect();
            tenant_in(&all, Path::new("/run/sublet"))
        };
        let names = |preload: &str, run_dir: &str| found("py", preload, run_dir);
        let preload = "/lib/other.so:/lib/libsublet.so";
        assert_eq!(names(preload, "/run/sublet"), TenantName::new("py").ok());
        assert_eq!(names(preload, "/run/other"), None);
        assert_eq!(names("/lib/other.so", "/run/sublet"), None);
        for name in ["py\u{1b}[2J", "a\nspoof  active", "../other", ""] {
            assert_eq!(found(name, preload, "/run/sublet"), None, "{name:?}");
        }
        assert_eq!(tenant_in(&HashMap::new(), Path::new("/run/sublet")), None);
    }
}
