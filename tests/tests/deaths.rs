//! Processes that are killed at every boundary between two phases, and at random instants.
//!
//! The survivors must be told who died and what it was, when that happens and not at a deadline; must hang nowhere; and its
//! device memory must go to another tenant by the next command.

#![expect(clippy::print_stdout, reason = "a failure shows the seed and the times")]

use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sublet_tests::{
    Boundary, Job, JobOptions, MIB, Outcome, PAUSE, RESUME, Random, Stage, Steps, Trouble,
};
use tenants::wire::Phase;

const CAPACITIES: [u64; 3] = [64 * MIB; 3];
/// What a context and the like may cost on the simulated device.
const LEFT_BYTES: u64 = 2 * MIB;
/// Far below the two minutes that any phase may take here, and far above what a busy machine needs: who is told within this
/// was told of the death, and did not wait for a deadline.
const TOLD_WITHIN: Duration = Duration::from_secs(45);

fn steps(stage: &Stage, words: &[&str]) -> Outcome<Steps> {
    Steps::start(stage, Path::new(env!("CARGO_BIN_EXE_sublet-steps")), "train", words)
}

/// The survivors give all they have to another tenant, are brought back without what is lost, and end.
fn survivors_can_go_on(stage: &Stage, job: &mut Job, dead: usize) -> Outcome {
    let pid = job.ranks[dead].pid();
    let ran = stage.patiently(&["pause", "train"])?;
    assert!(ran.stdout.contains("already") || ran.stdout.contains(&pid.to_string()), "{ran:#?}");
    assert_eq!(stage.states("train")?, ["paused"]);
    for device in 0..3 {
        assert!(stage.used_bytes(device)? <= LEFT_BYTES, "device {device} is not free");
    }
    let big = JobOptions { tensor_mib: 24, ..JobOptions::new("infer", 3) };
    stage.job(&big)?.exit()?;

    let refused = stage.sublet(&["resume", "train", "--timeout", "10s"])?.exited(1)?;
    let who = format!("process {pid} (");
    assert!(refused.stderr.contains(&who) && refused.stderr.contains("has ended"), "{refused:#?}");
    assert!(refused.stderr.contains("--without-lost"), "{refused:#?}");
    assert_eq!(stage.states("train")?, ["paused"]);
    let ran = stage.patiently(&["resume", "train", "--without-lost"])?;
    assert!(ran.stdout.contains(&who) && ran.stdout.contains("are lost"), "{ran:#?}");
    assert_eq!(stage.states("train")?, ["active"]);
    // Twice around: what is lost is not fetched again.
    stage.pause("train")?;
    stage.resume("train")?;
    for rank in job.others(dead) {
        rank.do_it("memory")?;
        assert!(rank.exit()?.success());
    }
    let shown = stage.sublet(&["ps", "--json"])?.succeeded()?.json()?;
    assert_eq!(shown["tenants"], serde_json::json!([]));
    assert!(!stage.run_dir_path().join("train").exists(), "the dead left something behind");
    Ok(())
}

/// Kills rank `victim` where `action` has come to `boundary`.
fn kill_a_rank(action: &str, boundary: Boundary, victim: usize) -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 3)?;
    if action == "resume" {
        stage.pause("train")?;
    }
    let mut steps = steps(&stage, &[action])?;
    steps.until(boundary)?;
    job.ranks[victim].kill()?;
    let begin = Instant::now();
    let said = steps.finish()?;
    let took = begin.elapsed();
    println!("{action}, {boundary}, rank {victim}: told after {took:?}: {said}");
    assert!(took < TOLD_WITHIN, "told only after {took:?}");
    let last = [Boundary::Done(Phase::Verify), Boundary::Done(Phase::Activate)].contains(&boundary);
    let who = format!("process {}", job.ranks[victim].pid());
    assert!(last || said.contains(&who), "no '{who}' in: {said}");
    assert!(last || said.contains("has ended ("), "not what it was in: {said}");
    stage.settled("train")?;
    survivors_can_go_on(&stage, &mut job, victim)
}

fn kill_a_rank_at_each_boundary(action: &str, phases: &[Phase]) -> Outcome {
    for (number, boundary) in Boundary::of_all(phases).into_iter().enumerate() {
        kill_a_rank(action, boundary, number % 3)
            .map_err(|trouble| Trouble::new(format!("{action} at '{boundary}': {trouble}")))?;
    }
    Ok(())
}

#[test]
fn rank_killed_at_a_boundary_of_giving_is_named_and_the_others_can_go_on() -> Outcome {
    kill_a_rank_at_each_boundary("pause", &PAUSE[..3])
}

#[test]
fn rank_killed_behind_the_last_save_is_named_and_the_others_can_go_on() -> Outcome {
    kill_a_rank_at_each_boundary("pause", &PAUSE[3..])
}

#[test]
fn rank_killed_at_a_boundary_of_taking_is_named_and_the_others_can_go_on() -> Outcome {
    kill_a_rank_at_each_boundary("resume", &RESUME[..2])
}

#[test]
fn rank_killed_behind_the_restore_is_named_and_the_others_can_go_on() -> Outcome {
    kill_a_rank_at_each_boundary("resume", &RESUME[2..])
}

/// The coordinator dies at `boundary`, and its members settle it without a further command.
fn kill_the_coordinator(stage: &Stage, job: &mut Job, action: &str, boundary: Boundary) -> Outcome {
    let mut steps = steps(stage, &[action])?;
    steps.until(boundary)?;
    steps.kill()?;
    // Statistics change nothing; they show that the processes settle it alone.
    let states = stage.settled("train")?;
    let told = match boundary {
        Boundary::Started(phase) => phase == Phase::Verify,
        Boundary::Done(phase) => phase.is_decided(),
    };
    let (before, after) =
        if action == "pause" { ("active", "paused") } else { ("paused", "active") };
    assert_eq!(states, [if told { after } else { before }], "{action} at '{boundary}'");
    if states == ["paused"] {
        stage.resume("train")?;
    }
    job.works()?;
    Ok(())
}

#[test]
fn coordinator_killed_at_each_boundary_leaves_one_clean_state() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 3)?;
    for boundary in Boundary::of_all(&PAUSE) {
        kill_the_coordinator(&stage, &mut job, "pause", boundary)?;
    }
    for boundary in Boundary::of_all(&RESUME) {
        stage.pause("train")?;
        kill_the_coordinator(&stage, &mut job, "resume", boundary)?;
    }
    job.exit()
}

/// The command that comes first after the death finds whatever state there is.
#[test]
fn command_right_after_the_coordinators_death_succeeds() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 3)?;
    for (action, phases) in [("pause", &PAUSE[..]), ("resume", &RESUME[..])] {
        for boundary in Boundary::of_all(phases) {
            for next in ["resume", "pause"] {
                if action == "resume" {
                    stage.pause("train")?;
                }
                let mut steps = steps(&stage, &[action])?;
                steps.until(boundary)?;
                steps.kill()?;
                let begin = Instant::now();
                stage.patiently(&[next, "train"]).map_err(|trouble| {
                    Trouble::new(format!("{next} after {action} at '{boundary}': {trouble}"))
                })?;
                assert!(begin.elapsed() < TOLD_WITHIN, "{next}: it took {:?}", begin.elapsed());
                let wanted = if next == "pause" { "paused" } else { "active" };
                assert_eq!(stage.states("train")?, [wanted]);
                stage.patiently(&["resume", "train"])?;
            }
            job.works()?;
        }
    }
    job.exit()
}

#[test]
fn rank_and_coordinator_killed_together_leave_the_others_able_to_go_on() -> Outcome {
    for (action, boundary) in [
        ("pause", Boundary::Done(Phase::Drain)),
        ("pause", Boundary::Done(Phase::Prepare)),
        ("pause", Boundary::Done(Phase::Release)),
        ("resume", Boundary::Done(Phase::Restore)),
        ("resume", Boundary::Done(Phase::Import)),
    ] {
        let stage = Stage::new(&CAPACITIES)?;
        let mut job = stage.connected_job(&JobOptions::new("train", 3))?;
        if action == "resume" {
            stage.pause("train")?;
        }
        let mut steps = steps(&stage, &[action])?;
        steps.until(boundary)?;
        job.ranks[1].kill()?;
        steps.kill()?;
        stage.settled("train")?;
        survivors_can_go_on(&stage, &mut job, 1)
            .map_err(|trouble| Trouble::new(format!("{action} at '{boundary}': {trouble}")))?;
    }
    Ok(())
}

/// A child that a rank has left behind, which may hold its sockets. Killed when dropped.
struct Orphan(Pid);

impl Drop for Orphan {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _killed = kill(self.0, Signal::SIGKILL);
    }
}

fn leave_child(job: &mut Job, index: usize, kind: &str) -> Outcome<Orphan> {
    let [pid] = job.ranks[index].do_it(kind)?.numbers::<1>()?;
    Ok(Orphan(Pid::from_raw(i32::try_from(pid)?)))
}

const KINDS_OF_CHILDREN: [&str; 2] = ["leave child", "leave raw child"];

/// Nobody has waited for it yet, and its child lives: neither its process id nor its socket is gone.
#[test]
fn rank_killed_beside_its_child_and_not_waited_for_is_left_out() -> Outcome {
    for kind in KINDS_OF_CHILDREN {
        let stage = Stage::new(&CAPACITIES)?;
        let mut job = stage.connected_job(&JobOptions::new("train", 3))?;
        let _orphan = leave_child(&mut job, 2, kind)?;
        let who = format!("process {} (", job.ranks[2].pid());
        job.ranks[2].kill_and_leave()?;
        let begin = Instant::now();
        let ran = stage.patiently(&["pause", "train"])?;
        assert!(ran.stdout.contains(&who) && ran.stdout.contains("has ended"), "{kind}: {ran:#?}");
        assert_eq!(stage.states("train")?, ["paused"]);
        let refused = stage.sublet(&["resume", "train"])?.exited(1)?;
        assert!(refused.stderr.contains(&who), "{kind}: {refused:#?}");
        let ran = stage.patiently(&["resume", "train", "--without-lost"])?;
        assert!(ran.stdout.contains("are lost"), "{kind}: {ran:#?}");
        assert_eq!(stage.states("train")?, ["active"]);
        assert!(begin.elapsed() < 4 * TOLD_WITHIN, "{kind}: it took {:?}", begin.elapsed());
        stage.pause("train")?;
        stage.resume("train")?;
    }
    Ok(())
}

#[test]
fn rank_killed_beside_its_child_on_the_way_is_named_and_the_others_are_settled() -> Outcome {
    for kind in KINDS_OF_CHILDREN {
        for (action, boundary) in [
            ("pause", Boundary::Done(Phase::Drain)),
            ("pause", Boundary::Done(Phase::Prepare)),
            ("resume", Boundary::Done(Phase::Create)),
        ] {
            for (coordinator_dies, is_waited_for) in [(false, false), (true, false), (true, true)] {
                let what = format!(
                    "{kind}, {action}, {boundary}, coordinator dies: {coordinator_dies}, waited for: {is_waited_for}"
                );
                let stage = Stage::new(&CAPACITIES)?;
                let mut job = stage.connected_job(&JobOptions::new("train", 3))?;
                let _orphan = leave_child(&mut job, 1, kind)?;
                if action == "resume" {
                    stage.pause("train")?;
                }
                let mut steps = steps(&stage, &[action])?;
                steps.until(boundary)?;
                if is_waited_for {
                    job.ranks[1].kill()?;
                } else {
                    job.ranks[1].kill_and_leave()?;
                }
                let begin = Instant::now();
                if coordinator_dies {
                    steps.kill()?;
                } else {
                    let said = steps.finish()?;
                    let who = format!("process {}", job.ranks[1].pid());
                    assert!(said.contains(&who) && said.contains("has ended ("), "{what}: {said}");
                }
                stage.settled("train")?;
                assert!(begin.elapsed() < TOLD_WITHIN, "{what}: only after {:?}", begin.elapsed());
                stage.pause("train")?;
                stage.patiently(&["resume", "train", "--without-lost"])?;
                assert_eq!(stage.states("train")?, ["active"]);
            }
        }
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "a random instant is waited for, not an event")]
fn wait(random: &mut Random, limit_us: u64) {
    std::thread::sleep(Duration::from_micros(random.below(limit_us)));
}

#[test]
fn processes_killed_at_random_instants_leave_the_others_able_to_go_on() -> Outcome {
    let mut random = Random::new();
    let rounds = std::env::var("SUBLET_TEST_ROUNDS").ok().and_then(|count| count.parse().ok());
    for round in 0..rounds.unwrap_or(6) {
        let stage = Stage::new(&CAPACITIES)?;
        let mut job = stage.connected_job(&JobOptions::new("train", 3))?;
        let action = if random.below(2) == 0 { "pause" } else { "resume" };
        if action == "resume" {
            stage.pause("train")?;
        }
        let victim = usize::try_from(random.below(3))?;
        let (kills_rank, kills_command) =
            [(true, false), (true, true), (false, true)][usize::try_from(random.below(3))?];
        println!("round {round}: {action}, rank {victim}: {kills_rank}, command: {kills_command}");
        let mut command = stage
            .command(&stage.files().sublet)
            .args([action, "train"])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()?;
        wait(&mut random, 80_000);
        if kills_rank {
            job.ranks[victim].kill()?;
        }
        if kills_command {
            wait(&mut random, 10_000);
            command.kill()?;
        }
        let begin = Instant::now();
        command.wait()?;
        assert!(begin.elapsed() < TOLD_WITHIN, "the command took {:?}", begin.elapsed());
        stage.settled("train")?;
        if kills_rank {
            survivors_can_go_on(&stage, &mut job, victim)?;
        } else {
            stage.patiently(&["resume", "train"])?;
            job.works()?;
        }
    }
    Ok(())
}

/// A kernel waits for the dead: the wait for the device must not be waited out.
#[test]
fn death_while_a_survivor_drains_is_told_at_once() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = stage.job(&JobOptions::new("train", 3))?;
    job.ranks[0].do_it("spin")?;
    let mut steps = steps(&stage, &["pause"])?;
    steps.until(Boundary::Done(Phase::CloseGate))?;
    job.ranks[2].kill()?;
    let begin = Instant::now();
    let said = steps.finish()?;
    assert!(begin.elapsed() < TOLD_WITHIN, "told only after {:?}", begin.elapsed());
    assert!(said.contains(&format!("process {}", job.ranks[2].pid())), "{said}");
    assert!(!said.contains("called off"), "{said}");
    assert_eq!(stage.states("train")?, ["active"]);
    job.ranks[0].do_it("release spin")?;
    job.ranks[0].do_it("verify")?;
    Ok(())
}

#[test]
fn ranks_that_pause_together_are_all_told_who_died() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    // Not connected, so that all go back; the dead one never calls.
    let mut job = stage.job(&JobOptions::new("train", 3))?;
    job.ranks[0].say("pause inside")?;
    job.ranks[1].say("pause inside")?;
    assert!(job.ranks[0].is_silent_for(Duration::from_millis(300)));
    let pid = job.ranks[2].pid();
    job.ranks[2].kill()?;
    let begin = Instant::now();
    for index in [0, 1] {
        let answer = job.ranks[index].answer()?;
        // Either it was told, or it went on without the dead one after that had been said.
        assert!(answer.is_ok || answer.text.contains(&format!("process {pid}")), "{answer:?}");
    }
    assert!(begin.elapsed() < TOLD_WITHIN, "told only after {:?}", begin.elapsed());
    Ok(())
}

#[test]
fn rank_killed_while_ranks_pause_together_is_not_waited_for() -> Outcome {
    let mut random = Random::new();
    for victim in [0, 1, 0, 1, 0, 1] {
        let stage = Stage::new(&CAPACITIES)?;
        let mut job = stage.connected_job(&JobOptions::new("train", 2))?;
        job.all("pause inside")?;
        job.all("resume inside")?;
        // From before either is ready to behind the release.
        job.ranks[0].say("pause inside")?;
        job.ranks[1].say("pause inside")?;
        wait(&mut random, 20_000);
        job.ranks[victim].kill()?;
        let begin = Instant::now();
        // Whether it went on without the dead one or was told of it, it does not wait for it.
        job.ranks[1 - victim].answer()?;
        assert!(begin.elapsed() < TOLD_WITHIN, "rank {victim}: after {:?}", begin.elapsed());
    }
    Ok(())
}
