//! Where the built things are.

use std::path::PathBuf;

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
    /// The library that is loaded in place of NCCL.
    pub nccl: PathBuf,
    /// The compiled `programs/rank.c`.
    pub rank: PathBuf,
    /// The compiled `programs/devices.c`.
    pub devices: PathBuf,
    /// The compiled `programs/handmade.c`.
    pub handmade: PathBuf,
    /// The compiled `programs/preposted.c`.
    pub preposted: PathBuf,
    /// The compiled `programs/wander.c`.
    pub wander: PathBuf,
    /// The compiled `programs/family.c`.
    pub family: PathBuf,
    /// The compiled `programs/turns.c`.
    pub turns: PathBuf,
    /// The compiled `programs/hoard.c`.
    pub hoard: PathBuf,
    /// The compiled `programs/nccl_like.c`.
    pub nccl_like: PathBuf,
    /// A directory with the simulated `libnccl.so.2`, `programs/simnccl.c`.
    pub simnccl_dir: PathBuf,
    /// A directory with the simulated `libnvidia-ml.so.1`, `programs/simnvml.c`.
    pub simnvml_dir: PathBuf,
    /// `programs/nvml.py`.
    pub nvml_python: PathBuf,
    /// The compiled `programs/spmd.c`.
    pub spmd: PathBuf,
    /// `programs/spmd.py`.
    pub spmd_python: PathBuf,
}

impl Files {
    /// Reads the environment.
    ///
    /// # Errors
    /// When a variable is missing, with the command to run instead.
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
            rank: PathBuf::from(env!("SUBLET_RANK_PROGRAM")),
            devices: PathBuf::from(env!("SUBLET_DEVICES_PROGRAM")),
            handmade: PathBuf::from(env!("SUBLET_HANDMADE_PROGRAM")),
            preposted: PathBuf::from(env!("SUBLET_PREPOSTED_PROGRAM")),
            wander: PathBuf::from(env!("SUBLET_WANDER_PROGRAM")),
            family: PathBuf::from(env!("SUBLET_FAMILY_PROGRAM")),
            turns: PathBuf::from(env!("SUBLET_TURNS_PROGRAM")),
            hoard: PathBuf::from(env!("SUBLET_HOARD_PROGRAM")),
            nccl_like: PathBuf::from(env!("SUBLET_NCCL_LIKE_LIBRARY")),
            simnccl_dir: PathBuf::from(env!("SUBLET_SIMNCCL_DIR")),
            simnvml_dir: PathBuf::from(env!("SUBLET_SIMNVML_DIR")),
            nvml_python: PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("programs/nvml.py"),
            spmd: PathBuf::from(env!("SUBLET_SPMD_PROGRAM")),
            spmd_python: PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("programs/spmd.py"),
        })
    }
}
