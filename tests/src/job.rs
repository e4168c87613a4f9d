//! A job: the ranks of one tenant.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::{Answer, Files, Outcome, Rank, Stage, Trouble};

/// How long a running job may take for a few steps.
const STEP_TIMEOUT: Duration = Duration::from_mins(2);

/// What a job is like.
#[derive(Clone, Debug)]
pub struct JobOptions {
    /// Its tenant.
    pub tenant: String,
    /// How many processes.
    pub ranks: usize,
    /// Device of rank 0; rank `r` uses the `r`th after it.
    pub first_device: usize,
    /// Shareable buffers of 2 MiB that each rank only keeps.
    pub statics: usize,
    /// Size of each rank's large tensor, at least 2 MiB.
    pub tensor_mib: usize,
    /// Size of each rank's memory whose contents may be lost, at least 2 MiB.
    pub scratch_mib: usize,
    /// No virtual memory management and no sharing.
    pub is_plain: bool,
    /// Under the preload object, by `sublet run`?
    pub is_preloaded: bool,
    /// Further variables of its environment alone: `sublet run` does not check them.
    pub variables: Vec<(String, String)>,
}

impl JobOptions {
    /// A small job of `ranks` processes, which each hold a few buffers on a device of their own.
    pub fn new(tenant: &str, ranks: usize) -> Self {
        Self {
            tenant: tenant.to_owned(),
            ranks,
            first_device: 0,
            statics: 2,
            tensor_mib: 4,
            scratch_mib: 4,
            is_plain: false,
            is_preloaded: true,
            variables: Vec::new(),
        }
    }

    /// The same with a variable more in the environment.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }
}

/// The running ranks of one tenant.
#[derive(Debug)]
pub struct Job {
    /// The ranks, in order.
    pub ranks: Vec<Rank>,
    tenant: String,
    control: PathBuf,
}

impl Job {
    /// Starts all ranks in `dir`, which they share, and waits until all have their memory.
    pub(crate) fn start(stage: &Stage, options: &JobOptions, dir: &Path) -> Outcome<Self> {
        let start = |index| Rank::start(index, &mut rank_command(stage, options, dir, index));
        let ranks = (0..options.ranks).map(start).collect::<Outcome<Vec<_>>>()?;
        let control = dir.join("control");
        let mut job = Self { ranks, tenant: options.tenant.clone(), control };
        job.answers()?;
        Ok(job)
    }

    /// The name of its tenant.
    pub fn tenant(&self) -> &str {
        &self.tenant
    }

    /// Sends a line to all ranks, and does not wait.
    pub fn say(&mut self, line: &str) -> Outcome {
        self.ranks.iter_mut().try_for_each(|rank| rank.say(line))
    }

    /// The next answer of all ranks, which must be `ok`.
    pub fn answers(&mut self) -> Outcome<Vec<Answer>> {
        self.ranks
            .iter_mut()
            .map(|rank| rank.answer().and_then(|answer| rank.accepted("the line before", answer)))
            .collect()
    }

    /// Sends a line to all ranks and waits for all answers, which must be `ok`.
    pub fn all(&mut self, line: &str) -> Outcome<Vec<Answer>> {
        self.say(line)?;
        self.answers().map_err(|trouble| Trouble::new(format!("at '{line}': {trouble}")))
    }

    /// Has all ranks open each other's memory.
    pub fn connect(&mut self) -> Outcome {
        self.all("connect").map(drop)
    }

    /// Does `count` steps and returns the number of the last, and its sum, the same on all ranks.
    pub fn step(&mut self, count: u64) -> Outcome<(u64, u64)> {
        let answers = self.all(&format!("step {count}"))?;
        agreed(&answers)
    }

    /// Has all ranks step until [`Job::stop`].
    pub fn run(&mut self) -> Outcome {
        self.say("run")
    }

    /// Ends [`Job::run`]; returns what [`Job::step`] returns.
    pub fn stop(&mut self) -> Outcome<(u64, u64)> {
        self.say("stop")?;
        let ran = self.answers()?;
        self.answers()?;
        agreed(&ran)
    }

    /// Has all ranks compare every word that they can reach; returns how many bytes that were.
    pub fn verify(&mut self) -> Outcome<u64> {
        let answers = self.all("verify")?;
        let mut sum = 0;
        for answer in &answers {
            let [_, bytes] = answer.numbers::<2>()?;
            sum += bytes;
        }
        Ok(sum)
    }

    /// One step, with the contents of all ranks compared.
    pub fn works(&mut self) -> Outcome {
        self.step(1)?;
        self.verify().map(drop)
    }

    /// [`Job::works`], then [`Job::exit`].
    pub fn works_and_exits(mut self) -> Outcome {
        self.works()?;
        self.exit()
    }

    /// Which step the slowest rank has finished, also while it runs.
    pub fn steps_done(&self) -> u64 {
        const FIRST_OFFSET: usize = 8;
        let bytes = std::fs::read(&self.control).unwrap_or_default();
        let steps = bytes.get(FIRST_OFFSET..).unwrap_or_default().as_chunks::<8>().0;
        let steps = steps.iter().take(self.ranks.len()).map(|step| u64::from_le_bytes(*step));
        steps.min().unwrap_or(0)
    }

    /// Waits until every rank has done `step` steps.
    pub fn wait_for_step(&self, step: u64) -> Outcome {
        let deadline = Instant::now() + STEP_TIMEOUT;
        while self.steps_done() < step {
            let ended =
                self.ranks.iter().enumerate().find_map(|(at, rank)| Some((at, rank.end()?)));
            if let Some((at, how)) = ended {
                return Err(Trouble::new(format!("rank {at} has ended before step {step}: {how}")));
            }
            if Instant::now() >= deadline {
                let done = self.steps_done();
                return Err(Trouble::new(format!("still at step {done}, not at {step}")));
            }
            look_again_later();
        }
        Ok(())
    }

    /// The ranks but the one with this index.
    pub fn others(&mut self, index: usize) -> impl Iterator<Item = &mut Rank> {
        self.ranks.iter_mut().enumerate().filter(move |(at, _)| *at != index).map(|(_, rank)| rank)
    }

    /// Ends all ranks in an orderly way.
    pub fn exit(mut self) -> Outcome {
        for rank in &mut self.ranks {
            let status = rank.exit()?;
            if !status.success() {
                return Err(Trouble::new(format!("a rank ended with {status}: {}", rank.stderr())));
            }
        }
        Ok(())
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "what others write through a mapping, or as a part of a stream, gives no event of its own"
)]
pub(crate) fn look_again_later() {
    std::thread::sleep(Duration::from_millis(2));
}

/// Step and sum, when all ranks give the same.
fn agreed(answers: &[Answer]) -> Outcome<(u64, u64)> {
    let mut all = answers.iter().map(Answer::numbers::<2>);
    let [step, sum] = all.next().ok_or_else(|| Trouble::new("a job without ranks"))??;
    for other in all {
        if other? != [step, sum] {
            return Err(Trouble::new(format!("the ranks disagree: {answers:?}")));
        }
    }
    Ok((step, sum))
}

fn rank_command(stage: &Stage, options: &JobOptions, dir: &Path, index: usize) -> Command {
    let files = stage.files();
    let mut command = if options.is_preloaded {
        let mut command = stage.command(&files.sublet);
        command.args(["run", "--join", "--tenant", &options.tenant, "--library"]);
        command.arg(&files.preload).args(["--", "env"]);
        command.args(options.variables.iter().map(|(name, value)| format!("{name}={value}")));
        command.arg(Files::program("rank"));
        command
    } else {
        let mut command = stage.command(&Files::program("rank"));
        command.envs(options.variables.iter().map(|(name, value)| (name, value)));
        command
    };
    let mut number = |name: &str, value: usize| {
        command.arg(name).arg(value.to_string());
    };
    number("--rank", index);
    number("--ranks", options.ranks);
    number("--device", options.first_device + index);
    number("--statics", options.statics);
    number("--tensor-mib", options.tensor_mib);
    number("--scratch-mib", options.scratch_mib);
    command.arg("--dir").arg(dir).arg("--nccl").arg(Files::nccl_like());
    if options.is_plain {
        command.arg("--plain");
    }
    command
}
