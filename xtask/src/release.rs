//! `release`: the files that a release consists of, in one folder, for a machine that publishes them.

use std::fs;

use crate::workspace::Workspace;
use crate::{Outcome, build, process, python, wheel};

const CHANGES: &str = "CHANGELOG.md";

/// Says with which versions of torch regions were tried.
const TORCH: &str = "ffi/python/sublet/_torch.py";

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
    println!("torch: {}", torch_notice(workspace)?);
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

/// Says how the newest torch that was tried stands to the newest that pip finds. Without an answer of pip's it says that.
fn torch_notice(workspace: &Workspace) -> Outcome<String> {
    let source = fs::read_to_string(workspace.root.join(TORCH))?;
    let tried = newest_tried(&source).ok_or_else(|| format!("{TORCH} names no OLDEST, NEWEST"))?;
    let (major, minor) = tried;
    let answer = python::pip(workspace)
        .and_then(|mut pip| process::output(pip.args(["index", "versions", "torch"])));
    Ok(match answer {
        Err(error) => format!(
            "pip does not say which is the newest ({error}); {major}.{minor} is the newest that was tried"
        ),
        Ok(said) => compared(&releases(&said), tried),
    })
}

/// A sentence about the releases, the newest first, when `tried` is the newest that was tried.
fn compared(releases: &[(u32, u32)], tried: (u32, u32)) -> String {
    let (major, minor) = tried;
    let behind = releases.iter().filter(|release| **release > tried).count();
    match releases.first() {
        None => format!("pip names no release; {major}.{minor} is the newest that was tried"),
        Some((newest_major, newest_minor)) if behind > 1 => format!(
            "{newest_major}.{newest_minor} is out, {behind} releases after {major}.{minor}, the newest that was tried: run the \
             suite torch_newest with it on GPUs, and then raise NEWEST in {TORCH}"
        ),
        Some(_) => format!("{major}.{minor} was tried; newer releases: {behind}"),
    }
}

/// Major and minor version in the line `OLDEST, NEWEST = (2, 8), (2, 11)`: the second pair.
fn newest_tried(source: &str) -> Option<(u32, u32)> {
    let line = source.lines().find_map(|line| line.strip_prefix("OLDEST, NEWEST = "))?;
    let numbers: Vec<u32> = line
        .split(|letter: char| !letter.is_ascii_digit())
        .filter_map(|number| number.parse().ok())
        .collect();
    match numbers[..] {
        [_, _, major, minor] => Some((major, minor)),
        _ => None,
    }
}

/// Major and minor versions that `pip index versions` names, each once, the newest first.
fn releases(said: &str) -> Vec<(u32, u32)> {
    let listed = said.lines().find_map(|line| line.trim().strip_prefix("Available versions:"));
    let mut found: Vec<(u32, u32)> = listed
        .unwrap_or_default()
        .split(',')
        .filter_map(|version| {
            let mut parts = version.trim().split('.').map(str::parse);
            Some((parts.next()?.ok()?, parts.next()?.ok()?))
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    found.reverse();
    found
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
    fn versions_of_torch_are_read_and_compared() {
        let said = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1, 2.14.0, 2.13.0, 2.11.0, 2.9.1\n  INSTALLED: 2.4.0\n";
        assert_eq!(releases(said), [(2, 15), (2, 14), (2, 13), (2, 11), (2, 9)]);
        assert_eq!(releases("torch is unknown"), []);
        assert_eq!(newest_tried("import x\nOLDEST, NEWEST = (2, 8), (2, 11)\n"), Some((2, 11)));
        assert_eq!(newest_tried("OLDEST = (2, 8)\n"), None);
        assert!(compared(&releases(said), (2, 15)).ends_with("newer releases: 0"));
        assert!(compared(&releases(said), (2, 14)).ends_with("newer releases: 1"));
        let late = compared(&releases(said), (2, 11));
        assert!(late.starts_with("2.15 is out, 3 releases after 2.11"), "{late}");
        assert!(compared(&[], (2, 11)).starts_with("pip names no release"));
    }

    #[test]
    fn the_line_that_names_the_newest_torch_is_found() {
        let source = include_str!("../../ffi/python/sublet/_torch.py");
        assert!(newest_tried(source).is_some_and(|newest| newest >= (2, 11)));
    }

    #[test]
    fn notes_are_what_stands_below_the_heading_of_the_version() {
        let changes = "# Changes\n\n## Unreleased\n\n- x\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- y\n\n## 0.1.0\n- z\n";
        assert_eq!(section(changes, "0.2.0"), Some("### Added\n\n- y"));
        assert_eq!(section(changes, "0.1.0"), Some("- z"));
        assert_eq!(section(changes, "0.1"), None);
        assert_eq!(section("\n## 0.1.0\n\n## 0.0.1\n- a\n", "0.1.0"), None);
    }
}
