//! Next commands of refusals are typed: each succeeds, or fails for another reason.

use sublet_tests::{Job, JobOptions, MIB, Outcome, Ran, Stage, Trouble};

const CAPACITIES: [u64; 1] = [128 * MIB];

/// The command that a refusal names, and the word in brackets for why it was refused.
fn told(ran: &Ran) -> Outcome<(Vec<String>, String)> {
    let said = ran.stderr.trim_end();
    let next = said.split_once("; next: ").map(|(_, command)| command);
    let command =
        next.or_else(|| said.split('`').nth(1).filter(|text| text.starts_with("sublet ")));
    let command = command.ok_or_else(|| Trouble::new(format!("no command in {ran:#?}")))?;
    let code = said.rsplit_once('[').and_then(|(_, rest)| rest.split_once(']'));
    let code = code.map(|(code, _)| code.to_owned()).unwrap_or_default();
    Ok((command.split(' ').skip(1).map(str::to_owned).collect(), code))
}

/// `arguments` are refused for `why`, and `next` is told. It is typed, `meanwhile` somebody does what it waits for, and it succeeds.
fn walk(
    stage: &Stage,
    arguments: &[&str],
    why: &str,
    next: &str,
    meanwhile: impl FnOnce() -> Outcome,
) -> Outcome<Ran> {
    // With the management library, which knows processes outside.
    let libraries = stage.libraries_with_nvml();
    let refused = stage.sublet_told("LD_LIBRARY_PATH", &libraries, arguments)?.exited(1)?;
    let (command, code) = told(&refused)?;
    assert_eq!((command.join(" ").as_str(), code.as_str()), (next, why), "{refused:#?}");
    let words: Vec<&str> = command.iter().map(String::as_str).collect();
    let typed = std::thread::scope(|scope| -> Outcome<Ran> {
        let typed = scope.spawn(|| stage.sublet(&words));
        meanwhile()?;
        typed.join().map_err(|_| Trouble::new("the thread has panicked"))?
    })?;
    typed.exited(0)?;
    Ok(refused)
}

const NOTHING: fn() -> Outcome = || Ok(());

fn of(stage: &Stage, tenant: &str, tensor_mib: usize) -> Outcome<Job> {
    stage.job(&JobOptions { tensor_mib, ..JobOptions::new(tenant, 1) })
}

fn outside(stage: &Stage, tensor_mib: usize) -> Outcome<Job> {
    stage.job(&JobOptions { tensor_mib, is_preloaded: false, ..JobOptions::new("x", 1) })
}

#[test]
fn memory_of_another_tenant_is_switched_and_memory_of_a_program_outside_is_waited_for() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let job = of(&stage, "job", 48)?;
    stage.pause("job")?;
    let other = of(&stage, "other", 80)?;
    walk(&stage, &["resume", "job"], "gpu-full", "switch job", NOTHING)?;
    stage.pause("job")?;
    stage.resume("other")?;
    other.exit()?;

    for command in ["resume", "switch"] {
        let stranger = outside(&stage, 90)?;
        let pid = format!("process {} (", stranger.ranks[0].pid());
        let refused =
            walk(&stage, &[command, "job"], "gpu-full", "resume job --wait", || stranger.exit())?;
        assert!(refused.stderr.contains(&pid), "no {pid} in {refused:#?}");
        assert!(!refused.stderr.contains("contexts of 'job'"), "{refused:#?}");
        stage.pause("job")?;
    }
    let small = of(&stage, "small", 8)?;
    let stranger = outside(&stage, 64)?;
    let next = "swap small job --wait";
    walk(&stage, &["swap", "small", "job"], "gpu-full", next, || stranger.exit())?;
    stage.pause("job")?;
    for (tenant, job) in [("small", small), ("job", job)] {
        stage.resume(tenant)?;
        job.exit()?;
    }
    Ok(())
}

#[test]
fn a_tenant_that_is_larger_than_the_gpu_is_told_so_and_its_processes_are_listed() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let old = of(&stage, "job", 80)?;
    stage.pause("job")?;
    let new = of(&stage, "job", 80)?;
    stage.pause("job")?;
    let larger = "in all";
    for command in ["resume", "switch"] {
        let refused = walk(&stage, &[command, "job"], "gpu-full", "ps -v", NOTHING)?;
        assert!(refused.stderr.contains(larger), "{refused:#?}");
        assert!(refused.stderr.contains("end some of "), "{refused:#?}");
    }
    let listed = stage.sublet(&["ps", "-v"])?.exited(0)?;
    for rank in old.ranks.iter().chain(&new.ranks) {
        assert!(listed.stdout.contains(&rank.pid().to_string()), "{listed:#?}");
    }
    drop(new);
    stage.patiently(&["resume", "job"])?;
    old.exit()
}

#[test]
fn other_refusals_name_a_command_that_can_be_typed_now() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = of(&stage, "job", 8)?;
    walk(&stage, &["pause", "nobody"], "no-such-tenant", "ps", NOTHING)?;
    walk(&stage, &["pause", "job", "--tag", "kv"], "unknown-tag", "ps -v", NOTHING)?;
    job.ranks[0].do_it("capture begin")?;
    let next = "pause job --timeout 2m";
    let rank = &mut job.ranks[0];
    walk(&stage, &["pause", "job", "--timeout", "1s"], "in-capture", next, || {
        rank.do_it("capture end").map(drop)
    })?;
    stage.resume("job")?;
    job.exit()
}
