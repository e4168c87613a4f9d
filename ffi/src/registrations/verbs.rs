//! libibverbs: memory regions of network cards.

#![expect(unsafe_code, reason = "exports functions under the library's names")]

use std::ffi::{CStr, c_int};

use super::{called, found, nothing};
use sublet_interpose::interpose_library;
use sublet_interpose::library::{Description, Library};

/// The file name under which it is distributed.
pub(crate) const FILE: &CStr = c"libibverbs.so.1";

/// libibverbs, and what is known of it in this process.
pub(crate) static VERBS: Library = Library::new(Description {
    prefix: "ibv_",
    landmark: c"ibv_get_device_list",
    file: FILE,
    table: TABLE,
    found,
    called,
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
    told {}
}

/// The functions instead of the library's.
mod calls {
    use std::ffi::c_uint;

    use sublet_registrations::Key;
    use sublet_registrations::registrations::NETWORK_CARD;

    use super::super::{call_own, range_of, registered, seen};
    use super::{Function, VERBS, c_int};
    use crate::runtime;
    use sublet_interpose::Pointer;

    /// The flag of `ibv_rereg_mr` by which the region gets other memory.
    const CHANGE_TRANSLATION: c_int = 1;

    fn register(address: Pointer, length: usize, own: impl Fn() -> Pointer) -> Pointer {
        seen(
            |member| {
                let key =
                    |region: &Pointer| (!region.is_null()).then(|| Key::Region(region.addr()));
                let range = range_of(address, length);
                registered(member, range, NETWORK_CARD, &own, key)
            },
            &own,
        )
    }

    pub(super) unsafe extern "C" fn ibv_reg_mr(
        domain: Pointer,
        address: Pointer,
        length: usize,
        access: c_int,
    ) -> Pointer {
        register(address, length, || {
            call_own!(VERBS, ibv_reg_mr(domain, address, length, access))
                .unwrap_or(std::ptr::null_mut())
        })
    }

    pub(super) unsafe extern "C" fn ibv_reg_mr_iova(
        domain: Pointer,
        address: Pointer,
        length: usize,
        card_address: u64,
        access: c_int,
    ) -> Pointer {
        register(address, length, || {
            call_own!(VERBS, ibv_reg_mr_iova(domain, address, length, card_address, access))
                .unwrap_or(std::ptr::null_mut())
        })
    }

    pub(super) unsafe extern "C" fn ibv_reg_mr_iova2(
        domain: Pointer,
        address: Pointer,
        length: usize,
        card_address: u64,
        access: c_uint,
    ) -> Pointer {
        register(address, length, || {
            call_own!(VERBS, ibv_reg_mr_iova2(domain, address, length, card_address, access))
                .unwrap_or(std::ptr::null_mut())
        })
    }

    /// Changes a region. Where it gets other device memory, the memory that it had before is let go.
    pub(super) unsafe extern "C" fn ibv_rereg_mr(
        region: Pointer,
        flags: c_int,
        domain: Pointer,
        address: Pointer,
        length: usize,
        access: c_int,
    ) -> c_int {
        let own = || {
            call_own!(VERBS, ibv_rereg_mr(region, flags, domain, address, length, access))
                .unwrap_or(libc::ENOSYS)
        };
        if flags & CHANGE_TRANSLATION == 0 {
            return own();
        }
        seen(
            |member| {
                let key = |code: &c_int| (*code == 0).then(|| Key::Region(region.addr()));
                let range = range_of(address, length);
                registered(member, range, NETWORK_CARD, own, key)
            },
            own,
        )
    }

    pub(super) unsafe extern "C" fn ibv_dereg_mr(region: Pointer) -> c_int {
        let own = || call_own!(VERBS, ibv_dereg_mr(region)).unwrap_or(libc::ENOSYS);
        seen(
            |member| {
                let key = Key::Region(region.addr());
                runtime::registrations().unregister(member, key, own, |code| *code == 0)
            },
            own,
        )
    }
}
