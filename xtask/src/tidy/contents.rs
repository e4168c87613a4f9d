//! `docs/SUMMARY.md`, the contents of the book: it lists every page of `docs`, once.

use std::collections::{BTreeMap, BTreeSet};

use super::{Finding, has_extension};
use crate::markdown::{Page, resolve};

/// The list.
pub(crate) const LIST: &str = "docs/SUMMARY.md";
/// Where the pages of the book are.
const FOLDER: &str = "docs/";

/// Findings about the list, which is among the `pages` of the project, by path.
pub(super) fn check(pages: &BTreeMap<String, Page>) -> Vec<Finding> {
    let Some(list) = pages.get(LIST) else {
        let next = "add it: mdBook has the contents of the book from it";
        return vec![Finding::new(LIST, 1, "the list is not there", next)];
    };
    let mut findings = Vec::new();
    let mut listed = BTreeSet::new();
    for link in &list.links {
        let Some(path) = resolve(LIST, &link.target) else { continue };
        if !path.starts_with(FOLDER) || !has_extension(&path, "md") {
            let what = format!("lists {}, which is no page of docs", link.target);
            findings.push(Finding::new(LIST, link.line, what, "list pages of docs alone"));
        } else if !listed.insert(path) {
            let what = format!("lists {} a second time", link.target);
            findings.push(Finding::new(LIST, link.line, what, "leave one of the two"));
        }
    }
    let of_docs = pages.keys().filter(|path| path.starts_with(FOLDER) && *path != LIST);
    for path in of_docs.filter(|path| !listed.contains(*path)) {
        let next = format!("add a line for it to {LIST}, where a reader would look for it");
        findings.push(Finding::new(path, 1, format!("is not in {LIST}"), next));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(list: &str) -> Vec<String> {
        let pages = [(LIST, list), ("docs/a.md", ""), ("docs/b.md", ""), ("README.md", "")];
        let pages =
            pages.iter().map(|(path, text)| ((*path).to_owned(), Page::read(text))).collect();
        check(&pages).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn list_of_all_pages_is_fine() {
        assert_eq!(found("# Contents\n\n- [A](a.md)\n  - [B](b.md)\n"), Vec::<String>::new());
    }

    #[test]
    fn missing_doubled_and_foreign_pages_are_found() {
        let missing = found("- [A](a.md)\n");
        assert_eq!(missing.len(), 1);
        assert!(missing[0].starts_with("docs/b.md:1: is not in docs/SUMMARY.md"), "{missing:?}");
        let doubled = found("- [A](a.md)\n- [B](b.md)\n- [A](a.md)\n");
        assert_eq!(doubled, ["docs/SUMMARY.md:3: lists a.md a second time; leave one of the two"]);
        let foreign = found("- [A](a.md)\n- [B](b.md)\n- [R](../README.md)\n");
        assert!(foreign[0].contains("lists ../README.md, which is no page of docs"), "{foreign:?}");
        assert_eq!(check(&BTreeMap::new()).len(), 1);
    }
}
