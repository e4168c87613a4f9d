//! `cargo xtask`: everything that builds, tests and checks the project.
//!
//! No logic lives in CI files: what runs there is one of these commands, so that a developer runs the
//! very same thing. Tests that need a GPU are not run here; `gpu-bundle` packs what they need.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command-line program whose output is its purpose"
)]

mod bindings;
mod book;
mod build;
mod bundle;
mod functions;
mod glibc;
mod notices;
mod package;
mod portable;
mod process;
mod python;
mod release;
mod scripts;
mod shims;
mod simulated;
mod stages;
mod test;
mod tidy;
mod wheel;
mod workspace;

use std::error::Error;
use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

/// The result of a command: an error is one sentence for the reader, with the next step in it.
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
    /// Build what tests across processes run, and run a command that is told by variables where it is.
    Built {
        /// Build what users run.
        #[arg(long)]
        release: bool,
        /// Build the Python package too, and have Python import it.
        #[arg(long)]
        python: bool,
        /// Without one, the variables are printed for a shell.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<std::ffi::OsString>,
    },
    /// Count the files and functions that a pause, a resume and a switch run. It needs valgrind.
    Walk,
    /// Run the tests of the Python package alone.
    Python,
    /// Run what a build must pass in addition to `test`: clippy, the documentation and dependencies, warnings denied.
    Lint,
    /// Check the house rules: order of modules, file sizes, messages, named tests, records.
    Tidy,
    /// Build the documents as a book, into `target/book/html`, and look at every link in it.
    Book,
    /// Pack what the GPU lane needs into `target/gpu-bundle`.
    GpuBundle,
    /// Build the Python package as one wheel, into `target/wheels`.
    Wheel,
    /// Write the files of a release into `target/release-files`: wheel, source, checksums and notes.
    Release {
        /// The tag, which must be of the version that `Cargo.toml` names, such as `v0.1.0`.
        tag: String,
    },
    /// Write which functions the libraries of NCCL's versions export, for the test that compares them with ours.
    NcclFunctions {
        /// The file to write, such as `tests/functions/nccl.txt`.
        target: std::path::PathBuf,
        /// `VERSION=FILE`, oldest first: the library of a version, such as `nvidia/nccl/lib/libnccl.so.2` of its wheel.
        #[arg(required = true)]
        libraries: Vec<functions::Library>,
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
        Command::Built { release, python, command } => {
            let built = build::Built::build(&workspace, *release)?;
            let site = python.then(|| package::installed(&workspace, &built)).transpose()?;
            let path = site.as_deref().map(|site| ("PYTHONPATH", site));
            let variables = built.variables().into_iter().chain(path);
            let Some((program, arguments)) = command.split_first() else {
                for (name, path) in variables {
                    println!("export {name}='{}'", path.display());
                }
                return Ok(());
            };
            let mut command = workspace.command(program);
            command.args(arguments).envs(variables);
            Err(format!("{} could not be started: {}", program.display(), command.exec()).into())
        }
        Command::Walk => {
            let command = ["python3", "tests/walk.py"].map(Into::into).to_vec();
            dispatch(&Command::Built { release: false, python: false, command })
        }
        Command::Python => test::python(&workspace),
        Command::Lint => test::lint(&workspace),
        Command::Tidy => tidy::run(&workspace),
        Command::Book => book::run(&workspace),
        Command::GpuBundle => bundle::run(&workspace),
        Command::Wheel => wheel::run(&workspace),
        Command::Release { tag } => release::run(&workspace, tag),
        Command::NcclFunctions { target, libraries } => {
            functions::write(&workspace, target, libraries)
        }
        Command::Bindgen { check: true } => bindings::check(&workspace),
        Command::Bindgen { check: false } => bindings::write(&workspace),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn commands_of_the_readme_are_there_and_a_build_runs_its_tests() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let read = |name: &str| fs::read_to_string(root.join(name)).unwrap();
        let (readme, aliases, build) =
            (read("README.md"), read(".cargo/config.toml"), read(".ci/run"));
        let typed: Vec<&str> = readme
            .lines()
            .filter_map(|line| line.strip_prefix("    cargo ")?.split(" #").next())
            .map(str::trim)
            .collect();
        assert_eq!(typed, ["demo", "xtask test"]);
        for line in &typed {
            let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
            let of = |line: &str| {
                let alias = line.strip_prefix(name)?.strip_prefix(" = \"")?.strip_suffix('"')?;
                Some(format!("{alias} {rest}"))
            };
            let run = aliases.lines().find_map(of).unwrap_or_else(|| panic!("no alias {name}"));
            let ours = run.strip_prefix("run --quiet --package xtask --").unwrap_or(&run);
            let words = ours.trim_start().trim_start_matches("xtask ").split_whitespace();
            Arguments::try_parse_from(["xtask"].into_iter().chain(words)).unwrap();
            for file in run.split_whitespace().filter(|word| word.contains(".py")) {
                assert!(root.join(file).is_file(), "{file}");
            }
        }
        let test = format!("cargo {}", typed[1]);
        assert!(build.lines().any(|line| line == test), ".ci/run does not run `{test}`");
    }
}
