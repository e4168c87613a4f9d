//! The functions of `torch_memory_saver`, which its Python package and other programs call by name.
//!
//! `sublet_torch_allocator` says what their settings mean.
//!
//! These functions return where `torch_memory_saver` ends the process. They return a success without doing anything
//! (pausing paused memory, resuming resident memory). Otherwise they return an error code, with the reason in
//! `sublet_last_error`.

#![expect(unsafe_code, reason = "exports C functions")]

mod settings;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_char, c_int};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::command::{Change, Command};
use sublet_torch_allocator::{Backend, tags_of};
use vmm_pool::SavedError;
use vmm_pool::driver::{DeviceAddress, DriverCode, VaRange};
use vmm_pool::sync::lock;

use crate::c_api::last_call::{fail_aloud, guarded_length, write_text};
use crate::c_api::{self, pausing};
use crate::driver::call_driver;
use crate::guards::Guard;
use crate::pluggable::{sublet_torch_free, sublet_torch_malloc};
use crate::runtime;
use sublet_interpose::Pointer;

/// Free device memory that an allocation in a region must leave; 0 for none.
static MARGIN_BYTES: AtomicU64 = AtomicU64::new(0);
/// Backups by device address and size.
type Backups = BTreeMap<(u64, u64), Box<[u8]>>;

/// Backups that lie in several pieces, as one copy each for the callers that asked; kept as long as the backups.
static TOGETHER: Mutex<Backups> = Mutex::new(Backups::new());

/// Runs a function of the interface that cannot fail; a panic of ours does not unwind into C.
fn quietly<T>(otherwise: T, work: impl FnOnce() -> T) -> T {
    runtime::netted(work).unwrap_or(otherwise)
}

/// # Safety
/// `text` is null or a terminated string.
unsafe fn text_of(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not null, so a terminated string.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// The part of this interface in memory that is about to be made.
pub(crate) const GUARD: Guard = Guard { settle, refuses: leaves_too_little };

/// Files memory that the calling thread asks for under its settings.
fn settle() {
    quietly((), settings::settle);
}

/// Would `size_bytes` more on the current device leave less free memory than was asked to be left?
fn leaves_too_little(size_bytes: usize) -> bool {
    let margin_bytes = MARGIN_BYTES.load(Ordering::Relaxed);
    if margin_bytes == 0 || !settings::is_interesting() {
        return false;
    }
    let (mut free, mut total) = (0_usize, 0_usize);
    let places = (&raw mut free, &raw mut total);
    let code = call_driver!(cuMemGetInfo_v2(places.0 => *mut usize, places.1 => *mut usize));
    let needed_bytes = margin_bytes.saturating_add(size_bytes as u64);
    let refused = code == DriverCode::SUCCESS.0 && needed_bytes > free as u64;
    if refused {
        tracing::info!(size_bytes, margin_bytes, free_bytes = free, "refused to keep the margin");
    }
    refused
}

/// Sets the tag of what this thread asks for.
///
/// # Safety
/// `tag` is null, which changes nothing, or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_set_current_tag(tag: *const c_char) {
    // SAFETY: as this function's caller promises.
    let tag = unsafe { text_of(tag) };
    quietly((), || tag.into_iter().for_each(|tag| settings::change(|own| own.set_tag(&tag))));
}

/// The tag of what this thread asks for. Valid until the thread sets another.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_current_tag() -> *const c_char {
    quietly(c"".as_ptr(), || settings::ask(|own| own.tag_text().as_ptr()))
}

macro_rules! switch {
    ($what:literal, $set:ident, $get:ident, $field:ident) => {
        #[doc = concat!("Sets, for what this thread asks for, ", $what, ".")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $set(value: bool) {
            quietly((), || settings::change(|own| own.$field = value));
        }

        #[doc = concat!("For what this thread asks for: ", $what, ".")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $get() -> bool {
            quietly(false, || settings::ask(|own| own.$field))
        }
    };
}

switch!(
    "whether it can be paused",
    tms_set_interesting_region,
    tms_get_interesting_region,
    interesting
);
switch!(
    "whether a pause saves it to host memory",
    tms_set_enable_cpu_backup,
    tms_get_enable_cpu_backup,
    cpu_backup
);
switch!(
    "whether a pause saves it to a file",
    tms_set_enable_disk_backup,
    tms_get_enable_disk_backup,
    disk_backup
);

/// Sets what kind of host memory backups lie in. It is pinned in either case; once memory was allocated with `mmap`, each
/// resume gives back what holds no backup, and otherwise it stays for the next pause. Unknown words change nothing.
///
/// # Safety
/// `backend` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_set_cpu_backup_backend(backend: *const c_char) {
    // SAFETY: as this function's caller promises.
    let word = unsafe { text_of(backend) }.unwrap_or_default();
    quietly((), || match Backend::named(&word) {
        Some(backend) => settings::change(|own| own.backend = backend),
        None => {
            fail_aloud(
                c_api::ARGUMENT,
                &format!("'{word}' is no kind of backup: use pinned or mmap"),
            );
        }
    });
}

/// The word that [`tms_set_cpu_backup_backend`] was given. Never freed.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_cpu_backup_backend() -> *const c_char {
    quietly(Backend::Pinned, || settings::ask(|own| own.backend)).text().as_ptr()
}

/// Sets where files of paused memory go, from the next pause on. A directory that will not do is said on
/// standard error, and changes nothing.
///
/// # Safety
/// `dir` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_set_disk_backup_dir(dir: *const c_char) {
    // SAFETY: as this function's caller promises. What it says is kept as the thread's last error.
    let _code = unsafe { c_api::contents::sublet_set_file_dir(dir) };
}

/// Sets how much free device memory allocations in regions must leave. One that would leave less is
/// answered as out of memory, upon which torch frees what it has cached and asks again.
#[unsafe(no_mangle)]
pub extern "C" fn set_memory_margin_bytes(value: u64) {
    MARGIN_BYTES.store(value, Ordering::Relaxed);
}

/// Sets whether backups in host memory are kept after a resume, for [`tms_get_cpu_backup_pointer`]: until the next pause
/// of the same memory, which puts its bytes into the same place, or until that memory is freed. Counts from the next
/// resume on.
#[unsafe(no_mangle)]
pub extern "C" fn tms_set_retain_cpu_backup(retain: bool) {
    quietly((), || {
        settings::environment().retain.store(retain, Ordering::Relaxed);
        settings::tell_pool();
    });
}

/// The value that [`tms_set_retain_cpu_backup`] was given, or that the environment has.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_retain_cpu_backup() -> bool {
    quietly(false, || settings::environment().retain.load(Ordering::Relaxed))
}

/// Tags of ours that `tag` stands for; null or empty stands for all that were made here.
unsafe fn own_tags(tag: *const c_char) -> BTreeSet<String> {
    // SAFETY: as this function's caller promises.
    let tag = unsafe { text_of(tag) }.filter(|tag| !tag.is_empty());
    tags_of(tag.as_deref()).into_iter().collect()
}

/// Pauses or resumes this process's memory of `tag`. A tag without memory is a success.
unsafe fn act(tag: *const c_char, command: fn(Change) -> Command) -> c_int {
    quietly((), settings::tell_pool);
    // SAFETY: as this function's caller promises.
    let tags = quietly(BTreeSet::new(), || unsafe { own_tags(tag) });
    if tags.is_empty() {
        return 0;
    }
    let change = Change { tags: Some(tags), is_own: true, ..Change::default() };
    pausing::act(|| Ok(command(change)))
}

/// Gives the memory of `tag` back, or all that is paused by tags of this interface when that is null. 0 is success,
/// also for what is paused already; otherwise a `SUBLET_ERROR_` code, and nothing has changed.
///
/// # Safety
/// `tag` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_pause(tag: *const c_char) -> c_int {
    // SAFETY: as this function's caller promises.
    unsafe { act(tag, Command::Pause) }
}

/// Brings memory back to the same addresses; as [`tms_pause`]. After a failure it is still paused, with its
/// backups kept, and this can be called again.
///
/// # Safety
/// `tag` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_resume(tag: *const c_char) -> c_int {
    // SAFETY: as this function's caller promises.
    let code = unsafe { act(tag, Command::Resume) };
    quietly((), forget_passed);
    code
}

/// Writes the tags of Sublet's that `tag` stands for (null: all of this interface) as a JSON list, as the functions of
/// `sublet.h` write theirs.
///
/// # Safety
/// `tag` is null or a terminated string; `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_tags_json(
    tag: *const c_char,
    buffer: *mut c_char,
    size: usize,
) -> i64 {
    guarded_length(|| {
        settings::tell_pool();
        // SAFETY: as this function's caller promises.
        let names = tags_of(unsafe { text_of(tag) }.as_deref());
        // SAFETY: as this function's caller promises.
        unsafe { write_text(&serde_json::json!(names).to_string(), buffer, size) }
    })
}

/// Returns the address of the saved bytes of device memory: while it is paused, and after its resume where backups are
/// kept. Valid until the next pause or resume of that memory. Null when there are none, as for memory that was not
/// saved to host memory. Null also for a `size` of 0.
///
/// # Safety
/// The address is only compared.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_get_cpu_backup_pointer(address: *const u8, size: u64) -> *mut u8 {
    let found = quietly(None, || {
        forget_passed();
        backup(DeviceAddress(address.addr() as u64), size)
    });
    found.map_or(std::ptr::null_mut(), std::ptr::NonNull::as_ptr)
}

/// Frees copies of backups that there are no more.
fn forget_passed() {
    let Some(member) = runtime::member() else { return };
    lock(&TOGETHER).retain(|&(start, size_bytes), _| {
        let found =
            member.pool().saved_or_retained().at(VaRange::new(DeviceAddress(start), size_bytes));
        matches!(found, Ok(_) | Err(SavedError::InPieces(_)))
    });
}

fn backup(start: DeviceAddress, size_bytes: u64) -> Option<std::ptr::NonNull<u8>> {
    if size_bytes == 0 {
        return None;
    }
    let pool = runtime::member()?.pool();
    match pool.saved_or_retained().at(VaRange::new(start, size_bytes)) {
        Ok(place) => return Some(place),
        Err(SavedError::InPieces(_)) => {}
        // Callers ask for what is not away, too.
        Err(error) => {
            tracing::debug!(%error, "no backup");
            return None;
        }
    }
    let length = usize::try_from(size_bytes).ok()?;
    let mut known = lock(&TOGETHER);
    let copy = match known.entry((start.0, size_bytes)) {
        Entry::Occupied(copy) => copy.into_mut(),
        Entry::Vacant(place) => place.insert(vec![0_u8; length].into_boxed_slice()),
    };
    // Each time: there may have been another pause since.
    pool.saved_or_retained().read(start, copy).ok()?;
    std::ptr::NonNull::new(copy.as_mut_ptr())
}

/// Allocates for torch's pluggable allocator, as the calling thread is set.
///
/// # Safety
/// As [`sublet_torch_malloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_torch_malloc(size: isize, device: c_int, stream: Pointer) -> Pointer {
    // SAFETY: as this function's caller promises.
    unsafe { sublet_torch_malloc(size, device, stream) }
}

/// Frees for torch's pluggable allocator.
///
/// # Safety
/// As [`sublet_torch_free`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_torch_free(ptr: Pointer, size: isize, device: c_int, stream: Pointer) {
    // SAFETY: as this function's caller promises.
    unsafe { sublet_torch_free(ptr, size, device, stream) }
}
