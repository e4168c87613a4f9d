//! The seeded simulation, 200 cycles in every build; `cargo sim` runs it for longer.

use std::path::Path;
use std::process::Command;

use sublet_tests::{Outcome, Trouble};

/// One that every build runs alike.
const SEED: u64 = 20_261_121;

/// Runs the simulation, which says its seed and its account with a failure.
fn simulate(arguments: &[String]) -> Outcome {
    let program = Path::new(env!("CARGO_BIN_EXE_sublet-sim"));
    let output = Command::new(program).args(arguments).output()?;
    let [said, account] =
        [&output.stderr, &output.stdout].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    if output.status.success() { Ok(()) } else { Err(Trouble::new(format!("{said}{account}"))) }
}

fn with_seed(seed: u64, cycles: u64, processes: u64) -> Vec<String> {
    let pairs = [("--seed", seed), ("--cycles", cycles), ("--processes", processes)];
    pairs.into_iter().flat_map(|(name, value)| [name.to_owned(), value.to_string()]).collect()
}

#[test]
fn pauses_of_up_to_64_processes_that_work_fail_and_die_lose_nothing() -> Outcome {
    simulate(&with_seed(SEED, 150, 64))
}

/// The seed is in the output of a failure.
#[test]
fn pauses_with_a_fresh_seed_lose_nothing() -> Outcome {
    simulate(&with_seed(sublet_tests::seed(), 50, 8))
}
