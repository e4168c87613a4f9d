//! `sublet pause JOB --tag TAG`: real processes stand still without that memory, or run on where they have agreed.

use serde_json::Value;
use sublet_tests::{Job, MIB, Outcome, Stage};

const CAPACITIES: [u64; 2] = [512 * MIB; 2];
const HELD: u64 = 4 * MIB;
/// As `sublet.h` has them.
const KEEP: u32 = 0;
const RUNS_WITHOUT: u32 = 256;

/// Has the second rank hold memory of a tag.
fn hold(job: &mut Job, tag: &str, contents: u32) -> Outcome {
    job.ranks[1].do_it(&format!("hold {tag} {contents} {}", HELD / MIB)).map(drop)
}

#[test]
fn work_on_memory_of_a_tag_waits_while_somebody_else_has_it_paused() -> Outcome {
    let stage = Stage::new(&[512 * MIB; 3])?;
    let mut process = stage.process_on_all_devices(Some("all"))?;
    for (tag, back) in [("kept", &["--tag", "kept"][..]), ("filed", &[])] {
        process.do_it("run")?;
        let paused = stage.patiently(&["pause", "all", "--tag", tag])?.stdout;
        let said = format!("the job stands still until: sublet resume all --tag {tag}");
        assert!(paused.contains(&said), "{paused}");
        let shown = stage.sublet(&["ps"])?.succeeded()?.stdout;
        assert!(shown.contains(&format!("paused ({tag} away)")), "{shown}");
        stage.patiently(&[&["resume", "all"], back].concat())?;
        process.do_it("stop")?;
        process.do_it("verify")?;
    }
    Ok(())
}

#[test]
fn all_ranks_stand_still_at_a_cut_and_only_that_memory_leaves() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    hold(&mut job, "weights", KEEP)?;
    hold(&mut job, "kv", RUNS_WITHOUT)?;
    let before = stage.used_bytes(1)?;
    for back in [&["resume", "train"][..], &["resume", "train", "--tag", "weights"]] {
        stage.pause("train")?;
        stage.resume("train")?;
        job.run()?;
        // One that has not agreed is enough.
        stage.patiently(&["pause", "train", "--tag", "weights", "--tag", "kv"])?;
        assert_eq!(stage.used_bytes(1)?, before - 2 * HELD);
        stage.patiently(&["resume", "train", "--tag", "kv", "--tag", "weights"])?;
        stage.patiently(&["pause", "train", "--tag", "weights"])?;
        assert_eq!(stage.used_bytes(1)?, before - HELD);
        let steps = job.steps_done();
        let members = stage.members("train")?;
        for member in &members {
            assert_eq!(member["member"]["state"], "paused", "{member:#}");
            assert_eq!(member["member"]["stays"].as_array().map(Vec::len), Some(0), "{member:#}");
        }
        assert_eq!(members.len(), 2);
        let again = stage.patiently(&["pause", "train", "--tag", "weights"])?.stdout;
        assert!(again.contains("is paused already"), "{again}");
        // Anything else would leave less on the host than it says.
        let refused = stage.sublet(&["pause", "train", "--tag", "kv"])?.exited(1)?.stderr;
        let why = "tag 'weights' of tenant 'train' is paused alone";
        let next = ["`sublet resume train`", "`sublet pause train`"];
        assert!(
            refused.contains(why) && next.iter().all(|next| refused.contains(next)),
            "{refused}"
        );
        stage.sublet(&["resume", "train", "--tag", "kv"])?.exited(1)?;
        // What an earlier pause has saved of the rest is old by now.
        let dir = stage.node_path().with_file_name(format!("saved-{}", back.len()));
        let saved = stage.sublet(&["save".as_ref(), "train".as_ref(), dir.as_os_str()])?;
        let idle = format!("process {} has nothing saved", job.ranks[0].pid());
        assert!(saved.succeeded()?.stdout.contains(&idle), "what is there is not what was saved");
        assert_eq!(job.steps_done(), steps, "nobody has gone on");
        stage.patiently(back)?;
        assert_eq!(stage.used_bytes(1)?, before);
        job.stop()?;
        job.verify()?;
    }
    job.works_and_exits()
}

#[test]
fn a_whole_pause_of_a_job_that_stands_still_takes_the_rest() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    hold(&mut job, "weights", KEEP)?;
    let before = [stage.used_bytes(0)?, stage.used_bytes(1)?];
    let all_bytes = stage.pause("train")?["freed_bytes"].as_u64().unwrap_or(0);
    let kept = [stage.used_bytes(0)?, stage.used_bytes(1)?];
    stage.resume("train")?;
    for _ in 0..2 {
        job.run()?;
        stage.patiently(&["pause", "train", "--tag", "weights"])?;
        let steps = job.steps_done();
        // Its processes hold imports that nobody owns any more.
        let refused = stage.sublet(&["pause", "train", "--deep"])?.exited(1)?.stderr;
        assert!(refused.contains("The tenant is paused, contents kept as before"), "{refused}");
        assert_eq!(stage.used_bytes(1)?, before[1] - HELD);
        let paused = stage.pause("train")?;
        assert_eq!(paused["outcome"], "completed", "{paused:#}");
        assert_eq!(paused["freed_bytes"], all_bytes - HELD);
        assert_eq!([stage.used_bytes(0)?, stage.used_bytes(1)?], kept);
        let again = stage.patiently(&["pause", "train"])?.stdout;
        assert!(again.contains("is paused already"), "{again}");
        for member in stage.members("train")? {
            assert_eq!(member["member"]["stands_without"], Value::Null, "{member:#}");
        }
        assert_eq!(job.steps_done(), steps, "nobody has gone on");
        stage.resume("train")?;
        assert_eq!([stage.used_bytes(0)?, stage.used_bytes(1)?], before);
        job.stop()?;
        job.verify()?;
    }
    job.works_and_exits()
}

#[test]
fn a_swap_by_tag_from_outside_has_a_job_stand_still_that_has_not_agreed() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    hold(&mut job, "kv", RUNS_WITHOUT)?;
    hold(&mut job, "weights", KEEP)?;
    let mut other = stage.process_on_all_devices(Some("infer"))?;
    for (tag, state) in [("weights", "paused"), ("kv", "active")] {
        stage.pause("infer")?;
        let swapped = stage.patiently(&["swap", "train", "infer", "--out-tag", tag])?.stdout;
        assert_eq!(swapped.contains("stands still until"), state == "paused", "{swapped}");
        for member in stage.members("train")? {
            assert_eq!(member["member"]["state"], state, "{member:#}");
        }
        // What a swap would undo by letting it run is refused.
        stage.pause("infer")?;
        let whole = stage.sublet(&["swap", "train", "infer"])?;
        if state == "paused" {
            let refused = whole.exited(1)?.stderr;
            assert!(refused.contains("`sublet pause train`"), "{refused}");
            stage.resume("infer")?;
        } else {
            whole.succeeded()?;
        }
        stage.resume("train")?;
        stage.sublet(&["resume", "train", "--tag", tag])?.succeeded()?;
    }
    other.do_it("verify")?;
    job.works_and_exits()
}

#[test]
fn a_job_that_has_agreed_runs_on_and_one_is_told_to() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    hold(&mut job, "kv", RUNS_WITHOUT)?;
    hold(&mut job, "weights", KEEP)?;
    for (tag, how) in [("kv", None), ("weights", Some("--keep-running"))] {
        let arguments: Vec<_> = ["pause", "train", "--tag", tag].into_iter().chain(how).collect();
        let paused = stage.patiently(&arguments)?.stdout;
        assert!(paused.contains("the job keeps running without that memory"), "{paused}");
        job.step(1)?;
    }
    stage.resume("train")?;
    job.works_and_exits()
}
