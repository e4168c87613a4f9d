//! `sublet bug-report`: the facts that the search for a fault needs first, in one text.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, ExitCode};

use tenants::run_dir::RunDir;

use crate::args::{ShowArgs, StatsArgs};
use crate::environment::Environment;
use crate::failure::Failure;
use crate::output::Output;
use crate::{doctor, ps, switch};

/// The prefixes of variables that change the behaviour of Sublet. These variables hold no secrets.
const SETTINGS: [&str; 5] = ["AMEM_", "CUDA_", "NCCL_", "SUBLET_", "TMS_"];
const NOTE: &str = "\
Sublet bug report. It names tenants, commands with their arguments, folders and settings of this user: read it before you send \
it, and take out what is not for others. Add what the job printed with SUBLET_LOG=debug.";

/// Prints the report. A part that is not available is listed with the reason, and the others follow.
pub(crate) fn bug_report(
    environment: &Environment,
    run_dir: Result<RunDir, Failure>,
    output: &mut Output,
) -> ExitCode {
    output.line(NOTE);
    heading(output, "versions");
    for (what, version) in versions() {
        output.line(format!("{what}: {}", version.unwrap_or_else(|| "not known".to_owned())));
    }
    heading(output, "settings");
    for (name, value) in settings(environment) {
        output.line(format!("{name}={value}"));
    }
    let show = ShowArgs { json: true, verbose: false };
    let all = StatsArgs { tenant: None, show };
    part(output, "sublet doctor --json", |output| doctor::doctor(show, environment, output));
    match run_dir {
        Ok(dir) => {
            part(output, "sublet ps --json", |output| ps::ps(&all, false, &dir, output));
            part(output, "sublet turns --json", |output| switch::turns(show, &dir, output));
        }
        Err(failure) => part(output, "run directory", |_| Err(failure)),
    }
    ExitCode::SUCCESS
}

fn heading(output: &mut Output, title: &str) {
    output.line("");
    output.line(format!("== {title}"));
}

fn part(
    output: &mut Output,
    title: &str,
    print: impl FnOnce(&mut Output) -> Result<ExitCode, Failure>,
) {
    heading(output, title);
    if let Err(failure) = print(output) {
        output.line(format!("failed: {failure}"));
    }
}

/// Returns the versions of all software below Sublet on this machine. `doctor` reports the GPUs.
fn versions() -> [(&'static str, Option<String>); 6] {
    [
        ("sublet", Some(env!("CARGO_PKG_VERSION").to_owned())),
        ("architecture", Some(std::env::consts::ARCH.to_owned())),
        ("system", system()),
        ("kernel", first_line("/proc/sys/kernel/osrelease")),
        ("C library", c_library()),
        ("driver", first_line("/proc/driver/nvidia/version")),
    ]
}

fn first_line(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()?.lines().next().map(|line| line.trim().to_owned())
}

/// Returns the name of the distribution.
fn system() -> Option<String> {
    let text = fs::read_to_string("/etc/os-release").ok()?;
    let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="))?;
    Some(name.trim_matches('"').to_owned())
}

/// Returns the C library and its version, such as `glibc 2.36`.
fn c_library() -> Option<String> {
    let said = Command::new("getconf").arg("GNU_LIBC_VERSION").output().ok()?;
    let text = String::from_utf8(said.stdout).ok()?.trim().to_owned();
    (!text.is_empty()).then_some(text)
}

fn settings(environment: &Environment) -> BTreeMap<String, String> {
    let all = environment.all().map(|(name, value)| {
        (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())
    });
    all.filter(|(name, _)| SETTINGS.iter().any(|begin| name.starts_with(begin))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::EXIT_UNCHANGED;

    fn report(environment: &Environment, run_dir: Result<RunDir, Failure>) -> String {
        let mut output = Output::new();
        assert_eq!(bug_report(environment, run_dir, &mut output), ExitCode::SUCCESS);
        output.text().to_owned()
    }

    /// The document below a heading.
    fn document(report: &str, title: &str) -> serde_json::Value {
        let (_, rest) = report.split_once(&format!("\n== {title}\n")).unwrap();
        let text = rest.split("\n\n== ").next().unwrap();
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{title}: {error}: {text}"))
    }

    #[test]
    fn settings_versions_and_documents_are_there_and_no_other_variable() {
        let base = tempfile::tempdir().unwrap();
        let run_dir = RunDir::open(Some(base.path().join("run")), None).map_err(Failure::from);
        let environment = Environment::of(
            &[("SUBLET_SLABS", "0"), ("NCCL_DEBUG", "INFO"), ("SECRET_TOKEN", "hunter2")],
            None,
        );
        let report = report(&environment, run_dir);
        assert!(report.contains("\nNCCL_DEBUG=INFO\nSUBLET_SLABS=0\n"), "{report}");
        assert!(!report.contains("hunter2"));
        assert!(report.contains(&format!("\nsublet: {}\n", env!("CARGO_PKG_VERSION"))));
        assert!(report.contains("\nkernel: ") && !report.contains("\nkernel: not known"));
        assert!(
            !document(&report, "sublet doctor --json")["checks"].as_array().unwrap().is_empty()
        );
        assert_eq!(document(&report, "sublet ps --json")["tenants"], serde_json::json!([]));
        assert_eq!(document(&report, "sublet turns --json")["version"], 1);
    }

    #[test]
    fn what_cannot_be_looked_at_is_named_and_the_rest_is_there() {
        let unusable = Failure::new("the run directory is on NFS".to_owned(), EXIT_UNCHANGED);
        let report = report(&Environment::of(&[], None), Err(unusable));
        assert!(
            report.ends_with("\n== run directory\nfailed: the run directory is on NFS\n"),
            "{report}"
        );
        assert!(report.contains("\n== sublet doctor --json\n{"));
    }
}
