//! The main job on a simulated node of four GPUs: a training job and an inference job that do not fit
//! together take turns, paused and resumed by the real command, and check every byte.
//!
//! `cargo demo` builds what this needs and starts it.

mod interrupt;
mod screen;
mod script;
mod tally;
mod watch;

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use sublet_tests::{MIB, Outcome, Stage, Trouble};

use interrupt::Interrupt;
use screen::Screen;
use tally::Tally;

const GPU_COUNT: usize = 4;
const GPU_BYTES: u64 = 256 * MIB;

fn main() -> ExitCode {
    let interrupt = match Interrupt::watch() {
        Ok(interrupt) => interrupt,
        Err(trouble) => return failed(&trouble),
    };
    match show(&interrupt) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) if interrupt.came() => {
            complain("interrupted; every process that was started has been ended")
        }
        Err(trouble) => failed(&trouble),
    }
}

fn failed(trouble: &Trouble) -> ExitCode {
    complain(&format!("FAILED: {trouble}"))
}

fn complain(text: &str) -> ExitCode {
    // Without a reader the exit code must do.
    writeln!(io::stderr(), "demo: {text}").ok();
    ExitCode::FAILURE
}

fn show(interrupt: &Interrupt) -> Outcome {
    let stage = Stage::new(&[GPU_BYTES; GPU_COUNT])?;
    let screen = Screen::start(GPU_COUNT, GPU_BYTES);
    let gpu_mib = GPU_BYTES / MIB;
    screen
        .log(&format!("Two jobs take turns on {GPU_COUNT} simulated GPUs of {gpu_mib} MiB each."));
    screen.log("Processes, preload object and command are real; only the driver is not.");
    screen.log("  train  4 processes, one on each GPU, which write into each other's memory");
    screen.log("  infer  2 processes, on GPU 0 and 1");
    screen.log("A paused process keeps one small plain allocation: 2 MiB of its GPU.");
    screen.log("");
    let mut tally = Tally::default();
    let over = AtomicBool::new(false);
    let outcome = thread::scope(|scope| {
        scope.spawn(|| watch::watch(&stage, &screen, &over));
        let outcome = script::play(&stage, &screen, &mut tally, interrupt);
        over.store(true, Ordering::Relaxed);
        outcome
    });
    screen.finish();
    outcome?;
    screen.log("");
    for line in tally.verdict() {
        screen.log(&line);
    }
    Ok(())
}
