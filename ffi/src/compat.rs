//! The functions of `torch_memory_saver`, which its Python package and other programs call by name.
//!
//! `sublet_torch_allocator` describes their settings.
//!
//! These functions return where `torch_memory_saver` ends the process. They return a success without doing anything
//! (pausing paused memory, resuming resident memory). Otherwise they return an error code, with the reason in
//! `sublet_last_error`.

#![expect(unsafe_code, reason = "exports C functions")]

use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int};

use sublet_interpose::Pointer;
use sublet_torch_allocator::{Backend, tags_of};
use vmm_pool::driver::{DeviceAddress, VaRange};

use crate::c_api::{contents::sublet_set_file_dir, pausing};
use crate::command::{Change, Command};
use crate::last_call::{ARGUMENT, fail_aloud, guarded_length, write_text};
use crate::pluggable::{sublet_torch_free, sublet_torch_malloc};
use crate::runtime;
use crate::saver::SAVER;

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

/// Sets the tag of this thread's allocations.
///
/// # Safety
/// `tag` is null, which changes nothing, or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_set_current_tag(tag: *const c_char) {
    // SAFETY: as this function's caller promises.
    let tag = unsafe { text_of(tag) };
    quietly((), || tag.into_iter().for_each(|tag| SAVER.change(|own| own.set_tag(&tag))));
}

/// Returns the tag of this thread's allocations. Valid until the thread sets another.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_current_tag() -> *const c_char {
    quietly(c"".as_ptr(), || SAVER.ask(|own| own.tag_text().as_ptr()))
}

macro_rules! switches {
    ($($what:literal: $set:ident $get:ident $field:ident;)*) => {$(
        #[doc = concat!("Sets, for what this thread asks for, ", $what, ".")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $set(value: bool) {
            quietly((), || SAVER.change(|own| own.$field = value));
        }

        #[doc = concat!("For what this thread asks for: ", $what, ".")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $get() -> bool {
            quietly(false, || SAVER.ask(|own| own.$field))
        }
    )*};
}

switches! {
    "whether it can be paused": tms_set_interesting_region tms_get_interesting_region interesting;
    "whether a pause saves it to host memory": tms_set_enable_cpu_backup tms_get_enable_cpu_backup cpu_backup;
    "whether a pause saves it to a file": tms_set_enable_disk_backup tms_get_enable_disk_backup disk_backup;
}

/// Sets the kind of host memory for backups. It is pinned in either case. Once memory was allocated with `mmap`, each resume
/// frees host memory without a backup. Otherwise it stays for the next pause. Unknown words change nothing.
///
/// # Safety
/// `backend` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_set_cpu_backup_backend(backend: *const c_char) {
    // SAFETY: as this function's caller promises.
    let word = unsafe { text_of(backend) }.unwrap_or_default();
    quietly((), || match Backend::named(&word) {
        Some(backend) => SAVER.change(|own| own.backend = backend),
        None => {
            fail_aloud(ARGUMENT, &format!("'{word}' is no kind of backup: use pinned or mmap"));
        }
    });
}

/// Returns the word that [`tms_set_cpu_backup_backend`] was given. Never freed.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_cpu_backup_backend() -> *const c_char {
    quietly(Backend::Pinned, || SAVER.ask(|own| own.backend)).text().as_ptr()
}

/// Sets the directory for files of paused memory, from the next pause on. An unsuitable directory is reported on standard error,
/// and changes nothing.
///
/// # Safety
/// `dir` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_set_disk_backup_dir(dir: *const c_char) {
    // SAFETY: as this function's caller promises. What it says is kept as the thread's last error.
    let _code = unsafe { sublet_set_file_dir(dir) };
}

/// Sets how much free device memory allocations in regions must leave. An allocation that would leave less fails as out of
/// memory. Torch then frees its caches and tries again.
#[unsafe(no_mangle)]
pub extern "C" fn set_memory_margin_bytes(value: u64) {
    SAVER.set_margin(value);
}

/// Sets whether backups in host memory are kept after a resume, for [`tms_get_cpu_backup_pointer`]. They are kept until the next
/// pause of the same memory, which writes its bytes to the same place, or until that memory is freed. This applies from the next
/// resume on.
#[unsafe(no_mangle)]
pub extern "C" fn tms_set_retain_cpu_backup(retain: bool) {
    quietly((), || {
        SAVER.set_retains(retain);
        SAVER.tell(runtime::member());
    });
}

/// Returns the value that [`tms_set_retain_cpu_backup`] was given, or that of the environment.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_retain_cpu_backup() -> bool {
    quietly(false, || SAVER.retains())
}

/// Returns Sublet's tags that `tag` stands for. Null or empty stands for all that this interface made.
unsafe fn own_tags(tag: *const c_char) -> BTreeSet<String> {
    // SAFETY: as this function's caller promises.
    let tag = unsafe { text_of(tag) }.filter(|tag| !tag.is_empty());
    tags_of(tag.as_deref()).into_iter().collect()
}

/// Pauses or resumes this process's memory of `tag`. A tag without memory is a success.
unsafe fn act(tag: *const c_char, command: fn(Change) -> Command) -> c_int {
    quietly((), || SAVER.tell(runtime::member()));
    // SAFETY: as this function's caller promises.
    let tags = quietly(BTreeSet::new(), || unsafe { own_tags(tag) });
    if tags.is_empty() {
        return 0;
    }
    let change = Change { tags: Some(tags), is_own: true, ..Change::default() };
    pausing::act(|| Ok(command(change)))
}

/// Pauses the memory of `tag`, or of all tags of this interface if it is null. Returns 0 on success, also for memory that is
/// paused already. Otherwise it returns a `SUBLET_ERROR_` code, and nothing has changed.
///
/// # Safety
/// `tag` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_pause(tag: *const c_char) -> c_int {
    // SAFETY: as this function's caller promises.
    unsafe { act(tag, Command::Pause) }
}

/// Resumes memory at the same addresses; arguments and results as [`tms_pause`]. After a failure the memory is still paused, with
/// its backups kept, and this can be called again.
///
/// # Safety
/// `tag` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_resume(tag: *const c_char) -> c_int {
    // SAFETY: as this function's caller promises.
    let code = unsafe { act(tag, Command::Resume) };
    quietly((), || runtime::member().into_iter().for_each(|member| SAVER.forget_passed(member)));
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
        SAVER.tell(runtime::member());
        // SAFETY: as this function's caller promises.
        let names = tags_of(unsafe { text_of(tag) }.as_deref());
        // SAFETY: as this function's caller promises.
        unsafe { write_text(&serde_json::json!(names).to_string(), buffer, size) }
    })
}

/// Returns the address of the saved bytes of device memory: while it is paused, and after its resume if backups are kept. Valid
/// until the next pause or resume of that memory. Null when there are none, as for memory that was not saved to host memory. Null
/// also for a `size` of 0.
///
/// # Safety
/// The address is only compared.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_get_cpu_backup_pointer(address: *const u8, size: u64) -> *mut u8 {
    let range = VaRange::new(DeviceAddress(address.addr() as u64), size);
    let found = quietly(None, || SAVER.backup(runtime::member()?, range));
    found.map_or(std::ptr::null_mut(), std::ptr::NonNull::as_ptr)
}

/// Allocates for torch's pluggable allocator, with the calling thread's settings.
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
