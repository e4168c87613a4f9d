//! Host memory that is brought in before the pause that needs it, by the command and by processes themselves.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use sublet_tests::{JobOptions, MIB, Outcome, Stage, Trouble, until};

/// Host memory comes in pieces of this size.
const CHUNK: u64 = 256 * MIB;
/// For a job whose ranks each keep more than one such piece.
const CAPACITIES: [u64; 2] = [1024 * MIB; 2];

/// A job of `ranks` processes whose pauses take two pieces of host memory each.
fn options(ranks: usize) -> JobOptions {
    let mut options = JobOptions::new("train", ranks);
    options.tensor_mib = 300;
    // Whatever it holds, all of it is copied.
    options.with("SUBLET_CHANGES", "off")
}

/// What each process holds, and wants.
fn host(stage: &Stage) -> Outcome<Vec<(u64, u64)>> {
    let number = |value: &Value| value.as_u64().unwrap_or_default();
    let members = stage.members("train")?;
    let of_member = |member: &Value| {
        let (held, wanted) = (&member["host"]["held_bytes"], &member["host"]["wanted_bytes"]);
        assert_eq!(*held, member["pool"]["host_arena_bytes"]);
        (number(held), number(wanted))
    };
    Ok(members.iter().map(of_member).collect())
}

/// The names of all steps of the last pause of all processes.
fn steps(stage: &Stage) -> Outcome<Vec<String>> {
    let mut names = Vec::new();
    for member in stage.members("train")? {
        for phase in member["last_pause"].as_array().into_iter().flatten() {
            let steps = phase[1]["steps"].as_array().into_iter().flatten();
            names.extend(steps.filter_map(|step| step[0].as_str().map(str::to_owned)));
        }
    }
    assert!(names.iter().any(|name| name == "queue copies"), "{names:?}");
    Ok(names)
}

fn takes_host_memory(names: &[String]) -> bool {
    names.iter().any(|name| ["wait for host memory", "pin host memory"].contains(&name.as_str()))
}

/// Looks until `is_so`, for a while. Each look is a run of the command, so this does not spin.
fn wait_until(stage: &Stage, is_so: impl Fn(&[(u64, u64)]) -> bool) -> Outcome {
    until("host memory is there", Duration::from_mins(10), || Ok(is_so(&host(stage)?)))
}

#[test]
fn first_pause_of_a_prepared_tenant_takes_no_host_memory() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = stage.connected_job(&options(2))?;
    job.run()?;
    assert_eq!(host(&stage)?, [(0, 2 * CHUNK); 2]);
    let report = stage.sublet(&["prepare", "train", "--json"])?.exited(0)?.json()?;
    for process in report["processes"].as_array().into_iter().flatten() {
        let host = &process["host"];
        assert_eq!(host["brought_in_bytes"], 2 * CHUNK, "{report:#}");
        assert!(host["touching_us"].as_u64() > Some(0), "{report:#}");
        assert!(host["pinning_us"].as_u64() <= host["elapsed_us"].as_u64(), "{report:#}");
    }
    assert_eq!(host(&stage)?, [(2 * CHUNK, 2 * CHUNK); 2]);
    stage.pause("train")?;
    assert!(!takes_host_memory(&steps(&stage)?));
    let again = stage.sublet(&["prepare", "train"])?.exited(0)?;
    assert!(again.stdout.starts_with("brought 0 B of host memory in"), "{}", again.stdout);
    stage.resume("train")?;
    job.stop()?;
    job.verify()?;
    assert_eq!(host(&stage)?, [(2 * CHUNK, 2 * CHUNK); 2]);
    job.exit()
}

#[test]
fn pause_in_the_middle_takes_what_is_there_and_holds_no_more_than_it_needs() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = stage.connected_job(&options(2))?;
    for _ in 0..2 {
        let begun = stage.sublet(&["prepare", "train", "--no-wait"])?.exited(0)?;
        assert!(begun.stdout.contains("of tenant 'train'"), "{}", begun.stdout);
        stage.pause("train")?;
        assert_eq!(host(&stage)?, [(2 * CHUNK, 2 * CHUNK); 2]);
        stage.resume("train")?;
        job.works()?;
    }
    job.exit()
}

#[test]
fn command_that_is_killed_leaves_the_job_running_and_the_memory_coming() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = stage.connected_job(&options(2))?;
    job.run()?;
    let mut command = stage.command(&stage.files().sublet);
    let mut child = command.args(["prepare", "train", "--json"]).spawn()?;
    wait_until(&stage, |now| now.iter().any(|(held, _)| *held > 0))?;
    let pid = i32::try_from(child.id()).map_err(|_| Trouble::new("a process id"))?;
    kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
    child.wait()?;
    wait_until(&stage, |now| now == [(2 * CHUNK, 2 * CHUNK); 2])?;
    let step = job.steps_done();
    job.wait_for_step(step + 1)?;
    stage.pause("train")?;
    assert!(!takes_host_memory(&steps(&stage)?));
    stage.resume("train")?;
    job.stop()?;
    job.verify()?;
    job.exit()
}

#[test]
fn command_that_is_interrupted_calls_it_off_and_what_is_there_stays() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let job = stage.connected_job(&options(1))?;
    let mut command = stage.command(&stage.files().sublet);
    let mut child = command.args(["prepare", "train"]).spawn()?;
    wait_until(&stage, |now| now.iter().any(|(held, _)| *held > 0))?;
    let pid = i32::try_from(child.id()).map_err(|_| Trouble::new("a process id"))?;
    kill(Pid::from_raw(pid), Signal::SIGINT).ok();
    // It may have been done before.
    let code = child.wait()?.code();
    assert!(matches!(code, Some(0 | 130)), "{code:?}");
    let held = host(&stage)?[0].0;
    assert!(held == CHUNK || held == 2 * CHUNK, "{held}");
    stage.pause("train")?;
    stage.resume("train")?;
    job.works_and_exits()
}

#[test]
fn limit_of_the_tenant_refuses_it_before_anything_is_taken() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let limit = (3 * CHUNK).to_string();
    let options = options(2).with("SUBLET_HOST_BYTES_MAX", &limit);
    let mut job = stage.connected_job(&options)?;
    let refused = stage.sublet(&["prepare", "train"])?.exited(1)?;
    let words = ["of 2 process(es)", "SUBLET_HOST_BYTES_MAX leaves 805306368: raise it"];
    assert!(words.iter().all(|words| refused.stderr.contains(words)), "{}", refused.stderr);
    assert_eq!(host(&stage)?, [(0, 2 * CHUNK); 2]);
    job.step(1)?;
    job.exit()
}

#[test]
fn processes_that_are_told_to_prepare_by_themselves_up_to_their_bound() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = stage.connected_job(&options(2).with("SUBLET_PREPARE", "256M"))?;
    job.run()?;
    wait_until(&stage, |now| now == [(CHUNK, 2 * CHUNK); 2])?;
    let shown = stage.sublet(&["ps"])?.exited(0)?.stdout;
    assert!(shown.contains("256 MiB of 512 MiB of host memory is ready for a pause"), "{shown}");
    // By hand it goes on to the end.
    stage.sublet(&["prepare", "train"])?.exited(0)?;
    assert_eq!(host(&stage)?, [(2 * CHUNK, 2 * CHUNK); 2]);
    stage.pause("train")?;
    assert!(!takes_host_memory(&steps(&stage)?));
    stage.resume("train")?;
    job.stop()?;
    job.verify()?;
    job.exit()
}

#[test]
fn share_of_a_limit_is_all_that_a_process_prepares_by_itself() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let limit = (3 * CHUNK).to_string();
    let options = options(2).with("SUBLET_PREPARE", "1").with("SUBLET_HOST_BYTES_MAX", &limit);
    let mut job = stage.connected_job(&options)?;
    wait_until(&stage, |now| now == [(CHUNK, 2 * CHUNK); 2])?;
    let stage_of = |member: &Value| member["host"]["stage"].clone();
    let mut text = String::new();
    until("all processes have stopped", Duration::from_secs(30), || {
        let members = stage.members("train")?;
        text = stage_of(&members[0]).to_string();
        Ok(members.iter().all(|member| stage_of(member)["stopped"]["message"].is_string()))
    })?;
    assert!(text.contains("SUBLET_HOST_BYTES_MAX"), "{text}");
    job.step(1)?;
    job.exit()
}

#[test]
fn value_that_is_none_is_said_and_the_process_runs_as_it_would() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job =
        stage.connected_job(&JobOptions::new("train", 1).with("SUBLET_PREPARE", "yes"))?;
    let shown = stage.sublet(&["ps"])?.exited(0)?.stdout;
    assert!(shown.contains("SUBLET_PREPARE=yes: expected 0, 1, or a size"), "{shown}");
    stage.pause("train")?;
    stage.resume("train")?;
    job.verify()?;
    job.exit()
}

#[test]
fn process_that_ends_in_the_middle_ends_well() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    for _ in 0..3 {
        let job = stage.connected_job(&options(2))?;
        stage.sublet(&["prepare", "train", "--no-wait"])?.exited(0)?;
        job.exit()?;
    }
    Ok(())
}
