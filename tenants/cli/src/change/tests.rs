use tenants::coordinator::{DeviceTotal, MemberPhase, PhaseSummary, Report, Step, Who};
use tenants::identity::MemberId;
use tenants::scope::TagNames;
use tenants::wire::{Action, Failure as WireFailure, FailureKind, Phase, PhaseReport};
use vmm_pool::{KeptBytes, PinnedBytes};

use super::*;
use crate::gpus::tests::{UUID, h200};

fn report() -> Report {
    let who = |pid| Who { pid: Some(pid), member: MemberId(u64::from(pid)) };
    let member = |phase, pid, elapsed_us| MemberPhase {
        who: who(pid),
        report: PhaseReport {
            elapsed_us,
            bytes: 3 << 29,
            kept: Some(KeptBytes {
                zero_bytes: 3 << 30,
                unchanged_bytes: 1 << 30,
                copied_bytes: 1 << 29,
            })
            .filter(|_| phase == Phase::Prepare),
            ..PhaseReport::default()
        },
    };
    let phase = |phase, wall_us| PhaseSummary {
        phase,
        wall_us,
        members: vec![member(phase, 10, 900), member(phase, 11, 45_000)],
    };
    Report {
        tenant: "train".to_owned(),
        action: Action::Pause,
        wall_us: 412_000,
        cut: None,
        drain: None,
        phases: vec![
            phase(Phase::Drain, 46_000),
            phase(Phase::Prepare, 99_000),
            phase(Phase::Release, 300_000),
        ],
        window_bytes: None,
        stages: Vec::new(),
        freed_bytes: 3 << 30,
        taken_bytes: 0,
        devices: vec![DeviceTotal {
            uuid: UUID.to_owned(),
            bytes: 3 << 30,
            free_bytes: 70 << 30,
            total_bytes: 80 << 30,
        }],
        stands_still: false,
        stayed_bytes: 0,
        stays: Vec::new(),
        not_deep: Vec::new(),
        notes: vec!["process 10: 4 MiB stay".to_owned()],
        losses: vec![MemberFailure {
            who: who(11),
            step: Step::Phase(Phase::Release),
            failure: WireFailure { kind: FailureKind::PeerGone, message: "it hung up".to_owned() },
        }],
    }
}

#[test]
fn memory_that_should_have_gone_shows_in_the_exit_code() {
    for (stays, expected) in
        [(Vec::new(), ExitCode::SUCCESS), (vec![stay()], ExitCode::from(EXIT_PARTIAL))]
    {
        let whole = Outcome::Completed(Box::new(Report { losses: Vec::new(), stays, ..report() }));
        assert_eq!(code_of([&whole]), expected);
        assert_eq!(code_of_leaver(&Ok(whole)), ExitCode::SUCCESS, "the other has come");
    }
}

fn stay() -> PinnedBytes {
    PinnedBytes { reason: "managed memory".to_owned(), bytes: 6 << 20, count: 2 }
}

const PLAIN: ShowArgs = ShowArgs { verbose: false, json: false };

fn said(scope: &Scope, outcome: Outcome, how: ShowArgs) -> (ExitCode, Vec<String>) {
    let tenant = TenantName::new("train").unwrap();
    let mut output = Output::default();
    let look = || Gpus::of(vec![h200()]);
    let code = show(&tenant, scope, Ok(outcome), how, look, &mut output).unwrap();
    (code, output.into_lines())
}

#[test]
fn a_report_is_one_line_and_what_was_lost_and_two_small_tables_with_the_option() {
    let outcome = || Outcome::Completed(Box::new(report()));
    let (code, lines) = said(&Scope::Whole, outcome(), PLAIN);
    assert_eq!(code, ExitCode::from(EXIT_PARTIAL));
    let line = "paused tenant 'train' in 412 ms: 3 GiB freed on GPU 3, 1 GiB copied. Bring it back: sublet resume train";
    let note = "note: process 10: 4 MiB stay";
    let lost = "lost: process 11 in step 'release': it hung up";
    assert_eq!(lines, [line, note, lost]);
    let (_, lines) = said(&Scope::Whole, outcome(), ShowArgs { verbose: true, json: false });
    let details = "
pause of 'train'
PHASE    SLOWEST    WALL  BYTES
drain      45 ms   46 ms  3 GiB
prepare    45 ms   99 ms  3 GiB
release    45 ms  300 ms  3 GiB
9 GiB kept: 6 GiB zero, 2 GiB unchanged, 1 GiB copied
GPU  NAME         UUID                                      FREED    FREE   TOTAL
3    NVIDIA H200  GPU-5f00be66-6abd-452b-8111-0cecf4164a2a  3 GiB  70 GiB  80 GiB";
    assert_eq!(lines.join("\n"), format!("{line}\n{details}\n{note}\n{lost}"));
}

#[test]
fn a_swap_is_one_line() {
    let half = |action, tenant: &str| {
        let (losses, notes) = (Vec::new(), Vec::new());
        let (tenant, taken_bytes) = (tenant.to_owned(), 2 << 30);
        Outcome::Completed(Box::new(Report {
            action,
            tenant,
            taken_bytes,
            losses,
            notes,
            ..report()
        }))
    };
    let swap = Swap {
        paused: half(Action::Pause, "infer"),
        resumed: half(Action::Resume, "train"),
        wall_us: 1_300_000,
    };
    let lines = shown::swap(&swap, PLAIN, || Gpus::of(vec![h200()])).unwrap();
    assert_eq!(
        lines,
        [
            "swapped in 1.30 s: 'infer' paused (3 GiB freed on GPU 3, 1 GiB copied), 'train' resumed (2 GiB taken on GPU 3, 1 GiB \
          copied)"
        ]
    );
    assert_eq!(
        shown::swap(&Swap { paused: Outcome::AlreadyActive, ..swap }, PLAIN, Gpus::default),
        None
    );
}

#[test]
fn what_is_so_already_is_said_and_succeeds() {
    let already = |stays| said(&Scope::Whole, Outcome::AlreadyPaused { stays }, PLAIN);
    let plain = vec!["tenant 'train' is paused already".to_owned()];
    assert_eq!(already(Vec::new()), (ExitCode::SUCCESS, plain));
    let (code, lines) = already(vec![stay()]);
    assert_eq!(code, ExitCode::from(EXIT_PARTIAL));
    assert_eq!(lines[1], "6 MiB of device memory stay: managed memory");
}

#[test]
fn a_pause_or_resume_by_tag_says_so_and_what_the_job_does_meanwhile() {
    let tagged = |names: &[&str], outcome| {
        let names = names.iter().map(ToString::to_string).collect();
        let scope = Scope::Tags { tags: TagNames::Named(names), owner: None };
        let (code, lines) = said(&scope, outcome, PLAIN);
        assert_eq!(code, ExitCode::SUCCESS);
        lines[0].clone()
    };
    let done = |action, devices, phases| {
        let (losses, notes) = (Vec::new(), Vec::new());
        let (freed_bytes, taken_bytes) = (3 << 30, 3 << 30);
        let report = Report { action, devices, phases, losses, notes, ..report() };
        Outcome::Completed(Box::new(Report { freed_bytes, taken_bytes, ..report }))
    };
    for (names, outcome, expected) in [
        (
            &["kv"][..],
            done(Action::Pause, report().devices, report().phases),
            "paused tag 'kv' of tenant 'train' in 412 ms: 3 GiB freed on GPU 3, 1 GiB copied, the job keeps running without \
             that memory until: sublet resume train --tag kv",
        ),
        (
            &["nccl"],
            done(Action::Pause, report().devices, Vec::new()),
            "paused tag 'nccl' of tenant 'train' in 412 ms: 3 GiB freed on GPU 3, the job keeps running; NCCL calls wait \
             until: sublet resume train --library nccl",
        ),
        (
            &["kv", "nccl"],
            done(Action::Pause, Vec::new(), Vec::new()),
            "paused tags 'kv', 'nccl' of tenant 'train' in 412 ms: 3 GiB freed, the job keeps running without that memory, \
             and NCCL calls wait, until: sublet resume train --tag kv --library nccl",
        ),
        (
            &["kv"],
            done(Action::Resume, report().devices, Vec::new()),
            "resumed tag 'kv' of tenant 'train' in 412 ms: 3 GiB taken on GPU 3",
        ),
        (
            &["kv"],
            Outcome::AlreadyPaused { stays: Vec::new() },
            "tag 'kv' of tenant 'train' is paused already: it has no memory on a GPU",
        ),
        (&["kv"], Outcome::AlreadyActive, "tag 'kv' of tenant 'train' is not paused"),
    ] {
        assert_eq!(tagged(names, outcome), expected);
    }
}

#[test]
fn an_unknown_tenant_is_one_line_and_exit_code_1() {
    let base = tempfile::tempdir().unwrap();
    let run_dir = RunDir::open(Some(base.path().join("run")), None).unwrap();
    let tenant = TenantName::new("train").unwrap();
    let args = |json| PauseArgs {
        tenant: Some(tenant.clone()),
        all: false,
        dry_run: false,
        tags: crate::args::TagArgs::default(),
        keep_running: false,
        deep: false,
        leave_lent: false,
        wait: None,
        timeout: None,
        show: ShowArgs { json, verbose: false },
    };
    let mut output = Output::default();
    let failure = pause(&args(false), &run_dir, &mut output).unwrap_err();
    assert_eq!(failure.exit_code(), ExitCode::from(1));
    assert!(!failure.to_string().contains('\n'));
    assert!(failure.to_string().starts_with("there is no tenant 'train'"));

    let code = pause(&args(true), &run_dir, &mut output).unwrap();
    assert_eq!(code, ExitCode::from(1));
    let document: serde_json::Value = serde_json::from_str(output.text()).unwrap();
    assert_eq!(document["outcome"], "failed");
    assert_eq!(document["unchanged"], true);
}
