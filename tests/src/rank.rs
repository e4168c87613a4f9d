//! One process of a job.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

use crate::child::LineChild;
use crate::job::look_again_later;
use crate::{Files, Outcome, Trouble};

/// How long a rank may take to answer, unless a test says otherwise.
const ANSWER_TIMEOUT: Duration = Duration::from_mins(2);
/// How long a line on standard error may lag behind.
const COMPLAINT_TIMEOUT: Duration = Duration::from_secs(30);

/// A rank's answer to one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Whether it was `ok`; otherwise the driver or Sublet refused, and the rank lives on.
    pub is_ok: bool,
    /// What came behind that word.
    pub text: String,
    /// Lines that libraries printed before the answer.
    pub printed: Vec<String>,
}

impl Answer {
    /// The numbers in the answer.
    pub fn numbers<const COUNT: usize>(&self) -> Outcome<[u64; COUNT]> {
        let words = self.text.split_whitespace();
        let numbers: Vec<u64> = words.map_while(|word| word.parse().ok()).collect();
        let first = numbers.first_chunk::<COUNT>().copied();
        first
            .filter(|_| self.is_ok)
            .ok_or_else(|| Trouble::new(format!("expected {COUNT} numbers, got {self:?}")))
    }
}

/// One process of a job, which obeys lines. Killed when dropped.
#[derive(Debug)]
pub struct Rank {
    index: usize,
    child: LineChild,
}

impl Rank {
    /// Starts rank `index` of a job. It answers once by itself, when its memory is there.
    pub fn start(index: usize, command: &mut Command) -> Outcome<Self> {
        Ok(Self { index, child: LineChild::start(command)? })
    }

    /// Starts a script of the shell on simulated GPUs, by `sublet simulate`, as a group of processes of its own. It answers when
    /// the script does.
    pub fn simulated(script: &str) -> Outcome<Self> {
        let mut command = Command::new(Files::from_environment()?.sublet);
        command.args(["simulate", "--gpus", "1", "--memory", "64MiB", "--", "sh", "-c", script]);
        Self::start(0, command.process_group(0))
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.pid()
    }

    /// Sends a line and does not wait.
    pub fn say(&mut self, line: &str) -> Outcome {
        let sent = self.child.input().map(|input| input.write_all(format!("{line}\n").as_bytes()));
        match sent {
            Some(Ok(())) => Ok(()),
            Some(Err(_)) | None => Err(self.ended(line)),
        }
    }

    /// Its next answer.
    pub fn answer(&mut self) -> Outcome<Answer> {
        self.answer_within(ANSWER_TIMEOUT)
    }

    /// As [`Rank::answer`], for at most `timeout`.
    pub fn answer_within(&mut self, timeout: Duration) -> Outcome<Answer> {
        let deadline = Instant::now() + timeout;
        let mut printed = Vec::new();
        while let Some(line) = self.child.line(deadline)? {
            let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
            match word {
                "ok" | "no" => {
                    return Ok(Answer { is_ok: word == "ok", text: rest.to_owned(), printed });
                }
                _ => printed.push(line),
            }
        }
        Err(self.ended(&printed.join("\n")))
    }

    /// Its next answer, if it comes within `timeout`.
    pub fn answer_if_within(&mut self, timeout: Duration) -> Outcome<Option<Answer>> {
        if self.child.has_line_within(timeout) { self.answer().map(Some) } else { Ok(None) }
    }

    /// Reads its lines up to one that begins with `beginning`.
    pub fn wait_for_line(&mut self, beginning: &str) -> Outcome {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        while let Some(line) = self.child.line(deadline)? {
            if line.starts_with(beginning) {
                return Ok(());
            }
        }
        Err(self.ended(beginning))
    }

    /// Sends a line and waits for its answer.
    pub fn ask(&mut self, line: &str) -> Outcome<Answer> {
        self.say(line)?;
        self.answer()
    }

    /// As [`Rank::ask`], when the answer must be `ok`.
    pub fn do_it(&mut self, line: &str) -> Outcome<Answer> {
        let answer = self.ask(line)?;
        self.accepted(line, answer)
    }

    pub(crate) fn accepted(&self, line: &str, answer: Answer) -> Outcome<Answer> {
        if answer.is_ok {
            return Ok(answer);
        }
        let errors = self.child.stderr();
        let text = answer.text;
        Err(Trouble::new(format!(
            "rank {} refused '{line}': {text}. Its errors: {errors}",
            self.index
        )))
    }

    /// Does it say anything within `timeout`? A rank that waits at the gate does not.
    pub fn is_silent_for(&mut self, timeout: Duration) -> bool {
        self.child.line(Instant::now() + timeout).is_err()
    }

    /// Ends it by the end of its input, and waits.
    pub fn exit(&mut self) -> Outcome<ExitStatus> {
        self.last_lines().map(|(status, _)| status)
    }

    /// As [`Rank::exit`], when it must end well.
    pub fn exits_well(&mut self) -> Outcome {
        let (status, lines) = self.last_lines()?;
        if status.success() {
            return Ok(());
        }
        let (pid, errors) = (self.pid(), self.stderr());
        Err(Trouble::new(format!(
            "process {pid} ended with {status} at: {lines:?}. Its errors: {errors}"
        )))
    }

    fn last_lines(&mut self) -> Outcome<(ExitStatus, Vec<String>)> {
        self.child.close_input();
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let mut lines = Vec::new();
        while let Some(line) = self.child.line(deadline)? {
            lines.push(line);
        }
        Ok((self.child.wait()?, lines))
    }

    /// Kills it (`kill -9`) and waits.
    pub fn kill(&mut self) -> Outcome {
        self.child.kill().map(drop)
    }

    /// Kills it and waits until it has ended, but leaves it as it is then, as a parent does that does not look
    /// after its children.
    pub fn kill_and_leave(&self) -> Outcome {
        self.signal(Signal::SIGKILL)?;
        let pid = Pid::from_raw(i32::try_from(self.pid())?);
        waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)?;
        Ok(())
    }

    /// Stops it, and waits until it stands: the signal alone lets its threads run on until one of them has
    /// taken it.
    pub fn stop(&self) -> Outcome {
        self.signal(Signal::SIGSTOP)?;
        let pid = Pid::from_raw(i32::try_from(self.pid())?);
        waitid(Id::Pid(pid), WaitPidFlag::WSTOPPED | WaitPidFlag::WNOWAIT)?;
        Ok(())
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> Outcome {
        let pid =
            i32::try_from(self.pid()).map_err(|_| Trouble::new("a process id out of range"))?;
        Ok(kill(Pid::from_raw(pid), signal)?)
    }

    /// Waits until it has ended by itself, or by a signal that it was sent.
    pub fn ends_within(&mut self, timeout: Duration) -> Outcome<ExitStatus> {
        let deadline = Instant::now() + timeout;
        while self.child.line(deadline)?.is_some() {}
        self.child.wait()
    }

    /// How it has ended, if it has.
    pub fn end(&self) -> Option<String> {
        self.child.end()
    }

    /// What it wrote to standard error so far.
    pub fn stderr(&self) -> String {
        self.child.stderr()
    }

    /// Waits until its standard error holds `text`: what it wrote before an answer may arrive after it.
    pub fn complained(&self, text: &str) -> Outcome {
        let deadline = Instant::now() + COMPLAINT_TIMEOUT;
        while !self.stderr().contains(text) {
            if Instant::now() >= deadline {
                let (index, errors) = (self.index, self.stderr());
                return Err(Trouble::new(format!("rank {index}: no '{text}' in: {errors}")));
            }
            look_again_later();
        }
        Ok(())
    }

    fn ended(&mut self, about: &str) -> Trouble {
        let status = match self.child.kill() {
            Ok(status) => status.to_string(),
            Err(trouble) => trouble.to_string(),
        };
        Trouble::new(format!(
            "rank {} (process {}) ended with {status} at: {about}. Its errors: {}",
            self.index,
            self.pid(),
            self.stderr()
        ))
    }
}
