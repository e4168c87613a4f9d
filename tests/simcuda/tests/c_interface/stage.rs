//! Builds the C programs and runs them against the simulated `libcuda.so.1`.

use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) use sublet_stage::programs::transcript;
use sublet_stage::{Place, programs};
use vmm_pool::driver::sim::{SimDriver, SimOptions};
use vmm_pool::driver::{DeviceOrdinal, Driver};

/// Memory of each of the two devices of a test's node.
pub(crate) const CAPACITY_BYTES: u64 = 256 << 20;

/// A node, the library under the name that programs ask for, and a place for built programs.
#[derive(Debug)]
pub(crate) struct Stage {
    place: Place,
}

impl Stage {
    /// A fresh node of two devices.
    pub(crate) fn new() -> Self {
        let place = Place::new(&[CAPACITY_BYTES; 2]).expect("a place");
        std::os::unix::fs::symlink(library_path(), place.path().join("libcuda.so.1"))
            .expect("a link to the library");
        Self { place }
    }

    /// A driver of this process on the node, for looking at it.
    pub(crate) fn observer(&self) -> SimDriver {
        let driver = self.place.driver(SimOptions::default());
        driver.make_current(DeviceOrdinal(0)).expect("device 0");
        driver
    }

    /// Compiles `programs/<name>.c`.
    pub(crate) fn compile(&self, name: &str) -> PathBuf {
        let program = self.place.path().join(name);
        programs::cc::<&str>(&source(&format!("{name}.c")), &program, &[]);
        program
    }

    /// A command that finds the library and the node.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env("LD_LIBRARY_PATH", self.place.path())
            .env("SIMCUDA_NODE", self.place.node_path())
            .env_remove("CUDA_VISIBLE_DEVICES");
        command
    }
}

/// A file of `programs/`.
pub(crate) fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(name)
}

/// The library that this test run was built with, which lies next to the test.
fn library_path() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let deps = test.parent().expect("a directory of build outputs");
    let library = deps.join("libcuda.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}
