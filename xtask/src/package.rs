//! The Python package's part of `test`: its wheel, as a user installs it, its tests and its types.

use std::path::{Path, PathBuf};

use crate::build::Built;
use crate::python::{self, MYPY, OPTIONAL, PYTEST, packages, python};
use crate::stages::Stages;
use crate::wheel::{self, Parts};
use crate::workspace::Workspace;
use crate::{Outcome, process};

/// Name of the stage that all others of the package need.
pub(crate) const WHEEL: &str = "python wheel";

/// Runs the stages of the package.
pub(crate) fn stages(workspace: &Workspace, built: &Built, stages: &mut Stages) {
    let mut site = None;
    stages.run(WHEEL, |_| {
        site = Some(installed(workspace, built)?);
        Ok(())
    });
    match site {
        Some(site) => {
            stages.run("python tests", |lines| api_tests(workspace, built, &site, lines));
            stages.run("python types", |_| types(workspace, &site));
        }
        None => {
            for name in ["python tests", "python types"] {
                stages.blocked(name, WHEEL);
            }
        }
    }
}

/// Builds the wheel of the files that all tests run, installs it where nothing else is, and imports it.
/// Returns the folder to import it from.
pub(crate) fn installed(workspace: &Workspace, built: &Built) -> Outcome<PathBuf> {
    let parts = Parts {
        preload: &built.preload,
        command: &built.sublet,
        profile: "dev",
        portable: None,
        folder: &workspace.target.join("built/wheels"),
    };
    let wheel = wheel::pack(workspace, &parts)?;
    let site = workspace.target.join("built/python");
    python::install_alone(workspace, &site, &wheel)?;
    eprintln!("{} is installed in {}", wheel.display(), site.display());
    Ok(site)
}

fn api_tests(
    workspace: &Workspace,
    built: &Built,
    site: &Path,
    lines: &mut Vec<String>,
) -> Outcome {
    let files: Vec<PathBuf> =
        workspace.files()?.into_iter().filter(|path| is_python_test(path)).collect();
    let mut folders = vec![site.to_owned(), packages(workspace, PYTEST)?];
    for (requirement, what) in OPTIONAL {
        match packages(workspace, requirement) {
            Ok(folder) => folders.push(folder),
            // The tests are skipped then, and that is said.
            Err(error) => lines.push(format!("not tested: {what}: {error}")),
        }
    }
    let mut command = python(workspace, &folders);
    command.args(["-m", "pytest", "-c"]).arg(wheel::SOURCE.to_owned() + "/pyproject.toml");
    // Many tests wait for processes. Those of one file share what it sets up.
    let processes = process::cores() + 1;
    command.args(["-n", &processes.to_string(), "--dist", "loadfile", "--color=no"]);
    command.arg("--rootdir").arg(&workspace.root).args(files);
    built.export(&mut command);
    process::stream(command, is_pytest_summary, lines)
}

/// Checks the types of the package and of the programs that use it, and the stubs against the module.
fn types(workspace: &Workspace, site: &Path) -> Outcome {
    let source = workspace.root.join(wheel::SOURCE);
    let cache = workspace.target.join("mypy");
    let mypy = packages(workspace, MYPY)?;
    // The tests' types are pytest's too.
    let mut check = python(workspace, &[mypy.clone(), packages(workspace, PYTEST)?]);
    check.current_dir(&source).args(["-m", "mypy", "--cache-dir"]).arg(&cache);
    process::run(&mut check)?;
    let mut stubtest = python(workspace, &[mypy, site.to_owned()]);
    stubtest.current_dir(&cache).args(["-m", "mypy.stubtest", "sublet._native"]);
    process::run(&mut stubtest)
}

fn is_python_test(path: &Path) -> bool {
    let python = path.extension().is_some_and(|extension| extension == "py");
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    python && stem.starts_with("test_")
}

/// The last line of pytest: `==== 3 passed, 1 skipped in 0.12s ====`.
fn is_pytest_summary(line: &str) -> bool {
    let words = ["passed", "failed", "skipped", "error", "no tests ran"];
    line.starts_with('=')
        && line.ends_with('=')
        && line.contains(" in ")
        && words.iter().any(|word| line.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_lines_of_pytest_are_known() {
        assert!(is_pytest_summary("==== 3 passed, 1 skipped in 0.12s ===="));
        assert!(is_pytest_summary("==== no tests ran in 0.01s ===="));
        assert!(!is_pytest_summary("==== test session starts ===="));
        assert!(!is_pytest_summary("==== short test summary info ===="));
    }

    #[test]
    fn only_python_files_with_the_prefix_are_tests() {
        assert!(is_python_test(Path::new("ffi/python/tests/test_region.py")));
        assert!(!is_python_test(Path::new("ffi/python/tests/conftest.py")));
        assert!(!is_python_test(Path::new("tests/test_data.txt")));
    }
}
