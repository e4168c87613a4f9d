//! The licences of others whose code is in our programs: their texts go with the wheel, as they ask for.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use cargo_metadata::{MetadataCommand, Package};

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
    let mut texts = Texts::new();
    for package in shipped(workspace)? {
        let folder = package.manifest_path.parent().ok_or("a manifest has no folder")?;
        let files = licence_files(folder.as_std_path())?;
        let name = format!("{} {}", package.name, package.version);
        if files.is_empty() {
            return Err(format!("{name} has no file of its licence in {folder}").into());
        }
        for file in files {
            add(&mut texts, &name, String::from_utf8_lossy(&fs::read(file)?).into_owned());
        }
    }
    fs::write(crates, page(&texts)?)?;
    let sysroot = process::output(workspace.command("rustc").args(["--print", "sysroot"]))?;
    let from = Path::new(&sysroot).join(STANDARD_LIBRARY);
    fs::copy(&from, standard_library).map_err(|error| format!("{}: {error}", from.display()))?;
    Ok(())
}

/// Crates of others that are linked into what is shipped. What only runs in the compiler, such as a macro, is not.
fn shipped(workspace: &Workspace) -> Outcome<Vec<Package>> {
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut tree = workspace.cargo(&["tree", "--locked", "--prefix=none", "--format={p}"]);
    tree.args(["--edges=normal,no-proc-macro", "--target", &platform]);
    tree.args(SHIPPED.iter().flat_map(|name| ["--package", name]));
    let tree = process::output(&mut tree)?;
    let linked: BTreeSet<&str> = tree.lines().collect();
    let is_others = |package: &Package| {
        let name = format!("{} v{}", package.name, package.version);
        package.source.is_some() && linked.contains(name.as_str())
    };
    let options = ["--locked".to_owned()];
    let metadata =
        MetadataCommand::new().current_dir(&workspace.root).other_options(options).exec()?;
    let mut others: Vec<_> = metadata.packages.into_iter().filter(is_others).collect();
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

/// Texts and the crates that each is of, by its words: those that differ in nothing but blanks are the same.
type Texts = BTreeMap<String, (String, Vec<String>)>;

fn add(texts: &mut Texts, name: &str, text: String) {
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, names) = texts.entry(words).or_insert_with(|| (text, Vec::new()));
    if names.last().is_none_or(|last| last != name) {
        names.push(name.to_owned());
    }
}

fn page(texts: &Texts) -> Result<String, std::fmt::Error> {
    let mut page =
        "Sublet's programs contain code of the crates named here, under the licences that follow \
                    each list.\n"
            .to_owned();
    for (text, names) in texts.values() {
        let line = "=".repeat(80);
        write!(page, "\n{line}\n{}\n\n{}\n", names.join("\n"), text.trim_matches('\n'))?;
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_differs_in_blanks_alone_is_printed_once_with_all_names() {
        let mut texts = Texts::new();
        add(&mut texts, "one 1.0.0", "Permission  is\ngranted\n".to_owned());
        add(&mut texts, "two 2.0.0", "Permission is granted".to_owned());
        add(&mut texts, "two 2.0.0", "Some other".to_owned());
        let page = page(&texts).unwrap();
        assert!(page.contains("\none 1.0.0\ntwo 2.0.0\n\nPermission  is\ngranted\n"), "{page}");
        assert_eq!(page.matches("granted").count(), 1);
        assert!(page.ends_with("\ntwo 2.0.0\n\nSome other\n"), "{page}");
    }
}
