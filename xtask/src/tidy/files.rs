//! Rules about one file: its size, the words it may not contain, the lints a crate inherits.

use super::{Finding, ceiling, has_extension, is_rust};

const LINES_MAX: usize = 600;
/// Made by a program, so its size is not a choice.
const GENERATED: [&str; 1] = ["ffi/src/bindings.rs"];

/// Words that begin a question, and no sentence about a thing.
const ASKING: [&str; 6] = ["What ", "Who ", "Which ", "Whose ", "Where ", "How "];
/// The help of the command is made of doc comments there, in the usual words of help.
const HELP: [&str; 2] = ["tenants/cli/src/args.rs", "tenants/cli/src/simulate.rs"];

/// All findings about one file.
pub(crate) fn check(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    findings.extend(size(path, text));
    findings.extend(machine_paths(path, text));
    if has_extension(path, "md") {
        findings.extend(stray_rows(path, text));
    }
    if is_rust(path) || has_extension(path, "py") {
        findings.extend(unnumbered_todos(path, text));
    }
    if ceiling::language(path) == Some("rust") && !HELP.contains(&path) {
        findings.extend(asking_docs(path, text));
    }
    if path.ends_with("Cargo.toml") {
        findings.extend(lints(path, text));
    }
    findings
}

fn size(path: &str, text: &str) -> Option<Finding> {
    let lines = text.lines().count();
    let kinds = ["rs", "py", "md", "c", "h", "sh"];
    let counted = kinds.iter().any(|extension| has_extension(path, extension));
    if counted && lines > LINES_MAX && !GENERATED.contains(&path) {
        let what = format!("{lines} lines, more than {LINES_MAX}");
        return Some(Finding::new(path, LINES_MAX + 1, what, "split the file by subject"));
    }
    None
}

/// Paths of the machine that somebody happened to work on.
fn machine_paths(path: &str, text: &str) -> Vec<Finding> {
    // In two parts, so that this file does not contain them.
    let homes = [concat!("/", "work/"), concat!("/", "root/")];
    let mut findings = Vec::new();
    for (number, line) in text.lines().enumerate() {
        for home in homes {
            let starts_path = |offset: usize| {
                let before = line[..offset].chars().next_back();
                !before.is_some_and(|before| before.is_alphanumeric() || "_-./}~*".contains(before))
            };
            if line.match_indices(home).any(|(offset, _)| starts_path(offset)) {
                let what = format!("names a path of one machine ({home})");
                let next = "use a path relative to the repository or to the target directory";
                findings.push(Finding::new(path, number + 1, what, next));
            }
        }
    }
    findings
}

/// Rows that are shown as text: no head stands above them, or a blank line parts them from it.
fn stray_rows(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let lines: Vec<&str> = text.lines().collect();
    for (number, pair) in lines.windows(2).enumerate() {
        let begins = pair[1].starts_with("| ") && pair[0].is_empty();
        if begins && !lines.get(number + 2).is_some_and(|rule| rule.starts_with("| -")) {
            let next = "take out the blank line above it, or give it a head";
            findings.push(Finding::new(path, number + 2, "a row without its table", next));
        }
    }
    findings
}

fn unnumbered_todos(path: &str, text: &str) -> Vec<Finding> {
    let mark = concat!("TO", "DO");
    text.lines()
        .enumerate()
        .filter(|(_, line)| {
            line.match_indices(mark).any(|(offset, _)| {
                let after = line[offset + mark.len()..].trim_start_matches(['(', ' ']);
                !after.starts_with('#')
            })
        })
        .map(|(number, _)| {
            let what = format!("a {mark} without an issue number");
            Finding::new(path, number + 1, what, format!("write {mark}(#number) or do it"))
        })
        .collect()
}

/// Finds paragraphs of doc comments that do not say what a thing is or does.
fn asking_docs(path: &str, text: &str) -> Vec<Finding> {
    let doc = |line: &str| line.starts_with("/// ") || line.starts_with("//! ");
    let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
    let mut findings = Vec::new();
    for (number, line) in lines.iter().enumerate().filter(|(_, line)| doc(line)) {
        let is_first = number == 0 || !doc(lines[number - 1]);
        if is_first && ASKING.iter().any(|word| line[4..].starts_with(word)) {
            let next = "begin with what the thing is, or does";
            findings.push(Finding::new(path, number + 1, "a doc comment that asks", next));
        }
    }
    findings
}

/// A crate inherits the workspace's lints.
fn lints(path: &str, text: &str) -> Option<Finding> {
    let mut section = "";
    let mut package_line = None;
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.starts_with('[') {
            section = line;
            if section == "[package]" {
                package_line = Some(number + 1);
            }
        }
        let words: String = line.split_whitespace().collect();
        if (section == "[lints]" && words == "workspace=true") || words == "lints.workspace=true" {
            return None;
        }
    }
    // A file without a package is the workspace itself.
    let line = package_line?;
    let what = "does not inherit the workspace's lints";
    Some(Finding::new(path, line, what, "add `[lints]` with `workspace = true`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_file_is_found_and_generated_one_is_not() {
        let text = "x\n".repeat(LINES_MAX + 1);
        let found = size("docs/long.md", &text).unwrap().to_string();
        assert_eq!(found, "docs/long.md:601: 601 lines, more than 600; split the file by subject");
        assert!(size("tests/b.c", &text).is_some());
        assert_eq!(size("docs/long.md", &"x\n".repeat(LINES_MAX)), None);
        assert_eq!(size("docs/long.txt", &text), None);
        assert_eq!(size(GENERATED[0], &text), None);
    }

    #[test]
    fn a_doc_comment_that_begins_with_a_question_is_found_and_a_wrapped_line_is_not() {
        let text = "/// The place\n/// Where it lies.\nx: u8,\n/// What it is.\ny: u8,\n// What is noted.\n";
        let found = check("vmm-pool/src/x.rs", text);
        assert_eq!(found.len(), 1);
        assert!(found[0].to_string().starts_with("vmm-pool/src/x.rs:4: "));
        assert_eq!(check("vmm-pool/tests/x.rs", text), []);
    }

    #[test]
    fn machine_path_is_found_only_where_a_path_starts() {
        let bad = format!("one\nopen(\"{}{}\")", "/", "root/x");
        let found = machine_paths("a.py", &bad);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].line, 2);
        let fine = format!("https://host{}{} src{}{}", "/", "root/x", "/", "work/y");
        assert_eq!(machine_paths("a.md", &fine), []);
    }

    #[test]
    fn row_without_its_table_is_found() {
        let text = "text\n\n| a |\n| --- |\n| b |\n\n| c |\n";
        let found = stray_rows("a.md", text);
        assert_eq!(found.iter().map(|finding| finding.line).collect::<Vec<_>>(), [7]);
    }

    #[test]
    fn note_without_a_number_is_found() {
        let mark = concat!("TO", "DO");
        let text = format!("# {mark}(#12): later\n# {mark}: later");
        let found = unnumbered_todos("a.py", &text);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].line, 2);
    }

    #[test]
    fn crate_without_inherited_lints_is_found() {
        let bare = "[package]\nname = \"a\"\n[dependencies]\nworkspace = true\n";
        assert_eq!(lints("a/Cargo.toml", bare).unwrap().line, 1);
        let whole = "[package]\nname = \"a\"\n\n[lints]\nworkspace = true\n";
        assert_eq!(lints("a/Cargo.toml", whole), None);
        assert_eq!(lints("Cargo.toml", "[workspace]\n"), None);
    }
}
