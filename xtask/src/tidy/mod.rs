//! `tidy`: the house rules that a program can check.
//!
//! Every finding is one line, `path:line: what; next step`. The checks are functions from text to
//! findings, so that their tests need no files.

mod cited;
mod code;
pub(crate) mod contents;
mod files;
mod layers;
mod links;
mod messages;
mod modules;
mod named_tests;
mod unsafe_list;

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::fs;
use std::path::Path;

use crate::markdown::Page;
use crate::workspace::Workspace;
use crate::{Outcome, bench};

/// One broken rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    path: String,
    line: usize,
    what: String,
    next: String,
}

impl Finding {
    fn new(path: &str, line: usize, what: impl Into<String>, next: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, what: what.into(), next: next.into() }
    }
}

impl Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, line, what, next } = self;
        write!(formatter, "{path}:{line}: {what}; {next}")
    }
}

/// Writes the list of unsafe files as the attributes have it now, then checks.
pub(crate) fn write(workspace: &Workspace) -> Outcome {
    let mut exceptions = Vec::new();
    for path in workspace.files()? {
        let name = path_text(&path);
        if is_rust(&name)
            && let Ok(text) = fs::read_to_string(workspace.root.join(&path))
        {
            exceptions.extend(unsafe_list::exceptions(&name, &text));
        }
    }
    fs::write(workspace.root.join(unsafe_list::LIST), unsafe_list::document(&exceptions))?;
    run(workspace)
}

/// Checks every file of the project and prints what it finds.
pub(crate) fn run(workspace: &Workspace) -> Outcome {
    let mut findings = layers::check(workspace)?;
    let mut exceptions = Vec::new();
    let (mut list, mut page) = (None, None);
    let mut rust = Vec::new();
    let mut pages = BTreeMap::new();
    let failed = bench::failed(workspace)?;
    let paths = workspace.files()?;
    for path in &paths {
        // Text is what the rules are about; a file of another kind has no lines.
        let Ok(text) = fs::read_to_string(workspace.root.join(path)) else {
            continue;
        };
        let path = path_text(path);
        findings.extend(files::check(&path, &text));
        if has_extension(&path, "md") {
            findings.extend(cited::check(&path, &text, &failed));
            pages.insert(path.clone(), Page::read(&text));
        }
        if is_rust(&path) {
            exceptions.extend(unsafe_list::exceptions(&path, &text));
        }
        if path == unsafe_list::LIST {
            list = Some(text);
        } else if path == named_tests::PAGE {
            page = Some(text);
        } else if is_rust(&path) {
            rust.push((path, text));
        }
    }
    findings.extend(modules::check(&rust));
    let names = paths.iter().map(|path| path_text(path)).collect();
    findings.extend(page.iter().flat_map(|page| named_tests::check(page, &rust, &names)));
    findings.extend(links::check(&pages, &names));
    findings.extend(contents::check(&pages));
    let no_errors = Page::default();
    findings.extend(messages::check(pages.get(messages::PAGE).unwrap_or(&no_errors), &rust));
    findings.extend(unsafe_list::check(list.as_deref(), &exceptions));
    for finding in &findings {
        println!("{finding}");
    }
    match findings.len() {
        0 => {
            println!("tidy: {} files, nothing found", paths.len());
            Ok(())
        }
        1 => Err("tidy found 1 thing to mend".into()),
        count => Err(format!("tidy found {count} things to mend").into()),
    }
}

fn path_text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Whether `path` names a Rust source file.
fn is_rust(path: &str) -> bool {
    has_extension(path, "rs")
}

fn has_extension(path: &str, extension: &str) -> bool {
    Path::new(path).extension().is_some_and(|found| found == extension)
}

/// The line, counted from 1, of the byte `offset` of `text`.
fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
}
