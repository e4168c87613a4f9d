//! Settings that cannot be: `sublet run` refuses them, and a process that must be under Sublet ends.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};

use sublet_tests::{Files, MIB, Outcome, Stage, Trouble};

#[test]
fn run_refuses_a_wrong_setting_before_it_starts_the_job_and_warns_of_an_unknown_name() -> Outcome {
    let stage = Stage::new(&[128 * MIB])?;
    let started = stage.node_path().join("started");
    let library = stage.files().preload.to_string_lossy();
    let path = started.to_string_lossy();
    let job = ["run", "--tenant", "train", "--library", &library, "--", "touch", &path];

    let refused = stage.sublet_told("SUBLET_SLABS", "banana", &job)?.exited(2)?;
    assert_eq!(
        refused.stderr,
        "sublet: SUBLET_SLABS=banana: expected 0 or 1 [usage]; next: sublet run --help\n"
    );
    assert!(!started.exists(), "the job was started");

    let warned = stage.sublet_told("SUBLET_CHANGE", "off", &job)?.exited(0)?;
    let expected = "SUBLET_CHANGE is not a Sublet setting; did you mean SUBLET_CHANGES?";
    assert!(warned.stderr.contains(expected), "{warned:#?}");
    assert!(started.exists(), "the job was not started");
    Ok(())
}

#[test]
fn run_says_that_its_job_joins_a_tenant_which_runs_already() -> Outcome {
    let stage = Stage::new(&[128 * MIB])?;
    let library = stage.files().preload.to_string_lossy();
    let job = ["run", "--join", "--tenant", "train", "--library", &library, "--", "true"];
    assert_eq!(stage.sublet(&job)?.succeeded()?.stderr, "");
    let first = stage.turn_taker("train", &[], 0)?;
    let said = stage.sublet(&job)?.succeeded()?.stderr;
    let wanted = format!("sublet: note: tenant 'train' has a process already ({}: ", first.pid());
    assert!(said.starts_with(&wanted) && said.contains("; this job joins it"), "{said}");
    let _second = stage.turn_taker("train", &[], 0)?;
    let said = stage.sublet(&job)?.succeeded()?.stderr;
    assert!(
        said.contains(" has 2 processes already (") && said.contains(", and 1 more)"),
        "{said}"
    );
    Ok(())
}

/// Its first line on standard error.
fn first_line(job: &mut Child) -> Outcome<String> {
    let mut line = String::new();
    let errors = job.stderr.as_mut().ok_or_else(|| Trouble::new("it has no standard error"))?;
    BufReader::new(errors).read_line(&mut line)?;
    Ok(line)
}

#[test]
fn jobs_without_a_name_get_that_of_their_command_and_each_its_own() -> Outcome {
    let stage = Stage::new(&[128 * MIB])?;
    let run = |variables: &[(&str, &str)]| -> Outcome<Child> {
        let mut command = stage.command(&stage.files().sublet);
        command.args(["run", "--library"]).arg(&stage.files().preload).args(["--", "cat"]);
        command.envs(variables.iter().copied()).stdin(Stdio::piped()).stderr(Stdio::piped());
        Ok(command.spawn()?)
    };
    // As the jobs of an array do: together.
    let mut jobs = (0..4).map(|_| run(&[])).collect::<Outcome<Vec<_>>>()?;
    let mut lines = jobs.iter_mut().map(first_line).collect::<Outcome<Vec<_>>>()?;
    lines.sort();
    let numbered = |number: u32| {
        format!(
            "sublet: this job is tenant 'cat-{number}', because 'cat' runs already; pause it with: \
             sublet pause cat-{number}\n"
        )
    };
    let first = "sublet: this job is tenant 'cat'; pause it with: sublet pause cat\n".to_owned();
    assert_eq!(lines, [first, numbered(2), numbered(3), numbered(4)]);
    // One that is started from within a job belongs to it.
    let mut inner = run(&[("SUBLET_TENANT", "outer")])?;
    drop(inner.stdin.take());
    assert_eq!(first_line(&mut inner)?, "");
    jobs.push(inner);
    for mut job in jobs {
        drop(job.stdin.take());
        assert!(job.wait()?.success());
    }
    Ok(())
}

#[test]
fn process_that_cannot_join_ends_where_it_is_required_and_runs_on_otherwise() -> Outcome {
    let stage = Stage::new(&[128 * MIB])?;
    for (options, code) in [(&["--require"][..], 1), (&[], 0)] {
        let mut command = stage.command(&stage.files().sublet);
        command.args(["run", "--tenant", "train"]).args(options).arg("--library");
        command.arg(&stage.files().preload);
        // The setting goes wrong where the command cannot see it.
        command.args(["--", "env", "SUBLET_SLABS=banana"]).arg(Files::program("turns")).arg("0");
        let ran = command.stdin(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(code), "{said}");
        assert!(said.contains("SUBLET_SLABS=banana: expected 0 or 1"), "{said}");
        let is_ended = said.contains("cannot join its tenant, and SUBLET_REQUIRED=1 ends it");
        assert_eq!(is_ended, code == 1, "{said}");
    }
    Ok(())
}
