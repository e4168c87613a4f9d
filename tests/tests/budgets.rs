//! What a tenant may hold on a GPU: all its processes together hold no more, are told so as if memory were used up, and
//! see a GPU of that size.

use serde_json::Value;
use sublet_tests::{MIB, Outcome, Rank, Stage};

const CAPACITIES: [u64; 2] = [256 * MIB; 2];

/// What the tenant holds on the GPU with this number, by the command.
fn held(stage: &Stage, tenant: &str, index: u64) -> Outcome<u64> {
    Ok(gpu(stage, tenant, index)?["held_bytes"].as_u64().unwrap_or(u64::MAX))
}

fn gpu(stage: &Stage, tenant: &str, index: u64) -> Outcome<Value> {
    let report = stage.sublet(&["budget", tenant, "--json"])?.succeeded()?.json()?;
    let gpus = report["gpus"].as_array().cloned().unwrap_or_default();
    Ok(gpus.into_iter().find(|gpu| gpu["index"] == index).unwrap_or_default())
}

fn change(stage: &Stage, tenant: &str, budget: &str) -> Outcome<Value> {
    stage.sublet(&["budget", tenant, budget, "--json"])?.succeeded()?.json()
}

/// Takes memory; its number.
fn takes(process: &mut Rank, kind: &str, bytes: u64) -> Outcome<u64> {
    let [number] = process.do_it(&format!("{kind} 0 {bytes}"))?.numbers()?;
    Ok(number)
}

/// Is refused as if memory were used up.
fn is_full(process: &mut Rank, kind: &str, bytes: u64) -> Outcome {
    let answer = process.ask(&format!("{kind} 0 {bytes}"))?;
    assert!(!answer.is_ok && answer.text == "CUDA_ERROR_OUT_OF_MEMORY", "{kind}: {answer:?}");
    Ok(())
}

fn frees(process: &mut Rank, number: u64) -> Outcome {
    process.do_it(&format!("free {number}")).map(drop)
}

#[test]
fn all_processes_together_hold_no_more_to_the_byte_whatever_they_ask_for() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = ["--budget", "0=64MiB"];
    let mut one = stage.hoard("infer", &options, &[])?;
    let mut other = stage.hoard("infer", &options, &[])?;
    takes(&mut one, "create", 20 * MIB)?;
    let block = takes(&mut other, "plain", 20 * MIB)?;
    let small = takes(&mut one, "plain", 4096)?;
    let stream = takes(&mut other, "async", 8 * MIB - 4096)?;
    let rows = takes(&mut one, "pitch", 8 * MIB)?;
    let array = takes(&mut other, "array", 8 * MIB)?;
    assert_eq!(held(&stage, "infer", 0)?, 64 * MIB);
    for kind in ["create", "plain", "pitch"] {
        is_full(&mut one, kind, 2 * MIB)?;
    }
    for kind in ["plain", "async", "array"] {
        is_full(&mut other, kind, 1)?;
    }
    // What the driver moves to and fro is on no device for good.
    takes(&mut one, "managed", 16 * MIB)?;
    // The other GPU has no bound.
    other.do_it(&format!("create 1 {}", 128 * MIB))?;
    for number in [small, rows] {
        frees(&mut one, number)?;
    }
    for number in [stream, array, block] {
        frees(&mut other, number)?;
    }
    assert_eq!(held(&stage, "infer", 0)?, 20 * MIB);
    takes(&mut one, "create", 44 * MIB)?;
    is_full(&mut other, "plain", 1)
}

#[test]
fn a_program_that_is_refused_frees_its_caches_and_goes_on() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut process = stage.hoard("infer", &["--budget", "64MiB"], &[("SUBLET_LOG", "warn")])?;
    for _ in 0..8 {
        takes(&mut process, "create", 8 * MIB)?;
    }
    let answer = process.do_it(&format!("hungry 0 {}", 20 * MIB))?;
    assert_eq!(answer.numbers::<2>()?[1], 3, "{answer:?}");
    process.do_it(&format!("hungry 0 {}", 30 * MIB))?;
    process.complained("does not fit the tenant's budget")?;
    let errors = process.stderr();
    assert_eq!(errors.matches("does not fit the tenant's budget").count(), 1, "{errors}");
    for part in
        ["tenant=infer", "asked_bytes=20971520", "held_bytes=67108864", "budget_bytes=67108864"]
    {
        assert!(errors.contains(part), "{part}: {errors}");
    }
    assert!(held(&stage, "infer", 0)? <= 64 * MIB);
    Ok(())
}

#[test]
fn inside_the_tenant_a_gpu_is_as_large_as_the_budget() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut one = stage.hoard("infer", &["--budget", "0=64MiB"], &[])?;
    // Before it has any memory, too.
    assert_eq!(one.do_it("total 0")?.numbers::<1>()?, [64 * MIB]);
    assert_eq!(one.do_it("info 0")?.numbers::<2>()?, [64 * MIB, 64 * MIB]);
    assert_eq!(one.do_it("total 1")?.numbers::<1>()?, [256 * MIB]);
    let mut other = stage.hoard("infer", &[], &[])?;
    takes(&mut other, "create", 24 * MIB)?;
    assert_eq!(one.do_it("info 0")?.numbers::<2>()?, [40 * MIB, 64 * MIB]);
    // The GPU itself has less than the budget leaves.
    let mut stranger = stage.hoard("train", &[], &[])?;
    takes(&mut stranger, "create", 216 * MIB)?;
    let [free, total] = one.do_it("info 0")?.numbers()?;
    let really = stage.memory(0)?.free_bytes;
    assert_eq!([free, total], [really.min(40 * MIB), 64 * MIB]);
    assert!(really < 40 * MIB);
    let [free, total] = stranger.do_it("info 0")?.numbers()?;
    assert_eq!([free, total], [really, 256 * MIB]);
    change(&stage, "infer", "0=512MiB")?;
    assert_eq!(one.do_it("total 0")?.numbers::<1>()?, [256 * MIB]);
    assert_eq!(one.do_it("info 0")?.numbers::<2>()?, [really, 256 * MIB]);
    Ok(())
}

#[test]
fn the_share_of_a_process_that_is_killed_is_free_again() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = ["--budget", "0=64MiB"];
    let mut survivor = stage.hoard("infer", &options, &[])?;
    takes(&mut survivor, "create", 10 * MIB)?;
    for _ in 0..5 {
        let mut victim = stage.hoard("infer", &options, &[])?;
        takes(&mut victim, "create", 54 * MIB)?;
        is_full(&mut survivor, "create", 2 * MIB)?;
        victim.kill()?;
        assert_eq!(held(&stage, "infer", 0)?, 10 * MIB);
    }
    let mut victim = stage.hoard("infer", &options, &[])?;
    takes(&mut victim, "create", 54 * MIB)?;
    victim.kill()?;
    // Nobody has looked in between but the one that allocates.
    takes(&mut survivor, "create", 54 * MIB)?;
    is_full(&mut survivor, "create", 2 * MIB)?;
    survivor.kill()?;
    // With the last of them the count goes, and what the tenant was told.
    let mut anew = stage.hoard("infer", &["--budget", "0=128MiB"], &[])?;
    takes(&mut anew, "create", 128 * MIB)?;
    is_full(&mut anew, "create", 2 * MIB)
}

#[test]
fn a_budget_changes_while_the_tenant_runs() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    // It has none at first, and nothing is counted.
    let mut one = stage.hoard("infer", &[], &[])?;
    let mut other = stage.hoard("infer", &[], &[])?;
    takes(&mut one, "create", 20 * MIB)?;
    let small = takes(&mut one, "plain", 4096)?;
    takes(&mut other, "plain", 30 * MIB)?;
    let shown = stage.sublet(&["budget", "infer"])?.succeeded()?;
    assert_eq!(shown.stdout, "tenant 'infer' has no budgets\n");
    let report = change(&stage, "infer", "0=60MiB")?;
    assert_eq!(report["budgets"], "0=60MiB", "{report}");
    assert_eq!(held(&stage, "infer", 0)?, 50 * MIB + 4096);
    is_full(&mut one, "create", 10 * MIB)?;
    frees(&mut one, small)?;
    let last = takes(&mut other, "create", 10 * MIB)?;
    // Less than is held takes nothing away.
    let lowered = stage.sublet(&["budget", "infer", "0=40MiB"])?.succeeded()?;
    assert!(lowered.stdout.contains("tenant 'infer' holds 20 MiB more on GPU 0"), "{lowered:?}");
    assert_eq!(held(&stage, "infer", 0)?, 60 * MIB);
    assert_eq!(one.do_it("info 0")?.numbers::<2>()?, [0, 40 * MIB]);
    frees(&mut other, last)?;
    is_full(&mut other, "create", 2 * MIB)?;
    change(&stage, "infer", "none")?;
    takes(&mut other, "create", 100 * MIB)?;
    // One that joins later counts with the others, and another's changed budget is its own.
    change(&stage, "infer", "0=160MiB")?;
    let mut late = stage.hoard("infer", &[], &[])?;
    is_full(&mut late, "create", 12 * MIB)?;
    takes(&mut late, "create", 10 * MIB)?;
    let ps = stage.sublet(&["ps"])?.succeeded()?.stdout;
    assert!(ps.contains("infer GPU 0: holds 160 MiB of its budget of 160 MiB"), "{ps}");
    let stats = stage.sublet(&["stats", "infer", "--json"])?.succeeded()?.json()?;
    assert_eq!(stats[0]["budgets"][0]["budget_bytes"], 160 * MIB, "{stats}");
    Ok(())
}
