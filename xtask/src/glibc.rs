//! The versions of the C library that built programs ask for.

use std::fmt::{self, Display};
use std::path::PathBuf;

use crate::workspace::Workspace;
use crate::{Outcome, process};

/// A version of the C library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Glibc(pub(crate) u32, pub(crate) u32);

impl Display for Glibc {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(major, minor) = self;
        write!(formatter, "{major}.{minor}")
    }
}

/// The newest version that one of `programs` asks for.
pub(crate) fn newest(workspace: &Workspace, programs: &[PathBuf]) -> Outcome<Glibc> {
    let table = process::output(workspace.command("objdump").arg("-T").args(programs))
        .map_err(|error| format!("{error}; install binutils"))?;
    newest_in(&table).ok_or_else(|| "no program asks for a C library".into())
}

/// The newest version named as `GLIBC_x.y` in a symbol table.
fn newest_in(table: &str) -> Option<Glibc> {
    table
        .split("GLIBC_")
        .skip(1)
        .filter_map(|after| {
            let end = after.find(|next: char| !next.is_ascii_digit() && next != '.');
            let mut numbers = after[..end.unwrap_or(after.len())].split('.');
            let major = numbers.next()?.parse().ok()?;
            Some(Glibc(major, numbers.next()?.parse().ok()?))
        })
        .max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_version_is_compared_by_number() {
        let table = "(GLIBC_2.9) read\n(GLIBC_2.34) write\n(GLIBC_PRIVATE) x\n(GLIBC_2.2.5) y";
        assert_eq!(newest_in(table), Some(Glibc(2, 34)));
        assert!(newest_in(table) < Some(Glibc(2, 36)));
        assert!(Glibc(2, 38) > Glibc(2, 36));
        assert_eq!(newest_in("no versions"), None);
    }
}
