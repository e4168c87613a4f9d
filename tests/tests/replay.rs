//! NCCL's own driver calls, as they were recorded, by processes on one device: they survive pauses at any instant, and what
//! would be wrong is noticed.

#![expect(clippy::print_stdout, reason = "how many pauses there were")]

use std::path::Path;
use std::time::Duration;

use sublet_tests::{MIB, Outcome, Random, Stage, Trouble};

const PAUSES: u32 = 20;
/// A part of the channels that were recorded, and fewer communicators than on a GPU: 272 MiB in each process of two.
const ARGUMENTS: [&str; 2] = ["--width", "16"];
const COMMUNICATORS: &str = "8";
const CAPACITY_BYTES: u64 = 1024 * MIB;
/// Of a job. It goes on while a pause begins, so one pause takes several.
const STEPS: u32 = 3 * PAUSES + 4;
const GAP_MAX_MS: u64 = 300;
const END_TIMEOUT: Duration = Duration::from_mins(2);

/// Pauses at instants of a seed, in steps that end and make communicators.
fn survives(ranks: usize) -> Outcome {
    let stage = Stage::new(&[CAPACITY_BYTES])?;
    let mut random = Random::new();
    let steps = STEPS.to_string();
    let arguments = [&ARGUMENTS[..], &["--steps", &steps]].concat();
    let environment = [("COMMUNICATORS", COMMUNICATORS)];
    let (mut job, dir) =
        stage.lane_program_with(Some("replay"), "replay.py", ranks, &arguments, &environment)?;
    for _ in 0..PAUSES {
        // The next one that it says: others may have gone by.
        job.wait_for_line("step ")?;
        job.is_silent_for(Duration::from_millis(random.below(GAP_MAX_MS)));
        // An import whose owner has let it go at that instant stays, and no other memory.
        let paused = stage.at_least_in_part(&["pause", "replay", "--json"])?.json()?;
        for stay in paused["stays"].as_array().into_iter().flatten() {
            assert!(stay["reason"].as_str().is_some_and(|why| why.contains("let go by its owner")));
        }
        stage.resume("replay")?;
    }
    let status = job.ends_within(END_TIMEOUT)?;
    assert!(status.success(), "{status}: {}", job.stderr());
    println!("{ranks} processes: {PAUSES} pauses");
    for rank in 0..ranks {
        every_step_compared_the_same(&dir.join(format!("rank{rank}.txt")))?;
    }
    assert_eq!(stage.used_bytes(0)?, 0);
    Ok(())
}

/// A step compares all words, so their number never changes.
fn every_step_compared_the_same(values: &Path) -> Outcome {
    let text = std::fs::read_to_string(values)?;
    let mut lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.pop(), Some(format!("communicators {COMMUNICATORS}").as_str()));
    assert_eq!(lines.len(), usize::try_from(STEPS)?);
    lines.dedup();
    assert_eq!(lines.len(), 1, "{text}");
    let [words] = lines[..] else { return Err(Trouble::new("no values")) };
    assert_ne!(words, "0");
    Ok(())
}

#[test]
fn two_processes_keep_every_byte_handle_and_address_through_pauses() -> Outcome {
    survives(2)
}

#[test]
fn four_processes_keep_every_byte_handle_and_address_through_pauses() -> Outcome {
    survives(4)
}

/// What rank 0 does wrong is said by one of the two.
fn is_noticed(fault: &str, said: &str) -> Outcome {
    let stage = Stage::new(&[CAPACITY_BYTES])?;
    let arguments = [&ARGUMENTS[..], &["--steps", "8"]].concat();
    let environment = [("REPLAY_FAULT", fault), ("COMMUNICATORS", "3")];
    let (mut job, _dir) =
        stage.lane_program_with(Some("replay"), "replay.py", 2, &arguments, &environment)?;
    let status = job.ends_within(END_TIMEOUT)?;
    let errors = job.stderr();
    assert!(!status.success() && errors.contains(said), "{status}: {errors}");
    Ok(())
}

#[test]
fn a_changed_byte_of_an_import_is_noticed() -> Outcome {
    is_noticed("byte", "1 of 2621440 words differ")
}

#[test]
fn an_import_at_another_address_is_noticed() -> Outcome {
    is_noticed("address", "nothing is mapped at")
}

#[test]
fn a_communicator_without_memory_is_noticed() -> Outcome {
    is_noticed("left out", "nothing is mapped at")
}
