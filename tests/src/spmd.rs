//! A job whose ranks run to their end by themselves, over the simulated NCCL.

use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::{Answer, Files, Outcome, Rank, Stage, Trouble};

/// How long a whole job may take, pauses included, on a machine that does other things too.
const JOB_TIMEOUT: Duration = Duration::from_mins(5);

/// So long, a job that was too short is made longer.
const LONGER_WITHIN: Duration = Duration::from_mins(2);

/// What a job is like.
#[derive(Clone, Debug)]
pub struct SpmdOptions {
    /// Its tenant.
    pub tenant: String,
    /// What it does; see `programs/spmd.c`. `python` and `ours` are `programs/spmd.py`, which opens NCCL, or what
    /// we have in its place.
    pub mode: &'static str,
    /// How many processes, each on a device of its own.
    pub ranks: usize,
    /// How many steps.
    pub steps: u32,
    /// Under the preload object, by `sublet run`?
    pub is_preloaded: bool,
    /// Rank and step at which a rank stops until it is told to go on.
    pub stuck: Option<(usize, u32)>,
    /// The ranks whose NCCL has slabs, where there are further boxes.
    pub slabs: Range<usize>,
    /// How many more allocations of 2 MiB each rank of a communicator has, which all others map.
    pub further_boxes: u32,
    /// Is what ranks exchange in host memory of NCCL's, which a thread of each uses all the time?
    pub has_host_boxes: bool,
    /// Do calls into NCCL fail while its memory alone is away?
    pub away_fails: bool,
}

impl SpmdOptions {
    /// A job of tenant `spmd`.
    pub fn new(mode: &'static str, ranks: usize, steps: u32) -> Self {
        let tenant = "spmd".to_owned();
        let (is_preloaded, stuck, slabs) = (true, None, 0..0);
        let (further_boxes, has_host_boxes, away_fails) = (0, false, false);
        Self {
            tenant,
            mode,
            ranks,
            steps,
            is_preloaded,
            stuck,
            slabs,
            further_boxes,
            has_host_boxes,
            away_fails,
        }
    }

    /// The same with slabs in all ranks, and much for them to do.
    #[must_use]
    pub fn slabbed(self, further_boxes: u32) -> Self {
        Self { slabs: 0..self.ranks, further_boxes, ..self }
    }

    /// Does `job`, which says how often it was paused, with so many steps, and with twice as many each time that was less than `pauses_min`:
    /// on a busy machine commands are slow.
    pub fn paused_often(
        &self,
        pauses_min: u32,
        mut job: impl FnMut(&Self) -> Outcome<u32>,
    ) -> Outcome {
        let (mut options, begin) = (self.clone(), Instant::now());
        loop {
            let pauses = job(&options)?;
            if pauses >= pauses_min {
                return Ok(());
            }
            if begin.elapsed() >= LONGER_WITHIN {
                let Self { mode, steps, .. } = options;
                let text =
                    format!("{mode}: only {pauses} pauses in {steps} steps: it is too short");
                return Err(Trouble::new(text));
            }
            options.steps *= 2;
        }
    }

    /// The same without Sublet.
    #[must_use]
    pub fn plain(&self) -> Self {
        Self { is_preloaded: false, stuck: None, ..self.clone() }
    }
}

/// The ranks of a job that runs by itself.
#[derive(Debug)]
pub struct Spmd {
    /// In order.
    pub ranks: Vec<Rank>,
    results: Vec<Option<Answer>>,
    deadline: Instant,
}

impl Spmd {
    /// Starts all ranks, and waits until each has its first piece of memory.
    pub fn start(stage: &Stage, options: &SpmdOptions) -> Outcome<Self> {
        let dir = stage.job_dir()?;
        let start = |index| Rank::start(index, &mut rank_command(stage, options, &dir, index));
        let mut ranks = (0..options.ranks).map(start).collect::<Outcome<Vec<_>>>()?;
        for rank in &mut ranks {
            rank.answer()?;
        }
        let results = vec![None; options.ranks];
        Ok(Self { ranks, results, deadline: Instant::now() + JOB_TIMEOUT })
    }

    /// Waits `timeout` for the end of the job; says whether it has come.
    pub fn is_done_within(&mut self, timeout: Duration) -> Outcome<bool> {
        let until = Instant::now() + timeout;
        for (rank, result) in self.ranks.iter_mut().zip(&mut self.results) {
            if result.is_none() {
                let left = until.saturating_duration_since(Instant::now());
                *result = rank.answer_if_within(left)?;
            }
        }
        if Instant::now() > self.deadline {
            return Err(Trouble::new(format!("the job is not done in time: {:?}", self.results)));
        }
        Ok(self.results.iter().all(Option::is_some))
    }

    /// Waits for the end of the job and returns the sums of all ranks.
    pub fn finish(mut self) -> Outcome<Vec<u64>> {
        while !self.is_done_within(Duration::from_secs(5))? {}
        let sum = |answer: &Answer| answer.numbers::<2>().map(|[_, sum]| sum);
        let sums = self.results.iter().flatten().map(sum).collect::<Outcome<Vec<_>>>()?;
        for rank in &mut self.ranks {
            let status = rank.exit()?;
            if !status.success() {
                return Err(Trouble::new(format!("a rank ended with {status}: {}", rank.stderr())));
            }
        }
        Ok(sums)
    }
}

fn rank_command(stage: &Stage, options: &SpmdOptions, dir: &Path, index: usize) -> Command {
    let files = stage.files();
    let is_python = matches!(options.mode, "python" | "ours");
    let program = if is_python { "python3".into() } else { Files::program("spmd") };
    let mut command = if options.is_preloaded {
        let mut command = stage.command(&files.sublet);
        command.args(["run", "--join", "--tenant", &options.tenant, "--library"]);
        command.arg(&files.preload).arg("--").arg(program);
        command
    } else {
        stage.command(&program)
    };
    if is_python {
        command.arg(Files::script("spmd.py"));
    }
    if options.mode == "ours" && options.is_preloaded {
        command.env("SPMD_NCCL", &files.nccl);
    }
    let libraries =
        format!("{}:{}", files.simcuda_dir.display(), Files::library_dir("simnccl").display());
    command.env("LD_LIBRARY_PATH", libraries).env("SIMNCCL_DIR", dir);
    if options.further_boxes > 0 {
        command.env("SIMNCCL_FURTHER_BOXES", options.further_boxes.to_string());
        command.env("SUBLET_SLABS", if options.slabs.contains(&index) { "1" } else { "0" });
    }
    if options.has_host_boxes {
        command.env("SIMNCCL_HOST_BOXES", "1");
    }
    if options.away_fails {
        command.env("SUBLET_NCCL_AWAY", "fail");
    }
    for (name, value) in [("--rank", index), ("--device", index), ("--ranks", options.ranks)] {
        command.arg(name).arg(value.to_string());
    }
    command.arg("--id").arg(dir.join("id")).args(["--mode", options.mode]);
    command.args(["--steps", &options.steps.to_string()]);
    if let Some((rank, step)) = options.stuck
        && rank == index
    {
        command.args(["--stick-at", &step.to_string()]);
    }
    command
}
