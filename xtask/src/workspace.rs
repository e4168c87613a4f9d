//! The places of things: the repository root, the target directory, the files of the project.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cargo_metadata::{Metadata, MetadataCommand};

use crate::Outcome;

/// The workspace as cargo sees it.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// The repository root.
    pub(crate) root: PathBuf,
    /// The folder in which cargo builds, and to which our own outputs go.
    pub(crate) target: PathBuf,
    /// Members and the edges between them. Dependencies of others are not resolved.
    pub(crate) metadata: Metadata,
    cargo: OsString,
    library_path: Option<OsString>,
}

impl Workspace {
    /// Reads cargo's metadata, and the environment once.
    pub(crate) fn load() -> Outcome<Self> {
        // The path of this package is known when it is built, so any current directory will do.
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .ok_or("xtask has no parent directory")?;
        let metadata = MetadataCommand::new()
            .current_dir(root)
            .no_deps()
            .exec()
            .map_err(|error| format!("cargo metadata failed: {error}"))?;
        let target = metadata.target_directory.clone().into_std_path_buf();
        Ok(Self {
            root: metadata.workspace_root.clone().into_std_path_buf(),
            library_path: library_path_outside(&target),
            target,
            metadata,
            cargo: env::var_os("CARGO").unwrap_or_else(|| "cargo".into()),
        })
    }

    /// The version of all our packages.
    pub(crate) fn version(&self) -> Outcome<String> {
        let packages = self.metadata.workspace_packages();
        let package = packages.iter().find(|package| package.name == "sublet-ffi");
        Ok(package.ok_or("there is no package sublet-ffi")?.version.to_string())
    }

    /// A command that runs in the repository root.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root);
        // `cargo run` puts the target directory on the library path, where the simulated libcuda.so
        // lies: no child may find that one by accident.
        match &self.library_path {
            Some(path) => command.env("LD_LIBRARY_PATH", path),
            None => command.env_remove("LD_LIBRARY_PATH"),
        };
        command
    }

    /// `cargo` with these arguments, in the repository root.
    pub(crate) fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(&self.cargo);
        command.args(arguments);
        command
    }

    /// Every file of the project, relative to the root, sorted: what git tracks and what it would track.
    /// Without git, every file outside the target directory and hidden folders.
    pub(crate) fn files(&self) -> Outcome<Vec<PathBuf>> {
        let listed = self
            .command("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .output();
        if let Ok(output) = listed
            && output.status.success()
        {
            let files: BTreeSet<PathBuf> = String::from_utf8_lossy(&output.stdout)
                .split('\0')
                .filter(|name| !name.is_empty())
                .map(PathBuf::from)
                // A file that was deleted but not committed is still listed.
                .filter(|path| self.root.join(path).is_file())
                .collect();
            return Ok(files.into_iter().collect());
        }
        let mut files = Vec::new();
        self.walk(&self.root, &mut files)?;
        files.sort();
        Ok(files)
    }

    fn walk(&self, folder: &Path, files: &mut Vec<PathBuf>) -> Outcome {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let path = entry.path();
            let kind = entry.file_type()?;
            let name = entry.file_name();
            if kind.is_dir() {
                let hidden = name.to_string_lossy().starts_with('.') && name != ".ci";
                let built = path == self.target || name == "target" || name == "__pycache__";
                if !hidden && !built {
                    self.walk(&path, files)?;
                }
            } else if kind.is_file() {
                files.push(path.strip_prefix(&self.root)?.to_owned());
            }
        }
        Ok(())
    }
}

/// The library path of this process without the entries that cargo added for the target directory.
fn library_path_outside(target: &Path) -> Option<OsString> {
    let path = env::var_os("LD_LIBRARY_PATH")?;
    let kept: Vec<PathBuf> = env::split_paths(&path)
        .filter(|entry| !entry.as_os_str().is_empty() && !entry.starts_with(target))
        .collect();
    if kept.is_empty() {
        return None;
    }
    env::join_paths(kept).ok()
}
