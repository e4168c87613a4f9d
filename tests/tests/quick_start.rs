//! What the pages tell to type on a machine with GPUs, typed on a simulated one: the commands of the README and of the quick
//! start, in their order. Jobs of this test stand for those that need PyTorch. The blocks that need no GPU are typed as they
//! are shown, by `ffi/python/tests/test_quick_start.py`.

use std::fs;
use std::path::Path;

use sublet_tests::{Job, JobOptions, MIB, Outcome, Stage, Trouble};

const CAPACITIES: [u64; 2] = [128 * MIB; 2];

/// The lines of the code blocks below a heading of a page that are commands of ours, without what `#` says of them.
fn commands(page: &str, heading: &str) -> Outcome<Vec<Vec<String>>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(page);
    let text = fs::read_to_string(path)?;
    let (_, text) = text
        .split_once(heading)
        .ok_or_else(|| Trouble::new(format!("{page} has no '{heading}'")))?;
    let blocks = text.split("```").skip(1).step_by(2);
    let lines = blocks.flat_map(str::lines).filter_map(|line| line.strip_prefix("sublet "));
    let words = |line: &str| {
        let command = line.split(" #").next().unwrap_or_default();
        command.split_whitespace().map(str::to_owned).collect()
    };
    Ok(lines.map(words).collect())
}

/// Starts a job that stands for one of PyTorch. Two of them do not fit together.
fn start(stage: &Stage, tenant: &str) -> Outcome<Job> {
    stage.connected_job(&JobOptions { tensor_mib: 60, ..JobOptions::new(tenant, 2) })
}

/// Types the commands, which start tenant `train`. The tenants `others` are there before, and are paused.
fn typed(page: &str, heading: &str, others: &[&str]) -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut jobs = Vec::new();
    for tenant in others {
        jobs.push(start(&stage, tenant)?);
        stage.pause(tenant)?;
    }
    for command in commands(page, heading)? {
        if command.iter().take(3).eq(["run", "--tenant", "train"]) {
            jobs.push(start(&stage, "train")?);
        } else {
            stage.sublet(&command)?.succeeded()?;
        }
    }
    assert_eq!(jobs.len(), others.len() + 1, "jobs that {page} starts");
    // What the page leaves paused or running comes back as it was.
    for job in &jobs {
        stage.pause(job.tenant())?;
    }
    for mut job in jobs {
        stage.resume(job.tenant())?;
        job.verify()?;
        stage.pause(job.tenant())?;
    }
    Ok(())
}

#[test]
fn the_commands_of_the_readme_do_what_they_say() -> Outcome {
    typed("README.md", "## Pause a job", &["infer"])
}

#[test]
fn the_commands_of_the_quick_start_do_what_they_say() -> Outcome {
    typed("docs/quick-start.md", "## On a machine with GPUs", &[])
}
