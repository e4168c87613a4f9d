//! A record whose run missed a check is cited only with that said.

use std::collections::BTreeSet;

use super::Finding;

/// Words and marks that say so; a page with marks explains them.
const SAID: [&str; 5] = ["missed", "\u{b9}", "\u{b2}", "\u{b3}", "\u{2074}"];

/// Rows and paragraphs of the page `path` that name one of the `failed` files and do not say that its run missed a check.
pub(super) fn check(path: &str, text: &str, failed: &BTreeSet<String>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (line, passage) in passages(text) {
        for name in failed.iter().filter(|name| passage.contains(name.as_str())) {
            if !SAID.iter().any(|said| passage.contains(said)) {
                let what = format!("cites {name}, whose run missed a check, and does not say so");
                let next = "say in the same row or paragraph what was missed";
                findings.push(Finding::new(path, line, what, next));
            }
        }
    }
    findings
}

/// The rows of tables and the paragraphs of a page, each with its first line, counted from 1.
fn passages(text: &str) -> Vec<(usize, String)> {
    let mut passages: Vec<(usize, String)> = Vec::new();
    let mut is_open = false;
    for (index, line) in text.lines().enumerate() {
        let is_row = line.trim_start().starts_with('|');
        match passages.last_mut().filter(|_| is_open && !is_row) {
            _ if line.trim().is_empty() => is_open = false,
            Some((_, passage)) => {
                passage.push(' ');
                passage.push_str(line);
            }
            None => {
                passages.push((index + 1, line.to_owned()));
                is_open = !is_row;
            }
        }
    }
    passages
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<usize> {
        let failed = BTreeSet::from(["bad.json".to_owned()]);
        check("README.md", text, &failed).into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn failed_record_that_is_cited_like_any_other_is_found() {
        assert_eq!(found("| 5 GB/s | [run](results/bad.json) |"), [1]);
        assert_eq!(found("one\n\nthe run\nresults/bad.json\n\nwhich missed a check"), [3]);
    }

    #[test]
    fn failed_record_with_its_miss_beside_it_is_fine() {
        assert_eq!(found("| 5 GB/s: missed its check | [run](results/bad.json) |"), [0; 0]);
        assert_eq!(found("| 5 GB/s \u{b3} | [run](results/bad.json) |"), [0; 0]);
        assert_eq!(found("the run\nresults/bad.json\nmissed a check"), [0; 0]);
        assert_eq!(found("| 5 GB/s | [run](results/good.json) |"), [0; 0]);
    }

    #[test]
    fn what_one_row_says_does_not_count_for_the_next() {
        let row = "| 5 GB/s | [run](results/bad.json) |";
        assert_eq!(found(&format!("| missed | x |\n{row}\n{row}")), [2, 3]);
    }
}
