//! `sublet completions` and `sublet man`: files for shells and `man`, from the definition of the command line.

use std::io;
use std::iter;
use std::path::Path;
use std::process::ExitCode;

use clap::CommandFactory as _;
use clap_complete::env::Shells;
use clap_mangen::Man;

use crate::args::{Cli, CompletionsArgs, ManArgs};
use crate::failure::{EXIT_UNCHANGED, EXIT_USAGE, Failure};
use crate::files;
use crate::output::Output;

const NAME: &str = "sublet";

pub(crate) fn completions(
    args: &CompletionsArgs,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let unknown = || Failure::new(format!("no script for {}", args.shell), EXIT_USAGE);
    let shells = Shells::builtins();
    let shell = shells.completer(&args.shell).ok_or_else(unknown)?;
    let mut script = Vec::new();
    let written = shell.write_registration("COMPLETE", NAME, NAME, NAME, &mut script);
    written.map_err(|error| Failure::of(&error, EXIT_UNCHANGED))?;
    output.text_block(&String::from_utf8_lossy(&script));
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn man(args: &ManArgs, output: &mut Output) -> Result<ExitCode, Failure> {
    let pages = pages()?;
    for (name, text) in &pages {
        write(&args.dir, name, text)?;
    }
    output.line(format!(
        "wrote {} manual pages to {dir}; read one with: man {dir}/{NAME}.1",
        pages.len(),
        dir = args.dir.display()
    ));
    Ok(ExitCode::SUCCESS)
}

/// Returns the name and text of each page: the command's own, and one for each subcommand.
fn pages() -> Result<Vec<(String, Vec<u8>)>, Failure> {
    let mut whole = Cli::command().disable_help_subcommand(true);
    // This gives the subcommands the names of their pages.
    whole.build();
    let commands: Vec<_> = iter::once(&whole).chain(shown(&whole)).cloned().collect();
    let page = |command| -> io::Result<(String, Vec<u8>)> {
        let page = Man::new(command);
        let mut text = Vec::new();
        page.render(&mut text)?;
        Ok((page.get_filename(), text))
    };
    let pages: io::Result<_> = commands.into_iter().map(page).collect();
    pages.map_err(|error| Failure::of(&error, EXIT_UNCHANGED))
}

/// Returns the commands that people type.
fn shown(whole: &clap::Command) -> impl Iterator<Item = &clap::Command> {
    whole.get_subcommands().filter(|command| !command.is_hide_set())
}

fn write(dir: &Path, name: &str, text: &[u8]) -> Result<(), Failure> {
    files::replace(&dir.join(name), &String::from_utf8_lossy(text))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn names() -> Vec<String> {
        let whole = Cli::command();
        shown(&whole).map(|part| part.get_name().to_owned()).collect()
    }

    #[test]
    fn every_command_has_a_page_that_names_its_options() {
        let dir = tempfile::tempdir().unwrap();
        let args = ManArgs { dir: dir.path().to_owned() };
        assert_eq!(man(&args, &mut Output::new()).unwrap(), ExitCode::SUCCESS);
        for name in names() {
            let text = fs::read_to_string(dir.path().join(format!("sublet-{name}.1"))).unwrap();
            // A hyphen is `\-` in a manual page.
            let shown = name.replace('-', "\\-");
            assert!(text.contains(&format!("sublet {shown}")), "{name}: {text}");
        }
        let swap = fs::read_to_string(dir.path().join("sublet-swap.1")).unwrap();
        assert!(swap.contains("out\\-tag") && swap.contains("timeout"), "{swap}");
        let whole = fs::read_to_string(dir.path().join("sublet.1")).unwrap();
        assert!(whole.contains("Exit codes:") && whole.contains("130"), "{whole}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), names().len() + 1);
    }

    #[test]
    fn every_shell_asks_this_command() {
        for shell in ["bash", "zsh", "fish"] {
            let mut output = Output::default();
            completions(&CompletionsArgs { shell: shell.to_owned() }, &mut output).unwrap();
            assert!(output.text().contains("COMPLETE="), "{shell}: {}", output.text());
        }
    }

    #[test]
    fn a_directory_that_is_not_there_is_an_error() {
        let args = ManArgs { dir: "/no/such/directory".into() };
        let failure = man(&args, &mut Output::new()).unwrap_err();
        assert!(failure.to_string().contains("/no/such/directory/sublet.1"), "{failure}");
        assert_eq!(failure.exit_code(), ExitCode::from(1));
    }
}
