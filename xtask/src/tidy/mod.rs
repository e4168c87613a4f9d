//! `tidy`: the house rules that a program can check.
//!
//! Every finding is one line, `path:line: what; next step`. The checks are functions from text to
//! findings, so that their tests need no files.

mod ceiling;
mod files;
mod messages;
mod modules;
mod named_tests;
mod results;
mod type_names;
mod words;

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::path::Path;
use std::{env, fs};

use crate::Outcome;
use crate::workspace::Workspace;

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

/// Checks every file of the project and prints what it finds.
pub(crate) fn run(workspace: &Workspace) -> Outcome {
    let mut findings = Vec::new();
    let (mut errors, mut promises, mut numbers) = (String::new(), String::new(), String::new());
    let mut counted = BTreeMap::new();
    let (mut rust, mut read) = (Vec::new(), Vec::new());
    let paths = workspace.files()?;
    for path in &paths {
        // Text is what the rules are about; a file of another kind has no lines.
        let Ok(text) = fs::read_to_string(workspace.root.join(path)) else {
            continue;
        };
        let path = path_text(path);
        findings.extend(files::check(&path, &text));
        findings.extend(results::check(&path, &text));
        if let Some(language) = ceiling::language(&path) {
            *counted.entry(language).or_default() += ceiling::code_lines(language, &text);
        }
        if words::is_read(&path) {
            read.push((path.clone(), text.clone()));
        }
        if path == messages::PAGE {
            errors = text;
        } else if path == ceiling::PAGE {
            numbers = text;
        } else if path == named_tests::PAGE {
            promises = text;
        } else if is_rust(&path) {
            rust.push((path, text));
        }
    }
    let names = paths.iter().map(|path| path_text(path)).collect();
    findings.extend(ceiling::check(&numbers, &counted));
    findings.extend(modules::check(&rust));
    findings.extend(named_tests::check(&promises, &rust, &names));
    let made = messages::page(&rust);
    if env::var_os("SUBLET_WRITE_ERRORS").is_some() {
        fs::write(workspace.root.join(messages::PAGE), made)?;
    } else {
        findings.extend(messages::check(&errors, &made));
    }
    findings.extend(type_names::check(&rust));
    findings.extend(words::check(&read));
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
