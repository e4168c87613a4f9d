//! Jobs whose kernels wait for launches that nobody counts, paused at any instant.

use std::process::Stdio;
use std::time::{Duration, Instant};

use sublet_tests::{MIB, Outcome, Rank, Stage, until};

const PAUSES: usize = 12;
/// So many are enough where they have taken so long, on a busy machine.
const PAUSES_MIN: usize = 3;
const ENOUGH: Duration = Duration::from_secs(90);
/// Of a test on a busy machine.
const LIMIT: Duration = Duration::from_mins(5);

/// Pauses the job at irregular instants while it does `steps`, and compares its data: so often, and then until a pause has
/// found devices that wait for something.
fn survives(ranks: usize, mode: &str, steps: u32, pauses: usize) -> Outcome {
    let stage = Stage::new(&vec![64 * MIB; ranks])?;
    let mut job = stage.handmade(Some("handmade"), ranks, mode)?;
    let begin = Instant::now();
    let (mut calls, mut steps) = (0, steps);
    for pause in 0.. {
        say(&mut job, &format!("steps {steps}"))?;
        wait(Duration::from_millis(7 + 13 * (pause as u64 % 5)));
        let report = stage.pause("handmade")?;
        calls += report["report"]["drain"]["calls"].as_u64().unwrap_or_default();
        for device in 0..ranks {
            assert_eq!(stage.used_bytes(i32::try_from(device)?)?, 0, "of device {device}");
        }
        stage.resume("handmade")?;
        answers(&mut job)?;
        say(&mut job, "verify")?;
        answers(&mut job)?;
        let is_enough = pause + 1 >= PAUSES_MIN && begin.elapsed() > ENOUGH;
        if pause + 1 >= pauses || is_enough {
            if calls > 0 {
                break;
            }
            assert!(begin.elapsed() < LIMIT, "each pause found the devices idle");
            // It was over before the pause came.
            steps *= 2;
        }
    }
    for rank in &mut job {
        assert!(rank.exit()?.success());
    }
    Ok(())
}

fn say(job: &mut [Rank], line: &str) -> Outcome {
    job.iter_mut().try_for_each(|rank| rank.say(line))
}

fn answers(job: &mut [Rank]) -> Outcome {
    for rank in job {
        let answer = rank.answer()?;
        assert!(answer.is_ok, "{answer:?}");
    }
    Ok(())
}

#[expect(
    clippy::disallowed_methods,
    reason = "a pause comes at any instant, which nothing announces"
)]
fn wait(time: Duration) {
    std::thread::sleep(time);
}

#[test]
fn the_program_is_right_without_sublet() -> Outcome {
    for mode in ["", "helper", "capture"] {
        let stage = Stage::new(&[64 * MIB; 2])?;
        let mut job = stage.handmade(None, 2, mode)?;
        say(&mut job, "steps 100")?;
        answers(&mut job)?;
        say(&mut job, "verify")?;
        answers(&mut job)?;
    }
    Ok(())
}

#[test]
fn an_all_reduce_written_by_hand_survives_pauses_at_any_instant() -> Outcome {
    survives(2, "", 400, PAUSES)
}

#[test]
fn four_ranks_of_an_all_reduce_written_by_hand_survive_pauses_at_any_instant() -> Outcome {
    survives(4, "", 400, PAUSES / 2)
}

#[test]
fn kernels_that_wait_for_another_thread_of_their_process_survive_pauses_at_any_instant() -> Outcome
{
    survives(1, "helper", 80, PAUSES)?;
    survives(2, "helper", 80, PAUSES)
}

#[test]
fn captures_between_kernels_that_wait_for_peers_survive_pauses_at_any_instant() -> Outcome {
    survives(2, "capture", 300, PAUSES)
}

#[test]
fn a_kernel_that_never_ends_is_named_with_what_waits_and_the_job_runs_on() -> Outcome {
    let stage = Stage::new(&[64 * MIB; 2])?;
    let mut job = stage.handmade(Some("handmade"), 2, "")?;
    job[0].do_it("forever")?;
    say(&mut job, "steps 2000")?;
    let ran = stage.sublet(&["pause", "handmade", "--timeout", "5s"])?.exited(1)?;
    let pid = job[0].pid();
    for words in
        [&format!("process {pid} was not idle in time: GPU 0 has work left"), "at its gate (cu"]
    {
        assert!(ran.stderr.contains(words), "{words}: {ran:#?}");
    }
    assert_eq!(stage.states("handmade")?, ["active"]);
    answers(&mut job)?;
    say(&mut job, "verify")?;
    answers(&mut job)
}

#[test]
fn a_receive_that_was_posted_before_many_launches_is_reached_in_few_rounds() -> Outcome {
    let stage = Stage::new(&[64 * MIB; 2])?;
    let mut job = stage.handmade(Some("pipe"), 2, "400")?;
    // Both devices wait for what neither rank has launched.
    say(&mut job, "post")?;
    answers(&mut job)?;
    let mut command = stage.command(&stage.files().sublet);
    command.args(["pause", "pipe", "--json", "--timeout", "200s"]);
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    until("the gates are shut", LIMIT, || Ok(stage.states("pipe")? == ["offloading"]))?;
    say(&mut job, "step")?;
    let paused = command.wait_with_output()?;
    let said = String::from_utf8_lossy(&paused.stdout);
    assert!(paused.status.success(), "{said}");
    let report: serde_json::Value = serde_json::from_str(&said)?;
    let [rounds, calls] =
        ["rounds", "calls"].map(|name| report["report"]["drain"][name].as_u64().unwrap_or(0));
    assert!(calls > 400 && rounds < calls / 4, "{rounds} rounds for {calls} calls");
    stage.resume("pipe")?;
    answers(&mut job)?;
    say(&mut job, "verify")?;
    answers(&mut job)
}

/// How many threads of ours wait for devices in a process.
fn waiting_threads(process: &Rank) -> Outcome<usize> {
    let mut count = 0;
    for task in std::fs::read_dir(format!("/proc/{}/task", process.pid()))? {
        let name = std::fs::read_to_string(task?.path().join("comm")).unwrap_or_default();
        count += usize::from(name.trim() == "sublet-drain");
    }
    Ok(count)
}

#[test]
fn drains_that_time_out_leave_one_thread_a_device_behind() -> Outcome {
    let stage = Stage::new(&[64 * MIB])?;
    let mut job = stage.handmade(Some("handmade"), 1, "")?;
    job[0].do_it("forever")?;
    for _ in 0..5 {
        // On a busy machine it may be refused before it comes to that.
        until("a wait for the device times out", LIMIT, || {
            let ran = stage.sublet(&["pause", "handmade", "--timeout", "2s"])?.exited(1)?;
            Ok(ran.stderr.contains("was not idle in time"))
        })?;
        until("one thread waits", LIMIT, || Ok(waiting_threads(&job[0])? == 1))?;
    }
    job[0].do_it("steps 10")?;
    job[0].do_it("verify").map(drop)
}
