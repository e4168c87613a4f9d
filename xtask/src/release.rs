//! `release`: the files that a release consists of, in one folder, for a machine that publishes them.

use std::fs;

use crate::workspace::Workspace;
use crate::{Outcome, build, process, wheel};

const CHANGES: &str = "CHANGELOG.md";

/// Writes wheel, source, checksums and notes of the release `tag`, such as `v0.1.0`, into `target/release-files`.
pub(crate) fn run(workspace: &Workspace, tag: &str) -> Outcome {
    let version = workspace.version()?;
    if tag != format!("v{version}") {
        return Err(
            format!("the tag {tag} is not of version {version}, which Cargo.toml names").into()
        );
    }
    let changes = fs::read_to_string(workspace.root.join(CHANGES))?;
    let notes = section(&changes, &version).ok_or_else(|| {
        format!("{CHANGES} has no heading `## {version}`, or nothing below it: write what is new")
    })?;
    let folder = workspace.target.join("release-files");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("NOTES.md"), notes)?;

    let wheel = wheel::release(workspace)?;
    let wheel_name = wheel.file_name().ok_or("a wheel without a name")?;
    build::install(&wheel, &folder.join(wheel_name))?;
    let source = format!("sublet-{version}.tar.gz");
    let mut archive = workspace.command("git");
    archive.args(["archive", "--format=tar.gz", &format!("--prefix=sublet-{version}/")]);
    process::run(archive.arg("--output").arg(folder.join(&source)).arg("HEAD"))?;
    let mut sums = workspace.command("sha256sum");
    let sums = process::output(sums.current_dir(&folder).arg(wheel_name).arg(&source))?;
    fs::write(folder.join("SHA256SUMS"), sums + "\n")?;
    println!("{}", folder.display());
    Ok(())
}

/// Returns the text below the heading of `version`, up to the next heading of its kind.
fn section<'a>(changes: &'a str, version: &str) -> Option<&'a str> {
    let text = changes.split("\n## ").find_map(|section| {
        let (heading, text) = section.split_once('\n')?;
        let named = heading.split_whitespace().next()?.trim_matches(['[', ']']);
        (named == version).then_some(text.trim())
    })?;
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_what_stands_below_the_heading_of_the_version() {
        let changes = "# Changes\n\n## Unreleased\n\n- x\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- y\n\n## 0.1.0\n- z\n";
        assert_eq!(section(changes, "0.2.0"), Some("### Added\n\n- y"));
        assert_eq!(section(changes, "0.1.0"), Some("- z"));
        assert_eq!(section(changes, "0.1"), None);
        assert_eq!(section("\n## 0.1.0\n\n## 0.0.1\n- a\n", "0.1.0"), None);
    }
}
