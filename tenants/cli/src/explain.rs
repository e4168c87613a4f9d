//! `sublet explain` and `sublet docs`: entries of the documentation, and the location of its pages.

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};
use tenants::code::Code;

use crate::failure::{EXIT_UNCHANGED, Failure};
use crate::output::Output;

/// The page of errors. It is made of the comments in the sources; a check of the build keeps it current.
const ERRORS: &str = include_str!("../../../docs/errors.md");
/// Folders of pages, below a parent folder of the command: the installed one, and that of a clone.
const FOLDERS: [&str; 2] = ["share/doc/sublet/docs", "docs"];
/// A page that is in such a folder.
const A_PAGE: &str = "larger-than-memory.md";

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// The word in brackets at the end of a message
    #[arg(value_parser = PossibleValuesParser::new(codes()))]
    code: String,
}

fn codes() -> Vec<PossibleValue> {
    Code::ALL.map(|code| PossibleValue::new(code.to_string())).into()
}

/// Returns the page's text about a code.
fn entry(code: &str) -> &'static str {
    let mut entries = ERRORS.split("\n### ").filter_map(|part| part.split("\n## ").next());
    let entry = entries.find_map(|entry| entry.strip_prefix(code)?.strip_prefix("\n\n"));
    entry.unwrap_or_default().trim_end()
}

/// Returns the command to type next, with `TENANT` for a name.
pub(crate) fn next(code: Code) -> Option<&'static str> {
    let line = entry(&code.to_string()).lines().find_map(|line| line.strip_prefix("Next: `"));
    line?.split('`').next()
}

pub(crate) fn explain(args: &ExplainArgs, output: &mut Output) -> ExitCode {
    output.lines(entry(&args.code).lines().map(str::to_owned));
    ExitCode::SUCCESS
}

/// Returns the folder with the pages of this version.
fn folder() -> Option<PathBuf> {
    let command = env::current_exe().ok()?;
    let places = command.ancestors().skip(1).flat_map(|above| FOLDERS.map(|name| above.join(name)));
    places.into_iter().find(|folder| folder.join(A_PAGE).is_file())
}

pub(crate) fn docs(output: &mut Output) -> Result<ExitCode, Failure> {
    let missing = || {
        let version = env!("CARGO_PKG_VERSION");
        let text = format!(
            "no pages are installed with this command: they are in the wheel, and in `docs` of the source of Sublet {version}"
        );
        Failure::new(text, EXIT_UNCHANGED)
    };
    let folder = folder().ok_or_else(missing)?;
    output.line(format!("{}: begin with concepts.md there", folder.display()));
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Cli, Command};

    fn asked(code: &str) -> Result<String, clap::Error> {
        let Command::Explain(args) = Cli::try_parse_from(["sublet", "explain", code])?.command
        else {
            panic!("another command");
        };
        let mut output = Output::default();
        assert_eq!(explain(&args, &mut output), ExitCode::SUCCESS);
        Ok(output.text().to_owned())
    }

    #[test]
    fn every_code_has_an_entry_and_nothing_of_the_next() {
        for code in Code::ALL {
            let entry = asked(&code.to_string()).unwrap();
            assert!(
                entry.lines().count() > 1 && entry.contains("Next: `sublet "),
                "{code}: {entry}"
            );
            assert!(!entry.contains('#') && !entry.contains("| "), "{code}: {entry}");
        }
    }

    #[test]
    fn a_word_that_is_no_code_is_answered_with_the_nearest() {
        let error = asked("gpu-ful").unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("similar value exists: 'gpu-full'"), "{error}");
    }

    #[test]
    fn pages_are_found_from_a_folder_of_the_command() {
        assert!(folder().unwrap().ends_with("docs"));
    }
}
