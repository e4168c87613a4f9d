//! The list of files that may hold unsafe code: `docs/unsafe.md`, made from the attributes that lift the ban.

use std::collections::{BTreeMap, BTreeSet};

use super::Finding;
use super::code::{code_only, words};

/// Where the list is.
pub(crate) const LIST: &str = "docs/unsafe.md";
const WRITE: &str = "run `cargo xtask tidy --write`";
const HEAD: &str = "\
# Where unsafe code is

`unsafe_code` is denied in every crate. The files below lift the ban, each for the reason that its attribute gives. This file is
made from those attributes: `cargo xtask tidy --write` writes it, and `cargo xtask tidy` fails where the two differ.

A new row needs a reason that names what the file touches which safe Rust cannot: a driver function, a C caller, memory
that another process shares. Every block in these files holds one operation under a `// SAFETY:` comment that answers each
requirement of the callee.

| file | reason |
| --- | --- |
";

/// A place in a source file that lifts the ban.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Exception {
    path: String,
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
                    reason: reason(&text[open..open + end]),
                });
            }
        }
    }
    found
}

/// The list: one row a file, with each reason that it gives.
pub(crate) fn document(exceptions: &[Exception]) -> String {
    let mut rows: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for exception in exceptions {
        rows.entry(&exception.path).or_default().insert(&exception.reason);
    }
    let rows = rows.into_iter().map(|(path, reasons)| {
        let reasons: Vec<&str> = reasons.into_iter().collect();
        format!("| `{path}` | {} |\n", reasons.join("; "))
    });
    HEAD.to_owned() + &rows.collect::<String>()
}

/// What is wrong with the list as it is committed: the first line that the attributes have otherwise.
pub(crate) fn check(list: Option<&str>, exceptions: &[Exception]) -> Option<Finding> {
    let expected = document(exceptions);
    let list = list.unwrap_or_default();
    if list == expected {
        return None;
    }
    let same = list.lines().zip(expected.lines()).take_while(|(is, should)| is == should).count();
    let line = |text: &str| text.lines().nth(same).unwrap_or("the end").to_owned();
    let what = format!("says: {} and the attributes: {}", line(list), line(&expected));
    Some(Finding::new(LIST, same + 1, what, WRITE))
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
        .map_or("", |(reason, _)| reason);
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
        assert_eq!(found[0].reason, "calls the driver");
    }

    #[test]
    fn methods_comments_and_other_lints_are_not_exceptions() {
        let text = "// #![allow(unsafe_code)]\n#[allow(dead_code)]\nx.expect(unsafe_code);";
        assert_eq!(exceptions("a.rs", text), []);
        let conditional = "#![cfg_attr(test, allow(unsafe_code, reason = \"r\"))]";
        assert_eq!(exceptions("a.rs", conditional).len(), 1);
    }

    fn finding(list: &str, exceptions: &[Exception]) -> String {
        check(Some(list), exceptions).map_or_else(String::new, |finding| finding.to_string())
    }

    #[test]
    fn list_is_what_the_attributes_say_once_a_file_and_sorted() {
        let twice = format!("{LIFTED}#[allow(unsafe_code, reason = \"asks the loader\")]\n");
        let found = [exceptions("b.rs", LIFTED), exceptions("a.rs", &twice)].concat();
        let list = document(&found);
        let rows: Vec<&str> = list.lines().skip(HEAD.lines().count()).collect();
        assert_eq!(
            rows,
            ["| `a.rs` | asks the loader; calls the driver |", "| `b.rs` | calls the driver |"]
        );
        assert_eq!(finding(&list, &found), "");
    }

    #[test]
    fn file_that_is_missing_stale_or_listed_twice_is_found() {
        let (a, b) = (exceptions("a.rs", LIFTED), exceptions("b.rs", LIFTED));
        let both = [a.clone(), b].concat();
        let first = HEAD.lines().count() + 1;
        let (row_a, row_b) = ("| `a.rs` | calls the driver |", "| `b.rs` | calls the driver |");
        let twice = format!("{}{row_a}\n", document(&a));
        for (list, exceptions, line, says, should) in [
            (document(&a), &both, first + 1, "the end", row_b),
            (document(&both), &a, first + 1, row_b, "the end"),
            (twice, &a, first + 1, row_a, "the end"),
            (
                document(&both).replace("calls", "is"),
                &both,
                first,
                "| `a.rs` | is the driver |",
                row_a,
            ),
        ] {
            let expected = format!(
                "docs/unsafe.md:{line}: says: {says} and the attributes: {should}; {WRITE}"
            );
            assert_eq!(finding(&list, exceptions), expected);
        }
        assert_eq!(check(None, &both).map(|finding| finding.line), Some(1));
    }
}
