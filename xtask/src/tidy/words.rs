//! Phrases that readers stumble over, and what to write instead.
//!
//! Neither pages, outside of code, nor sources have any of them.

use super::{Finding, has_extension};

/// This file names the phrases.
const OWN: &str = "xtask/src/tidy/words.rs";
/// Each phrase, and what to write instead.
const PHRASES: [(&str, &str); 7] = [
    ("anew", "\"again\""),
    ("asked for", "the verb: \"requested\", \"allocated\", \"wanted\""),
    ("at once", "\"immediately\" or \"simultaneously\""),
    ("beside", "\"next to\", \"during\" or \"in addition to\""),
    ("in place of", "\"instead of\""),
    ("is had", "the verb: \"exists\", \"was got\""),
    ("whoever", "who it is: \"the process that\", \"the caller\""),
];
/// The extensions of the files that are read in addition to pages.
const SOURCES: [&str; 6] = ["c", "h", "py", "pyi", "rs", "sh"];
/// Findings about `files`, by path and text.
pub(super) fn check(files: &[(String, String)]) -> Vec<Finding> {
    let others = files.iter().filter(|(path, _)| path != OWN);
    others.flat_map(|(path, text)| phrases(path, text)).collect()
}

/// Is this a file whose words are looked at?
pub(super) fn is_read(path: &str) -> bool {
    has_extension(path, "md") || SOURCES.iter().any(|extension| has_extension(path, extension))
}

/// The phrases in one file.
fn phrases(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, line) in text.lines().enumerate() {
        // What a page quotes in code type is the code's to mend.
        let line = if has_extension(path, "md") { without_code(line) } else { line.to_owned() };
        let line = line.to_lowercase();
        for (phrase, instead) in PHRASES {
            for (offset, _) in line.match_indices(phrase) {
                if is_word(&line, offset, phrase.len()) {
                    let next = format!("write {instead}");
                    findings.push(Finding::new(path, number + 1, format!("\"{phrase}\""), next));
                }
            }
        }
    }
    findings
}

/// `line` without what stands between backticks.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("``")
}

/// Do the `length` bytes at `offset` begin and end a word? Names in code, with underscores, are words too.
fn is_word(line: &str, offset: usize, length: usize) -> bool {
    let inside = |letter: Option<char>| letter.is_some_and(|it| it.is_alphanumeric() || it == '_');
    !inside(line[..offset].chars().next_back()) && !inside(line[offset + length..].chars().next())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        check(&[(path.to_owned(), text.to_owned())]).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn phrases_of_pages_are_found_but_for_those_in_code() {
        assert_eq!(
            found("docs/a.md", "One.\nIt goes At once, `whoever` asks."),
            ["docs/a.md:2: \"at once\"; write \"immediately\" or \"simultaneously\""]
        );
        assert_eq!(found("docs/a.md", "besides, `a` at `at once`, canewood"), [""; 0]);
    }

    #[test]
    fn phrases_of_sources_are_found_but_for_those_in_names() {
        let line = "/// It runs beside it.\nfn two_at_once() {}";
        let said = found("nowhere/a.rs", line);
        assert_eq!(said.len(), 1);
        assert!(said[0].starts_with("nowhere/a.rs:1: \"beside\"; write "), "{said:?}");
        assert_eq!(found(OWN, line), [""; 0]);
    }
}
