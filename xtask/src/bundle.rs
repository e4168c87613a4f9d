//! `gpu-bundle`: what the GPU lane needs, in one folder that fits through a narrow door.

use std::fmt::Write;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::glibc::{self, Glibc};
use crate::wheel::{self, Parts};
use crate::workspace::Workspace;
use crate::{Outcome, build, process, python};

/// Machines take no larger bundle.
const BUNDLE_BYTES_MAX: u64 = 60 * 1024 * 1024;
/// The oldest C library that the bundle must start with.
const GLIBC_MAX: Glibc = Glibc(2, 36);
/// The folders in the bundle: what both kinds of suites need, the suites about correctness, the suites about speed, and
/// scripts. A job runs the scripts as a user would.
const FOLDERS: [&str; 4] = ["gpu-lane", "gpu-tests", "benchmarks", "examples"];
/// Parts of them that are for the source tree alone.
const LEFT_OUT: [&str; 2] = ["tests", "results"];
const RUNNER: &str = "gpu-lane/run.sh";
/// The folder of Python packages in the bundle, as wheels that the jobs install.
const WHEELS: &str = "python";
/// The packages that jobs measure ours against or run, and that such machines lack. They are fetched as they are
/// published, and not kept among the sources.
const FETCHED: [&str; 5] = [
    "torch_memory_saver==0.0.10",
    "trl==1.16.0",
    "datasets==5.2.0",
    "dill==0.4.1",
    "multiprocess==0.70.19",
];
/// The Python of machines with GPUs, which wheels are fetched for.
const PYTHON: &str = "3.12";

/// Builds in release, copies everything into `target/gpu-bundle` and checks the result.
pub(crate) fn run(workspace: &Workspace) -> Outcome {
    let bundle = workspace.target.join("gpu-bundle");
    if bundle.exists() {
        fs::remove_dir_all(&bundle)?;
    }
    fs::create_dir_all(&bundle)?;

    let programs = build_programs(workspace, &bundle)?;
    copy_jobs(workspace, &bundle)?;
    add_fetched(workspace, &bundle.join(WHEELS))?;
    for program in &programs {
        process::strip(workspace, program)?;
    }
    let glibc = check_glibc(workspace, &programs)?;
    let manifest = manifest(workspace, glibc)?;
    print!("{manifest}");
    fs::write(bundle.join("MANIFEST"), manifest)?;

    let size_bytes = size_bytes(&bundle)?;
    let size = format!("{}.{} MiB", size_bytes >> 20, ((size_bytes & 0xf_ffff) * 10) >> 20);
    if size_bytes > BUNDLE_BYTES_MAX {
        let max = BUNDLE_BYTES_MAX >> 20;
        return Err(
            format!("the bundle is {size}, more than {max} MiB; leave something out").into()
        );
    }
    println!("{}: {size}", bundle.display());
    Ok(())
}

fn build_programs(workspace: &Workspace, bundle: &Path) -> Outcome<Vec<PathBuf>> {
    let shipped = ["--package", "sublet-ffi", "--package", "sublet-cli"];
    let shipped = build::build(workspace, &[&["--release"], &shipped[..]].concat())?;
    let conformance = build::build(
        workspace,
        &["--release", "--package", "sublet-sim-driver", "--example", "conformance_gpu"],
    )?;
    let sources = [
        ("lib/libsublet.so", shipped.library("sublet")?),
        ("bin/sublet", shipped.binary("sublet")?),
        ("bin/conformance_gpu", conformance.binary("conformance_gpu")?),
    ];
    let mut programs = Vec::new();
    for (name, source) in sources {
        let program = bundle.join(name);
        build::install(source, &program)?;
        programs.push(program);
    }
    let parts = Parts {
        preload: shipped.library("sublet")?,
        command: shipped.binary("sublet")?,
        profile: "release",
        portable: None,
        folder: &bundle.join(WHEELS),
    };
    wheel::pack(workspace, &parts)?;
    Ok(programs)
}

/// Adds the wheels of others to `folder`, from the last download or a new one. Without a network the bundle goes without
/// them, and a job that wants one says so.
fn add_fetched(workspace: &Workspace, folder: &Path) -> Outcome {
    for requirement in FETCHED {
        let downloads = workspace.target.join("fetched").join(requirement);
        if wheel::wheels(&downloads)?.is_empty() {
            let mut pip = python::pip(workspace)?;
            pip.args([
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                "--python-version",
                PYTHON,
                "--dest",
            ]);
            if let Err(error) = process::output(pip.arg(&downloads).arg(requirement)) {
                println!("the bundle goes without {requirement}: {error}");
            }
        }
        for wheel in wheel::wheels(&downloads)? {
            let name = wheel.file_name().ok_or("a wheel without a name")?;
            build::install(&wheel, &folder.join(name))?;
        }
    }
    Ok(())
}

fn copy_jobs(workspace: &Workspace, bundle: &Path) -> Outcome {
    let files = workspace.files()?;
    for folder in FOLDERS {
        let is_shipped = |path: &&PathBuf| {
            let within = path.strip_prefix(folder);
            within.is_ok_and(|within| !LEFT_OUT.iter().any(|name| within.starts_with(name)))
        };
        let mut shipped = files.iter().filter(is_shipped).peekable();
        if shipped.peek().is_none() {
            return Err(format!("{folder} is empty; the bundle would have nothing to run").into());
        }
        for file in shipped {
            build::install(&workspace.root.join(file), &bundle.join(file))?;
        }
    }
    let runner = bundle.join("run.sh");
    build::install(&workspace.root.join(RUNNER), &runner)?;
    fs::set_permissions(&runner, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// Returns the newest C library version that a program asks for.
fn check_glibc(workspace: &Workspace, programs: &[PathBuf]) -> Outcome<Glibc> {
    let needed = glibc::newest(workspace, programs)?;
    if needed > GLIBC_MAX {
        let text = format!("the bundle needs glibc {needed}, newer than {GLIBC_MAX}");
        return Err((text + "; build on an older system").into());
    }
    Ok(needed)
}

fn manifest(workspace: &Workspace, glibc: Glibc) -> Outcome<String> {
    let version = workspace.version()?;
    let mut text = String::new();
    writeln!(text, "commit {}", process::commit(workspace)?)?;
    let mut dated = workspace.command("git");
    writeln!(text, "commit_date {}", process::output(dated.args(["log", "-1", "--format=%cI"]))?)?;
    writeln!(text, "sublet {version}")?;
    let compiler = process::output(workspace.command("rustc").arg("--version"))?;
    writeln!(text, "{compiler}")?;
    writeln!(text, "glibc {glibc}")?;
    Ok(text)
}

fn size_bytes(folder: &Path) -> Outcome<u64> {
    let mut total_bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        total_bytes += if entry.file_type()?.is_dir() {
            size_bytes(&entry.path())?
        } else {
            entry.metadata()?.len()
        };
    }
    Ok(total_bytes)
}
