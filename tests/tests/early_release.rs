//! Pauses that give memory back while they save: what holds for others holds for them, and what has gone cannot be called off.

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use sublet_tests::{JobOptions, MIB, Outcome, Stage, Trouble, until};
use tenants::coordinator::{Coordinator, Options, Outcome as Done, Report};
use tenants::identity::TenantName;
use tenants::wire::Phase;

const CAPACITIES: [u64; 2] = [128 * MIB; 2];

/// A pause that releases early, although little is copied.
fn pause(stage: &Stage) -> Outcome<Report> {
    let timeout = Some(Duration::from_mins(4));
    let options = Options { timeout, releases_early: true, ..Options::default() };
    let tenant = TenantName::new("train")?;
    match Coordinator::new(stage.run_dir().clone(), tenant, options).pause(&mut |_| {})? {
        Done::Completed(report) => Ok(*report),
        other @ (Done::AlreadyPaused { .. } | Done::AlreadyActive) => {
            Err(Trouble::new(format!("{other:?}")))
        }
    }
}

/// The same by a process of its own.
fn start(stage: &Stage) -> Outcome<Child> {
    let mut command = stage.command(Path::new(env!("CARGO_BIN_EXE_sublet-steps")));
    command.arg(stage.run_dir_path()).args(["train", "pause", "early"]).stdin(Stdio::null());
    Ok(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
}

#[expect(clippy::disallowed_methods, reason = "an instant is waited for, not an event")]
fn wait_ms(milliseconds: u64) {
    std::thread::sleep(Duration::from_millis(milliseconds));
}

/// All processes stand in one state that is to stay.
fn settled(stage: &Stage) -> Outcome<Vec<String>> {
    let mut states = Vec::new();
    until("all processes stand in one state", Duration::from_mins(2), || {
        states = stage.settled("train")?;
        Ok(states.len() == 1)
    })?;
    Ok(states)
}

/// The phases in which contents were saved.
fn saves_in(report: &serde_json::Value) -> Vec<&str> {
    let phases = report["report"]["phases"].as_array().into_iter().flatten();
    let saves = |phase: &&serde_json::Value| {
        let members = phase["members"].as_array().into_iter().flatten();
        let kept = |member: &serde_json::Value| member["report"]["kept"]["copied_bytes"].as_u64();
        members.filter_map(kept).sum::<u64>() > 0
    };
    phases.filter(saves).filter_map(|phase| phase["phase"].as_str()).collect()
}

#[test]
fn a_job_that_keeps_running_is_paused_anywhere_and_goes_on() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    let used_bytes = stage.used_bytes(0)?;
    job.run()?;
    for _ in 0..5 {
        let report = pause(&stage)?;
        let phases: Vec<_> = report.phases.iter().map(|summary| summary.phase).collect();
        let early = [Phase::CloseGate, Phase::Drain, Phase::Prepare, Phase::Release, Phase::Verify];
        assert_eq!(phases, early, "{report:#?}");
        assert!(report.losses.is_empty(), "{report:#?}");
        let at = job.steps_done();
        assert!(job.ranks[0].is_silent_for(Duration::from_millis(50)));
        // What stays is the one small plain allocation of the rank.
        assert!(stage.used_bytes(0)? <= 2 * MIB, "{} bytes stay", stage.used_bytes(0)?);
        stage.resume("train")?;
        job.wait_for_step(at + 2)?;
    }
    job.stop()?;
    job.verify()?;
    assert_eq!(stage.used_bytes(0)?, used_bytes);
    job.exit()
}

#[test]
fn a_pause_that_copies_much_does_it_once_its_host_memory_is_there_and_people_read_what_was_kept()
-> Outcome {
    let stage = Stage::new(&[1400 * MIB])?;
    let options = JobOptions { tensor_mib: 1032, ..JobOptions::new("train", 1) };
    // What is unchanged is copied too.
    let mut job = stage.connected_job(&options.with("SUBLET_CHANGES", "off"))?;
    for is_early in [false, true] {
        job.step(1)?;
        let report = stage.patiently(&["pause", "train", "--json"])?.json()?;
        assert_eq!(saves_in(&report), if is_early { ["release"] } else { ["prepare"] });
        stage.resume("train")?;
        job.verify()?;
    }
    let said = stage.patiently(&["pause", "train", "-v"])?.stdout;
    assert!(said.contains(" kept: "), "{said}");
    stage.resume("train")?;
    job.verify()?;
    job.exit()
}

#[test]
fn no_room_in_host_memory_is_found_out_before_anything_has_gone() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = JobOptions::new("train", 2).with("SUBLET_HOST_BYTES_MAX", "1048576");
    let job = stage.connected_job(&options.with("SUBLET_CHANGES", "off"))?;
    let used_bytes = stage.used_bytes(0)?;
    let error = pause(&stage).map(drop).expect_err("there is no room");
    assert!(error.to_string().contains("SUBLET_HOST_BYTES_MAX"), "{error}");
    assert_eq!(settled(&stage)?, ["active"]);
    assert_eq!(stage.used_bytes(0)?, used_bytes);
    job.works_and_exits()
}

#[test]
fn a_command_that_is_killed_at_any_instant_leaves_one_of_the_two_clean_states() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    for delay_ms in 0..16 {
        let mut command = start(&stage)?;
        wait_ms(3 * delay_ms);
        command.kill()?;
        command.wait()?;
        settled(&stage)?;
        stage.resume("train")?;
        job.works()?;
    }
    job.exit()
}

#[test]
fn the_other_of_a_rank_that_is_killed_at_any_instant_keeps_all_of_its_contents() -> Outcome {
    for delay_ms in (0..40).step_by(5) {
        let stage = Stage::new(&CAPACITIES)?;
        // Not connected: what the other holds does not depend on it.
        let mut job = stage.job(&JobOptions::new("train", 2))?;
        let command = start(&stage)?;
        wait_ms(delay_ms);
        job.ranks[0].kill()?;
        let output = command.wait_with_output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(0 | 1)), "{errors}");
        settled(&stage)?;
        stage.resume("train")?;
        job.ranks[1].do_it("step")?;
        job.ranks[1].do_it("verify")?;
    }
    Ok(())
}
