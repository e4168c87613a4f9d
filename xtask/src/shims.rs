//! The small libraries of the Python package that hold no code: each leads the loader to other libraries.
//!
//! | file | what it is for |
//! | --- | --- |
//! | `lib/libsublet_nccl.so` | loaded instead of NCCL: has NCCL's functions and `ncclPause`... side by side |
//! | `alias/torch_memory_saver_hook_mode_preload*.abi3.so` | preloaded by who looks for `torch_memory_saver`'s object |
//!
//! The first needs `libsublet.so` and then `libnccl.so.2`; a handle of it finds the functions of both. It is
//! linked against empty libraries of those names, so that no NCCL is needed to build it.
//!
//! The second is a filter of `libsublet.so`: the loader puts that in its place in the order of the program, so
//! that preloading the one preloads the other. A copy would be a second Sublet in processes that have one
//! already, and a link cannot be in a wheel.

use std::fs;
use std::path::Path;

use crate::workspace::Workspace;
use crate::{Outcome, process};

/// The linker option by which the loader finds `libsublet.so` from `sublet/alias` and from next to the package. Others
/// look for the alias in these places.
const ALIAS_RUNPATH: &str = "-Wl,-rpath,$ORIGIN/../lib:$ORIGIN/sublet/lib";
/// The linker option by which the loader finds `libsublet.so` next to the object, and NCCL where its wheel puts it.
const NCCL_RUNPATH: &str = "-Wl,-rpath,$ORIGIN:$ORIGIN/../../nvidia/nccl/lib";
/// Names under which frameworks look for the object, without and with the version of the CUDA runtime.
const ALIASES: [&str; 3] = ["", "_cu12", "_cu13"];

/// An empty library has this, so that the compiler has something to do.
const EMPTY: &str = "extern int sublet_empty;\nint sublet_empty;\n";
/// The launcher of one framework reads the object's bytes for this name before it asks for backups on disk.
const ALIAS_SOURCE: &str = "extern const char sublet_alias_environment[];\n\
                            const char sublet_alias_environment[] = \"TMS_INIT_ENABLE_DISK_BACKUP\";\n";

/// Builds all of them into the package at `package`, the folder that has `__init__.py`.
pub(crate) fn build(workspace: &Workspace, package: &Path) -> Outcome {
    let work = workspace.target.join("shims");
    fs::create_dir_all(&work)?;
    let [empty, alias] = [("empty.c", EMPTY), ("alias.c", ALIAS_SOURCE)].map(|(name, source)| {
        let path = work.join(name);
        fs::write(&path, source).map(|()| path)
    });
    let (empty, alias) = (empty?, alias?);
    let [sublet, nccl] = ["libsublet.so", "libnccl.so.2"].map(|name| {
        let library = work.join(name);
        let soname = format!("-Wl,-soname,{name}");
        link(workspace, &empty, &library, &[&soname]).map(|()| library)
    });
    let (sublet, nccl) = (sublet?, nccl?);

    let needed = [path_text(&sublet)?, path_text(&nccl)?];
    let flags = ["-Wl,--no-as-needed", needed[0], needed[1], NCCL_RUNPATH];
    link(workspace, &empty, &package.join("lib/libsublet_nccl.so"), &flags)?;
    for suffix in ALIASES {
        let name = format!("alias/torch_memory_saver_hook_mode_preload{suffix}.abi3.so");
        let flags = ["-Wl,--filter,libsublet.so", "-Wl,-z,nodelete", ALIAS_RUNPATH];
        link(workspace, &alias, &package.join(name), &flags)?;
    }
    Ok(())
}

/// Links one source file of no code, with `flags`, into the library `to`.
fn link(workspace: &Workspace, source: &Path, to: &Path, flags: &[&str]) -> Outcome {
    fs::create_dir_all(to.parent().ok_or("a library to link has no folder")?)?;
    let mut command = workspace.command(compiler());
    command.args(["-shared", "-fPIC", "-nostdlib", "-s", "-Wl,--enable-new-dtags", "-o"]);
    command.arg(to).arg(source).args(flags);
    process::output(&mut command).map(drop).map_err(|error| {
        format!("{}: {error}; install a C compiler, such as gcc", to.display()).into()
    })
}

/// The C compiler.
pub(crate) fn compiler() -> String {
    std::env::var("CC").unwrap_or_else(|_| "cc".to_owned())
}

fn path_text(path: &Path) -> Outcome<&str> {
    path.to_str().ok_or_else(|| format!("{} is not UTF-8", path.display()).into())
}
