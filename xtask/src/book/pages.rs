//! The pages that mdBook has made: every link in them leads to a file and a place that are there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::Outcome;
use crate::markdown::{attributes, resolve};

/// The links of the pages under `folder` that lead nowhere, each in words.
pub(super) fn broken_links(folder: &Path) -> Outcome<Vec<String>> {
    let mut files = Vec::new();
    walk(folder, &mut files)?;
    let mut all = BTreeSet::new();
    let mut pages = BTreeMap::new();
    for file in files {
        let path = file.strip_prefix(folder)?.to_string_lossy().into_owned();
        // What mdBook brings along: its own scripts, and a page for addresses that do not exist.
        if file.extension().is_some_and(|extension| extension == "html") && path != "404.html" {
            pages.insert(path.clone(), fs::read_to_string(&file)?);
        }
        all.insert(path);
    }
    Ok(broken(&pages, &all))
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> Outcome {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            walk(&entry.path(), files)?;
        } else {
            files.push(entry.path());
        }
    }
    Ok(())
}

/// `pages` are HTML by path, `files` all files.
fn broken(pages: &BTreeMap<String, String>, files: &BTreeSet<String>) -> Vec<String> {
    let places: BTreeMap<&str, BTreeSet<String>> = pages
        .iter()
        .map(|(path, html)| (path.as_str(), attributes(html, "id").into_iter().collect()))
        .collect();
    let mut found = Vec::new();
    for (path, html) in pages {
        let links = ["href", "src"].iter().flat_map(|name| attributes(html, name));
        for link in links.collect::<BTreeSet<_>>() {
            if link.contains("://") || link.starts_with("mailto:") || link.starts_with("data:") {
                continue;
            }
            let (file, place) = link.split_once('#').unwrap_or((&link, ""));
            let target = resolve(path, file.split('?').next().unwrap_or_default());
            let is_there = target.as_ref().is_some_and(|target| files.contains(target));
            let target = target.unwrap_or_default();
            let is_place = place.is_empty()
                || places.get(target.as_str()).is_none_or(|places| places.contains(place));
            if !is_there || !is_place {
                found.push(format!("{path}: the link {link} leads nowhere"));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_missing_files_and_places_are_found() {
        let html = "<a class=\"x\" href=\"b.html#two\">b</a> <a href=\"../c.json\">c</a> <a href=\"https://e/f\">e</a>\n\
                    <a href=\"b.html#three\">b</a> <img src=\"d.svg\"> <a href=\"../../up.html\">up</a> <a href=\"#own\">o</a>";
        let pages = BTreeMap::from([
            ("docs/a.html".to_owned(), html.to_owned()),
            ("docs/b.html".to_owned(), "<h2 id=\"two\">Two</h2>".to_owned()),
        ]);
        let files = ["docs/a.html", "docs/b.html", "c.json"].map(str::to_owned).into();
        let found = broken(&pages, &files);
        let wanted = ["#own", "../../up.html", "b.html#three", "d.svg"];
        let wanted: Vec<_> = wanted
            .iter()
            .map(|link| format!("docs/a.html: the link {link} leads nowhere"))
            .collect();
        assert_eq!(found, wanted);
    }
}
