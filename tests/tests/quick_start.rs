//! What the pages tell a newcomer to type, typed: the commands of the README and of the quick start, in their order, at
//! jobs by the names that they use.

use std::fs;
use std::path::Path;

use sublet_tests::{Job, JobOptions, MIB, Outcome, Stage, Trouble};

const CAPACITIES: [u64; 2] = [128 * MIB; 2];

/// The lines of the code blocks of a page that are commands of ours, without what `#` says of them.
fn commands(page: &str) -> Outcome<Vec<Vec<String>>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(page);
    let text = fs::read_to_string(path)?;
    let blocks = text.split("```").skip(1).step_by(2);
    let lines = blocks.flat_map(str::lines).filter_map(|line| line.strip_prefix("sublet "));
    let words = |line: &str| {
        let command = line.split(" #").next().unwrap_or_default();
        command.split_whitespace().map(str::to_owned).collect()
    };
    Ok(lines.map(words).collect())
}

/// Starts the job that `sublet run` is told to, in its tenant.
fn start(stage: &Stage, command: &[String]) -> Outcome<Job> {
    let tenant = command.iter().skip_while(|word| *word != "--tenant").nth(1);
    let tenant = tenant.ok_or_else(|| Trouble::new(format!("no tenant in {command:?}")))?;
    // Two of them do not fit together.
    stage.connected_job(&JobOptions { tensor_mib: 60, ..JobOptions::new(tenant, 2) })
}

fn typed(page: &str, jobs_wanted: usize) -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut jobs = Vec::new();
    for command in commands(page)? {
        if command[0] == "run" {
            jobs.push(start(&stage, &command)?);
        } else {
            stage.sublet(&command)?.succeeded()?;
        }
    }
    assert_eq!(jobs.len(), jobs_wanted, "jobs that {page} starts");
    // A tenant that is paused at the end of the page comes back as it was.
    for mut job in jobs.into_iter().rev() {
        stage.resume(job.tenant())?;
        job.verify()?;
        stage.pause(job.tenant())?;
    }
    Ok(())
}

#[test]
fn the_commands_of_the_readme_do_what_they_say() -> Outcome {
    typed("README.md", 1)
}

#[test]
fn the_commands_of_the_quick_start_do_what_they_say() -> Outcome {
    typed("docs/quick-start.md", 2)
}
