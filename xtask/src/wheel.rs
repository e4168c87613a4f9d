//! `wheel`: the Python package in one file, with the preload object and the command inside.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::glibc::{self, Glibc};
use crate::portable::Portable;
use crate::python::{self, MATURIN, PYTEST};
use crate::workspace::Workspace;
use crate::{Outcome, build, notices, process, shims, simulated};

/// The folder of the package's source.
pub(crate) const SOURCE: &str = "ffi/python";

/// The oldest C library that a wheel for users starts with: that of RHEL 8, and of PyTorch's own wheels.
const GLIBC: Glibc = Glibc(2, 28);
/// Files that are written for the wheel, and ignored by git: `pyproject.toml` names them.
const LICENCES: [&str; 3] = ["LICENSE", "THIRD-PARTY.txt", "RUST-STANDARD-LIBRARY.html"];
/// The wheel's files for folders of the environment, made for each wheel.
const DATA: &str = "sublet.data";
/// Shells, each with the place of its script.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "bash-completion/completions/sublet"),
    ("zsh", "zsh/site-functions/_sublet"),
    ("fish", "fish/vendor_completions.d/sublet.fish"),
];
/// Endings of the pages and what they show.
const PAGES: [&str; 3] = ["md", "svg", "json"];
/// The tests that ask whether a wheel is fit for users.
const TESTS: &str = "tests/test_wheel.py";
/// Tells these tests that the wheel is one for users, of any machine.
const IS_PORTABLE: &str = "SUBLET_TEST_PORTABLE";

/// The parts of a wheel, and the folder that it goes to.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    /// `libsublet.so`.
    pub(crate) preload: &'a Path,
    /// The `sublet` command.
    pub(crate) command: &'a Path,
    /// Cargo's profile for the native module and the simulated driver.
    pub(crate) profile: &'static str,
    /// The tools that build the native module for older systems; nothing for a wheel that stays here.
    pub(crate) portable: Option<&'a Portable>,
    /// The folder of the wheel. Older wheels in it are removed.
    pub(crate) folder: &'a Path,
}

/// Makes the wheel for users and says where it is.
pub(crate) fn run(workspace: &Workspace) -> Outcome {
    let wheel = release(workspace)?;
    let size_bytes = fs::metadata(&wheel)?.len();
    println!(
        "{}: {}.{} MiB",
        wheel.display(),
        size_bytes >> 20,
        ((size_bytes & 0xf_ffff) * 10) >> 20
    );
    Ok(())
}

/// Builds all parts in release for older systems too, packs them into `target/wheels`, and tests the wheel where nothing else
/// is installed. Returns its path.
pub(crate) fn release(workspace: &Workspace) -> Outcome<PathBuf> {
    let portable = Portable::install(workspace, GLIBC)?;
    let shipped = ["--release", "--package", "sublet-ffi", "--package", "sublet-cli"];
    let shipped = portable.build(workspace, &shipped)?;
    let wheel = pack(
        workspace,
        &Parts {
            preload: shipped.library("sublet")?,
            command: shipped.binary("sublet")?,
            profile: "release",
            portable: Some(&portable),
            folder: &workspace.target.join("wheels"),
        },
    )?;
    test(workspace, &wheel)?;
    Ok(wheel)
}

/// Packs a wheel and returns its path.
pub(crate) fn pack(workspace: &Workspace, parts: &Parts<'_>) -> Outcome<PathBuf> {
    // The package's folder holds the files of one wheel at a time.
    let alone = fs::File::create(workspace.target.join("wheel.lock"))?;
    alone.lock()?;
    let package = workspace.root.join(SOURCE).join("sublet");
    let library = package.join("lib/libsublet.so");
    let command = package.join("bin/sublet");
    for (from, to) in [(parts.preload, &library), (parts.command, &command)] {
        build::install(from, to)?;
        process::strip(workspace, to)?;
        fs::set_permissions(to, fs::Permissions::from_mode(0o755))?;
    }
    let driver = simulated::driver(workspace, parts.profile, parts.portable)?;
    let place = package.join("lib");
    let [driver, management] = simulated::install(workspace, &driver, &place, parts.portable)?;
    shims::build(workspace, &package)?;
    let [licence, crates, standard_library] =
        LICENCES.map(|name| workspace.root.join(SOURCE).join(name));
    build::install(&workspace.root.join("LICENSE"), &licence)?;
    notices::write(workspace, &crates, &standard_library)?;
    share(workspace, parts.command)?;
    for old in wheels(parts.folder)? {
        fs::remove_file(old)?;
    }
    let mut maturin = workspace.command(python::program(workspace, MATURIN, "bin/maturin")?);
    maturin.args(["build", "--locked", "--quiet", "--strip", "--profile", parts.profile]);
    maturin.arg("--manifest-path").arg(workspace.root.join(SOURCE).join("Cargo.toml"));
    maturin.arg("--target-dir").arg(&workspace.target).arg("--out").arg(parts.folder);
    maturin.arg("--interpreter").arg(python::interpreter(workspace));
    // Nothing is promised of one that stays here but that it starts on machines like this one.
    let mut tag = "linux".to_owned();
    if let Some(portable) = parts.portable {
        portable.prepare(&mut maturin);
        maturin.args(["--zig", "--target", &Portable::target()]);
        // Maturin looks at the native module alone, and the tag speaks for all files.
        let promised = portable.glibc();
        let needed = glibc::newest(workspace, &[library, command, driver, management])?;
        if needed > promised {
            return Err(format!(
                "the programs of the wheel need glibc {needed}, newer than {promised}; `objdump -T` shows for which symbols"
            )
            .into());
        }
        tag = format!("manylinux_{}_{}", promised.0, promised.1);
    }
    process::run(maturin.args(["--compatibility", &tag]))?;
    match wheels(parts.folder)?.as_slice() {
        [wheel] => Ok(wheel.clone()),
        found => Err(format!("maturin made {} wheels, not one: {found:?}", found.len()).into()),
    }
}

/// Makes what goes into `share` of the environment: manual pages, completions, the kernel of notebooks, pages and files to deploy.
fn share(workspace: &Workspace, command: &Path) -> Outcome {
    let data = workspace.root.join(SOURCE).join(DATA);
    if data.exists() {
        fs::remove_dir_all(&data)?;
    }
    let share = data.join("data/share");
    let manual = share.join("man/man1");
    fs::create_dir_all(&manual)?;
    process::output(workspace.command(command).arg("man").arg(manual))?;
    for (shell, name) in COMPLETIONS {
        let script = process::output(workspace.command(command).args(["completions", shell]))?;
        let path = share.join(name);
        fs::create_dir_all(path.parent().ok_or("a script has no folder")?)?;
        fs::write(path, script + "\n")?;
    }
    for file in workspace.files()? {
        let is_page = PAGES.iter().any(|ending| file.extension().is_some_and(|has| has == *ending));
        if file.starts_with("deploy") || file.starts_with("docs") && is_page {
            build::install(&workspace.root.join(&file), &share.join("doc/sublet").join(&file))?;
        }
    }
    let kernel = "jupyter/kernels/sublet/kernel.json";
    build::install(&workspace.root.join("deploy/jupyter/sublet/kernel.json"), &share.join(kernel))
}

/// Installs `wheel` where nothing else is, and asks the tests whether it is fit for users.
fn test(workspace: &Workspace, wheel: &Path) -> Outcome {
    let site = workspace.target.join("wheels/installed");
    python::install_alone(workspace, &site, wheel)?;
    let mut command = python::python(workspace, &[site, python::packages(workspace, PYTEST)?]);
    let source = workspace.root.join(SOURCE);
    command.args(["-m", "pytest", "--quiet", "--rootdir"]).arg(&workspace.root);
    command.arg("-c").arg(source.join("pyproject.toml")).arg(source.join(TESTS));
    process::run(command.env(IS_PORTABLE, "1"))
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
