//! `demo`: builds what the demonstration runs, then becomes it.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use crate::Outcome;
use crate::build::{self, Built};
use crate::workspace::Workspace;

/// The main job on a simulated node. Returns only when it could not be started: Ctrl-C and the exit code
/// are then the demonstration's own.
pub(crate) fn run(workspace: &Workspace) -> Outcome {
    let mut demo = command(workspace, &Built::build(workspace)?)?;
    Err(format!("the demonstration could not be started: {}", demo.exec()).into())
}

/// What starts it.
pub(crate) fn command(workspace: &Workspace, built: &Built) -> Outcome<Command> {
    let tests = build::build(workspace, &["--package", "sublet-tests", "--bin", "sublet-demo"])?;
    let mut demo = workspace.command(tests.binary("sublet-demo")?);
    built.export(&mut demo);
    Ok(demo)
}
