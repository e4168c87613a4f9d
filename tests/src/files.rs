//! Where the built things are.

use std::path::{Path, PathBuf};

use crate::{Outcome, Trouble};

/// What the tests run, as `cargo xtask test` built it.
#[derive(Clone, Debug)]
pub struct Files {
    /// The preload object.
    pub preload: PathBuf,
    /// A directory with the simulated `libcuda.so.1`.
    pub simcuda_dir: PathBuf,
    /// The `sublet` command.
    pub sublet: PathBuf,
    /// The library that is loaded instead of NCCL.
    pub nccl: PathBuf,
}

impl Files {
    /// Reads the environment.
    pub fn from_environment() -> Outcome<Self> {
        let path = |name: &str| {
            std::env::var_os(name).map(PathBuf::from).ok_or_else(|| {
                Trouble::new(format!(
                    "{name} is not set: these tests need built files; run `cargo xtask test`"
                ))
            })
        };
        Ok(Self {
            preload: path("SUBLET_TEST_PRELOAD")?,
            simcuda_dir: path("SUBLET_TEST_SIMCUDA_DIR")?,
            sublet: path("SUBLET_TEST_BIN")?,
            nccl: path("SUBLET_TEST_NCCL")?,
        })
    }

    /// What `programs/NAME.c` was compiled to.
    pub fn program(name: &str) -> PathBuf {
        Path::new(env!("OUT_DIR")).join(name)
    }

    /// The library that looks like NCCL to callers alone, `programs/nccl_like.c`.
    pub fn nccl_like() -> PathBuf {
        Self::program("nccl-like/libnccl.so.2")
    }

    /// A directory with a simulated library: `simnccl`, with that of its experts, or `simnvml`.
    pub fn library_dir(name: &str) -> PathBuf {
        Self::program(name)
    }

    /// A script of `programs`.
    pub fn script(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(name)
    }
}
