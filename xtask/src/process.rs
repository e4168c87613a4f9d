//! Child processes: run one and judge its status, or run one and watch its lines go by.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::num::NonZero;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::Outcome;
use crate::workspace::Workspace;

/// How long to wait for the last lines once a child has ended. Something it left running may hold the
/// pipe open for ever, and must not hold us.
const LAST_LINES_TIMEOUT: Duration = Duration::from_secs(5);

/// How many programs this machine runs simultaneously.
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

/// Whether `tool` is installed.
pub(crate) fn is_there(workspace: &Workspace, tool: &str) -> bool {
    output(workspace.command(tool).arg("--version")).is_ok()
}

/// Removes the debug information of `program`: it is most of the size, and only a debugger reads it.
pub(crate) fn strip(workspace: &Workspace, program: &Path) -> Outcome {
    if is_there(workspace, "strip") {
        return run(workspace.command("strip").arg("--strip-debug").arg(program));
    }
    println!("strip is not installed: {} keeps its debug information", program.display());
    Ok(())
}

/// Runs `command`, passes its lines on, and holds back those that `is_summary` names.
///
/// The held lines come back for the caller to print, so that each is printed once. They come back
/// next to the outcome, since a runner that failed has a summary too.
pub(crate) fn stream(
    command: &mut Command,
    is_summary: fn(&str) -> bool,
) -> (Outcome, Vec<String>) {
    let mut child = match command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(error) => return (Err(format!("{}: {error}", name(command)).into()), vec![]),
    };
    let (sender, lines) = mpsc::channel();
    if let Some(stdout) = child.stdout.take() {
        forward(stdout, io::stdout(), is_summary, sender.clone());
    }
    if let Some(stderr) = child.stderr.take() {
        forward(stderr, io::stderr(), is_summary, sender.clone());
    }
    drop(sender);

    let outcome = match child.wait() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{} failed: {status}", name(command)).into()),
        Err(error) => Err(format!("{}: {error}", name(command)).into()),
    };
    let mut held = Vec::new();
    let deadline = Instant::now() + LAST_LINES_TIMEOUT;
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => held.push(line),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                eprintln!("xtask: {} ended, but something it started still runs", name(command));
                break;
            }
        }
    }
    (outcome, held)
}

/// Copies lines from `source` to `sink` on a thread of its own, until the source ends.
fn forward(
    source: impl Read + Send + 'static,
    mut sink: impl Write + Send + 'static,
    is_summary: fn(&str) -> bool,
    summaries: Sender<String>,
) {
    // The thread ends with its source, and is not joined: see `LAST_LINES_TIMEOUT`.
    thread::spawn(move || {
        let mut source = BufReader::new(source);
        let mut line = Vec::new();
        while matches!(source.read_until(b'\n', &mut line), Ok(read) if read > 0) {
            let text = without_colour(&String::from_utf8_lossy(&line));
            let held = is_summary(text.trim()) && summaries.send(text.trim().to_owned()).is_ok();
            // The reader of our own output may be gone; the child is still to be waited for.
            if !held && sink.write_all(&line).and_then(|()| sink.flush()).is_err() {
                sink.flush().ok();
            }
            line.clear();
        }
    });
}

/// `line` without terminal colour codes (`ESC [ ... letter`).
fn without_colour(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        if character == '\u{1b}' {
            // Skips to the letter that ends the code.
            characters.by_ref().find(char::is_ascii_alphabetic);
        } else {
            plain.push(character);
        }
    }
    plain
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
    fn colour_codes_are_removed() {
        assert_eq!(without_colour("\u{1b}[32;1m  Summary\u{1b}[0m [ 1s]"), "  Summary [ 1s]");
    }

    #[test]
    fn failure_names_the_program_and_keeps_the_summary() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo Summary of it; exit 3"]);
        let (outcome, held) = stream(&mut command, |line| line.starts_with("Summary"));
        assert!(outcome.unwrap_err().to_string().contains("sh -c failed"));
        assert_eq!(held, ["Summary of it"]);
    }
}
