//! Walks before pauses: one is left out only where it would write nothing.

#![expect(unsafe_code, reason = "writes into the slot of a library of its own")]

use std::collections::HashMap;
use std::ffi::c_int;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::{Ours, Patches, Purpose};
use crate::provider::{Provider, Resident};
use crate::tests::{Opened, compile};

const OTHER: &str = "int subletwalk_work(int value) { return value; }";
/// One that links it.
const USER: &str =
    "int subletwalk_work(int); int use_work(int value) { return subletwalk_work(value); }";
const WAIT: Duration = Duration::from_secs(30);

static PATCHES: Patches = Patches::new();
static NOWHERE: Resident = Resident::new(c"libsubletnone.so.1");
static PROVIDER: Provider = Provider::new(&NOWHERE, "subletnone_", &[], &[], |_| Vec::new());

extern "C" fn ours(value: c_int) -> c_int {
    100 + value
}

/// Walks as before a pause, and says whether it looked at anything.
fn looks() -> bool {
    let walks = || PATCHES.known.lock().expect("no test panics in a walk").walks;
    let before = walks();
    PATCHES.walk(&PROVIDER, Purpose::Pause);
    walks() > before
}

/// Walks until one finds nothing to do: other tests of this process open libraries of theirs.
fn settle() {
    let until = Instant::now() + WAIT;
    while looks() {
        assert!(Instant::now() < until, "no walk is left out");
    }
}

/// A library with a writable slot that leads past us.
fn user(dir: &Path, name: &str) -> Opened {
    let other = dir.join("libsubletwalk.so");
    let flags = [other.to_str().expect("UTF-8"), "-Wl,-z,now", "-Wl,-z,norelro"];
    let user = Opened::new(&compile(dir, name, USER, &flags));
    assert_eq!(user.call(c"use_work", 1), 1, "bound by the loader, past us");
    user
}

#[test]
fn walk_is_left_out_until_a_library_is_opened_or_a_slot_is_written() {
    let dir = tempfile::tempdir().expect("a directory");
    let soname = format!("-Wl,-soname,{}", dir.path().join("libsubletwalk.so").display());
    compile(dir.path(), "libsubletwalk.so", OTHER, &[&soname]);
    PATCHES.prepare(|| {
        let ours = Ours { address: (ours as *const ()).expose_provenance(), is_exported: true };
        HashMap::from([(b"subletwalk_work".as_slice(), ours)])
    });

    let first = user(dir.path(), "libwalkfirst.so");
    assert!(looks());
    assert_eq!(first.call(c"use_work", 1), 101);
    settle();

    let second = user(dir.path(), "libwalksecond.so");
    assert!(looks(), "opened between two pauses");
    assert_eq!((first.call(c"use_work", 1), second.call(c"use_work", 1)), (101, 101));
    settle();

    let slots = PATCHES.known.lock().expect("no test panics in a walk").last.slots.clone();
    assert_eq!(slots.len(), 2);
    for (slot, _) in slots {
        let slot = std::ptr::with_exposed_provenance::<AtomicUsize>(slot);
        // SAFETY: the slot of a library of this test, which stays and has no page that the loader protects.
        unsafe { &*slot }.store((other_hand as *const ()).expose_provenance(), Ordering::Release);
        assert_eq!(first.call(c"use_work", 1) + second.call(c"use_work", 1), 101 + 201);
        assert!(looks(), "written by another hand");
        assert_eq!((first.call(c"use_work", 1), second.call(c"use_work", 1)), (101, 101));
    }
}

extern "C" fn other_hand(value: c_int) -> c_int {
    200 + value
}
