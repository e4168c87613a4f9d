//! Other ways in which GPUs are shared or divided on this machine: MPS and MIG. The effect of a pause there is not established.

use std::fs::{self, OpenOptions};
use std::io::{self, Read as _};
use std::path::Path;

use tenants::run_dir::files::open_regular;

use super::Check;
use crate::environment::Environment;

const PIPE_VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY";
const PIPE_DIR: &str = "/tmp/nvidia-mps";
const PID_BYTES_MAX: u64 = 32;
/// The folder in which the kernel driver shows its capabilities for each GPU.
const CAPABILITIES: &str = "/proc/driver/nvidia/capabilities";

pub(super) fn checks(environment: &Environment) -> Vec<Check> {
    let named = environment.text(PIPE_VARIABLE);
    let dir = Path::new(named.unwrap_or(PIPE_DIR));
    vec![mps(dir, named.is_some(), Path::new("/proc")), mig(Path::new(CAPABILITIES))]
}

/// Checks the multi-process service: if its control daemon listens in `dir`, CUDA programs share a context of its server.
fn mps(dir: &Path, is_named: bool, proc: &Path) -> Check {
    let subject = "MPS";
    // `control` is the daemon's pipe, which CUDA programs look for.
    if !dir.join("control").exists() {
        return if is_named {
            let finding =
                format!("{PIPE_VARIABLE} names {}, where no control daemon listens", dir.display());
            Check::ok(subject, finding)
        } else {
            Check::ok(subject, "no control daemon listens")
        };
    }
    // Any user may have created the directory.
    let file = dir.join("nvidia-cuda-mps-control.pid");
    let file = open_regular(OpenOptions::new().read(true), &file).ok();
    let pid = file.and_then(|file| io::read_to_string(file.take(PID_BYTES_MAX)).ok());
    let pid = pid.and_then(|text| text.trim().parse::<u32>().ok());
    let who = match pid {
        Some(pid) if proc.join(pid.to_string()).exists() => format!("process {pid}"),
        Some(pid) => format!("process {pid}, which is not seen from here"),
        None => "of unknown process".to_owned(),
    };
    Check::warn(
        subject,
        format!(
            "a control daemon listens in {} ({who}): CUDA programs then run under MPS, where no pause has been tried",
            dir.display()
        ),
        "end it (echo quit | nvidia-cuda-mps-control), or compare a job's results with and without pauses before you rely on it",
    )
}

/// Checks for instances that GPUs are divided into.
fn mig(capabilities: &Path) -> Check {
    let subject = "MIG";
    let names = |dir: &Path, prefix: &str| -> Vec<String> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let number = |name: &String| name.strip_prefix(prefix)?.parse::<u32>().ok();
        let mut names: Vec<_> = names.filter(|name| number(name).is_some()).collect();
        names.sort_by_key(number);
        names
    };
    let divided: Vec<_> = names(capabilities, "gpu")
        .into_iter()
        .map(|gpu| {
            let instances = names(&capabilities.join(&gpu).join("mig"), "gi");
            (gpu, instances)
        })
        .filter(|(_, instances)| !instances.is_empty())
        .collect();
    if divided.is_empty() {
        return Check::ok(subject, "no GPU is divided into instances");
    }
    let count: usize = divided.iter().map(|(_, instances)| instances.len()).sum();
    let listed: Vec<_> =
        divided.iter().map(|(gpu, found)| format!("{gpu}: {}", found.join(" "))).collect();
    Check::warn(
        subject,
        format!(
            "{count} instances ({}): for CUDA each is a GPU, and a process sees one; no pause has been tried on one",
            listed.join(", ")
        ),
        "name an instance by its identity (nvidia-smi -L) in CUDA_VISIBLE_DEVICES and in budgets, and compare a job's results \
         with and without pauses before you rely on it",
    )
}

#[cfg(test)]
mod tests {
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::super::Level;
    use super::*;

    #[test]
    fn a_control_daemon_is_named_with_what_is_not_known_under_it() {
        let base = tempfile::tempdir().unwrap();
        let (dir, proc) = (base.path().join("mps"), base.path().join("proc"));
        assert_eq!(mps(&dir, false, &proc), Check::ok("MPS", "no control daemon listens"));
        let named = mps(&dir, true, &proc);
        assert!(named.level == Level::Ok && named.finding.contains(PIPE_VARIABLE), "{named:?}");
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("control"), "").unwrap();
        let found = mps(&dir, false, &proc);
        assert_eq!(found.level, Level::Warn);
        assert!(found.finding.contains("of unknown process"), "{found:?}");
        let file = dir.join("nvidia-cuda-mps-control.pid");
        mkfifo(&file, Mode::S_IRWXU).unwrap();
        assert!(mps(&dir, false, &proc).finding.contains("of unknown process"));
        fs::remove_file(&file).unwrap();
        fs::write(&file, "4711\n").unwrap();
        assert!(mps(&dir, false, &proc).finding.contains("process 4711, which is not seen"));
        fs::create_dir_all(proc.join("4711")).unwrap();
        let found = mps(&dir, true, &proc);
        assert!(found.finding.contains("(process 4711)"), "{found:?}");
        assert!(found.next_step.unwrap().contains("nvidia-cuda-mps-control"));
    }

    #[test]
    fn instances_are_counted_by_gpu() {
        let base = tempfile::tempdir().unwrap();
        let none = Check::ok("MIG", "no GPU is divided into instances");
        assert_eq!(mig(&base.path().join("none")), none);
        for dir in ["mig", "gpu0/mig", "gpu1/mig/gi10/ci0", "gpu1/mig/gi2/ci0", "gpu2/mig/other"] {
            fs::create_dir_all(base.path().join(dir)).unwrap();
        }
        let found = mig(base.path());
        assert_eq!(found.level, Level::Warn);
        assert!(found.finding.starts_with("2 instances (gpu1: gi2 gi10)"), "{found:?}");
        fs::remove_dir_all(base.path().join("gpu1")).unwrap();
        assert_eq!(mig(base.path()), none);
    }
}
