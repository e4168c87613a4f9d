//! A seeded simulation: tenants of 1 to 64 real processes work, are paused and resumed, fail and are killed, and
//! after every cycle each byte that can be reached is compared with what it must be.
//!
//! `sublet-sim [--seed N] [--cycles N] [--processes MAX] [--minutes MAX]`; `cargo sim` builds what it needs and
//! starts it. When its time is up it ends as after its last cycle.
//!
//! ```text
//!   this process: script (what happens next) -- desk (who asks) -- checks (what must be true then)
//!      |  orders over a socket pair              |  library, a child, or the `sublet` command
//!   sublet-sim worker ..: a member over the simulated driver; its own model of what it holds
//! ```
//!
//! A seed settles what is done in which order, what is injected, and after what time. How far other processes
//! have come at that instant is the machine's, so a failure that depends on it may need several tries.

mod coordinate;
mod orders;
mod process;
mod script;
mod tally;
mod trade;
mod usage;
mod worker;
mod world;

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use sublet_tests::{Outcome, Trouble};

use script::{Script, Settings};
use tally::seconds;
use world::World;

const TENANTS: usize = 3;
/// Between two lines of progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(5);
/// How much larger this process may be at the end than after a tenth of the cycles.
const GROWTH_BYTES_MAX: u64 = 8 << 20;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.split_first() {
        Some((role, rest)) if role == "worker" => {
            worker::Charter::from_words(rest).and_then(|charter| worker::run(&charter))
        }
        Some((role, rest)) if role == "coordinate" => coordinate::run(rest),
        _ => settings(&arguments).and_then(simulate),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(trouble) => {
            complain(&format!("FAILED: {trouble}"));
            ExitCode::FAILURE
        }
    }
}

/// To standard error; without a reader the exit code must do.
fn complain(text: &str) {
    writeln!(io::stderr(), "sim: {text}").ok();
}

fn settings(arguments: &[String]) -> Outcome<Settings> {
    let seed = fastrand::u64(..);
    let mut settings = Settings { seed, cycles: 200, processes_max: 64, time_max: None };
    for pair in arguments.chunks(2) {
        let [name, value] = pair else {
            return Err(Trouble::new(format!("{} needs a number", pair[0])));
        };
        match name.as_str() {
            "--seed" => settings.seed = value.parse()?,
            "--cycles" => settings.cycles = value.parse()?,
            "--processes" => settings.processes_max = value.parse::<usize>()?.clamp(1, 64),
            "--minutes" => {
                let minutes = value.parse::<u32>()?;
                settings.time_max = Some(Duration::from_mins(1) * minutes);
            }
            other => return Err(Trouble::new(format!("{other} is not known"))),
        }
    }
    Ok(settings)
}

fn simulate(settings: Settings) -> Outcome {
    let begin = Instant::now();
    let sublet = std::env::var_os("SUBLET_TEST_BIN").map(PathBuf::from);
    let world = World::new(settings.seed, TENANTS, sublet)?;
    // The first look opens what stays open.
    world.free_bytes()?;
    let start = world.footprint()?;
    let Settings { seed, cycles, processes_max, time_max } = settings;
    complain(&format!("seed {seed}, {cycles} cycles, at most {processes_max} processes"));
    let mut script = Script::new(settings, world);
    let run = watched(&mut script, cycles, time_max, begin);
    let ended = run.and_then(|warm_bytes| {
        script.finish()?;
        Ok(warm_bytes)
    });
    let warm_bytes = ended.map_err(|trouble| {
        Trouble::new(format!(
            "{trouble}\n  at cycle {} of seed {seed}; before that:\n    {}\n  again: cargo sim --seed {seed} \
             --cycles {cycles} --processes {processes_max}",
            script.world.tally.cycles,
            history(&script.history)
        ))
    })?;
    let end = script.world.footprint()?;
    let text = format!(
        "seed            {seed}\n{}\nat the start    {start}\nat the end      {end}\nveteran         {}\nwall time       {}\n",
        script.world.tally,
        script.veteran,
        seconds(begin.elapsed())
    );
    io::stdout().write_all(text.as_bytes())?;
    let is_flat = end.own.fds == start.own.fds
        && end.shared_entries == start.shared_entries
        && end.run_entries == start.run_entries
        && end.own.resident_bytes <= warm_bytes + GROWTH_BYTES_MAX
        && script.veteran.is_flat();
    if is_flat { Ok(()) } else { Err(Trouble::new("something has grown from start to end")) }
}

/// Runs all cycles, or as many as there is time for; returns how large this process was after a tenth of them.
fn watched(
    script: &mut Script,
    cycles: u64,
    time_max: Option<Duration>,
    begin: Instant,
) -> Outcome<u64> {
    let mut warm_bytes = None;
    let mut last = begin;
    let is_time_up = || time_max.is_some_and(|most| begin.elapsed() >= most);
    while script.world.tally.cycles < cycles && !is_time_up() {
        script.turn()?;
        let done = script.world.tally.cycles;
        if warm_bytes.is_none() && done * 10 >= cycles {
            warm_bytes = Some(script.world.footprint()?.own.resident_bytes);
        }
        if last.elapsed() >= PROGRESS_EVERY {
            last = Instant::now();
            let (time, processes) = (seconds(begin.elapsed()), script.world.processes());
            complain(&format!("{done} of {cycles} cycles, {processes} processes, {time}"));
        }
    }
    Ok(warm_bytes.unwrap_or(u64::MAX / 2))
}

fn history(lines: &VecDeque<String>) -> String {
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    lines.join("\n    ")
}
