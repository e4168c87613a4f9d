//! The command to type next, by the code of a failure and the command line. Each code's entry in `docs/errors.md` has its
//! command.

use std::env;

use tenants::code::Code;

use crate::explain;

/// Returns the command line as it was typed, with the command's own name first.
pub(crate) fn typed() -> Vec<String> {
    let words = env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    std::iter::once("sublet".to_owned()).chain(words).collect()
}

/// Returns a command that helps with `code`, for a person who has typed `words`. None if only the message can help. `is_outside`:
/// no other tenant could free the missing memory.
pub(crate) fn next(code: Code, is_outside: bool, words: &[String]) -> Option<String> {
    let verb = words.get(1).map_or("", String::as_str);
    let name = words.get(2).filter(|word| !word.starts_with('-'));
    let tenant = name.map_or("TENANT", String::as_str);
    let has = |option: &str| words.iter().any(|word| word.starts_with(option));
    let is_full = code == Code::GpuFull;
    // For a save, the message itself says which directory is suitable.
    if code == Code::Other || code == Code::Usage && verb == "save" {
        None
    } else if code == Code::Usage {
        Some(format!("sublet {verb} --help"))
    } else if is_full && has("--wait") {
        Some("sublet ps".to_owned())
    } else if is_full && (verb == "swap" || has("--tag") || has("--library")) {
        Some(format!("{} --wait", words.join(" ")))
    } else if is_full && (is_outside || verb == "switch") {
        Some(format!("sublet resume {tenant} --wait"))
    } else {
        explain::next(code).map(|next| next.replace("TENANT", tenant))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use clap::Parser as _;
    use clap::error::ErrorKind;

    use super::*;
    use crate::args::{Cli, plain};

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    /// It is one, or begins one.
    fn is_command(line: &str) -> bool {
        let words = plain(words(line).into_iter().map(Into::into));
        let is_begun = |error: clap::Error| {
            error.exit_code() == 0 || error.kind() == ErrorKind::MissingRequiredArgument
        };
        Cli::try_parse_from(words).map_or_else(is_begun, |_| true)
    }

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    #[test]
    fn commands_that_are_told_next_can_be_typed() {
        for line in [
            "sublet resume train --tag kv",
            "sublet swap a b --timeout 1s",
            "sublet switch a --wait",
            "sublet pause a",
        ] {
            for code in Code::ALL {
                if let Some(next) = next(code, false, &words(line)) {
                    assert!(is_command(&next), "{line}: {code}: {next}");
                }
            }
        }
        let after = |line: &str| next(Code::GpuFull, false, &words(line)).unwrap();
        assert_eq!(after("sublet resume train"), "sublet switch train");
        assert_eq!(after("sublet resume train --wait=5s"), "sublet ps");
        assert_eq!(after("sublet swap a b"), "sublet swap a b --wait");
        assert_eq!(after("sublet resume --timeout 2s a"), "sublet switch TENANT");
        assert_eq!(after("sublet switch train"), "sublet resume train --wait");
        let outside = next(Code::GpuFull, true, &words("sublet resume train"));
        assert_eq!(outside.unwrap(), "sublet resume train --wait");
    }

    /// Commands between backticks in what our own code says, each with its file. What is filled in is `x`.
    fn said(dir: &Path, found: &mut Vec<(String, String)>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                if !path.ends_with("tests") {
                    said(&path, found);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
                let code = code.collect::<Vec<_>>().join("\n").replace("\\\n", "");
                let code = code.split("#[cfg(test)]").next().unwrap_or_default();
                let spans = code.split('`').skip(1).step_by(2);
                let ours = spans.filter(|span| span.starts_with("sublet ") && span.len() < 200);
                let file = path.display().to_string();
                found.extend(ours.map(|span| (file.clone(), span.to_owned())));
            }
        }
    }

    #[test]
    fn commands_in_messages_can_be_typed() {
        let mut found = Vec::new();
        for dir in ["tenants", "ffi/src", "adapters"] {
            said(&root().join(dir), &mut found);
        }
        assert!(found.len() > 20, "{}", found.len());
        for (file, line) in found {
            let mut filled = String::new();
            let mut depth = 0;
            for character in line.replace("{wanted}", "1GiB").chars() {
                match character {
                    '{' => depth += 1,
                    '}' => {
                        depth -= 1;
                        filled.push('x');
                    }
                    _ if depth == 0 => filled.push(character),
                    _ => {}
                }
            }
            assert!(is_command(&filled), "{file}: `{line}`");
        }
    }
}
