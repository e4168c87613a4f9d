//! The functions of regions, which give memory its tag.

#![expect(unsafe_code, reason = "exports the C interface")]

use std::ffi::{c_char, c_int};

use tenants::region::{self, RegionError};
use vmm_pool::Contents;
use vmm_pool::driver::DeviceOrdinal;

use super::pausing::{code_of, text};
use crate::bindings;
use crate::last_call::{ARGUMENT, answered, fail, guarded};

/// A function that begins a region, on one thread or for all.
type Begin = fn(&str, Contents, Option<DeviceOrdinal>) -> Result<(), RegionError>;

/// Returns the contents for a value of the header, and whether the caller agrees to run without the tag.
fn contents_of(value: c_int) -> Option<(Contents, bool)> {
    let value = u32::try_from(value).ok()?;
    let contents = match value & !bindings::SUBLET_RUNS_WITHOUT {
        bindings::SUBLET_CONTENTS_KEEP => Contents::Keep,
        bindings::SUBLET_CONTENTS_DISCARD => Contents::Discard,
        bindings::SUBLET_CONTENTS_FILE => Contents::File,
        _ => return None,
    };
    Some((contents, value & bindings::SUBLET_RUNS_WITHOUT != 0))
}

/// # Safety
/// `tag` is null or a terminated string.
pub(super) unsafe fn tag_of<'a>(tag: *const c_char) -> Result<&'a str, c_int> {
    if tag.is_null() {
        return Err(fail(ARGUMENT, "a region needs a tag"));
    }
    // SAFETY: as this function's caller promises.
    unsafe { text(tag, "a region's tag") }
}

unsafe fn begin(how: Begin, tag: *const c_char, contents: c_int, device: c_int) -> c_int {
    code_of(|| {
        // SAFETY: as this function's caller promises.
        let tag = unsafe { tag_of(tag) }?;
        let (contents, runs_without) = contents_of(contents).ok_or_else(|| {
            fail(ARGUMENT, &format!("{contents} is no SUBLET_CONTENTS_ value: use 0, 1 or 2"))
        })?;
        let device = match device {
            -1 => None,
            0.. => Some(DeviceOrdinal(device)),
            _ => return Err(fail(ARGUMENT, &format!("{device} is no device: -1 is every device"))),
        };
        Ok(answered(how(tag, contents, device).inspect(|()| {
            if runs_without {
                region::agree_to_run_without(tag);
            }
        })))
    })
}

/// Begins a region on this thread, for memory of every device.
///
/// # Safety
/// `tag` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_region_begin(tag: *const c_char, contents: c_int) -> c_int {
    // SAFETY: as this function's caller promises.
    unsafe { begin(region::begin, tag, contents, -1) }
}

/// Begins a region on this thread, for memory of one device.
///
/// # Safety
/// `tag` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_region_begin_on(
    tag: *const c_char,
    contents: c_int,
    device: c_int,
) -> c_int {
    // SAFETY: as this function's caller promises.
    unsafe { begin(region::begin, tag, contents, device) }
}

/// Begins a part of this thread's work to which no region applies.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_region_begin_none() -> c_int {
    guarded(|| answered(region::begin_none()))
}

/// Ends the part or region that began last on this thread.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_region_end() -> c_int {
    guarded(|| answered(region::end()))
}

/// Begins a region for all threads that have none of their own.
///
/// # Safety
/// `tag` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_region_begin_all_threads(
    tag: *const c_char,
    contents: c_int,
    device: c_int,
) -> c_int {
    // SAFETY: as this function's caller promises.
    unsafe { begin(region::begin_everywhere, tag, contents, device) }
}

/// Ends the region for all threads.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_region_end_all_threads() -> c_int {
    guarded(|| answered(region::end_everywhere()))
}
