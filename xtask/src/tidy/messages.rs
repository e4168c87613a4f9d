//! `docs/errors.md` is made of the sources: of the comment of each code, and of the comment above each message.
//!
//! A message is as it is printed, with `…` for each part that is filled in. `SUBLET_WRITE_ERRORS=1 cargo xtask tidy` writes the page.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::Finding;

/// The page.
pub(super) const PAGE: &str = "docs/errors.md";
/// Has the codes.
const CODES: &str = "tenants/protocol/src/code.rs";
/// The page shows so many words of a message, which tell it from others.
const WORDS_MAX: usize = 16;
/// So many lines may be between a message and its comment.
const LINES_MAX: usize = 5;
/// Stands for what is filled in.
const GAP: char = '…';
const HEAD: &str = "# Errors

<!-- Made of the sources: SUBLET_WRITE_ERRORS=1 cargo xtask tidy -->

The `sublet` command prints one line about a failure, with a [code](#by-code) in brackets, and a command to type next. `sublet explain CODE` prints the entry of a code. Python raises an exception, whose [class](reference.md#from-python) tells what to do; C has `sublet_last_error`. The [fault model](fault-model.md) has the state after each failure.

If a row says \"a fault of Sublet\", report it with the output of `sublet bug-report`.

## By code

[JSON](json.md) has the same word as `code`.
";
const MESSAGES: &str = "
## By message

A message is often a chain of reasons: search this page for the first words of each part. `…` stands for names, sizes and process ids. The log of a process (`SUBLET_LOG`) and the notes of `sublet stats` have the same messages.
";
/// Headings, each with what the paths of its messages begin with; the first that fits is taken.
const PARTS: [(&str, &[&str]); 8] = [
    ("Commands", &["tenants/coordinator/", "tenants/turns/"]),
    (
        "Shared memory",
        &[
            "tenants/member/src/sharing",
            "tenants/member/src/neighbours",
            "tenants/protocol/src/ticket",
            "tenants/protocol/src/family",
        ],
    ),
    ("Connections", &["tenants/protocol/src/transport"]),
    ("Names, settings and directories", &["tenants/protocol/"]),
    ("One process", &["tenants/"]),
    ("Paging", &["vmm-pool/pager/", "adapters/cuda-driver/src/paged"]),
    ("The driver", &["vmm-pool/driver/", "vmm-pool/src/support"]),
    ("Device memory", &["vmm-pool/", "adapters/", "ffi/"]),
];

/// The page of `rust`, files by path and text.
pub(super) fn page(rust: &[(String, String)]) -> String {
    let mut page = HEAD.to_owned();
    let codes = rust.iter().find(|(path, _)| path == CODES);
    page.push_str(&codes.map(|(_, text)| entries(text)).unwrap_or_default());
    page.push_str(MESSAGES);
    let (mut said, mut parts) = (BTreeSet::new(), PARTS.map(|_| String::new()));
    for (path, text) in rust.iter().filter(|(path, _)| !is_of_tests(path)) {
        let is_of =
            |(_, places): &(&str, &[&str])| places.iter().any(|place| path.starts_with(place));
        let Some(part) = PARTS.iter().position(is_of) else { continue };
        for (offset, message) in messages(text) {
            if said.insert(message.clone()) {
                let message = begun(&message);
                let quotes = if message.contains('`') { ("`` ", " ``") } else { ("`", "`") };
                let meaning = comment(&text[..offset]);
                // Nothing can fail: it is a string.
                writeln!(parts[part], "| {}{message}{} | {meaning} |", quotes.0, quotes.1).ok();
            }
        }
    }
    for ((heading, _), rows) in PARTS.iter().zip(parts) {
        write!(page, "\n### {heading}\n\n| message | meaning |\n| --- | --- |\n{rows}").ok();
    }
    page
}

/// Findings about `page`, which should be as `made`.
pub(super) fn check(page: &str, made: &str) -> Option<Finding> {
    let bare = made.lines().find(|line| line.ends_with("|  |"));
    if let Some(line) = bare {
        let next = "write above the message what it means, and what to do";
        return Some(Finding::new(PAGE, 1, format!("no comment is near to {line}"), next));
    }
    let next = "run `SUBLET_WRITE_ERRORS=1 cargo xtask tidy`";
    (page != made).then(|| Finding::new(PAGE, 1, "is not what the sources say", next))
}

/// An entry for each code in `text`: its word as a heading, and its comment.
fn entries(text: &str) -> String {
    let (_, codes) = text.split_once("pub enum Code {\n").unwrap_or_default();
    let mut entries = String::new();
    let mut lines = String::new();
    for line in codes.lines().take_while(|line| *line != "}").map(str::trim) {
        if let Some(line) = line.strip_prefix("/// ") {
            lines = lines + line + "\n";
        } else {
            let parts = line.trim_end_matches(',').split_inclusive(char::is_uppercase);
            let word: String = parts.map(kebab).collect();
            write!(entries, "\n### {}\n\n{lines}", word.trim_start_matches('-')).ok();
            lines.clear();
        }
    }
    entries
}

/// A piece of a name that ends with the first letter of a word, which is written apart.
fn kebab(piece: &str) -> String {
    let first = piece.trim_end_matches(char::is_uppercase).len();
    let joint = if first < piece.len() { "-" } else { "" };
    format!("{}{joint}{}", &piece[..first], piece[first..].to_lowercase())
}

/// The comment before a message, in one line; empty where none is within some lines of it.
fn comment(before: &str) -> String {
    let lines = before.lines().rev().map(str::trim);
    let away = lines.clone().take(LINES_MAX).take_while(|line| !line.starts_with("//")).count();
    let mut lines: Vec<_> = lines.skip(away).map_while(|line| line.strip_prefix("//")).collect();
    lines.reverse();
    let lines = lines.iter().map(|line| line.trim_start_matches(['/', '!']).trim());
    lines.collect::<Vec<_>>().join(" ").replace("[`", "`").replace("`]", "`")
}

/// The first words of a message, by which it is found.
fn begun(message: &str) -> String {
    let words: Vec<_> = message.split(' ').collect();
    if words.len() <= WORDS_MAX {
        message.to_owned()
    } else {
        words[..WORDS_MAX].join(" ").trim_end_matches([' ', GAP]).to_owned() + " …"
    }
}

fn is_of_tests(path: &str) -> bool {
    path.split('/').any(|part| part == "tests" || part == "tests.rs" || part == "fuzz")
}

/// The code before a message: of an error, of what a process answers when it does not do its part, and of a note.
const MARKS: [&str; 9] = [
    "#[error(",
    "wrong_state(format!(",
    "message: format!(",
    ".because(format!(",
    ".notes().add(format!(",
    "member.notes().add(",
    "note_of_attach(format!(",
    "|wrong| format!(",
    " because ",
];

/// The messages in `text` that have words of their own, each with its offset: one word is filled up by others.
fn messages(text: &str) -> Vec<(usize, String)> {
    let marks = MARKS.iter().flat_map(|mark| text.match_indices(mark));
    let line = |offset: usize| text[..offset].rsplit('\n').next().map(str::trim_start);
    marks
        .filter(|(offset, _)| line(*offset).is_some_and(|line| !line.starts_with("//")))
        .filter_map(|(offset, mark)| {
            let inside = text[offset + mark.len()..].trim_start();
            let message = filled(&literal(inside.strip_prefix('"')?));
            let words = message.split(|letter: char| !letter.is_alphabetic());
            let has_words = words.filter(|word| !word.is_empty()).count() > 1;
            has_words.then_some((offset, message))
        })
        .collect()
}

/// The text of the string literal that `source` goes on with behind its first quotation mark.
fn literal(source: &str) -> String {
    let mut text = String::new();
    let mut rest = source.chars();
    while let Some(letter) = rest.next() {
        match letter {
            '"' => break,
            '\\' => match rest.next() {
                Some('\n') => rest = rest.as_str().trim_start().chars(),
                Some('n') => text.push('\n'),
                other => text.extend(other),
            },
            other => text.push(other),
        }
    }
    text
}

/// The format string `text` with a gap for each part that is filled in; gaps that touch are one.
fn filled(text: &str) -> String {
    let mut message = String::new();
    let mut rest = text.chars().peekable();
    while let Some(letter) = rest.next() {
        match letter {
            '{' | '}' if rest.peek() == Some(&letter) => {
                rest.next();
                message.push(letter);
            }
            '{' => {
                let _end = rest.find(|inside| *inside == '}');
                if !message.ends_with(GAP) {
                    message.push(GAP);
                }
            }
            other => message.push(other),
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUST: &str = r#"
        #[error("there is no '{name}' ({})", known(existing))] A,
        #[error(
            "two lines of one \
             message, and {{braces}}: {a}{b}"
        )] B,
        #[error(transparent)] C,
        #[error("{0}")] D,
        // #[error("in a comment")]
        Failure { kind, message: format!("process {id} waits") }
        FailureKind::NotNow.because(format!("process {id} rests"))
        cuA(a: c_int) because "it was refused"
        member.notes().add("it failed inside".to_owned())
    "#;

    #[test]
    fn messages_are_read_as_they_are_printed() {
        let found: Vec<_> = messages(RUST).into_iter().map(|(_, message)| message).collect();
        assert_eq!(
            found,
            [
                "there is no '…' (…)",
                "two lines of one message, and {braces}: …",
                "process … waits",
                "process … rests",
                "it failed inside",
                "it was refused",
            ]
        );
    }

    #[test]
    fn page_has_each_code_and_each_message_with_its_comment() {
        let codes = "/// C.\npub enum Code {\n    /// Too full.\n    /// Next: `a`.\n    GpuFull,\n    /// Other.\n    Lost,\n}\n";
        let errors = "/// Is not\n/// [`There`].\n#[derive(E)]\n#[error(\"no '{name}' is `there`\")]\nstruct A;\n";
        let rust = [
            (CODES, codes),
            ("vmm-pool/src/a.rs", errors),
            ("vmm-pool/src/b.rs", errors),
            ("tenants/fuzz/c.rs", "#[error(\"not a product\")]"),
            ("xtask/src/a.rs", "#[error(\"not of users\")]"),
        ];
        let made = page(&rust.map(|(path, text)| (path.to_owned(), text.to_owned())));
        assert!(
            made.contains("\n### gpu-full\n\nToo full.\nNext: `a`.\n\n### lost\n\nOther.\n"),
            "{made}"
        );
        assert_eq!(
            made.matches("| `` no '…' is `there` `` | Is not `There`. |\n").count(),
            1,
            "{made}"
        );
        assert!(!made.contains("not a product") && !made.contains("not of users"), "{made}");
        assert!(check(&made, &made).is_none());
        let far = format!("/// Far.\n{}#[error(\"no comment\")]", "\n".repeat(LINES_MAX + 1));
        let far = page(&[("ffi/src/a.rs".to_owned(), far)]);
        assert!(check(&far, &far).unwrap().to_string().contains("no comment is near"), "{far}");
        assert!(check("# Errors\n", &made).unwrap().to_string().contains("SUBLET_WRITE_ERRORS=1"));
    }
}
