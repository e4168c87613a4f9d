//! Deep pauses: what a plain pause leaves on a device goes and comes back with the contexts, and what the driver could not bring back is refused by
//! name before anything moves.

use sublet_tests::{MIB, Outcome, Rank, Stage};

const CONTEXT: (&str, &str) = ("SIMCUDA_CONTEXT_BYTES", "8388608");

fn stage() -> Outcome<Stage> {
    Stage::new(&[96 * MIB])
}

/// `programs/kept.c`, in a tenant where one is named.
fn process(stage: &Stage, tenant: Option<&str>) -> Outcome<Rank> {
    let mut process = stage.keeper(tenant, &[CONTEXT])?;
    process.do_it("make")?;
    Ok(process)
}

/// The deep pause is refused for this reason, and the process runs on and holds what it held.
fn is_refused(stage: &Stage, process: &mut Rank, why: &str) -> Outcome {
    let before = stage.used_bytes(0)?;
    let refused = stage.sublet(&["pause", "train", "--deep"])?.exited(1)?;
    assert!(
        refused.stderr.contains(why) && refused.stderr.contains("without --deep"),
        "{refused:#?}"
    );
    assert_eq!(stage.states("train")?, ["active"]);
    assert_eq!(stage.used_bytes(0)?, before, "nothing has moved");
    process.do_it("check").map(drop)
}

fn comes_back(stage: &Stage, process: &mut Rank) -> Outcome {
    stage.patiently(&["pause", "train", "--deep"])?;
    stage.resume("train")?;
    process.do_it("check").map(drop)
}

#[test]
fn all_that_a_pause_leaves_in_place_comes_back_with_the_contexts() -> Outcome {
    let stage = stage()?;
    let mut train = process(&stage, Some("train"))?;
    stage.pause("train")?;
    assert!(stage.used_bytes(0)? >= 16 * MIB, "a plain pause leaves contexts, and more");
    for _ in 0..3 {
        stage.patiently(&["pause", "train", "--deep"])?;
        assert_eq!(stage.used_bytes(0)?, 0);
        stage.resume("train")?;
        train.do_it("check")?;
    }
    Ok(())
}

#[test]
fn host_memory_of_the_drivers_allocator_is_refused_by_name_until_it_is_freed() -> Outcome {
    let stage = stage()?;
    let mut train = process(&stage, Some("train"))?;
    train.do_it("host")?;
    is_refused(&stage, &mut train, "NCCL_CUMEM_HOST_ENABLE=0")?;
    // Paused plainly, its contexts do not follow either, and it comes back.
    stage.pause("train")?;
    let ran = stage.sublet(&["pause", "train", "--deep"])?;
    let said = format!("{}{}", ran.stdout, ran.stderr);
    assert!(ran.code != Some(0) && said.contains("NCCL_CUMEM_HOST_ENABLE=0"), "{ran:#?}");
    assert_eq!(stage.states("train")?, ["paused"]);
    stage.resume("train")?;
    train.do_it("check")?;
    train.do_it("nohost")?;
    comes_back(&stage, &mut train)
}

/// As a thread of JAX does. The driver ends a process that asks while its contexts are off the device.
#[test]
fn threads_that_ask_about_work_all_the_time_wait_until_the_contexts_are_back() -> Outcome {
    let stage = stage()?;
    let mut train = process(&stage, Some("train"))?;
    train.do_it("ask")?;
    for _ in 0..3 {
        train.do_it("asked")?;
        comes_back(&stage, &mut train)?;
    }
    // A plain pause does not hold them back.
    stage.pause("train")?;
    train.do_it("asked")?;
    stage.resume("train")?;
    train.do_it("check").map(drop)
}

#[test]
fn memory_that_is_open_by_a_handle_from_outside_is_refused_by_name_until_it_is_closed() -> Outcome {
    let stage = stage()?;
    let mut outside = process(&stage, None)?;
    let mut train = process(&stage, Some("train"))?;
    let handle = outside.do_it("handle")?.text;
    train.do_it(&format!("open {handle}"))?;
    is_refused(&stage, &mut train, "are open by cudaIpc handles of the driver's own")?;
    // The driver counts how often it is open.
    train.do_it(&format!("open {handle}"))?;
    train.do_it("close")?;
    is_refused(&stage, &mut train, "are open by cudaIpc handles of the driver's own")?;
    train.do_it("close")?;
    comes_back(&stage, &mut train)
}
