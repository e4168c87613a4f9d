//! The order in which the loader looks for `dlsym(RTLD_NEXT, ...)`, and the libraries that it searches for a caller alone.
//!
//! The loader takes its caller's place from the return address, so that nobody can ask it for somebody else. What it does
//! (glibc, `do_sym` in `elf/dl-sym.c`) follows from its public list: a library is looked for behind its caller, among what was loaded
//! with the program, or else among what the library depends on that brought the caller in, breadth first.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{CStr, CString};
use std::ops::ControlFlow;

use super::object::{self, Object};

/// The libraries that are searched after a caller's library.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Behind {
    /// Files, in order.
    pub(crate) files: Vec<CString>,
    /// Does the search continue with libraries that were opened with `RTLD_GLOBAL` since the program's start?
    pub(crate) goes_on: bool,
}

/// Returns the libraries that are searched after the one that contains `caller`; none if no library does.
pub(crate) fn behind(caller: usize) -> Behind {
    behind_caller(&loaded_for(caller))
}

/// Returns the files that the loader searches only for `caller`, whatever the name: all that were loaded together with it (glibc,
/// `l_scope`). Empty for libraries that were loaded with the program, which every caller finds.
pub(crate) fn around(caller: usize) -> Vec<CString> {
    around_caller(&loaded_for(caller))
}

/// The loader's list.
fn loaded_for(caller: usize) -> Vec<Loaded> {
    let mut list = Vec::new();
    object::each(&mut |_, object| {
        list.push(object.map(|object| loaded(&object, caller)).unwrap_or_default());
        ControlFlow::Continue(())
    });
    list
}

/// A library of the loader's list.
#[derive(Clone, Debug, Default)]
struct Loaded {
    file: CString,
    soname: Option<CString>,
    needed: Vec<CString>,
    holds_caller: bool,
}

fn loaded(object: &Object<'_>, caller: usize) -> Loaded {
    Loaded {
        file: object.name.to_owned(),
        soname: object.soname().map(CStr::to_owned),
        needed: object.needed().into_iter().map(CStr::to_owned).collect(),
        holds_caller: object.contains(caller),
    }
}

fn file_name(path: &CStr) -> &[u8] {
    path.to_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default()
}

/// Returns the libraries that each library depends on, by number in the list.
fn dependencies(list: &[Loaded]) -> Vec<Vec<usize>> {
    let mut known: HashMap<&[u8], usize> = HashMap::new();
    for (number, loaded) in list.iter().enumerate() {
        let names = [loaded.soname.as_deref().map(CStr::to_bytes), Some(file_name(&loaded.file))];
        for name in names.into_iter().flatten().filter(|name| !name.is_empty()) {
            known.entry(name).or_insert(number);
        }
    }
    let number = |name: &CString| known.get(file_name(name)).copied();
    list.iter().map(|loaded| loaded.needed.iter().filter_map(number).collect()).collect()
}

/// Returns `first` and all its dependencies, breadth first.
fn breadth_first(dependencies: &[Vec<usize>], first: usize) -> Vec<usize> {
    let mut order = vec![first];
    let mut next = 0;
    while next < order.len() {
        for &needed in &dependencies[order[next]] {
            if !order.contains(&needed) {
                order.push(needed);
            }
        }
        next += 1;
    }
    order
}

/// The last that was loaded with the program, which comes first, and is searched with what is preloaded and all dependencies
/// in the order of the list.
fn last_at_start(dependencies: &[Vec<usize>]) -> usize {
    let (mut last, mut next) = (0, 0);
    while next <= last {
        last = dependencies[next].iter().copied().fold(last, usize::max);
        next += 1;
    }
    last
}

fn around_caller(list: &[Loaded]) -> Vec<CString> {
    let Some(caller) = list.iter().position(|loaded| loaded.holds_caller) else {
        return Vec::new();
    };
    let dependencies = dependencies(list);
    let opened = last_at_start(&dependencies) + 1..list.len();
    let groups = opened.map(|first| breadth_first(&dependencies, first));
    let with_caller = groups.filter(|group| group.contains(&caller)).flatten();
    let files: BTreeSet<usize> = with_caller.collect();
    files.into_iter().map(|number| list[number].file.clone()).collect()
}

fn behind_caller(list: &[Loaded]) -> Behind {
    let Some(caller) = list.iter().position(|loaded| loaded.holds_caller) else {
        return Behind::default();
    };
    let dependencies = dependencies(list);
    let last_at_start = last_at_start(&dependencies);
    let goes_on = caller <= last_at_start;
    let order = if goes_on {
        (caller..=last_at_start).collect()
    } else {
        let brings_in = |first: usize| {
            let order = breadth_first(&dependencies, first);
            let place = order.iter().position(|&number| number == caller)?;
            Some(order[place..].to_vec())
        };
        (last_at_start + 1..=caller).find_map(brings_in).unwrap_or_default()
    };
    let files = order.into_iter().skip(1).map(|number| list[number].file.clone()).collect();
    Behind { files, goes_on }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loaded(file: &str, needed: &[&str]) -> Loaded {
        let text = |text: &str| CString::new(text).expect("text");
        Loaded {
            file: text(file),
            soname: None,
            needed: needed.iter().map(|name| text(name)).collect(),
            holds_caller: false,
        }
    }

    /// A program with two preloaded libraries, of which the second needs another; then a library that was opened, with
    /// two that came with it and one that was there.
    fn list_of(caller: &str) -> [Loaded; 10] {
        let mut list = [
            loaded("", &["libprog.so", "libc.so"]),
            loaded("/a/libfirst.so", &["libc.so"]),
            loaded("/a/libsecond.so", &["libhelp.so", "libc.so"]),
            loaded("/b/libprog.so", &["libc.so"]),
            loaded("/b/libc.so", &[]),
            loaded("/b/libhelp.so", &["libc.so"]),
            loaded("/c/libopened.so", &["libone.so", "libtwo.so", "/a/libfirst.so"]),
            loaded("/c/libone.so", &["libtwo.so"]),
            loaded("/c/libtwo.so", &["libc.so"]),
            loaded("/c/libalone.so", &["libone.so"]),
        ];
        for loaded in &mut list {
            loaded.holds_caller = file_name(&loaded.file) == caller.as_bytes();
        }
        list
    }

    fn names(files: &[CString]) -> Vec<String> {
        files.iter().map(|file| String::from_utf8_lossy(file_name(file)).into_owned()).collect()
    }

    fn behind_of(caller: &str) -> (Vec<String>, bool) {
        let Behind { files, goes_on } = behind_caller(&list_of(caller));
        (names(&files), goes_on)
    }

    #[test]
    fn what_was_opened_is_searched_for_all_that_it_brought_in() {
        let around = |caller| names(&around_caller(&list_of(caller))).join(" ");
        assert_eq!(around(""), "");
        assert_eq!(around("libopened.so"), "libfirst.so libc.so libopened.so libone.so libtwo.so");
        // Two opened libraries need it, and each is searched for it.
        assert_eq!(
            around("libtwo.so"),
            "libfirst.so libc.so libopened.so libone.so libtwo.so libalone.so"
        );
    }

    #[test]
    fn what_came_with_the_program_is_searched_in_the_order_of_the_list() {
        let all = ["libfirst.so", "libsecond.so", "libprog.so", "libc.so", "libhelp.so"];
        assert_eq!(behind_of(""), (all.map(str::to_owned).to_vec(), true));
        assert_eq!(
            behind_of("libsecond.so"),
            (all[2..].iter().map(ToString::to_string).collect(), true)
        );
        assert_eq!(behind_of("libhelp.so"), (vec![], true));
    }

    #[test]
    fn what_was_opened_is_searched_with_its_dependencies_alone() {
        let behind = |caller| behind_of(caller).0.join(" ");
        assert_eq!(behind("libopened.so"), "libone.so libtwo.so libfirst.so libc.so");
        // It was brought in by the first that needs it.
        assert_eq!(behind("libone.so"), "libtwo.so libfirst.so libc.so");
        assert_eq!(behind("libalone.so"), "libone.so libtwo.so libc.so");
        assert!(!behind_of("libalone.so").1);
        assert_eq!(behind_of("libnone.so"), (vec![], false));
    }

    #[test]
    fn this_process_is_read() {
        let here = behind((behind as *const ()).addr());
        assert!(here.goes_on);
        assert!(here.files.iter().any(|file| file_name(file).starts_with(b"libc.so")), "{here:?}");
    }
}
