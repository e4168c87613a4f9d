//! Child processes whose output is read line by line, with deadlines.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

use crate::{Outcome, Trouble};

/// How a command ended.
#[derive(Clone, Debug)]
pub struct Ran {
    /// Its exit code; none after a signal.
    pub code: Option<i32>,
    /// What it wrote to standard output.
    pub stdout: String,
    /// What it wrote to standard error.
    pub stderr: String,
}

impl Ran {
    /// Itself, when the command succeeded.
    pub fn succeeded(self) -> Outcome<Self> {
        self.exited(0)
    }

    /// Itself, when the command ended with `code`.
    pub fn exited(self, code: i32) -> Outcome<Self> {
        if self.code == Some(code) {
            return Ok(self);
        }
        Err(Trouble::new(format!("expected exit code {code}, got {self:#?}")))
    }

    /// Standard output as JSON.
    pub fn json(&self) -> Outcome<serde_json::Value> {
        serde_json::from_str(&self.stdout)
            .map_err(|error| Trouble::new(format!("{error} in what should be JSON: {self:#?}")))
    }
}

/// Runs `command` to its end, but kills it at `deadline`.
pub(crate) fn run(command: &mut Command, deadline: Instant) -> Outcome<Ran> {
    let mut child = LineChild::start(command)?;
    child.close_input();
    let mut stdout = String::new();
    while let Some(line) = child.line(deadline)? {
        stdout.push_str(&line);
        stdout.push('\n');
    }
    let status = child.wait()?;
    Ok(Ran { code: status.code(), stdout, stderr: child.stderr() })
}

/// A child whose lines arrive one by one. Killed when dropped.
#[derive(Debug)]
pub(crate) struct LineChild {
    name: String,
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    /// A line that has been looked for, and is still to be read.
    ahead: Option<String>,
    stderr: Arc<Mutex<String>>,
    stderr_ended: Receiver<()>,
    /// The end of the pipe that is read.
    stderr_pipe: Option<OwnedFd>,
}

impl LineChild {
    /// Starts `command` with pipes for all three streams.
    pub(crate) fn start(command: &mut Command) -> Outcome<Self> {
        let name = format!("{command:?}");
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped
            .spawn()
            .map_err(|error| Trouble::new(format!("{name} could not be started: {error}")))?;
        let (sender, lines) = channel();
        if let Some(stdout) = child.stdout.take() {
            thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        return;
                    }
                }
            });
        }
        let stderr = Arc::new(Mutex::new(String::new()));
        let (ended, stderr_ended) = channel();
        let mut stderr_pipe = None;
        if let Some(source) = child.stderr.take() {
            stderr_pipe = source.as_fd().try_clone_to_owned().ok();
            let kept = Arc::clone(&stderr);
            thread::spawn(move || {
                keep(source, &kept);
                drop(ended);
            });
        }
        Ok(Self {
            name,
            input: child.stdin.take(),
            child,
            lines,
            ahead: None,
            stderr,
            stderr_ended,
            stderr_pipe,
        })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn input(&mut self) -> Option<&mut ChildStdin> {
        self.input.as_mut()
    }

    pub(crate) fn close_input(&mut self) {
        self.input = None;
    }

    /// The next line of standard output; `None` at its end.
    pub(crate) fn line(&mut self, deadline: Instant) -> Outcome<Option<String>> {
        if let Some(line) = self.ahead.take() {
            return Ok(Some(line));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        match self.lines.recv_timeout(left) {
            Ok(line) => Ok(Some(line)),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => Err(Trouble::new(format!(
                "{} (process {}) said nothing in time. Its errors: {}",
                self.name,
                self.pid(),
                self.stderr()
            ))),
        }
    }

    /// Does it write a line, or end, within `timeout`?
    pub(crate) fn has_line_within(&mut self, timeout: Duration) -> bool {
        if self.ahead.is_none() {
            match self.lines.recv_timeout(timeout) {
                Ok(line) => self.ahead = Some(line),
                Err(error) => return error == RecvTimeoutError::Disconnected,
            }
        }
        true
    }

    /// Waits for its end, which must be near: its output has ended, or it was killed.
    pub(crate) fn wait(&mut self) -> Outcome<ExitStatus> {
        let status = self.child.wait()?;
        // Ends with the process, unless that left a child behind; then what came so far must do.
        let limit = Duration::from_secs(if self.has_left_a_child() { 1 } else { 30 });
        let _ended = self.stderr_ended.recv_timeout(limit);
        Ok(status)
    }

    /// Can another process write to standard error still, now that this one has ended?
    fn has_left_a_child(&self) -> bool {
        self.stderr_pipe.as_ref().is_some_and(|pipe| {
            let mut polled = [PollFd::new(pipe.as_fd(), PollFlags::empty())];
            poll(&mut polled, PollTimeout::ZERO) == Ok(0)
        })
    }

    /// Kills it, by its id.
    pub(crate) fn kill(&mut self) -> Outcome<ExitStatus> {
        self.child.kill()?;
        self.wait()
    }

    /// How it has ended, if it has, with what it said last and its errors. It can be waited for all the same.
    pub(crate) fn end(&self) -> Option<String> {
        let pid = Id::Pid(Pid::from_raw(self.pid().cast_signed()));
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        match waitid(pid, flags) {
            Ok(WaitStatus::StillAlive) | Err(_) => None,
            Ok(status) => {
                let said: Vec<_> = self.lines.try_iter().collect();
                Some(format!("{status:?}. It said: {said:?}. Its errors: {}", self.stderr()))
            }
        }
    }

    /// What it wrote to standard error so far.
    pub(crate) fn stderr(&self) -> String {
        self.stderr.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for LineChild {
    fn drop(&mut self) {
        // Both fail only when it has ended and been waited for.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn keep(source: impl Read, kept: &Mutex<String>) {
    for line in BufReader::new(source).lines().map_while(Result::ok) {
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_str(&line);
        kept.push('\n');
    }
}
