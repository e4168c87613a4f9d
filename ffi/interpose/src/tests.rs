//! The engine with a library of its own making: found, told apart, replaced and patched as NCCL is, by a table alone.

#![expect(unsafe_code, reason = "loads libraries of a test and calls what they export")]

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_int};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};

use super::library::{Description, Library};
use super::lookup::Decision;
use super::patch::Purpose;
use super::provider::{Provider, Resident};
use super::{Interposition, Pointer, loader};

/// The library of the test: `sublettest_version` is its landmark, and tells copies apart.
const LIBRARY: &str = "
    static int calls;
    int sublettest_version(void) { return WHICH; }
    int sublettest_work(int value) { calls++; return WHICH + value; }
    int sublettest_other(int value) { calls++; return WHICH + 10 * value; }
    int sublettest_calls(void) { return calls; }
";
/// One that links it.
const USER: &str = "
    int sublettest_work(int);
    int sublettest_other(int);
    int use_work(int value) { return sublettest_work(value); }
    int use_other(int value) { return sublettest_other(value); }
";

static MADE_UP: Library = Library::new(Description {
    prefix: "sublettest_",
    landmark: c"sublettest_version",
    file: c"libsublettest.so.1",
    table: TABLE,
    found: |_, is_watched| FOUND.with_borrow_mut(|found| found.push(is_watched)),
});

static NOWHERE: Resident = Resident::new(c"libsubletnone.so.1");

static INTERPOSED: Interposition = Interposition::new(
    Provider::new(&NOWHERE, "subletnone_", &[], &[], |_| Vec::new()),
    &[&MADE_UP],
    &[],
);

thread_local! {
    static FOUND: RefCell<Vec<bool>> = const { RefCell::new(Vec::new()) };
    static CALLED: RefCell<Vec<CString>> = const { RefCell::new(Vec::new()) };
}

/// Functions instead of the library's.
mod ours {
    use super::*;

    /// The number of calls of `sublettest_work`.
    pub(super) static COUNTED: AtomicI32 = AtomicI32::new(0);

    /// Counted, then the watched library's own.
    pub(super) extern "C" fn sublettest_work(value: c_int) -> c_int {
        COUNTED.fetch_add(1, Ordering::Relaxed);
        let own =
            MADE_UP.watched().and_then(|copy| copy.function(Function::sublettest_work as usize));
        own.map_or(-1, |own| call(own, value))
    }
}

fn called(name: &CStr) {
    CALLED.with_borrow_mut(|called| called.push(name.to_owned()));
}

extern "C" fn nobody(_value: c_int) -> c_int {
    -2
}

crate::interpose_library! {
    MADE_UP; missing = super::nobody;
    replaced in ours {
        sublettest_work;
    }
    told to called {
        sublettest_other;
    }
}

pub(crate) fn call(address: usize, value: c_int) -> c_int {
    let function = std::ptr::with_exposed_provenance::<()>(address);
    // SAFETY: the test asks for functions of this signature only.
    let function =
        unsafe { std::mem::transmute::<*const (), extern "C" fn(c_int) -> c_int>(function) };
    function(value)
}

/// A copy, or a library that uses one, which is asked by name, past our own functions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opened(Pointer);

impl Opened {
    pub(crate) fn new(path: &Path) -> Self {
        let path = CString::new(path.as_os_str().as_bytes()).expect("a path");
        let flags = libc::RTLD_NOW | libc::RTLD_LOCAL;
        // SAFETY: the path is terminated, and the library's initialisers are the C compiler's.
        let handle = unsafe { libc::dlopen(path.as_ptr(), flags) };
        assert!(!handle.is_null(), "{path:?} does not load");
        Self(handle)
    }

    pub(crate) fn call(self, name: &CStr, value: c_int) -> c_int {
        let found = loader::dlsym(self.0, name).expect("its function");
        call(found.as_ptr().expose_provenance(), value)
    }
}

pub(crate) fn compile(dir: &Path, name: &str, source: &str, flags: &[&str]) -> PathBuf {
    let (text, made) = (dir.join(format!("{name}.c")), dir.join(name));
    fs::write(&text, source).expect("a file");
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&made).arg(&text).args(flags);
    assert!(command.status().expect("a C compiler").success(), "{name} does not compile");
    made
}

/// A copy that answers with `which`, and a library that links it.
fn built(dir: &Path, which: c_int) -> [PathBuf; 2] {
    let name = format!("libsublettest{which}.so.1");
    let soname = format!("-Wl,-soname,{name}");
    let copy = compile(dir, &name, LIBRARY, &[&format!("-DWHICH={which}"), &soname]);
    let rpath = format!("-Wl,-rpath,{}", dir.display());
    let link = copy.to_str().expect("UTF-8");
    let user = compile(dir, &format!("libuser{which}.so"), USER, &[link, &rpath]);
    [copy, user]
}

/// One test, in this order: what a process has seen of a library stays known.
#[test]
fn further_library_is_found_replaced_and_patched_by_its_table_alone() {
    let dir = tempfile::tempdir().expect("a directory");
    let [[first, first_user], [second, second_user]] =
        [1000, 2000].map(|which| built(dir.path(), which));
    let (here, counted) = (built as *const (), || ours::COUNTED.load(Ordering::Relaxed));
    let ask =
        |handle: Pointer, name: &CStr| INTERPOSED.decide(handle, name, here.expose_provenance());

    // Bound by the loader, past us, until its slots are patched.
    let user = Opened::new(&first_user);
    assert_eq!((user.call(c"use_work", 1), counted()), (1001, 0));
    INTERPOSED.bind_by_attach();
    INTERPOSED.walk(Purpose::Patch);
    assert_eq!((user.call(c"use_work", 1), counted()), (1001, 1), "called through ours");
    assert_eq!(user.call(c"use_other", 1), 1010);
    CALLED.with_borrow(|called| assert_eq!(*called, [c"sublettest_other".to_owned()]));
    let entries = INTERPOSED.walked();
    let slots: Vec<_> =
        entries.iter().map(|(path, entry)| (Path::new(path), entry.slots)).collect();
    assert_eq!(slots, [(&*first_user, 2)]);

    // Looked up by name.
    let copy = Opened::new(&first);
    let work = ask(copy.0, c"sublettest_work");
    assert_eq!(work, Decision::answer((ours::sublettest_work as *const ()).expose_provenance()));
    assert_eq!(ask(copy.0, c"sublettest_calls"), Decision::LOADER, "not in its table");
    assert_eq!(ask(copy.0, c"ncclAllReduce"), Decision::LOADER, "no table of this process");
    assert_eq!(ask(libc::RTLD_NEXT, c"sublettest_work"), Decision::LOADER);

    // Its calls of itself stay its own, whatever thread makes them.
    let own = loader::dlsym(copy.0, c"sublettest_work").expect("its function");
    let own = own.as_ptr().expose_provenance();
    let replacing = (ours::sublettest_work as *const ()).expose_provenance();
    let goes_to = |caller| MADE_UP.target(Function::sublettest_work as usize, caller);
    assert_eq!(goes_to(own), Some(own));
    assert_eq!(goes_to(here.expose_provenance()), Some(replacing));

    // A second copy, loaded after the walk, is told apart and gets its own calls.
    let user = Opened::new(&second_user);
    assert_eq!((user.call(c"use_work", 2), counted()), (2002, 1), "not patched yet");
    INTERPOSED.look_again();
    assert_eq!((user.call(c"use_work", 2), counted()), (2002, 1), "patched, and not watched");
    assert_eq!(ask(Opened::new(&second).0, c"sublettest_work"), Decision::LOADER);
    assert_eq!(Opened::new(&second).call(c"sublettest_calls", 0), 2);
    assert_eq!(copy.call(c"sublettest_calls", 0), 3);
    FOUND.with_borrow(|found| assert_eq!(*found, [true, false]));
    assert_eq!(INTERPOSED.walked().len(), 2);
}
