//! Memory that several processes hold: tickets good and bad, and what cannot be shared or paused.

use sublet_tests::{Job, JobOptions, MIB, Outcome, Stage, statistic};

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

#[test]
fn tickets_can_be_redeemed_after_a_pause() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = stage.job(&JobOptions::new("train", 3))?;
    stage.pause("train")?;
    stage.resume("train")?;
    job.connect()?;
    job.works()?;
    stage.pause("train")?;
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
    job.works_and_exits()
}

#[test]
fn memory_that_nccl_shares_by_legacy_ipc_stays_and_is_named() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..2])?;
    let mut job = stage.connected_job(&JobOptions::new("train", 2))?;
    job.all(&format!("allocate-as-nccl {}", 6 * MIB))?;
    let paused = stage.patiently(&["pause", "train", "--json"])?.json()?;
    let left_bytes = stage.used_bytes(0)?;
    assert!((6 * MIB..=8 * MIB).contains(&left_bytes), "{left_bytes} bytes stay");
    let listed = stage.sublet(&["ps"])?.succeeded()?.stdout;
    let hint =
        "6 MiB in 1 allocation stay during a pause: NCCL shares plain allocations by legacy IPC";
    assert!(listed.contains(hint), "{listed}");
    // Both name the line that undoes it.
    for told in [listed, paused["report"]["notes"].to_string()] {
        assert!(told.contains("legacy IPC") && told.contains("NCCL_CUMEM_ENABLE=1"), "{told}");
    }
    stage.resume("train")?;
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
