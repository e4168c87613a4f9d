//! Memory that several processes hold: tickets good and bad, and what cannot be shared or paused.

use std::fs;
use std::path::PathBuf;

use nix::sys::signal::Signal;
use sublet_tests::{Job, JobOptions, MIB, Outcome, Stage, Trouble, statistic};

const CAPACITIES: [u64; 3] = [128 * MIB; 3];
const REFUSED: &str = "CUDA_ERROR_INVALID_VALUE";

#[test]
fn every_import_is_counted_once_by_its_owner_and_by_its_importers() -> Outcome {
    let (stage, job) = Stage::with_train(&CAPACITIES, 3)?;
    for member in stage.members("train")? {
        // 3 inboxes, the window, the ring buffer, 2 statics; tensors of 4, 2, 2, 2 MiB; scratch of 4.
        assert_eq!(statistic(&member, "own_bytes"), (7 * 2 + 4 + 3 * 2 + 4) * MIB);
        // Of 2 peers each: an inbox, a window, a ring buffer; of the next one: the shared tensor. The own
        // inbox, opened by its own ticket, is no import.
        assert_eq!(statistic(&member, "imported_bytes"), (2 * 3 + 1) * 2 * MIB);
        assert_eq!(statistic(&member, "imported_count"), 7);
    }
    job.exit()
}

#[test]
fn tickets_that_are_not_what_they_seem_are_refused_for_their_reason() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..2])?;
    let mut job = stage.connected_job(&JobOptions::new("train", 2))?;
    for good in ["none", "late"] {
        job.ranks[0].do_it(&format!("forge {good}"))?;
    }
    for (how, reason) in [
        ("stale", "the ticket is stale"),
        ("short", "a Sublet ticket of 40 bytes"),
        ("newer", "a Sublet ticket of version 99"),
        ("unknown", "the ticket is stale"),
        ("tenant", "the ticket is of tenant xrain"),
        ("owner", "could not be asked"),
    ] {
        let answer = job.ranks[0].ask(&format!("forge {how}"))?;
        assert!(!answer.is_ok && answer.text == REFUSED, "{how}: {answer:?}");
        job.ranks[0].complained(reason)?;
    }
    let stale = job.ranks[0].stderr().matches("the ticket is stale").count();
    assert_eq!(stale, 2, "one whose allocation was freed, and one that its owner never had");
    // None of it left anything behind.
    stage.pause("train")?;
    assert!(stage.used_bytes(0)? <= 2 * MIB);
    stage.resume("train")?;
    job.works_and_exits()
}

/// The socket of process `pid` of `train`.
fn socket_of(stage: &Stage, pid: u32) -> Outcome<PathBuf> {
    let members = stage.members("train")?;
    let info = members.iter().map(|member| &member["member"]);
    let found = info.filter(|info| info["pid"] == pid).find_map(|info| info["id"].as_str());
    let name = format!("{}.sock", found.ok_or_else(|| Trouble::new("no such process"))?);
    Ok(stage.run_dir_path().join("train").join(name))
}

#[test]
fn a_pause_waits_for_a_process_whose_socket_has_lost_its_name() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    for rank in 0..2 {
        fs::remove_file(socket_of(&stage, job.ranks[rank].pid())?)?;
        stage.pause("train")?;
        assert_eq!(stage.states("train")?, ["paused"]);
        stage.resume("train")?;
        job.works()?;
    }
    job.exit()
}

#[test]
fn a_process_that_is_stopped_and_has_no_name_is_not_taken_for_none() -> Outcome {
    let (stage, job) = Stage::with_train(&CAPACITIES, 2)?;
    let stopped = job.ranks[1].pid();
    let socket = socket_of(&stage, stopped)?;
    let refused = |arguments: &[&str]| -> Outcome {
        let ran = stage.sublet(arguments)?.exited(1)?;
        assert!(ran.stderr.contains(&format!("continue it (kill -CONT {stopped})")), "{ran:#?}");
        Ok(())
    };
    job.ranks[1].stop()?;
    fs::remove_file(&socket)?;
    refused(&["pause", "train"])?;
    job.ranks[1].signal(Signal::SIGCONT)?;
    stage.pause("train")?;
    job.ranks[1].stop()?;
    // It may have made it again.
    let _gone = fs::remove_file(&socket);
    refused(&["resume", "train"])?;
    job.ranks[1].signal(Signal::SIGCONT)?;
    stage.resume("train")?;
    job.works_and_exits()
}

#[test]
fn exports_and_imports_made_while_others_pause_wait_and_succeed() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = stage.job(&JobOptions::new("train", 3))?;
    stage.pause("train")?;
    job.say("connect")?;
    for rank in &mut job.ranks {
        assert!(rank.is_silent_for(std::time::Duration::from_millis(30)), "connected while paused");
    }
    stage.resume("train")?;
    job.answers()?;
    job.works()?;
    stage.pause("train")?;
    stage.resume("train")?;
    job.works_and_exits()
}

/// Two ranks of a communicator of `ranks` ranks. Under `NCCL_CUMEM_ENABLE=0` NCCL allocates plain memory for it.
fn job_with_plain_memory_of_nccl(stage: &Stage, name: &str, ranks: u32) -> Outcome<Job> {
    let options = JobOptions::new("train", 2);
    let options = options.with("LD_LIBRARY_PATH", &stage.libraries_with_nvml());
    let mut job = stage.connected_job(&options)?;
    for (rank, process) in job.ranks.iter_mut().enumerate() {
        process.do_it(&format!("communicate {name} {rank} {ranks}"))?;
    }
    job.all(&format!("allocate-as-nccl {}", 6 * MIB))?;
    Ok(job)
}

/// A name for a communicator that no other test has.
fn communicator(stage: &Stage) -> String {
    let place = format!("{stage:p} {}", std::process::id());
    format!("c{:x}", place.bytes().fold(7_u64, |sum, byte| sum.wrapping_mul(131) + u64::from(byte)))
}

/// A process outside Sublet that uses the second GPU.
fn outside(stage: &Stage) -> Outcome<Job> {
    let options = JobOptions {
        is_preloaded: false,
        is_plain: true,
        first_device: 1,
        ..JobOptions::new("outside", 1)
    };
    let mut outside = stage.job(&options)?;
    outside.all(&format!("allocate {}", 4 * MIB))?;
    Ok(outside)
}

/// Pauses the job and resumes it: the bytes left on the first GPU meanwhile, and the notes.
fn left_bytes(stage: &Stage) -> Outcome<(u64, String)> {
    let paused = stage.patiently(&["pause", "train", "--json"])?.json()?;
    let left = stage.used_bytes(0)?;
    stage.resume("train")?;
    Ok((left, paused["report"]["notes"].to_string()))
}

#[test]
fn plain_memory_of_nccl_leaves_too() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..2])?;
    // Neither another tenant's process nor one outside is a rank.
    let mut other = stage.hoard("infer", &[], &[])?;
    other.do_it(&format!("create 1 {}", 8 * MIB))?;
    let outside = outside(&stage)?;
    let job = job_with_plain_memory_of_nccl(&stage, &communicator(&stage), 2)?;
    let (left, notes) = left_bytes(&stage)?;
    // What the rank has in plain memory under 1 MiB stays with the driver.
    assert!(left <= 2 * MIB && !notes.contains("NCCL"), "{left}: {notes}");
    drop(outside);
    job.works_and_exits()
}

#[test]
fn plain_memory_of_nccl_leaves_where_ranks_are_on_another_machine() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..2])?;
    let job = job_with_plain_memory_of_nccl(&stage, &communicator(&stage), 4)?;
    let (left, notes) = left_bytes(&stage)?;
    assert!(left <= 2 * MIB && !notes.contains("NCCL"), "{left}: {notes}");
    job.works_and_exits()
}

#[test]
fn plain_memory_that_nccl_may_share_with_a_program_outside_stays_and_is_named() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..2])?;
    let outside = outside(&stage)?;
    let job = job_with_plain_memory_of_nccl(&stage, &communicator(&stage), 3)?;
    let listed = stage.sublet(&["ps"])?.succeeded()?.stdout;
    let hint = "6 MiB in 1 allocation stay during a pause: NCCL may share it by CUDA IPC";
    assert!(listed.contains(hint), "{listed}");
    let (left, notes) = left_bytes(&stage)?;
    assert!((6 * MIB..=8 * MIB).contains(&left), "{left} bytes stay");
    // What undoes it is named there. Less than 16 MiB makes room for nobody, and a pause does not tell it.
    assert!(listed.contains("`sublet run`") && listed.contains("NCCL_CUMEM_ENABLE=1"), "{listed}");
    assert!(!notes.contains("CUDA IPC"), "{notes}");
    drop(outside);
    job.works_and_exits()
}

#[test]
fn plain_memory_that_nccl_shares_with_another_tenant_stays() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..2])?;
    let name = communicator(&stage);
    let options = JobOptions { first_device: 1, ..JobOptions::new("infer", 1) };
    let mut other = stage.job(&options)?;
    other.ranks[0].do_it(&format!("communicate {name} 2 3"))?;
    let job = job_with_plain_memory_of_nccl(&stage, &name, 3)?;
    let (left, _notes) = left_bytes(&stage)?;
    assert!((6 * MIB..=8 * MIB).contains(&left), "{left} bytes stay");
    job.works_and_exits()
}

#[test]
fn sums_of_all_processes_are_what_the_driver_says() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..2])?;
    let mut job = stage.connected_job(&JobOptions::new("train", 2))?;
    let sums_agree = |job: &mut Job, what: &str| -> Outcome {
        for (rank, device) in job.ranks.iter().zip(0..) {
            let members = stage.members("train")?;
            let member = members.iter().find(|member| member["member"]["pid"] == rank.pid());
            let member = member.expect("the rank is a member");
            let listed = |name: &str| statistic(member, name);
            let pinned = member["pool"]["devices"].as_array().into_iter().flatten();
            let pinned = pinned.flat_map(|found| found["pinned"].as_array().into_iter().flatten());
            let pinned_bytes: u64 = pinned.filter_map(|row| row["bytes"].as_u64()).sum();
            let used_bytes = stage.used_bytes(device)?;
            let native_bytes = pinned_bytes - listed("pinned_bytes");
            let most_bytes = listed("resident_bytes") + native_bytes.next_multiple_of(2 * MIB);
            let least_bytes = listed("resident_bytes");
            assert!(
                (least_bytes..=most_bytes).contains(&used_bytes),
                "{what}: {used_bytes}: {member:#}"
            );
            assert!(listed("resident_bytes") <= listed("own_bytes"), "{what}: {member:#}");
        }
        Ok(())
    };
    sums_agree(&mut job, "active")?;
    job.all("free buffer")?;
    sums_agree(&mut job, "after a free")?;
    stage.pause("train")?;
    sums_agree(&mut job, "paused")?;
    stage.resume("train")?;
    job.all(&format!("allocate {}", 5 * MIB))?;
    sums_agree(&mut job, "after an allocation")?;
    job.exit()
}
