//! `docs/errors.md` has an entry for every error that the crates can give.
//!
//! An entry is the message in code type, with `…` for each part that is filled in. So a message that changes takes its
//! entry along.

use super::{Finding, line_of};

/// The page.
pub(super) const PAGE: &str = "docs/errors.md";
/// The folders whose errors people meet.
const FOLDERS: [&str; 4] = ["adapters/", "ffi/", "tenants/", "vmm-pool/"];
/// Stands for what is filled in.
const GAP: char = '…';

/// Findings about `page`, which must have the messages of `rust`, files by path and text.
pub(super) fn check(page: &str, rust: &[(String, String)]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in rust.iter().filter(|(path, _)| is_asked(path)) {
        for (offset, message) in messages(text) {
            if !(page.contains(&format!("`{message}`"))
                || page.contains(&format!("`` {message} ``")))
            {
                let what = format!("{PAGE} has no entry for `{message}`");
                let next = "add one with these words in code type, what it means, and what to do";
                findings.push(Finding::new(path, line_of(text, offset), what, next));
            }
        }
    }
    findings
}

fn is_asked(path: &str) -> bool {
    let is_test =
        path.split('/').any(|part| part == "tests" || part == "tests.rs" || part == "fuzz");
    FOLDERS.iter().any(|folder| path.starts_with(folder)) && !is_test
}

/// The code before a message: of an error, and of what a process answers when it does not do its part.
const MARKS: [&str; 4] =
    ["#[error(", "wrong_state(format!(", "message: format!(", ".because(format!("];

/// The messages in `text` that have words of their own, each with its offset.
fn messages(text: &str) -> Vec<(usize, String)> {
    let marks = MARKS.iter().flat_map(|mark| text.match_indices(mark));
    let is_comment = |offset: usize| {
        let line = text[..offset].rsplit('\n').next().unwrap_or_default();
        line.trim_start().starts_with("//")
    };
    marks
        .filter(|(offset, _)| !is_comment(*offset))
        .filter_map(|(offset, mark)| {
            let inside = text[offset + mark.len()..].trim_start();
            let message = filled(&literal(inside.strip_prefix('"')?));
            message.contains(|letter: char| letter.is_alphabetic()).then_some((offset, message))
        })
        .collect()
}

/// The text of the string literal that `source` goes on with behind its first quotation mark.
fn literal(source: &str) -> String {
    let mut text = String::new();
    let mut rest = source.chars();
    while let Some(letter) = rest.next() {
        match letter {
            '"' => break,
            '\\' => match rest.next() {
                Some('\n') => {
                    let after = rest.as_str().trim_start();
                    rest = after.chars();
                }
                Some('n') => text.push('\n'),
                Some(other) => text.push(other),
                None => break,
            },
            other => text.push(other),
        }
    }
    text
}

/// The format string `text` with a gap for each part that is filled in; gaps that touch are one.
fn filled(text: &str) -> String {
    let mut message = String::new();
    let mut rest = text.chars().peekable();
    while let Some(letter) = rest.next() {
        match letter {
            '{' | '}' if rest.peek() == Some(&letter) => {
                rest.next();
                message.push(letter);
            }
            '{' => {
                for inside in rest.by_ref() {
                    if inside == '}' {
                        break;
                    }
                }
                if !message.ends_with(GAP) {
                    message.push(GAP);
                }
            }
            other => message.push(other),
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUST: &str = r#"
        #[error("there is no '{name}' ({})", known(existing))] A,
        #[error(
            "two lines of one \
             message, and {{braces}}: {a}{b}"
        )] B,
        #[error(transparent)] C,
        #[error("{0}")] D,
        // #[error("in a comment")]
        Failure { kind, message: format!("process {id} waits") }
        FailureKind::NotNow.because(format!("process {id} rests"))
    "#;

    #[test]
    fn messages_are_read_as_they_are_printed() {
        let found: Vec<_> = messages(RUST).into_iter().map(|(_, message)| message).collect();
        assert_eq!(
            found,
            [
                "there is no '…' (…)",
                "two lines of one message, and {braces}: …",
                "process … waits",
                "process … rests",
            ]
        );
    }

    #[test]
    fn message_without_an_entry_is_found_where_it_is() {
        let page =
            "| `there is no '…' (…)`, `process … waits`, `process … rests` | it is not there |\n";
        let rust = [("tenants/src/a.rs".to_owned(), RUST.to_owned())];
        let found = check(page, &rust);
        assert_eq!(found.len(), 1);
        let found = found[0].to_string();
        assert!(
            found.starts_with("tenants/src/a.rs:3: docs/errors.md has no entry for `two lines"),
            "{found}"
        );
        for path in ["xtask/src/a.rs", "tenants/src/coordinator/tests/a.rs", "tenants/fuzz/a.rs"] {
            assert!(check(page, &[(path.to_owned(), RUST.to_owned())]).is_empty(), "{path}");
        }
    }
}
