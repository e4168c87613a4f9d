//! `gpu-bundle`: what the GPU lane needs, in one folder that fits through a narrow door.

use std::fmt::Write;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::workspace::Workspace;
use crate::{Outcome, build, process};

/// Machines take no larger bundle.
const BUNDLE_BYTES_MAX: u64 = 60 * 1024 * 1024;
/// The oldest C library that the bundle must start with.
const GLIBC_MAX: Glibc = Glibc(2, 36);
const JOBS: &str = "benchmarks/jobs";
/// Scripts that a job runs as a user would.
const EXAMPLES: &str = "examples";
const RUNNER: &str = "benchmarks/run.sh";

/// A version of the C library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Glibc(u32, u32);

/// Builds in release, copies everything into `target/gpu-bundle` and checks the result.
pub(crate) fn run(workspace: &Workspace) -> Outcome {
    let bundle = workspace.target.join("gpu-bundle");
    if bundle.exists() {
        fs::remove_dir_all(&bundle)?;
    }
    fs::create_dir_all(&bundle)?;

    let programs = build_programs(workspace, &bundle)?;
    copy_jobs(workspace, &bundle)?;
    strip(workspace, &programs)?;
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
        &[
            "--release",
            "--package",
            "vmm-pool",
            "--features",
            "conformance",
            "--example",
            "conformance_gpu",
        ],
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
    Ok(programs)
}

fn copy_jobs(workspace: &Workspace, bundle: &Path) -> Outcome {
    for (from, to) in [(JOBS, "jobs"), (EXAMPLES, EXAMPLES)] {
        let files: Vec<PathBuf> =
            workspace.files()?.into_iter().filter(|path| path.starts_with(from)).collect();
        if files.is_empty() {
            return Err(format!("{from} is empty; the bundle would have nothing to run").into());
        }
        for file in files {
            let name = Path::new(to).join(file.strip_prefix(from)?);
            build::install(&workspace.root.join(&file), &bundle.join(name))?;
        }
    }
    let runner = bundle.join("run.sh");
    build::install(&workspace.root.join(RUNNER), &runner)?;
    fs::set_permissions(&runner, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// Removes debug information: it is most of the size, and no job reads it.
fn strip(workspace: &Workspace, programs: &[PathBuf]) -> Outcome {
    if !is_there(workspace, "strip") {
        println!("strip is not installed: the bundle keeps its debug information");
        return Ok(());
    }
    for program in programs {
        process::run(workspace.command("strip").arg("--strip-debug").arg(program))?;
    }
    Ok(())
}

/// The newest C library version that a program asks for, `None` where no tool can tell.
fn check_glibc(workspace: &Workspace, programs: &[PathBuf]) -> Outcome<Option<Glibc>> {
    let tools = [("objdump", "-T"), ("readelf", "-V")];
    let Some((tool, option)) = tools.into_iter().find(|(tool, _)| is_there(workspace, tool)) else {
        println!("neither objdump nor readelf is installed: C library versions are not checked");
        return Ok(None);
    };
    let mut newest = None;
    for program in programs {
        let table = process::output(workspace.command(tool).arg(option).arg(program))?;
        let needed = newest_glibc(&table);
        if let Some(Glibc(major, minor)) = needed.filter(|needed| *needed > GLIBC_MAX) {
            let Glibc(max_major, max_minor) = GLIBC_MAX;
            let name = program.file_name().unwrap_or_default().to_string_lossy();
            return Err(format!(
                "{name} needs glibc {major}.{minor}, newer than {max_major}.{max_minor}; \
                 build on an older system"
            )
            .into());
        }
        newest = newest.max(needed);
    }
    Ok(newest)
}

/// The newest version named as `GLIBC_x.y` in a symbol table.
fn newest_glibc(table: &str) -> Option<Glibc> {
    table
        .split("GLIBC_")
        .skip(1)
        .filter_map(|after| {
            let end = after.find(|next: char| !next.is_ascii_digit() && next != '.');
            let mut numbers = after[..end.unwrap_or(after.len())].split('.');
            let major = numbers.next()?.parse().ok()?;
            Some(Glibc(major, numbers.next()?.parse().ok()?))
        })
        .max()
}

fn manifest(workspace: &Workspace, glibc: Option<Glibc>) -> Outcome<String> {
    let git = |arguments: &[&str]| process::output(workspace.command("git").args(arguments));
    let dirty = if git(&["status", "--porcelain"])?.is_empty() { "" } else { "-dirty" };
    let version = workspace
        .metadata
        .workspace_packages()
        .iter()
        .find(|package| package.name == "sublet-ffi")
        .map_or_else(|| "unknown".to_owned(), |package| package.version.to_string());
    let glibc = glibc
        .map_or_else(|| "not checked".to_owned(), |Glibc(major, minor)| format!("{major}.{minor}"));
    let mut text = String::new();
    writeln!(text, "commit {}{dirty}", git(&["rev-parse", "--short", "HEAD"])?)?;
    writeln!(text, "commit_date {}", git(&["log", "-1", "--format=%cI"])?)?;
    writeln!(text, "sublet {version}")?;
    let compiler = process::output(workspace.command("rustc").arg("--version"))?;
    writeln!(text, "{compiler}")?;
    writeln!(text, "glibc {glibc}")?;
    Ok(text)
}

fn is_there(workspace: &Workspace, tool: &str) -> bool {
    process::output(workspace.command(tool).arg("--version")).is_ok()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_version_is_compared_by_number() {
        let table = "(GLIBC_2.9) read\n(GLIBC_2.34) write\n(GLIBC_PRIVATE) x\n(GLIBC_2.2.5) y";
        assert_eq!(newest_glibc(table), Some(Glibc(2, 34)));
        assert!(newest_glibc(table) < Some(GLIBC_MAX));
        assert!(Glibc(2, 38) > GLIBC_MAX);
        assert_eq!(newest_glibc("no versions"), None);
    }
}
