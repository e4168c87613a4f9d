//! One name, few things: a reader who meets a type's name in the product has at most three types to tell apart.

use std::collections::BTreeMap;

use super::{Finding, ceiling, line_of};

/// Types that may have the same name.
const SAME_MAX: usize = 3;
/// Words that a declaration of a type begins with.
const KINDS: [&str; 5] = ["struct ", "enum ", "union ", "trait ", "type "];

/// Finds names of types that stand for more than [`SAME_MAX`] of them. `rust` has paths and texts.
pub(super) fn check(rust: &[(String, String)]) -> Vec<Finding> {
    let mut types: BTreeMap<&str, Vec<(&str, usize)>> = BTreeMap::new();
    for (path, text) in rust.iter().filter(|(path, _)| ceiling::language(path).is_some()) {
        let mut offset = 0;
        for line in ceiling::product_part(text).split_inclusive('\n') {
            if let Some(name) = declared(line) {
                types.entry(name).or_default().push((path, line_of(text, offset)));
            }
            offset += line.len();
        }
    }
    let crowded = types.iter().filter(|(_, places)| places.len() > SAME_MAX);
    crowded
        .map(|(name, places)| {
            let (path, line) = places[places.len() - 1];
            let others: Vec<&str> = places.iter().map(|(path, _)| *path).collect();
            let what = format!("{} types are named {name}: {}", places.len(), others.join(", "));
            Finding::new(path, line, what, "name one of them by what it alone is")
        })
        .collect()
}

/// The name of the type that a line declares at the outermost level.
fn declared(line: &str) -> Option<&str> {
    let open = match line.strip_prefix("pub") {
        Some(rest) => rest.split_once(' ')?.1,
        None => line,
    };
    let name = KINDS.iter().find_map(|kind| open.strip_prefix(kind))?;
    let end =
        name.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(name.len());
    Some(&name[..end])
}

#[cfg(test)]
mod tests {
    use super::{check, declared};

    #[test]
    fn declarations_are_read() {
        assert_eq!(declared("pub(crate) struct Row<D: Driver> {\n"), Some("Row"));
        assert_eq!(declared("enum Row {\n"), Some("Row"));
        assert_eq!(declared("pub type Row = u8;\n"), Some("Row"));
        assert_eq!(declared("    type Row = u8;\n"), None);
        assert_eq!(declared("structure\n"), None);
    }

    #[test]
    fn the_fourth_type_of_a_name_is_found_and_tests_do_not_count() {
        let file = |path: &str, text: &str| (path.to_owned(), text.to_owned());
        let three =
            ["a", "b", "c"].map(|name| file(&format!("{name}/src/lib.rs"), "struct Row;\n"));
        let test = file("d/src/lib.rs", "fn f() {}\n#[cfg(test)]\nmod tests {\nstruct Row;\n}\n");
        let apart = file("tests/src/lib.rs", "struct Row;\n");
        let mut files = Vec::from(three);
        files.extend([test, apart]);
        assert_eq!(check(&files), []);
        files.push(file("e/src/lib.rs", "//! Head.\npub enum Row {}\n"));
        let found = check(&files);
        assert_eq!(found.len(), 1);
        assert_eq!(
            found[0].to_string().split(';').next(),
            Some(
                "e/src/lib.rs:2: 4 types are named Row: a/src/lib.rs, b/src/lib.rs, c/src/lib.rs, e/src/lib.rs"
            )
        );
    }
}
