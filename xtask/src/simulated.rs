//! The libraries of simulated GPUs, as `sublet simulate` finds them: the driver, and the management library, which names the
//! GPUs and says how much of them is in use.

use std::path::{Path, PathBuf};

use crate::portable::Portable;
use crate::workspace::Workspace;
use crate::{Outcome, build, process, shims};

/// File name of the driver.
pub(crate) const DRIVER: &str = "libcuda.so.1";
const MANAGEMENT: &str = "libnvidia-ml.so.1";
const MANAGEMENT_SOURCE: &str = "tests/programs/simnvml.c";

/// Builds the driver, with cargo's `profile`, for this system or an older one, and returns where it is. It is a build of its own:
/// in one with the preload object that would have simulated GPUs too.
pub(crate) fn driver(
    workspace: &Workspace,
    profile: &str,
    portable: Option<&Portable>,
) -> Outcome<PathBuf> {
    let arguments = ["--package", "simcuda", "--profile", profile];
    let made = match portable {
        Some(portable) => portable.build(workspace, &arguments)?,
        None => build::build(workspace, &arguments)?,
    };
    Ok(made.library("cuda")?.to_owned())
}

/// Puts both into the folder `simulated` of `parent`, and returns where they are.
pub(crate) fn install(
    workspace: &Workspace,
    driver: &Path,
    parent: &Path,
    portable: Option<&Portable>,
) -> Outcome<[PathBuf; 2]> {
    let libraries = [DRIVER, MANAGEMENT].map(|name| parent.join("simulated").join(name));
    build::install(driver, &libraries[0])?;
    process::strip(workspace, &libraries[0])?;
    let mut compile = match portable {
        Some(portable) => portable.compiler(workspace),
        None => workspace.command(shims::compiler()),
    };
    compile.args(["-std=gnu11", "-O2", "-s", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]);
    compile.arg("-o").arg(&libraries[1]).arg(workspace.root.join(MANAGEMENT_SOURCE));
    process::output(&mut compile)
        .map_err(|error| format!("{MANAGEMENT}: {error}; install a C compiler, such as gcc"))?;
    Ok(libraries)
}
