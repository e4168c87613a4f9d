//! Programs that do what few do, in random orders, while commands come at random instants: contexts by the driver's plain names, captures
//! from before a process has joined, forks in turns, touches of what is away by tag. Programs and commands get signals
//! while they wait.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sublet_tests::{MIB, Outcome, Rank, Stage, Trouble};

const TENANTS: [&str; 2] = ["one", "two"];
const STEPS: u32 = 300;
/// For all steps of all programs, on a busy machine.
const TIMEOUT: Duration = Duration::from_mins(4);

/// `SUBLET_TEST_SEED` repeats a run, `SUBLET_TEST_ROUNDS` makes more of them.
#[expect(clippy::print_stdout, reason = "a failure shows the seed that repeats it")]
#[test]
fn programs_that_wander_keep_their_contents_and_can_always_be_paused_in_the_end() -> Outcome {
    let first = sublet_tests::seed();
    let rounds = std::env::var("SUBLET_TEST_ROUNDS").ok().and_then(|text| text.parse().ok());
    for seed in first..first + rounds.unwrap_or(3) {
        println!("SUBLET_TEST_SEED={seed}");
        wander(seed)?;
    }
    Ok(())
}

fn wander(seed: u64) -> Outcome {
    let stage = Stage::new(&[192 * MIB])?;
    let mut random = fastrand::Rng::with_seed(seed);
    let start = |tenant: &&'static str| stage.wanderer(tenant, random.u64(..1 << 40), STEPS);
    let mut processes = TENANTS.iter().map(start).collect::<Outcome<Vec<Rank>>>()?;
    let deadline = Instant::now() + TIMEOUT;
    let mut is_over = [false; TENANTS.len()];
    while is_over.contains(&false) {
        if Instant::now() > deadline {
            return Err(Trouble::new(format!("their steps did not end: {is_over:?}")));
        }
        // Who waits for a turn gets it when nobody has paused it by hand.
        let tenant = TENANTS[random.usize(..TENANTS.len())];
        let wait = Duration::from_millis(random.u64(..20));
        command(&stage, &["pause", tenant])?;
        let until = Instant::now() + wait;
        for (process, is_over) in processes.iter_mut().zip(&mut is_over) {
            let left = until.saturating_duration_since(Instant::now());
            *is_over = *is_over || process.answer_if_within(left)?.is_some();
        }
        let signal = if random.bool() { Signal::SIGINT } else { Signal::SIGTERM };
        let chosen = random.usize(..TENANTS.len());
        if random.bool() && !is_over[chosen] {
            processes[chosen].signal(signal)?;
        }
        if random.u8(..4) == 0 {
            let after = Duration::from_millis(random.u64(..40));
            interrupt(&stage, &["resume", tenant, "--queue"], after, signal)?;
        }
        command(&stage, &["resume", tenant, "--queue"])?;
    }
    for (tenant, process) in TENANTS.iter().zip(&mut processes) {
        stage.pause(tenant)?;
        stage.resume(tenant)?;
        process.exits_well()?;
    }
    Ok(())
}

/// A refusal is fine, as long as it changed nothing.
fn command(stage: &Stage, words: &[&str]) -> Outcome {
    let ran = stage.sublet(words)?;
    if matches!(ran.code, Some(0 | 1)) {
        return Ok(());
    }
    Err(Trouble::new(format!("{words:?}: {ran:?}")))
}

/// Starts the command, which gets a signal after some time; it says that nothing has changed, or does its work.
fn interrupt(stage: &Stage, words: &[&str], after: Duration, signal: Signal) -> Outcome {
    let mut command = stage.command(&stage.files().sublet);
    let child = command.args(words).stdin(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let_time_pass(after);
    kill(Pid::from_raw(i32::try_from(child.id())?), signal)?;
    let begin = Instant::now();
    let output = child.wait_with_output()?;
    let is_early = output.status.signal() == Some(signal as i32);
    let is_known = is_early || matches!(output.status.code(), Some(0 | 1 | 130));
    if is_known && begin.elapsed() < TIMEOUT {
        return Ok(());
    }
    Err(Trouble::new(format!("{words:?}, interrupted: {output:?}")))
}

#[expect(clippy::disallowed_methods, reason = "a random instant is what the test is about")]
fn let_time_pass(time: Duration) {
    std::thread::sleep(time);
}
