//! The licences of others whose code is in our programs: their texts go with the wheel, as they ask for.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use cargo_metadata::{DependencyKind, MetadataCommand, Package, PackageId, TargetKind};

use crate::workspace::Workspace;
use crate::{Outcome, process};

/// The packages whose programs are in the wheel.
const SHIPPED: [&str; 4] = ["sublet-ffi", "sublet-cli", "sublet-python", "simcuda"];
/// The beginnings of the names of files that hold what a licence asks to be passed on.
const NAMES: [&str; 5] = ["licen", "copying", "copyright", "notice", "unlicense"];
/// The file in which the compiler keeps the notices of its standard library, which is in all our programs.
const STANDARD_LIBRARY: &str = "share/doc/rust/COPYRIGHT-library.html";

/// Writes the licences of all crates that the wheel's programs are made of into the file `crates`, and those of Rust's
/// standard library into the file `standard_library`.
pub(crate) fn write(workspace: &Workspace, crates: &Path, standard_library: &Path) -> Outcome {
    let mut texts = Texts::default();
    for package in shipped(workspace)? {
        let folder = package.manifest_path.parent().ok_or("a manifest has no folder")?;
        let files = licence_files(folder.as_std_path())?;
        if files.is_empty() {
            let (name, version) = (&package.name, &package.version);
            return Err(format!("{name} {version} has no file of its licence in {folder}").into());
        }
        for file in files {
            let text = String::from_utf8_lossy(&fs::read(file)?).into_owned();
            texts.add(&format!("{} {}", package.name, package.version), text);
        }
    }
    fs::write(crates, texts.page()?)?;
    let sysroot = process::output(workspace.command("rustc").args(["--print", "sysroot"]))?;
    let from = Path::new(&sysroot).join(STANDARD_LIBRARY);
    fs::copy(&from, standard_library).map_err(|error| format!("{}: {error}", from.display()))?;
    Ok(())
}

/// Crates of others that are linked into what is shipped. What only runs in the compiler, such as a macro, is not.
fn shipped(workspace: &Workspace) -> Outcome<Vec<Package>> {
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let metadata = MetadataCommand::new()
        .current_dir(&workspace.root)
        .other_options(["--locked", "--filter-platform", &platform].map(str::to_owned))
        .exec()?;
    let packages: BTreeMap<&PackageId, &Package> =
        metadata.packages.iter().map(|package| (&package.id, package)).collect();
    let resolve = metadata.resolve.as_ref().ok_or("cargo resolved no dependencies")?;
    let edges: BTreeMap<_, _> = resolve.nodes.iter().map(|node| (&node.id, &node.deps)).collect();

    let is_root = |package: &&&Package| SHIPPED.contains(&package.name.as_str());
    let mut left: Vec<&PackageId> =
        packages.values().filter(is_root).map(|package| &package.id).collect();
    let mut seen = BTreeSet::new();
    while let Some(id) = left.pop() {
        let package = packages.get(id).ok_or("cargo names a package that it does not list")?;
        let is_macro =
            |target: &cargo_metadata::Target| target.kind.contains(&TargetKind::ProcMacro);
        if package.targets.iter().any(is_macro) || !seen.insert(id) {
            continue;
        }
        let is_linked = |dependency: &&cargo_metadata::NodeDep| {
            dependency.dep_kinds.iter().any(|kind| kind.kind == DependencyKind::Normal)
        };
        let dependencies = edges.get(id).into_iter().flat_map(|dependencies| dependencies.iter());
        left.extend(dependencies.filter(is_linked).map(|dependency| &dependency.pkg));
    }
    let mut others: Vec<Package> = seen
        .into_iter()
        .filter_map(|id| packages.get(id))
        .filter(|package| package.source.is_some())
        .map(|package| (*package).clone())
        .collect();
    others.sort_by(|one, other| (&one.name, &one.version).cmp(&(&other.name, &other.version)));
    Ok(others)
}

fn licence_files(folder: &Path) -> Outcome<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().to_lowercase();
        if entry.file_type()?.is_file() && NAMES.iter().any(|begin| name.starts_with(begin)) {
            files.push(entry.path());
        }
    }
    files.sort();
    Ok(files)
}

/// Texts, each once, with the crates that it is of. Texts that differ in nothing but blanks are the same.
#[derive(Debug, Default)]
struct Texts {
    texts: Vec<(String, Vec<String>)>,
    places: BTreeMap<String, usize>,
}

impl Texts {
    fn add(&mut self, name: &str, text: String) {
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let place = *self.places.entry(words).or_insert_with(|| {
            self.texts.push((text, Vec::new()));
            self.texts.len() - 1
        });
        let names = &mut self.texts[place].1;
        if names.last().is_none_or(|last| last != name) {
            names.push(name.to_owned());
        }
    }

    fn page(&self) -> Result<String, std::fmt::Error> {
        let mut page = "Sublet's programs contain code of the crates named here, under the licences that follow \
                        each list.\n"
            .to_owned();
        for (text, names) in &self.texts {
            let line = "=".repeat(80);
            write!(page, "\n{line}\n{}\n\n{}\n", names.join("\n"), text.trim_matches('\n'))?;
        }
        Ok(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_differs_in_blanks_alone_is_printed_once_with_all_names() {
        let mut texts = Texts::default();
        texts.add("one 1.0.0", "Permission  is\ngranted\n".to_owned());
        texts.add("two 2.0.0", "Permission is granted".to_owned());
        texts.add("two 2.0.0", "Permission is granted".to_owned());
        texts.add("two 2.0.0", "Another".to_owned());
        let page = texts.page().unwrap();
        assert!(page.contains("\none 1.0.0\ntwo 2.0.0\n\nPermission  is\ngranted\n"), "{page}");
        assert_eq!(page.matches("granted").count(), 1);
        assert!(page.ends_with("\ntwo 2.0.0\n\nAnother\n"), "{page}");
    }
}
