//! `book`: the documents as one book, by mdBook, with every link of the pages that it makes looked at.
//!
//! Pages of `docs` link to files beside that folder. So the book is built in a tree of its own that has them at the same
//! places: pages as chapters, and all other files as they are.

mod pages;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::markdown::{Page, resolve};
use crate::tidy::contents;
use crate::workspace::Workspace;
use crate::{Outcome, process};

/// What we install, where no mdBook is on the path that makes the same pages.
const VERSION: &str = "0.5.4";
/// Versions that begin so do.
const LIKE: &str = "mdbook v0.5.";
/// The folder of the book's own pages.
const FOLDER: &str = "docs";
/// Files of that folder that are mdBook's.
const SETTINGS: [&str; 2] = ["book.toml", "book.css"];
/// Chapters that lie beside it: path, title. The first opens the book.
const BESIDE: [(&str, &str); 6] = [
    ("README.md", "Sublet"),
    ("examples/README.md", "Examples"),
    ("ARCHITECTURE.md", "Architecture"),
    ("CONTRIBUTING.md", "Contributing"),
    ("benchmarks/README.md", "How figures are measured"),
    ("CHANGELOG.md", "What changed"),
];

/// Builds the book into `target/book/html` and says where it is.
pub(crate) fn run(workspace: &Workspace) -> Outcome {
    let book = workspace.target.join("book");
    if book.exists() {
        fs::remove_dir_all(&book)?;
    }
    let source = book.join("src");
    let chapters = chapters(workspace)?;
    for path in chapters.iter().chain(&linked(workspace, &chapters)?) {
        let target = source.join(path);
        fs::create_dir_all(target.parent().ok_or("a file has no folder")?)?;
        fs::copy(workspace.root.join(path), target)?;
    }
    let list = fs::read_to_string(workspace.root.join(contents::LIST))?;
    fs::write(source.join("SUMMARY.md"), summary(&list))?;
    for name in SETTINGS {
        fs::copy(workspace.root.join(FOLDER).join(name), book.join(name))?;
    }

    let mut mdbook = workspace.command(program(workspace)?);
    mdbook.arg("build").arg(&book);
    mdbook.env("MDBOOK_BOOK__SRC", "src").env("MDBOOK_BUILD__BUILD_DIR", "html");
    let said = process::both_outputs(&mut mdbook)?;
    if let Some(line) = said.lines().find(|line| line.contains("WARN") || line.contains("ERROR")) {
        return Err(format!("mdbook is not content: {}", line.trim()).into());
    }
    let html = book.join("html");
    let broken = pages::broken_links(&html)?;
    for link in &broken {
        println!("{link}");
    }
    if !broken.is_empty() {
        return Err(format!("{} links of the book lead nowhere", broken.len()).into());
    }
    println!("{}: {} chapters", html.join("index.html").display(), chapters.len());
    Ok(())
}

/// The paths of all chapters.
fn chapters(workspace: &Workspace) -> Outcome<BTreeSet<String>> {
    let list = Page::read(&fs::read_to_string(workspace.root.join(contents::LIST))?);
    let listed = list.links.iter().filter_map(|link| resolve(contents::LIST, &link.target));
    Ok(listed.chain(BESIDE.iter().map(|(path, _)| (*path).to_owned())).collect())
}

/// Files that chapters link to or show, and that are no chapters themselves.
fn linked(workspace: &Workspace, chapters: &BTreeSet<String>) -> Outcome<BTreeSet<String>> {
    let mut files = BTreeSet::new();
    for chapter in chapters {
        let page = Page::read(&fs::read_to_string(workspace.root.join(chapter))?);
        for link in page.links {
            let file = link.target.split('#').next().unwrap_or_default();
            let path = resolve(chapter, file);
            files.extend(path.filter(|path| workspace.root.join(path).is_file()));
        }
    }
    Ok(&files - chapters)
}

/// The contents of the book: those of `docs`, as `list` has them, between the page that opens it and the project's own.
fn summary(list: &str) -> String {
    let [(first, title), rest @ ..] = BESIDE;
    let (heading, listed) = list.split_once('\n').unwrap_or((list, ""));
    let listed = listed.replace("](", &format!("]({FOLDER}/"));
    let rest: Vec<_> = rest.iter().map(|(path, title)| format!("- [{title}]({path})\n")).collect();
    format!("{heading}\n\n[{title}]({first})\n{listed}\n# The project\n\n{}", rest.concat())
}

/// mdBook: the one on the path, or one that is installed under the target directory once.
fn program(workspace: &Workspace) -> Outcome<PathBuf> {
    let version = |program: &Path| {
        process::output(workspace.command(program).arg("--version")).unwrap_or_default()
    };
    let on_path = PathBuf::from("mdbook");
    if version(&on_path).starts_with(LIKE) {
        return Ok(on_path);
    }
    let folder = workspace.target.join("tools").join(format!("mdbook-{VERSION}"));
    let ours = folder.join("bin/mdbook");
    if version(&ours).starts_with(LIKE) {
        return Ok(ours);
    }
    println!("mdBook {VERSION} is built once; `cargo install mdbook` before would have saved that");
    let build = folder.join("build");
    let mut install = workspace.cargo(&[
        "install",
        "mdbook",
        "--version",
        VERSION,
        "--locked",
        "--debug",
        "--quiet",
    ]);
    install.args(["--no-default-features", "--features", "search", "--no-track"]);
    install.arg("--root").arg(&folder).arg("--target-dir").arg(&build);
    // A book takes a second either way, and optimising the program takes minutes.
    install.env("CARGO_PROFILE_DEV_DEBUG", "0").env("CARGO_INCREMENTAL", "0");
    process::run(&mut install)
        .map_err(|error| format!("{error}; install mdBook 0.5 in some other way"))?;
    fs::remove_dir_all(build)?;
    Ok(ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_begin_with_the_readme_and_end_with_the_project() {
        let list = "# Contents\n\n- [Start](a.md)\n  - [More](b.md)\n";
        let whole = summary(list);
        assert!(
            whole.starts_with("# Contents\n\n[Sublet](README.md)\n\n- [Start](docs/a.md)\n"),
            "{whole}"
        );
        assert!(whole.contains(
            "\n  - [More](docs/b.md)\n\n# The project\n\n- [Examples](examples/README.md)\n- [Architecture](ARCHITECTURE.md)\n"
        ));
        assert!(whole.ends_with("- [What changed](CHANGELOG.md)\n"));
    }
}
