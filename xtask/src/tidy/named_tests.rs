//! The tests that `docs/what-a-pause-reaches.md` names: every row of its tables names one, and all of them exist.

use std::collections::BTreeSet;

use super::{Finding, has_extension};

/// The page.
pub(crate) const PAGE: &str = "docs/what-a-pause-reaches.md";
/// The heading of the last column of a table whose rows name tests.
const COLUMN: &str = "test";

/// Findings about the page `text`. `rust` are the project's Rust files, path and text; `paths` all its files.
pub(crate) fn check(
    text: &str,
    rust: &[(String, String)],
    paths: &BTreeSet<String>,
) -> Vec<Finding> {
    let known: BTreeSet<&str> = rust.iter().flat_map(|(_, text)| tests_of(text)).collect();
    let mut findings = Vec::new();
    let mut names_tests = false;
    for (number, line) in text.lines().enumerate() {
        let Some(last) = last_cell(line) else {
            names_tests = false;
            continue;
        };
        if last == COLUMN {
            names_tests = true;
            continue;
        }
        if !names_tests || last.starts_with("---") {
            continue;
        }
        let mut found = |what: String| {
            let next = "name a test that shows it, or a job of gpu-tests";
            findings.push(Finding::new(PAGE, number + 1, what, next));
        };
        let names: Vec<&str> = last.split('`').skip(1).step_by(2).collect();
        if names.is_empty() {
            found("a row without a test".to_owned());
        }
        for name in names {
            let exists =
                if has_extension(name, "py") { paths.contains(name) } else { known.contains(name) };
            if !exists {
                found(format!("there is no test {name}"));
            }
        }
    }
    findings
}

/// The last cell of a table's row.
fn last_cell(line: &str) -> Option<&str> {
    let row = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    row.rsplit('|').next().map(str::trim)
}

/// The functions in `text` that are tests.
fn tests_of(text: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let mut is_test = false;
    for line in text.lines().map(str::trim) {
        is_test |= line == "#[test]";
        if let Some(name) = line.strip_prefix("fn ").filter(|_| is_test) {
            names.extend(
                name.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next(),
            );
            is_test = false;
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUST: &str = "#[test]\nfn one_works() -> Outcome {}\n#[test]\n#[ignore = \"x\"]\nfn two_works() {}\n\
                        fn helper() {}\n// #[test]\nfn comment() {}\n";

    fn found(page: &str) -> Vec<String> {
        let rust = [("a.rs".to_owned(), RUST.to_owned())];
        let paths = ["gpu-tests/x.py".to_owned()].into();
        check(page, &rust, &paths).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn rows_name_tests_and_jobs_that_exist() {
        let page = "| what | test |\n| --- | --- |\n| a | `one_works`, `two_works` |\n| b | `gpu-tests/x.py` |\n\
                    \n| what | why |\n| --- | --- |\n| c | because |\n";
        assert_eq!(found(page), Vec::<String>::new());
    }

    #[test]
    fn missing_tests_and_rows_without_one_are_found() {
        let head = "| what | test |\n| --- | --- |\n";
        for (row, what) in [
            ("| a | `helper` |", "there is no test helper"),
            ("| a | `comment` |", "there is no test comment"),
            ("| a | `gpu-tests/y.py` |", "there is no test gpu-tests/y.py"),
            ("| a | |", "a row without a test"),
        ] {
            let all = found(&format!("{head}{row}\n"));
            assert_eq!(all.len(), 1, "{row}");
            assert!(all[0].starts_with(&format!("{PAGE}:3: {what}")), "{all:?}");
        }
    }
}
