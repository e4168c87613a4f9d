//! The order of the modules inside our larger crates: none uses one that stands above it.
//!
//! Looked at as text: every path outside tests that begins with `crate::` or `super::`. A name that `lib.rs` hands
//! on belongs to the module that it comes from; what `lib.rs` itself defines is the module `lib`.

use std::collections::{BTreeMap, BTreeSet};

use super::code::{code_only, words};
use super::{Finding, line_of};

/// This file, where the order stands.
const SELF: &str = "xtask/src/tidy/modules.rs";
/// What a crate's `lib.rs` itself defines.
const ROOT: &str = "lib";

/// A crate and the order of its modules.
struct Order {
    /// Its sources.
    folder: &'static str,
    /// The modules of its `lib.rs`, lowest first: each may use those before it.
    modules: &'static [&'static str],
}

const ORDERS: [Order; 3] = [
    Order {
        folder: "vmm-pool/src",
        modules: &[
            "sync",
            "slots",
            "gate",
            "driver",
            ROOT,
            "support",
            "ids",
            "peer",
            "error",
            "report",
            "journal",
            "budget",
            "descriptors",
            "deferred",
            "waits",
            "copies",
            "links",
            "store",
            "ledger",
            "slabs",
            "pool",
            "cells",
            "saved",
            "transition",
            "conformance",
        ],
    },
    Order {
        folder: "tenants/src",
        modules: &[
            ROOT,
            "error_text",
            "descriptors",
            "size",
            "identity",
            "family",
            "turns",
            "cut",
            "stepping",
            "region",
            "references",
            "host_memory",
            "numa",
            "budget",
            "scope",
            "phase",
            "state",
            "saving",
            "wire",
            "transport",
            "run_dir",
            "ticket",
            "member",
            "coordinator",
            "requests",
            "settings",
            "switching",
            "code",
        ],
    },
    Order {
        folder: "ffi/src",
        modules: &[
            ROOT,
            "guards",
            "bindings",
            "environment",
            "interpose",
            "contexts",
            "runtime",
            "replaced",
            "pluggable",
            "hooks",
            "nccl",
            "registrations",
            "nvml",
            "interposed",
            "attach",
            "c_api",
            "compat",
        ],
    },
];

/// One file's use of another module of its crate.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Clone)]
struct Arrow {
    file: String,
    from: String,
    to: String,
    line: usize,
}

/// Findings about the order of modules in `files`, which are all of the project: path and text.
pub(crate) fn check(files: &[(String, String)]) -> Vec<Finding> {
    ORDERS.iter().flat_map(|order| check_crate(order, files)).collect()
}

fn check_crate(order: &Order, files: &[(String, String)]) -> Vec<Finding> {
    let sources = Sources::read(order.folder, files);
    let place = |module: &str| order.modules.iter().position(|known| *known == module);
    let mut findings = Vec::new();
    for module in &sources.modules {
        if place(module).is_none() {
            let what = format!("the module {module} of {} has no place in the order", order.folder);
            findings.push(Finding::new(SELF, 1, what, "give it one"));
        }
    }
    for module in order.modules {
        if !sources.modules.contains(*module) {
            let what = format!("{} has no module {module}", order.folder);
            findings.push(Finding::new(SELF, 1, what, "take it out of the order"));
        }
    }
    let is_upwards = |arrow: &Arrow| place(&arrow.to) > place(&arrow.from);
    for Arrow { file, from, to, line } in sources.arrows().into_iter().filter(is_upwards) {
        let what = format!("{from} uses {to}, which stands above it");
        let next = format!("move what it needs down, or hand it in (the order is in {SELF})");
        findings.push(Finding::new(&file, line, what, next));
    }
    findings
}

/// The product's code of one crate, by module path; comments, literals and tests are blanked out.
struct Sources {
    files: BTreeMap<Vec<String>, (String, String)>,
    modules: BTreeSet<String>,
    /// The module that a name comes from which `lib.rs` hands on.
    handed_on: BTreeMap<String, String>,
}

impl Sources {
    fn read(folder: &str, files: &[(String, String)]) -> Self {
        let mut sources = Self {
            files: BTreeMap::new(),
            modules: BTreeSet::from([ROOT.to_owned()]),
            handed_on: BTreeMap::new(),
        };
        let mut of_tests = Vec::new();
        for (path, text) in files {
            let Some(module) = module_of(folder, path) else {
                continue;
            };
            let (code, tests) = without_tests(&code_only(text));
            of_tests.extend(tests.into_iter().map(|name| [module.clone(), vec![name]].concat()));
            sources.files.insert(module, (path.clone(), code));
        }
        sources.files.retain(|module, _| !of_tests.iter().any(|tests| module.starts_with(tests)));
        sources.modules.extend(sources.files.keys().filter_map(|module| module.first().cloned()));
        if let Some((_, code)) = sources.files.get_mut(&Vec::new()) {
            for (from, name) in take_handed_on(code) {
                sources.handed_on.insert(name, from);
            }
        }
        sources
    }

    /// Each file's first use of each other module.
    fn arrows(&self) -> Vec<Arrow> {
        let mut first: BTreeMap<(&str, String), Arrow> = BTreeMap::new();
        for (module, (file, code)) in &self.files {
            let from = module.first().map_or(ROOT, String::as_str);
            for (offset, path) in paths(code) {
                let inner = [module.as_slice(), &inline_modules(code, offset)].concat();
                let Some(name) = top(&inner, &path) else {
                    continue;
                };
                let to = self.module(&name);
                if to != from {
                    let line = line_of(code, offset);
                    let arrow =
                        Arrow { file: file.clone(), from: from.to_owned(), to: to.clone(), line };
                    first.entry((file.as_str(), to)).or_insert(arrow);
                }
            }
        }
        first.into_values().collect()
    }

    /// The module that `name`, at the top of the crate, is or comes from.
    fn module(&self, name: &str) -> String {
        if self.modules.contains(name) {
            return name.to_owned();
        }
        self.handed_on.get(name).cloned().unwrap_or_else(|| ROOT.to_owned())
    }
}

/// The module of the source file `path`; none for a file of another crate.
fn module_of(folder: &str, path: &str) -> Option<Vec<String>> {
    let inside = path.strip_prefix(folder)?.strip_prefix('/')?.strip_suffix(".rs")?;
    let inside = inside.strip_suffix("/mod").unwrap_or(inside);
    let parts = inside.split('/').map(str::to_owned);
    Some(if inside == ROOT { Vec::new() } else { parts.collect() })
}

/// The name at the top of the crate that `path`, written in `module`, goes through; none if it stays below.
fn top(module: &[String], path: &[&str]) -> Option<String> {
    let ups = path.iter().take_while(|part| **part == "super").count();
    let down = match path.first() {
        Some(&"crate") => &path[1..],
        _ if ups == module.len() => &path[ups..],
        _ => return None,
    };
    down.first().map(|name| (*name).to_owned())
}

/// The modules written out in `code` that the place at `offset` is in, outermost first.
fn inline_modules(code: &str, offset: usize) -> Vec<String> {
    let holds = |start: &usize| start + item_length(&code[*start..]) > offset;
    words(&code[..offset], "mod")
        .filter(holds)
        .filter_map(|start| code[start..].split_whitespace().nth(1).map(str::to_owned))
        .collect()
}

/// The paths in `code` that begin with `crate` or `super`, each with its offset.
fn paths(code: &str) -> Vec<(usize, Vec<&str>)> {
    let starts = ["crate", "super"].into_iter().flat_map(|name| words(code, name));
    let mut found = Vec::new();
    for start in starts {
        let before = code[..start].trim_end();
        let is_start = !before.ends_with("::") && !before.ends_with("(in");
        if is_start {
            let mut tree = Vec::new();
            branches(&code[start..], &mut Vec::new(), &mut tree);
            found.extend(tree.into_iter().filter(|path| path.len() > 1).map(|path| (start, path)));
        }
    }
    found
}

/// Adds the paths of the tree that `code` begins with, each behind `stem`; returns what follows it.
fn branches<'a>(code: &'a str, stem: &mut Vec<&'a str>, found: &mut Vec<Vec<&'a str>>) -> &'a str {
    let mut rest = code.trim_start();
    let depth = stem.len();
    loop {
        if let Some(mut inside) = rest.strip_prefix('{') {
            while !inside.trim_start().starts_with('}') && !inside.trim_start().is_empty() {
                let after = branches(inside, stem, found).trim_start();
                let Some(next) = after.strip_prefix(',') else {
                    inside = after;
                    break;
                };
                inside = next;
            }
            rest = inside.trim_start().strip_prefix('}').unwrap_or(inside);
            break;
        }
        let is_part = |character: char| character.is_alphanumeric() || character == '_';
        let length = rest.find(|character| !is_part(character)).unwrap_or(rest.len());
        if length > 0 {
            stem.push(&rest[..length]);
        }
        let after = rest[length..].trim_start();
        if length > 0
            && let Some(more) = after.strip_prefix("::")
        {
            rest = more.trim_start();
            continue;
        }
        let mut path = stem.clone();
        rest = after.strip_prefix('*').unwrap_or(after);
        if let Some(alias) = after.strip_prefix("as ") {
            // The name that it goes by comes last.
            let alias = alias.trim_start();
            rest = alias.trim_start_matches(is_part);
            path.push(&alias[..alias.len() - rest.len()]);
        }
        found.push(path);
        break;
    }
    stem.truncate(depth);
    rest
}

/// What `lib.rs` hands on, as module and name; blanked out of `code`, as it is no use of its own.
fn take_handed_on(code: &mut String) -> Vec<(String, String)> {
    let mut names = Vec::new();
    let starts: Vec<usize> = code.match_indices("pub use ").map(|(offset, _)| offset).collect();
    for start in starts {
        let end = code[start..].find(';').map_or(code.len(), |length| start + length);
        let mut tree = Vec::new();
        branches(&code[start + "pub use ".len()..end], &mut Vec::new(), &mut tree);
        for path in tree {
            if let [module, .., name] = path.as_slice() {
                names.push(((*module).to_owned(), (*name).to_owned()));
            }
        }
        blank(code, start, end);
    }
    names
}

/// `code` with every item under `#[cfg(test)]` blanked out, and the names of modules of tests in their own files.
fn without_tests(code: &str) -> (String, Vec<String>) {
    let mut left = code.to_owned();
    let mut modules = Vec::new();
    for (start, attribute) in code.match_indices("#[cfg(test)]") {
        let item = &code[start + attribute.len()..];
        let length = item_length(item);
        let words: Vec<&str> = item[..length].split_whitespace().collect();
        if let [.., "mod", name] = words.as_slice()
            && let Some(name) = name.strip_suffix(';')
        {
            modules.push(name.to_owned());
        }
        blank(&mut left, start, start + attribute.len() + length);
    }
    (left, modules)
}

/// The length of the item, field or statement that `code` begins with.
fn item_length(code: &str) -> usize {
    let mut depth = 0_usize;
    for (offset, character) in code.char_indices() {
        match character {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' if depth == 0 => return offset,
            ')' | ']' => depth -= 1,
            '}' => {
                depth -= 1;
                if depth == 0 {
                    return offset + 1;
                }
            }
            ';' | ',' if depth == 0 => return offset + 1,
            _ => {}
        }
    }
    code.len()
}

fn blank(code: &mut String, start: usize, end: usize) {
    let blanks: String =
        code[start..end].bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }).collect();
    code.replace_range(start..end, &blanks);
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORDER: Order = Order { folder: "a/src", modules: &["low", ROOT, "middle", "high"] };
    const UPWARDS: &str = "use crate::high::X;";

    fn files(texts: &[(&str, &str)]) -> Vec<(String, String)> {
        let name = |path: &str| format!("a/src/{path}.rs");
        let given = texts.iter().map(|(path, text)| (name(path), (*text).to_owned()));
        let missing = ["lib", "low/mod", "middle", "high"].into_iter();
        let missing = missing.filter(|path| !texts.iter().any(|(given, _)| given == path));
        given.chain(missing.map(|path| (name(path), String::new()))).collect()
    }

    fn found(texts: &[(&str, &str)]) -> Vec<String> {
        check_crate(&ORDER, &files(texts)).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn use_downwards_and_of_itself_is_fine() {
        let high =
            "use crate::{low::{self, A}, middle}; fn f() { super::middle::g(crate::high::h()) }";
        assert_eq!(
            found(&[("high", high), ("high/child", "use super::super::low; use super::x;")]),
            [""; 0]
        );
    }

    #[test]
    fn use_upwards_is_found_however_it_is_written() {
        for text in [
            "\nuse crate::high::X;",
            "\nuse crate::{low::{A, b::C as D}, high};",
            "\nfn f() { crate::high::g() }",
            "\nuse super::super::high::{self, *};",
            "\nmod inner { use super::super::super::high; }",
        ] {
            let expected = "a/src/low/child.rs:2: low uses high, which stands above it";
            let found = found(&[("low/child", text)]);
            assert!(
                matches!(found.as_slice(), [only] if only.starts_with(expected)),
                "{text}: {found:?}"
            );
        }
    }

    #[test]
    fn tests_comments_and_visibility_are_no_use() {
        let text = "//! [`crate::high`]\n#[cfg(test)]\nmod tests { use crate::high; }\n#[cfg(test)]\nmod model;\n\
                    pub(in crate::high) fn f() { \"crate::high\"; }\n#[cfg(test)] x: crate::high::X,\n\
                    mod inner { use super::high; }";
        assert_eq!(
            found(&[("low/mod", text), ("low/model", UPWARDS), ("low/model/more", UPWARDS)]),
            [""; 0]
        );
    }

    #[test]
    fn name_that_the_root_hands_on_belongs_to_its_module() {
        let lib = "pub use high::{X, Y as Z};\npub use middle::W;\npub struct Own;";
        assert_eq!(found(&[("lib", lib), ("high", "use crate::{W, Own};")]), [""; 0]);
        let text = "use crate::Z;\nuse crate::Own;";
        let found = found(&[("lib", lib), ("low/mod", text)]);
        assert_eq!(found.len(), 2);
        assert!(found[0].contains("low uses high"), "{found:?}");
        assert!(found[1].contains("low uses lib"), "{found:?}");
    }

    #[test]
    fn module_without_a_place_and_place_without_a_module_are_found() {
        let found_new = found(&[("new", "")]);
        assert!(found_new[0].contains("the module new of a/src has no place"), "{found_new:?}");
        let all = files(&[]);
        let left: Vec<_> = all.into_iter().filter(|(path, _)| path != "a/src/high.rs").collect();
        let text: Vec<String> =
            check_crate(&ORDER, &left).iter().map(ToString::to_string).collect();
        assert!(text.iter().any(|line| line.contains("a/src has no module high")), "{text:?}");
    }
}
