//! `nccl-functions`: which functions the public headers of NCCL's versions declare.
//!
//! The headers are no part of the project: they come from a copy of NCCL's source at a tag (`src`), or from one of its
//! wheels (`nvidia/nccl/include`). What is committed are the names, which a test compares with what we stand in for.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use crate::Outcome;
use crate::workspace::Workspace;

/// The headers of one version.
#[derive(Clone, Debug)]
pub(crate) struct Headers {
    version: String,
    folder: PathBuf,
}

impl std::str::FromStr for Headers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (version, folder) = text.split_once('=').ok_or("not VERSION=FOLDER")?;
        Ok(Self { version: version.to_owned(), folder: folder.into() })
    }
}

/// Writes the names that `headers`, oldest first, declare to the file `target` of the workspace.
pub(crate) fn write(workspace: &Workspace, target: &Path, headers: &[Headers]) -> Outcome {
    let mut versions: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (number, headers) in headers.iter().enumerate() {
        let mut names = BTreeSet::new();
        for path in files(&headers.folder)? {
            names.extend(declared(&String::from_utf8_lossy(&fs::read(path)?)));
        }
        if names.is_empty() {
            let folder = headers.folder.display();
            return Err(
                format!("no header in {folder} declares a function: name its folder").into()
            );
        }
        for name in names {
            versions.entry(name).or_default().push(number);
        }
    }
    let mut text = String::from(
        "# The functions that public headers declare, each with the first version that has it, and the last where later\n\
         # ones do not. Written by `cargo xtask nccl-functions`; not edited.\n",
    );
    let all: Vec<_> = headers.iter().map(|headers| headers.version.as_str()).collect();
    writeln!(text, "# Versions: {}", all.join(" "))?;
    for (name, numbers) in versions {
        let ends = numbers.first().zip(numbers.last());
        let (first, last) = ends.ok_or("a name without a version")?;
        let last = if last + 1 == all.len() { "" } else { all[*last] };
        writeln!(text, "{name} {}..{last}", all[*first])?;
    }
    fs::write(workspace.root.join(target), text)?;
    Ok(())
}

/// All headers under `folder`.
fn files(folder: &Path) -> Outcome<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if [".h", ".h.in"].iter().any(|end| path.to_string_lossy().ends_with(end)) {
                found.push(path);
            }
        }
    }
    Ok(found)
}

/// Words of a declaration that is not one of a function which a program on the host can look up.
const ELSEWHERE: [&str; 8] = [
    "NCCL_DEVICE_INLINE",
    "NCCL_HOST_DEVICE_INLINE",
    "NCCL_IR_EXTERN_C",
    "inline",
    "static",
    "template",
    "typedef",
    "using",
];

/// The functions of NCCL that the header `text` declares for programs on the host.
fn declared(text: &str) -> BTreeSet<String> {
    statements(&without_comments(text))
        .iter()
        .map(|statement| without_attributes(statement))
        .filter_map(|statement| {
            let words = || statement.split(|c: char| !c.is_alphanumeric() && c != '_');
            let has = |wanted: &str| words().any(|word| word == wanted);
            if ELSEWHERE.iter().any(|word| has(word)) || has("__device__") && !has("__host__") {
                return None;
            }
            let (head, _) = statement.split_once('(')?;
            let name = head.split_whitespace().last()?.trim_start_matches('*');
            let has_type = head.split_whitespace().count() > 1;
            let short = name.strip_prefix('p').unwrap_or(name);
            let rest = short.strip_prefix("nccl")?;
            let is_function = rest.starts_with(|c: char| c.is_ascii_uppercase());
            (has_type && is_function).then(|| name.to_owned())
        })
        .collect()
}

/// Without comments and lines of the preprocessor.
fn without_comments(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("/*") {
        plain.push_str(&rest[..at]);
        plain.push(' ');
        rest = rest[at..].split_once("*/").map_or("", |(_, after)| after);
    }
    plain.push_str(rest);
    let plain = plain.replace("\\\n", " ");
    let lines = plain.lines().filter(|line| !line.trim_start().starts_with('#'));
    let lines = lines.map(|line| line.split_once("//").map_or(line, |(before, _)| before));
    lines.collect::<Vec<_>>().join("\n")
}

/// Without `__attribute__ ((...))`.
fn without_attributes(statement: &str) -> String {
    let mut plain = String::new();
    let mut rest = statement;
    while let Some((before, after)) = rest.split_once("__attribute__") {
        plain.push_str(before);
        let mut depth = 0_usize;
        let end = after.find(|c: char| {
            depth = match c {
                '(' => depth + 1,
                ')' => depth.saturating_sub(1),
                _ => depth,
            };
            c == ')' && depth == 0
        });
        rest = end.map_or("", |end| &after[end + 1..]);
    }
    plain + rest
}

/// What ends with a semicolon outside of all braces but those of `extern "C"`. What has a body is none.
fn statements(text: &str) -> Vec<String> {
    let text = text.replace("extern \"C\"", "extern_c");
    let mut statements = Vec::new();
    let mut current = String::new();
    let mut depth = 0_usize;
    for c in text.chars() {
        match c {
            '{' if depth == 0 && current.trim() == "extern_c" => current.clear(),
            '{' => depth += 1,
            '}' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    current.clear();
                }
            }
            ';' if depth == 0 => statements.push(std::mem::take(&mut current)),
            _ if depth == 0 => current.push(c),
            _ => {}
        }
    }
    statements
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_for_the_host_are_found_and_nothing_else() {
        let header = "\
            /* ncclInComment(int); */\n\
            #define ncclMacro(x) ncclNone(x);\n\
            #if defined(__cplusplus)\nextern \"C\" {\n#endif\n\
            typedef struct { int ncclField; } ncclThing_t; // ncclLine();\n\
            typedef ncclResult_t (*ncclCallback_t)(int);\n\
            ncclResult_t  ncclOne(ncclComm_t comm,\n    int n);\n\
            ncclResult_t pncclOne(ncclComm_t comm, int n);\n\
            const char* ncclTwo(ncclResult_t result);\n\
            NCCL_EXTERN_C __host__ __device__ ncclTeam_t ncclThree(ncclComm_t);\n\
            NCCL_IR_EXTERN_C __device__ void ncclOnDevice(int);\n\
            template<typename T> NCCL_DEVICE_INLINE void ncclTemplate(T t);\n\
            static inline int ncclHere(void) { return ncclTwo(0); }\n\
            struct ncclShape { int ncclMember(int); };\n\
            extern \"C\" void ncclFour(void);\n\
            #ifdef __cplusplus\n}\n#endif\n\
            __attribute__ ((deprecated(\"ncclSix (old)\")))\nvoid  ncclSix();\n\
            ncclResult_t ncclFive();\n";
        let found: Vec<_> = declared(header).into_iter().collect();
        let wanted =
            ["ncclFive", "ncclFour", "ncclOne", "ncclSix", "ncclThree", "ncclTwo", "pncclOne"];
        assert_eq!(found, wanted);
    }
}
