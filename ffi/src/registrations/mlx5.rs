//! libmlx5: memory that cards of this maker are given directly.

#![expect(unsafe_code, reason = "exports functions under the library's names")]

use super::{called, found, nothing};
use sublet_interpose::interpose_library;
use sublet_interpose::library::{Description, Library};

/// libmlx5, and what is known of it in this process.
pub(crate) static MLX5: Library = Library::new(Description {
    prefix: "mlx5dv_",
    landmark: c"mlx5dv_query_device",
    file: c"libmlx5.so.1",
    table: TABLE,
    found,
    called,
});

interpose_library! {
    MLX5; missing = super::nothing;
    replaced in calls {
        mlx5dv_devx_umem_dereg;
        mlx5dv_devx_umem_reg;
        mlx5dv_devx_umem_reg_ex;
    }
    told {}
}

/// The functions instead of the library's.
mod calls {
    use std::ffi::c_int;

    use sublet_registrations::Key;
    use sublet_registrations::registrations::NETWORK_CARD;

    use super::super::{call_own, range_of, registered, seen};
    use super::{Function, MLX5};
    use crate::runtime;
    use sublet_interpose::Pointer;

    /// The beginning of `mlx5dv_devx_umem_in`, which newer libraries extend at its end.
    #[repr(C)]
    pub(super) struct UmemIn {
        address: Pointer,
        length: usize,
    }

    fn register(address: Pointer, length: usize, own: impl Fn() -> Pointer) -> Pointer {
        seen(
            |member| {
                let key =
                    |memory: &Pointer| (!memory.is_null()).then(|| Key::UserMemory(memory.addr()));
                let range = range_of(address, length);
                registered(member, range, NETWORK_CARD, &own, key)
            },
            &own,
        )
    }

    pub(super) unsafe extern "C" fn mlx5dv_devx_umem_reg(
        context: Pointer,
        address: Pointer,
        length: usize,
        access: u32,
    ) -> Pointer {
        register(address, length, || {
            call_own!(MLX5, mlx5dv_devx_umem_reg(context, address, length, access))
                .unwrap_or(std::ptr::null_mut())
        })
    }

    pub(super) unsafe extern "C" fn mlx5dv_devx_umem_reg_ex(
        context: Pointer,
        memory: *const UmemIn,
    ) -> Pointer {
        let own = || {
            call_own!(MLX5, mlx5dv_devx_umem_reg_ex(context, memory))
                .unwrap_or(std::ptr::null_mut())
        };
        // SAFETY: the caller's structure, which the library reads too; null is refused by it.
        match unsafe { memory.as_ref() } {
            Some(memory) => register(memory.address, memory.length, own),
            None => own(),
        }
    }

    pub(super) unsafe extern "C" fn mlx5dv_devx_umem_dereg(memory: Pointer) -> c_int {
        let own = || call_own!(MLX5, mlx5dv_devx_umem_dereg(memory)).unwrap_or(libc::ENOSYS);
        seen(
            |member| {
                let key = Key::UserMemory(memory.addr());
                runtime::registrations().unregister(member, key, own, |code| *code == 0)
            },
            own,
        )
    }
}
