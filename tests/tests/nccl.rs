//! Jobs over the simulated NCCL, linked as libtorch is or found by ctypes, paused from outside at any
//! instant. The jobs know nothing of pauses, and what they compute shows every result of every step.

#![expect(clippy::print_stdout, reason = "a failed test shows what it did")]

use std::time::Duration;

use sublet_tests::{MIB, Outcome, Random, Spmd, SpmdOptions, Stage};

const CAPACITIES: [u64; 4] = [128 * MIB; 4];
/// Pauses of one job, at most. `SUBLET_TEST_PAUSES` asks for more, and for jobs that are as much longer.
const PAUSES_MAX: u32 = 20;
/// Fewer would mean that the jobs are too short to test anything.
const PAUSES_MIN: u32 = 4;
/// The job runs for up to this long between pauses.
const GAP_MAX_MS: u64 = 60;

/// The job gives the same when it is paused at random instants as when nobody pauses it.
fn survives_pauses(mode: &'static str, ranks: usize, steps: u32) -> Outcome {
    survives(&SpmdOptions::new(mode, ranks, steps), &[])
}

/// As [`survives_pauses`], by pauses with these flags.
fn survives(options: &SpmdOptions, flags: &[&str]) -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let given = std::env::var("SUBLET_TEST_PAUSES").ok().and_then(|text| text.parse().ok());
    let pauses_max = given.unwrap_or(PAUSES_MAX).max(PAUSES_MAX);
    let mut options = options.clone();
    options.steps = options.steps * pauses_max / PAUSES_MAX;
    let mut random = Random::new();
    let job = |options: &SpmdOptions| paused(&stage, options, flags, pauses_max, &mut random);
    options.paused_often(PAUSES_MIN, job)
}

/// How often one job was paused.
fn paused(
    stage: &Stage,
    options: &SpmdOptions,
    flags: &[&str],
    pauses_max: u32,
    random: &mut Random,
) -> Outcome<u32> {
    let wanted = Spmd::start(stage, &options.plain())?.finish()?;
    let mut job = Spmd::start(stage, options)?;
    let mut pauses = 0;
    while pauses < pauses_max
        && !job.is_done_within(Duration::from_millis(random.below(GAP_MAX_MS)))?
    {
        let words = [&["pause", &options.tenant][..], flags].concat();
        stage.at_least_in_part(&words)?;
        stage.resume(&options.tenant)?;
        pauses += 1;
    }
    println!("{pauses} pauses in {} steps", options.steps);
    assert_eq!(job.finish()?, wanted);
    Ok(pauses)
}

#[test]
fn jobs_give_the_same_under_the_preload_object() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let modes = [
        ("data", 2),
        ("tensor", 4),
        ("pipeline", 3),
        ("graph", 2),
        ("churn", 3),
        ("suspend", 3),
        ("waiting", 4),
        ("window", 2),
        ("signal", 3),
        ("every", 3),
        ("experts", 3),
        ("grow", 3),
        ("shrink", 3),
        ("regraph", 2),
        ("python", 2),
        ("ours", 2),
    ];
    for (mode, ranks) in modes {
        let options = SpmdOptions::new(mode, ranks, 6);
        let wanted = Spmd::start(&stage, &options.plain())?.finish()?;
        assert_eq!(Spmd::start(&stage, &options)?.finish()?, wanted, "{mode}");
    }
    Ok(())
}

#[test]
fn gradients_reduced_by_two_threads_survive_pauses_at_any_instant() -> Outcome {
    survives_pauses("data", 2, 2500)
}

/// Threads of the host and devices use it, and it leaves in no pause.
#[test]
fn host_memory_of_nccl_is_used_all_through_deep_pauses_at_any_instant() -> Outcome {
    let options = SpmdOptions::new("data", 2, 400);
    survives(&SpmdOptions { has_host_boxes: true, ..options }, &["--deep"])
}

#[test]
fn tensor_and_data_parallel_groups_survive_pauses_at_any_instant() -> Outcome {
    survives_pauses("tensor", 4, 300)
}

#[test]
fn a_pipeline_survives_pauses_at_any_instant() -> Outcome {
    survives_pauses("pipeline", 3, 150)
}

#[test]
fn rollouts_that_another_rank_waits_for_on_the_host_survive_pauses_at_any_instant() -> Outcome {
    survives_pauses("rollout", 4, 6)
}

#[test]
fn collectives_in_graphs_survive_pauses_at_any_instant() -> Outcome {
    survives_pauses("graph", 2, 1500)
}

#[test]
fn graphs_made_and_ended_by_two_threads_survive_pauses_at_any_instant() -> Outcome {
    survives_pauses("regraph", 2, 250)
}

#[test]
fn communicators_that_come_and_go_survive_pauses_at_any_instant() -> Outcome {
    survives_pauses("churn", 3, 40)
}

#[test]
fn communicators_that_do_not_block_survive_pauses_at_any_instant() -> Outcome {
    survives_pauses("waiting", 4, 150)
}

#[test]
fn communicators_that_the_job_suspends_survive_pauses_at_any_instant() -> Outcome {
    survives_pauses("suspend", 3, 40)
}

#[test]
fn memory_of_a_suspended_communicator_is_free_and_comes_back_with_it() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = SpmdOptions { stuck: Some((1, 4)), ..SpmdOptions::new("suspend", 2, 8) };
    let wanted = Spmd::start(&stage, &options.plain())?.finish()?;
    let mut job = Spmd::start(&stage, &options)?;
    assert_eq!(job.ranks[1].answer()?.text, "stuck");
    let nccl_bytes = |pid: u32| -> Outcome<u64> {
        let members = stage.members("spmd")?;
        let member = members.iter().find(|member| member["member"]["pid"] == pid);
        let classes = member
            .map_or(&serde_json::Value::Null, |member| &member["pool"]["devices"][0]["memory"]);
        let classes = classes.as_array().cloned().unwrap_or_default();
        assert!(!classes.is_empty(), "process {pid} is not in {members:?}");
        let nccl = classes.iter().filter(|class| class["library"] == "nccl");
        let bytes = |class: &serde_json::Value, name: &str| class[name].as_u64().unwrap_or(0);
        Ok(nccl.map(|class| bytes(class, "own_bytes") + bytes(class, "imported_bytes")).sum())
    };
    assert_eq!(nccl_bytes(job.ranks[1].pid())?, 0);
    job.ranks[1].say("go on")?;
    assert_eq!(job.finish()?, wanted);
    Ok(())
}

#[test]
fn windows_that_ranks_deregister_at_different_times_survive_pauses_at_any_instant() -> Outcome {
    survives_pauses("window", 2, 1500)
}

#[test]
fn signals_survive_pauses_at_any_instant() -> Outcome {
    survives_pauses("signal", 3, 2500)
}

#[test]
fn every_collective_and_each_way_to_a_communicator_survives_pauses_at_any_instant() -> Outcome {
    survives_pauses("every", 3, 150)
}

#[test]
fn a_collective_captured_into_a_graph_that_was_moved_into_another_is_told_of() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = SpmdOptions::new("moved", 2, 6);
    let wanted = Spmd::start(&stage, &options.plain())?.finish()?;
    let mut job = Spmd::start(&stage, &options)?;
    while !job.is_done_within(Duration::from_secs(5))? {}
    for member in stage.members("spmd")? {
        let notes = member["notes"].to_string();
        assert!(notes.contains("captured into a part of a graph that is not followed"), "{notes}");
    }
    assert_eq!(job.finish()?, wanted);
    Ok(())
}

#[test]
fn exchanges_between_experts_survive_pauses_at_any_instant() -> Outcome {
    survives_pauses("experts", 3, 500)
}

#[test]
fn communicators_that_grow_survive_pauses_at_any_instant() -> Outcome {
    survives_pauses("grow", 3, 60)
}

#[test]
fn ranks_that_go_on_without_one_survive_pauses_at_any_instant_and_when_they_are_idle() -> Outcome {
    survives_pauses("shrink", 3, 1500)?;
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = Spmd::start(&stage, &SpmdOptions::new("shrink", 3, 6))?;
    while !job.is_done_within(Duration::from_secs(5))? {}
    stage.pause("spmd")?;
    stage.resume("spmd")?;
    job.finish().map(drop)
}

#[test]
fn a_thread_that_is_held_is_refused_when_another_aborts_its_communicator() -> Outcome {
    for mode in ["abort", "abort-group"] {
        let stage = Stage::new(&CAPACITIES)?;
        let mut job = Spmd::start(&stage, &SpmdOptions::new(mode, 2, 1))?;
        for rank in &mut job.ranks {
            assert_eq!(rank.answer()?.text, "working");
        }
        stage.pause("spmd")?;
        // While it is paused: aborting waits for nobody, and those who are held for it are let go with an error.
        for rank in &mut job.ranks {
            rank.say("abort")?;
        }
        for rank in &mut job.ranks {
            assert_eq!(rank.answer()?.text, "refused 5", "{mode}");
        }
        let members = stage.members("spmd")?;
        let told = members.iter().map(|member| member["notes"].to_string());
        for notes in told {
            assert!(notes.contains("was held for a pause while another thread ended"), "{notes}");
        }
        stage.resume("spmd")?;
        job.finish()?;
    }
    Ok(())
}

#[test]
fn a_job_that_finds_nccl_by_ctypes_survives_pauses_at_any_instant() -> Outcome {
    survives_pauses("python", 2, 1500)
}

#[test]
fn a_job_that_opens_ours_in_place_of_nccl_survives_pauses_at_any_instant() -> Outcome {
    survives_pauses("ours", 2, 1500)
}

#[test]
fn what_a_rank_that_is_stuck_owes_others_is_named() -> Outcome {
    for (mode, ranks, stuck, owed) in [
        ("experts", 2, (1, 21), "between experts of group 0"),
        ("signal", 3, (1, 22), "from rank 1 to rank 2 (index 0, context 0)"),
        ("grow", 3, (2, 2), "rank 2 of communicator"),
    ] {
        let stage = Stage::new(&CAPACITIES)?;
        let options = SpmdOptions { stuck: Some(stuck), ..SpmdOptions::new(mode, ranks, 40) };
        let wanted = Spmd::start(&stage, &options.plain())?.finish()?;
        let mut job = Spmd::start(&stage, &options)?;
        assert_eq!(job.ranks[stuck.0].answer()?.text, "stuck");
        let refused = stage.sublet(&["pause", "spmd", "--json", "--timeout", "5s"])?;
        let error = refused.json()?["error"].as_str().unwrap_or_default().to_owned();
        assert!(error.contains(owed), "{mode}: {error}");
        job.ranks[stuck.0].say("go on")?;
        assert_eq!(job.finish()?, wanted, "{mode}");
    }
    Ok(())
}

#[test]
fn a_rank_that_is_stuck_is_named_and_the_job_goes_on_to_the_same_end() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = SpmdOptions { stuck: Some((1, 20)), ..SpmdOptions::new("graph", 2, 40) };
    let wanted = Spmd::start(&stage, &options.plain())?.finish()?;
    let mut job = Spmd::start(&stage, &options)?;
    let stuck = job.ranks[1].answer()?;
    assert_eq!(stuck.text, "stuck");

    let refused = stage.sublet(&["pause", "spmd", "--json", "--timeout", "5s"])?;
    assert_ne!(refused.code, Some(0), "{refused:?}");
    let error = refused.json()?["error"].as_str().unwrap_or_default().to_owned();
    let [waits, names] = [0, 1].map(|rank| format!("process {} ", job.ranks[rank].pid()));
    assert!(error.contains(&names), "not {names}: {error}");
    assert!(error.contains("rank 1 of communicator"), "{error}");
    assert!(!error.contains(&waits), "it only waits for the other: {error}");
    assert_eq!(stage.states("spmd")?, ["active"]);

    job.ranks[1].say("go on")?;
    stage.pause("spmd")?;
    stage.resume("spmd")?;
    assert_eq!(job.finish()?, wanted);
    Ok(())
}
