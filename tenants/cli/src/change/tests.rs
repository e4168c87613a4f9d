use tenants::coordinator::{DeviceTotal, MemberFailure, MemberPhase, PhaseSummary, Step, Who};
use tenants::identity::MemberId;
use tenants::scope::TagNames;
use tenants::wire::{Failure as WireFailure, FailureKind, Phase, PhaseReport};
use vmm_pool::KeptBytes;

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
        devices: vec![DeviceTotal {
            uuid: UUID.to_owned(),
            bytes: 3 << 30,
            free_bytes: 70 << 30,
            total_bytes: 80 << 30,
        }],
        stayed_bytes: 0,
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
    for (stayed_bytes, expected) in [(0, ExitCode::SUCCESS), (1, ExitCode::from(EXIT_PARTIAL))] {
        let whole = Report { losses: Vec::new(), stayed_bytes, ..report() };
        assert_eq!(code_of([&Outcome::Completed(Box::new(whole))]), expected);
    }
}

#[test]
fn a_report_is_two_small_tables() {
    let mut output = Output::new();
    let tenant = TenantName::new("train").unwrap();
    let outcome = Outcome::Completed(Box::new(report()));
    let code =
        show(&tenant, &Scope::Whole, Ok(outcome), false, || Gpus::of(vec![h200()]), &mut output)
            .unwrap();
    assert_eq!(code, ExitCode::from(EXIT_PARTIAL));
    let expected = "\
paused tenant 'train' in 412 ms (2 processes)

PHASE           SLOWEST    WALL  BYTES
drain             45 ms   46 ms  3 GiB
prepare           45 ms   99 ms  3 GiB
release memory    45 ms  300 ms  3 GiB

9 GiB kept: 6 GiB zero, 2 GiB unchanged, 1 GiB copied

GPU  NAME         UUID                                      FREED  FREE NOW      OF
3    NVIDIA H200  GPU-5f00be66-6abd-452b-8111-0cecf4164a2a  3 GiB    70 GiB  80 GiB

note: process 10: 4 MiB stay
lost: process 11 in step 'release memory': it hung up
";
    assert_eq!(output.text(), expected);
}

#[test]
fn what_is_so_already_is_said_and_succeeds() {
    let mut output = Output::new();
    let tenant = TenantName::new("train").unwrap();
    let already = |stayed_bytes| Ok(Outcome::AlreadyPaused { stayed_bytes });
    let code = show(&tenant, &Scope::Whole, already(0), false, Gpus::default, &mut output).unwrap();
    assert_eq!(code, ExitCode::SUCCESS);
    assert_eq!(output.text(), "tenant 'train' is paused already\n");
    let code =
        show(&tenant, &Scope::Whole, already(6 << 20), false, Gpus::default, &mut output).unwrap();
    assert_eq!(code, ExitCode::from(EXIT_PARTIAL));
    assert!(
        output.text().contains("and 6 MiB of its device memory should have gone"),
        "{}",
        output.text()
    );
}

#[test]
fn a_pause_or_resume_by_tag_says_so_and_what_the_job_does_meanwhile() {
    let tenant = TenantName::new("train").unwrap();
    let said = |names: &[&str], outcome| {
        let names = names.iter().map(ToString::to_string).collect();
        let scope = Scope::Tags { tags: TagNames::Named(names), owner: None };
        let mut output = Output::new();
        let code = show(&tenant, &scope, Ok(outcome), false, Gpus::default, &mut output);
        assert_eq!(code.unwrap(), ExitCode::SUCCESS);
        output.text().lines().next().unwrap_or_default().to_owned()
    };
    let done = |action, devices| {
        let losses = Vec::new();
        Outcome::Completed(Box::new(Report { action, devices, losses, ..report() }))
    };
    for (names, outcome, expected) in [
        (
            &["kv"][..],
            done(Action::Pause, report().devices),
            "paused tag 'kv' of tenant 'train' in 412 ms (2 processes): 3 GiB freed, the job keeps running without that \
             memory until: sublet resume train --tag kv",
        ),
        (
            &["nccl"],
            done(Action::Pause, Vec::new()),
            "paused tag 'nccl' of tenant 'train' in 412 ms (2 processes): 0 B freed, the job keeps running; NCCL calls \
             wait until: sublet resume train --library nccl",
        ),
        (
            &["kv", "nccl"],
            done(Action::Pause, report().devices),
            "paused tags 'kv', 'nccl' of tenant 'train' in 412 ms (2 processes): 3 GiB freed, the job keeps running \
             without that memory, and NCCL calls wait, until: sublet resume train --tag kv --library nccl",
        ),
        (
            &["kv"],
            done(Action::Resume, report().devices),
            "resumed tag 'kv' of tenant 'train' in 412 ms (2 processes): 3 GiB taken",
        ),
        (
            &["kv"],
            Outcome::AlreadyPaused { stayed_bytes: 0 },
            "tag 'kv' of tenant 'train' is paused already: it has no memory on a GPU",
        ),
        (&["kv"], Outcome::AlreadyActive, "tag 'kv' of tenant 'train' is not paused"),
    ] {
        assert_eq!(said(names, outcome), expected);
    }
}

#[test]
fn an_unknown_tenant_is_one_line_and_exit_code_1() {
    let base = tempfile::tempdir().unwrap();
    let run_dir = RunDir::open(Some(base.path().join("run")), None).unwrap();
    let tenant = TenantName::new("train").unwrap();
    let args = |json| PauseArgs {
        tenant: tenant.clone(),
        tags: crate::args::TagArgs::default(),
        deep: false,
        timeout: None,
        trace: None,
        json: crate::args::JsonArgs { json },
    };
    let mut output = Output::new();
    let failure = pause(&args(false), run_dir.clone(), &mut output).unwrap_err();
    assert_eq!(failure.exit_code(), ExitCode::from(1));
    assert!(!failure.to_string().contains('\n'));
    assert!(failure.to_string().starts_with("there is no tenant 'train'"));

    let code = pause(&args(true), run_dir, &mut output).unwrap();
    assert_eq!(code, ExitCode::from(1));
    let document: serde_json::Value = serde_json::from_str(output.text()).unwrap();
    assert_eq!(document["outcome"], "failed");
    assert_eq!(document["unchanged"], true);
}
