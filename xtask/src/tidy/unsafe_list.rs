//! The list of files that may hold unsafe code: `docs/unsafe.md` and the attributes agree.

use std::collections::BTreeMap;

use super::code::{code_only, words};
use super::{Finding, line_of};

/// Where the list is.
pub(crate) const LIST: &str = "docs/unsafe.md";

/// A place in a source file that lifts the ban.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Exception {
    path: String,
    line: usize,
    /// What the attribute gives as its reason.
    reason: String,
}

/// The places in `text` where an attribute expects or allows `unsafe_code`.
pub(crate) fn exceptions(path: &str, text: &str) -> Vec<Exception> {
    let code = code_only(text);
    let mut found = Vec::new();
    for name in ["expect", "allow", "warn"] {
        for offset in words(&code, name) {
            let open = offset + name.len();
            // `.expect(..)` is a method; an attribute stands after `[`, or after `,` in a `cfg_attr`.
            let before = code[..offset].trim_end().chars().next_back();
            if !matches!(before, Some('[' | ',')) || !code[open..].starts_with('(') {
                continue;
            }
            let Some(end) = closing(&code[open..]) else {
                continue;
            };
            if words(&code[open..open + end], "unsafe_code").next().is_some() {
                found.push(Exception {
                    path: path.to_owned(),
                    line: line_of(text, offset),
                    reason: reason(&text[open..open + end]),
                });
            }
        }
    }
    found
}

/// Findings about the list: a file that it lacks, one that it names for nothing, one without a reason.
pub(crate) fn check(list: Option<&str>, exceptions: &[Exception]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let Some(list) = list else {
        findings.push(Finding::new(LIST, 1, "is missing", "write the list of unsafe files"));
        return findings;
    };
    let rows = rows(list);
    for exception in exceptions {
        let first = !findings.iter().any(|finding: &Finding| finding.path == exception.path);
        if first && !rows.contains_key(exception.path.as_str()) {
            let what = format!("lifts the ban on unsafe code and is not in {LIST}");
            let next = format!("add the row | `{}` | {} |", exception.path, exception.reason);
            findings.push(Finding::new(&exception.path, exception.line, what, next));
        }
    }
    for (path, (line, reason)) in rows {
        if !exceptions.iter().any(|exception| exception.path == path) {
            let what = format!("{path} does not lift the ban on unsafe code");
            findings.push(Finding::new(LIST, line, what, "remove this row"));
        } else if reason.is_empty() {
            let what = format!("{path} has no reason");
            findings.push(Finding::new(LIST, line, what, "say why it needs unsafe code"));
        }
    }
    findings
}

/// The rows of the table that name a Rust file: its line and its reason.
fn rows(list: &str) -> BTreeMap<&str, (usize, &str)> {
    list.lines()
        .enumerate()
        .filter_map(|(number, line)| {
            let mut cells = line.strip_prefix('|')?.splitn(2, '|');
            let path = cells.next()?.trim().trim_matches('`');
            let reason = cells.next()?.trim().trim_end_matches('|').trim_end();
            super::is_rust(path).then_some((path, (number + 1, reason)))
        })
        .collect()
}

/// The offset just past the bracket that closes the one `code` begins with.
fn closing(code: &str) -> Option<usize> {
    let mut depth = 0_usize;
    for (offset, character) in code.char_indices() {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(offset + 1);
        }
    }
    None
}

/// The reason in the text of an attribute, on one line.
fn reason(attribute: &str) -> String {
    let text = attribute
        .split_once("reason")
        .and_then(|(_, after)| after.split_once('"'))
        .and_then(|(_, quoted)| quoted.rsplit_once('"'))
        .map_or("why it needs unsafe code", |(reason, _)| reason);
    let words: Vec<&str> = text.split_whitespace().filter(|word| *word != "\\").collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIFTED: &str =
        "#![expect(\n    unsafe_code,\n    reason = \"calls the \\\n     driver\"\n)]\n";

    #[test]
    fn attribute_is_found_over_several_lines_with_its_reason() {
        let found = exceptions("a.rs", &format!("//! Head.\n{LIFTED}"));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].line, 2);
        assert_eq!(found[0].reason, "calls the driver");
    }

    #[test]
    fn methods_comments_and_other_lints_are_not_exceptions() {
        let text = "// #![allow(unsafe_code)]\n#[allow(dead_code)]\nx.expect(unsafe_code);";
        assert_eq!(exceptions("a.rs", text), []);
        let conditional = "#![cfg_attr(test, allow(unsafe_code, reason = \"r\"))]";
        assert_eq!(exceptions("a.rs", conditional).len(), 1);
    }

    #[test]
    fn missing_row_is_given_in_full() {
        let found = check(Some("| file | reason |\n| --- | --- |\n"), &exceptions("a.rs", LIFTED));
        assert_eq!(
            found[0].to_string(),
            "a.rs:1: lifts the ban on unsafe code and is not in docs/unsafe.md; \
             add the row | `a.rs` | calls the driver |"
        );
    }

    #[test]
    fn row_for_nothing_and_row_without_reason_are_found() {
        let list = "| `a.rs` | |\n| `b.rs` | why |\n";
        let found = check(Some(list), &exceptions("a.rs", LIFTED));
        let lines: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(
            lines,
            [
                "docs/unsafe.md:1: a.rs has no reason; say why it needs unsafe code",
                "docs/unsafe.md:2: b.rs does not lift the ban on unsafe code; remove this row",
            ]
        );
    }

    #[test]
    fn missing_list_is_found() {
        assert_eq!(check(None, &[]).len(), 1);
    }
}
