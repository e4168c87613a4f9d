//! Answers to words that clap does not know: the command or option to use instead.

use clap::CommandFactory as _;
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::args::Cli;

/// A word of other tools, the subcommands that it is typed with (all if none is named), and the right way.
const HINTS: [(&str, &str, &str); 7] = [
    ("--watch", "", "`watch -n 1 sublet ps` shows it again each second"),
    ("--deep", "resume", "a plain resume brings the contexts of a deep pause back too"),
    ("top", "", "`watch -n 1 sublet ps` shows it again each second"),
    ("suspend", "", "`sublet pause TENANT` gives its GPU memory back"),
    ("stop", "", "`sublet pause TENANT` gives its GPU memory back"),
    ("sleep", "", "`sublet pause TENANT` gives its GPU memory back"),
    ("wake", "", "`sublet resume TENANT` brings its GPU memory back"),
];

/// Returns `error` with the command that does what `words` intend, instead of clap's hint to pass an option as a name.
pub(crate) fn with_hint(mut error: clap::Error, words: &[String]) -> clap::Error {
    let is_incomplete = matches!(
        error.kind(),
        ErrorKind::MissingRequiredArgument | ErrorKind::ValueValidation | ErrorKind::InvalidValue
    );
    if is_incomplete && let Some(example) = words.get(1).and_then(|verb| example(verb)) {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![example]));
    }
    let kind = if error.kind() == ErrorKind::UnknownArgument {
        ContextKind::InvalidArg
    } else {
        ContextKind::InvalidSubcommand
    };
    let Some(ContextValue::String(word)) = error.get(kind).cloned() else { return error };
    let verb = words.get(1).map_or("", String::as_str);
    let known =
        HINTS.iter().find(|(known, of, _)| *known == word && (of.is_empty() || *of == verb));
    let hint = known.map(|(_, _, hint)| (*hint).to_owned());
    let hint = hint.or_else(|| {
        let is_name = !word.starts_with('-') && kind == ContextKind::InvalidArg;
        let names = "name one tenant; `sublet pause --all` pauses every tenant".to_owned();
        (is_name && ["pause", "resume"].contains(&verb)).then_some(names)
    });
    if kind == ContextKind::InvalidArg {
        error.remove(ContextKind::Suggested);
    }
    if let Some(hint) = hint {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint.into()]));
    }
    error
}

/// Returns the example of a subcommand's help.
fn example(verb: &str) -> Option<StyledStr> {
    Cli::command().find_subcommand(verb)?.get_after_help().cloned()
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn said(line: &str) -> String {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        with_hint(Cli::try_parse_from(&words).unwrap_err(), &words).to_string()
    }

    #[test]
    fn words_of_other_tools_are_answered_with_ours() {
        for (line, hint) in [
            ("sublet ps --watch", "tip: `watch -n 1 sublet ps`"),
            ("sublet resume a --deep", "tip: a plain resume"),
            ("sublet suspend a", "tip: `sublet pause TENANT`"),
            ("sublet top", "tip: `watch -n 1 sublet ps`"),
            ("sublet pause a b", "tip: name one tenant; `sublet pause --all`"),
            ("sublet run --tennant a -- true", "tip: a similar argument exists: '--tenant'"),
            ("sublet plan train --params 7B", "--tokens 8k"),
            ("sublet plan train --params much", "Example: sublet plan train --params 7B"),
            ("sublet pauze a", "tip: a similar subcommand exists: 'pause'"),
        ] {
            let said = said(line);
            assert!(said.contains(hint), "{line}: {said}");
            assert!(!said.contains("as a value"), "{line}: {said}");
        }
        assert!(!said("sublet ps --loud").contains("tip"));
        assert!(!said("sublet switch a b").contains("--all"));
    }
}
