//! Builds that start on systems older than this one: zig links them against the symbols of the C library's version that is
//! named, whatever version is installed here.

use std::env;
use std::path::PathBuf;
use std::process::Command;

use crate::glibc::Glibc;
use crate::python;
use crate::workspace::Workspace;
use crate::{Outcome, build};

const ZIG: &str = "ziglang==0.17.0";
const ZIGBUILD: &str = "cargo-zigbuild==0.24.0";

/// The tools for such builds, and the C library that they are for.
#[derive(Debug)]
pub(crate) struct Portable {
    glibc: Glibc,
    zig: PathBuf,
    zigbuild: PathBuf,
    /// Flags that take this machine's folders out of the programs.
    flags: String,
}

impl Portable {
    /// Installs the tools under the target directory, if they are not there yet.
    pub(crate) fn install(workspace: &Workspace, glibc: Glibc) -> Outcome<Self> {
        let home = env::var_os("CARGO_HOME").map(PathBuf::from);
        let home = home.or_else(|| env::home_dir().map(|home| home.join(".cargo")));
        let home = home.ok_or("neither CARGO_HOME nor HOME is set")?;
        let crates = home.join("registry/src");
        let flags = [(&workspace.root, "/sublet"), (&crates, "/crates")]
            .map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display()));
        Ok(Self {
            glibc,
            zig: python::program(workspace, ZIG, "ziglang/zig")?,
            zigbuild: python::program(workspace, ZIGBUILD, "bin/cargo-zigbuild")?,
            // The character that parts flags in this variable, so that folders may have blanks in their names.
            flags: flags.join("\u{1f}"),
        })
    }

    /// The oldest C library that what is built starts with.
    pub(crate) fn glibc(&self) -> Glibc {
        self.glibc
    }

    /// Returns the compiler's name of the platform.
    pub(crate) fn target() -> String {
        format!("{}-unknown-linux-gnu", env::consts::ARCH)
    }

    /// Has `command` find zig, and build without names of this machine's folders.
    pub(crate) fn prepare(&self, command: &mut Command) {
        command.env("CARGO_ZIGBUILD_ZIG_PATH", &self.zig);
        command.env("CARGO_ENCODED_RUSTFLAGS", &self.flags).env_remove("RUSTFLAGS");
    }

    /// As [`build::build`].
    pub(crate) fn build(
        &self,
        workspace: &Workspace,
        arguments: &[&str],
    ) -> Outcome<build::Artifacts> {
        let mut command = workspace.command(&self.zigbuild);
        self.prepare(&mut command);
        let target = format!("{}.{}", Self::target(), self.glibc);
        command.args(["zigbuild", "--locked", "--target", &target]).args(arguments);
        build::artifacts(&mut command)
    }

    /// A compiler of C for such systems.
    pub(crate) fn compiler(&self, workspace: &Workspace) -> Command {
        let target = format!("{}-linux-gnu.{}", env::consts::ARCH, self.glibc);
        let mut command = workspace.command(&self.zig);
        command.args(["cc", "-target", &target]);
        command
    }
}
