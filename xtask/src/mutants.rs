//! `mutants`: changes the core one place at a time, and lists the changes that no test notices (docs/mutants.md).

use clap::ValueEnum;

use crate::workspace::Workspace;
use crate::{Outcome, process};

/// A part of the core, and the tests that ought to notice any change of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// Gate, ledger, store, and the steps of a pause and resume.
    Pool,
    /// Member, coordinator and cut.
    Tenants,
}

impl Part {
    fn package(self) -> &'static str {
        match self {
            Self::Pool => "vmm-pool",
            Self::Tenants => "tenants",
        }
    }

    fn files(self) -> &'static [&'static str] {
        match self {
            Self::Pool => &[
                "vmm-pool/src/gate.rs",
                "vmm-pool/src/slots.rs",
                "vmm-pool/src/deferred.rs",
                "vmm-pool/src/copies.rs",
                "vmm-pool/src/ledger/**",
                "vmm-pool/src/store/**",
                "vmm-pool/src/transition/**",
            ],
            Self::Tenants => {
                &["tenants/src/member/**", "tenants/src/coordinator/**", "tenants/src/cut/**"]
            }
        }
    }

    /// For `cargo test`. What takes minutes is left out: it would be run again for each change that nothing else
    /// notices, and the rest has a test of its own for what it does.
    fn tests(self) -> &'static [&'static str] {
        match self {
            Self::Pool => &[
                "--lib",
                "--test",
                "pool_sim",
                "--",
                "--skip",
                "any_call_of_",
                "--skip",
                "model::",
                "--skip",
                "takes_no_longer",
            ],
            Self::Tenants => {
                &["--lib", "--tests", "--", "--skip", "any_call_of_", "--skip", "any_two_calls_of_"]
            }
        }
    }

    /// The arguments of cargo-mutants, with `arguments` of the caller's.
    fn command_line(self, arguments: &[String]) -> Vec<String> {
        let mut line =
            vec!["mutants".to_owned(), "--package".to_owned(), self.package().to_owned()];
        let has_files =
            arguments.iter().any(|one| one.starts_with("--file") || one.starts_with("-f"));
        // Files of the caller's choosing take the place of all.
        for file in self.files().iter().filter(|_| !has_files) {
            line.extend(["--file".to_owned(), (*file).to_owned()]);
        }
        line.extend(["--output".to_owned(), format!("target/mutants-{}", self.package())]);
        line.extend_from_slice(arguments);
        line.push("--".to_owned());
        line.extend(self.tests().iter().map(|&one| one.to_owned()));
        line
    }
}

/// Runs cargo-mutants over `part`; further `arguments` are passed on.
pub(crate) fn run(workspace: &Workspace, part: Part, arguments: &[String]) -> Outcome {
    if process::output(&mut workspace.cargo(&["mutants", "--version"])).is_err() {
        return Err("cargo-mutants is not installed: `cargo install cargo-mutants --locked`".into());
    }
    let line = part.command_line(arguments);
    let line: Vec<&str> = line.iter().map(String::as_str).collect();
    process::run(&mut workspace.cargo(&line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_callers_choosing_take_the_place_of_all() {
        let all = Part::Pool.command_line(&["--list".to_owned()]);
        assert!(all.contains(&"vmm-pool/src/ledger/**".to_owned()));
        let one = ["--file", "vmm-pool/src/gate.rs"].map(str::to_owned);
        let one = Part::Pool.command_line(&one);
        assert!(!one.contains(&"vmm-pool/src/ledger/**".to_owned()));
        assert!(one.contains(&"vmm-pool/src/gate.rs".to_owned()));
    }

    #[test]
    fn what_is_for_the_tests_stands_last() {
        let line = Part::Pool.command_line(&["--shard".to_owned(), "1/8".to_owned()]);
        let first_of_tests = line.iter().position(|one| one == "--").unwrap();
        assert_eq!(line[first_of_tests - 2..first_of_tests], ["--shard", "1/8"]);
        assert_eq!(line[first_of_tests + 1], "--lib");
    }
}
