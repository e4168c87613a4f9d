//! libibverbs: memory regions of network cards.

use std::ffi::{CStr, c_int};

use super::{found, nothing};
use sublet_interpose::interpose_library;
use sublet_interpose::library::{Description, Library};

/// The file name under which it is distributed.
pub(crate) const FILE: &CStr = c"libibverbs.so.1";

/// libibverbs, and its known copies in this process.
pub(crate) static VERBS: Library = Library::new(Description {
    prefix: "ibv_",
    landmark: c"ibv_get_device_list",
    file: FILE,
    table: TABLE,
    found,
});

interpose_library! {
    VERBS; missing = super::nothing;
    replaced in calls {
        ibv_dereg_mr;
        ibv_reg_mr;
        ibv_reg_mr_iova;
        ibv_reg_mr_iova2;
        ibv_rereg_mr;
    }
}

/// The functions instead of the library's.
mod calls {
    use std::ffi::c_uint;

    use sublet_registrations::Key;
    use sublet_registrations::registrations::NETWORK_CARD;

    use super::super::{ended, made, range_of, registered, seen};
    use super::{Function, VERBS, c_int};
    use sublet_interpose::{Pointer, instead_of};

    /// The flag of `ibv_rereg_mr` that gives the region other memory.
    const CHANGE_TRANSLATION: c_int = 1;

    instead_of! {
        VERBS, missing = std::ptr::null_mut();
        ibv_reg_mr(domain: Pointer, address: Pointer, length: usize, access: c_int) -> Pointer,
            |own| made(address, length, own, Key::Region);
        ibv_reg_mr_iova(
            domain: Pointer, address: Pointer, length: usize, card_address: u64, access: c_int
        ) -> Pointer, |own| made(address, length, own, Key::Region);
        ibv_reg_mr_iova2(
            domain: Pointer, address: Pointer, length: usize, card_address: u64, access: c_uint
        ) -> Pointer, |own| made(address, length, own, Key::Region);
    }

    instead_of! {
        VERBS, missing = libc::ENOSYS;
        /// Changes a region. If the region gets other device memory, its former memory is released.
        ibv_rereg_mr(
            region: Pointer, flags: c_int, domain: Pointer, address: Pointer, length: usize, access: c_int
        ) -> c_int, |own| {
            if flags & CHANGE_TRANSLATION == 0 {
                return own();
            }
            let key = |code: &c_int| (*code == 0).then(|| Key::Region(region.addr()));
            let range = range_of(address, length);
            seen(|member| registered(member, range, NETWORK_CARD, own, key), own)
        };
        ibv_dereg_mr(region: Pointer) -> c_int, |own| ended(Key::Region(region.addr()), own);
    }
}
