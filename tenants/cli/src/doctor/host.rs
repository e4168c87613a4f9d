//! The checks of the machine and of the environment.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use tenants::error_text::chain;
use tenants::identity::{MemberId, TENANT_NAME_BYTES_MAX};
use tenants::keep::{HostFigure, figures};
use tenants::phase::HELD_MAX;
use tenants::run_dir::{RUN_DIR_VARIABLE, RunDir, SOCKET_PATH_BYTES_MAX};

use super::Check;
use crate::environment::Environment;
use crate::run::find_library;
use crate::units;

/// The host memory below which hardly any tenant's contents fit.
const HOST_BYTES_LOW: u64 = 8 << 30;
/// The number of open files below which the resume of a rank among eight may fail: its shared memory, with several communicators,
/// needs descriptors.
const FILES_LOW: u64 = 16 * 1024;

pub(super) fn checks(environment: &Environment) -> Vec<Check> {
    let enabled = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok();
    let limits = |resource| getrlimit(resource).ok();
    let mut checks = vec![library(environment), run_dir(environment)];
    checks.push(host_memory(&figures(None)));
    checks.push(locked_memory(limits(Resource::RLIMIT_MEMLOCK).map(|(soft, _)| soft)));
    checks.push(open_files(limits(Resource::RLIMIT_NOFILE).map(|(_, hard)| hard)));
    checks.push(huge_pages(enabled.as_deref()));
    checks.extend(variables(environment));
    checks
}

fn library(environment: &Environment) -> Check {
    match find_library(None, environment) {
        Ok(path) => Check::ok("library", path.display().to_string()),
        Err(failure) => {
            Check::fail("library", failure.to_string(), "`sublet run` cannot work without it")
        }
    }
}

fn run_dir(environment: &Environment) -> Check {
    let subject = "run directory";
    let (explicit, xdg) = environment.run_dir_sources();
    let opened = RunDir::open(explicit, xdg);
    let dir = match &opened {
        Ok(dir) => dir,
        Err(error) => {
            // The message says what to do.
            return Check { next_step: None, ..Check::fail(subject, chain(error), "") };
        }
    };
    let path = dir.path();
    // A directory, a tenant's name, a member's name of 16 digits, and what divides them.
    let fixed = path.as_os_str().as_bytes().len() + "//".len() + ".sock".len();
    let member = MemberId(0).to_string().len();
    let left = SOCKET_PATH_BYTES_MAX.saturating_sub(fixed + member);
    let finding = path.display().to_string();
    match left {
        TENANT_NAME_BYTES_MAX.. => Check::ok(subject, finding),
        0 => Check::fail(
            subject,
            format!("{finding} is too long for sockets in it"),
            format!("set {RUN_DIR_VARIABLE} to a shorter one"),
        ),
        left => Check::warn(
            subject,
            format!("{finding} leaves {left} bytes for a tenant's name"),
            format!("set {RUN_DIR_VARIABLE} to a shorter one for longer names"),
        ),
    }
}

/// Checks the host memory for saved contents: the available memory, within the container's limit.
fn host_memory(figures: &[HostFigure]) -> Check {
    let subject = "host memory";
    let Some(free) = figures.iter().map(|figure| figure.available_bytes).min() else {
        return Check::warn(
            subject,
            "/proc/meminfo does not say how much is available",
            "check that it has room for the saved contents of paused tenants",
        );
    };
    let finding = format!("{} available for saved contents", units::bytes(free));
    if free < HOST_BYTES_LOW {
        let next_step = "mark memory that needs no saving as `discard`, or free host memory";
        Check::warn(subject, finding, next_step)
    } else {
        Check::ok(subject, finding)
    }
}

fn locked_memory(soft_bytes: Option<u64>) -> Check {
    let subject = "locked memory";
    match soft_bytes {
        None => Check::ok(subject, "limit unknown"),
        Some(RLIM_INFINITY) => Check::ok(subject, "no limit"),
        // The driver pins pages itself, and does not count them against this limit everywhere.
        Some(bytes) => Check::ok(
            subject,
            format!(
                "limit {}; raise it (ulimit -l) only if a pause says that pinning fails",
                units::bytes(bytes)
            ),
        ),
    }
}

/// Checks how many descriptors a process may have during a resume. The soft limit is raised to the hard one for that time.
fn open_files(hard: Option<u64>) -> Check {
    let subject = "open files";
    match hard {
        None => Check::ok(subject, "limit unknown"),
        Some(files) if files < FILES_LOW => Check::warn(
            subject,
            format!(
                "limit {files}: a resume opens one for each allocation that processes share, in addition to what the job has open, and is \
                 refused where they do not fit; NCCL shares hundreds for each other rank"
            ),
            "raise the hard limit before the job starts: ulimit -Hn 1048576 as root, --ulimit nofile=1048576 for Docker, \
             LimitNOFILE=1048576 for systemd; of a process that runs: prlimit --pid PID --nofile=1048576:1048576",
        ),
        Some(files) => Check::ok(subject, format!("limit {files}")),
    }
}

fn huge_pages(enabled: Option<&str>) -> Check {
    let subject = "huge pages";
    let chosen = enabled.and_then(|text| {
        let (_, rest) = text.split_once('[')?;
        rest.split_once(']').map(|(chosen, _)| chosen)
    });
    match chosen {
        Some("always" | "madvise") => Check::ok(subject, "transparent huge pages are available"),
        Some(_) | None => Check::warn(
            subject,
            "no transparent huge pages, so the first pause takes longer",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root",
        ),
    }
}

/// Variables that change what can be paused: name, the values that matter, what follows, what to do.
struct Rule {
    name: &'static str,
    matters: fn(&str) -> bool,
    finding: &'static str,
    next_step: &'static str,
}

/// May a pause hold a rank for longer than `milliseconds` while others wait for it on their devices?
fn is_shorter_than_a_hold(milliseconds: &str) -> bool {
    // The library reads it this way too: with 0 or no number it uses its default, 100 s.
    milliseconds
        .parse()
        .is_ok_and(|value: u64| value > 0 && u128::from(value) < HELD_MAX.as_millis())
}

const RULES: &[Rule] = &[
    Rule {
        name: "NCCL_EP_TIMEOUT_MS",
        matters: is_shorter_than_a_hold,
        finding: "if a pause holds a rank for longer, kernels of NCCL EP count it as failed: they mask it, or end \
                  their process",
        next_step: "set it above 70000, or unset it; or pause between steps (watchdogs.md in the folder of `sublet docs`)",
    },
    Rule {
        name: "NCCL_NVLS_ENABLE",
        matters: |value| value == "1",
        finding: "asks for multicast, which Sublet hides from applications",
        next_step: "unset it",
    },
    Rule {
        name: "NCCL_MNNVL_ENABLE",
        matters: |value| value == "1",
        finding: "asks for fabric handles, which Sublet hides from applications",
        next_step: "unset it",
    },
    Rule {
        name: "NCCL_GDRCOPY_ENABLE",
        matters: |value| value == "1",
        finding: "memory that GDRCopy has pinned stays on the GPU during a pause, NCCL's work queues among it",
        next_step: "unset it, and that memory leaves too",
    },
    Rule {
        name: "NCCL_NET_GDR_LEVEL",
        matters: |value| value != "LOC" && value != "0",
        finding: "memory registered with network cards, by DMA-BUF or by libibverbs, stays on the GPU during a pause",
        next_step: "set it to LOC, and that memory leaves too, at some cost in bandwidth between nodes",
    },
    Rule {
        name: "PYTORCH_CUDA_ALLOC_CONF",
        matters: |value| value.contains("cudaMallocAsync"),
        finding: "memory of the driver's stream-ordered allocator cannot be paused",
        next_step: "use the native backend",
    },
    Rule {
        name: "PYTORCH_ALLOC_CONF",
        matters: |value| value.contains("cudaMallocAsync"),
        finding: "memory of the driver's stream-ordered allocator cannot be paused",
        next_step: "use the native backend",
    },
];

fn variables(environment: &Environment) -> Vec<Check> {
    let mut checks = Vec::new();
    for rule in RULES {
        if let Some(value) = environment.text(rule.name)
            && (rule.matters)(value)
        {
            let finding = format!("{}={value}: {}", rule.name, rule.finding);
            checks.push(Check::warn("environment", finding, rule.next_step));
        }
    }
    let wrong = environment.wrong_settings(&[]);
    checks.extend(wrong.into_iter().map(|finding| {
        Check::fail("environment", finding, "correct it or unset it; `sublet run` refuses it")
    }));
    let unknown = environment.unknown_settings();
    checks.extend(unknown.into_iter().map(|finding| {
        Check::warn("environment", finding, "correct the name or unset it; nothing reads it")
    }));
    if checks.is_empty() {
        checks.push(Check::ok("environment", "no variable stands in the way"));
    }
    checks
}

#[cfg(test)]
mod tests {
    use tenants::coordinator::Options;
    use tenants::host_memory::LimitKind;
    use tenants::phase::Phase;

    use super::super::Level;
    use super::*;

    #[test]
    fn host_memory_is_what_the_container_leaves() {
        let figure = |gib: u64| {
            let (total_bytes, available_bytes) = (200 << 30, gib << 30);
            HostFigure { kind: LimitKind::Available, total_bytes, available_bytes }
        };
        let check = host_memory(&[figure(100)]);
        assert_eq!(check.level, Level::Ok);
        assert_eq!(check.finding, "100 GiB available for saved contents");
        let check = host_memory(&[figure(100), figure(4)]);
        assert_eq!(check.level, Level::Warn);
        assert_eq!(check.finding, "4 GiB available for saved contents");
        assert_eq!(host_memory(&[]).level, Level::Warn);
    }

    #[test]
    fn too_few_open_files_are_named_with_the_limit_and_the_line_that_raises_it() {
        let check = open_files(Some(4096));
        assert_eq!(check.level, Level::Warn);
        assert!(check.finding.starts_with("limit 4096: "), "{check:?}");
        assert!(check.next_step.unwrap().contains("ulimit -Hn 1048576"));
        for enough in [16384, 1_048_576, RLIM_INFINITY] {
            let check = open_files(Some(enough));
            let named = check.finding.contains(&enough.to_string());
            assert!(check.level == Level::Ok && named, "{check:?}");
        }
        assert_eq!(open_files(None), Check::ok("open files", "limit unknown"));
    }

    #[test]
    fn limits_and_huge_pages_are_told_as_the_kernel_has_them() {
        assert!(locked_memory(Some(65536)).finding.starts_with("limit 64 KiB"));
        assert_eq!(locked_memory(Some(RLIM_INFINITY)).finding, "no limit");
        assert_eq!(huge_pages(Some("always [madvise] never")).level, Level::Ok);
        assert_eq!(huge_pages(Some("always madvise [never]")).level, Level::Warn);
        assert_eq!(huge_pages(None).level, Level::Warn);
    }

    #[test]
    fn only_variables_that_matter_are_named() {
        let quiet =
            Environment::of(&[("NCCL_CUMEM_ENABLE", "0"), ("NCCL_NET_GDR_LEVEL", "LOC")], None);
        assert_eq!(variables(&quiet).len(), 1);
        assert_eq!(variables(&quiet)[0].level, Level::Ok);
        let loud = Environment::of(
            &[("NCCL_NVLS_ENABLE", "1"), ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")],
            None,
        );
        let checks = variables(&loud);
        assert_eq!(checks.len(), 2);
        assert!(checks.iter().all(|check| check.level == Level::Warn));
        assert!(checks[0].finding.starts_with("NCCL_NVLS_ENABLE=1: "));
        let undone = checks[0].next_step.as_deref().unwrap();
        assert_eq!(undone, "unset it");
    }

    #[test]
    fn wrong_and_unknown_settings_are_findings() {
        let checks = variables(&Environment::of(
            &[("SUBLET_SLABS", "banana"), ("SUBLET_CHANGE", "off"), ("SUBLET_TENANT", "a b")],
            None,
        ));
        let found: Vec<_> = checks.iter().map(|check| (check.level, &*check.finding)).collect();
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[1].0 == Level::Fail && found[1].1.starts_with("SUBLET_TENANT=a b: "));
        assert_eq!(found[0], (Level::Fail, "SUBLET_SLABS=banana: expected 0 or 1"));
        assert!(found[2].0 == Level::Warn && found[2].1.ends_with("did you mean SUBLET_CHANGES?"));
    }

    #[test]
    fn a_clock_on_the_device_that_a_hold_outlasts_is_named() {
        let held = Options::default();
        let phases = [Phase::CloseGate, Phase::Drain].map(|phase| held.phase_timeout(phase));
        assert_eq!(HELD_MAX, held.cut_timeout() + phases[0] + phases[1]);
        for (value, warns) in [("5000", true), ("69999", true), ("70000", false), ("0", false)] {
            let checks = variables(&Environment::of(&[("NCCL_EP_TIMEOUT_MS", value)], None));
            assert_eq!(checks[0].level == Level::Warn, warns, "{value}: {checks:?}");
        }
    }

    #[test]
    fn a_long_run_directory_is_named_with_what_it_leaves() {
        let base = tempfile::tempdir().unwrap();
        let at = |length: usize| {
            let room = length - base.path().as_os_str().as_bytes().len() - 1;
            let path = base.path().join("r".repeat(room));
            let environment = Environment::of(&[(RUN_DIR_VARIABLE, path.to_str().unwrap())], None);
            run_dir(&environment)
        };
        assert_eq!(at(44).level, Level::Ok);
        assert_eq!(at(45).level, Level::Warn);
        assert_eq!(at(84).level, Level::Fail);
    }
}
