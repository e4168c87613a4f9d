//! Builds C programs and runs them with and without the preload object.

use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) use sublet_stage::programs::transcript;
use sublet_stage::{Place, programs};
use vmm_pool::driver::DeviceOrdinal;

/// Memory of each of the two devices.
pub(crate) const CAPACITY_BYTES: u64 = 512 << 20;

/// Is the preload object in the process?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Preload {
    Without,
    With,
    /// Not from the start: programs that read `SUBLET_ATTACH` open it and attach.
    Attached,
}

/// A path that `cargo xtask test` gives to tests.
pub(crate) fn given(variable: &str) -> PathBuf {
    let path = std::env::var_os(variable);
    path.unwrap_or_else(|| panic!("{variable} is not set: run `cargo xtask test`")).into()
}

/// `libsublet.so`.
pub(crate) fn preload_path() -> PathBuf {
    given("SUBLET_TEST_PRELOAD")
}

/// The directory that holds the simulated `libcuda.so.1`.
pub(crate) fn simcuda_dir() -> PathBuf {
    given("SUBLET_TEST_SIMCUDA_DIR")
}

/// The root of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A node of two devices, a run directory, and a place for what is built.
#[derive(Debug)]
pub(crate) struct Stage {
    place: Place,
}

impl Stage {
    pub(crate) fn new() -> Self {
        Self { place: Place::new(&[CAPACITY_BYTES; 2]).expect("a place") }
    }

    /// A file or directory of this stage.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// Free bytes of both devices, as another process sees them.
    pub(crate) fn free_bytes(&self) -> [u64; 2] {
        [0, 1].map(|device| self.place.memory(DeviceOrdinal(device)).expect("memory").free_bytes)
    }

    fn cc(&self, source: &Path, target: &str, flags: &[&str]) -> PathBuf {
        let target = self.path(target);
        let headers = ["tests/simcuda/programs", "ffi/include"];
        let headers = headers.map(|folder| format!("-I{}", root().join(folder).display()));
        let flags: Vec<&str> = headers.iter().map(String::as_str).chain(flags.to_vec()).collect();
        programs::cc(source, &target, &flags);
        target
    }

    /// Builds `tests/programs/preload_<name>.c`.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.cc(&own_source(name), name, &["-rdynamic"])
    }

    /// Builds `tests/programs/preload_<name>.c` as the program `target`.
    pub(crate) fn program_named(&self, name: &str, target: &str) -> PathBuf {
        self.cc(&own_source(name), target, &["-rdynamic"])
    }

    /// Builds `tests/programs/preload_<name>.c` against a library of this stage.
    pub(crate) fn program_with(&self, name: &str, library: &Path) -> PathBuf {
        let library = library.to_str().expect("UTF-8");
        self.cc(&own_source(name), name, &["-rdynamic", "-Wl,--no-as-needed", library])
    }

    /// Builds `tests/programs/preload_<name>.c` with `flags`.
    pub(crate) fn program_as(&self, name: &str, flags: &[&str]) -> PathBuf {
        self.cc(&own_source(name), name, &[&["-rdynamic"], flags].concat())
    }

    /// Builds `tests/programs/preload_<name>.c` as `lib<name>.so` with `flags`.
    pub(crate) fn library_as(&self, name: &str, flags: &[&str]) -> PathBuf {
        let flags = [&["-shared", "-fPIC"], flags].concat();
        self.cc(&own_source(name), &format!("lib{name}.so"), &flags)
    }

    /// Builds `tests/programs/preload_<name>.c` as the library `target` with `flags`.
    pub(crate) fn library_named(&self, name: &str, target: &str, flags: &[&str]) -> PathBuf {
        let soname = format!("-Wl,-soname,{target}");
        self.cc(&own_source(name), target, &[&["-shared", "-fPIC", &soname], flags].concat())
    }

    /// Builds `tests/programs/preload_<name>.c` as `lib<name>.so`.
    pub(crate) fn library(&self, name: &str) -> PathBuf {
        self.cc(&own_source(name), &format!("lib{name}.so"), &["-shared", "-fPIC"])
    }

    /// Builds a library that calls itself NCCL, and returns `which` and more from `ncclAllReduce`.
    pub(crate) fn nccl(&self, which: u32) -> PathBuf {
        let (name, which) = (format!("libnccl{which}.so"), format!("-DWHICH={which}"));
        let soname = format!("-Wl,-soname,{name}");
        self.cc(&own_source("nccl"), &name, &["-shared", "-fPIC", &soname, &which])
    }

    /// Builds a library that links `nccl`.
    pub(crate) fn nccl_user(&self, name: &str, nccl: &Path) -> PathBuf {
        let rpath = format!("-Wl,-rpath,{}", self.place.path().display());
        let flags = ["-shared", "-fPIC", &rpath, nccl.to_str().expect("UTF-8")];
        self.cc(&own_source("nccl_user"), name, &flags)
    }

    /// Builds a library that needs the preload object and `nccl`, in this order.
    pub(crate) fn both(&self, name: &str, nccl: &Path) -> PathBuf {
        let preload = preload_path();
        let folders = [preload.parent().expect("a folder"), self.place.path()];
        let rpaths = folders.map(|folder| format!("-Wl,-rpath,{}", folder.display()));
        let libraries = [&preload, nccl].map(|path| path.to_str().expect("UTF-8"));
        let mut flags = vec!["-shared", "-fPIC", "-Wl,--no-as-needed"];
        flags.extend(rpaths.iter().map(String::as_str).chain(libraries));
        self.cc(&own_source("local"), name, &flags)
    }

    /// Builds a program of the simulated driver's own tests.
    pub(crate) fn driver_program(&self, name: &str) -> PathBuf {
        self.cc(&driver_source(&format!("{name}.c")), name, &[])
    }

    /// A command that finds the simulated driver, in a tenant of its own.
    pub(crate) fn command(&self, program: impl AsRef<Path>, preload: Preload) -> Command {
        let mut command = self.bare_command(program, preload);
        command.env("LD_LIBRARY_PATH", simcuda_dir()).env("SIMCUDA_NODE", self.path("node"));
        command
    }

    /// A command on a machine without a driver.
    pub(crate) fn bare_command(&self, program: impl AsRef<Path>, preload: Preload) -> Command {
        let mut command = Command::new(program.as_ref());
        command
            .env("SUBLET_RUN_DIR", self.path("run"))
            .env("SUBLET_TENANT", "preload-test")
            .env("STAGE_DIR", self.place.path())
            .env_remove("LD_LIBRARY_PATH")
            .env_remove("CUDA_VISIBLE_DEVICES");
        match preload {
            Preload::With => command.env("LD_PRELOAD", preload_path()),
            Preload::Without | Preload::Attached => command.env_remove("LD_PRELOAD"),
        };
        if preload == Preload::Attached {
            command.env("SUBLET_ATTACH", preload_path());
        }
        command
    }

    /// What `program` prints with and without the preload object, which must be the same.
    pub(crate) fn same(&self, program: &Path, arguments: &[&str]) -> String {
        self.same_as_without(Preload::With, program, arguments)
    }

    /// What `program` prints without us and with us by way of `preload`, which must be the same.
    pub(crate) fn same_as_without(
        &self,
        preload: Preload,
        program: &Path,
        arguments: &[&str],
    ) -> String {
        let [without, with] = [Preload::Without, preload].map(|preload| {
            let output = self.command(program, preload).args(arguments).output();
            transcript(&output.expect("the program starts"))
        });
        assert_eq!(with, without, "{} {arguments:?}", program.display());
        with
    }
}

fn own_source(name: &str) -> PathBuf {
    own_file(&format!("preload_{name}.c"))
}

/// A file of `tests/programs`.
pub(crate) fn own_file(name: &str) -> PathBuf {
    root().join("tests/programs").join(name)
}

/// A file of `tests/simcuda/programs`.
pub(crate) fn driver_source(name: &str) -> PathBuf {
    root().join("tests/simcuda/programs").join(name)
}

/// The functions that a shared library exports, from its dynamic symbol table.
pub(crate) fn exported(library: &Path) -> Vec<String> {
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(library).output();
    let text = transcript(&output.expect("nm, of binutils"));
    let functions = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace().rev();
        let (name, kind) = (words.next()?, words.next()?);
        matches!(kind, "T" | "W" | "i").then(|| name.split('@').next().unwrap_or(name).to_owned())
    });
    functions.collect()
}
