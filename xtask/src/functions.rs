//! `nccl-functions`: which functions the libraries of NCCL's versions export.
//!
//! The libraries are no part of the project: they come from NCCL's wheels (`nvidia/nccl/lib`). What is committed are the
//! names, which a test compares with what we stand in for.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use crate::workspace::Workspace;
use crate::{Outcome, process};

/// The library of one version.
#[derive(Clone, Debug)]
pub(crate) struct Library {
    version: String,
    file: PathBuf,
}

impl std::str::FromStr for Library {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (version, file) = text.split_once('=').ok_or("not VERSION=FILE")?;
        Ok(Self { version: version.to_owned(), file: file.into() })
    }
}

/// Writes the names that `libraries`, oldest first, export to the file `target` of the workspace.
pub(crate) fn write(workspace: &Workspace, target: &Path, libraries: &[Library]) -> Outcome {
    let mut versions: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (number, library) in libraries.iter().enumerate() {
        let names = exported(workspace, &library.file)?;
        if names.is_empty() {
            return Err(format!("{} exports no function of NCCL's", library.file.display()).into());
        }
        for name in names {
            versions.entry(name).or_default().push(number);
        }
    }
    let mut text = String::from(
        "# The functions that libraries export, each with the first version that has it, and the last where later\n\
         # ones do not. Written by `cargo xtask nccl-functions`; not edited.\n",
    );
    let all: Vec<_> = libraries.iter().map(|library| library.version.as_str()).collect();
    writeln!(text, "# Versions: {}", all.join(" "))?;
    for (name, numbers) in versions {
        let ends = numbers.first().zip(numbers.last());
        let (first, last) = ends.ok_or("a name without a version")?;
        let last = if last + 1 == all.len() { "" } else { all[*last] };
        writeln!(text, "{name} {}..{last}", all[*first])?;
    }
    fs::write(workspace.root.join(target), text)?;
    Ok(())
}

/// The functions of NCCL's that the library `file` exports.
fn exported(workspace: &Workspace, file: &Path) -> Outcome<BTreeSet<String>> {
    let mut nm = workspace.command("nm");
    let listed = process::output(nm.args(["-D", "--defined-only", "--format=posix"]).arg(file))?;
    let functions = listed.lines().filter(|line| line.contains(" T ") || line.contains(" W "));
    let names = functions.filter_map(|line| line.split([' ', '@']).next());
    let is_function = |name: &&str| {
        let rest = name.strip_prefix('p').unwrap_or(name).strip_prefix("nccl");
        rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
    };
    Ok(names.filter(is_function).map(str::to_owned).collect())
}
