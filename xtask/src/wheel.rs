//! `wheel`: the Python package in one file, with the preload object and the command inside.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::python::{MATURIN, Python};
use crate::workspace::Workspace;
use crate::{Outcome, build, glibc, process, shims, simulated};

/// Where the package's source is.
pub(crate) const SOURCE: &str = "ffi/python";

/// What a wheel is made of, and where it goes.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    /// `libsublet.so`.
    pub(crate) preload: &'a Path,
    /// The `sublet` command.
    pub(crate) command: &'a Path,
    /// Cargo's profile for the native module and the simulated driver.
    pub(crate) profile: &'static str,
    /// The folder of the wheel. Older wheels in it are removed.
    pub(crate) folder: &'a Path,
}

/// Builds all parts in release and packs them into `target/wheels`.
pub(crate) fn run(workspace: &Workspace) -> Outcome {
    let shipped = ["--release", "--package", "sublet-ffi", "--package", "sublet-cli"];
    let shipped = build::build(workspace, &shipped)?;
    let wheel = pack(
        workspace,
        &Parts {
            preload: shipped.library("sublet")?,
            command: shipped.binary("sublet")?,
            profile: "release",
            folder: &workspace.target.join("wheels"),
        },
    )?;
    let size_bytes = fs::metadata(&wheel)?.len();
    println!(
        "{}: {}.{} MiB",
        wheel.display(),
        size_bytes >> 20,
        ((size_bytes & 0xf_ffff) * 10) >> 20
    );
    Ok(())
}

/// Packs a wheel and returns its path.
pub(crate) fn pack(workspace: &Workspace, parts: &Parts<'_>) -> Outcome<PathBuf> {
    // The package's folder holds the files of one wheel at a time.
    let alone = fs::File::create(workspace.target.join("wheel.lock"))?;
    alone.lock()?;
    let python = Python::with(workspace, &MATURIN)?;
    let package = workspace.root.join(SOURCE).join("sublet");
    let library = package.join("lib/libsublet.so");
    let command = package.join("bin/sublet");
    for (from, to) in [(parts.preload, &library), (parts.command, &command)] {
        build::install(from, to)?;
        process::strip(workspace, to)?;
        fs::set_permissions(to, fs::Permissions::from_mode(0o755))?;
    }
    let driver = simulated::driver(workspace, parts.profile)?;
    let [driver, management] = simulated::install(workspace, &driver, &package.join("lib"))?;
    shims::build(workspace, &package)?;
    for old in wheels(parts.folder)? {
        fs::remove_file(old)?;
    }
    let mut maturin = python.script(workspace, "maturin");
    maturin.args(["build", "--locked", "--quiet", "--strip", "--profile", parts.profile]);
    maturin.arg("--manifest-path").arg(workspace.root.join(SOURCE).join("Cargo.toml"));
    maturin.arg("--target-dir").arg(&workspace.target).arg("--out").arg(parts.folder);
    maturin.arg("--interpreter").arg(python.interpreter());
    // Maturin looks at the native module alone, and the tag speaks for all files.
    let tag = platform_tag(workspace, &[&library, &command, &driver, &management])?;
    process::run(maturin.args(["--compatibility", &tag]))?;
    match wheels(parts.folder)?.as_slice() {
        [wheel] => Ok(wheel.clone()),
        found => Err(format!("maturin made {} wheels, not one: {found:?}", found.len()).into()),
    }
}

/// The platform tag that is true of `programs`: the oldest C library that they start with.
fn platform_tag(workspace: &Workspace, programs: &[&Path]) -> Outcome<String> {
    Ok(match glibc::newest(workspace, programs)? {
        Some(glibc::Glibc(major, minor)) => format!("manylinux_{major}_{minor}"),
        // Nothing is promised then but that it starts on machines like this one.
        None => "linux".to_owned(),
    })
}

/// The wheels in `folder`, which is made where it is not there.
pub(crate) fn wheels(folder: &Path) -> Outcome<Vec<PathBuf>> {
    fs::create_dir_all(folder)?;
    let mut wheels = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "whl") {
            wheels.push(path);
        }
    }
    Ok(wheels)
}
