//! `sim`: builds what the simulation runs, then becomes it.

use std::os::unix::process::CommandExt as _;

use crate::Outcome;
use crate::build::{self, Built};
use crate::workspace::Workspace;

/// The seeded simulation. Returns only when it could not be started.
pub(crate) fn run(
    workspace: &Workspace,
    seed: Option<u64>,
    cycles: u64,
    processes: u64,
) -> Outcome {
    let built = Built::build(workspace)?;
    let tests = build::build(workspace, &["--package", "sublet-tests", "--bin", "sublet-sim"])?;
    let mut sim = workspace.command(tests.binary("sublet-sim")?);
    built.export(&mut sim);
    let numbers = [("--cycles", cycles), ("--processes", processes)];
    for (name, number) in numbers.into_iter().chain(seed.map(|seed| ("--seed", seed))) {
        sim.arg(name).arg(number.to_string());
    }
    Err(format!("the simulation could not be started: {}", sim.exec()).into())
}
