//! A coordinator in a process of its own that is led from event to event.

use std::fmt;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

pub use sublet_stage::script::{PAUSE, RESUME};
use tenants::wire::Phase;

use crate::child::LineChild;
use crate::{Outcome, Stage, Trouble};

const STEP_TIMEOUT: Duration = Duration::from_mins(2);

/// One end of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Boundary {
    /// All are about to be told to do it.
    Started(Phase),
    /// All have done it.
    Done(Phase),
}

impl Boundary {
    /// Where an overlapped swap has things half done.
    pub const HALF_WAY_THROUGH_A_SWAP: [Self; 5] = [
        Self::Done(Phase::Prepare),
        Self::Started(Phase::Release),
        Self::Started(Phase::Restore),
        Self::Done(Phase::Release),
        Self::Done(Phase::Restore),
    ];

    /// Both ends of every phase.
    pub fn of_all(phases: &[Phase]) -> Vec<Self> {
        phases.iter().flat_map(|phase| [Self::Started(*phase), Self::Done(*phase)]).collect()
    }
}

/// As `sublet-steps` says it: by the name in the code, whatever people are told.
impl fmt::Display for Boundary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Started(phase) => write!(f, "started {phase:?}"),
            Self::Done(phase) => write!(f, "done {phase:?}"),
        }
    }
}

/// `sublet-steps`, which stops at every event. Killed when dropped.
#[derive(Debug)]
pub struct Steps {
    child: LineChild,
    waits: bool,
}

impl Steps {
    /// Starts `program` (the path of `sublet-steps`) with `words`: the action, and how.
    pub fn start(stage: &Stage, program: &Path, tenant: &str, words: &[&str]) -> Outcome<Self> {
        Self::start_by(stage.command(program), &stage.run_dir_path(), tenant, words)
    }

    /// As [`Steps::start`], by a command of its own and of tenants that live in `run_dir`.
    pub fn start_by(
        mut command: Command,
        run_dir: &Path,
        tenant: &str,
        words: &[&str],
    ) -> Outcome<Self> {
        command.arg(run_dir).arg(tenant).args(words);
        Ok(Self { child: LineChild::start(&mut command)?, waits: false })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.pid()
    }

    /// Lets it go on to `boundary`, where it stays.
    pub fn until(&mut self, boundary: Boundary) -> Outcome {
        self.until_line(&boundary.to_string())
    }

    /// Lets it go on until it says `wanted`, where it stays.
    pub fn until_line(&mut self, wanted: &str) -> Outcome {
        let deadline = Instant::now() + STEP_TIMEOUT;
        if std::mem::take(&mut self.waits) {
            self.go_on()?;
        }
        while let Some(line) = self.child.line(deadline)? {
            if line == wanted {
                self.waits = true;
                return Ok(());
            }
            if line.starts_with("ok") || line.starts_with("error") {
                return Err(Trouble::new(format!("it ended before '{wanted}': {line}")));
            }
            self.go_on()?;
        }
        Err(Trouble::new(format!("it died before '{wanted}': {}", self.child.stderr())))
    }

    /// Lets it go on to its end; returns its last line.
    pub fn finish(&mut self) -> Outcome<String> {
        let deadline = Instant::now() + STEP_TIMEOUT;
        self.child.close_input();
        let mut last = String::new();
        while let Some(line) = self.child.line(deadline)? {
            last = line;
        }
        self.child.wait()?;
        Ok(last)
    }

    /// Kills it (`kill -9`) and waits.
    pub fn kill(&mut self) -> Outcome {
        self.child.kill().map(drop)
    }

    fn go_on(&mut self) -> Outcome {
        if let Some(input) = self.child.input() {
            input.write_all(b"\n")?;
        }
        Ok(())
    }
}
