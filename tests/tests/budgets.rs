//! What a tenant may hold on a GPU: all its processes together hold no more, are told so as if memory were used up, and
//! see a GPU of that size.

use std::fs;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use sublet_tests::{MIB, Outcome, Random, Rank, Spmd, SpmdOptions, Stage, until};

const TIMEOUT: Duration = Duration::from_mins(2);
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
    // Such an array has no memory until some is mapped.
    takes(&mut one, "sparse", MIB)?;
    takes(&mut other, "deferred", MIB)?;
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
    let mut again = stage.hoard("infer", &["--budget", "0=128MiB"], &[])?;
    takes(&mut again, "create", 128 * MIB)?;
    is_full(&mut again, "create", 2 * MIB)
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
    let shown = &stats["tenants"][0]["budgets"][0];
    assert_eq!(shown["budget_bytes"], 160 * MIB, "{stats}");
    let metrics = stage.sublet(&["metrics"])?.succeeded()?.stdout;
    let labels = format!("{{tenant=\"infer\",gpu=\"0\",uuid={}}} {}", shown["uuid"], 160 * MIB);
    for name in ["sublet_budget_bytes", "sublet_budget_held_bytes"] {
        assert!(metrics.contains(&format!("{name}{labels}")), "no {name}{labels} in {metrics}");
    }
    Ok(())
}

#[test]
fn what_is_paused_does_not_count_and_comes_back_within_the_budget() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut one = stage.hoard("infer", &["--budget", "0=64MiB"], &[])?;
    let mut other = stage.hoard("infer", &[], &[])?;
    takes(&mut one, "create", 24 * MIB)?;
    one.do_it("tag kv")?;
    let cache = takes(&mut one, "create", 20 * MIB)?;
    one.do_it("untag")?;
    change(&stage, "infer", "0=65MiB")?;
    takes(&mut other, "plain", 20 * MIB)?;
    takes(&mut other, "plain", 4096)?;
    stage.pause("infer")?;
    assert_eq!(held(&stage, "infer", 0)?, 4096, "what a pause leaves in place counts");
    // A whole resume is never refused: it was within the budget when it left.
    change(&stage, "infer", "0=30MiB")?;
    stage.resume("infer")?;
    assert_eq!(held(&stage, "infer", 0)?, 64 * MIB + 4096);
    is_full(&mut one, "create", 2 * MIB)?;
    change(&stage, "infer", "0=64MiB")?;
    // By tag: its room is another's meanwhile, and the resume says what is missing.
    stage.patiently(&["pause", "infer", "--tag", "kv", "--keep-running"])?;
    assert_eq!(held(&stage, "infer", 0)?, 44 * MIB + 4096);
    let taken = takes(&mut other, "create", 10 * MIB)?;
    let refused = stage.sublet(&["resume", "infer", "--tag", "kv", "--json"])?;
    assert_eq!(refused.code, Some(1), "{refused:?}");
    let error = refused.json()?["error"].as_str().unwrap_or_default().to_owned();
    let figures = [20 * MIB, 64 * MIB, 54 * MIB + 4096].map(|bytes| bytes.to_string());
    assert!(figures.iter().all(|figure| error.contains(figure)), "{error}");
    assert_eq!(held(&stage, "infer", 0)?, 54 * MIB + 4096);
    frees(&mut other, taken)?;
    change(&stage, "infer", "0=65MiB")?;
    stage.patiently(&["resume", "infer", "--tag", "kv"])?;
    assert_eq!(held(&stage, "infer", 0)?, 64 * MIB + 4096);
    frees(&mut one, cache)?;
    assert_eq!(held(&stage, "infer", 0)?, 44 * MIB + 4096);
    Ok(())
}

#[test]
fn processes_that_take_and_free_at_once_never_hold_more_and_leave_nothing_counted() -> Outcome {
    const UNIT: u64 = 2 * MIB;
    let stage = Stage::new(&CAPACITIES)?;
    let mut random = Random::new();
    let options = ["--budget", "0=48MiB"];
    let start = || stage.hoard("infer", &options, &[]);
    let mut all = vec![(start()?, Vec::new()), (start()?, Vec::new()), (start()?, Vec::new())];
    for step in 0..60 {
        // All of them simultaneously: what each is told is its own affair, the sum is everybody's.
        for (process, _) in &mut all {
            process.say(&format!("create 0 {}", UNIT * (1 + random.below(4))))?;
        }
        for (process, kept) in &mut all {
            let answer = process.answer()?;
            assert!(answer.is_ok || answer.text == "CUDA_ERROR_OUT_OF_MEMORY", "{answer:?}");
            kept.extend(answer.numbers::<1>().ok().map(|[number]| number));
        }
        let used = stage.used_bytes(0)?;
        assert_eq!(held(&stage, "infer", 0)?, used, "step {step}");
        assert!(used <= 48 * MIB, "{used} at step {step}");
        let at = usize::try_from(random.below(3))?;
        let (process, kept) = &mut all[at];
        match random.below(6) {
            0 => {
                process.kill()?;
                all[at] = (start()?, Vec::new());
            }
            1 => {
                stage.pause("infer")?;
                assert_eq!(held(&stage, "infer", 0)?, 0);
                stage.resume("infer")?;
            }
            _ => {
                for number in kept.drain(..) {
                    frees(process, number)?;
                }
            }
        }
    }
    for (mut process, kept) in all {
        for number in kept {
            frees(&mut process, number)?;
        }
        assert_eq!(process.do_it("info 0")?.numbers::<2>()?[1], 48 * MIB);
        process.exit()?;
    }
    assert_eq!(stage.used_bytes(0)?, 0);
    Ok(())
}

#[test]
fn nccl_is_under_the_budget_and_leaves_it_by_itself() -> Outcome {
    let stage = Stage::new(&[256 * MIB; 4])?;
    // Long enough to run still when it is paused, on a busy machine too.
    let job_options = SpmdOptions { stuck: Some((1, 20)), ..SpmdOptions::new("graph", 2, 6000) };
    let wanted = Spmd::start(&stage, &job_options.plain())?.finish()?;
    let mut job = Spmd::start(&stage, &job_options)?;
    assert_eq!(job.ranks[1].answer()?.text, "stuck");
    change(&stage, "spmd", "256MiB")?;
    let before = held(&stage, "spmd", 0)?;
    // Small memory takes a granule of the device and counts by its own size.
    assert!(before > 0 && before <= stage.used_bytes(0)?, "{before}");
    job.ranks[1].say("go on")?;
    stage.patiently(&["pause", "spmd", "--library", "nccl"])?;
    let without = held(&stage, "spmd", 0)?;
    assert!(without < before, "{without} of {before} without NCCL");
    // What is left is all that there may be: NCCL's memory has no room to come back to.
    change(&stage, "spmd", &without.to_string())?;
    let refused = stage.sublet(&["resume", "spmd", "--library", "nccl", "--json"])?;
    let error = refused.json()?["error"].as_str().unwrap_or_default().to_owned();
    assert!(refused.code == Some(1) && error.contains("sublet budget"), "{error}");
    assert_eq!(held(&stage, "spmd", 0)?, without);
    change(&stage, "spmd", "none")?;
    stage.patiently(&["resume", "spmd", "--library", "nccl"])?;
    assert_eq!(job.finish()?, wanted);
    Ok(())
}

#[test]
fn a_number_is_the_machines_whatever_a_process_sees() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut second =
        stage.hoard("infer", &["--budget", "1=32MiB"], &[("CUDA_VISIBLE_DEVICES", "1")])?;
    let mut turned = stage.hoard("infer", &[], &[("CUDA_VISIBLE_DEVICES", "1,0")])?;
    let mut first = stage.hoard("infer", &[], &[("CUDA_VISIBLE_DEVICES", "0")])?;
    takes(&mut second, "create", 20 * MIB)?;
    takes(&mut turned, "create", 12 * MIB)?;
    is_full(&mut turned, "create", 2 * MIB)?;
    turned.do_it(&format!("create 1 {}", 40 * MIB))?;
    takes(&mut first, "create", 40 * MIB)?;
    assert_eq!(held(&stage, "infer", 1)?, 32 * MIB);
    assert_eq!(held(&stage, "infer", 0)?, 80 * MIB);
    // By its identity it is the same one.
    let name = gpu(&stage, "infer", 1)?["uuid"].as_str().unwrap_or_default().to_owned();
    let report = change(&stage, "infer", &format!("{name}=36MiB"))?;
    assert_eq!(report["budgets"], format!("{name}=36MiB"), "{report}");
    takes(&mut turned, "create", 4 * MIB)?;
    is_full(&mut second, "create", 2 * MIB)
}

#[test]
fn what_is_no_budget_or_not_the_tenants_is_refused_before_anything_starts() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let run = |tenant: &str, budget: &str| {
        stage.sublet(&["run", "--tenant", tenant, "--budget", budget, "--", "true"])
    };
    for budget in ["60PB", "0=0", "gpu=1GiB", "0=1GiB,0=2GiB", ""] {
        let refused = run("infer", budget)?;
        assert_eq!(refused.code, Some(2), "{budget}: {refused:?}");
    }
    let unknown = stage.sublet(&["budget", "nobody", "1GiB"])?;
    assert!(unknown.code == Some(1) && unknown.stderr.contains("nobody"), "{unknown:?}");
    let library = stage.files().preload.to_string_lossy().into_owned();
    let again = |tenant: &str, budget: &str| {
        let arguments =
            ["run", "--join", "--tenant", tenant, "--budget", budget, "--library", &library];
        stage.sublet(&[&arguments[..], &["--", "true"]].concat())
    };
    let mut one = stage.hoard("infer", &["--budget", "0=160MiB"], &[])?;
    takes(&mut one, "create", 2 * MIB)?;
    again("infer", "0=160MiB")?.succeeded()?;
    let refused = again("infer", "0=80MiB")?;
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.stderr.contains("sublet budget infer 0=80MiB"), "{refused:?}");
    let mut free = stage.hoard("train", &[], &[])?;
    takes(&mut free, "create", 2 * MIB)?;
    let refused = again("train", "1GiB")?;
    assert!(refused.stderr.contains("runs without a budget"), "{refused:?}");
    // Two that do not fit together may take turns: a word, and no more.
    let warned = again("other", "0=128MiB")?.succeeded()?;
    assert!(warned.stderr.contains("by turns, not together"), "{warned:?}");
    let fits = again("other", "0=64MiB")?.succeeded()?;
    assert!(!fits.stderr.contains("by turns"), "{fits:?}");
    // Set by hand and no budget: said, and nothing is bounded.
    let mut by_hand = stage.hoard("hand", &[], &[("CUDA_VISIBLE_DEVICES", "0")])?;
    takes(&mut by_hand, "create", 2 * MIB)?;
    let late = stage.sublet(&["budget", "hand", "1=1GiB"])?.succeeded()?;
    assert!(late.stdout.contains("no process of tenant 'hand' uses GPU 1 yet"), "{late:?}");
    // NVIDIA's management library tells how many there are.
    let words = ["budget", "hand", "7=1GiB"];
    let libraries = stage.libraries_with_nvml();
    let nowhere = stage.sublet_told("LD_LIBRARY_PATH", &libraries, &words)?.exited(2)?;
    assert!(nowhere.stderr.contains("there is no GPU 7 for a budget"), "{nowhere:?}");
    Ok(())
}

/// Children that outlive their parent, as workers of data loaders do.
#[test]
fn the_share_of_a_killed_process_is_free_again_though_its_child_lives() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = ["--budget", "0=64MiB"];
    let mut survivor = stage.hoard("infer", &options, &[])?;
    takes(&mut survivor, "create", 10 * MIB)?;
    let mut victim = stage.hoard("infer", &options, &[])?;
    takes(&mut victim, "create", 54 * MIB)?;
    let [child] = victim.do_it("leave")?.numbers()?;
    victim.kill()?;
    assert_eq!(held(&stage, "infer", 0)?, 10 * MIB);
    takes(&mut survivor, "create", 54 * MIB)?;
    kill(Pid::from_raw(child.try_into().expect("a process id")), Signal::SIGKILL)?;
    survivor.exits_well()
}

#[test]
fn a_budget_file_that_is_made_shorter_ends_nobody_and_is_made_again() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = ["--budget", "0=64MiB"];
    let mut one = stage.hoard("infer", &options, &[])?;
    let mut other = stage.hoard("infer", &options, &[])?;
    takes(&mut one, "create", 40 * MIB)?;
    let block = takes(&mut other, "plain", 10 * MIB)?;
    for text in ["", "x"] {
        fs::write(stage.run_dir_path().join("infer").join("budget"), text)?;
        frees(&mut other, block)?;
        takes(&mut other, "plain", 10 * MIB)?;
        until("both are counted again", TIMEOUT, || Ok(held(&stage, "infer", 0)? == 50 * MIB))?;
        is_full(&mut one, "create", 16 * MIB)?;
        stage.pause("infer")?;
        stage.resume("infer")?;
    }
    one.exits_well()?;
    other.exits_well()
}
