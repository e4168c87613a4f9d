//! The ceiling of the product: how many lines of code it may have. Lower the numbers with each change that takes code away; only
//! the mend of a defect, in a commit of its own, may raise them, by what it takes.

use std::collections::BTreeMap;

use super::{Finding, has_extension};

/// The file of the numbers: a language and a count in each line.
pub(super) const PAGE: &str = "xtask/ceiling.txt";
/// Folders and files that are no product: tests, what stands in for a GPU there, measurements, examples.
const APART: [&str; 11] = [
    "test",
    "tests",
    "benches",
    "fuzz",
    "examples",
    "sim",
    "driver-sim",
    "simcuda",
    "gpu-tests",
    "gpu-lane",
    "benchmarks",
];

/// The language that a file counts for.
pub(super) fn language(path: &str) -> Option<&'static str> {
    let is_apart = path.split('/').any(|part| APART.contains(&part.trim_end_matches(".rs")))
        || path.ends_with("tests.rs")
        || path.ends_with("/model.rs")
        || path.contains("/conformance")
        || path.contains("/scaling");
    if is_apart {
        None
    } else if has_extension(path, "rs") {
        Some("rust")
    } else {
        (path.starts_with("ffi/python/sublet/") && has_extension(path, "py")).then_some("python")
    }
}

/// The text before a module of tests.
pub(super) fn product_part(text: &str) -> &str {
    let is_tests = |(at, _): &(usize, &str)| {
        let line = text[*at..].lines().nth(1).unwrap_or_default();
        line.contains("mod ") && line.ends_with('{')
    };
    let end = text.match_indices("#[cfg(test)]\n").find(is_tests).map_or(text.len(), |(at, _)| at);
    &text[..end]
}

/// Lines that are neither blank nor comments alone, without a module of tests.
pub(super) fn code_lines(language: &str, text: &str) -> usize {
    let comment = if language == "rust" { "//" } else { "#" };
    let lines = product_part(text).lines().map(str::trim);
    lines.filter(|line| !line.is_empty() && !line.starts_with(comment)).count()
}

/// Compares what was counted with the numbers in [`PAGE`].
pub(super) fn check(page: &str, counted: &BTreeMap<&'static str, usize>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (language, count) in counted {
        let number = page.lines().find_map(|line| line.strip_prefix(language)?.trim().parse().ok());
        let Some(ceiling): Option<usize> = number else {
            let next = format!("write `{language} {count}` there");
            findings.push(Finding::new(PAGE, 1, format!("has no number for {language}"), next));
            continue;
        };
        if *count > ceiling {
            let what = format!("{count} lines of {language}, {} more than may be", count - ceiling);
            findings.push(Finding::new(PAGE, 1, what, "take as much away"));
        } else if *count < ceiling {
            let what = format!("{count} lines of {language}, and {ceiling} may be");
            findings.push(Finding::new(PAGE, 1, what, format!("write `{language} {count}` there")));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::{check, code_lines, language};

    #[test]
    fn product_is_what_users_run() {
        for product in ["tenants/src/code.rs", "xtask/src/main.rs", "tenants/cli/src/sim_view.rs"] {
            assert_eq!(language(product), Some("rust"), "{product}");
        }
        assert_eq!(language("ffi/python/sublet/ray.py"), Some("python"));
        let apart = [
            "tests/src/lib.rs",
            "tenants/src/a/tests.rs",
            "vmm-pool/sim/src/lib.rs",
            "x/model.rs",
            "benchmarks/x.py",
            "README.md",
        ];
        for path in apart {
            assert_eq!(language(path), None, "{path}");
        }
    }

    #[test]
    fn comments_blanks_and_tests_do_not_count() {
        let text =
            "//! Head.\nuse a;\n\nfn f() {} // said\n#[cfg(test)]\nmod tests {\n    fn g() {}\n}\n";
        assert_eq!(code_lines("rust", text), 2);
        assert_eq!(code_lines("rust", "#[cfg(test)]\nmod tests;\nfn f() {}\n"), 3);
        assert_eq!(code_lines("python", "# Head.\nimport a\n"), 1);
    }

    #[test]
    fn more_than_the_ceiling_is_refused_and_less_lowers_it() {
        let counted = [("rust", 10)].into();
        assert!(check("rust 10\n", &counted).is_empty());
        assert!(check("rust 8\n", &counted)[0].what.contains("10 lines of rust, 2 more"));
        assert!(check("rust 11\n", &counted)[0].next.contains("`rust 10`"));
        assert!(check("python 10\n", &counted)[0].what.contains("no number"));
    }
}
