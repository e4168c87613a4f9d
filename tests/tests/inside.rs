//! Pausing and resuming a job from inside, as its own processes ask for it.

use sublet_tests::{JobOptions, MIB, Outcome, Stage, statistic};

const CAPACITIES: [u64; 2] = [128 * MIB; 2];

#[test]
fn tenant_pauses_when_every_rank_has_asked() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    let before_bytes = stage.used_bytes(1)?;
    for _ in 0..3 {
        job.all("pause inside")?;
        assert!(stage.used_bytes(1)? <= 2 * MIB);
        for answer in job.all("is paused")? {
            assert_eq!(answer.text, "1");
        }
        // Asking again changes nothing and returns immediately.
        job.all("pause inside")?;
        job.all("resume inside")?;
        assert_eq!(stage.used_bytes(1)?, before_bytes);
        job.works()?;
    }
    job.exit()
}

#[test]
fn rank_that_does_not_ask_is_named_and_nothing_changes() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = JobOptions::new("train", 2).with("SUBLET_WAIT", "10s");
    let mut job = stage.connected_job(&options)?;
    let missing_pid = job.ranks[1].pid();
    let answer = job.ranks[0].ask("pause inside")?;
    assert!(!answer.is_ok);
    let why = format!("process {missing_pid} has not called ncclPause in time");
    assert!(answer.text.starts_with('1') && answer.text.contains(&why), "{}", answer.text);
    assert_eq!(stage.states("train")?, ["active"]);
    job.works()?;
    // And it still works when all ask.
    job.all("pause inside")?;
    job.all("resume inside")?;
    job.verify()?;
    job.exit()
}

#[test]
fn one_rank_pauses_for_all() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    job.ranks[1].do_it("pause-all 0")?;
    assert_eq!(stage.states("train")?, ["paused"]);
    assert!(stage.used_bytes(0)? <= 2 * MIB);
    // What is so already is a success.
    job.ranks[0].do_it("pause-all 0")?;
    job.ranks[0].do_it("resume-all 0")?;
    job.works_and_exits()
}

#[test]
fn statistics_from_inside_and_outside_are_the_same() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    let inside = job.ranks[0].do_it("stats")?.text;
    let inside: serde_json::Value = serde_json::from_str(&inside)?;
    let members = stage.members("train")?;
    let outside = members.iter().find(|member| member["member"]["pid"] == job.ranks[0].pid());
    let outside = outside.expect("the rank is a member");
    assert_eq!(inside["pool"], outside["pool"]);

    let printed = job.ranks[0].do_it("memory stats")?.printed;
    let total = format!(
        "sublet: total own={} resident={} imported={}",
        statistic(outside, "own_bytes"),
        statistic(outside, "resident_bytes"),
        statistic(outside, "imported_bytes")
    );
    assert_eq!(printed.last(), Some(&total));
    let scratch = "library=rank tag=scratch contents=Discard own=4194304";
    assert!(printed.iter().any(|line| line.contains(scratch)), "{printed:#?}");
    job.exit()
}
