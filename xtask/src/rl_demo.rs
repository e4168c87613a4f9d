//! `rl-demo`: builds the package and the simulated driver, then becomes `examples/rl_grpo` on them.

use std::os::unix::process::CommandExt as _;

use crate::build::Built;
use crate::python::Python;
use crate::workspace::Workspace;
use crate::{Outcome, package};

const SCRIPT: &str = "examples/rl_grpo/run.py";

/// Trainer and generator on simulated GPUs, with these arguments. Returns only when it could not be started: its exit
/// code is then its own.
pub(crate) fn run(workspace: &Workspace, arguments: &[String]) -> Outcome {
    let built = Built::build(workspace)?;
    let site = package::installed(workspace, &built)?;
    let mut demo = Python::system().command(workspace, &[site]);
    demo.arg(SCRIPT).arg("--simulate");
    // What is made belongs with all else that is made; a folder that is named comes later, and counts.
    demo.arg("--out").arg(workspace.target.join("rl_grpo")).args(arguments);
    built.export(&mut demo);
    Err(format!("{SCRIPT} could not be started: {}", demo.exec()).into())
}
