//! Builds the C programs and runs them against the simulated `libcuda.so.1`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;
use vmm_pool::driver::sim::{SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{DeviceOrdinal, Driver};

/// Memory of each of the two devices of a test's node.
pub(crate) const CAPACITY_BYTES: u64 = 256 << 20;

/// A node, the library under the name that programs ask for, and a place for built programs.
#[derive(Debug)]
pub(crate) struct Stage {
    dir: TempDir,
}

impl Stage {
    /// A fresh node of two devices.
    pub(crate) fn new() -> Self {
        let dir = tempfile::Builder::new()
            .prefix("simcuda-test-")
            .tempdir_in("/dev/shm")
            .expect("a directory under /dev/shm");
        SimNode::create(dir.path().join("node"), &[CAPACITY_BYTES; 2]).expect("a node");
        let library = library_path();
        std::os::unix::fs::symlink(&library, dir.path().join("libcuda.so.1"))
            .expect("a link to the library");
        Self { dir }
    }

    /// A driver of this process on the node, for looking at it.
    pub(crate) fn observer(&self) -> SimDriver {
        let node = SimNode::open(self.dir.path().join("node")).expect("the node");
        let driver = SimDriver::new(node, SimOptions::default());
        driver.make_current(DeviceOrdinal(0)).expect("device 0");
        driver
    }

    /// Compiles `programs/<name>.c`.
    pub(crate) fn compile(&self, name: &str) -> PathBuf {
        let program = self.dir.path().join(name);
        let status = Command::new("cc")
            .args(["-std=gnu11", "-O1", "-Wall", "-Werror", "-Wno-unused-variable"])
            .args(["-Wno-unused-function", "-o"])
            .arg(&program)
            .arg(source(&format!("{name}.c")))
            .arg("-ldl")
            .status()
            .expect("a C compiler");
        assert!(status.success(), "{name}.c does not compile");
        program
    }

    /// A command that finds the library and the node.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env("LD_LIBRARY_PATH", self.dir.path())
            .env("SIMCUDA_NODE", self.dir.path().join("node"))
            .env_remove("CUDA_VISIBLE_DEVICES");
        command
    }
}

/// A file of `programs/`.
pub(crate) fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(name)
}

/// What a program printed, which must have ended well.
pub(crate) fn transcript(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
    text
}

/// The library that this test run was built with, which lies beside the test.
fn library_path() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let deps = test.parent().expect("a directory of build outputs");
    let library = deps.join("libcuda.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}
