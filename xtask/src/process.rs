//! Child processes: run one and judge its status, or run one and watch its lines go by.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::num::NonZero;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::Outcome;
use crate::workspace::Workspace;

/// The longest wait for one of the last lines once a child has ended. Something it left running may hold the pipe open
/// for ever, and must not hold us.
const LAST_LINES_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the number of programs that this machine runs simultaneously.
pub(crate) fn cores() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// Runs `command` with our own output and fails unless it succeeds.
pub(crate) fn run(command: &mut Command) -> Outcome {
    let status = command.status().map_err(|error| format!("{}: {error}", name(command)))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{} failed: {status}", name(command)).into())
    }
}

/// Runs `command` and returns what it wrote to its standard output, trimmed.
pub(crate) fn output(command: &mut Command) -> Outcome<String> {
    let output = command.output().map_err(|error| format!("{}: {error}", name(command)))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    } else {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().last().unwrap_or("it said nothing");
        Err(format!("{} failed: {last}", name(command)).into())
    }
}

/// Runs `command` and returns what it wrote to both of its outputs.
pub(crate) fn both_outputs(command: &mut Command) -> Outcome<String> {
    let output = command.output().map_err(|error| format!("{}: {error}", name(command)))?;
    let both = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&both).into_owned();
    if output.status.success() {
        return Ok(said);
    }
    Err(format!("{} failed: {}", name(command), said.trim()).into())
}

/// The commit that is checked out, with `-dirty` behind it when something but records of benchmarks is not committed.
pub(crate) fn commit(workspace: &Workspace) -> Outcome<String> {
    let git = |arguments: &[&str]| output(workspace.command("git").args(arguments));
    // Records are added between two runs of one build, and change none.
    let status = ["status", "--porcelain", "--", ".", ":!benchmarks/results"];
    let dirty = if git(&status)?.is_empty() { "" } else { "-dirty" };
    Ok(format!("{}{dirty}", git(&["rev-parse", "--short", "HEAD"])?))
}

/// Removes the debug information of `program`: it is most of the size, and only a debugger reads it.
pub(crate) fn strip(workspace: &Workspace, program: &Path) -> Outcome {
    run(workspace.command("strip").arg("--strip-debug").arg(program))
}

/// Runs `command`, which uses no colours, and passes its lines on, but for those that `is_summary` names: they are added to
/// `held`, for the caller to print.
pub(crate) fn stream(
    mut command: Command,
    is_summary: fn(&str) -> bool,
    held: &mut Vec<String>,
) -> Outcome {
    let (source, sink) = io::pipe()?;
    command.stdout(sink.try_clone()?).stderr(sink);
    let (sender, summaries) = mpsc::channel();
    // The thread ends with its source, and is not joined: see `LAST_LINES_TIMEOUT`.
    thread::spawn(move || {
        for line in BufReader::new(source).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line);
            if is_summary(line.trim()) {
                sender.send(line.trim().to_owned()).ok();
            } else {
                // The reader of our own output may be gone; the child is still to be waited for.
                writeln!(io::stdout(), "{line}").ok();
            }
        }
    });
    let outcome = run(&mut command);
    // It has the pipe open for writing too.
    drop(command);
    while let Ok(line) = summaries.recv_timeout(LAST_LINES_TIMEOUT) {
        held.push(line);
    }
    outcome
}

/// The program and its first argument, for messages.
pub(crate) fn name(command: &Command) -> String {
    let program = command.get_program().to_string_lossy();
    let program = program.rsplit('/').next().unwrap_or_default();
    match command.get_args().next() {
        Some(first) => format!("{program} {}", first.to_string_lossy()),
        None => program.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_names_the_program_and_keeps_the_summary() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo before; echo Summary of it >&2; exit 3"]);
        let mut held = Vec::new();
        let outcome = stream(command, |line| line.starts_with("Summary"), &mut held);
        assert!(outcome.unwrap_err().to_string().contains("sh -c failed"));
        assert_eq!(held, ["Summary of it"]);
    }
}
