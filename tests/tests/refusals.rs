//! What cannot be done now: it is said in one line, the exit code is not 0, and nothing is lost.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use sublet_tests::{Job, JobOptions, MIB, Outcome, Ran, Stage};

const CAPACITIES: [u64; 2] = [128 * MIB; 2];

/// The command refused, in one line with these words, and the job goes on.
fn refused(stage: &Stage, arguments: &[&str], words: &[&str]) -> Outcome<Ran> {
    let ran = stage.sublet(arguments)?.exited(1)?;
    assert_eq!(ran.stderr.lines().count(), 1, "{ran:#?}");
    for word in words {
        assert!(ran.stderr.contains(word), "no '{word}' in {ran:#?}");
    }
    assert!(!ran.stderr.contains(" 0 B are outside"), "{ran:#?}");
    Ok(ran)
}

fn goes_on(stage: &Stage, job: &mut Job) -> Outcome {
    assert_eq!(stage.states("train")?, ["active"]);
    job.works()?;
    stage.pause("train")?;
    stage.resume("train")?;
    job.works()?;
    Ok(())
}

#[test]
fn pause_during_a_capture_waits_for_its_end_and_is_refused_in_the_end() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    job.ranks[1].do_it("capture begin")?;
    let pid = format!("process {} is capturing 1 stream", job.ranks[1].pid());
    let words = [pid.as_str(), "The tenant is active as before"];
    refused(&stage, &["pause", "train", "--timeout", "5s"], &words)?;
    job.ranks[1].do_it("capture end")?;
    goes_on(&stage, &mut job)?;
    job.exit()
}

#[test]
fn process_that_is_stopped_is_named_with_what_continues_it() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    job.ranks[1].stop()?;
    let pid = job.ranks[1].pid();
    let words = [
        &format!("pause of 'train' not started: process {pid} ("),
        &format!(
            ") does not answer; it is stopped (SIGSTOP): continue it (kill -CONT {pid}) or end it; nothing was changed"
        ),
    ];
    refused(&stage, &["pause", "train"], &words.map(String::as_str))?;
    job.ranks[1].signal(Signal::SIGCONT)?;
    goes_on(&stage, &mut job)?;
    job.exit()
}

#[test]
fn kernel_that_waits_for_ever_lets_the_pause_time_out() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    job.ranks[0].do_it("spin")?;
    let words = ["was not idle in time: GPU 0 has work left", "The tenant is active as before"];
    refused(&stage, &["pause", "train", "--timeout", "5s"], &words)?;
    job.ranks[0].do_it("release spin")?;
    goes_on(&stage, &mut job)?;
    job.exit()
}

#[test]
fn host_without_room_refuses_the_pause() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = JobOptions::new("train", 2).with("SUBLET_HOST_BYTES_MAX", "1048576");
    let job = stage.connected_job(&options)?;
    let words = [
        "of 2 process(es) needs",
        "SUBLET_HOST_BYTES_MAX leaves 1048576: raise it",
        "The tenant is active as before",
    ];
    refused(&stage, &["pause", "train"], &words)?;
    assert_eq!(stage.states("train")?, ["active"]);
    for member in stage.members("train")? {
        assert_eq!(member["pool"]["host_arena_bytes"], 0, "host memory was taken: {member:#}");
    }
    job.works_and_exits()
}

#[test]
fn host_with_room_for_each_process_alone_refuses_all_of_them_together() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let alone = stage.connected_job(&JobOptions::new("train", 2))?;
    stage.pause("train")?;
    let members = stage.members("train")?;
    let held = members.iter().filter_map(|member| member["pool"]["host_arena_bytes"].as_u64());
    let held: Vec<u64> = held.collect();
    stage.resume("train")?;
    alone.exit()?;
    let all_bytes: u64 = held.iter().sum();
    let limit = all_bytes - 1;
    assert!(held.len() == 2 && held.iter().all(|bytes| (1..limit).contains(bytes)), "{held:?}");
    let options = JobOptions::new("train", 2).with("SUBLET_HOST_BYTES_MAX", &limit.to_string());
    let job = stage.connected_job(&options)?;
    let words = [
        format!("of 2 process(es) needs {all_bytes} bytes of host memory"),
        format!("leaves {limit}"),
    ];
    refused(&stage, &["pause", "train"], &words.each_ref().map(String::as_str))?;
    job.works_and_exits()
}

/// The address space of a rank is limited after its start, so that the map for saved contents is refused.
#[test]
fn system_that_refuses_host_memory_refuses_the_pause() -> Outcome {
    let stage = Stage::new(&[512 * MIB; 2])?;
    let options = JobOptions { tensor_mib: 136, ..JobOptions::new("train", 2) };
    let mut job = stage.connected_job(&options)?;
    let pid = job.ranks[1].pid().to_string();
    let limit = |limit: &str| -> Outcome {
        let limits = format!("--as={limit}:");
        let done = Command::new("prlimit").args(["--pid", &pid, &limits]).status()?;
        assert!(done.success(), "prlimit is part of util-linux");
        Ok(())
    };
    // Room for threads and small things, and not for a piece of host memory.
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let size_kib = size.and_then(|text| text.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    let size_bytes = size_kib.expect("a size in kB") * 1024;
    limit(&(size_bytes + 160 * MIB).to_string())?;
    let words = ["the system refused 268435456 bytes of host memory", "ulimit -v"];
    refused(&stage, &["pause", "train"], &words)?;
    limit("unlimited")?;
    for member in stage.members("train")? {
        assert_eq!(member["pool"]["host_arena_bytes"], 0, "host memory stays: {member:#}");
    }
    goes_on(&stage, &mut job)?;
    job.exit()
}

/// The simulated driver opens a file for what it creates, so a process that may not raise its limit is only shown.
#[test]
fn process_that_may_open_no_more_files_is_shown_resumed_and_paused() -> Outcome {
    for may_raise in [true, false] {
        let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
        stage.pause("train")?;
        for rank in &mut job.ranks {
            let limits = if may_raise { "--nofile=256:" } else { "--nofile=256" };
            let pid = rank.pid().to_string();
            let done = Command::new("prlimit").args(["--pid", &pid, limits]).status()?;
            assert!(done.success(), "prlimit is part of util-linux");
            rank.do_it("fill files")?;
        }
        assert_eq!(stage.states("train")?, ["paused"]);
        if !may_raise {
            job.all("fill files")?;
        }
        stage.resume("train")?;
        stage.pause("train")?;
        stage.resume("train")?;
        job.works_and_exits()?;
    }
    Ok(())
}

#[test]
fn device_without_room_refuses_the_resume_until_it_has() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = JobOptions { tensor_mib: 48, ..JobOptions::new("train", 2) };
    let job = stage.connected_job(&options)?;
    stage.pause("train")?;
    let other = stage.job(&JobOptions { tensor_mib: 80, ..JobOptions::new("infer", 1) })?;

    let ran = refused(
        &stage,
        &["resume", "train"],
        &["GPU-", "The tenant is paused, contents kept as before"],
    )?;
    // The other tenant is named with what it holds there.
    let words =
        [" free and ", " more: tenant 'infer' holds ", " [gpu-full]; next: sublet switch train\n"];
    for word in words {
        assert!(ran.stderr.contains(word), "no '{word}' in {ran:#?}");
    }
    let document = stage.sublet(&["resume", "train", "--json"])?.exited(1)?.json()?;
    let missing_bytes = document["missing_device_bytes"].as_u64().expect("a number of bytes");
    assert!((MIB..CAPACITIES[0]).contains(&missing_bytes), "{document:#}");
    assert_eq!(document["retryable"], true);
    let holder = &document["shortages"][0]["holders"][0];
    assert_eq!(holder["tenant"], "infer", "{document:#}");
    assert!(holder["bytes"].as_u64().is_some_and(|bytes| bytes >= 80 * MIB), "{document:#}");
    assert_eq!(stage.states("train")?, ["paused"]);
    assert!(stage.used_bytes(1)? <= 2 * MIB, "the failed resume keeps memory");

    other.exit()?;
    stage.resume("train")?;
    job.works_and_exits()
}

#[test]
fn resume_waits_for_memory_when_told_to() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = JobOptions { tensor_mib: 48, ..JobOptions::new("train", 2) };
    let job = stage.connected_job(&options)?;
    stage.pause("train")?;
    let other = stage.job(&JobOptions { tensor_mib: 80, ..JobOptions::new("infer", 1) })?;
    std::thread::scope(|scope| -> Outcome {
        let resume = scope.spawn(|| stage_resume_waiting(&stage));
        other.exit()?;
        resume.join().expect("the thread ends")
    })?;
    job.works_and_exits()
}

fn stage_resume_waiting(stage: &Stage) -> Outcome {
    stage.patiently(&["resume", "train", "--wait=3m"]).map(drop)
}

#[test]
fn process_outside_sublet_is_counted_as_such() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..1])?;
    let options = JobOptions { tensor_mib: 48, ..JobOptions::new("train", 1) };
    let job = stage.connected_job(&options)?;
    stage.pause("train")?;
    let stranger = JobOptions { tensor_mib: 80, is_preloaded: false, ..JobOptions::new("x", 1) };
    let stranger = stage.job(&stranger)?;
    let document = stage.sublet(&["resume", "train", "--json"])?.exited(1)?.json()?;
    let shortage = &document["shortages"][0];
    // What the driver gives in small pieces for graphs and arrays is its own, and stays.
    let holders = shortage["holders"].as_array().cloned().unwrap_or_default();
    let is_small = |holder: &serde_json::Value| {
        holder["tenant"] == "train" && holder["bytes"].as_u64().is_some_and(|bytes| bytes < MIB)
    };
    assert!(holders.iter().all(is_small), "{document:#}");
    assert!(shortage["outside_bytes"].as_u64().is_some_and(|bytes| bytes >= 80 * MIB));
    stranger.exit()?;
    stage.resume("train")?;
    job.exit()
}

#[test]
fn interrupted_wait_says_what_it_waited_for_and_leaves_the_tenant_paused() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = JobOptions { tensor_mib: 48, ..JobOptions::new("train", 2) };
    let job = stage.connected_job(&options)?;
    stage.pause("train")?;
    let other = stage.job(&JobOptions { tensor_mib: 80, ..JobOptions::new("infer", 1) })?;
    let mut command = stage.command(&stage.files().sublet);
    let mut waiting = command
        .args(["resume", "train", "--wait"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    let stderr = waiting.stderr.take().expect("a pipe");
    // The first line comes when the first try has failed; the command's end would end the pipe.
    BufReader::new(stderr).read_line(&mut line)?;
    assert!(line.contains("tenant 'train' waits for"), "{line}");
    assert!(line.contains("tenant 'infer' holds"), "{line}");
    let pid = Pid::from_raw(i32::try_from(waiting.id()).expect("a process id"));
    kill(pid, Signal::SIGINT)?;
    assert!(!waiting.wait()?.success());

    assert_eq!(stage.states("train")?, ["paused"]);
    other.exit()?;
    stage.resume("train")?;
    job.works_and_exits()
}

#[test]
fn swap_waits_for_memory_when_told_to() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = JobOptions { tensor_mib: 48, ..JobOptions::new("train", 2) };
    let mut job = stage.connected_job(&options)?;
    stage.pause("train")?;
    let small = stage.job(&JobOptions { first_device: 1, ..JobOptions::new("small", 1) })?;
    let other = stage.job(&JobOptions { tensor_mib: 80, ..JobOptions::new("infer", 1) })?;
    std::thread::scope(|scope| -> Outcome {
        let swap =
            scope.spawn(|| stage.patiently(&["swap", "small", "train", "--wait=3m"]).map(drop));
        other.exit()?;
        swap.join().expect("the thread ends")
    })?;
    assert_eq!(stage.states("small")?, ["paused"]);
    job.works()?;
    stage.pause("train")?;
    stage.resume("small")?;
    small.exit()
}

/// Only root can become another user, and come back.
#[test]
fn a_process_that_has_changed_its_user_is_named_with_that() -> Outcome {
    if !geteuid().is_root() {
        return Ok(());
    }
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = stage.hoard("train", &[], &[])?;
    job.do_it(&format!("plain 0 {}", 4 * MIB))?;
    job.do_it("user 1000")?;
    let words =
        ["it runs as user 1000 now, and this process as user 0", "before it first uses a GPU"];
    refused(&stage, &["pause", "train"], &words)?;
    job.do_it("user 0")?;
    stage.pause("train")?;
    stage.resume("train")?;
    job.exits_well()
}

#[test]
fn a_command_that_was_carried_out_says_so_where_its_output_cannot_be_written() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 1)?;
    let to_full = |arguments: &[&str]| -> Outcome<(Option<i32>, String)> {
        let mut command = stage.command(&stage.files().sublet);
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full")?;
        let ran = command.args(arguments).stdin(Stdio::null()).stdout(full).output()?;
        Ok((ran.status.code(), String::from_utf8_lossy(&ran.stderr).into_owned()))
    };
    for (arguments, state) in [
        (&["pause", "train"][..], "paused"),
        (&["resume", "train"], "active"),
        (&["pause", "train", "--json"], "paused"),
        (&["switch", "train", "--json"], "active"),
        (&["budget", "train", "64MiB"], "active"),
    ] {
        let (code, said) = to_full(arguments)?;
        assert_eq!(code, Some(3), "{arguments:?}: {said}");
        assert!(said.contains("the command was carried out: `sublet ps` shows"), "{said}");
        assert_eq!(stage.states("train")?, [state], "{arguments:?}");
    }
    for arguments in [
        &["ps"][..],
        &["budget", "train"],
        &["pause", "train", "--dry-run"],
        &["switch", "train", "--dry-run"],
        &["pause", "nobody", "--json"],
    ] {
        let (code, said) = to_full(arguments)?;
        assert_eq!(code, Some(1), "{arguments:?}: {said}");
        assert!(!said.contains("carried out"), "{arguments:?}: {said}");
    }
    job.works()?;
    job.exit()
}

#[test]
fn unknown_tenant_is_named_with_those_there_are() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    refused(
        &stage,
        &["pause", "nobody"],
        &["there is no tenant 'nobody'", "no tenant is running"],
    )?;
    let job = stage.job(&JobOptions::new("train", 1))?;
    for command in ["pause", "resume", "stats"] {
        refused(&stage, &[command, "nobody"], &["there is no tenant 'nobody'", "train"])?;
    }
    job.exit()
}
