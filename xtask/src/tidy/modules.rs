//! The order of the modules inside our larger crates: none uses one that stands above it.
//!
//! That is every path outside tests that begins with `crate::` or `super::`. A name that `lib.rs` hands
//! on belongs to the module that it comes from; what `lib.rs` itself defines is the module `lib`.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::Finding;

/// This file, where the order stands.
const SELF: &str = "xtask/src/tidy/modules.rs";
/// The name that stands for what a crate's `lib.rs` itself defines.
const ROOT: &str = "lib";

/// A crate and the order of its modules.
struct Order {
    /// Its sources.
    folder: &'static str,
    /// The modules of its `lib.rs`, lowest first: each may use those before it.
    modules: &'static str,
}

const ORDERS: [Order; 3] = [
    Order {
        folder: "vmm-pool/src",
        modules: "driver asking gate lib support ids error report journal budget \
            deferred waits store copies ledger pool prefault saved transition",
    },
    Order {
        folder: "tenants/protocol/src",
        modules: "lib error_text code descriptors size time identity family class region references \
            host_memory scope phase state saving wire transport run_dir ticket checkpoints",
    },
    Order {
        folder: "ffi/src",
        modules: "lib bindings environment driver contexts runtime last_call saver command nvml peers records look replaced pluggable hooks \
            nccl registrations interposed attach c_api compat",
    },
];

/// Findings about the order of modules in `files`, which are all of the project: path and text.
pub(crate) fn check(files: &[(String, String)]) -> Vec<Finding> {
    ORDERS.iter().flat_map(|order| check_crate(order, files)).collect()
}

fn check_crate(order: &Order, files: &[(String, String)]) -> Vec<Finding> {
    let mut read = Vec::new();
    for (path, text) in files {
        if let Some(module) = module_of(order.folder, path) {
            let mut file = File { is_root: module.is_empty(), module, ..File::default() };
            file.read(text.parse().unwrap_or_default());
            read.push((path, file));
        }
    }
    let tests: Vec<_> = read.iter().flat_map(|(_, file)| file.tests.clone()).collect();
    read.retain(|(_, file)| !tests.iter().any(|tests| file.module.starts_with(tests)));
    let handed_on: BTreeMap<_, _> = read
        .iter()
        .flat_map(|(_, file)| &file.handed_on)
        .map(|(name, from)| (name, from))
        .collect();
    let mut modules: BTreeSet<&str> =
        read.iter().filter_map(|(_, file)| Some(file.module.first()?.as_str())).collect();
    modules.insert(ROOT);

    let order_of: Vec<&str> = order.modules.split_whitespace().collect();
    let place = |module: &str| order_of.iter().position(|known| *known == module);
    let mut findings = Vec::new();
    for module in modules.iter().filter(|module| place(module).is_none()) {
        let what = format!("the module {module} of {} has no place in the order", order.folder);
        findings.push(Finding::new(SELF, 1, what, "give it one"));
    }
    for module in order_of.iter().filter(|module| !modules.contains(*module)) {
        let what = format!("{} has no module {module}", order.folder);
        findings.push(Finding::new(SELF, 1, what, "take it out of the order"));
    }
    for (path, file) in &read {
        let from = file.module.first().map_or(ROOT, String::as_str);
        // The first use of each module is enough.
        let mut seen = BTreeSet::from([from]);
        for (name, line) in &file.uses {
            let to = modules.get(name.as_str()).copied();
            let to = to.or(handed_on.get(name).map(|from| from.as_str())).unwrap_or(ROOT);
            if seen.insert(to) && place(to) > place(from) {
                let what = format!("{from} uses {to}, which stands above it");
                let next =
                    format!("move what it needs down, or hand it in (the order is in {SELF})");
                findings.push(Finding::new(path, *line, what, next));
            }
        }
    }
    findings
}

/// The module of the source file `path`; none for a file of another crate.
fn module_of(folder: &str, path: &str) -> Option<Vec<String>> {
    let inside = path.strip_prefix(folder)?.strip_prefix('/')?.strip_suffix(".rs")?;
    let inside = inside.strip_suffix("/mod").unwrap_or(inside);
    let parts = inside.split('/').map(str::to_owned);
    Some(if inside == ROOT { Vec::new() } else { parts.collect() })
}

/// One source file: what it uses of its crate outside of tests.
#[derive(Debug, Default)]
struct File {
    /// The place of the reader: the file's module, and modules written out inside it.
    module: Vec<String>,
    is_root: bool,
    /// Names at the top of the crate, with the line of their use.
    uses: Vec<(String, usize)>,
    /// The modules of tests in files of their own.
    tests: Vec<Vec<String>>,
    /// The names that `lib.rs` hands on, each with the module that it comes from.
    handed_on: Vec<(String, String)>,
}

impl File {
    fn read(&mut self, tokens: TokenStream) {
        let trees: Vec<TokenTree> = tokens.into_iter().collect();
        let is_visibility = trees.first().is_some_and(|first| is(first, "in"));
        let mut at = usize::from(is_visibility) * trees.len();
        while at < trees.len() {
            at += match &trees[at..] {
                [mark, TokenTree::Group(attribute), item @ ..]
                    if is(mark, "#") && attribute.to_string() == "[cfg (test)]" =>
                {
                    2 + self.skip_tests(item)
                }
                [word, TokenTree::Ident(name), TokenTree::Group(body), ..] if is(word, "mod") => {
                    self.module.push(name.to_string());
                    self.read(body.stream());
                    self.module.pop();
                    3
                }
                [public, word, tree @ ..]
                    if self.is_root && is(public, "pub") && is(word, "use") =>
                {
                    let mut paths = Vec::new();
                    let length = branches(tree, &[], &mut paths);
                    for path in paths {
                        if let [module, .., name] = path.as_slice() {
                            self.handed_on.push((name.clone(), module.clone()));
                        }
                    }
                    2 + length
                }
                [first, ..] if is(first, "crate") || is(first, "super") => {
                    let mut paths = Vec::new();
                    let length = branches(&trees[at..], &[], &mut paths);
                    let line = first.span().start().line;
                    let names = paths.iter().filter_map(|path| top(self.module.len(), path));
                    self.uses.extend(names.map(|name| (name.to_owned(), line)));
                    length
                }
                [TokenTree::Group(group), ..] => {
                    self.read(group.stream());
                    1
                }
                _ => 1,
            };
        }
    }

    /// The length of the item, field or statement that `trees` begin with, which is for tests.
    fn skip_tests(&mut self, trees: &[TokenTree]) -> usize {
        let is_end = |tree: &TokenTree| {
            let brace = |group: &proc_macro2::Group| group.delimiter() == Delimiter::Brace;
            is(tree, ";")
                || is(tree, ",")
                || matches!(tree, TokenTree::Group(group) if brace(group))
        };
        let length = trees.iter().position(is_end).map_or(trees.len(), |end| end + 1);
        if let [.., word, name, end] = &trees[..length]
            && is(word, "mod")
            && is(end, ";")
        {
            self.tests.push([self.module.as_slice(), &[name.to_string()]].concat());
        }
        length
    }
}

fn is(tree: &TokenTree, text: &str) -> bool {
    !matches!(tree, TokenTree::Group(_)) && tree.to_string() == text
}

/// The name at the top of the crate that `path` goes through, written `depth` modules deep; none if it stays below.
fn top(depth: usize, path: &[String]) -> Option<&str> {
    let ups = path.iter().take_while(|part| *part == "super").count();
    let start = match path.first() {
        Some(first) if first == "crate" => 1,
        _ if ups == depth => ups,
        _ => return None,
    };
    path.get(start).map(String::as_str)
}

/// Adds the paths of the tree that `trees` begin with, each behind `stem`; the number of tokens of the tree.
fn branches(trees: &[TokenTree], stem: &[String], found: &mut Vec<Vec<String>>) -> usize {
    let mut path = stem.to_vec();
    let mut at = 0;
    loop {
        match trees.get(at) {
            Some(TokenTree::Ident(name)) => path.push(name.to_string()),
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                let inside: Vec<TokenTree> = group.stream().into_iter().collect();
                for branch in inside.split(|tree| is(tree, ",")).filter(|tree| !tree.is_empty()) {
                    branches(branch, &path, found);
                }
                return at + 1;
            }
            _ => break,
        }
        match &trees[at + 1..] {
            [one, two, ..] if is(one, ":") && is(two, ":") => at += 3,
            // The name that it goes by comes last.
            [word, TokenTree::Ident(alias), ..] if is(word, "as") => {
                path.push(alias.to_string());
                at += 3;
                break;
            }
            _ => {
                at += 1;
                break;
            }
        }
    }
    found.push(path);
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORDER: Order = Order { folder: "a/src", modules: "low lib middle high" };
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
