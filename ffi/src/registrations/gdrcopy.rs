//! libgdrapi: device memory that is mapped for the CPU.

#![expect(unsafe_code, reason = "exports functions under the library's names")]

use std::ffi::CStr;

use super::{found, no_library};
use sublet_interpose::interpose_library;
use sublet_interpose::library::{Description, Library};

/// The file name under which it is distributed.
pub(crate) const FILE: &CStr = c"libgdrapi.so.2";

/// libgdrapi, and its known copies in this process.
pub(crate) static GDRCOPY: Library = Library::new(Description {
    prefix: "gdr_",
    landmark: c"gdr_open",
    file: FILE,
    table: TABLE,
    found,
});

interpose_library! {
    GDRCOPY; missing = super::no_library;
    replaced in calls {
        gdr_close;
        gdr_pin_buffer;
        gdr_pin_buffer_v2;
        gdr_unpin_buffer;
    }
}

/// The functions instead of the library's.
mod calls {
    use std::ffi::{c_int, c_ulong};

    use sublet_registrations::Key;
    use sublet_registrations::registrations::GDRCOPY as REASON;

    use super::super::{ended, range_of, registered, seen};
    use super::{Function, GDRCOPY};
    use crate::runtime;
    use sublet_interpose::{Pointer, instead_of};

    fn pin(
        context: Pointer,
        address: c_ulong,
        length: usize,
        handle: *const c_ulong,
        own: impl Fn() -> c_int,
    ) -> c_int {
        seen(
            |member| {
                let key = |code: &c_int| {
                    // SAFETY: the library has just written the caller's out-pointer, since it succeeded.
                    let handle = || unsafe { handle.read() };
                    (*code == 0).then(|| Key::GdrCopy { context: context.addr(), handle: handle() })
                };
                let start = std::ptr::without_provenance_mut(
                    usize::try_from(address).unwrap_or(usize::MAX),
                );
                let range = range_of(start, length);
                registered(member, range, REASON, &own, key)
            },
            &own,
        )
    }

    instead_of! {
        GDRCOPY, missing = libc::ENOSYS;
        gdr_pin_buffer(
            context: Pointer, address: c_ulong, length: usize, token: u64, space: u32, handle: *mut c_ulong
        ) -> c_int, |own| pin(context, address, length, handle, own);
        gdr_pin_buffer_v2(
            context: Pointer, address: c_ulong, length: usize, flags: u32, handle: *mut c_ulong
        ) -> c_int, |own| pin(context, address, length, handle, own);
        gdr_unpin_buffer(context: Pointer, handle: c_ulong) -> c_int,
            |own| ended(Key::GdrCopy { context: context.addr(), handle }, own);
        gdr_close(context: Pointer) -> c_int, |own| {
            let done = |code: &c_int| *code == 0;
            let end = |member| {
                runtime::REGISTRATIONS.unregister_all(member, context.addr(), own, done)
            };
            seen(end, own)
        };
    }
}
