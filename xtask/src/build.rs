//! Builds what tests run: the preload object, the simulated driver and the command.

use std::fs;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cargo_metadata::{Message, TargetKind};

use crate::workspace::Workspace;
use crate::{Outcome, process, shims, simulated};

/// The outputs of a build, each at a path that later builds do not touch.
///
/// A test build of the whole workspace turns every feature on and overwrites cargo's own outputs with
/// that. These are copies, so that tests run what a user would run.
#[derive(Debug)]
pub(crate) struct Built {
    /// `libsublet.so`, the preload object. The command lies next to it and finds it there.
    pub(crate) preload: PathBuf,
    /// A directory that holds the simulated driver as `libcuda.so.1`.
    pub(crate) simcuda_dir: PathBuf,
    /// The `sublet` command, with simulated GPUs next to it.
    pub(crate) sublet: PathBuf,
    /// The library that is loaded instead of NCCL.
    pub(crate) nccl: PathBuf,
}

impl Built {
    /// Builds all of them and copies them to their places.
    pub(crate) fn build(workspace: &Workspace, release: bool) -> Outcome<Self> {
        let profile = if release { "release" } else { "dev" };
        let shipped = ["--package", "sublet-ffi", "--package", "sublet-cli", "--profile", profile];
        let shipped = build(workspace, &shipped)?;
        let driver = simulated::driver(workspace, profile, None)?;

        let place = workspace.target.join(if release { "built-release" } else { "built" });
        let simcuda_dir =
            workspace.target.join(if release { "simcuda-release" } else { "simcuda" });
        let built = Self {
            preload: place.join("libsublet.so"),
            sublet: place.join("sublet"),
            nccl: place.join("lib/libsublet_nccl.so"),
            simcuda_dir: simcuda_dir.clone(),
        };
        install(shipped.library("sublet")?, &built.preload)?;
        install(shipped.binary("sublet")?, &built.sublet)?;
        shims::build(workspace, &place)?;
        install(&driver, &simcuda_dir.join(simulated::DRIVER))?;
        simulated::install(workspace, &driver, &place, None)?;
        Ok(built)
    }

    /// Tells the tests of `command` where the built files are.
    pub(crate) fn export(&self, command: &mut Command) {
        command.envs(self.variables());
    }

    /// The variables that tell tests where the built files are.
    pub(crate) fn variables(&self) -> [(&'static str, &Path); 4] {
        [
            ("SUBLET_TEST_PRELOAD", &self.preload),
            ("SUBLET_TEST_SIMCUDA_DIR", &self.simcuda_dir),
            ("SUBLET_TEST_BIN", &self.sublet),
            ("SUBLET_TEST_NCCL", &self.nccl),
        ]
    }
}

/// The files that one cargo build made.
#[derive(Debug)]
pub(crate) struct Artifacts(Vec<Artifact>);

#[derive(Debug)]
struct Artifact {
    name: String,
    kinds: Vec<TargetKind>,
    executable: Option<PathBuf>,
    files: Vec<PathBuf>,
}

impl Artifacts {
    /// The shared library of the target `name`.
    pub(crate) fn library(&self, name: &str) -> Outcome<&Path> {
        self.0
            .iter()
            .filter(|artifact| {
                artifact.name == name && artifact.kinds.contains(&TargetKind::CDyLib)
            })
            .flat_map(|artifact| &artifact.files)
            .find(|file| file.extension().is_some_and(|extension| extension == "so"))
            .map(PathBuf::as_path)
            .ok_or_else(|| format!("the build made no shared library {name}").into())
    }

    /// The binary or example `name`.
    pub(crate) fn binary(&self, name: &str) -> Outcome<&Path> {
        self.0
            .iter()
            .filter(|artifact| artifact.name == name)
            .find_map(|artifact| artifact.executable.as_deref())
            .ok_or_else(|| format!("the build made no program {name}").into())
    }
}

/// Runs `cargo build` with `arguments` and returns what it made.
pub(crate) fn build(workspace: &Workspace, arguments: &[&str]) -> Outcome<Artifacts> {
    artifacts(workspace.cargo(&["build"]).args(arguments))
}

/// Runs `command`, which builds as `cargo build` does, and returns what it made.
pub(crate) fn artifacts(command: &mut Command) -> Outcome<Artifacts> {
    command.arg("--message-format=json-render-diagnostics").stdout(Stdio::piped());
    let mut child =
        command.spawn().map_err(|error| format!("{}: {error}", process::name(command)))?;
    let stdout = child.stdout.take().ok_or("cargo has no output")?;
    let mut artifacts = Vec::new();
    for message in Message::parse_stream(BufReader::new(stdout)) {
        if let Message::CompilerArtifact(artifact) = message? {
            artifacts.push(Artifact {
                name: artifact.target.name,
                kinds: artifact.target.kind,
                executable: artifact.executable.map(Into::into),
                files: artifact.filenames.into_iter().map(Into::into).collect(),
            });
        }
    }
    if child.wait()?.success() {
        Ok(Artifacts(artifacts))
    } else {
        Err(format!("{} failed", process::name(command)).into())
    }
}

/// Copies `from` to `to`. A process that runs the old file keeps it.
pub(crate) fn install(from: &Path, to: &Path) -> Outcome {
    let folder = to.parent().ok_or("a file to install has no folder")?;
    fs::create_dir_all(folder)?;
    let fresh = to.with_extension("new");
    fs::copy(from, &fresh).map_err(|error| format!("copy {}: {error}", from.display()))?;
    fs::rename(&fresh, to)?;
    Ok(())
}
