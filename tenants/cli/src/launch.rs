//! A launch is all processes that one launcher has started. A tenant's name belongs to one launch at a time. So a second server
//! of the same name does not become a part of the first.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::path::Path;
use std::process;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use procfs::process::Process;
use tenants::coordinator::Interrupt;
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;
use tenants::settings::LAUNCH_VARIABLE;

use crate::environment::Environment;
use crate::failure::{EXIT_UNCHANGED, Failure};
use crate::{early, gpus, outsiders};

/// Variables whose values are the same in all processes of a launch, and differ between launches. Those of a line count together.
const SAME: [&[&str]; 4] = [
    &[LAUNCH_VARIABLE],
    &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    &["PMIX_NAMESPACE"],
    &["TORCHELASTIC_RUN_ID"],
];
/// The run id of torchrun if none was given.
const NO_RUN_ID: &str = "none";
/// The time for a job of the same name to end: a supervisor may have stopped it a moment ago.
const PREDECESSOR_TIMEOUT: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Returns the mark of this launch, which `sublet run` puts into the environment of its job: that of an outer `sublet run`, or a
/// new one.
pub(crate) fn mark(environment: &Environment) -> String {
    let outer = environment.get(LAUNCH_VARIABLE).map(|mark| mark.to_string_lossy().into_owned());
    outer.unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        format!("{}-{}", process::id(), now.as_nanos())
    })
}

fn is_same<'a>(
    one: impl Fn(&str) -> Option<&'a OsStr>,
    other: &HashMap<OsString, OsString>,
) -> bool {
    let is_alike = |name: &&str| {
        let value = one(name).filter(|value| *value != NO_RUN_ID);
        value.is_some() && value == other.get(OsStr::new(name)).map(OsString::as_os_str)
    };
    SAME.iter().any(|names| names.iter().all(is_alike))
}

/// Returns a lock: while it is held, no other `sublet run` chooses or takes a name. None if it is not free in time; two jobs may
/// then get one name.
pub(crate) fn turn(run_dir: &Path) -> Option<File> {
    let file = File::open(run_dir).ok()?;
    gpus::in_time(move || file.lock().ok().map(|()| file)).flatten()
}

/// Returns the processes of `tenant` that another launch has started.
fn others(tenant: &TenantName, run_dir: &RunDir, environment: &Environment) -> Vec<u32> {
    let dir = run_dir.existing_tenant(tenant).ok().flatten();
    let mut pids = dir.map(|dir| dir.pids()).unwrap_or_default();
    pids.extend(early::all(run_dir).filter(|(found, _)| found == tenant).map(|(_, pid)| pid));
    let is_other = |pid: &u32| {
        let process = Process::new(pid.cast_signed());
        let theirs = process.and_then(|process| process.environ()).unwrap_or_default();
        !is_same(|name| environment.get(name), &theirs)
    };
    pids.into_iter().filter(is_other).collect()
}

/// Takes the name `tenant` for this launch. Blocks until a job of that name has ended, for ten seconds at most, and reports the
/// wait to `tell`.
///
/// # Errors
/// A job of another launch has the name, and does not end.
pub(crate) fn take(
    tenant: &TenantName,
    run_dir: &RunDir,
    environment: &Environment,
    tell: fn(&str),
) -> Result<Option<File>, Failure> {
    let deadline = Instant::now() + PREDECESSOR_TIMEOUT;
    let mut is_told = false;
    // Signals end this command as they would the job.
    let (clock, _raise) = Interrupt::new().map_err(|error| Failure::of(&error, EXIT_UNCHANGED))?;
    loop {
        let turn = turn(run_dir.path());
        let others = others(tenant, run_dir, environment);
        let Some(first) = others.first() else { return Ok(turn) };
        drop(turn);
        let who = format!("process {first} ({})", outsiders::command_of(*first));
        if Instant::now() >= deadline {
            return Err(Failure::new(
                format!(
                    "tenant '{tenant}' runs already: {who}. Give this job another name, or end that one; if it is one \
                     job of several commands, start each but the first by `sublet run --join --tenant {tenant} -- \
                     COMMAND`"
                ),
                EXIT_UNCHANGED,
            ));
        }
        if !is_told {
            tell(&format!(
                "tenant '{tenant}' runs already: {who}; waiting for up to 10 s for it to end"
            ));
            is_told = true;
        }
        // The kernel does not report the end of a process that is not a child.
        clock.wait(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_is_known_by_its_own_mark_or_by_that_of_its_launcher() {
        let same = |one: &[(&str, &str)], other: &[(&str, &str)]| {
            let other = other.iter().map(|(name, value)| (name.into(), value.into())).collect();
            let value = |wanted: &str| {
                let found = one.iter().find(|(name, _)| *name == wanted);
                found.map(|(_, value)| OsStr::new(*value))
            };
            is_same(value, &other)
        };
        let step = [("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "0")];
        assert!(same(&step, &step));
        assert!(!same(&step, &[("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "1")]));
        assert!(!same(&step[..1], &step[..1]), "a job has several steps");
        for (name, value, is_alike) in [
            ("SUBLET_LAUNCH", "12-34", true),
            ("PMIX_NAMESPACE", "prterun-node-12@1", true),
            ("TORCHELASTIC_RUN_ID", "abc", true),
            ("TORCHELASTIC_RUN_ID", "none", false),
            ("RANK", "0", false),
        ] {
            assert_eq!(same(&[(name, value)], &[(name, value)]), is_alike, "{name}");
            assert!(!same(&[(name, value)], &[]), "{name}");
        }
        assert!(!same(&[], &[]));
    }

    #[test]
    fn an_inner_launch_has_the_mark_of_the_outer() {
        let outer = Environment::of(&[("SUBLET_LAUNCH", "12-34")], None);
        assert_eq!(mark(&outer), "12-34");
        assert!(mark(&Environment::of(&[], None)).starts_with(&process::id().to_string()));
    }
}
