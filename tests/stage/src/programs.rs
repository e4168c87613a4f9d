//! C programs of tests.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output};

/// Builds `target` from `source` with the C compiler, warnings denied; `flags` come after the source.
pub fn cc<S: AsRef<OsStr>>(source: &Path, target: &Path, flags: &[S]) {
    let status = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-Wall", "-Werror", "-Wno-unused-variable"])
        .args(["-Wno-unused-function", "-o"])
        .arg(target)
        .arg(source)
        .args(flags)
        .args(["-ldl", "-lpthread"])
        .status()
        .unwrap_or_else(|error| panic!("a C compiler is needed: {error}"));
    assert!(status.success(), "{} does not compile", source.display());
}

/// What a program printed, which must have ended well.
pub fn transcript(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
    text
}
