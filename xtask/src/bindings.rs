//! The Rust view of the C header, made by bindgen and committed.
//!
//! The header is written by hand and is the source of truth; the check keeps them from drifting.

use std::env;
use std::fs;
use std::path::Path;

use bindgen::{Builder, EnumVariation, Formatter, RustEdition, RustTarget};

use crate::python::{LIBCLANG, program};
use crate::workspace::Workspace;
use crate::{Outcome, process};

/// The header.
const HEADER: &str = "ffi/include/sublet.h";
/// The variable with the folder in which bindgen looks for the library that reads C.
const LIBCLANG_PATH: &str = "LIBCLANG_PATH";

/// Its Rust view.
const VIEW: &str = "ffi/src/bindings.rs";
/// The text that bindgen writes before the functions, and the macro call that replaces it. Each crate with the view
/// makes something else of the functions by that macro.
const FUNCTIONS: [&str; 2] = ["unsafe extern \"C\" {", "functions! {"];

/// The beginning of the view.
const HEAD: &str = "\
//! The C interface, generated from `include/sublet.h` by `cargo xtask bindgen`.
//!
//! Never edited: change the header and run the command. What becomes of the functions says the macro `functions` of the crate
//! that has this module.

#![allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    clippy::expect_used,
    clippy::multiple_unsafe_ops_per_block,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    missing_debug_implementations,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    unsafe_code,
    unsafe_op_in_unsafe_fn,
    reason = \"generated from C, whose names and forms it keeps\"
)]
";

/// Writes the view.
pub(crate) fn write(workspace: &Workspace) -> Outcome {
    if !is_able(workspace, &["bindgen"])? {
        return Ok(());
    }
    fs::write(workspace.root.join(VIEW), generate(workspace)?)?;
    println!("wrote {VIEW}");
    Ok(())
}

/// Fails when the committed view is not what the header gives.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    if !is_able(workspace, &["bindgen", "--check"])? {
        return Ok(());
    }
    let fresh = generate(workspace)?;
    let committed = fs::read_to_string(workspace.root.join(VIEW))
        .map_err(|error| format!("{VIEW}: {error}; run `cargo xtask bindgen`"))?;
    if let Some(line) = first_difference(&committed, &fresh) {
        let what = format!("{VIEW}:{line}: is not what {HEADER} gives");
        return Err(format!("{what}; run `cargo xtask bindgen`").into());
    }
    println!("bindgen: {VIEW} is what {HEADER} gives");
    Ok(())
}

/// Whether this process can run bindgen. If not, a child that can has done the work with `arguments`.
///
/// bindgen reads the library's place from the environment, and changing our own would be unsafe.
fn is_able(workspace: &Workspace, arguments: &[&str]) -> Outcome<bool> {
    if !workspace.root.join(HEADER).is_file() {
        return Err(format!("{HEADER} does not exist; write the header first").into());
    }
    if env::var_os(LIBCLANG_PATH).is_some() {
        return Ok(true);
    }
    // One version for all machines.
    let folder = program(workspace, LIBCLANG, "clang/native")
        .map_err(|error| format!("no libclang on this machine: {error}; or set {LIBCLANG_PATH}"))?;
    // This program by its open file: a build may have replaced the one at its path.
    let mut child = workspace.command("/proc/self/exe");
    process::run(child.args(arguments).env(LIBCLANG_PATH, folder))?;
    Ok(false)
}

fn generate(workspace: &Workspace) -> Outcome<String> {
    let header = workspace.root.join(HEADER);
    let mut builder = Builder::default()
        .header(path_text(&header)?)
        .allowlist_file(format!(".*/{}", HEADER.replace('.', "\\.")))
        .use_core()
        .rust_target(rust_target(workspace)?)
        .rust_edition(RustEdition::Edition2024)
        // A newer header may give a value that an older build does not know, so values stay integers.
        .default_enum_style(EnumVariation::NewType { is_bitfield: false, is_global: false })
        .prepend_enum_name(false)
        .merge_extern_blocks(true)
        .disable_header_comment()
        .formatter(Formatter::None);
    // libclang alone lacks the compiler's own headers, stddef.h among them; these come last.
    if let Ok(include) = process::output(workspace.command("cc").arg("-print-file-name=include")) {
        builder = builder.clang_args(["-idirafter", &include]);
    }
    let bindings = builder.generate().map_err(|error| format!("{HEADER}: {error}"))?;
    let unformatted = workspace.target.join("bindings.rs");
    fs::write(&unformatted, format!("{HEAD}\n{bindings}"))?;
    let mut rustfmt = workspace.command("rustfmt");
    rustfmt.args(["--edition", "2024", "--config-path"]);
    process::run(rustfmt.arg(&workspace.root).arg(&unformatted))?;
    let [made, macro_call] = FUNCTIONS;
    Ok(fs::read_to_string(&unformatted)?.replace(made, macro_call))
}

/// The oldest compiler that the workspace promises to build with.
fn rust_target(workspace: &Workspace) -> Outcome<RustTarget> {
    let promised = workspace
        .metadata
        .workspace_packages()
        .iter()
        .find_map(|package| package.rust_version.clone())
        .ok_or("no package names its rust-version")?;
    let fault = |error| format!("rust-version {promised}: {error}");
    Ok(RustTarget::stable(promised.minor, promised.patch).map_err(fault)?)
}

fn path_text(path: &Path) -> Outcome<&str> {
    path.to_str().ok_or_else(|| format!("{} is not UTF-8", path.display()).into())
}

/// The first line, counted from 1, in which two texts differ.
fn first_difference(one: &str, other: &str) -> Option<usize> {
    if one == other {
        return None;
    }
    let same = one.lines().zip(other.lines()).take_while(|(one, other)| one == other);
    Some(same.count() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_difference_is_counted_from_one() {
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(first_difference("a\nb\n", "a\nc\n"), Some(2));
        assert_eq!(first_difference("a\n", "a\nb\n"), Some(2));
    }
}
