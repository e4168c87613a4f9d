//! Jobs over the simulated NCCL, linked as libtorch is or found by ctypes, paused from outside at any
//! instant. The jobs know nothing of pauses, and what they compute shows every result of every step.

use std::time::Duration;

use sublet_tests::{MIB, Outcome, Spmd, SpmdOptions, Stage};

const CAPACITIES: [u64; 4] = [128 * MIB; 4];
/// Pauses of one job, at most.
const PAUSES_MAX: u32 = 40;
const GAP_MAX_MS: u64 = 40;

/// What the job gives when nobody pauses it, with and without the preload object.
fn undisturbed(stage: &Stage, options: &SpmdOptions) -> Outcome<Vec<u64>> {
    let sums = Spmd::start(stage, &options.plain())?.finish()?;
    assert_eq!(Spmd::start(stage, options)?.finish()?, sums, "only preloaded");
    Ok(sums)
}

#[test]
fn jobs_give_the_same_under_the_preload_object() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    for (mode, ranks) in
        [("data", 2), ("tensor", 4), ("pipeline", 3), ("graph", 2), ("churn", 3), ("python", 2)]
    {
        undisturbed(&stage, &SpmdOptions::new(mode, ranks, 6))?;
    }
    Ok(())
}
