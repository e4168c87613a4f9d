//! Forks, execs, exits, unloading and signals while a tenant is on its way, and while it stands paused.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use signal_hook::consts::SIGINT;
use sublet_tests::{
    Boundary, Job, JobOptions, MIB, Outcome, PAUSE, RESUME, Stage, Steps, Trouble, until,
};
use tenants::wire::Phase;

const CAPACITIES: [u64; 2] = [128 * MIB; 2];
/// An upper bound for a busy machine; what happened is told by exit codes and words.
const SOON: Duration = Duration::from_mins(3);
/// Longer than what must come to its end by itself.
const PATIENT: [&str; 4] = ["pause", "train", "--timeout", "5m"];

fn steps(stage: &Stage, words: &[&str]) -> Outcome<Steps> {
    Steps::start(stage, Path::new(env!("CARGO_BIN_EXE_sublet-steps")), "train", words)
}

/// Does `at_boundary` at the end of every phase of a pause, while paused, and at the end of every phase of
/// a resume.
fn in_every_phase(
    stage: &Stage,
    job: &mut Job,
    mut at_boundary: impl FnMut(&mut Job) -> Outcome,
) -> Outcome {
    for (action, phases) in [("pause", &PAUSE[..]), ("resume", &RESUME[..])] {
        let mut steps = steps(stage, &[action])?;
        for phase in phases {
            steps.until(Boundary::Done(*phase))?;
            at_boundary(job)
                .map_err(|trouble| Trouble::new(format!("{action}, {phase:?}: {trouble}")))?;
        }
        let said = steps.finish()?;
        assert!(said.starts_with("ok"), "{said}");
        at_boundary(job).map_err(|trouble| Trouble::new(format!("after {action}: {trouble}")))?;
    }
    job.works()?;
    Ok(())
}

fn numbers(job: &mut Job, line: &str) -> Outcome<[u64; 2]> {
    job.ranks[0].ask(line)?.numbers::<2>()
}

#[test]
fn forked_child_is_no_member_in_any_phase() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    in_every_phase(&stage, &mut job, |job| {
        // The child ended well, and the driver said that it is not initialised in it.
        assert_eq!(numbers(job, "fork")?, [0, 3]);
        Ok(())
    })?;
    job.exit()
}

#[test]
fn spawned_program_inherits_no_descriptor_in_any_phase() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    // What the tests' own runner leaves open reaches every process.
    let without_us = JobOptions { is_preloaded: false, ..JobOptions::new("plain", 1) };
    let usual = numbers(&mut stage.job(&without_us)?, "spawn")?;
    in_every_phase(&stage, &mut job, |job| {
        assert_eq!(numbers(job, "spawn")?, usual);
        Ok(())
    })?;
    job.exit()
}

#[test]
fn spawned_program_joins_as_a_member_of_its_own_in_any_phase() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    in_every_phase(&stage, &mut job, |job| {
        assert_eq!(numbers(job, "spawn member")?, [0, 1]);
        Ok(())
    })?;
    assert_eq!(stage.members("train")?.len(), 2);
    job.exit()
}

#[test]
fn preload_object_stays_when_it_is_unloaded() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    in_every_phase(&stage, &mut job, |job| job.ranks[0].do_it("unload").map(drop))?;
    job.exit()
}

#[test]
fn signals_that_a_program_handles_or_ignores_disturb_no_phase() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    in_every_phase(&stage, &mut job, |job| {
        for signal in [Signal::SIGCHLD, Signal::SIGWINCH, Signal::SIGSTOP, Signal::SIGCONT] {
            job.ranks[1].signal(signal)?;
        }
        Ok(())
    })?;
    job.exit()
}

/// Ends rank 1 by `end` while the tenant stands paused, with its main thread waiting at the gate.
fn ends_while_paused(end: impl FnOnce(&mut Job) -> Outcome<std::process::ExitStatus>) -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    stage.pause("train")?;
    end(&mut job)?;
    assert!(stage.used_bytes(1)? <= 2 * MIB);
    assert_eq!(stage.members("train")?.len(), 1);
    // The one that is left can be ended likewise.
    job.ranks[0].signal(Signal::SIGTERM)?;
    job.ranks[0].ends_within(SOON)?;
    let ran = stage.sublet(&["pause", "train"])?.exited(1)?;
    assert_eq!(ran.stderr.lines().count(), 1, "{ran:#?}");
    assert!(!stage.run_dir_path().join("train").exists());
    Ok(())
}

/// What this process starts does not ignore SIGINT, as a shell has it that started this process in the background: a signal that is
/// handled here is as by default in a program that is started.
fn children_take_sigint() -> Outcome {
    let always = Arc::new(AtomicBool::new(true));
    signal_hook::flag::register_conditional_default(SIGINT, always)?;
    Ok(())
}

#[test]
fn rank_that_waits_at_the_gate_dies_of_sigterm_and_sigint() -> Outcome {
    children_take_sigint()?;
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        ends_while_paused(|job| {
            job.ranks[1].say("allocate 1048576")?;
            assert!(job.ranks[1].is_silent_for(Duration::from_millis(300)), "it passed the gate");
            job.ranks[1].signal(signal)?;
            let status = job.ranks[1].ends_within(SOON)?;
            assert_eq!(status.signal(), Some(signal as i32));
            Ok(status)
        })?;
    }
    Ok(())
}

#[test]
fn rank_that_exits_while_paused_runs_its_exit_handlers_and_ends() -> Outcome {
    ends_while_paused(|job| {
        job.ranks[1].say("leave")?;
        let status = job.ranks[1].ends_within(SOON)?;
        assert!(status.success(), "{status}");
        Ok(status)
    })
}

/// Handlers run in the order from the last on: that of Sublet is over when one of before it needs the memory.
#[test]
fn a_process_whose_exit_handler_needs_its_memory_while_paused_ends_when_it_is_resumed() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut train = stage.keeper(Some("train"), &[])?;
    train.do_it("make")?;
    stage.pause("train")?;
    train.say("leave")?;
    assert!(train.is_silent_for(Duration::from_millis(300)), "it passed the gate");
    assert_eq!(stage.states("train")?, ["paused"]);
    // It may have ended before the command has its last answer.
    let said = stage.sublet(&["resume", "train", "--json", "--timeout", "4m"])?.json()?;
    let losses: Vec<_> = said["report"]["losses"].as_array().into_iter().flatten().collect();
    let outcome = if losses.is_empty() { "completed" } else { "partial" };
    assert_eq!(said["outcome"], outcome, "{said:#}");
    assert!(losses.iter().all(|loss| loss.to_string().contains("it has ended")), "{said:#}");
    assert_eq!(train.answer()?.text, "at the end");
    assert!(train.ends_within(SOON)?.success());
    assert!(stage.sublet(&["ps"])?.succeeded()?.stdout.contains("no tenant is running"));
    Ok(())
}

#[test]
fn rank_that_exits_in_a_phase_is_named_and_the_other_is_settled() -> Outcome {
    for boundary in [
        Boundary::Done(Phase::CloseGate),
        Boundary::Done(Phase::Prepare),
        Boundary::Done(Phase::Release),
    ] {
        let stage = Stage::new(&CAPACITIES)?;
        let mut job = stage.job(&JobOptions::new("train", 2))?;
        let mut steps = steps(&stage, &["pause"])?;
        steps.until(boundary)?;
        let pid = job.ranks[1].pid();
        job.ranks[1].say("leave")?;
        assert!(job.ranks[1].ends_within(SOON)?.success());
        let said = steps.finish()?;
        assert!(said.contains(&format!("process {pid}")), "{boundary}: {said}");
        let is_decided = boundary == Boundary::Done(Phase::Release);
        let state = if is_decided { "paused" } else { "active" };
        assert_eq!(stage.states("train")?, [state]);
    }
    Ok(())
}

#[test]
fn stopped_rank_is_named_at_the_deadline_and_consistent_when_it_goes_on() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    job.ranks[1].stop()?;
    // Nobody can greet it.
    let ran = stage.sublet(&["pause", "train", "--timeout", "1s"])?.exited(1)?;
    assert!(ran.stderr.contains(&format!("process {}", job.ranks[1].pid())), "{ran:#?}");
    job.ranks[1].signal(Signal::SIGCONT)?;
    job.step(1)?;
    // Side by side, as most of it is waiting.
    std::thread::scope(|scope| -> Outcome {
        let resumes = scope.spawn(|| -> Outcome {
            let (stage, job) = Stage::with_train(&CAPACITIES, 2)?;
            stopped_in_each(&stage, job, "resume", &RESUME)
        });
        stopped_in_each(&stage, job, "pause", &PAUSE[..4])?;
        resumes.join().expect("the thread ends")
    })
}

fn stopped_in_each(stage: &Stage, mut job: Job, action: &str, phases: &[Phase]) -> Outcome {
    for phase in phases {
        stopped_in(stage, &mut job, action, *phase)
            .map_err(|trouble| Trouble::new(format!("{action}, {phase:?}: {trouble}")))?;
    }
    job.exit()
}

/// Stops rank 1 when `phase` is about to be sent out. A rank that is done with it before the signal comes
/// was not stopped in it: then once more.
fn stopped_in(stage: &Stage, job: &mut Job, action: &str, phase: Phase) -> Outcome {
    const TRIES: usize = 20;
    for _ in 0..TRIES {
        if action == "resume" {
            stage.pause("train")?;
        }
        let mut steps = steps(stage, &[action, "soon"])?;
        steps.until(Boundary::Started(phase))?;
        job.ranks[1].stop()?;
        let said = steps.finish()?;
        job.ranks[1].signal(Signal::SIGCONT)?;
        let too_late = said.trim() == "ok";
        let named = said.contains(&format!("process {}", job.ranks[1].pid()));
        assert!(too_late || named, "{said}");
        // Whatever it was told in the meantime, one more command brings all together.
        stage.patiently(&["resume", "train"])?;
        assert_eq!(stage.states("train")?, ["active"]);
        job.works()?;
        if named {
            return Ok(());
        }
    }
    Err(Trouble::new(format!("in {TRIES} tries the rank was never stopped in time")))
}

fn start_command(stage: &Stage, words: &[&str]) -> Outcome<Child> {
    let mut command = stage.command(&stage.files().sublet);
    let command = command.args(words).stdin(Stdio::null());
    Ok(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
}

fn signal_command(command: &Child, signal: Signal) -> Outcome {
    Ok(kill(Pid::from_raw(i32::try_from(command.id())?), signal)?)
}

#[test]
fn first_ctrl_c_takes_a_pause_back_and_says_so() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        job.ranks[0].do_it("spin")?;
        let command = start_command(&stage, &PATIENT)?;
        stage.states_become("train", "offloading")?;
        let begin = Instant::now();
        signal_command(&command, signal)?;
        let output = command.wait_with_output()?;
        assert!(begin.elapsed() < SOON, "it took {:?}", begin.elapsed());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{errors}");
        assert!(errors.contains("called off. The tenant is active as before"), "{errors}");
        assert_eq!(stage.states("train")?, ["active"]);
        job.ranks[0].do_it("release spin")?;
        job.works()?;
    }
    job.exit()
}

#[test]
fn ctrl_z_does_not_stop_a_command_that_has_begun() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    job.ranks[0].do_it("spin")?;
    let command = start_command(&stage, &PATIENT)?;
    stage.states_become("train", "offloading")?;
    for signal in [Signal::SIGTSTP, Signal::SIGTTOU] {
        signal_command(&command, signal)?;
    }
    // It waits for the kernel, and a call that the kernel waits for passes the gate by its leave alone.
    job.ranks[0].say("release spin")?;
    stage.states_become("train", "paused")?;
    assert!(command.wait_with_output()?.status.success());
    stage.resume("train")?;
    assert!(job.ranks[0].answer()?.is_ok);
    job.works_and_exits()
}

/// As one that got SIGSTOP: it is connected, and asks for nothing.
#[test]
fn coordinator_that_stands_still_is_left_behind_and_says_so_when_it_goes_on() -> Outcome {
    const HUNG_UP_WITHIN: Duration = Duration::from_mins(2);
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    let mut steps = steps(&stage, &["pause", "soon"])?;
    steps.until(Boundary::Done(Phase::Prepare))?;
    let begin = Instant::now();
    while stage.states("train")? != ["active"] {
        assert!(begin.elapsed() < HUNG_UP_WITHIN, "the processes wait for it");
    }
    job.works()?;
    let said = steps.finish()?;
    assert!(said.contains("stood still for too long"), "{said}");
    assert_eq!(stage.states("train")?, ["active"]);
    stage.pause("train")?;
    stage.resume("train")?;
    job.works_and_exits()
}

#[test]
fn second_ctrl_c_leaves_at_once_and_the_processes_settle_it() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    job.ranks[0].do_it("spin")?;
    // Its undo cannot be answered while the rank is stopped.
    let command = start_command(&stage, &PATIENT)?;
    stage.states_become("train", "offloading")?;
    job.ranks[1].stop()?;
    signal_command(&command, Signal::SIGINT)?;
    let begin = Instant::now();
    let mut command = command;
    while command.try_wait()?.is_none() {
        assert!(begin.elapsed() < SOON, "the second one did not end it");
        signal_command(&command, Signal::SIGINT)?;
    }
    assert_eq!(command.wait()?.code(), Some(130));
    job.ranks[1].signal(Signal::SIGCONT)?;
    stage.states_become("train", "active")?;
    job.ranks[0].do_it("release spin")?;
    job.works_and_exits()
}

/// One whose next pause releases while it saves: it copies much, and its host memory is there.
fn job_that_releases_early(stage: &Stage, latency: &str) -> Outcome<Job> {
    let options = JobOptions { tensor_mib: 1032, ..JobOptions::new("train", 1) };
    // What is unchanged is copied too.
    let options = options.with("SUBLET_CHANGES", "off").with("SIMCUDA_LATENCY", latency);
    let job = stage.connected_job(&options)?;
    stage.pause("train")?;
    stage.resume("train")?;
    Ok(job)
}

/// The process has begun to release, and is stopped for `then`. A pause that is done before the signal comes was not met in it: `then` says
/// so, and once more.
fn while_it_releases(
    stage: &Stage,
    job: &Job,
    mut then: impl FnMut(&mut Child) -> Outcome<bool>,
) -> Outcome<Child> {
    const TRIES: usize = 20;
    for _ in 0..TRIES {
        let all_bytes = stage.used_bytes(0)?;
        let mut command = start_command(stage, &PATIENT)?;
        until("the process releases", SOON, || Ok(stage.used_bytes(0)? < all_bytes))?;
        job.ranks[0].stop()?;
        let was_met = then(&mut command);
        job.ranks[0].signal(Signal::SIGCONT)?;
        if was_met? {
            return Ok(command);
        }
        command.wait()?;
        stage.resume("train")?;
    }
    Err(Trouble::new(format!("in {TRIES} tries the pause was never met while it released")))
}

#[test]
fn ctrl_c_behind_the_first_release_says_that_it_goes_on_and_the_second_that_something_has_changed()
-> Outcome {
    let stage = Stage::new(&[1400 * MIB])?;
    let mut job = job_that_releases_early(&stage, "cuMemcpyDtoHAsync:30000")?;
    let mut errors = String::new();
    let command = while_it_releases(&stage, &job, |command| {
        signal_command(command, Signal::SIGINT)?;
        // Its answer, or its end.
        errors.clear();
        if let Some(source) = &mut command.stderr {
            BufReader::with_capacity(1, source).read_line(&mut errors)?;
        }
        Ok(!errors.is_empty())
    })?;
    let output = command.wait_with_output()?;
    errors.push_str(&String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{errors}");
    assert_eq!(errors.matches("it will finish").count(), 1, "{errors}");
    assert_eq!(stage.states("train")?, ["paused"]);
    stage.resume("train")?;
    job.step(1)?;

    let mut command = while_it_releases(&stage, &job, |command| {
        let begin = Instant::now();
        while command.try_wait()?.is_none() {
            assert!(begin.elapsed() < SOON, "the second one did not end it");
            signal_command(command, Signal::SIGINT)?;
        }
        Ok(!command.wait()?.success())
    })?;
    assert_eq!(command.wait()?.code(), Some(3));
    stage.states_become("train", "paused")?;
    stage.resume("train")?;
    job.works_and_exits()
}

#[test]
fn ctrl_c_at_any_instant_leaves_one_of_the_two_clean_states_and_names_it() -> Outcome {
    let (stage, job) = Stage::with_train(&CAPACITIES, 2)?;
    for delay_ms in 0..12 {
        for (action, done, before) in
            [("pause", "paused", "active"), ("resume", "active", "paused")]
        {
            let words = [action, "train", "--timeout", "4m"];
            if !ends_when_interrupted(&stage, &words, 4 * delay_ms, done, before)? {
                stage.patiently(&[action, "train"])?;
            }
        }
    }
    job.works_and_exits()
}

#[test]
fn ctrl_c_at_any_instant_of_a_pause_that_releases_early_does_so_too() -> Outcome {
    let stage = Stage::new(&[1400 * MIB])?;
    let job = job_that_releases_early(&stage, "")?;
    for delay_ms in (0..480).step_by(60) {
        ends_when_interrupted(&stage, &PATIENT, delay_ms, "paused", "active")?;
        stage.resume("train")?;
    }
    job.works_and_exits()
}

/// Interrupts a command after some time: it has come to its end, with all processes in `done`, or to nothing, with all as `before`.
fn ends_when_interrupted(
    stage: &Stage,
    words: &[&str],
    delay_ms: u64,
    done: &str,
    before: &str,
) -> Outcome<bool> {
    let command = start_command(stage, words)?;
    wait_ms(delay_ms);
    // It may have ended already, and is then waited for below all the same.
    signal_command(&command, Signal::SIGINT)?;
    let output = command.wait_with_output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    let state = stage.states("train")?;
    match output.status.code() {
        Some(0) => assert_eq!(state, [done], "{errors}"),
        Some(130) => {
            assert_eq!(state, [before], "{errors}");
            assert!(errors.contains(&format!("The tenant is {before}")), "{errors}");
        }
        // Before it watched signals, it had done nothing.
        None => assert_eq!(state, [before]),
        other => return Err(Trouble::new(format!("{words:?} ended with {other:?}: {errors}"))),
    }
    Ok(output.status.success())
}

#[expect(clippy::disallowed_methods, reason = "an instant is waited for, not an event")]
fn wait_ms(milliseconds: u64) {
    std::thread::sleep(Duration::from_millis(milliseconds));
}
