//! Jobs whose NCCL has slabs: what they compute is the same, and a pause moves few objects.

#![expect(clippy::print_stdout, reason = "the figures, and the seed that repeats a failed test")]

use std::time::Duration;

use serde_json::Value;
use sublet_tests::{MIB, Outcome, Random, Spmd, SpmdOptions, Stage, statistic};

const CAPACITIES: [u64; 4] = [256 * MIB; 4];
const PAUSES_MAX: u32 = 8;
/// Fewer would mean that the jobs are too short to test anything.
const PAUSES_MIN: u32 = 3;
const GAP_MAX_MS: u64 = 60;
const FURTHER_BOXES: u32 = 12;

/// The job gives the same when everything, or NCCL's memory alone, leaves at random instants.
fn survives(options: &SpmdOptions) -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut random = Random::new();
    options.paused_often(PAUSES_MIN, |options| paused(&stage, options, &mut random))
}

/// How often one job was paused.
fn paused(stage: &Stage, options: &SpmdOptions, random: &mut Random) -> Outcome<u32> {
    let wanted = Spmd::start(stage, &options.plain())?.finish()?;
    let mut job = Spmd::start(stage, options)?;
    let mut pauses = 0;
    while pauses < PAUSES_MAX
        && !job.is_done_within(Duration::from_millis(random.below(GAP_MAX_MS)))?
    {
        let scope: &[&str] = if random.below(2) == 0 { &[] } else { &["--library", "nccl"] };
        for action in ["pause", "resume"] {
            stage.at_least_in_part(&[&[action, options.tenant.as_str()], scope].concat())?;
        }
        pauses += 1;
    }
    println!("{}: {pauses} pauses in {} steps", options.mode, options.steps);
    assert_eq!(job.finish()?, wanted, "{}", options.mode);
    Ok(pauses)
}

#[test]
fn collectives_survive_pauses_at_any_instant() -> Outcome {
    survives(&SpmdOptions::new("data", 2, 2000).slabbed(FURTHER_BOXES))?;
    survives(&SpmdOptions::new("tensor", 4, 200).slabbed(FURTHER_BOXES))
}

#[test]
fn communicators_that_come_and_go_survive_pauses_at_any_instant() -> Outcome {
    survives(&SpmdOptions::new("churn", 3, 30).slabbed(FURTHER_BOXES))?;
    survives(&SpmdOptions::new("suspend", 3, 30).slabbed(FURTHER_BOXES))
}

#[test]
fn windows_and_graphs_survive_pauses_at_any_instant() -> Outcome {
    survives(&SpmdOptions::new("window", 2, 1500).slabbed(FURTHER_BOXES))?;
    survives(&SpmdOptions::new("graph", 2, 1500).slabbed(FURTHER_BOXES))
}

#[test]
fn a_job_of_which_some_ranks_have_slabs_survives_pauses_at_any_instant() -> Outcome {
    let options = SpmdOptions::new("tensor", 4, 200).slabbed(FURTHER_BOXES);
    survives(&SpmdOptions { slabs: 1..3, ..options })
}

/// A job that runs as long as it is let, some steps after its start.
fn started(stage: &Stage, options: SpmdOptions) -> Outcome<Spmd> {
    let options = SpmdOptions { stuck: Some((1, 3)), steps: 1_000_000, ..options };
    let mut job = Spmd::start(stage, &options)?;
    assert_eq!(job.ranks[1].answer()?.text, "stuck");
    job.ranks[1].say("go on")?;
    Ok(job)
}

/// Objects of NCCL's, and the driver calls of a pause and a resume of it, in all processes.
fn objects_and_calls(options: &SpmdOptions) -> Outcome<[u64; 3]> {
    let stage = Stage::new(&CAPACITIES)?;
    let _runs_on = started(&stage, options.clone())?;
    let members = stage.members(&options.tenant)?;
    let sum = |name| members.iter().map(|member| statistic(member, name)).sum::<u64>();
    let objects = [sum("own_count"), sum("imported_count")];
    stage.pause(&options.tenant)?;
    stage.resume(&options.tenant)?;
    let calls_in = |phases: &Value| {
        let reports = phases.as_array().into_iter().flatten();
        reports.filter_map(|phase| phase[1]["driver_calls"].as_u64()).sum::<u64>()
    };
    let members = stage.members(&options.tenant)?;
    let calls = members
        .iter()
        .map(|member| calls_in(&member["last_pause"]) + calls_in(&member["last_resume"]));
    Ok([objects[0], objects[1], calls.sum()])
}

#[test]
fn a_pause_and_a_resume_move_a_fraction_of_the_objects_in_a_fraction_of_the_calls() -> Outcome {
    let slabbed = SpmdOptions::new("tensor", 4, 0).slabbed(24);
    let plain = objects_and_calls(&SpmdOptions { slabs: 0..0, ..slabbed.clone() })?;
    let with_slabs = objects_and_calls(&slabbed)?;
    println!("own, imported, driver calls: {plain:?} without slabs, {with_slabs:?} with them");
    let pairs = plain.into_iter().zip(with_slabs);
    assert!(
        pairs.into_iter().all(|(without, with)| 3 * with < without),
        "{plain:?} {with_slabs:?}"
    );
    Ok(())
}

#[test]
fn a_rank_that_dies_is_named_and_the_others_go_on_without_it() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = started(&stage, SpmdOptions::new("graph", 2, 0).slabbed(FURTHER_BOXES))?;
    stage.pause("spmd")?;
    let dead = job.ranks[1].pid();
    job.ranks[1].kill()?;
    let refused = stage.sublet(&["resume", "spmd", "--json"])?;
    let error = refused.json()?["error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains(&dead.to_string()) && error.contains("--without-lost"), "{error}");
    // Two slabs are imported, with 13 cells. Its collectives touch what is lost, so it may be gone before the command is.
    let resumed = stage.sublet(&["resume", "spmd", "--without-lost"])?;
    assert!(resumed.stdout.contains("in 2 allocations"), "{resumed:?}");
    drop(job);
    assert_eq!(stage.used_bytes(0)?, 0);
    assert_eq!(stage.used_bytes(1)?, 0);
    Ok(())
}
