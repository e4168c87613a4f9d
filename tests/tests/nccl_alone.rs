//! NCCL's memory leaves by itself, and its processes run on: work without NCCL goes on, calls into NCCL wait for the
//! resume, and what the job computes is the same.

#![expect(clippy::print_stdout, reason = "a failed test shows the seed that repeats it")]

use std::time::Duration;

use serde_json::Value;
use sublet_tests::{MIB, Outcome, Random, Spmd, SpmdOptions, Stage};

const CAPACITIES: [u64; 4] = [128 * MIB; 4];
const PAUSES_MAX: u32 = 12;
/// Fewer would mean that the jobs are too short to test anything.
const PAUSES_MIN: u32 = 3;
/// A job that still runs when a command has begun, on a busy machine too.
const LONG_STEPS: u32 = 6000;
/// Steps of a job that never comes to their end.
const ENDLESS: u32 = 1_000_000;
const GAP_MAX_MS: u64 = 60;
/// Said of a pause that found no memory of NCCL's.
const NOTHING_LEFT: &str = "calls into NCCL wait until its resume all the same";

/// `own` and `resident` bytes of NCCL's own memory on device 0 in all processes, and the bytes of the others' there.
fn nccl_bytes(stage: &Stage) -> Outcome<[u64; 3]> {
    let mut sums = [0; 3];
    for member in stage.members("spmd")? {
        let devices = member["pool"]["devices"].as_array().cloned().unwrap_or_default();
        for class in devices.iter().filter_map(|device| device["memory"].as_array()).flatten() {
            let of = |name: &str| class[name].as_u64().unwrap_or(0);
            if class["tag"] == "nccl" {
                sums[0] += of("own_bytes");
                sums[1] += of("resident_bytes");
            } else {
                sums[2] += of("resident_bytes");
            }
        }
    }
    Ok(sums)
}

fn pause(stage: &Stage) -> Outcome<Value> {
    stage.at_least_in_part(&["pause", "spmd", "--library", "nccl", "--json"])?.json()
}

fn resume(stage: &Stage) -> Outcome<Value> {
    stage.patiently(&["resume", "spmd", "--library", "nccl", "--json"])?.json()
}

#[expect(clippy::disallowed_methods, reason = "a random instant is waited for, not an event")]
fn wait(random: &mut Random, limit_ms: u64) {
    std::thread::sleep(Duration::from_millis(random.below(limit_ms)));
}

/// The job gives the same when NCCL's memory leaves at random instants, and stays away for a while, as when it stays.
fn survives(mode: &'static str, ranks: usize, steps: u32) -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let (mut random, mut were_empty) = (Random::new(), true);
    let job = |options: &SpmdOptions| paused(&stage, options, &mut random, &mut were_empty);
    SpmdOptions::new(mode, ranks, steps).paused_often(PAUSES_MIN, job)?;
    // The ranks of that job meet between two communicators more often than within one.
    assert!(!were_empty || mode == "churn", "{mode}: no pause found memory of NCCL's");
    Ok(())
}

/// How often one job was paused.
fn paused(
    stage: &Stage,
    options: &SpmdOptions,
    random: &mut Random,
    were_empty: &mut bool,
) -> Outcome<u32> {
    let mode = options.mode;
    let wanted = Spmd::start(stage, &options.plain())?.finish()?;
    let mut job = Spmd::start(stage, options)?;
    let mut pauses = 0;
    while pauses < PAUSES_MAX
        && !job.is_done_within(Duration::from_millis(random.below(GAP_MAX_MS)))?
    {
        let report = pause(stage)?["report"].take();
        // Between two communicators there is nothing that could leave, and the next one is not made.
        let is_empty = report["devices"].as_array().is_some_and(Vec::is_empty);
        assert_eq!(is_empty, report["notes"].to_string().contains(NOTHING_LEFT), "{report}");
        *were_empty &= is_empty;
        let [own, resident, others] = nccl_bytes(stage)?;
        assert!(
            resident == 0 && others > 0,
            "{mode}: {own} own, {resident} resident, {others} of others"
        );
        assert_eq!(stage.states("spmd")?, ["active"]);
        wait(random, GAP_MAX_MS);
        resume(stage)?;
        pauses += 1;
    }
    println!("{mode}: {pauses} pauses in {} steps", options.steps);
    assert_eq!(job.finish()?, wanted, "{mode}");
    Ok(pauses)
}

#[test]
fn collectives_in_threads_groups_and_pipelines_wait_for_it() -> Outcome {
    survives("data", 2, 2000)?;
    survives("tensor", 4, 300)?;
    survives("pipeline", 3, 150)
}

#[test]
fn collectives_in_graphs_wait_for_it() -> Outcome {
    survives("graph", 2, 1500)?;
    survives("regraph", 2, 250)
}

#[test]
fn communicators_that_come_and_go_wait_for_it() -> Outcome {
    survives("churn", 3, 40)?;
    survives("waiting", 4, 150)?;
    survives("grow", 3, 60)
}

#[test]
fn where_nothing_could_leave_the_first_communicator_waits_for_the_resume() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = SpmdOptions { stuck: Some((0, 0)), ..SpmdOptions::new("waiting", 1, 20) };
    let wanted = Spmd::start(&stage, &options.plain())?.finish()?;
    let mut job = Spmd::start(&stage, &options)?;
    assert_eq!(job.ranks[0].answer()?.text, "stuck");
    let paused = pause(&stage)?;
    assert_eq!(paused["outcome"], "completed", "{paused}");
    assert!(paused["report"]["notes"].to_string().contains(NOTHING_LEFT), "{paused}");
    assert_eq!(pause(&stage)?["outcome"], "already_paused");
    job.ranks[0].say("go on")?;
    let waits = |job: &mut Spmd| job.is_done_within(Duration::from_millis(300)).map(|done| !done);
    assert!(waits(&mut job)?);
    stage.pause("spmd")?;
    stage.resume("spmd")?;
    assert!(waits(&mut job)?, "it was no resume of NCCL");
    assert_eq!(nccl_bytes(&stage)?[..2], [0, 0]);
    assert_eq!(stage.members("spmd")?[0]["member"]["nccl_waits"], true);
    let shown = stage.sublet(&["ps"])?.succeeded()?.stdout;
    assert!(shown.contains("  active (nccl away)"), "{shown}");
    let said = stage.patiently(&["pause", "spmd", "--library", "nccl"])?.stdout;
    assert!(said.starts_with("tag 'nccl' of tenant 'spmd' is paused already"), "{said}");
    assert_eq!(resume(&stage)?["outcome"], "completed");
    assert_eq!(resume(&stage)?["outcome"], "already_active");
    assert_eq!(job.finish()?, wanted);
    Ok(())
}

#[test]
fn where_calls_are_to_fail_meanwhile_they_do_and_say_why() -> Outcome {
    for mode in ["data", "graph", "grow"] {
        let stage = Stage::new(&CAPACITIES)?;
        let options = SpmdOptions { away_fails: true, ..SpmdOptions::new(mode, 2, ENDLESS) };
        let mut job = Spmd::start(&stage, &options)?;
        // A rank whose call fails ends itself, perhaps before the command does.
        let words = ["pause", "spmd", "--library", "nccl", "--json", "--timeout", "4m"];
        let paused = stage.sublet(&words)?.json()?;
        let is_done = paused["outcome"] == "completed" || paused["outcome"] == "partial";
        assert!(is_done, "{paused}");
        let ended = (|| -> Outcome {
            while !job.is_done_within(Duration::from_secs(1))? {}
            Ok(())
        })();
        let said = ended.err().map(|error| error.to_string()).unwrap_or_default();
        // `ncclInvalidUsage`, or for a graph the driver's own word.
        let is_refused =
            said.contains("ncclInvalidUsage") || said.contains("CUDA_ERROR_NOT_PERMITTED");
        assert!(is_refused, "{mode}: {said}");
    }
    Ok(())
}

#[test]
fn windows_and_signals_wait_for_it() -> Outcome {
    survives("window", 2, 1500)?;
    survives("given", 2, 1500)?;
    survives("signal", 3, 2500)
}

#[test]
fn work_goes_on_and_a_collective_waits_until_the_resume() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = SpmdOptions { stuck: Some((1, 20)), ..SpmdOptions::new("graph", 2, LONG_STEPS) };
    let wanted = Spmd::start(&stage, &options.plain())?.finish()?;
    let mut job = Spmd::start(&stage, &options)?;
    assert_eq!(job.ranks[1].answer()?.text, "stuck");
    // Rank 0 waits in a collective for rank 1, and so does the pause.
    let refused = stage.sublet(&["pause", "spmd", "--library", "nccl", "--timeout", "1s"])?;
    assert_ne!(refused.code, Some(0), "{refused:?}");
    assert!(nccl_bytes(&stage)?[1] > 0, "nothing has changed");
    job.ranks[1].say("go on")?;
    pause(&stage)?;
    assert!(!job.is_done_within(Duration::from_millis(300))?, "its collectives wait");
    // What else there is to pause leaves and comes back, and NCCL's stays away.
    stage.pause("spmd")?;
    assert_eq!(nccl_bytes(&stage)?[1..], [0, 0]);
    stage.resume("spmd")?;
    let [_, resident, others] = nccl_bytes(&stage)?;
    assert!(resident == 0 && others > 0, "{resident} resident, {others} of others");
    assert!(!job.is_done_within(Duration::from_millis(300))?, "its collectives wait still");
    let again = pause(&stage)?;
    assert_eq!(again["outcome"], "already_paused", "{again}");
    // A resume of a tenant that runs brings back all that is away.
    stage.resume("spmd")?;
    assert_eq!(job.finish()?, wanted);
    Ok(())
}

#[test]
fn nccl_does_not_leave_alone_where_work_of_it_is_not_held_back() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = SpmdOptions { stuck: Some((1, 20)), ..SpmdOptions::new("kernels", 2, 1000) };
    let wanted = Spmd::start(&stage, &options.plain())?.finish()?;
    let mut job = Spmd::start(&stage, &options)?;
    assert_eq!(job.ranks[1].answer()?.text, "stuck");
    job.ranks[1].say("go on")?;
    let words = ["pause", "spmd", "--library", "nccl", "--json", "--timeout", "4m"];
    let refused = stage.sublet(&words)?;
    let error = refused.json()?["error"].as_str().unwrap_or_default().to_owned();
    assert!(
        error.contains("ncclDevCommCreate") && error.contains("pause the whole tenant"),
        "{error}"
    );
    stage.pause("spmd")?;
    stage.resume("spmd")?;
    assert_eq!(job.finish()?, wanted);
    Ok(())
}

#[test]
fn a_command_that_is_killed_in_the_middle_leaves_a_job_that_goes_on() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = SpmdOptions::new("tensor", 4, 300);
    let wanted = Spmd::start(&stage, &options.plain())?.finish()?;
    let mut random = Random::new();
    let job = Spmd::start(&stage, &options)?;
    for turn in 0..8 {
        let action = if turn % 2 == 0 { "pause" } else { "resume" };
        let mut command = stage.command(&stage.files().sublet);
        let mut child = command.args([action, "spmd", "--library", "nccl"]).spawn()?;
        wait(&mut random, 25);
        child.kill()?;
        child.wait()?;
    }
    resume(&stage)?;
    assert!(nccl_bytes(&stage)?[1] > 0);
    assert_eq!(job.finish()?, wanted);
    Ok(())
}

#[test]
fn a_rank_that_dies_meanwhile_is_named_and_the_others_can_go_on_without_it() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = SpmdOptions { stuck: Some((1, 20)), ..SpmdOptions::new("graph", 2, ENDLESS) };
    let mut job = Spmd::start(&stage, &options)?;
    assert_eq!(job.ranks[1].answer()?.text, "stuck");
    job.ranks[1].say("go on")?;
    pause(&stage)?;
    let dead = job.ranks[1].pid();
    job.ranks[1].kill()?;
    let refused = stage.sublet(&["resume", "spmd", "--library", "nccl", "--json"])?;
    let error = refused.json()?["error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains(&dead.to_string()) && error.contains("--without-lost"), "{error}");
    let arguments = ["resume", "spmd", "--library", "nccl", "--without-lost"];
    // Its collectives touch what is lost, so it may be gone before the command is.
    let resumed = stage.sublet(&arguments)?;
    assert!(resumed.stdout.contains("are lost: their addresses are unmapped"), "{resumed:?}");
    Ok(())
}
