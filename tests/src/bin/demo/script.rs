//! What happens, in order.

use serde_json::Value;
use sublet_tests::{Job, JobOptions, MIB, Outcome, Stage, Trouble};

use crate::interrupt::Interrupt;
use crate::screen::Screen;
use crate::tally::{Tally, millis};
use crate::watch::TENANTS;

const ROUNDS: u64 = 4;
/// Steps that a job must have done before it is paused again.
const STEPS_PER_TURN: u64 = 5;
/// What a paused process leaves on its GPU at most: one small allocation, in one granule.
const LEFT_BYTES_MAX: u64 = 2 * MIB;

struct Play<'a> {
    stage: &'a Stage,
    screen: &'a Screen,
    tally: &'a mut Tally,
    interrupt: &'a Interrupt,
}

/// Plays it all.
///
/// # Errors
/// The first thing that is not as it should be.
pub(crate) fn play(
    stage: &Stage,
    screen: &Screen,
    tally: &mut Tally,
    interrupt: &Interrupt,
) -> Outcome {
    let mut play = Play { stage, screen, tally, interrupt };
    let train =
        JobOptions { statics: 16, tensor_mib: 96, scratch_mib: 32, ..JobOptions::new("train", 4) };
    let mut train = play.start(&train)?;
    play.work(&mut train)?;
    play.pause("train", 4)?;

    let infer =
        JobOptions { statics: 4, tensor_mib: 64, scratch_mib: 48, ..JobOptions::new("infer", 2) };
    let mut infer = play.start(&infer)?;
    play.work(&mut infer)?;
    play.refuse_resume("train")?;
    for round in 1..=ROUNDS {
        play.screen.event(&format!("round {round} of {ROUNDS}"));
        play.pause("infer", 2)?;
        play.resume("train")?;
        play.work(&mut train)?;
        play.pause("train", 4)?;
        play.resume("infer")?;
        play.work(&mut infer)?;
    }
    play.tally.rounds = ROUNDS;
    play.end(train, infer)
}

impl Play<'_> {
    /// Says what is being done, unless the user has had enough.
    fn begin(&self, activity: &str) -> Outcome {
        self.interrupt.check()?;
        self.screen.activity(activity);
        Ok(())
    }

    /// Starts a job whose ranks open each other's memory, and has it run by itself.
    fn start(&mut self, options: &JobOptions) -> Outcome<Job> {
        let (tenant, ranks) = (&options.tenant, options.ranks);
        self.begin(&format!("starting {ranks} processes of {tenant}"))?;
        let mut job = self.stage.job(options)?;
        self.interrupt.cover(&job)?;
        job.connect()?;
        job.run()?;
        self.tally.processes += ranks;
        self.screen.event(&format!("{tenant} runs: {ranks} processes, memory shared among them"));
        Ok(job)
    }

    /// Lets a running job do some steps, compares every byte, and lets it run on.
    fn work(&mut self, job: &mut Job) -> Outcome {
        let tenant = job.tenant().to_owned();
        self.begin(&format!("{tenant} works"))?;
        let before = job.steps_done();
        job.wait_for_step(before + STEPS_PER_TURN)?;
        let (step, _) = job.stop()?;
        self.begin(&format!("{tenant} compares every byte"))?;
        let bytes = job.verify()?;
        self.tally.verified_bytes += bytes;
        self.screen.event(&format!(
            "{tenant} worked to step {step}; {} MiB compared, no difference",
            bytes / MIB
        ));
        job.run()
    }

    fn pause(&mut self, tenant: &str, gpu_count: i32) -> Outcome {
        self.begin(&format!("sublet pause {tenant}"))?;
        let report = self.stage.pause(tenant)?;
        self.note("pause", tenant, "given back", &report)?;
        for device in 0..gpu_count {
            let used_bytes = self.stage.used_bytes(device)?;
            if used_bytes > LEFT_BYTES_MAX * TENANTS.len() as u64 {
                let text = format!("GPU {device} still holds {used_bytes} bytes after the pause");
                return Err(Trouble::new(text));
            }
        }
        Ok(())
    }

    fn resume(&mut self, tenant: &str) -> Outcome {
        self.begin(&format!("sublet resume {tenant}"))?;
        let report = self.stage.resume(tenant)?;
        self.note("resume", tenant, "taken back", &report)
    }

    fn note(&mut self, action: &'static str, tenant: &str, verb: &str, report: &Value) -> Outcome {
        let wall_us = self.tally.note(action, tenant, report)?;
        let moved = moved_mib(report);
        let time = millis(wall_us);
        self.screen.event(&format!("sublet {action} {tenant}: {moved} MiB {verb} in {time}"));
        self.screen.settle();
        Ok(())
    }

    /// Two jobs that do not fit together: the second is told what is missing, and loses nothing.
    fn refuse_resume(&mut self, tenant: &str) -> Outcome {
        self.begin(&format!("sublet resume {tenant}, too early"))?;
        let document = self.stage.sublet(&["resume", tenant, "--json"])?.exited(1)?.json()?;
        let missing = document["missing_device_bytes"].as_u64();
        let missing = missing.ok_or_else(|| Trouble::new(format!("no bytes in {document}")))?;
        self.screen.event(&format!(
            "sublet resume {tenant}, too early: refused as it must be, {} MiB are missing",
            missing / MIB
        ));
        Ok(())
    }

    /// Both jobs compare everything once more and end; then nobody holds a byte.
    fn end(&mut self, mut train: Job, mut infer: Job) -> Outcome {
        infer.stop()?;
        self.pause("infer", 2)?;
        self.resume("train")?;
        train.stop()?;
        self.begin("both jobs end")?;
        self.tally.verified_bytes += train.verify()?;
        self.tally.steps = [train.steps_done(), infer.steps_done()];
        self.interrupt.uncover_all();
        train.exit()?;
        self.resume("infer")?;
        self.tally.verified_bytes += infer.verify()?;
        infer.exit()?;
        for device in 0..4 {
            let used_bytes = self.stage.used_bytes(device)?;
            if used_bytes > 0 {
                let text = format!("GPU {device} still holds {used_bytes} bytes after the end");
                return Err(Trouble::new(text));
            }
        }
        Ok(())
    }
}

/// What a report says was given back or taken, on all GPUs.
fn moved_mib(report: &Value) -> u64 {
    let devices = report["report"]["devices"].as_array().into_iter().flatten();
    devices.filter_map(|device| device["bytes"].as_u64()).sum::<u64>() / MIB
}
