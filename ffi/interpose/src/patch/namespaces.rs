//! A provider in a separate namespace (`dlmopen`).
//!
//! The loader's list has only the libraries of its caller's namespace. Libraries in another namespace have their own C library,
//! `dlsym` and provider, which our slots cannot reach. The provider's file is then mapped once more than the list says. A look at
//! all mappings is costly, so it is made only if a library was loaded or unloaded since the last one.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::object::Loads;
use super::protections;
use crate::provider::Provider;

/// The provider's code in other namespaces.
#[derive(Debug)]
pub(super) struct Elsewhere(Mutex<Look>);

#[derive(Debug, Default)]
struct Look {
    loads: Loads,
    found: Option<String>,
}

impl Elsewhere {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(Look { loads: (0, 0), found: None }))
    }

    /// Looks again, unless `loads` are those of the last look. `here` has the provider's addresses by the loader's list.
    pub(super) fn look(&self, provider: &Provider, loads: Loads, here: &[Range<usize>]) {
        let mut look = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if look.loads != loads {
            *look = Look { loads, found: code_outside(provider, &protections::read_maps(), here) };
        }
    }

    /// Returns the file that was found at the last look.
    pub(super) fn found(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).found.clone()
    }
}

/// Returns the file of the first mapping of the provider's code in `maps` that is not in `here`.
fn code_outside(provider: &Provider, maps: &[u8], here: &[Range<usize>]) -> Option<String> {
    let lines = maps.split(|&byte| byte == b'\n');
    lines.into_iter().find_map(|line| {
        let (range, rights) = protections::mapping_of(line)?;
        let path = &line[line.iter().position(|&byte| byte == b'/')?..];
        let is_code = rights.execute && provider.is_own(path);
        let is_here = here.iter().any(|known| known.contains(&range.start));
        (is_code && !is_here).then(|| String::from_utf8_lossy(path).into_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::Resident;

    static LIBRARY: Resident = Resident::new(c"libcuda.so.1");
    static PROVIDER: Provider = Provider::new(&LIBRARY, "cu", &[], &[], |_| Vec::new());

    const MAPS: &[u8] = b"1000-2000 r--p 00000000 08:01 7 /lib/libcuda.so.1\n\
        2000-3000 r-xp 00001000 08:01 7 /lib/libcuda.so.1\n\
        5000-6000 r-xp 00000000 08:01 8 /lib/libc.so.6\n\
        7000-8000 r--p 00000000 08:01 7 /lib/libcuda.so.1\n\
        8000-9000 r-xp 00001000 08:01 7 /lib/libcuda.so.1\n";

    #[test]
    fn code_of_a_driver_that_no_list_has_is_found() {
        let both = [0x1000..0x3000, 0x7000..0x9000];
        assert_eq!(code_outside(&PROVIDER, MAPS, &both), None);
        assert_eq!(code_outside(&PROVIDER, MAPS, &both[..1]).as_deref(), Some("/lib/libcuda.so.1"));
        assert_eq!(code_outside(&PROVIDER, b"", &[]), None);
    }

    #[test]
    fn the_mappings_are_looked_at_when_something_was_loaded() {
        let elsewhere = Elsewhere::new();
        elsewhere.look(&PROVIDER, (0, 0), &[]);
        assert_eq!(elsewhere.found(), None, "no process has loaded nothing");
        elsewhere.look(&PROVIDER, (3, 0), &[]);
        assert_eq!(elsewhere.found(), None, "no driver in this process");
    }
}
