//! `cargo xtask`: everything that builds, tests and checks the project.
//!
//! No logic lives in CI files: what runs there is one of these commands, so that a developer runs the
//! very same thing. Tests that need a GPU are not run here; `gpu-bundle` packs what they need.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command-line program whose output is its purpose"
)]

mod bench;
mod bindings;
mod book;
mod build;
mod bundle;
mod demo;
mod functions;
mod glibc;
mod markdown;
mod mutants;
mod package;
mod picture;
mod process;
mod python;
mod rl_demo;
mod scaling;
mod shims;
mod sim;
mod stages;
mod test;
mod tidy;
mod wheel;
mod workspace;

use std::error::Error;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

/// What a command returns: an error is one sentence for the reader, with the next step in it.
pub(crate) type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Builds, tests and checks the project.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run every test that needs no GPU, and set up what the tests need.
    Test,
    /// Build what tests across processes run, and print the variables that tell the tests where it is.
    Built,
    /// Run the tests of the Python package alone.
    Python,
    /// Run all that a build must pass: `test`, clippy, the documentation and dependencies, warnings denied.
    Ci,
    /// Run the main job on a simulated node of four GPUs: two tenants take turns. Needs no GPU.
    Demo,
    /// Run `examples/rl_grpo` on simulated GPUs: a trainer and a generator take turns. Needs no GPU and no PyTorch.
    RlDemo {
        /// For the example, such as `--modes sublet,cpu` or `--gpus 2`; `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run the seeded simulation: processes that work, fail and are killed are paused and resumed.
    Sim {
        /// Settles what happens; a fresh one is chosen, and shown, when none is given.
        #[arg(long)]
        seed: Option<u64>,
        /// Pauses that a resume has followed.
        #[arg(long, default_value_t = 1000)]
        cycles: u64,
        /// Most processes at once, up to 64.
        #[arg(long, default_value_t = 64)]
        processes: u64,
    },
    /// Check the house rules: layers, order of modules, unsafe list, file sizes, lints, paths.
    Tidy {
        /// Write `docs/unsafe.md` from the attributes first.
        #[arg(long)]
        write: bool,
    },
    /// Build the documents as a book, into `target/book/html`, and look at every link in it.
    Book,
    /// Pack what the GPU lane needs into `target/gpu-bundle`.
    GpuBundle,
    /// Build the Python package as one wheel, into `target/wheels`.
    Wheel,
    /// List the recorded figures, or take those that need no GPU.
    Bench {
        /// Check every file against the schema in `benchmarks/README.md`.
        #[arg(long, conflicts_with_all = ["draw", "scaling"])]
        check: bool,
        /// Draw `docs/race.svg` from a recorded race.
        #[arg(long, conflicts_with = "scaling")]
        draw: bool,
        /// The record to draw; the latest one when not given.
        #[arg(requires = "draw")]
        record: Option<std::path::PathBuf>,
        /// Count driver calls and CPU time of pauses by allocations and by processes, on the simulated driver. Takes a
        /// minute once the release build is there.
        #[arg(long)]
        scaling: bool,
    },
    /// Change the core one place at a time, and list the changes that no test notices. Takes hours; by hand.
    Mutants {
        /// What is changed.
        #[arg(value_enum, default_value = "pool")]
        part: mutants::Part,
        /// For cargo-mutants, such as `--file 'vmm-pool/src/gate.rs'`, `--shard 0/8` or `--list`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Write which functions the public headers of NCCL's versions declare, for the test that compares them with ours.
    NcclFunctions {
        /// The file to write, such as `tests/functions/nccl.txt`.
        target: std::path::PathBuf,
        /// `VERSION=FOLDER`, oldest first: a folder of headers, such as `src` of NCCL's source, or
        /// `nvidia/nccl/include` of its wheel.
        #[arg(required = true)]
        headers: Vec<functions::Headers>,
    },
    /// Write the Rust view of the C header.
    Bindgen {
        /// Write nothing, and fail when the committed view differs.
        #[arg(long)]
        check: bool,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match dispatch(&arguments.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: &Command) -> Outcome {
    let workspace = Workspace::load()?;
    match command {
        Command::Test => test::test(&workspace),
        Command::Built => {
            for (name, path) in build::Built::build(&workspace)?.variables() {
                println!("export {name}='{}'", path.display());
            }
            Ok(())
        }
        Command::Python => test::python(&workspace),
        Command::Ci => test::ci(&workspace),
        Command::Demo => demo::run(&workspace),
        Command::RlDemo { arguments } => rl_demo::run(&workspace, arguments),
        Command::Sim { seed, cycles, processes } => {
            sim::run(&workspace, *seed, *cycles, *processes)
        }
        Command::Tidy { write: true } => tidy::write(&workspace),
        Command::Tidy { write: false } => tidy::run(&workspace),
        Command::Book => book::run(&workspace),
        Command::GpuBundle => bundle::run(&workspace),
        Command::Wheel => wheel::run(&workspace),
        Command::Bench { scaling: true, .. } => scaling::run(&workspace),
        Command::Bench { draw: true, record, .. } => picture::draw(&workspace, record.as_deref()),
        Command::Bench { check, .. } => bench::run(&workspace, *check),
        Command::Mutants { part, arguments } => mutants::run(&workspace, *part, arguments),
        Command::NcclFunctions { target, headers } => functions::write(&workspace, target, headers),
        Command::Bindgen { check: true } => bindings::check(&workspace),
        Command::Bindgen { check: false } => bindings::write(&workspace),
    }
}
