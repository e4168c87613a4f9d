//! Links in Markdown: each leads to a file of the project, and to a heading that its page has. Rows belong to tables.

use std::collections::{BTreeMap, BTreeSet};

use crate::markdown::{Page, resolve};

use super::Finding;

/// Findings about the links of `pages`, by path. `paths` are all files of the project.
pub(super) fn check(pages: &BTreeMap<String, Page>, paths: &BTreeSet<String>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, page) in pages {
        for line in &page.stray_rows {
            let next = "take out the blank line above it, or give it a head";
            findings.push(Finding::new(path, *line, "a row without its table", next));
        }
        for link in &page.links {
            if let Some((what, next)) = broken(path, &link.target, pages, paths) {
                findings.push(Finding::new(path, link.line, what, next));
            }
        }
    }
    findings
}

/// What is wrong with a link of the page at `from`, and what to do.
fn broken(
    from: &str,
    link: &str,
    pages: &BTreeMap<String, Page>,
    paths: &BTreeSet<String>,
) -> Option<(String, &'static str)> {
    let (file, anchor) = link.split_once('#').map_or((link, None), |(file, id)| (file, Some(id)));
    let Some(target) = resolve(from, file) else {
        return Some((format!("the link {link} leads out of the repository"), "name a file of it"));
    };
    let folder = format!("{}/", target.trim_end_matches('/'));
    let is_folder =
        paths.range(folder.clone()..).next().is_some_and(|path| path.starts_with(&folder));
    if !paths.contains(&target) && !is_folder {
        return Some((format!("the link {link} leads to no file"), "name one that is there"));
    }
    let anchor = anchor?;
    match pages.get(&target) {
        Some(page) if page.anchors.contains(anchor) => None,
        Some(_) => {
            let what = format!("the link {link} leads to no heading");
            Some((what, "name one that the page has, in lower case with dashes for blanks"))
        }
        None => {
            Some((format!("the link {link} leads into a file without headings"), "link the file"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<String> {
        let pages =
            [("docs/a.md", text), ("docs/b.md", "# One `two`, three\n"), ("top.md", "# Top\n")];
        let paths: BTreeSet<String> =
            pages.iter().map(|(path, _)| *path).chain(["x/data.json"]).map(str::to_owned).collect();
        let pages =
            pages.iter().map(|(path, text)| ((*path).to_owned(), Page::read(text))).collect();
        check(&pages, &paths).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn links_to_files_folders_headings_and_other_sites_are_fine() {
        for link in [
            "b.md",
            "b.md#one-two-three",
            "../top.md#top",
            "../x/data.json",
            "../x",
            "#here",
            "https://example.org/no",
            "mailto:a@b",
        ] {
            assert_eq!(found(&format!("# Here\n[x]({link})\n")), Vec::<String>::new(), "{link}");
        }
    }

    #[test]
    fn links_that_lead_nowhere_are_found_with_their_line() {
        for (link, what) in [
            ("c.md", "leads to no file"),
            ("b.md#two", "leads to no heading"),
            ("#nowhere", "leads to no heading"),
            ("../x/data.json#l1", "leads into a file without headings"),
            ("../../up.md", "leads out of the repository"),
        ] {
            let all = found(&format!("# Here\n\ntext\n[x]({link})\n"));
            assert_eq!(all.len(), 1, "{link}: {all:?}");
            assert!(all[0].starts_with("docs/a.md:4: the link "), "{all:?}");
            assert!(all[0].contains(what), "{all:?}");
        }
    }
}
